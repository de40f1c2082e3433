"""Ranks that have become others: everything made on them is rebuilt, and training goes on as if nothing had been."""

import copy
import itertools
import math
import os
import signal

import pytest
import torch
from torch import nn

from hvd_hetero.engine.elastic import Failures, run
from hvd_hetero.engine.local import LocalEngine, World
from hvd_hetero.engine.notice import LEFT
from hvd_hetero.engine.remembered import Remembered
from hvd_hetero.optimizers import ways
from hvd_hetero.optimizers.agreement import Terms
from hvd_hetero.optimizers.planner import Planner
from hvd_hetero.policy.partition import Bound
from hvd_hetero.policy.replan import ReplanRule

hvd = pytest.importorskip("hvd_hetero.torch")

WHOLE, STEPS, SHARES = 12, 8, (7, 0, 5)
PROTOTYPE = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3)).double()


def trained(engine, *, rebuilds, **options):
    torch.set_num_threads(1)
    model = copy.deepcopy(PROTOTYPE)
    balancer = hvd.Balancer(WHOLE, engine=engine, shares=SHARES, min_share=0, adaptive=False)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), balancer=balancer, **options
    )
    latency_lr = hvd.LatencyAwareLR(optimizer, balancer, base_batch_size=6, warmup_steps=4)
    x = torch.randn(STEPS, WHOLE, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    begin = sum(SHARES[: engine.rank])
    for step in range(STEPS):
        if rebuilds and step == 3:
            engine.rebuild()
        optimizer.zero_grad()
        balancer.begin(SHARES[engine.rank])
        if SHARES[engine.rank]:
            model(x[step, begin : begin + SHARES[engine.rank]]).square().mean().backward()
        optimizer.step()
    optimizer.merge()
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()]), latency_lr.progress


@pytest.mark.parametrize("options", [
    {}, {"topology": hvd.Topology(nodes=((0, 1), (2,)))}, {"compression": hvd.Compression.fp16},
    {"strategy": hvd.LocalSGD(round_steps=1, bound_rounds=0, warmup_steps=4)},  # longer rounds depend on timing
])
def test_training_goes_on_over_a_rebuild(options):
    straight = World(3).run(lambda engine: trained(engine, rebuilds=False, **options))
    rebuilt = World(3).run(lambda engine: trained(engine, rebuilds=True, **options))
    for (one, progress), (other, other_progress) in zip(straight, rebuilt, strict=True):
        assert torch.allclose(one, other, rtol=0, atol=1e-3 if "compression" in options else 1e-12)
        assert progress == other_progress


@pytest.mark.parametrize("options", [
    {}, {"op": hvd.Sum}, {"backward_passes_per_step": 2},
    {"strategy": hvd.LocalSGD(round_steps=1, bound_rounds=0, warmup_steps=0)},
])
@pytest.mark.parametrize("passes", [0.5, 1, 2])
def test_gradients_of_a_step_that_broke_off_do_not_count(options, passes):
    """A script that calls zero_grad() after step() has those of the step that another rank's death broke off. Those of
    the first micro-batch, or of one pass of two, are each rank's own yet."""

    def train(engine, breaks_off):
        torch.set_num_threads(1)
        model = copy.deepcopy(PROTOTYPE)
        balancer = hvd.Balancer(WHOLE, engine=engine, adaptive=False, max_micro_batch=2)
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), balancer=balancer, **options)
        random = torch.Generator().manual_seed(engine.rank)
        x = torch.randn(STEPS, 4, 6, generator=random, dtype=torch.float64)

        def backward(batch, parts=2):
            balancer.begin(4)
            for part in itertools.islice(balancer.micro_batches(x[batch]), parts):
                model(part).square().mean().backward()

        for step in range(0, STEPS, 2):
            if step == 4:
                optimizer.merge()
            if step == 4 and breaks_off:
                for batch in range(step, step + math.ceil(passes)):
                    backward(batch, parts=math.ceil(2 * passes))
                engine.rebuild()
            backward(step)
            if "backward_passes_per_step" in options:
                backward(step + 1)
            optimizer.step()
            optimizer.zero_grad()
        optimizer.merge()
        return torch.cat([p.detach().reshape(-1) for p in model.parameters()])

    straight = World(3).run(lambda engine: train(engine, breaks_off=False))
    broken = World(3).run(lambda engine: train(engine, breaks_off=True))
    assert all(torch.allclose(one, straight[0], rtol=0, atol=1e-12) for one in broken)


