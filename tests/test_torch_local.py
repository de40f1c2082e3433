"""Local SGD through the torch face, on ranks that are threads; real ranks are in test_local_horovod.py."""

import copy
import dataclasses
import json
import math
import random
import threading
import time
import warnings
import weakref

import pytest
import torch
from torch import nn

pytest.importorskip("horovod.torch", reason="build it with hvd-hetero build-horovod")

from torch_local_task import PROTOTYPE, SMALL, WHOLE, make_data, trained

import hvd_hetero.torch as hvd
from hvd_hetero.engine.local import World
from hvd_hetero.optimizers import local_step
from hvd_hetero.optimizers.control import Announcement
from hvd_hetero.trace import reader
from hvd_hetero.trace.waiting import local_steps_of

EVERY_STEP = hvd.LocalSGD(round_steps=1, bound_rounds=0, warmup_steps=0)


@pytest.mark.parametrize("micro", [False, True])
@pytest.mark.parametrize("shares", [(6, 6), (9, 3), (7, 0, 5), (6, 3, 2, 1)])
def test_law_1_merging_every_step_is_synchronous_training(shares, micro):
    world = World(len(shares))
    local = world.run(lambda engine: trained(engine, 50, EVERY_STEP, shares=shares, micro=micro))
    together = World(len(shares)).run(lambda engine: trained(engine, 50, "synchronous", shares=shares))
    for one in local:
        assert torch.equal(one, local[0])
        assert (one - together[0]).abs().max() <= 1e-12


def test_local_steps_are_not_synchronous_ones():
    """Or the law above would say nothing."""
    is_local = hvd.LocalSGD(round_steps=4, warmup_steps=0)
    local = World(2).run(lambda engine: trained(engine, 50, is_local, shares=(6, 6)))
    together = World(2).run(lambda engine: trained(engine, 50, "synchronous", shares=(6, 6)))
    assert torch.equal(local[0], local[1]) and not torch.allclose(local[0], together[0])


def test_the_first_steps_are_synchronous():
    strategy = hvd.LocalSGD(round_steps=4, warmup_steps=20)
    local = World(3).run(lambda engine: trained(engine, 20, strategy, shares=(6, 4, 2)))
    together = World(3).run(lambda engine: trained(engine, 20, "synchronous", shares=(6, 4, 2)))
    assert torch.equal(local[0], together[0])


@pytest.mark.parametrize("options", [
    {}, {"compression": hvd.Compression.fp16}, {"compression": hvd.Compression.int8},
    {"topology": hvd.Topology(nodes=((0, 1), (2,)))},
    {"compression": hvd.Compression.int8, "topology": hvd.Topology(nodes=((0, 1), (2,)))},
])
@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW])
@pytest.mark.parametrize("fragments", [1, 3])
def test_all_hold_one_model_after_a_merge_and_it_has_learnt(options, optimizer, fragments):
    strategy = hvd.LocalSGD(round_steps=4, warmup_steps=4, fragments=fragments)
    torch.manual_seed(0)
    wide = nn.Sequential(nn.Linear(6, 200), nn.Tanh(), nn.Linear(200, 3)).double()  # codecs take the first weights
    found = World(3).run(lambda engine: trained(
        engine, 40, strategy, shares=(6, 4, 2), optimizer=optimizer, lr=0.01, model=wide, **options
    ))
    assert all(torch.equal(one, found[0]) for one in found), "law 5"
    torch.nn.utils.vector_to_parameters(found[0], wide.parameters())
    x, y = make_data(40)
    assert nn.functional.cross_entropy(wide(x), y) < 0.7


def test_parameters_in_bfloat16():
    strategy = hvd.LocalSGD(round_steps=2, warmup_steps=0)
    found = World(2).run(lambda engine: trained(engine, 20, strategy, shares=(6, 6), dtype=torch.bfloat16))
    assert torch.equal(found[0], found[1]) and found[0].dtype == torch.bfloat16


