"""The torch face in the ways that scripts use it, on ranks that are threads: training equals one process's (law 2)."""

import contextlib
import copy
import gc
import io
import itertools
import pickle
import threading
import time
import weakref

import pytest
import torch
from torch import nn
from torch.utils.data import ConcatDataset, Subset, TensorDataset, random_split

pytest.importorskip("horovod.torch", reason="build it with hvd-hetero build-horovod")

import hvd_hetero.torch as hvd
from hvd_hetero.engine.local import SoloEngine, World
from hvd_hetero.engine.port import CollectiveError
from hvd_hetero.optimizers.attachment import PeerError
from hvd_hetero.optimizers.unused_balancer import UnusedBalancerCheck
from hvd_hetero.torch import reducer
from hvd_hetero.trace.reader import read

LENGTH, WHOLE = 20, 8  # the third batch of an epoch is short
SHARES = (5, 2, 1)


class Data(torch.utils.data.Dataset):
    def __init__(self, length=LENGTH, fail_at=None):
        generator = torch.Generator().manual_seed(3)
        self.x = torch.randn(length, 4, generator=generator, dtype=torch.float64)
        self.y = torch.randint(0, 3, (length,), generator=generator)
        self.fail_at = fail_at

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        if index == self.fail_at:
            raise OSError("disk on fire")
        return self.x[index], self.y[index], index


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()


def train(
    model, optimizer, loader, epochs, *, after_backward=lambda: None, scheduler=None, scaler=None, clears="before"
):
    """An ordinary training loop; the parameters that come out of it."""
    for epoch in range(epochs):
        if hasattr(loader, "set_epoch"):
            loader.set_epoch(epoch)
        for x, y, _ in loader:
            if clears == "before":
                optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y)
            (scaler.scale(loss) if scaler else loss).backward()
            after_backward()
            if scaler:
                scaler.step(optimizer)
                scaler.update()
            else:
                optimizer.step()
            if clears == "after":
                optimizer.zero_grad()
        if scheduler:
            scheduler.step()
    return [p.detach().clone() for p in model.parameters()]


class GlobalBatches:
    """What one process would see: the same global batches, whole."""

    def __init__(self, dataset):
        from hvd_hetero.optimizers.dealer import Dealer

        self.dataset = dataset
        self.dealer = Dealer(len(dataset), global_batch_size=WHOLE, shuffle=True, seed=0, drop_last=False)

    def set_epoch(self, epoch):
        self.dealer.epoch = epoch

    def __iter__(self):
        for batch in self.dealer.batches():
            yield torch.utils.data.default_collate([self.dataset[int(i)] for i in batch])


def compare(make_optimizer, *, epochs=3, extras=lambda model, optimizer: {}, wrap=lambda model: model, shares=SHARES):
    """Trains on one process and on three ranks; the worst difference between any rank's parameters and the former."""
    torch.set_num_threads(1)
    model = make_model()
    optimizer = make_optimizer(model)
    expected = train(wrap(model), optimizer, GlobalBatches(Data()), epochs, **extras(model, optimizer))
    prototype = make_model()

    def program(engine):
        model = copy.deepcopy(prototype)
        balancer = hvd.Balancer(WHOLE, engine=engine, shares=shares)
        loader = hvd.BalancedDataLoader(Data(), balancer=balancer)
        optimizer = hvd.DistributedOptimizer(make_optimizer(model), model.named_parameters(), balancer=balancer)
        return train(wrap(model), optimizer, loader, epochs, **extras(model, optimizer))

    found = World(len(shares)).run(program, timeout_s=60)
    return max((a - b).abs().max().item() for rank in found for a, b in zip(rank, expected, strict=True))


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-3)


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


@pytest.mark.parametrize("make_optimizer", [sgd, adamw])
def test_training_equals_one_process(make_optimizer):
    assert compare(make_optimizer) <= 1e-12


def test_clipping_sees_the_global_gradient():
    def clip(model, optimizer):
        return {"after_backward": lambda: nn.utils.clip_grad_norm_(model.parameters(), 0.05)}

    assert compare(sgd, extras=clip) <= 1e-12


def test_horovods_own_clipping_pattern():
    """synchronize(), clip, step() within skip_synchronize(): as Horovod's documentation has it."""

    def pattern(model, optimizer):
        if not hasattr(optimizer, "synchronize"):
            return {"after_backward": lambda: nn.utils.clip_grad_norm_(model.parameters(), 0.05)}

        def after():
            optimizer.synchronize()
            nn.utils.clip_grad_norm_(model.parameters(), 0.05)

        return {"after_backward": after}

    assert compare(sgd, extras=pattern) <= 1e-12


def test_learning_rate_schedulers_made_before_and_after_wrapping():
    def schedule(model, optimizer):
        return {"scheduler": torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)}

    assert compare(sgd, extras=schedule) <= 1e-12

    def made_before(model):
        optimizer = sgd(model)
        optimizer.scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        return optimizer

    assert compare(made_before, extras=lambda model, optimizer: {"scheduler": optimizer.scheduler}) <= 1e-12


def test_grad_scaler_unscales_the_global_gradient():
    assert compare(sgd, extras=lambda m, o: {"scaler": torch.amp.GradScaler("cpu", init_scale=2.0**10)}) <= 1e-12


def test_an_overflow_on_one_rank_skips_the_step_on_all():
    torch.set_num_threads(1)

    prototype = make_model()  # threads share torch's generator

    def program(engine):
        model = copy.deepcopy(prototype)
        balancer = hvd.Balancer(4, engine=engine, shares=(3, 1))
        optimizer = hvd.DistributedOptimizer(sgd(model), model.named_parameters(), balancer=balancer)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        before = [p.detach().clone() for p in model.parameters()]
        balancer.begin(3 if engine.rank == 0 else 1)
        loss = model(torch.ones(1, 4, dtype=torch.float64)).sum()
        scaler.scale(loss * float("inf") if engine.rank == 1 else loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return scaler.get_scale(), all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))

    assert World(2).run(program) == [(2.0, True)] * 2


