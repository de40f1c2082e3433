"""Local SGD through the torch face, on ranks that are threads; real ranks are in test_local_horovod.py."""

import copy
import json
import random
import threading
import time
import warnings
import weakref

import pytest
import torch
from torch import nn

pytest.importorskip("horovod.torch", reason="build it with hvd-hetero build-horovod")

import hvd_hetero.torch as hvd
from hvd_hetero.engine.local import World
from hvd_hetero.optimizers import local_step
from hvd_hetero.optimizers.control import Announcement
from hvd_hetero.torch.buffers import average_buffers
from hvd_hetero.torch.local import ParameterStore
from hvd_hetero.torch.state import average_state

WHOLE = 12


def make_model(dtype=torch.float64):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3)).to(dtype)


def make_data(steps, seed=1):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(steps * WHOLE, 6, generator=generator).double()
    return x, (x @ torch.randn(6, 3, generator=generator).double()).argmax(1)


def trained(engine, steps, strategy, *, shares, optimizer=torch.optim.SGD, micro=False, run=None, dtype=torch.float64,
            merge=True, model=None, lr=0.1, **options):
    """A rank's parameters after `steps` global batches of the same samples, however they are shared."""
    torch.set_num_threads(1)
    model = copy.deepcopy(model if model is not None else PROTOTYPE).to(dtype)
    x, y = make_data(steps)
    caps = {"max_micro_batch": 2} if micro else {}
    balancer = hvd.Balancer(WHOLE, engine=engine, min_share=0, shares=shares, adaptive=False, run=run, **caps)
    settings = {"lr": lr, "momentum": 0.9} if optimizer is torch.optim.SGD else {"lr": lr}
    wrapped = hvd.DistributedOptimizer(
        optimizer(model.parameters(), **settings), model.named_parameters(), balancer=balancer, strategy=strategy,
        **options,
    )
    begin = sum(shares[: engine.rank])
    for step in range(steps):
        mine = slice(step * WHOLE + begin, step * WHOLE + begin + shares[engine.rank])
        wrapped.zero_grad()
        balancer.begin(shares[engine.rank])
        if micro:
            for part_x, part_y in balancer.micro_batches((x[mine].to(dtype), y[mine])):
                nn.functional.cross_entropy(model(part_x), part_y).backward()
        elif shares[engine.rank]:
            nn.functional.cross_entropy(model(x[mine].to(dtype)), y[mine]).backward()
        wrapped.step()
    if merge:
        wrapped.merge()
    if balancer.trace is not None:
        balancer.trace.close()
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


PROTOTYPE, SMALL = make_model(), nn.Linear(2, 1)
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


def test_merge_brings_running_statistics_together():
    torch.manual_seed(0)
    x = torch.randn(60, 5).double() * 3 + torch.arange(60).double()[:, None] / 10
    counts = (30, 20, 10)

    def program(engine):
        model = nn.BatchNorm1d(5, momentum=None).double()  # cumulative averages
        balancer = hvd.Balancer(60, engine=engine, adaptive=False, shares=counts)
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.0), balancer=balancer, strategy=hvd.LocalSGD(warmup_steps=0)
        )
        begin = sum(counts[: engine.rank])
        balancer.begin(counts[engine.rank])
        model(x[begin : begin + counts[engine.rank]]).sum().backward()
        optimizer.step()
        model.num_batches_tracked += engine.rank
        optimizer.merge(model)
        return model.running_mean, model.running_var, int(model.num_batches_tracked)

    found = World(3).run(program)
    starts = [0, 30, 50, 60]
    parts = [x[a:b] for a, b in zip(starts, starts[1:], strict=False)]
    mean = x.mean(0)
    square = sum(len(p) * (p.var(0) + p.mean(0) ** 2) for p in parts) / 60
    for running_mean, running_var, tracked in found:
        torch.testing.assert_close(running_mean, mean)
        torch.testing.assert_close(running_var, square - mean**2)
        assert tracked == 3


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


