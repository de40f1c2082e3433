"""PyTorch's loaders: errors of loading, epochs that are left and resumed, ranks that differ in their data."""

import contextlib
import copy
import gc
import itertools
import os
import threading

import pytest
import torch
from torch import nn
from torch.utils.data import ConcatDataset, DataLoader, Subset, TensorDataset, random_split

pytest.importorskip("horovod.torch", reason="build it with hvd-hetero build-horovod")

from torch_task import LENGTH, SHARES, WHOLE, Data, make_model, sgd, train

import hvd_hetero.torch as hvd
from hvd_hetero.engine.local import SoloEngine, World
from hvd_hetero.engine.port import CollectiveError
from hvd_hetero.optimizers.departure import PeerError
from hvd_hetero.optimizers.unused_balancer import UnusedBalancerCheck
from hvd_hetero.torch.feed import iterating


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


def test_ranks_that_disagree_about_the_dataset():
    def program(engine):
        with pytest.raises(ValueError, match="dataset length.*rank 0: 20; rank 1: 21"):
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
        with pytest.raises(ValueError, match="every rank needs all of it.*rank 0: .*; rank 1: "):
            hvd.BalancedDataLoader(part(data, engine.rank, 2), balancer=balancer)
        return True

    assert World(2).run(program, timeout_s=10) == [True, True]


@pytest.mark.parametrize("seed", [float("nan"), 2**70, "five"])
def test_a_seed_that_is_none_on_one_rank_alone(seed):
    def program(engine):
        with pytest.raises(ValueError, match=f"seed: expected the same.*rank 0: 5; rank 1: .*{seed}"):
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


def test_a_dataset_that_grows_is_an_error_but_with_a_sampler_of_constant_length():
    """As a replay buffer. PyTorch's `DataLoader` takes what is new; the order that is dealt would leave it out."""

    def program(engine, sampler=None):
        data = [torch.tensor([float(i)]) for i in range(WHOLE)]
        loader = hvd.BalancedDataLoader(
            data, balancer=hvd.Balancer(WHOLE, engine=engine), sampler=sampler, collate_fn=lambda samples: samples
        )
        list(loader)
        data.append(torch.tensor([float(WHOLE)]))
        return sum(map(len, loader))

    with pytest.raises(ValueError, match=f"expected {WHOLE} samples.*Received: {WHOLE + 1}.*new BalancedDataLoader"):
        World(2).run(program, timeout_s=20)
    assert sum(World(2).run(lambda engine: program(engine, list(range(WHOLE))), timeout_s=20)) == WHOLE


def test_a_progress_bar_on_rank_0_alone(capfd):
    def program(engine):
        balancer = hvd.Balancer(WHOLE, engine=engine, shares=(5, 3))
        return len(list(hvd.BalancedDataLoader(Data(), balancer=balancer, progress=True)))

    assert World(2).run(program) == [3, 3]
    shown = capfd.readouterr().err
    assert "shares 5:3" in shown and shown.count("20/20") == 1


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


def test_a_forked_process_leaves_the_persistent_workers_of_its_parent_alone(capfd):
    loader = DataLoader(list(range(4)), num_workers=1, persistent_workers=True, timeout=10)
    with iterating(loader) as source:
        assert len(list(source)) == 4
    child = os.fork()
    if child == 0:
        del loader
        gc.collect()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert "can only test a child process" not in capfd.readouterr().err
    with iterating(loader) as source:
        assert len(list(source)) == 4