def test_grad_scaler_takes_the_loss_of_a_batch_without_samples():
    """As docs/pytorch.md says: its mean is NaN, which is no overflow and counts for nothing."""
    torch.set_num_threads(1)
    prototype = make_model()

    def program(engine):
        model = copy.deepcopy(prototype)
        balancer = hvd.Balancer(4, engine=engine, shares=(4, 0), min_share=0)
        optimizer = hvd.DistributedOptimizer(sgd(model), balancer=balancer)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        balancer.begin(balancer.share)
        loss = model(torch.ones(balancer.share, 4, dtype=torch.float64)).mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return scaler.get_scale(), bool(loss.isnan()), [p.detach().clone() for p in model.parameters()]

    (scale, _, parameters), (other_scale, nothing, others) = World(2).run(program)
    assert nothing and scale == other_scale == 4.0
    assert all(torch.equal(p, other) for p, other in zip(parameters, others, strict=True))
    assert not any(torch.equal(p, before) for p, before in zip(parameters, prototype.parameters(), strict=True))


def test_compiled_models():
    # aot_eager runs the whole of torch.compile but for generating C++, which would take a minute.
    assert compare(sgd, epochs=1, wrap=lambda model: torch.compile(model, backend="aot_eager")) <= 1e-12


def test_two_optimizers_share_a_balancer():
    torch.set_num_threads(1)
    data = Data()

    def losses(first, second, x, y):
        hidden = torch.tanh(first(x))
        return nn.functional.cross_entropy(second(hidden), y), second(hidden.detach()).square().mean()

    def make():
        torch.manual_seed(0)
        return nn.Linear(4, 6).double(), nn.Linear(6, 3).double()

    def alternate(first, second, one, two, batches):
        for x, y, _ in batches:
            one.zero_grad()
            losses(first, second, x, y)[0].backward()
            one.step()
            two.zero_grad()
            losses(first, second, x, y)[1].backward()
            two.step()
        return [p.detach().clone() for p in [*first.parameters(), *second.parameters()]]

    first, second = make()
    expected = alternate(first, second, sgd(first), sgd(second), GlobalBatches(data))
    prototype = make()  # threads share torch's generator, so none of them may draw from it

    def program(engine):
        first, second = copy.deepcopy(prototype)
        balancer = hvd.Balancer(WHOLE, engine=engine, shares=SHARES)
        one = hvd.DistributedOptimizer(sgd(first), balancer=balancer)
        two = hvd.DistributedOptimizer(sgd(second), balancer=balancer)
        return alternate(first, second, one, two, hvd.BalancedDataLoader(data, balancer=balancer))

    for found in World(3).run(program, timeout_s=30):
        assert max((a - b).abs().max().item() for a, b in zip(found, expected, strict=True)) <= 1e-12


def test_step_with_a_closure_and_step_hooks_run_once():
    torch.set_num_threads(1)

    prototype = make_model()

    def program(engine):
        model, calls = copy.deepcopy(prototype), []
        balancer = hvd.Balancer(2, engine=engine)
        optimizer = hvd.DistributedOptimizer(sgd(model), balancer=balancer)
        optimizer.register_step_pre_hook(lambda *_: calls.append("pre"))
        balancer.begin(1)

        def closure():
            optimizer.zero_grad(set_to_none=False)
            loss = model(torch.ones(1, 4, dtype=torch.float64)).sum()
            loss.backward()
            return loss

        assert optimizer.step(closure) is not None
        return calls, isinstance(optimizer, torch.optim.SGD)

    assert World(2).run(program) == [(["pre"], True)] * 2


def test_a_loaded_state_survives_wrapping_and_a_wrapped_optimizer_pickles():
    model = make_model()
    optimizer = adamw(model)
    model(torch.ones(1, 4, dtype=torch.float64)).sum().backward()
    optimizer.step()

    def program(engine):
        wrapped = hvd.DistributedOptimizer(optimizer, balancer=hvd.Balancer(2, engine=engine))
        copied = pickle.loads(pickle.dumps(wrapped))
        saved = io.BytesIO()
        torch.save(wrapped.state_dict(), saved)
        return len(wrapped.state), type(copied), len(copied.state_dict()["state"])

    assert World(1).run(program) == [(4, torch.optim.AdamW, 4)]


def test_parameters_added_later_are_reduced():
    torch.set_num_threads(1)

    prototype = nn.Linear(2, 1).double(), nn.Linear(2, 1).double()

    def program(engine):
        old, new = copy.deepcopy(prototype)
        balancer = hvd.Balancer(4, engine=engine, shares=(3, 1))
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(old.parameters(), lr=0.1), balancer=balancer)
        optimizer.add_param_group({"params": new.parameters()})
        balancer.begin(3 if engine.rank == 0 else 1)
        x = torch.full((1, 2), float(engine.rank), dtype=torch.float64)
        (old(x) + new(x)).sum().backward()
        return old.weight.grad.tolist(), new.weight.grad.tolist()

    assert World(2).run(program) == [([[0.25, 0.25]], [[0.25, 0.25]])] * 2


def test_parameters_added_between_backward_and_step_are_told():
    """Their gradients would be each rank's own."""
    prototype = nn.Linear(2, 1).double(), nn.Linear(2, 1).double()

    def program(engine, how):
        old, new = copy.deepcopy(prototype)
        balancer = hvd.Balancer(4, engine=engine, shares=(3, 1), adaptive=False)
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(old.parameters(), lr=0.1), balancer=balancer)
        balancer.begin(3 if engine.rank == 0 else 1)
        x = torch.full((1, 2), float(engine.rank), dtype=torch.float64)
        (old(x) + new(x)).sum().backward()
        if how == "forgotten":
            new.zero_grad()
        if how == "kept":
            for _ in range(2):  # and then nothing of them is in the optimizer
                with pytest.raises(RuntimeError, match="before backward.. or after step"):
                    optimizer.add_param_group({"params": new.parameters()})
            odd = nn.Parameter(torch.zeros(2, dtype=torch.complex64))
            with pytest.raises(TypeError, match="real floating type"):
                optimizer.add_param_group({"params": [odd]})
            optimizer.step()
            assert len(optimizer.param_groups) == 1
            optimizer.zero_grad(), new.zero_grad()
        optimizer.add_param_group({"params": new.parameters()})
        if how == "kept":
            balancer.begin(3 if engine.rank == 0 else 1)
            (old(x) + new(x)).sum().backward()
        optimizer.step()
        return None if new.weight.grad is None else new.weight.grad.tolist()

    assert World(2).run(lambda engine: program(engine, "kept")) == [[[0.25, 0.25]]] * 2
    World(2).run(lambda engine: program(engine, "forgotten"))