@pytest.mark.parametrize("op", [hvd.Average, hvd.Sum])
def test_what_was_frozen_when_the_ranks_changed_goes_on_learning(op):
    """As a GAN's discriminator, which has to be while the generator learns. What joins makes it unfrozen."""

    def train(engine, rebuilds):
        torch.set_num_threads(1)
        model, balancer = copy.deepcopy(PROTOTYPE), hvd.Balancer(WHOLE, engine=engine, adaptive=False)
        added = nn.Parameter(torch.ones(3, dtype=torch.float64))
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), balancer=balancer, op=op)
        optimizer.add_param_group({"params": [added]})
        x = torch.randn(STEPS, 4, 6, generator=torch.Generator().manual_seed(engine.rank), dtype=torch.float64)
        for step in range(STEPS):
            frozen = step in (2, 3)
            for parameter in (*model[0].parameters(), added):
                parameter.requires_grad_(not frozen)
            if rebuilds and step == 3:
                engine.rebuild()
                assert not any(parameter.requires_grad for parameter in (*model[0].parameters(), added))
            optimizer.zero_grad()
            balancer.begin(4)
            (model(x[step]) * added).square().mean().backward()
            optimizer.step()
        return torch.cat([p.detach().reshape(-1) for p in (*model.parameters(), added)])

    straight = World(3).run(lambda engine: train(engine, rebuilds=False))
    rebuilt = World(3).run(lambda engine: train(engine, rebuilds=True))
    assert all(torch.allclose(one, straight[0], rtol=0, atol=1e-12) for one in rebuilt)


def test_a_rank_that_joins_trains_what_is_frozen_on_the_others():
    def train(engine):
        model = copy.deepcopy(PROTOTYPE)
        if engine.rank == 0:
            balancer, optimizer = _made(engine, model)
            model.requires_grad_(False)
        else:
            _made(engine, model)
        if engine.rank == 0:
            engine.rebuild()
        else:
            balancer, optimizer = _made(LocalEngine(engine._group, engine.rank, engine.ranks), model)
        model.requires_grad_(True)
        balancer.begin(4)
        model(torch.full((4, 6), engine.rank + 1.0).double()).square().mean().backward()
        optimizer.step()
        return model[0].weight.detach().clone()

    first, second = World(2).run(train)
    assert torch.equal(first, second) and not torch.equal(first, PROTOTYPE[0].weight)


def _made(engine, model, **options):
    balancer, inner = hvd.Balancer(8, engine=engine, adaptive=False), torch.optim.SGD(model.parameters(), lr=0.1)
    return balancer, hvd.DistributedOptimizer(inner, balancer=balancer, **options)