def trained_with_gaps(skipped, *, warmup_steps, phase=None, merges=False):
    """Trains two ranks for twelve steps, and checks that they hold the same in the end. As GradScaler does, or a script
    with a limit for the norm, which in steps apart is of each rank's own, rank 1 leaves out those of `skipped`.

    `phase`: of each step, whether it is made apart. `merges`: after each six steps.
    """

    def program(engine):
        model = copy.deepcopy(PROTOTYPE).double()
        balancer = hvd.Balancer(WHOLE, engine=engine, shares=(6, 6), adaptive=False)
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
        return torch.cat([p.detach().reshape(-1) for p in model.parameters()])

    first, second = World(2).run(program, timeout_s=20)
    assert torch.equal(first, second)


def test_a_rank_that_skips_the_last_step_apart_comes_back_with_the_others():
    trained_with_gaps({7}, warmup_steps=0, phase=lambda step: step < 8)


@pytest.mark.parametrize("auto", [False, True])
def test_a_rank_that_skips_all_steps_apart_comes_together_with_the_others(auto):
    phase = (lambda step: 2 <= step < 6) if auto else None
    trained_with_gaps(range(2, 6), warmup_steps=2, phase=phase, merges=not auto)


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


def test_a_history_begins_anew_where_ranks_come_together():
    """That of LBFGS is of each rank's own steps; synchronous ones with it would part the ranks."""

    def program(engine):
        model = copy.deepcopy(PROTOTYPE)
        balancer = hvd.Balancer(WHOLE, engine=engine, shares=(8, 4), adaptive=False)
        optimizer = hvd.DistributedOptimizer(
            torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3), balancer=balancer,
            strategy=hvd.LocalSGD(round_steps=2, warmup_steps=0),
        )  # fmt: skip
        optimizer._reducer.local.steps._phase = lambda step: step < 8
        x, y = make_data(16)
        for step in range(16):
            balancer.begin(balancer.share)
            mine = slice(12 * step, 12 * step + 8) if engine.rank == 0 else slice(12 * step + 8, 12 * step + 12)

            def closure(mine=mine):
                optimizer.zero_grad()
                loss = nn.functional.cross_entropy(model(x[mine]), y[mine])
                loss.backward()
                return loss

            optimizer.step(closure)
        return torch.cat([p.detach().reshape(-1) for p in model.parameters()])

    first, second = World(2).run(program)
    assert torch.equal(first, second)


def test_merge_makes_one_of_buffers_also_where_training_is_synchronous():
    def program(engine):
        model = nn.BatchNorm1d(4).double()
        balancer = hvd.Balancer(8, engine=engine, shares=(6, 2), adaptive=False)
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), balancer=balancer)
        model.running_mean.fill_(engine.rank)
        optimizer.merge(model)
        return model.running_mean.tolist()

    assert World(2).run(program) == [[0.25] * 4] * 2, "by their shares"


TABLE = nn.EmbeddingBag(20, 3, sparse=True, mode="sum").double()


def trained_sparse(engine, strategy, *, shares, optimizer=torch.optim.SGD, sparse=True, steps=12, as_dense=False):
    """A rank's parameters, and how many sparse dimensions each step's gradient had."""
    model, seen = copy.deepcopy(TABLE), []
    model.sparse = sparse
    balancer = hvd.Balancer(WHOLE, engine=engine, min_share=0, shares=shares, adaptive=False)
    settings = {"momentum": 0.9} if optimizer is torch.optim.SGD else {}
    wrapped = hvd.DistributedOptimizer(
        optimizer(model.parameters(), lr=0.1, **settings), model.named_parameters(), balancer=balancer,
        sparse_as_dense=as_dense, strategy=strategy,
    )  # fmt: skip
    begin = sum(shares[: engine.rank])
    for step in range(steps):
        rows = (torch.arange(step * WHOLE, (step + 1) * WHOLE) % 20)[begin : begin + shares[engine.rank], None]
        wrapped.zero_grad()
        balancer.begin(len(rows))
        if len(rows):
            model(rows).pow(2).mean().backward()
        wrapped.step()
        seen.append(model.weight.grad.sparse_dim() if model.weight.grad is not None else None)
    wrapped.merge()
    return model.weight.detach().clone(), seen