def test_a_rank_whose_loader_raises_stops_all_ranks_with_the_cause():
    torch.set_num_threads(1)

    prototype = make_model()  # threads share torch's generator

    def program(engine):
        model = copy.deepcopy(prototype)
        balancer = hvd.Balancer(WHOLE, engine=engine, shares=SHARES)
        loader = hvd.BalancedDataLoader(Data(fail_at=13), balancer=balancer, shuffle=False)
        optimizer = hvd.DistributedOptimizer(sgd(model), balancer=balancer)
        return train(model, optimizer, loader, 1)

    outcome = World(3).run(program, timeout_s=20, errors="return")
    assert sorted(type(error).__name__ for error in outcome) == ["OSError", "PeerError", "PeerError"]
    failed = next(rank for rank, error in enumerate(outcome) if isinstance(error, OSError))
    for error in outcome:
        assert isinstance(error, OSError) or (isinstance(error, PeerError) and f"rank {failed}" in str(error))


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("clears", ["before", "after"])
def test_ranks_that_have_all_caught_the_error_of_a_loader_train_on(workers, clears):
    """The batch that failed, the second, is left out on all ranks; a loop over the loader then begins anew."""
    prototype, sound = make_model(), Data()

    def program(engine):
        model, data = copy.deepcopy(prototype), Data(fail_at=13)
        balancer = hvd.Balancer(WHOLE, engine=engine, shares=SHARES, adaptive=False)
        loader = hvd.BalancedDataLoader(data, balancer=balancer, shuffle=False, num_workers=workers)
        optimizer = hvd.DistributedOptimizer(sgd(model), balancer=balancer)
        with pytest.raises((OSError, PeerError)):
            train(model, optimizer, loader, 1, clears=clears)
        data.fail_at = None
        return train(model, optimizer, loader, 2, clears=clears)

    model = copy.deepcopy(prototype)
    one = sgd(model)
    batches = [(sound.x[i : i + WHOLE], sound.y[i : i + WHOLE], None) for i in range(0, LENGTH, WHOLE)]
    train(model, one, batches[:1], 1)
    expected = train(model, one, batches, 2)
    for found in World(3).run(program, timeout_s=30):
        assert max((p - q).abs().max().item() for p, q in zip(found, expected, strict=True)) <= 1e-12


@pytest.mark.parametrize("how", ["one pass", "a pass each", "one at a time", "the second first"])
def test_ranks_train_on_after_the_error_of_a_loader_with_several_optimizers(how):
    """The batch that failed, the second, is left out for all of them, wherever the others hear of it."""
    prototype = make_model(), make_model()

    def steps(models, optimizers, batches):
        for number, (x, y, _) in enumerate(batches):
            losses = [nn.functional.cross_entropy(model(x), y) for model in models]
            for optimizer in optimizers:
                optimizer.zero_grad()
            if how == "one pass":
                sum(losses).backward()
                for optimizer in optimizers:
                    optimizer.step()
            for which in () if how == "one pass" else (1, 0) if how == "the second first" else (0, 1):
                if how != "one at a time" or which == number % 2:
                    losses[which].backward()
                    optimizers[which].step()

    def program(engine):
        models, data = copy.deepcopy(prototype), Data(fail_at=13)
        balancer = hvd.Balancer(WHOLE, engine=engine, shares=SHARES, adaptive=False)
        loader = hvd.BalancedDataLoader(data, balancer=balancer, shuffle=False)
        optimizers = [hvd.DistributedOptimizer(sgd(model), balancer=balancer) for model in models]
        with pytest.raises((OSError, PeerError)):
            steps(models, optimizers, loader)
        data.fail_at = None
        for _ in range(2):
            steps(models, optimizers, loader)
        return [p.detach() for model in models for p in model.parameters()]

    models, sound = copy.deepcopy(prototype), Data()
    optimizers = [sgd(model) for model in models]
    batches = [(sound.x[i : i + WHOLE], sound.y[i : i + WHOLE], None) for i in range(0, LENGTH, WHOLE)]
    for part in (batches[:1], batches, batches):
        steps(models, optimizers, part)
    expected = [p for model in models for p in model.parameters()]
    for found in World(3).run(program, timeout_s=30):
        assert max((p - q).abs().max().item() for p, q in zip(found, expected, strict=True)) <= 1e-12


def test_who_has_failed_apart_is_told_that_it_cannot_go_on():
    """What it had a part in, with nothing, may be yet to come on the others."""
    prototype, strategy = make_model(), hvd.LocalSGD(round_steps=2, warmup_steps=0)

    def program(engine):
        model, data = copy.deepcopy(prototype), Data(fail_at=13)
        balancer = hvd.Balancer(WHOLE, engine=engine, shares=SHARES, adaptive=False)
        loader = hvd.BalancedDataLoader(data, balancer=balancer, shuffle=False)
        optimizer = hvd.DistributedOptimizer(sgd(model), balancer=balancer, strategy=strategy)
        for _ in range(2):
            with contextlib.suppress(OSError, PeerError):
                train(model, optimizer, loader, 1)

    errors = World(3).run(program, timeout_s=30, errors="return")
    assert "no further batch after a rank could not go on" in str(errors[1]), errors


