"""Residuals of codecs in merges of local SGD: law 6 where shares, batches or the set of ranks change between merges."""

from dataclasses import replace

import pytest
import torch
from torch import nn

import hvd_hetero.torch as hvd
from hvd_hetero.engine.local import World
from hvd_hetero.optimizers.control import Announcement
from hvd_hetero.optimizers.equal_weights import EqualWeights

WHOLE = 8
EVERY_STEP = hvd.LocalSGD(round_steps=1, bound_rounds=0, warmup_steps=0)


def gradient_of(rank):
    return torch.randn(64, 64, generator=torch.Generator().manual_seed(rank)).double()


def optimizer_of(weight, balancer, density, *, compression=None, weights="samples"):
    return hvd.DistributedOptimizer(
        torch.optim.SGD([weight], lr=1.0), balancer=balancer, strategy=replace(EVERY_STEP, weights=weights),
        compression=compression or hvd.Compression.topk(density, warmup_steps=0),
    )  # fmt: skip


@pytest.mark.parametrize(("change", "weights"), [
    ("plan", "samples"), ("short batch", "samples"), ("optimizer", "samples"), ("short batch", "fednova"),
    ("plan", "fednova"),
    ("optimizer", "fednova"),
])  # fmt: skip
def test_a_residual_moves_the_model_as_far_whatever_weighs_the_next_contribution(change, weights):
    """All ranks have the same gradient in each step, so that the model and the residuals together move by their sum."""

    def program(engine):
        torch.set_num_threads(1)
        weight = nn.Parameter(torch.zeros(64, 64).double())
        balancer = hvd.Balancer(WHOLE, engine=engine, shares=None, adaptive=False)
        optimizer = optimizer_of(weight, balancer, density=0.01, weights=weights)
        used = []
        for step in range(10):
            share = balancer.deal(step).shares[engine.rank]
            used.append(share)
            short = change == "short batch" and step == 5
            balancer.begin(share - 1 if short else share)
            if change == "plan" and engine.rank == 0 and step == 3:
                balancer.planner.announcement = Announcement(
                    version=1, shares=(6, 2), reason="", predicted_step_s=0.0, strategy="synchronous"
                )
            if change == "optimizer" and step == 5:
                optimizer.merge()
                optimizer = optimizer_of(weight, balancer, density=0.01, weights=weights)
            optimizer.zero_grad()
            (weight * gradient_of(0)).sum().backward()
            optimizer.step()
        optimizer.merge()
        (keeper,) = balancer.keepers.named.values()
        (((kept,),), unit) = keeper.residuals()["merges"]
        return weight.detach().reshape(-1), kept * unit, used

    (moved, kept, used), (_, others, _) = World(2).run(program)
    assert set(used) == ({4, 6} if change == "plan" else {4})
    assert kept.abs().max() > 1.0
    assert (moved + kept + others + 10 * gradient_of(0).reshape(-1)).abs().max() < 1e-9


@pytest.mark.parametrize("make", [
    lambda engine: hvd.Balancer(WHOLE * engine.size, engine=engine, adaptive=False), EqualWeights],
    ids=["balancer", "none"])  # fmt: skip
def test_a_residual_moves_the_model_as_far_on_other_ranks(make):
    """Two ranks, whose codec keeps most of a gradient, and a third that joins; the global batch grows with them."""

    def trained(engine, steps, kept=None):
        torch.set_num_threads(1)
        weight, balancer = nn.Parameter(torch.zeros(64, 64).double()), make(engine)
        optimizer = optimizer_of(weight, balancer, density=0.3)
        (keeper,) = balancer.keepers.named.values()
        if kept is not None and engine.rank < len(kept):
            keeper.add_residuals(kept[engine.rank])
        for _ in range(steps):
            optimizer.zero_grad()
            balancer.begin(WHOLE if isinstance(balancer.batch, int) else 1)
            (weight * gradient_of(engine.rank) * float(kept is None)).sum().backward()
            optimizer.step()
        optimizer.merge()
        return weight.detach().clone(), keeper.residuals()

    two = World(2).run(lambda engine: trained(engine, 1))
    three = World(3).run(lambda engine: trained(engine, 6, [kept for _, kept in two]))
    whole = (gradient_of(0) + gradient_of(1)) / 2
    assert (two[0][0] + whole).norm() > 0.1 * whole.norm(), "much is kept back"
    assert (two[0][0] + three[0][0] + whole).norm() <= 1e-12 * whole.norm()


class Linear(torch.utils.data.Dataset):
    """Samples whose gradients are what they are, whatever the parameters."""

    def __init__(self, length):
        self.gradients = torch.randn(length, 64, 64, generator=torch.Generator().manual_seed(0)).double() + 0.5

    def __len__(self):
        return len(self.gradients)

    def __getitem__(self, index):
        return self.gradients[index]


@pytest.mark.parametrize("compression", [None, hvd.Compression.int8], ids=["topk", "int8"])
@pytest.mark.parametrize(("shares", "rest"), [
    ((8, 8), 9), ((14, 2), 4), ((14, 2), 13), ((4, 4, 4), 7), ((20, 11, 1), 9), ((8, 0, 7), 4)
])  # fmt: skip
def test_what_a_short_last_batch_leaves_and_takes_is_of_its_own_weight(shares, rest, compression):
    """A loader knows how many samples all ranks have in it; a rank's part of them is rounded, and may be none."""
    data, batches = Linear(3 * sum(shares) + rest), {}

    def program(engine):
        torch.set_num_threads(1)
        weight = nn.Parameter(torch.zeros(64, 64).double())
        balancer = hvd.Balancer(sum(shares), shares=shares, min_share=0, adaptive=False, engine=engine)
        optimizer = optimizer_of(weight, balancer, density=0.1, compression=compression)
        loader = hvd.BalancedDataLoader(data, balancer=balancer)
        for _ in range(4):
            for gradients in loader:
                batches.setdefault(balancer.step, []).extend(gradients)
                optimizer.zero_grad()
                if len(gradients):
                    (weight * gradients).sum((1, 2)).mean().backward()
                optimizer.step()
        optimizer.merge()
        (keeper,) = balancer.keepers.named.values()
        (((kept,),), unit) = keeper.residuals()["merges"]
        return weight.detach().reshape(-1), torch.zeros(64 * 64) if kept is None else kept * unit

    ended = World(len(shares)).run(program)
    due = sum(torch.stack(each).mean(0) for each in batches.values()).reshape(-1)
    torch.testing.assert_close(ended[0][0] + sum(kept for _, kept in ended), -due, rtol=1e-9, atol=1e-9)
