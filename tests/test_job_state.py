"""What a state keeps of plain values is what they were at the commit, also where a script changes them in place."""

import ast
import itertools
import threading
from types import SimpleNamespace

import numpy as np
import pytest
import torch

pytest.importorskip("keras", reason="pip install keras with TensorFlow or torch")
pytest.importorskip("horovod.torch", reason="build it with hvd-hetero build-horovod")

import keras
from horovod.common.exceptions import HostsUpdatedInterrupt
from horovod.runner.elastic.worker import HostUpdateResult
from test_unsent_state import Exchange

import hvd_hetero.torch as hvd
from hvd_hetero.engine.job_state import JobState, has_state
from hvd_hetero.engine.local import SoloEngine, World
from hvd_hetero.engine.payload import gather_text
from hvd_hetero.engine.termination import EXIT_STATUS_LEFT
from hvd_hetero.keras import backend
from hvd_hetero.keras.elastic import KerasState
from hvd_hetero.optimizers.balancer import Balancer
from hvd_hetero.torch.elastic import TorchState


def keras_state(**values):
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile(optimizer=keras.optimizers.SGD())
    return KerasState(model, **values)


def torch_state(**values):
    return TorchState(torch.nn.Linear(2, 1), **values)


@pytest.mark.parametrize("made", [torch_state, keras_state])
def test_values_that_are_changed_in_place_go_back(made):
    lock = threading.Lock()
    state = made(losses=[], best={"a": [0]}, seen=set(), counts=np.zeros(2), mean=torch.zeros(2), lock=lock, epoch=0)

    def change():
        state.losses.append(1.0)
        state.best["a"][0] += 1
        state.seen.add(len(state.seen))
        state.counts += 1
        state.mean.add_(1)
        state.epoch += 1

    def found():
        return [state.losses, state.best["a"], state.seen, state.counts.tolist(), state.mean.tolist(), state.epoch]

    for kept in ([[], [0], set(), [0, 0], [0, 0], 0], [[1.0], [1], {0}, [1, 1], [1, 1], 1]):
        assert found() == kept
        for _ in range(2):  # going back twice is the same: what is kept is not what the script gets
            change()
            state.restore()
            assert found() == kept
        change()
        state.save()
    assert state.lock is lock, "what cannot be copied stays what it is"


def test_keras_waits_for_the_others_in_operations_that_are_explained(monkeypatch):
    """A wait in Horovod's own functions for TensorFlow is not: to the others this rank would be outside of any."""
    state = keras_state(epoch=0)
    monkeypatch.setattr(backend, "engine", lambda process_set=None: SoloEngine())
    monkeypatch.setattr(backend.horovod, "rank", lambda: 0)
    for name in ("allgather_object", "broadcast_object", "broadcast_variables"):
        monkeypatch.setattr(backend.horovod, name, lambda *_, **__: pytest.fail("a wait that is not explained"), False)
    state.sync()
    assert state.synced


def test_what_a_rank_reads_its_data_with_stays_its_own():
    """Horovod's example for CIFAR-10 has its DistributedSampler in the state."""
    data = torch.utils.data.TensorDataset(torch.zeros(6))
    sampler = torch.utils.data.distributed.DistributedSampler(data, num_replicas=2, rank=1)
    state = torch_state(sampler=sampler, data=data, epoch=0)
    state.save()
    state.restore()
    assert state.sampler is sampler and state.data is data
    assert state.shared_state()["values"] == {"epoch": 0}, "what is sent, and saved"
    state.load_shared_state(state.shared_state())


def test_what_takes_the_place_of_a_model_or_an_optimizer_is_what_is_gone_back_to():
    """Before the next commit: as where layers are thawed, or a model is grown, within `train`."""
    state = torch_state(optimizer=torch.optim.SGD([torch.nn.Parameter(torch.zeros(2))], lr=0.1), epoch=0)
    state.model = torch.nn.Linear(5, 3)
    state.optimizer = torch.optim.Adam(state.model.parameters(), lr=0.2)
    expected = state.model.weight.detach().clone()
    with torch.no_grad():
        state.model.weight.add_(1.0)
    state.optimizer.param_groups[0]["lr"] = 7.0
    state.restore()
    assert torch.equal(state.model.weight, expected) and state.optimizer.param_groups[0]["lr"] == 0.2
    with torch.no_grad():
        state.model.weight.add_(1.0)
    state.model = state.model  # the same: what was committed of it holds
    state.restore()
    assert torch.equal(state.model.weight, expected)
    state.optimizer = None
    state.save()
    state.optimizer, state.epoch = 3, 4
    state.restore()
    assert state.optimizer is None and state.epoch == 0