def test_a_batch_that_one_rank_fails_to_load_leaves_all_ranks_alike():
    """Codecs keep what they had, rates go on from where they were, and who asks to stop just then is heard by all."""
    prototype = nn.Linear(4, 600, bias=False).double()  # codecs take it
    nn.init.zeros_(prototype.weight)
    length = 2 * WHOLE
    sound = Data(length)

    def program(engine):
        model, data = copy.deepcopy(prototype), Data(length, fail_at=13)
        balancer = hvd.Balancer(WHOLE, engine=engine, shares=SHARES, adaptive=False)
        loader = hvd.BalancedDataLoader(data, balancer=balancer, shuffle=False)
        inner = torch.optim.SGD(model.parameters(), lr=1.0)
        optimizer = hvd.DistributedOptimizer(
            inner, balancer=balancer, compression=hvd.Compression.topk(0.05, warmup_steps=0)
        )

        def step(x, factor):
            optimizer.zero_grad()
            (model(x) @ torch.arange(600.0).double()).mean().mul(factor).backward()
            optimizer.step()

        stops = []
        for _ in range(2):
            with contextlib.suppress(OSError, PeerError):
                for number, (x, *_) in enumerate(loader):
                    if engine.rank == 2 and number == 1 and data.fail_at:
                        balancer.ask_to_stop()
                    step(x, 1.0 + number)
                    stops.append(balancer.stopping)
            stops.append(balancer.stopping)
            data.fail_at = None
        for _ in range(40):  # until all is sent
            balancer.begin(SHARES[engine.rank])
            step(sound.x[: SHARES[engine.rank]], 0.0)
        return stops, model.weight.detach()

    found = World(3).run(program, timeout_s=30)
    assert all(stops == [(), (), (2,), (2,), (2,)] and torch.equal(weight, found[0][1]) for stops, weight in found)
    means = [sound.x[i : i + WHOLE].mean(0) for i in range(0, length, WHOLE)]
    due = means[0] + sum((1.0 + number) * mean for number, mean in enumerate(means))
    assert (found[0][1] + torch.arange(600.0).double()[:, None] * due).abs().max() <= 1e-9


@pytest.mark.parametrize("strategy", ["synchronous", hvd.LocalSGD(round_steps=2, warmup_steps=2, bound_rounds=0)])
def test_all_stop_after_the_same_step_where_one_rank_asks_for_it(strategy):
    torch.set_num_threads(1)
    prototype = make_model()

    def program(engine):
        model = copy.deepcopy(prototype)
        balancer = hvd.Balancer(WHOLE, engine=engine, shares=SHARES)
        optimizer = hvd.DistributedOptimizer(sgd(model), balancer=balancer, strategy=strategy)
        loader = hvd.BalancedDataLoader(Data(), balancer=balancer, shuffle=False)
        ended = []
        for _ in range(2):
            for epoch in range(9):
                loader.set_epoch(epoch)
                for x, y, _ in loader:
                    optimizer.zero_grad()
                    nn.functional.cross_entropy(model(x), y).backward()
                    optimizer.step()
                    if balancer.step % 9 == 4 and engine.rank == 1:
                        balancer.ask_to_stop()
                    if balancer.stopping:
                        break
                if balancer.stopping:
                    break
            ended.append((balancer.stopping, balancer.step))
            optimizer.merge(model)
            balancer.go_on()
        return ended

    found = World(3).run(program, timeout_s=30)
    assert found[0] == found[1] == found[2], "where all wait for every merge"
    assert [who for who, _ in found[0]] == [(1,), (1,)]
    if strategy == "synchronous":
        assert [step for _, step in found[0]] == [5, 14]


def test_who_leaves_is_known_to_all_once_they_have_come_together():
    """As a commit of an elastic job needs it, which merges first."""
    torch.set_num_threads(1)
    prototype = make_model()

    def program(engine):
        model = copy.deepcopy(prototype)
        balancer = hvd.Balancer(WHOLE, engine=engine, shares=SHARES)
        strategy = hvd.LocalSGD(round_steps=50, warmup_steps=1, merge_each_epoch=False)
        optimizer = hvd.DistributedOptimizer(sgd(model), balancer=balancer, strategy=strategy)
        train(model, optimizer, hvd.BalancedDataLoader(Data(), balancer=balancer), 2)
        if engine.rank == 1:
            balancer.leave()
        before = balancer.leaving
        optimizer.merge(model)
        return before, balancer.leaving

    assert World(3).run(program, timeout_s=30) == [((), (1,))] * 3


def test_failing_where_the_others_have_ended_hides_no_error():
    class Gone:
        def withdraw(self):
            def over():
                raise RuntimeError("the others are gone")

            return over

    balancer = hvd.Balancer(WHOLE, engine=SoloEngine())
    balancer.exchanges.attach(Gone())
    balancer.fail()
    assert balancer.departure.failed


@pytest.mark.parametrize(
    "arguments, message",
    [
        (lambda rank: {"global_batch_size": 8 + rank}, r"global_batch_size.*rank 0: 8, rank 1: 9"),
        (lambda rank: {"global_batch_size": 1}, "at least 2"),
        (lambda rank: {"global_batch_size": 0}, "at least 1"),
        (lambda rank: {"global_batch_size": 8.0} if rank else {"global_batch_size": 8}, "rank 1|integer"),
        (lambda rank: {"global_batch_size": 8, "shares": (6, 1)}, "sum of 8"),
        (lambda rank: {"global_batch_size": 8, "shares": (7, 1), "max_share": 6}, "memory"),
        (lambda rank: {"global_batch_size": 8, "max_share": 3}, "hold"),
        (lambda rank: {"global_batch_size": 8, "shares": (4, 4) if rank else (6, 2)}, "same on every rank"),
        (lambda rank: {"global_batch_size": 8, "shares": (float("nan"), 4) if rank else (4, 4)}, "rank 1|integers"),
        (lambda rank: {"global_batch_size": 8, "shares": (2**70, 4) if rank else (4, 4)}, "rank 1|integers"),
        (lambda rank: {"global_batch_size": 8, "shares": 4 if rank else (4, 4)}, "rank 1|one share for each"),
        (lambda rank: {"global_batch_size": 2**70 if rank else 8}, "rank 1|at most"),
        (lambda rank: {"global_batch_size": 8, "max_share": 2**70 if rank else 8}, "rank 1|at most"),
        (lambda rank: {"global_batch_size": 8, "adaptive": "no" if rank else False}, "adaptive: expected the same"),
    ],
)
def test_bad_arguments_raise_on_every_rank(arguments, message):
    def program(engine):
        with pytest.raises(ValueError, match=message):
            hvd.Balancer(engine=engine, **arguments(engine.rank))
        return True

    assert World(2).run(program, timeout_s=10) == [True, True]