def test_the_loader_ends_an_epoch_with_one_model_and_each_sample_counts_once():
    torch.set_num_threads(1)

    class Counted(torch.utils.data.Dataset):
        """The gradient of sample i is the i-th unit vector."""

        def __len__(self):
            return 50

        def __getitem__(self, index):
            return torch.nn.functional.one_hot(torch.tensor(index), 50).double()

    def program(engine):
        weights = nn.Parameter(torch.zeros(50, dtype=torch.float64))
        balancer = hvd.Balancer(10, engine=engine, adaptive=False, shares=(5, 3, 2))
        loader = hvd.BalancedDataLoader(Counted(), balancer=balancer)
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD([weights], lr=1.0), balancer=balancer, strategy=hvd.LocalSGD(round_steps=2, warmup_steps=0)
        )
        after = []
        for _ in range(2):
            for rows in loader:
                optimizer.zero_grad()
                (rows @ weights).sum().backward()
                optimizer.step()
            after.append(weights.detach().clone())
        return after

    found = World(3).run(program)
    for epoch in range(2):
        assert all(torch.equal(after[epoch], found[0][epoch]) for after in found)
        # Whatever a sample weighs in its merge, it is in the model: no entry is left at what it was.
        before = found[0][epoch - 1] if epoch else torch.zeros(50, dtype=torch.float64)
        assert (found[0][epoch] < before).all()


def test_with_two_optimizers_a_plan_holds_for_the_same_batches_on_all_ranks():
    """Of two that come at unlike batches, a rank may hear first of the one and another rank first of the other."""
    rule = hvd.LocalSGD(round_steps=2, bound_rounds=8, warmup_steps=0, drift_limit=None)

    def program(engine):
        models = [copy.deepcopy(SMALL) for _ in range(2)]
        balancer = hvd.Balancer(8, engine=engine, adaptive=False)
        optimizers = [
            hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01), balancer=balancer, strategy=rule)
            for model in models
        ]
        planner, used, pauses = balancer.planner, [], random.Random(engine.rank)
        for step in range(300):
            used.append(balancer.deal(step).shares)
            balancer.begin(used[-1][engine.rank])
            if engine.rank == 0 and planner.announcement is None:
                version = planner.plans[-1].version + 1
                share = 1 + version % 7  # never that of the plan before
                planner.announcement = Announcement(
                    version=version, shares=(share, 8 - share), reason="", predicted_step_s=0.0, strategy="synchronous"
                )
            for model, optimizer in list(zip(models, optimizers, strict=True))[: 1 if step % 3 else 2]:
                optimizer.zero_grad()
                model(torch.ones(1, 2)).sum().backward()
                optimizer.step()
                time.sleep(pauses.choice([0, 0, 0.0003, 0.001]) * (2 - engine.rank))
        for optimizer in optimizers:
            optimizer.merge()
        return used, len(planner.plans)

    (mine, plans), (theirs, _) = World(2).run(program)
    assert plans > 10 and mine == theirs


def test_parameters_that_differ_are_told_on_every_rank():
    def program(engine):
        model = copy.deepcopy(PROTOTYPE)
        if engine.rank == 1:
            with torch.no_grad():
                model[0].weight[0, 0] += 1e-6
        with pytest.raises(RuntimeError, match="Received: others than rank 0's on rank 1. Broadcast"):
            trained(engine, 3, hvd.LocalSGD(warmup_steps=0), shares=(6, 4, 2), model=model)

    World(3).run(program)


def test_layers_that_are_thawed_while_ranks_are_apart_are_to_be_merged_first():
    def program(engine):
        torch.set_num_threads(1)
        balancer = hvd.Balancer(4, engine=engine, adaptive=False)
        model, strategy = copy.deepcopy(PROTOTYPE).float(), hvd.LocalSGD(warmup_steps=0)
        model[0].requires_grad_(False)
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = hvd.DistributedOptimizer(inner, balancer=balancer, strategy=strategy)
        data = torch.randn(2, 6, generator=torch.Generator().manual_seed(engine.rank))

        def step():
            optimizer.zero_grad()
            balancer.begin(2)
            model(data).square().mean().backward()
            optimizer.step()

        step()
        model[0].requires_grad_(True)
        with pytest.raises(RuntimeError, match="Call optimizer.merge().*, and then make a new hvd.Distributed"):
            step()
        optimizer = hvd.DistributedOptimizer(inner, balancer=balancer, strategy=strategy)
        with pytest.raises(RuntimeError, match="call its merge.* before making this one, or what ranks did is lost"):
            step()

    World(2).run(program)