def test_a_balancer_that_comes_with_another_optimizer_is_what_is_gone_back_to():
    """Not with the state of the one before it, which may be of another global batch."""
    parameters = [torch.nn.Parameter(torch.zeros(2))]
    optimizers = [
        hvd.DistributedOptimizer(torch.optim.SGD(parameters, lr=0.1), balancer=hvd.Balancer(whole, engine=SoloEngine()))
        for whole in (8, 4)
    ]
    state = torch_state(optimizer=optimizers[0])
    optimizers[0]._balancer.begin(8)
    state.save()
    state.optimizer = optimizers[1]
    optimizers[1]._balancer.begin(4)
    state.restore()
    assert optimizers[1]._balancer.step == -1


def test_what_an_assignment_does_not_concern_is_gone_back_to_as_it_was_at_the_commit():
    """A model beside another optimizer, and what is kept of a balancer that stays."""

    def optimizer(balancer):
        return hvd.DistributedOptimizer(torch.optim.SGD([torch.nn.Parameter(torch.zeros(2))], 0.1), balancer=balancer)

    def kept(balancer, value):
        balancer.keepers.take("tape").put("gradients", [exchange := Exchange(value)], lambda: 1.0)
        return exchange

    balancer, other = (hvd.Balancer(8, engine=SoloEngine()) for _ in range(2))
    state = torch_state(optimizer=optimizer(balancer))
    expected, exchange = state.model.weight.detach().clone(), kept(balancer, 1.0)
    state.save()
    for assigned in (balancer, other, None):
        with torch.no_grad():
            state.model.weight.add_(1.0)
        exchange.kept = 2.0
        if assigned is other:
            exchange = kept(other, 3.0)
        state.optimizer = optimizer(assigned) if assigned else "none any more"
        if assigned is other:
            exchange.kept = 4.0
        if assigned is None:
            state.optimizer = "changed since"
        state.restore()
        assert torch.equal(state.model.weight, expected)
        assert exchange.kept == (1.0 if assigned is balancer else 3.0)
    assert state.optimizer == "none any more"


def test_half_a_state_is_none():
    """Plain values are copied as a whole."""
    for one, both in itertools.product([{"state_dict": dict}, {"load_state_dict": dict}], [False, True]):
        given = {"state_dict": dict, "load_state_dict": dict} if both else one
        assert has_state(SimpleNamespace(**given)) is both


class Alone:
    """Horovod, of one rank."""

    def rank(self):
        return 0

    def size(self):
        return 1

    def allgather_object(self, value, name):
        return [value]

    def broadcast_object(self, value, root=0, name=None):
        return value


def test_what_waits_for_an_exchange_is_of_its_own_balancer():
    """Of two, of which the first has a tape whose exchange is made later; over a checkpoint and a rebuild."""

    def take(balancer, kind, kept=0.0):
        exchange = Exchange(kept)
        balancer.keepers.take(kind).put("gradients", [exchange], lambda: 1.0)
        return exchange

    def program(engine):
        def job():
            balancers = [Balancer(engine, global_batch_size=4) for _ in range(2)]
            state = JobState(dict(zip(("first", "second"), balancers, strict=True)), horovod=Alone())
            return state, balancers, take(balancers[1], "optimizer")

        state, (first, _), exchange = job()
        exchange.kept, tape = 2.0, take(first, "tape")
        tape.kept, first.step_timer.known = 1.0, (3.0, 0.5)
        kept = state.balancer_states()
        state, (first, second), exchange = job()
        state.load_balancer_states(kept)
        assert exchange.kept == 2.0 and state.balancer_states() == kept
        assert first.step_timer.reported[0] == 3.0, "at once: when the tape is used, the next batch has begun"
        state.save()
        assert (tape := take(first, "tape")).kept == 1.0
        tape.kept = exchange.kept = 9.0
        for balancer in (first, second):  # as where other ranks are there, which go back to what was saved
            balancer.rebuild()
        exchange = take(second, "optimizer")
        state.on_reset()
        state.sync()
        assert (exchange.kept, take(first, "tape").kept) == (2.0, 1.0)
        state.sync()  # as where `train` is called once more
        assert exchange.kept == 2.0, "it is given back once"

    World(1).run(program)