def test_ranks_that_disagree_about_the_dataset():
    def program(engine):
        with pytest.raises(ValueError, match="dataset length.*rank 0: 20, rank 1: 21"):
            hvd.BalancedDataLoader(Data(20 + engine.rank), balancer=hvd.Balancer(8, engine=engine))
        return True

    assert World(2).run(program, timeout_s=10) == [True, True]


PARTS = {
    "a part of the data": lambda data, rank, size: TensorDataset(*(each[rank::size] for each in data.tensors)),
    "every other sample": lambda data, rank, size: Subset(data, range(rank, len(data), size)),
    "a split drawn anew": lambda data, rank, size: random_split(
        data, [14, 6], generator=torch.Generator().manual_seed(rank)
    )[0],
    "within another": lambda data, rank, size: ConcatDataset([Data(), Subset(data, [rank, 5])]),
}


@pytest.mark.parametrize("part", PARTS.values(), ids=PARTS)
def test_ranks_that_have_other_samples_each(part):
    data = TensorDataset(Data().x, Data().y)
    alike = {"all": data, "one split": part(data, 0, 2), "of no known kind": Data()}

    def program(engine):
        balancer = hvd.Balancer(8, engine=engine)
        for each in alike.values():
            hvd.BalancedDataLoader(each, balancer=balancer)
        with pytest.raises(ValueError, match="every rank needs all of it.*rank 0: .*, rank 1: "):
            hvd.BalancedDataLoader(part(data, engine.rank, 2), balancer=balancer)
        return True

    assert World(2).run(program, timeout_s=10) == [True, True]


@pytest.mark.parametrize("seed", [float("nan"), 2**70, "five"])
def test_a_seed_that_is_none_on_one_rank_alone(seed):
    def program(engine):
        with pytest.raises(ValueError, match=f"seed: expected the same.*rank 0: 5, rank 1: .*{seed}"):
            hvd.BalancedDataLoader(Data(20), balancer=hvd.Balancer(8, engine=engine), seed=seed if engine.rank else 5)
        return True

    assert World(2).run(program, timeout_s=10) == [True, True]


def test_a_dataset_smaller_than_a_global_batch():
    def program(engine):
        balancer = hvd.Balancer(8, engine=engine, shares=(5, 3))
        with pytest.raises(ValueError, match="drop_last=False"):
            hvd.BalancedDataLoader(Data(5), balancer=balancer, drop_last=True)
        batches = list(hvd.BalancedDataLoader(Data(5), balancer=balancer))
        return [index.tolist() for _, _, index in batches]

    (first,), (second,) = World(2).run(program, timeout_s=10)
    assert sorted(first + second) == list(range(5)) and len(first) == 3


def test_a_progress_bar_on_rank_0_alone(capfd):
    def program(engine):
        balancer = hvd.Balancer(WHOLE, engine=engine, shares=(5, 3))
        return len(list(hvd.BalancedDataLoader(Data(), balancer=balancer, progress=True)))

    assert World(2).run(program) == [3, 3]
    shown = capfd.readouterr().err
    assert "shares 5:3" in shown and shown.count("20/20") == 1


def test_a_run_is_traced_on_every_rank(tmp_path):
    from hvd_hetero.trace.reader import read

    torch.set_num_threads(1)
    prototype = make_model()

    def program(engine):
        model = copy.deepcopy(prototype)
        balancer = hvd.Balancer(WHOLE, engine=engine, shares=(5, 3), run=str(tmp_path))
        optimizer = hvd.DistributedOptimizer(sgd(model), balancer=balancer)
        train(model, optimizer, hvd.BalancedDataLoader(Data(), balancer=balancer), 2)
        balancer.trace.close()

    World(2).run(program)
    run = read(tmp_path)
    for rank, share in enumerate((5, 3)):
        steps = run.ranks[rank].steps
        assert [step.step for step in steps] == list(range(6))
        assert [step.samples for step in steps][:2] == [share, share]
        assert all(step.compute_s > 0 and step.bytes > 0 for step in steps)


def test_lbfgs_decides_alike_on_all_ranks():
    torch.set_num_threads(1)
    data = Data(WHOLE)

    def minimise(model, optimizer, x, y, begin):
        def closure():
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            return loss

        begin()
        optimizer.step(closure)
        return [p.detach().clone() for p in model.parameters()]

    def lbfgs(model):
        return torch.optim.LBFGS(model.parameters(), line_search_fn="strong_wolfe", max_iter=15)

    one = make_model()
    expected = minimise(one, lbfgs(one), data.x, data.y, lambda: None)
    prototype = make_model()

    def program(engine):
        model = copy.deepcopy(prototype)
        balancer = hvd.Balancer(WHOLE, engine=engine, shares=SHARES)
        optimizer = hvd.DistributedOptimizer(lbfgs(model), balancer=balancer)
        start = sum(SHARES[: engine.rank])
        mine = slice(start, start + SHARES[engine.rank])
        return minimise(model, optimizer, data.x[mine], data.y[mine], lambda: balancer.begin(SHARES[engine.rank]))

    for found in World(3).run(program, timeout_s=30):
        assert max((a - b).abs().max().item() for a, b in zip(found, expected, strict=True)) <= 1e-8


