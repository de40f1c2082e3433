"""Ranks that have become others: everything made on them is rebuilt, and training goes on as if nothing had been."""

import contextlib
import copy
import dataclasses
import importlib
import os
import signal
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from hvd_hetero.engine.callback import WeakMethods
from hvd_hetero.engine.elastic import MOST_FAILURES, Failures, run
from hvd_hetero.engine.local import World
from hvd_hetero.engine.termination import EXIT_STATUS_LEFT, TerminationHandler
from hvd_hetero.optimizers.agreement import BalancerArguments
from hvd_hetero.optimizers.equal_weights import EqualWeights
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


def test_what_scripts_find_in_horovods_module_is_here():
    from horovod.torch import elastic

    named = [name for name in ("ElasticSampler", "TorchState", "init", "run", "shutdown") if hasattr(elastic, name)]
    assert named == hvd.elastic.__all__
    assert hvd.elastic.init is hvd.init and hvd.elastic.shutdown is hvd.shutdown


def planner(identities, kinds=()):
    bounds = (Bound(lower=1),) * len(identities)
    shares = (64 // len(identities),) * len(identities)
    return Planner(BalancerArguments(
        global_batch_size=64, identities=identities, kinds=kinds, bounds=bounds, micro_caps=(None,) * len(identities),
        first_shares=shares, rule=ReplanRule(warmup_steps=0),
    ))  # fmt: skip


def measured(identities, speeds, kinds=()):
    known = planner(identities, kinds)
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
                kept = {name: keeper.residuals() for name, keeper in balancer.keepers.named.items()}
                engine.rebuild()
                for name, keeper in balancer.keepers.expect(kept).items():
                    keeper.add_residuals(kept[name] if handed_over else {})
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


def test_what_a_codec_kept_back_goes_on_over_a_rebuild_beside_sparse_gradients():
    """The layout of before, of which the rebuilt optimizer knows only once it sees a sparse gradient."""

    def train(engine):
        torch.set_num_threads(1)
        weight, table = nn.Parameter(torch.zeros(64, 64).double()), nn.Embedding(50, 8, sparse=True).double()
        nn.init.zeros_(table.weight)
        balancer = hvd.Balancer(WHOLE, engine=engine, adaptive=False)
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD([weight, *table.parameters()], lr=1.0), balancer=balancer,
            compression=hvd.Compression.topk(0.05, warmup_steps=0),
        )  # fmt: skip
        whole = torch.zeros(64, 64).double()
        for step in range(STEPS):
            if step == 4:
                kept = {name: keeper.residuals() for name, keeper in balancer.keepers.named.items()}
                engine.rebuild()
                for name, keeper in balancer.keepers.expect(kept).items():
                    keeper.add_residuals(kept[name])
            gradients = torch.randn(engine.size, 64, 64, generator=torch.Generator().manual_seed(step)).double()
            whole += gradients.mean(0)
            optimizer.zero_grad()
            balancer.begin(4)
            ((weight * gradients[engine.rank]).sum() + table(torch.tensor([step, 49])).sum()).backward()
            optimizer.step()
        kept = optimizer._reducer._step.residuals()[weight].view(64, 64)
        kept = engine.allreduce_async(kept.clone(), name="kept").wait()
        kept = kept * optimizer._reducer._gradient_exchange.part_unit
        return (whole + weight.detach() - kept).norm() / whole.norm()

    assert all(error <= 1e-12 for error in World(3).run(train))


@pytest.mark.parametrize("make", [
    lambda engine: hvd.Balancer(WHOLE, engine=engine, adaptive=False), EqualWeights], ids=["balancer", "none"])