def test_a_schedule_and_its_reasons_are_in_the_trace(tmp_path):
    strategy = hvd.LocalSGD(round_steps=4, warmup_steps=4)
    World(2).run(lambda engine: trained(engine, 30, strategy, shares=(8, 4), run=str(tmp_path)))
    for file in tmp_path.iterdir():
        lines = [json.loads(line) for line in file.read_text().splitlines()]
        merges = [line["fields"] for line in lines if isinstance(line, dict) and line.get("event") == "merge"]
        assert len(merges) >= 5
        assert [fields["merge"] for fields in merges] == list(range(1, len(merges) + 1))
        # Nothing is counted twice or lost: 26 batches of 12 samples were made apart.
        assert sum(fields["samples"] for fields in merges) == 26 * WHOLE


@pytest.mark.parametrize("at", [2, 3, 7])
def test_a_loader_that_raises_is_heard_of_also_before_the_first_step_apart(at):
    class Torn(torch.utils.data.Dataset):
        def __init__(self, rank):
            self.rank = rank

        def __len__(self):
            return 20 * WHOLE

        def __getitem__(self, index):
            if self.rank == 1 and self.balancer.step >= at - 1:
                raise OSError("torn page")
            return torch.zeros(6).double()

    def program(engine):
        model, data = copy.deepcopy(PROTOTYPE), Torn(engine.rank)
        data.balancer = balancer = hvd.Balancer(WHOLE, engine=engine, adaptive=False)
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1), balancer=balancer,
            strategy=hvd.LocalSGD(round_steps=2, warmup_steps=3),
        )
        try:
            for x in hvd.BalancedDataLoader(data, balancer=balancer):
                optimizer.zero_grad()
                model(x).square().mean().backward()
                optimizer.step()
        except (OSError, hvd.PeerError) as error:
            if at > 3:  # of steps apart nobody knows the end any more; to save a model, say, is no reason to wait
                with pytest.raises(RuntimeError, match="no further merge after a rank could not go on"):
                    optimizer.merge(model)
            return str(error)
        return "nothing"

    found = World(3).run(program)
    assert found[1] == "torn page" and all("rank 1 could not" in found[rank] for rank in (0, 2)), found