def test_what_codecs_keep_goes_back_with_what_was_made_of_it():
    def program(engine):
        balancer, exchange = Balancer(engine, global_batch_size=4), Exchange(2.0)
        balancer.keepers.take("optimizer").put("gradients", [exchange], lambda: 1.0)
        state = JobState({"balancer": balancer}, horovod=Alone())
        for _ in range(2):
            exchange.kept = 9.0
            state.restore()
            assert exchange.kept == 2.0

    World(1).run(program)


def test_a_balancer_that_comes_with_a_part_assigned_later_goes_back_as_well():
    def program(engine):
        state = JobState({"balancer": Balancer(engine, global_batch_size=4)}, horovod=Alone())
        balancer, exchange = Balancer(engine, global_batch_size=4), Exchange(2.0)
        balancer.keepers.take("optimizer").put("gradients", [exchange], lambda: 1.0)
        state.balancer = balancer
        exchange.kept = 9.0
        state.restore()
        assert exchange.kept == 2.0
        assert len(state.balancer_states()) == 1, "of the one before it nothing is saved, as it trains nothing"

    World(1).run(program)


def test_a_checkpoint_keeps_the_types_of_an_optimizers_state():
    """PyTorch gives what it loads the parameters' types; NAdam's product of momenta is more precise than bfloat16."""

    def job():
        model = torch.nn.Linear(2, 1).to(torch.bfloat16)
        optimizer = torch.optim.NAdam(model.parameters(), lr=0.1)
        return model, optimizer, TorchState(model, optimizer)

    model, optimizer, state = job()
    for _ in range(3):
        model(torch.ones(4, 2, dtype=torch.bfloat16)).sum().backward()
        optimizer.step()
    content = state.shared_content()
    _, again, resumed = job()
    resumed.load_shared_content(content)
    for mine, theirs in zip(optimizer.state.values(), again.state.values(), strict=True):
        assert {key: (value.dtype, value.tolist()) for key, value in mine.items()} == {
            key: (value.dtype, value.tolist()) for key, value in theirs.items()
        }


@pytest.mark.parametrize(("elastic", "leaving", "ranks", "saved", "ends"), [
    (True, (0,), 1, [3], True), (True, (), 1, [], False), (True, (1,), 2, [], False), (True, (0, 1), 2, [3], True),
    (False, (), 2, [], False), (False, (1,), 2, [3], True), (False, (0, 1), 2, [3], True),
])  # fmt: skip
def test_the_last_ranks_to_leave_a_job_save_its_checkpoint(elastic, leaving, ranks, saved, ends, monkeypatch):
    """Of a job that is not elastic, all leave together."""
    monkeypatch.setattr("hvd_hetero.engine.job_state.is_elastic", lambda: elastic)
    monkeypatch.setattr(Alone, "size", lambda self: ranks)
    monkeypatch.setattr(Alone, "allgather_object", lambda self, value, name: [rank in leaving for rank in range(ranks)])
    state, found = JobState({"epoch": 3}, horovod=Alone()), []
    state.at_end = lambda: found.append(state.epoch)
    try:
        state.commit()
    except (SystemExit, HostsUpdatedInterrupt) as end:
        assert leaving and ends == (getattr(end, "code", None) == EXIT_STATUS_LEFT)
    else:
        assert not ends and not leaving
    assert found == saved


def test_a_job_whose_state_nobody_has_goes_on_from_the_checkpoint(capfd, monkeypatch):
    monkeypatch.setattr("hvd_hetero.engine.job_state.is_first_worker", lambda: False)
    state = JobState({"epoch": 0}, horovod=Alone())

    def read():
        state.epoch = 7
        return True

    state.read_late = read
    state.sync()
    assert state.epoch == 7 and "begins anew" not in capfd.readouterr().err
    state.epoch = 8
    state.sync()
    assert state.epoch == 8, "it is read once"
    state = JobState({"epoch": 0}, horovod=Alone())
    state.read_late = lambda: False
    state.sync()
    assert "begins anew" in capfd.readouterr().err, "as there is none"


class Several(Alone):
    """Horovod, of ranks that are threads."""

    def __init__(self, engine):
        self.engine = engine

    def rank(self):
        return self.engine.rank

    def size(self):
        return self.engine.size

    def allgather_object(self, value, name):
        texts = gather_text(self.engine, repr(value), name=name)
        return [ast.literal_eval(text) for text in texts]

    def broadcast_object(self, value, root=0, name=None):
        return self.allgather_object(value, name)[root]