@pytest.mark.parametrize(("sizes", "nodes"), [((3, 2), ((0, 1), (2,))), ((2, 3), ((0,), (1,)))])
def test_a_topology_of_other_ranks_is_found_anew_in_an_elastic_job(sizes, nodes, monkeypatch, tmp_path, capfd):
    """Where it fits, it is used; whoever joins does as the others do."""
    monkeypatch.setenv("HOROVOD_ELASTIC", "1")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    world, used, levels_for = World(3), [], ways.levels_for
    monkeypatch.setattr(
        ways, "levels_for", lambda engine, topology: used.append(topology) or levels_for(engine, topology)
    )

    def train(engine, topology):
        torch.set_num_threads(1)
        model, balancer = copy.deepcopy(PROTOTYPE), None
        x = torch.randn(STEPS, WHOLE, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        for step in range(STEPS):
            size = sizes[step >= 4]
            if engine.rank >= size:
                continue
            if step in (0, 4):
                engine._group, engine._ranks = world.subgroup(tuple(range(size))), tuple(range(size))
            if step == 4 and balancer is not None:
                engine.rebuild()
            elif balancer is None:
                balancer = hvd.Balancer(WHOLE, engine=engine, adaptive=False)
                inner = torch.optim.SGD(model.parameters(), lr=0.1)
                optimizer = hvd.DistributedOptimizer(inner, balancer=balancer, topology=topology)
            if step == 4:
                for parameter in model.parameters():
                    engine.broadcast_async(parameter.detach(), root=0, name="begin").wait()
            share = WHOLE // size
            optimizer.zero_grad()
            balancer.begin(share)
            model(x[step, engine.rank * share : (engine.rank + 1) * share]).square().mean().backward()
            optimizer.step()
        return torch.cat([p.detach().reshape(-1) for p in model.parameters()])

    straight = world.run(lambda engine: train(engine, None))
    assert "topology" not in capfd.readouterr().err
    used.clear()
    given = hvd.Topology(nodes=nodes)
    found = world.run(lambda engine: train(engine, given))
    for rank in range(sizes[1]):
        assert torch.allclose(found[rank], straight[rank], rtol=0, atol=1e-12)
    assert used.count(given) == sizes[0] and used.count("auto") == sizes[1]
    said = [line for line in capfd.readouterr().err.splitlines() if "topology" in line]
    assert said == [
        f"hvd_hetero: the topology is one of {sizes[0]} ranks, and there are {sizes[1]}: going on as with "
        'topology="auto".'
    ]
    monkeypatch.delenv("HOROVOD_ELASTIC")
    with pytest.raises(ValueError, match="topology: expected one of 3 ranks, those of this job"):
        World(3).run(lambda engine: _made(engine, copy.deepcopy(PROTOTYPE), topology=hvd.Topology(nodes=((0, 1),))))


def planner(identities):
    bounds = (Bound(lower=1),) * len(identities)
    shares = (64 // len(identities),) * len(identities)
    return Planner(Terms(
        global_batch_size=64, min_share=1, max_share=None, quantum=1, max_micro_batch=None, shares=None, adaptive=True,
        identities=identities, bounds=bounds, micro_caps=(None,) * len(identities), first_shares=shares,
    ), ReplanRule(warmup_steps=0))  # fmt: skip


def measured(identities, speeds):
    known = planner(identities)
    for step in range(20):
        share = 64 // len(identities)
        known.observe(step, [share] * len(identities), [share / speed for speed in speeds])
    return known.state_dict()


@pytest.mark.parametrize("handed_over", [True, False])
@pytest.mark.parametrize("strategy", ["synchronous", hvd.LocalSGD(round_steps=1, bound_rounds=0, warmup_steps=0)])
def test_what_a_codec_kept_back_goes_on_over_a_rebuild(strategy, handed_over):
    """Top-k, whose residual is most of what there is to send: as without the rebuild, if it is handed over."""

    def train(engine, rebuilds):
        torch.set_num_threads(1)
        model = nn.Linear(40, 40, bias=False).double()
        nn.init.zeros_(model.weight)
        balancer = hvd.Balancer(WHOLE, engine=engine, adaptive=False)
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1), balancer=balancer,
            compression=hvd.Compression.topk(0.05, warmup_steps=0), strategy=strategy,
        )  # fmt: skip
        x = torch.randn(STEPS, 4, 40, generator=torch.Generator().manual_seed(engine.rank), dtype=torch.float64)
        for step in range(STEPS):
            if step == 4:
                optimizer.merge()
            if rebuilds and step == 4:
                kept = {name: keeper.kept_back() for name, keeper in balancer.keepers.named.items()}
                engine.rebuild()
                for name, keeper in balancer.keepers.expect(kept).items():
                    keeper.give_back(kept[name] if handed_over else {})
            optimizer.zero_grad()
            balancer.begin(4)
            (model(x[step]) - x[step]).square().mean().backward()
            optimizer.step()
        optimizer.merge()
        return model.weight.detach().clone()

    plain = World(3).run(lambda engine: train(engine, rebuilds=False))
    rebuilt = World(3).run(lambda engine: train(engine, rebuilds=True))
    assert torch.allclose(plain[0], rebuilt[0], rtol=0, atol=1e-12) == handed_over
    assert all(torch.equal(one, rebuilt[0]) for one in rebuilt)