def test_what_a_codec_kept_back_counts_as_much_on_other_ranks(make):
    """Two ranks, whose codec keeps back most of one gradient, and a third that joins."""

    def trained(engine, steps, kept=None):
        weight, balancer = nn.Parameter(torch.zeros(64, 64).double()), make(engine)
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD([weight], lr=1.0), balancer=balancer,
            compression=hvd.Compression.topk(0.3, warmup_steps=0),
        )  # fmt: skip
        keeper = next(iter(balancer.keepers.named.values()))
        if kept is not None and engine.rank < len(kept):
            keeper.add_residuals(kept[engine.rank])
        for _ in range(steps):
            optimizer.zero_grad()
            balancer.begin(WHOLE // engine.size if isinstance(balancer.batch, int) else 1)
            gradient = torch.randn(64, 64, generator=torch.Generator().manual_seed(engine.rank)).double()
            (weight * gradient * float(kept is None)).sum().backward()
            optimizer.step()
        return weight.detach().clone(), keeper.residuals()

    two = World(2).run(lambda engine: trained(engine, 1))
    three = World(3).run(lambda engine: trained(engine, 6, [kept for _, kept in two]))
    whole = sum(torch.randn(64, 64, generator=torch.Generator().manual_seed(rank)).double() for rank in range(2)) / 2
    assert (two[0][0] + whole).norm() > 0.1 * whole.norm(), "much is kept back"
    assert (two[0][0] + three[0][0] + whole).norm() <= 1e-12 * whole.norm()


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


@pytest.mark.parametrize(("kinds", "shares", "reason"), [
    ((1, 2, 2, 2), (28, 12, 12, 12), "first plan"),  # as before, on other hosts: what was planned goes on
    ((2, 1, 2, 2), (12, 28, 12, 12), "known speed"),
    ((2, 1), (19, 45), "known speed"),
    ((1, 3, 2, 2), (16, 16, 16, 16), "other ranks than before"),
    ((1, 1, 2, 2), (16, 16, 16, 16), "other ranks than before"),
])  # fmt: skip
def test_in_another_job_ranks_have_the_speed_of_their_kind_and_not_of_their_number(kinds, shares, reason):
    """As where a job is started again on other nodes, or in other containers."""
    saved, shared = planner((11, 22, 33, 44), (1, 2, 2, 2)), (28, 12, 12, 12)
    saved.plans[0] = dataclasses.replace(saved.plans[0], shares=shared)
    for step in range(20):
        saved.observe(step, shared, (4.0, 4.0, 4.0, 4.0))
    again = planner(tuple(range(77, 77 + len(kinds))), kinds)
    again.load_state_dict(saved.state_dict(), 20)
    assert again.plans[-1].shares == shares and reason in again.plans[-1].reason


def test_a_rank_of_known_hardware_keeps_its_speed_whatever_other_ranks_of_its_kind_there_are():
    saved = measured((11, 22), (8.0, 2.0), (1, 1))
    again = planner((33, 11), (1, 1))
    again.load_state_dict(saved, 20)
    assert again.state_dict()["windows"] == saved["windows"][::-1]


def test_failures_in_which_nothing_was_achieved_end_the_job():
    failures = Failures(most=3)
    assert [failures.again(commits=1, size=4) for _ in range(4)] == [True, True, True, False]
    failures = Failures(most=3)
    assert all(failures.again(commits=commits, size=4) for commits in range(9)), "each after another commit"
    assert all(failures.again(commits=9, size=size) for size in range(9, 2, -1)), "each with a rank less"


class State:
    """What an elastic job asks of a state, told to one rank only."""

    commits = 0

    def __init__(self):
        self.log = []

    def __getattr__(self, name):
        return lambda: self.log.append(name)


def elastic_loop(train, log):
    return run(train, restart=lambda waiting: log.append("restart"), size=lambda: 2, recoverable=lambda error: True,
               explain=lambda: "")  # fmt: skip


def test_a_rank_that_was_told_to_end_does_not_come_together_with_others_again():
    state = State()

    def train(state):
        os.kill(os.getpid(), signal.SIGTERM)
        raise ConnectionError("another rank has died")

    with pytest.raises(SystemExit) as end:
        elastic_loop(train, state.log)(state)
    assert end.value.code == EXIT_STATUS_LEFT
    assert state.log == ["sync", "leave", "break_off", "restore", "leave_alone"]


def test_a_rank_may_be_told_to_end_while_it_comes_together_with_others(monkeypatch):
    """A thread hears of it there, as `TerminationHandler` says: whoever waits for hosts does so in C++."""
    state, within = State(), []

    @contextlib.contextmanager
    def unreachable(handler, leave):
        within.append(True)
        yield leave()
        within.clear()

    def restart(waiting):
        with waiting():
            state.log.append(f"restart {bool(within)}")

    def train(state):
        state.log.append("train")
        if len(state.log) < 4:
            raise ConnectionError("another rank has died")

    monkeypatch.setattr(TerminationHandler, "unreachable", unreachable)
    run(train, restart=restart, size=lambda: 2, recoverable=lambda error: True, explain=lambda: "")(state)
    assert state.log == [
        "sync", "train", "break_off", "restore", "begin_reset", "leave_alone", "restart True", "on_reset", "sync",
        "train",
    ]  # fmt: skip
    assert not within


def test_a_job_whose_state_is_of_the_scripts_own_ends_by_sigterm_as_ever():
    class Own:
        def sync(self):
            pass

        restore = on_reset = sync

    def train(state):
        return signal.getsignal(signal.SIGTERM)

    before = signal.getsignal(signal.SIGTERM)
    assert elastic_loop(train, [])(Own()) is before
    assert elastic_loop(train, [])(State()) is not before
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_state_of_a_scripts_own_is_asked_for_what_horovod_asks_of_it():
    class Own:
        log = []

        def sync(self):
            self.log.append("sync")

        def restore(self):
            self.log.append("restore")

        def on_reset(self):
            self.log.append("on_reset")

    def train(state):
        if state.log.count("sync") < 7:  # Horovod gives up of no number of failures
            raise ConnectionError("another rank has died")
        return len(state.log)

    assert elastic_loop(train, Own.log)(Own()) == len(Own.log)
    assert Own.log == ["sync", *["restore", "restart", "on_reset", "sync"] * 6]


@pytest.mark.parametrize("methods", [[], ["sync"], ["restore"]])
def test_what_cannot_go_back_is_no_elastic_state(methods):
    with pytest.raises(TypeError, match="state: expected an elastic state.* Received: a SimpleNamespace"):
        elastic_loop(lambda state: None, [])(SimpleNamespace(**dict.fromkeys(methods, list)))


@pytest.mark.parametrize(("recovers", "calls"), [(False, 1), (True, MOST_FAILURES + 1)])
def test_an_error_of_the_script_ends_its_rank_at_once_and_one_that_recurs_in_the_end(capfd, recovers, calls):
    def train(state):
        called.append(True)
        raise OSError("connection lost")

    state, called = State(), []
    loop = run(train, restart=lambda waiting: None, size=lambda: 2, recoverable=lambda error: recovers,
               explain=lambda: "rank 1 is gone" if len(called) == 1 else "")  # fmt: skip
    with pytest.raises(OSError, match="connection lost"):
        loop(state)
    assert len(called) == calls and state.log.count("restore") == calls - 1
    told = [line for line in capfd.readouterr().err.splitlines() if "Going back" in line]
    assert ["rank 1 is gone" in line for line in told] == [number == 0 for number in range(calls - 1)]
    assert ["connection lost" in line for line in told] == [number > 0 for number in range(calls - 1)]
    manager = importlib.import_module("horovod.common.elastic").notification_manager
    assert state not in manager._listeners


def test_each_method_is_remembered_once_and_as_long_as_its_object_lives():
    class Made:
        def __init__(self, name):
            self.name = name

        def rebuild(self):
            called.append(self.name)

    called, methods = [], WeakMethods()
    first, second, third = Made("first"), Made("second"), Made("third")
    for made in (first, second, first, third):
        methods.add(made.rebuild)
    del second
    methods.call()
    assert called == ["first", "third"]


def test_the_function_of_an_elastic_job_may_be_sent_to_other_processes():
    """As `horovod.run` does with what a function of a script's `__main__` refers to."""
    cloudpickle = pytest.importorskip("cloudpickle")
    train = cloudpickle.loads(cloudpickle.dumps(hvd.elastic.run(lambda state: state)))
    assert train.__name__ == "<lambda>"