def test_who_fails_before_the_first_local_step_waits_for_nobody():
    """The others compare parameters there, and come to it whenever they do."""
    told = threading.Event()

    def program(engine):
        model = copy.deepcopy(PROTOTYPE)
        balancer = hvd.Balancer(WHOLE, engine=engine, adaptive=False)
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1), balancer=balancer, strategy=hvd.LocalSGD(warmup_steps=0)
        )
        balancer.begin(WHOLE // 2)
        if engine.rank == 1:
            balancer.departure.fail()
            over = optimizer._reducer.withdraw()
            told.set()
            while not over():
                time.sleep(0.001)
            return "is over"
        assert told.wait(10.0), "the other rank waits"
        with pytest.raises(hvd.PeerError):
            for _ in range(20):
                optimizer.zero_grad()
                model(torch.zeros(WHOLE // 2, 6).double()).square().mean().backward()
                optimizer.step()
                balancer.begin(WHOLE // 2)
        return "is told"

    assert World(2).run(program) == ["is told", "is over"]


@pytest.mark.parametrize(("momentum", "kept"), [(0.0, False), (0.9, True)])
def test_an_optimizer_that_is_made_anew_may_have_another_outer_one(momentum, kept):
    """It goes on with the momentum of the one before it, if it has any itself."""

    def rank(engine):
        model = copy.deepcopy(PROTOTYPE)
        balancer = hvd.Balancer(WHOLE, engine=engine, adaptive=False)

        def made(outer):
            strategy = hvd.LocalSGD(warmup_steps=0, outer=outer)
            sgd = torch.optim.SGD(model.parameters(), lr=0.1)
            return hvd.DistributedOptimizer(sgd, balancer=balancer, strategy=strategy)

        optimizer = made(hvd.Outer(momentum=0.5))
        for _ in range(4):
            balancer.begin(WHOLE // 2)
            optimizer.zero_grad()
            model(torch.ones(WHOLE // 2, 6).double()).square().mean().backward()
            optimizer.step()
        optimizer.merge()
        optimizer = made(hvd.Outer(momentum=momentum))
        return any(fragment.outer_state for fragment in optimizer._reducer.local.steps.rounds.fragments)

    assert World(2).run(rank) == [kept] * 2


@pytest.mark.parametrize("strategy", [hvd.LocalSGD(warmup_steps=0), "auto"])
def test_after_a_local_strategy_a_synchronous_optimizer_is_one_as_if_it_were_the_first(strategy):
    """So a rank that could not deliver a batch trains on with the others, and nobody predicts what local steps do."""

    prototype = nn.Linear(2, 1)

    def rank(engine):
        model = copy.deepcopy(prototype)
        balancer = hvd.Balancer(4, engine=engine, adaptive=False)

        def made(**options):
            sgd = torch.optim.SGD(model.parameters(), lr=0.1)
            return hvd.DistributedOptimizer(sgd, balancer=balancer, **options)

        def trains(optimizer, steps):
            for _ in range(steps):
                balancer.begin(balancer.share)
                optimizer.zero_grad()
                model(torch.ones(2, 2)).mean().backward()
                optimizer.step()
            optimizer.merge()

        trains(made(strategy=strategy), 5)
        optimizer = made()
        if engine.rank == 1:
            balancer.fail()
        else:
            with pytest.raises(hvd.PeerError):
                trains(optimizer, 1)
        trains(optimizer, 2)
        assert balancer.planner.strategy_selector is None
        return nn.utils.parameters_to_vector(model.parameters()).tolist()

    first, second = World(2).run(rank)
    assert first == second


def test_wrong_arguments_say_what_was_expected():
    def program(engine):
        model = copy.deepcopy(PROTOTYPE)
        balancer = hvd.Balancer(WHOLE, engine=engine, adaptive=False)

        def wrap(strategy):
            return hvd.DistributedOptimizer(
                torch.optim.SGD(model.parameters(), lr=0.1), balancer=balancer, strategy=strategy
            )

        with pytest.raises(ValueError, match='strategy: expected "synchronous", "local".*Received: \'async\''):
            wrap("async")
        with pytest.raises(ValueError, match="expected the same on every rank. Received: .*strategy=LocalSGD"):
            wrap(hvd.LocalSGD(round_steps=4 + engine.rank))
        with pytest.raises(ValueError, match="expected the same on every rank. Received: .*strategy=synchronous"):
            wrap("local" if engine.rank else "synchronous")
        with pytest.raises(ValueError, match="add_param_group: expected all parameters when"):
            wrap("local").add_param_group({"params": [nn.Parameter(torch.zeros(2))]})

    World(2).run(program)


def test_with_accumulation_no_rank_begins_more_batches_than_it_said():
    """A plan holds beyond what ranks may have begun when they hear of it, and an update is three batches here."""
    strategy, passes = hvd.LocalSGD(round_steps=2, bound_rounds=2, warmup_steps=0), 3

    def program(engine):
        model = copy.deepcopy(PROTOTYPE)
        balancer = hvd.Balancer(WHOLE, engine=engine, shares=(6, 6), adaptive=False)
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1), balancer=balancer, strategy=strategy,
            backward_passes_per_step=passes,
        )  # fmt: skip
        x, y = make_data(1)
        fragment, ahead, sends, at = optimizer._reducer.local.steps.rounds.fragments[0], 0, 0, 0
        for step in range(60):
            if engine.rank == 1 and step == 20:
                time.sleep(0.3)
            balancer.begin(6)
            nn.functional.cross_entropy(model(x[:6]), y[:6]).backward()
            if fragment.under_way:
                ahead = max(ahead, balancer.step - at)
            if step % passes == passes - 1:
                optimizer.step()
                optimizer.zero_grad()
            if fragment.sends > sends:
                sends, at = fragment.sends, balancer.step
        optimizer.merge()
        return ahead, optimizer._reducer.local.steps.rounds.most_ahead

    (ahead, said), _ = World(2).run(program)
    assert strategy.bound_rounds * strategy.round_steps < ahead <= said


@pytest.mark.parametrize("strategy", [EVERY_STEP, "synchronous"])
def test_law_1_where_a_rank_is_out_from_some_batch_of_an_update_on(strategy):
    """What a merge moves counts by the plans of all batches of an update: a rank without a share in the last one has
    samples of those before."""
    plans, passes, whole = [(4, 4, 4), (6, 0, 6), (0, 12, 0), (0, 12, 0)], 2, 12
    x, y = make_data(len(plans))

    def program(engine):
        model = copy.deepcopy(PROTOTYPE)
        balancer = hvd.Balancer(whole, engine=engine, min_share=0, adaptive=False)
        first = balancer.planner.plans[0]
        balancer.planner.plans = [dataclasses.replace(first, step=at, shares=each) for at, each in enumerate(plans)]
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1), balancer=balancer, strategy=strategy,
            backward_passes_per_step=passes,
        )  # fmt: skip
        for step, shares in enumerate(plans):
            begin = step * whole + sum(shares[: engine.rank])
            mine = slice(begin, begin + shares[engine.rank])
            balancer.begin(shares[engine.rank])
            if shares[engine.rank]:
                nn.functional.cross_entropy(model(x[mine]), y[mine]).backward()
            if step % passes == passes - 1:
                optimizer.step()
                optimizer.zero_grad()
        optimizer.merge()
        return torch.cat([p.detach().reshape(-1) for p in model.parameters()])

    one = copy.deepcopy(PROTOTYPE)
    alone = torch.optim.SGD(one.parameters(), lr=0.1 * passes)
    for whole_x, whole_y in zip(x.split(passes * whole), y.split(passes * whole), strict=True):
        alone.zero_grad()
        nn.functional.cross_entropy(one(whole_x), whole_y).backward()
        alone.step()
    expected = torch.cat([p.detach().reshape(-1) for p in one.parameters()])
    for found in World(3).run(program):
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)


def trained_with_gaps(skipped, *, warmup_steps, phase=None, merges=False, run=None):
    """Trains two ranks for twelve steps, and checks that they hold the same in the end. As GradScaler does, or a script
    with a limit for the norm, which in steps apart is of each rank's own, rank 1 leaves out those of `skipped`.

    `phase`: of each step, whether it is made apart. `merges`: after each six steps. `run`: a folder for its record.
    """

    def program(engine):
        model = copy.deepcopy(PROTOTYPE).double()
        balancer = hvd.Balancer(WHOLE, engine=engine, shares=(6, 6), adaptive=False, run=run)
        optimizer = hvd.DistributedOptimizer(
            torch.optim.Adam(model.parameters(), lr=0.01), balancer=balancer,
            strategy=hvd.LocalSGD(round_steps=2, warmup_steps=warmup_steps),
        )  # fmt: skip
        if phase is not None:
            optimizer._reducer.local.steps._phase = phase
        x, y = make_data(12)
        for step in range(12):
            balancer.begin(6)
            optimizer.zero_grad()
            mine = slice(12 * step + 6 * engine.rank, 12 * step + 6 * engine.rank + 6)
            nn.functional.cross_entropy(model(x[mine]), y[mine]).backward()
            if not (engine.rank == 1 and step in skipped):
                optimizer.step()
            if merges and step % 6 == 5:
                optimizer.merge()
        if run is not None:
            balancer.trace.close()
        return torch.cat([p.detach().reshape(-1) for p in model.parameters()])

    first, second = World(2).run(program, timeout_s=20)
    assert torch.equal(first, second)


def test_a_step_that_a_fused_optimizer_skips_counts_no_more_than_one_that_is_left_out():
    """A GradScaler leaves out the steps of other optimizers, and has those that are fused look whether they are to."""

    def program(engine, fused):
        model = copy.deepcopy(PROTOTYPE)
        balancer = hvd.Balancer(WHOLE, engine=engine, shares=(8, 4), adaptive=False)
        optimizer = hvd.DistributedOptimizer(
            torch.optim.AdamW(model.parameters(), lr=0.01, fused=fused), balancer=balancer,
            strategy=hvd.LocalSGD(round_steps=1, bound_rounds=0, warmup_steps=2),
        )  # fmt: skip
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
        x, y = make_data(8)
        for step in range(8):
            mine = slice(12 * step, 12 * step + 8) if engine.rank == 0 else slice(12 * step + 8, 12 * step + 12)
            balancer.begin(mine.stop - mine.start)
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x[mine]), y[mine])
            scaler.scale(loss * (math.inf if (engine.rank, step) == (0, 4) else 1.0)).backward()
            scaler.step(optimizer)
            scaler.update()
        optimizer.merge()
        return torch.cat([p.detach().reshape(-1) for p in model.parameters()]), scaler.get_scale()

    left_out, skipped = (World(2).run(lambda engine, fused=fused: program(engine, fused)) for fused in (False, True))
    assert [scale for _, scale in skipped] == [scale for _, scale in left_out] == [2.0**9, 2.0**10]
    assert all(torch.allclose(one, left_out[0][0], rtol=0, atol=1e-6) for one, _ in skipped)