def test_a_scheduler_made_before_wrapping_lives_through_load_state_dict():
    def program(engine):
        model = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        wrapped = hvd.DistributedOptimizer(optimizer, balancer=hvd.Balancer(2, engine=engine))
        wrapped.load_state_dict(wrapped.state_dict())
        wrapped.step()
        scheduler.step()
        return wrapped.param_groups[0]["lr"]

    assert World(1).run(program) == [0.5]


@pytest.mark.parametrize("stop", [1, 2, 3])
def test_a_loader_resumed_in_the_middle_or_at_the_end_of_an_epoch(stop):
    """20 samples, global batch 8: three batches an epoch. Two epochs, stopped after batch `stop` of the first."""

    def epoch(loader):
        return [index.tolist() for _, _, index in loader]

    def program(engine):
        def make():
            return hvd.BalancedDataLoader(Data(), balancer=hvd.Balancer(WHOLE, engine=engine, shares=SHARES))

        whole = make()
        expected = epoch(whole) + epoch(whole)
        first, seen = make(), []
        for _, _, index in first:
            seen.append(index.tolist())
            if len(seen) == stop:
                state = first.state_dict()
                break
        resumed = make()
        resumed.load_state_dict(state)
        resumed.set_epoch(state["epoch"])
        seen += epoch(resumed)
        seen += epoch(resumed)
        return seen == expected

    assert World(3).run(program) == [True] * 3


TWO_LAYERS = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))


def test_parameters_that_are_thawed_in_place_are_told():
    """Their gradients would be each rank's own, and no hash would show it. A new optimizer takes them."""

    def program(engine):
        model, balancer = copy.deepcopy(TWO_LAYERS), hvd.Balancer(4, engine=engine)
        model[0].requires_grad_(False)

        def wrapped():
            return hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), balancer=balancer)

        def step(optimizer):
            balancer.begin(2)
            model(torch.ones(2, 3)).sum().backward()
            optimizer.step()

        first = wrapped()
        step(first)
        model[0].requires_grad_(True)
        with pytest.raises(RuntimeError, match="Received: 2 that have come to since"):
            step(first)
        step(wrapped())

    World(2).run(program)


def test_a_layer_that_is_frozen_stays_as_it_is():
    """As in one process: not even the optimizer's momentum moves it."""

    def program(engine):
        model, balancer = copy.deepcopy(TWO_LAYERS), hvd.Balancer(4, engine=engine)
        inner = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        optimizer = hvd.DistributedOptimizer(inner, balancer=balancer)
        kept = []
        for step in range(4):
            if step == 2:
                model[0].requires_grad_(False)
                kept = [p.detach().clone() for p in model[0].parameters()]
            optimizer.zero_grad()
            balancer.begin(2)
            model(torch.ones(2, 3)).sum().backward()
            optimizer.step()
        return all(torch.equal(p, before) for p, before in zip(model[0].parameters(), kept, strict=True))

    assert World(2).run(program) == [True, True]


@pytest.mark.parametrize("how", [lambda grad: grad, lambda grad: grad.view(-1)])
def test_gradients_that_a_script_keeps_stay_as_they_are(how):
    prototype = make_model()

    def program(engine):
        model = copy.deepcopy(prototype)
        balancer = hvd.Balancer(4, engine=engine, adaptive=False)
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(), balancer=balancer
        )
        kept, copies, places = [], [], []
        for step in range(4):
            optimizer.zero_grad()
            balancer.begin(4)
            (model(torch.ones(4, 4).double()) * (step + 1)).sum().backward()
            places.append(model[0].weight.grad.data_ptr())
            if step < 2:
                kept.append([how(p.grad) for p in model.parameters()])
                copies.append([how(p.grad).clone() for p in model.parameters()])
            optimizer.step()
        assert all(torch.equal(a, b) for k, c in zip(kept, copies, strict=True) for a, b in zip(k, c, strict=True))
        assert not torch.equal(kept[0][0], kept[1][0])
        return places

    places = World(1).run(program)[0]
    assert len(set(places)) == 3, "other memory where gradients were kept, the same where they were not"


def test_a_gradient_that_a_script_keeps_stays_where_another_stays_in_place():
    def program(engine):
        weight, bias = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
        balancer = hvd.Balancer(4, engine=engine, adaptive=False)
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight, bias], lr=0.1), balancer=balancer)
        for factor in (1.0, 5.0):
            balancer.begin(2)
            (factor * (weight + bias)).sum().backward()
            if factor == 1.0:
                kept, weight.grad = weight.grad, None  # and not the bias's
            optimizer.step()
        return kept.tolist(), weight.grad.tolist(), bias.grad.tolist()

    assert World(2).run(program) == [([1.0] * 3, [5.0] * 3, [6.0] * 3)] * 2


@pytest.mark.parametrize("options", [{}, {"op": hvd.Sum}, {"compression": hvd.Compression.int8}, {"strategy": "local"}])
def test_nothing_outlives_an_optimizer_its_model_and_its_balancer(options):
    """As folds and searches make one after the other."""
    model = make_model()
    balancer = hvd.Balancer(WHOLE, engine=SoloEngine())
    optimizer = hvd.DistributedOptimizer(sgd(model), balancer=balancer, **options)
    for _ in range(2):
        balancer.begin(WHOLE)
        optimizer.zero_grad()
        model(torch.ones(WHOLE, 4, dtype=torch.float64)).sum().backward()
        optimizer.step()
    optimizer.merge()
    lives = [weakref.ref(each) for each in (model[0].weight, optimizer, balancer)]
    del model, optimizer, balancer
    gc.collect()
    assert [each() for each in lives] == [None] * 3