@pytest.mark.parametrize("how", ["rebuilt", "loaded", "forgotten"])
def test_an_outer_momentum_goes_on_with_the_balancers_state(how):
    """Over a rebuild, and in another process, whose objects are new. A job that forgets it ends elsewhere."""
    rule = hvd.LocalSGD(round_steps=1, bound_rounds=0, warmup_steps=0, outer=hvd.Outer(momentum=0.9))

    def train(engine, how):
        torch.set_num_threads(1)

        def job(model):
            balancer = hvd.Balancer(WHOLE, engine=engine, adaptive=False)
            inner = torch.optim.SGD(model.parameters(), lr=0.1)
            return model, balancer, hvd.DistributedOptimizer(inner, balancer=balancer, strategy=rule)

        model, balancer, optimizer = job(copy.deepcopy(PROTOTYPE))
        for step in range(STEPS):
            if step == 4:
                optimizer.merge()
                if how == "rebuilt":
                    engine.rebuild()
                elif how != "goes on":
                    state = copy.deepcopy(balancer.state_dict())
                    model, balancer, optimizer = job(copy.deepcopy(model))
                    balancer.load_state_dict(state if how == "loaded" else {**state, "strategies": {}})
            x = torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * step + engine.rank)).double()
            optimizer.zero_grad()
            balancer.begin(4)
            model(x).square().mean().backward()
            optimizer.step()
        optimizer.merge()
        return torch.cat([p.detach().reshape(-1) for p in model.parameters()])

    expected = World(3).run(lambda engine: train(engine, "goes on"))
    found = World(3).run(lambda engine: train(engine, how))
    assert torch.equal(found[0], expected[0]) == (how != "forgotten")


def test_ranks_of_known_hardware_keep_their_speeds():
    state = measured((11, 22, 33, 44), (8.0, 4.0, 2.0, 2.0))
    left = planner((33, 11))
    left.load_state_dict(state, 20)
    assert left.plans[-1].shares == (12, 52) and left.plans[-1].version == 1 and "known speed" in left.plans[-1].reason


def test_with_an_unknown_rank_shares_are_equal_at_first():
    state = measured((11, 22), (8.0, 4.0))
    grown = planner((11, 22, 55, 66))
    grown.load_state_dict(state, 20)
    assert grown.plans[-1].shares == (16, 16, 16, 16)
    assert [len(saved) for saved in grown.state_dict()["windows"]][2:] == [0, 0]


def test_another_job_on_as_many_ranks_goes_on_with_the_plan():
    state = measured((11, 22), (8.0, 4.0))
    again = planner((77, 88))
    again.load_state_dict(state, 20)
    assert again.state_dict()["windows"] == state["windows"] and again.plans[-1].version == 0


def test_failures_in_which_nothing_was_achieved_end_the_job():
    failures = Failures(most=3)
    assert [failures.again(commits=1, size=4) for _ in range(4)] == [True, True, True, False]
    failures = Failures(most=3)
    assert all(failures.again(commits=commits, size=4) for commits in range(9)), "each after another commit"
    assert all(failures.again(commits=9, size=size) for size in range(9, 2, -1)), "each with a rank less"


class State:
    """What an elastic job asks of a state, told to one rank only."""

    commits = 0

    def __init__(self, leaving):
        self.leaving = leaving
        self.log = []

    def __getattr__(self, name):
        return lambda: self.log.append(name)


def elastic_loop(train, log):
    return run(train, restart=lambda: log.append("restart"), size=lambda: 2, recoverable=lambda error: True,
               explain=lambda: "")  # fmt: skip


def test_a_rank_that_was_told_to_end_does_not_come_together_with_others_again():
    state = State(leaving=())

    def train(state):
        os.kill(os.getpid(), signal.SIGTERM)
        raise ConnectionError("another rank has died")

    with pytest.raises(SystemExit) as end:
        elastic_loop(train, state.log)(state)
    assert end.value.code == LEFT
    assert state.log == ["sync", "leave", "restore"]


def test_a_job_that_cannot_tell_who_leaves_ends_by_sigterm_as_ever():
    def train(state):
        return signal.getsignal(signal.SIGTERM)

    before = signal.getsignal(signal.SIGTERM)
    assert elastic_loop(train, [])(State(leaving=None)) is before
    assert elastic_loop(train, [])(State(leaving=())) is not before
    assert signal.getsignal(signal.SIGTERM) is before


def test_each_method_is_remembered_once_and_as_long_as_its_object_lives():
    class Made:
        def __init__(self, name):
            self.name = name

        def rebuild(self):
            called.append(self.name)

    called, remembered = [], Remembered()
    first, second, third = Made("first"), Made("second"), Made("third")
    for made in (first, second, first, third):
        remembered.add(made.rebuild)
    del second
    remembered.call()
    assert called == ["first", "third"]