def test_a_rank_that_skips_the_last_step_apart_comes_back_with_the_others():
    trained_with_gaps({7}, warmup_steps=0, phase=lambda step: step < 8)


@pytest.mark.parametrize("auto", [False, True])
def test_a_rank_that_skips_all_steps_apart_comes_together_with_the_others(auto):
    phase = (lambda step: 2 <= step < 6) if auto else None
    trained_with_gaps(range(2, 6), warmup_steps=2, phase=phase, merges=not auto)


def test_steps_together_after_a_phase_that_a_rank_skipped_are_told_as_such(tmp_path):
    trained_with_gaps(range(2, 6), warmup_steps=2, phase=lambda step: 2 <= step < 6, run=str(tmp_path))
    run = reader.read(tmp_path)
    for record in run.ranks.values():
        assert not local_steps_of(record, [0, 1, *range(6, 12)]).any()
    assert local_steps_of(run.ranks[0], range(2, 6)).all()


@pytest.mark.parametrize("elsewhere", ["a metric", "a merge of another optimizer"])
def test_nobody_waits_for_the_first_step_apart_of_a_rank_that_waits_for_him_elsewhere(elsewhere):
    """A `GradScaler` leaves that step out on one rank; the others compare parameters there."""

    def program(engine):
        torch.set_num_threads(1)
        models = [copy.deepcopy(PROTOTYPE) for _ in range(2)]
        balancer = hvd.Balancer(WHOLE, engine=engine, adaptive=False)
        optimizers = [
            hvd.DistributedOptimizer(
                torch.optim.SGD(model.parameters(), lr=0.1), balancer=balancer,
                strategy=hvd.LocalSGD(round_steps=2, warmup_steps=0),
            )
            for model in models
        ]
        x, y = make_data(6)
        for step in range(6):
            balancer.begin(6)
            mine = slice(12 * step + 6 * engine.rank, 12 * step + 6 * engine.rank + 6)
            sum(nn.functional.cross_entropy(model(x[mine]), y[mine]) for model in models).backward()
            for optimizer in optimizers:
                if not (engine.rank == 1 and step == 0):
                    optimizer.step()
                optimizer.zero_grad()
            if elsewhere == "a metric":
                engine.allgather_async(torch.ones(1), name=f"metric {step}").wait()
            else:
                for optimizer in optimizers:
                    optimizer.merge()
        for optimizer in optimizers:
            optimizer.merge()
        return torch.cat([p.detach().reshape(-1) for model in models for p in model.parameters()])

    first, second = World(2).run(program, timeout_s=20)
    assert torch.equal(first, second)


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW, torch.optim.LBFGS])
def test_a_rank_gets_over_what_was_not_finite(kind, tmp_path):
    """Of momentum and moments as well, or it would give up all that follows."""

    def program(engine):
        model = nn.Sequential(nn.BatchNorm1d(6, affine=False), copy.deepcopy(PROTOTYPE)).double()
        balancer = hvd.Balancer(WHOLE, engine=engine, shares=(6, 6), adaptive=False, run=tmp_path)
        options = {"momentum": 0.9} if kind is torch.optim.SGD else {}
        optimizer = hvd.DistributedOptimizer(
            kind(model.parameters(), lr=0.01, **options), balancer=balancer,
            strategy=hvd.LocalSGD(warmup_steps=0, round_steps=1, bound_rounds=0),  # longer rounds depend on timing
        )  # fmt: skip
        x, y = make_data(24)
        for step in range(24):
            mine = slice(12 * step + 6 * engine.rank, 12 * step + 6 * engine.rank + 6)
            spoilt = float("nan") if engine.rank == 1 and step == 3 else 1.0
            balancer.begin(6)

            def closure(mine=mine, spoilt=spoilt):
                optimizer.zero_grad()
                loss = nn.functional.cross_entropy(model(x[mine] * spoilt), y[mine])
                loss.backward()
                return loss

            optimizer.step(closure)
        optimizer.merge(model)
        balancer.trace.close()
        return [value.clone() for value in model.state_dict().values()]

    with pytest.warns(RuntimeWarning, match="local steps of rank 1 were not finite"):
        first, second = World(2).run(program)
    assert all(torch.equal(*both) and both[0].isfinite().all() for both in zip(first, second, strict=True))
    lines = [json.loads(line) for path in tmp_path.iterdir() for line in path.read_text().splitlines()]
    given_up = [line["fields"]["dropped_steps"] for line in lines if "dropped_steps" in str(line)]
    assert given_up == [1], "one step"