def test_a_schedule_goes_on_where_another_optimizer_took_over_and_a_state_was_loaded():
    model = make_model()
    balancer = hvd.Balancer(WHOLE, engine=SoloEngine())
    first = hvd.DistributedOptimizer(sgd(model), balancer=balancer)
    schedule = torch.optim.lr_scheduler.StepLR(first, 1, gamma=0.5)
    optimizer = hvd.DistributedOptimizer(first, balancer=balancer)  # as when layers were thawed
    rates = []
    for step in range(3):
        balancer.begin(WHOLE)
        model(torch.ones(WHOLE, 4, dtype=torch.float64)).sum().backward()
        optimizer.step()
        if step == 1:
            optimizer.load_state_dict(optimizer.state_dict())
        schedule.step()
        rates.append(optimizer.param_groups[0]["lr"])
    assert rates == [0.05, 0.025, 0.0125]
    assert len(optimizer.state) == 4 and "momentum_buffer" in optimizer.state[model[0].weight]


@pytest.mark.parametrize("how", ["a type", "a group", "ranks", "memory"])
def test_an_optimizer_that_was_not_made_leaves_the_balancer_as_it_was(how, monkeypatch):
    prototype, make = make_model(), reducer.Layouts

    def out_of_memory(parameters, **options):
        if len(parameters) == 2:
            raise MemoryError
        return make(parameters, **options)

    monkeypatch.setattr(reducer, "Layouts", out_of_memory if how == "memory" else make)

    def program(engine):
        model = copy.deepcopy(prototype)
        balancer = hvd.Balancer(WHOLE, engine=engine, shares=SHARES)
        odd = nn.Parameter(torch.zeros(2, dtype=torch.complex64 if how == "a type" else torch.float32))
        parameters = [nn.Parameter(torch.zeros(2).double()), odd]
        wrong = {"a group": {"groups": [parameters]}, "ranks": {"process_set": hvd.ProcessSet([0])}}.get(how, {})
        with pytest.raises((TypeError, ValueError, MemoryError)):
            hvd.DistributedOptimizer(torch.optim.SGD(parameters, lr=0.1), balancer=balancer, **wrong)
        optimizer = hvd.DistributedOptimizer(sgd(model), balancer=balancer)
        return train(model, optimizer, hvd.BalancedDataLoader(Data(), balancer=balancer), 1)

    found = World(3).run(program)
    assert all(torch.equal(p, q) for p, q in zip(found[0], found[2], strict=True))


def test_the_trace_of_several_optimizers_has_what_each_waited_for_and_sent(tmp_path):
    def program(engine):
        small, large = nn.Linear(2, 1), nn.Linear(2, 1000)
        for model in (small, large):
            for parameter in model.parameters():
                nn.init.ones_(parameter)
        balancer = hvd.Balancer(2, engine=engine, adaptive=False, run=str(tmp_path))
        optimizers = [hvd.DistributedOptimizer(torch.optim.SGD(each.parameters(), lr=0.0), balancer=balancer)
                      for each in (small, large)]  # fmt: skip
        for _ in range(6):
            balancer.begin(1)
            for model, optimizer in zip((small, large), optimizers, strict=True):
                if model is large and engine.rank:
                    time.sleep(0.1)
                optimizer.zero_grad()
                model(torch.ones(1, 2)).sum().backward()
                optimizer.step()
        balancer.trace.close()

    World(2).run(program)
    steps = read(tmp_path).ranks[0].steps[1:]
    assert min(step.bytes for step in steps) > 4 * 3000
    assert min(step.wait_s for step in steps) > 0.05, "rank 0 waits in the second optimizer's exchange"


def test_gradients_are_reduced_as_long_as_the_optimizer_that_a_script_made_lives():
    def program(engine):
        weight = nn.Parameter(torch.ones(1))
        plain = torch.optim.SGD([weight], lr=0.1)
        balancer = hvd.Balancer(2, engine=engine)
        hvd.DistributedOptimizer(plain, balancer=balancer)
        gc.collect()
        balancer.begin(1)
        (weight * (1.0 + engine.rank)).sum().backward()
        plain.step()
        return weight.item()

    assert World(2).run(program) == [pytest.approx(0.85)] * 2


def test_a_thread_that_deals_ahead_goes_on_where_an_exchange_failed():
    def program(engine):
        weight = nn.Parameter(torch.ones(1))
        balancer = hvd.Balancer(2, engine=engine)
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=0.1), balancer=balancer)
        balancer.begin(1)
        weight.sum().backward()
        optimizer.step()
        if engine.rank:
            raise OSError("gone")
        balancer.begin(1)
        over = threading.Event()

        def deal():  # ever further, until it has to wait for the answer of this step
            for step in itertools.count():
                if over.is_set():
                    break
                balancer.deal(step)

        dealing = threading.Thread(target=deal, daemon=True)
        weight.register_hook(lambda gradient: dealing.start())
        with pytest.raises(CollectiveError):
            weight.sum().backward()
        over.set()
        dealing.join(10)
        assert not dealing.is_alive()

    with pytest.raises(OSError, match="gone"):
        World(2).run(program)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("inner", ["whole", "one batch"])
def test_a_loop_within_a_loop_over_the_same_loader_is_an_error_on_all_ranks(workers, inner):
    def program(engine):
        loader = hvd.BalancedDataLoader(
            Data(), balancer=hvd.Balancer(WHOLE, engine=engine, shares=SHARES, adaptive=False), num_workers=workers
        )
        list(loader), next(iter(loader))  # one after the other is no harm
        with pytest.raises(RuntimeError, match="one iteration at a time"):
            for _ in loader:
                list(loader) if inner == "whole" else next(iter(loader))
        return len(list(loader))

    assert World(3).run(program, timeout_s=60) == [3] * 3


def test_a_loop_within_a_loop_over_ones_own_loader_is_an_error():
    balancer = hvd.Balancer(WHOLE, engine=SoloEngine())
    sampler = hvd.BalancedBatchSampler(LENGTH, balancer=balancer)
    loader = torch.utils.data.DataLoader(Data(), batch_sampler=sampler)
    with pytest.raises(RuntimeError, match="one iteration at a time"):
        for _ in loader:
            balancer.begin(sampler.used())
            next(iter(loader))