@pytest.mark.parametrize(("synced", "left"), [((), (0, 1, 2)), ((), (0, 2)), ((2,), (0, 1)), ((1, 2), (0,))])
def test_ranks_take_the_state_of_who_has_it_and_then_of_who_has_read_the_checkpoint(synced, left):
    """And read it where all have left that to others."""

    def program(engine):
        state = JobState({"epoch": 10 * engine.rank}, horovod=Several(engine))
        state._synced, state.commits = engine.rank in synced, 5 * (engine.rank in synced)
        if engine.rank in left:

            def read():
                engine.allreduce_async(np.zeros(1), name="read").wait()  # collective
                state.epoch = 7
                return True

            state.read_late = read
        state.sync()
        found, state.epoch = state.epoch, 99
        state.restore()
        assert state.epoch == found, "what was received is what a rank goes back to"
        return found

    first = min(synced or set(range(3)) - set(left), default=None)
    assert World(3).run(program) == [7 if first is None else 10 * first] * 3


def test_a_host_that_comes_while_ranks_rebuild_what_they_have_is_heard_of_at_the_next_commit():
    """Which takes seconds where links are probed. What was heard before they came together is of no use any more, nor
    that a host was removed: of a rank that was killed, Horovod says so a second later."""
    state = JobState({"epoch": 0}, horovod=Alone())
    state.on_hosts_updated(1, HostUpdateResult.added)
    state.begin_reset()
    state.on_reset()
    state.commit()
    state.begin_reset()
    state.on_hosts_updated(2, HostUpdateResult.removed)
    state.on_reset()
    state.commit()
    state.begin_reset()
    state.on_hosts_updated(3, HostUpdateResult.mixed)
    state.on_reset()
    with pytest.raises(HostsUpdatedInterrupt):
        state.commit()
    state.commit()


def test_merges_under_way_are_not_completed_once_ranks_are_lost_until_all_have_come_together_again():
    merged = []

    class Local(JobState):
        def _merge(self, part):
            merged.append(part)

    def program(engine):
        state = Local({"balancer": Balancer(engine, global_batch_size=4)}, horovod=Alone())
        state.break_off()
        state.restore()
        assert not merged
        state.sync()
        state.restore()
        assert merged

    World(1).run(program)


def test_who_was_told_to_end_since_the_last_exchange_ends_with_those_who_were_before():
    def program(engine):
        balancer = Balancer(engine, global_batch_size=4)
        state = JobState({"balancer": balancer}, horovod=Several(engine))
        balancer.departure.leaving.hear((0,), balancer.step)
        if engine.rank in (0, 2):
            state.leave()
        return list(state.leaving), state._all_leaving()

    assert World(3).run(program) == [([0], [0, 2])] * 3


@pytest.mark.parametrize("within", [None, (1, 2)])
def test_who_was_told_to_end_does_so_at_a_commit_also_where_no_exchange_says_so(within, monkeypatch):
    """Without a balancer, or with one that some ranks have among themselves, where they have other numbers."""
    monkeypatch.setattr("hvd_hetero.engine.job_state.is_elastic", lambda: True)

    def program(engine):
        given, some = {"epoch": 1}, engine.group(within) if within else None
        if some:
            given["balancer"] = Balancer(some, global_batch_size=4)
        state = JobState(given, horovod=Several(engine))
        if engine.rank == 1:
            state.leave()
        assert state.leaving is None, "no balancer tells all ranks"
        try:
            state.commit()
        except (SystemExit, HostsUpdatedInterrupt) as end:
            return getattr(end, "code", "goes on")
        return None

    assert World(3).run(program) == ["goes on", EXIT_STATUS_LEFT, "goes on"]


def test_a_checkpoint_that_is_loaded_drops_the_gradients_that_were_accumulated_before():
    def program(engine):
        balancer = Balancer(engine, global_batch_size=4)
        state = JobState({"balancer": balancer}, horovod=Alone())
        sums = balancer.sums.take("optimizer")
        sums.load_state_dict({"begun": 2, "kinds": {"a": {"passes": 2}}})
        state.load_shared_state(state.shared_state())
        return sums.state_dict()

    assert World(1).run(program) == [{"begun": 0, "kinds": {}}]