@pytest.mark.parametrize("as_dense", [False, True])
@pytest.mark.parametrize("shares", [(6, 6), (7, 0, 5)])
@pytest.mark.parametrize("strategy", ["synchronous", hvd.LocalSGD(round_steps=1, bound_rounds=0, warmup_steps=3)])
def test_sparse_gradients_stay_as_autograd_makes_them(strategy, shares, as_dense):
    """Steps together deliver what steps apart go on with: momentum is sparse as well."""
    found = World(len(shares)).run(lambda engine: trained_sparse(engine, strategy, shares=shares, as_dense=as_dense))
    dense = World(len(shares)).run(lambda engine: trained_sparse(engine, strategy, shares=shares, sparse=False))
    for (weight, seen), (expected, _), share in zip(found, dense, shares, strict=True):
        torch.testing.assert_close(weight, expected, rtol=1e-10, atol=1e-12)
        assert {1} == set(seen) - {None} or not share


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.SparseAdam])
def test_states_of_sparse_gradients_become_one(optimizer):
    """Also that of a rank which has not been given any yet."""

    def program(engine):
        table = copy.deepcopy(TABLE)
        inner = optimizer(table.parameters(), lr=0.1, **({"momentum": 0.9} if optimizer is torch.optim.SGD else {}))
        for step in range(2 if engine.rank else 0):
            inner.zero_grad()
            table(torch.tensor([[engine.rank], [engine.rank + step]])).pow(2).sum().backward()
            inner.step()
        held = copy.deepcopy(inner.state[table.weight]) if engine.rank else {}
        average_state(inner, weight=float(engine.rank), engine=engine, name="state")
        return held, inner.state[table.weight]

    ranks = World(3).run(program)
    key = "momentum_buffer" if optimizer is torch.optim.SGD else "exp_avg"
    expected = (ranks[1][0][key].to_dense() + 2.0 * ranks[2][0][key].to_dense()) / 3.0
    for held, state in ranks:
        torch.testing.assert_close(state[key].to_dense(), expected, rtol=1e-12, atol=0.0)
        assert not held or held[key].is_sparse == state[key].is_sparse
        assert state.get("step") == ranks[1][0].get("step")
    assert expected.any()


def test_buffers_of_any_type_become_one():
    def program(engine):
        model = copy.deepcopy(PROTOTYPE)
        model.register_buffer("phase", torch.full((3,), 1 + 4j * engine.rank, dtype=torch.complex64))
        model.register_buffer("mask", torch.tensor([False, engine.rank == 1, True]), persistent=False)
        model.register_buffer("seen", torch.tensor(5 + engine.rank, dtype=torch.int32))
        average_buffers(model, weight=1.0 + 2 * engine.rank, engine=engine, name="buffers")
        assert model.phase.tolist() == [1 + 3j] * 3 and model.phase.dtype == torch.complex64
        assert model.mask.tolist() == [False, True, True] and model.mask.dtype == torch.bool
        assert model.seen.item() == 6 and model.seen.dtype == torch.int32

    World(2).run(program)


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