def test_with_fednova_a_rank_that_has_come_to_a_rate_of_0_counts_as_far():
    def program(engine):
        weight = nn.Parameter(torch.zeros(2).double())
        balancer = hvd.Balancer(8, engine=engine, shares=(4, 4), adaptive=False)
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD([weight], lr=0.1), balancer=balancer,
            strategy=hvd.LocalSGD(warmup_steps=0, round_steps=4, bound_rounds=0, weights="fednova"),
        )  # fmt: skip
        for step in range(8):
            balancer.begin(4)
            optimizer.zero_grad()
            weight.sum().backward()
            optimizer.param_groups[0]["lr"] = 0.1 if step < 4 or engine.rank == 0 else 0.0
            optimizer.step()
        optimizer.merge()
        return weight[0].item()

    assert World(2).run(program) == [pytest.approx(-0.6)] * 2, "4 steps of both, and 4 of half of them"


def test_a_rank_without_samples_that_leaves_a_closure_early_adds_no_samples_apart():
    def program(engine):
        weight = nn.Parameter(torch.ones(1))
        balancer = hvd.Balancer(4, engine=engine, min_share=0)
        strategy = hvd.LocalSGD(warmup_steps=0, round_steps=100)
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=0.1), balancer=balancer, strategy=strategy)
        for step in range(4):
            samples = 2 if step < 2 or engine.rank == 0 else 0
            balancer.begin(samples)

            def closure(samples=samples):
                optimizer.zero_grad()
                if samples:
                    weight.sum().backward()

            optimizer.step(closure)
        samples = optimizer._reducer.local.steps.samples
        optimizer.merge()
        return samples

    assert World(2).run(program) == [8.0, 4.0]


