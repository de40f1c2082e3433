"""Each batch of a loader is used before the next begins, or a script is told."""

import copy
import warnings
from itertools import cycle, islice

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

pytest.importorskip("horovod.torch", reason="build it with hvd-hetero build-horovod")

import hvd_hetero.torch as hvd
from hvd_hetero.engine.local import SoloEngine, World
from hvd_hetero.optimizers.batch_order import BatchOrder
from hvd_hetero.optimizers.dealer import Dealer

WHOLE, LENGTH, EPOCHS, SHARES = 8, 20, 3, (5, 2, 1)  # the third batch of an epoch is short
MODEL = nn.Linear(4, 3).double()


def make_data():
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(LENGTH, 4, generator=generator, dtype=torch.float64)
    return TensorDataset(x, torch.randint(0, 3, (LENGTH,), generator=generator))


def ahead(batches):
    """Each batch when the one after it is loaded, as a prefetcher."""
    batches = iter(batches)
    batch = next(batches, None)
    while batch is not None:
        following = next(batches, None)
        yield batch
        batch = following


def in_order(loader, train):
    for batch in loader:
        train(batch)


def in_advance(loader, train):
    for batch in ahead(loader):
        train(batch)


def in_pairs(loader, train):
    other = hvd.BalancedDataLoader(make_data(), balancer=loader.balancer)
    for batch, _ in zip(loader, other, strict=True):
        train(batch)


def after_looking(loader, train):
    for _ in loader:  # an evaluation, and one that is left in the middle
        pass
    for _, _ in zip(range(2), loader, strict=False):
        pass
    in_order(loader, train)


def in_pairs_of_two_balancers(loader, train):
    other = hvd.BalancedDataLoader(make_data(), balancer=hvd.Balancer(WHOLE // 2, engine=SoloEngine()))
    for batch, _ in zip(loader, other, strict=False):
        train(batch)


def over_and_over(loader, train):
    for batch in islice(cycle(loader), 2 * len(loader)):
        train(batch)


def with_a_last_one_of_its_own(loader, train):
    in_order(loader, train)
    loader.balancer.begin(WHOLE)
    train(next(iter(DataLoader(make_data(), batch_size=WHOLE))))


def looking_in_between(loader, train, balancer=None):
    other = hvd.BalancedDataLoader(make_data(), balancer=balancer or loader.balancer)
    for index, batch in enumerate(loader):
        train(batch)
        for _ in other if index else zip(range(2), other, strict=False):  # to its end, and left in the middle
            pass


def looking_with_another_balancer(loader, train):
    looking_in_between(loader, train, hvd.Balancer(WHOLE // 2, engine=SoloEngine()))


def with_some_left_out(loader, train):
    for index, batch in enumerate(loader):
        if index:
            train(batch)


@pytest.mark.parametrize(
    "loop, told",
    [
        (in_order, None), (after_looking, None), (looking_in_between, None), (with_a_last_one_of_its_own, None),
        (looking_with_another_balancer, None), (in_pairs_of_two_balancers, "another balancer"),
        (in_advance, "before the next"), (in_pairs, "before the next"), (with_some_left_out, "before the next"),
        (over_and_over, "itertools.cycle"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("by_hand", [False, True])
def test_a_batch_that_was_not_used_is_told_once(loop, told, by_hand):
    model, balancer = copy.deepcopy(MODEL), hvd.Balancer(WHOLE, engine=SoloEngine())
    loader = hvd.BalancedDataLoader(make_data(), balancer=balancer)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(), balancer=balancer
    )

    def train(batch):
        loss = nn.functional.cross_entropy(model(batch[0]), batch[1])
        if by_hand:
            gradients = torch.autograd.grad(loss, model.parameters())
            for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                parameter.grad = gradient
        else:
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(EPOCHS):
            loop(loader, train)
    said = [str(each.message) for each in caught if "hvd.BalancedDataLoader" in str(each.message)]
    assert len(said) == bool(told)
    assert all(told in each for each in said)


def test_a_batch_of_none_may_be_left_out():
    order = BatchOrder()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for index, samples in enumerate((4, 0, 4)):
            order.begins(samples, first=index == 0)
            if samples:
                order.passes(stranger=False)


def test_a_validation_that_is_broken_off_is_not_trained_on():
    """Where a script announces its batches itself."""
    balancer, validation = (hvd.Balancer(WHOLE, engine=SoloEngine()) for _ in range(2))
    model = copy.deepcopy(MODEL)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), balancer=balancer)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for x, _ in islice(DataLoader(make_data(), batch_size=WHOLE), 5):
            balancer.begin(len(x))
            model(x).sum().backward()
            optimizer.step()
            next(iter(hvd.BalancedDataLoader(make_data(), balancer=validation)))


@pytest.mark.parametrize("shares", [SHARES, None])
def test_batches_that_are_loaded_ahead_are_weighted_by_their_own_samples(shares):
    """As docs/pytorch.md says how; also where plans change, with shares that follow measured times."""
    data, expected = make_data(), copy.deepcopy(MODEL)
    dealer = Dealer(LENGTH, global_batch_size=WHOLE, shuffle=True, seed=0, drop_last=False)
    optimizer = torch.optim.SGD(expected.parameters(), lr=0.1, momentum=0.9)
    for epoch in range(EPOCHS):
        dealer.epoch = epoch
        for batch in dealer.batches():
            optimizer.zero_grad()
            x, y = data[torch.as_tensor(batch)]
            nn.functional.cross_entropy(expected(x), y).backward()
            optimizer.step()

    def program(engine):
        model = copy.deepcopy(MODEL)
        balancer = hvd.Balancer(WHOLE, engine=engine, shares=shares)
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), model.named_parameters(), balancer=balancer
        )
        sampler = hvd.BalancedBatchSampler(LENGTH, balancer=balancer, lookahead=1)
        for epoch in range(EPOCHS):
            sampler.set_epoch(epoch)
            for x, y in ahead(DataLoader(data, batch_sampler=sampler)):
                samples = sampler.used()
                balancer.begin(samples)
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(x[:samples]), y[:samples]).backward()
                optimizer.step()
        return [p.detach() for p in model.parameters()]

    for found in World(len(SHARES)).run(program, timeout_s=60):
        for a, b in zip(found, expected.parameters(), strict=True):
            assert (a - b).abs().max().item() <= 1e-12