def test_an_outer_momentum_goes_with_who_takes_over_with_checkpoints_and_over_changes_of_the_ranks():
    """Of two models of unlike sizes, the first is given another optimizer, as for layers that were thawed."""
    prototypes = nn.Linear(3, 2, bias=False), nn.Linear(5, 4, bias=False)
    rule = hvd.LocalSGD(warmup_steps=0, round_steps=1, outer=hvd.Outer(momentum=0.9))

    def momenta(optimizers):
        outer = [each._reducer.local.steps.rounds.fragments[0].outer_state for each in optimizers]
        return [{name: kept.tolist() for name, kept in state.items()} for state in outer]

    def made(engine, models):
        balancer = hvd.Balancer(4, engine=engine)
        plain = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
        return balancer, [hvd.DistributedOptimizer(each, balancer=balancer, strategy=rule) for each in plain]

    def program(engine):
        models = copy.deepcopy(prototypes)
        balancer, (a, b) = made(engine, models)
        for _ in range(3):
            balancer.begin(2)
            sum(model(torch.ones(2, model.in_features)).mean() for model in models).backward()
            for optimizer in (a, b):
                optimizer.step()
                optimizer.zero_grad()
        for optimizer in (a, b):
            optimizer.merge()
        before = momenta((a, b))
        a = hvd.DistributedOptimizer(a, balancer=balancer, strategy=rule)
        assert momenta((a, b)) == before
        state = balancer.state_dict()
        resumed, later = made(engine, models)
        resumed.load_state_dict(state)
        assert momenta(later) == before
        balancer.rebuild()
        for optimizer in (b, a):  # in the order in which they were made
            optimizer._rebuild()
        assert momenta((a, b)) == before and before[0]["momentum"]

    World(2).run(program)


def test_a_rank_that_never_had_a_sample_gets_a_state_in_the_memory_format_of_its_parameters():
    shares = (5, 3, 0)
    prototype = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(), nn.Linear(128, 3)).to(memory_format=torch.channels_last)

    def program(engine):
        balancer = hvd.Balancer(8, engine=engine, shares=shares, min_share=0, adaptive=False)
        model = copy.deepcopy(prototype)
        adam = torch.optim.Adam(model.parameters(), lr=0.01, fused=True)
        rule = hvd.LocalSGD(warmup_steps=0, round_steps=2)
        optimizer = hvd.DistributedOptimizer(adam, balancer=balancer, strategy=rule)
        for _ in range(3):
            balancer.begin(shares[engine.rank])
            optimizer.zero_grad()
            if shares[engine.rank]:
                model(torch.randn(shares[engine.rank], 3, 6, 6)).square().mean().backward()
            optimizer.step()
        optimizer._reducer.local.come_together()
        weight = model[0].weight
        return weight.stride(), optimizer.state[weight]["exp_avg"].stride()

    for parameters, state in World(3).run(program):
        assert state == parameters


def test_merging_within_inference_mode_leaves_memory_that_later_steps_write_to():
    prototype = nn.Linear(6, 3)

    def program(engine):
        balancer, model = hvd.Balancer(8, engine=engine, adaptive=False), copy.deepcopy(prototype)
        rule = hvd.LocalSGD(warmup_steps=2, round_steps=4)
        optimizer = hvd.DistributedOptimizer(
            torch.optim.Adam(model.parameters()), balancer=balancer, strategy=rule
        )
        for step in range(20):
            balancer.begin(balancer.share)
            optimizer.zero_grad()
            model(torch.randn(balancer.samples, 6)).square().mean().backward()
            optimizer.step()
            if step % 5 == 4:
                with torch.inference_mode():
                    optimizer.merge(model)
        optimizer.merge()

    World(2).run(program)


def test_sparse_buffers_are_left_as_they_are_by_a_merge():
    prototype = nn.Linear(6, 3)
    prototype.register_buffer("adjacency", torch.eye(4).to_sparse())

    def program(engine):
        balancer, model = hvd.Balancer(8, engine=engine), copy.deepcopy(prototype)
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), balancer=balancer)
        optimizer.merge(model)
        return model.adjacency.to_dense()

    for found in World(2).run(program):
        assert found.equal(torch.eye(4))