UPDATES = {
    "SGD": (torch.optim.SGD, {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    "SGD, a rate that is a tensor": (torch.optim.SGD, {}),
    "Adam": (torch.optim.Adam, {"amsgrad": True, "weight_decay": 0.1}),
    "AdamW": (torch.optim.AdamW, {"weight_decay": 0.1}),
    "AdamW, fused": (torch.optim.AdamW, {"fused": True}),
    "NAdam": (torch.optim.NAdam, {"weight_decay": 0.1, "decoupled_weight_decay": True}),
    "RAdam": (torch.optim.RAdam, {"weight_decay": 0.1}),
    "Adamax": (torch.optim.Adamax, {"weight_decay": 0.1}),
    "Adagrad": (torch.optim.Adagrad, {"lr_decay": 0.1, "weight_decay": 0.1}),
    "Adadelta": (torch.optim.Adadelta, {"weight_decay": 0.1}),
    "RMSprop": (torch.optim.RMSprop, {"centered": True, "momentum": 0.5, "weight_decay": 0.1}),
}


@pytest.mark.parametrize("name", list(UPDATES))
def test_a_part_of_an_update_is_that_of_its_rate(name):
    """Of an optimizer that PyTorch has; of another kind, as of a class of one's own, and where a hook looks at the
    rate, it is made of what the parameters were."""
    kind, options = UPDATES[name]
    rates = []

    def plain(parameters, lr, of=kind):
        return of(parameters, lr=torch.tensor(lr, dtype=torch.float64) if "tensor" in name else lr, **options)

    def own(parameters, lr):
        return plain(parameters, lr, type("Own", (kind,), {}))

    def watched(parameters, lr):
        optimizer = plain(parameters, lr)
        optimizer.register_step_post_hook(lambda optimizer, *_: rates.append(float(optimizer.param_groups[0]["lr"])))
        return optimizer

    def parameters(way):
        return World(3).run(lambda engine: trained(engine, 6, rule, shares=(8, 3, 1), optimizer=way, lr=0.01))[0]

    rule = hvd.LocalSGD(round_steps=1, bound_rounds=0, warmup_steps=2)
    by_rate, afterwards, looked_at = map(parameters, (plain, own, watched))
    assert torch.allclose(by_rate, afterwards, rtol=0, atol=1e-12) and torch.equal(afterwards, looked_at)
    assert not torch.equal(by_rate, afterwards), "they are made in unlike ways"
    assert set(rates) == {0.01}


def test_a_part_of_an_update_takes_no_copy_of_the_parameters():
    def program(engine):
        model = copy.deepcopy(PROTOTYPE)
        balancer = hvd.Balancer(WHOLE, engine=engine, shares=(8, 4), adaptive=False)
        optimizer = hvd.DistributedOptimizer(
            torch.optim.AdamW(model.parameters()), balancer=balancer, strategy=hvd.LocalSGD(warmup_steps=0)
        )
        for _ in range(2):
            balancer.begin(8 - 4 * engine.rank)
            model(torch.randn(8 - 4 * engine.rank, 6, generator=torch.Generator()).double()).sum().backward()
            optimizer.step()
        optimizer.merge()
        return optimizer._reducer.local.steps._before

    assert World(2).run(program) == [[], []]


def loss_after(engine, model, shares, strategy):
    """That over all data after each of the last epochs, at a rate that a batch of one sample would not bear."""
    generator = torch.Generator().manual_seed(0)
    data = torch.randn(1200, 16, generator=generator)
    wanted = data @ torch.randn(16, 1, generator=generator)
    model = copy.deepcopy(model)
    balancer = hvd.Balancer(sum(shares), engine=engine, shares=shares, adaptive=False)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.03, momentum=0.9), balancer=balancer, strategy=strategy
    )
    first, losses = sum(shares[: engine.rank]), []
    for _ in range(6):
        for number, batch in enumerate(torch.randperm(len(data), generator=generator).split(sum(shares))):
            mine = batch[first : first + shares[engine.rank]]
            optimizer.zero_grad()
            balancer.begin(len(mine))
            nn.functional.mse_loss(model(data[mine]), wanted[mine]).backward()
            optimizer.step()
            if number % 20 == 19:
                optimizer.merge()
        optimizer.merge()
        losses.append(float(nn.functional.mse_loss(model(data), wanted)))
    return losses[2:]