def test_a_loader_that_saves_its_own_place_goes_on_after_the_batch_that_it_has_dealt():
    """As torchdata's StatefulDataLoader, whose workers load ahead of their use."""

    def made():
        balancer = hvd.Balancer(WHOLE, engine=SoloEngine())
        return hvd.BalancedBatchSampler(LENGTH, balancer=balancer, lookahead=2)

    sampler, again = made(), made()
    dealing, expected = iter(sampler), list(made())
    for _ in range(3):
        next(dealing)
    sampler.used()
    states = sampler.state_dict(), dealing.state_dict()
    again.load_state_dict(states[0])
    goes_on = iter(again)
    goes_on.load_state_dict(states[1])
    assert list(goes_on) == expected[3:]
    assert list(dealing) == expected[3:], "the state has changed nothing"


def test_modules_of_horovods_are_there_by_their_names():
    assert issubclass(hvd.compression.FP16Compressor, hvd.compression.Compressor)
    assert hvd.mpi_ops.allreduce is hvd.allreduce and hvd.elastic.sampler.ElasticSampler is hvd.elastic.ElasticSampler
    assert callable(hvd.functions.broadcast_object)


def test_a_schedule_of_the_inner_optimizer_goes_on_where_a_state_was_loaded_into_both():
    model = make_model()
    inner = sgd(model)
    balancer = hvd.Balancer(WHOLE, engine=SoloEngine())
    optimizer = hvd.DistributedOptimizer(inner, balancer=balancer)
    inner.load_state_dict(inner.state_dict())
    optimizer.load_state_dict(optimizer.state_dict())
    schedule = torch.optim.lr_scheduler.StepLR(inner, 1, gamma=0.5)
    balancer.begin(WHOLE)
    model(torch.ones(WHOLE, 4, dtype=torch.float64)).sum().backward()
    optimizer.step()
    schedule.step()
    assert optimizer.param_groups[0]["lr"] == 0.05


def test_a_group_may_have_a_frozen_parameter_of_another_type():
    weight, frozen = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2).double(), requires_grad=False)
    balancer = hvd.Balancer(WHOLE, engine=SoloEngine())
    plain = torch.optim.SGD([weight, frozen], lr=0.1)
    hvd.DistributedOptimizer(plain, balancer=balancer, groups=[[weight, frozen]])


def test_a_balancer_whose_epoch_is_over_is_not_forgotten():
    """As one that deals a validation, beside training without a balancer."""
    validation = hvd.Balancer(WHOLE, engine=SoloEngine())
    loader = hvd.BalancedDataLoader(Data(), balancer=validation)
    without = UnusedBalancerCheck()
    list(loader)
    without.check()
    without = UnusedBalancerCheck()
    next(iter(loader))
    with pytest.raises(RuntimeError, match="Pass balancer="):
        without.check()


def test_a_balancer_is_forgotten_also_where_what_reduces_is_made_within_the_loop():
    """As a tape is."""
    batches = iter(hvd.BalancedDataLoader(Data(), balancer=hvd.Balancer(WHOLE, engine=SoloEngine())))
    next(batches)
    without = UnusedBalancerCheck()
    without.check()
    next(batches)
    with pytest.raises(RuntimeError, match="Pass balancer="):
        without.check()


def test_a_validation_that_is_broken_off_later_has_forgotten_nothing():
    without = UnusedBalancerCheck()
    for _ in range(2):
        without.check()
    next(iter(hvd.BalancedDataLoader(Data(), balancer=hvd.Balancer(WHOLE, engine=SoloEngine()))))
    without.check()


class Holding:
    """An optimizer that holds another one, and is none of PyTorch's."""

    def __init__(self, base):
        self.base = base

    param_groups = property(lambda self: self.base.param_groups)
    state = property(lambda self: self.base.state)

    def zero_grad(self, set_to_none=True):
        self.base.zero_grad(set_to_none)

    def state_dict(self):
        return self.base.state_dict()

    def load_state_dict(self, state):
        self.base.load_state_dict(state)

    def step(self, closure=None):
        return self.base.step(closure)


def test_an_optimizer_that_holds_another_loads_a_state():
    def program(engine):
        balancer = hvd.Balancer(4, shares=[3, 1], adaptive=False, engine=engine)
        model = nn.Linear(2, 1)
        inner = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        optimizer = hvd.DistributedOptimizer(Holding(inner), model.named_parameters(), balancer=balancer)
        balancer.begin(balancer.share)
        model(torch.ones(balancer.share, 2)).mean().backward()
        optimizer.step()
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        return optimizer.state is inner.state and len(inner.state) == 2

    assert all(World(2).run(program))


def test_an_optimizer_that_holds_another_makes_local_steps():
    """It need not have PyTorch's attributes for hooks of the step, as schedule-free's wrapper has none."""

    def program(engine):
        torch.manual_seed(0)
        model = nn.Linear(2, 1)
        balancer = hvd.Balancer(4, shares=[3, 1], adaptive=False, engine=engine)
        optimizer = hvd.DistributedOptimizer(
            Holding(torch.optim.SGD(model.parameters(), lr=0.1)), balancer=balancer,
            strategy=hvd.LocalSGD(warmup_steps=0),
        )  # fmt: skip
        balancer.begin(balancer.share)
        model(torch.full((balancer.samples, 2), 1.0 + engine.rank)).mean().backward()
        optimizer.step()
        optimizer.merge()
        return model.weight.tolist()

    first, second = World(2).run(program)
    assert first == second


def test_a_copy_of_a_model_that_holds_a_balancer_has_the_same_one():
    """As those of weights that are averaged."""

    def program(engine):
        model = nn.Linear(2, 1)
        model.balancer = hvd.Balancer(4, engine=engine)
        with pytest.raises(TypeError, match="state_dict"):
            pickle.dumps(model.balancer)
        return copy.deepcopy(model).balancer is model.balancer

    assert all(World(2).run(program))