def stored(kinds):
    """Parameters of these types, of which the last one is not laid out in order, and what holds them."""
    torch.manual_seed(0)
    parameters = [nn.Parameter(torch.randn(3, 4).to(kind)) for kind in kinds]
    parameters.append(nn.Parameter(torch.randn(5, 2).to(kinds[0]).t()))
    return parameters, ParameterStore(parameters)


@pytest.mark.parametrize("kinds", [[torch.float64], [torch.float32], [torch.bfloat16], [torch.float32, torch.bfloat16]])
def test_parameters_are_read_written_and_moved_as_one_array(kinds):
    parameters, store = stored(kinds)
    before = [p.detach().clone() for p in parameters]
    flat = store.read(0)
    assert (flat == torch.cat([p.reshape(-1).to(flat.dtype) for p in before])).all()
    assert (store.read(0, torch.zeros_like(flat)) == flat).all()
    by = torch.randn_like(flat)
    parts = by.clone().split([p.numel() for p in parameters])
    store.shift(0, by)
    for p, old, part in zip(parameters, before, parts, strict=True):
        assert (p == (old.to(flat.dtype) + part.view(p.shape)).to(p.dtype)).all()
    store.write(0, flat)
    assert all((p == old).all() for p, old in zip(parameters, before, strict=True))


def test_arrays_that_come_after_others_are_not_taken_for_them():
    """Views of arrays are kept, also in a copy of what keeps them; each array is read and written as it is."""
    parameters, store = stored([torch.float32])
    for number in range(20):
        flat = torch.full_like(store.read(0), float(number))
        store.write(0, flat)
        assert all((p == number).all() for p in parameters)
        del flat  # whose memory the next one would have
    memory = bytearray(4 * len(store.read(0)))
    store.write(0, torch.frombuffer(memory, dtype=torch.float32))
    another = copy.deepcopy(store)
    del store
    another.write(0, torch.frombuffer(memory, dtype=torch.float32).fill_(3.0))
    assert (another.read(0) == 3.0).all() and all((p == 0.0).all() for p in parameters)


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


class Coded(torch.optim.Optimizer):
    """A momentum of 8 bits, with a scale, and a count of its own: as bitsandbytes and torchao keep theirs."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure=None):
        for p in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            state = self.state[p]
            if not state:
                state.update(codes=torch.zeros(p.shape, dtype=torch.int8), scale=torch.zeros(()), times=0)
            state["times"] += 1
            momentum = 0.9 * state["codes"] * state["scale"] + p.grad
            state["scale"] = momentum.abs().max().float() / 127
            state["codes"] = (momentum / state["scale"].clamp_min(1e-20)).round().to(torch.int8)
            p.sub_(momentum, alpha=0.1 / state["times"] ** 0.5)


def after_local_steps(kind, shares):
    """Trains on two ranks, at last in synchronous steps. Returns the parameters, the optimizer and its first group's
    "norm" as it was made, of each rank."""
    generator = torch.Generator().manual_seed(0)
    x, prototype = torch.randn(8, 6, generator=generator), nn.Linear(6, 2)

    def program(engine):
        model = copy.deepcopy(prototype)
        balancer = hvd.Balancer(8, engine=engine, shares=shares, adaptive=False, min_share=0)
        optimizer = hvd.DistributedOptimizer(
            kind(model.parameters()), balancer=balancer, strategy=hvd.LocalSGD(round_steps=2, warmup_steps=0)
        )
        optimizer._reducer.local.steps._phase = lambda step: step < 8
        norm = optimizer.param_groups[0].get("norm")
        mine = slice(0, shares[0]) if engine.rank == 0 else slice(shares[0], 8)
        for _ in range(12):
            balancer.begin(shares[engine.rank])
            optimizer.zero_grad()
            if shares[engine.rank]:
                model(x[mine]).square().mean().backward()
            optimizer.step()
        return torch.cat([p.detach().reshape(-1) for p in model.parameters()]), optimizer, norm

    return World(2).run(program)


@pytest.mark.parametrize("shares", [(5, 3), (8, 0)])
def test_codes_of_8_bits_are_alike_where_ranks_come_together(shares):
    """Nobody can take means of them; synchronous steps with those of each rank would part the ranks."""
    (first, *_), (second, *_) = after_local_steps(Coded, shares)
    assert torch.equal(first, second)


class Estimating(torch.optim.Optimizer):
    """Keeps in its group what it estimates from gradients, as Prodigy and D-Adaptation keep their rates."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.1, "d": 0.0, "norm": torch.zeros(()), "betas": (0.9, 0.9), "rule": max})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            found = [p for p in group["params"] if p.grad is not None]
            group["norm"].add_(sum(p.grad.square().sum() for p in found))
            group["d"] = group["rule"](group["d"], float(group["norm"]) ** 0.5)
            group["betas"] = (group["d"], 0.9)
            for p in found:
                p.sub_(p.grad, alpha=group["lr"] * group["d"] / (1 + group["norm"].item()))