def test_a_rank_with_a_small_share_does_not_spoil_what_is_learned():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 1))
    together, is_local = (
        World(3).run(lambda engine, strategy=strategy: loss_after(engine, model, (1, 15, 8), strategy))[0]
        for strategy in ("synchronous", "local")
    )
    assert min(is_local) < 5 * max(together)


@pytest.mark.parametrize("bound", [0, None])
def test_ranks_that_wait_in_merges_of_two_optimizers_of_several_parts_come_together(bound):
    """One is at the end of an epoch, and others, at their bound in another optimizer's merge, wait for it."""
    torch.manual_seed(0)
    made = [nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)) for _ in range(2)]

    def program(engine):
        models = copy.deepcopy(made)
        balancer = hvd.Balancer(4, shares=(2, 2), adaptive=False, engine=engine)
        rule = hvd.LocalSGD(warmup_steps=0, round_steps=2, fragments=2, bound_rounds=bound)
        optimizers = [
            hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), balancer=balancer, strategy=rule)
            for model in models
        ]
        loader = hvd.BalancedDataLoader(torch.utils.data.TensorDataset(torch.ones(48, 3)), balancer=balancer)
        for epoch in range(4):
            loader.set_epoch(epoch)
            for (x,) in loader:
                time.sleep((0.003 if bound == 0 else 0.02) * (engine.rank == 0))
                for optimizer in optimizers:
                    optimizer.zero_grad()
                sum(model(x).mean() for model in models).backward()
                for optimizer in optimizers:
                    optimizer.step()
        return True

    assert World(2).run(program, timeout_s=30) == [True] * 2


def test_the_end_of_a_job_between_merges_is_told_but_for_a_rank_that_was_told_to_leave():
    def job(engine):
        balancer = hvd.Balancer(4, engine=engine)
        model = copy.deepcopy(SMALL)
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), 0.1), balancer=balancer, strategy=EVERY_STEP
        )
        balancer.begin(4)
        model(torch.ones(4, 2)).sum().backward()
        optimizer.step()
        steps = optimizer._reducer.local.steps
        with pytest.warns(RuntimeWarning, match="after the last step of a local strategy"):
            local_step._warn_at_exit(weakref.ref(steps))
        balancer.leave()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            local_step._warn_at_exit(weakref.ref(steps))
        optimizer.merge()

    World(1).run(job)