@pytest.mark.parametrize("shares", [(5, 3), (8, 0)])
def test_what_an_optimizer_keeps_in_its_groups_is_alike_where_ranks_come_together(shares):
    held = []
    for parameters, optimizer, norm in after_local_steps(Estimating, shares):
        group = optimizer.param_groups[0]
        assert group["norm"] is norm
        held.append((parameters.tolist(), group["d"], float(norm), group["betas"]))
    assert held[0] == held[1]


@pytest.mark.parametrize("strategy", [hvd.LocalSGD(warmup_steps=0), hvd.LocalSGD(), "auto", "synchronous"])
def test_statistics_of_a_second_model_and_after_synchronous_steps_are_of_as_many_rows(strategy):
    """As of averaged weights (`update_bn`), after merge(model) has used up the samples that were counted."""
    x = torch.randn(64, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    x[:, 0] += torch.arange(64) % 8  # the second rank's rows are others
    prototype = nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 1)).double()

    def program(engine):
        model = copy.deepcopy(prototype)
        balancer = hvd.Balancer(8, engine=engine, shares=(6, 2), adaptive=False)
        data = torch.utils.data.TensorDataset(x)
        loader = hvd.BalancedDataLoader(data, balancer=balancer, shuffle=False)
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.01), balancer=balancer, strategy=strategy
        )
        for (rows,) in loader:
            optimizer.zero_grad()
            model(rows).square().mean().backward()
            optimizer.step()
        averaged = torch.optim.swa_utils.AveragedModel(model)
        optimizer.merge(model)
        torch.optim.swa_utils.update_bn(loader, averaged)
        optimizer.merge(averaged)
        return averaged.module[0].running_mean

    for found in World(2).run(program):
        torch.testing.assert_close(found, x.mean(0))


class Thing:
    """What nothing can save."""


@pytest.mark.parametrize(("kept", "expected"), [
    ({"scale": 1.0, "ready": True}, 0.5), ({"thing": Thing()}, 0.5), ({"scale": "unlike"}, 1.0),
])
def test_moments_are_means_unless_what_is_kept_beside_them_differs(kept, expected):
    def program(engine):
        parameter = nn.Parameter(torch.zeros(2))
        optimizer = torch.optim.SGD([parameter], lr=0.1)
        beside = {key: float(engine.rank) if value == "unlike" else value for key, value in kept.items()}
        moment = nn.Parameter(torch.full((2,), float(engine.rank)), requires_grad=False)
        optimizer.state[parameter] = {"momentum_buffer": moment, **beside}
        average_state(optimizer, weight=1.0 + 1e-9 * engine.rank, engine=engine, name="state")
        state = optimizer.state[parameter]
        return state["momentum_buffer"].tolist(), state.get("scale")

    for moment, scale in World(2).run(program):
        assert moment == pytest.approx([expected] * 2) and scale in (kept.get("scale"), 1.0)


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
