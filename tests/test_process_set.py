"""The engine on Horovod, on a binding that does what Horovod does when a peer is gone: it removes the process sets."""

import itertools
import sys
import threading
from types import SimpleNamespace

import numpy as np
import pytest
from spinning import spin

from hvd_hetero.engine import binding, process_set, shared_sets
from hvd_hetero.engine.hierarchy import Levels, leader, plain_sum, rails, scatter
from hvd_hetero.engine.horovod import HorovodEngine
from hvd_hetero.engine.horovod_tensorflow import reason_in
from hvd_hetero.engine.machine import Crowding
from hvd_hetero.engine.port import Chain

hvd = pytest.importorskip("horovod.torch")
REMOVED = "Process set does not exist or has not been registered."
UNKNOWN = "{}: Process set provided does not exist, or has not been registered."


class Sets:
    """Process sets, which are there until `left` more operations have been started."""

    def __init__(self, left):
        self.left = left

    def of(self, number, ranks):
        def asked(answer):
            if number and self.left <= 0:
                raise ValueError(REMOVED)
            return answer

        return SimpleNamespace(
            process_set_id=number, ranks=ranks, included=lambda: True, size=lambda: asked(len(ranks)),
            rank=lambda: asked(0),
        )  # fmt: skip

    def start(self, operation):
        def started(array, *args, process_set, **kwargs):
            if process_set.process_set_id and self.left <= 0:
                raise ValueError(UNKNOWN.format(operation) if operation else "Invalid process set id for this rank: 1")
            self.left -= 1
            if isinstance(array, str):
                raise ValueError(array)
            return array

        return started


@pytest.fixture
def engines(monkeypatch):
    """Of all four ranks, of this node, and of its rail, for the first of the ranks, by how long the sets are there."""

    def made(left):
        sets = Sets(left)
        binding = SimpleNamespace(
            is_initialized=lambda: True, size=lambda: 4, rank=lambda: 0, Sum="sum", poll=lambda handle: True,
            synchronize=lambda handle: handle, global_process_set=sets.of(0, [0, 1, 2, 3]),
            allreduce_async_=sets.start("Allreduce"), broadcast_async_=sets.start("Broadcast"),
            allgather_async=sets.start("Allgather"), alltoall_async=sets.start("Alltoall"),
            reducescatter_async=sets.start(""),
        )  # fmt: skip
        monkeypatch.setitem(sys.modules, "binding_of_a_test", binding)
        return HorovodEngine(), HorovodEngine(sets.of(1, [0, 1])), HorovodEngine(sets.of(2, [0, 2]))

    monkeypatch.setattr(HorovodEngine, "binding", "binding_of_a_test")
    return made


@pytest.mark.parametrize("algorithm", [leader, rails, scatter])
@pytest.mark.parametrize("left", [0, 1, 2])
def test_a_sum_whose_process_sets_go_midway_fails_as_where_a_peer_is_gone(engines, algorithm, left):
    """A survivor that came to the next stage a little later ended, instead of going back to the last commit."""
    everyone, local, cross = engines(3)
    levels = Levels(everyone=everyone, local=local, cross=cross, rails=2, even=True)
    assert Chain(algorithm(levels, np.zeros(4), name="whole", local=None, cross=plain_sum)).wait() is not None
    everyone, local, cross = engines(left)
    levels = Levels(everyone=everyone, local=local, cross=cross, rails=2, even=True)
    with pytest.raises(hvd.HorovodInternalError, match="Process set .*does not exist|Invalid process set id"):
        Chain(algorithm(levels, np.zeros(4), name="broken", local=None, cross=plain_sum)).wait()


@pytest.mark.parametrize("gone", ["rank 1 is gone", ""])
def test_every_operation_tells_the_same_and_keeps_horovods_words(engines, monkeypatch, gone):
    monkeypatch.setattr(process_set.ProcessSetEngine, "explain", lambda: gone)
    _, local, _ = engines(0)
    array = np.zeros(2)
    for text, call in {
        REMOVED: lambda: local.size,
        UNKNOWN.format("Allreduce"): lambda: local.allreduce_async(array, name="x"),
        UNKNOWN.format("Allgather"): lambda: local.allgather_async(array, name="x"),
        UNKNOWN.format("Broadcast"): lambda: local.broadcast_async(array, root=0, name="x"),
        "Invalid process set id for this rank: 1": lambda: local.reducescatter_async(array, name="x"),
    }.items():
        with pytest.raises(hvd.HorovodInternalError) as raised:
            call()
        assert str(raised.value) == (f"{gone}. Horovod says: {text}" if gone else text)
    with pytest.raises(hvd.HorovodInternalError, match="Process set"):
        local.alltoall_async(array, splits=[1, 1], name="x")
    with pytest.raises(hvd.HorovodInternalError, match="Process set"):
        _ = local.rank


@pytest.mark.parametrize(("gone", "text"), [
    ("rank 1 is gone", "rank 1 is gone. Horovod says: Horovod has been shut down."),
    ("", "Horovod has been shut down."),
])
def test_an_operation_that_cannot_be_started_any_more_names_the_rank_that_is_gone(engines, monkeypatch, gone, text):
    """Of two ranks that learn of a death, the one that was just about to sum was told nothing but Horovod's words."""
    everyone, *_ = engines(3)

    def refused(*_args, **_kwargs):
        raise hvd.HorovodInternalError("Horovod has been shut down.")

    monkeypatch.setattr(everyone._binding, "allreduce_async_", refused)
    monkeypatch.setattr(process_set.ProcessSetEngine, "explain", lambda: gone)
    with pytest.raises(hvd.HorovodInternalError) as raised:
        everyone.allreduce_async(np.zeros(2), name="x")
    assert str(raised.value) == text


def test_wrong_arguments_stay_what_they_are(engines, monkeypatch):
    """Nobody is asked whether it is gone, which takes its time, and may be so by now."""
    monkeypatch.setattr(process_set.ProcessSetEngine, "explain", lambda: "rank 1 is gone")
    _, local, _ = engines(3)
    with pytest.raises(ValueError, match="Reducescatter does not support scalar inputs"):
        local.reducescatter_async("Reducescatter does not support scalar inputs", name="x")
    with pytest.raises(ValueError, match="expected 2 splits"):
        local.alltoall_async(np.zeros(2), splits=[2], name="x")
    with pytest.raises(ValueError, match='expected None or "flat"'):
        local.group([0])


@pytest.mark.parametrize(("said", "failure"), [
    ("Horovod is shutting down.", hvd.HorovodInternalError),
    ("Set HOROVOD_DYNAMIC_PROCESS_SETS=1 to allow adding process sets.", ValueError),
])
def test_a_process_set_that_cannot_be_made(engines, monkeypatch, said, failure):
    def refused(ranks):
        raise ValueError(said)

    module = SimpleNamespace(
        add_process_set=refused, _basics=SimpleNamespace(_get_process_set_ids_and_ranks=lambda: {})
    )
    monkeypatch.setattr(shared_sets, "_module", lambda: module)
    monkeypatch.setattr("hvd_hetero.engine.farewell.prepare", lambda engine: None)
    everyone, _, _ = engines(3)
    with pytest.raises(failure, match=said) as raised:
        everyone.group([0, 1])
    assert ("call hvd.init(process_sets=" in str(raised.value)) is (failure is ValueError), "no setting is wrong"


class ProcessSets:
    """Horovod's module of this name: there is one process set of the same ranks."""

    class ProcessSet:
        def __init__(self, ranks):
            self.ranks, self.process_set_id = ranks, None

        def _invalidate(self):
            self.process_set_id = None

    def __init__(self):
        self.there, self._numbers = {}, itertools.count(1)
        self._basics = SimpleNamespace(_get_process_set_ids_and_ranks=lambda: dict(self.there))

    def add_process_set(self, given):
        made = given if isinstance(given, self.ProcessSet) else self.ProcessSet(given)
        if made.ranks in self.there.values():
            raise ValueError("A process set with the same ranks already exists")
        made.process_set_id = next(self._numbers)
        self.there[made.process_set_id] = made.ranks
        return made

    def remove_process_set(self, given):
        if given.process_set_id is None:
            return False
        del self.there[given.process_set_id]
        given._invalidate()
        return True


def test_a_process_set_is_shared_with_the_script_and_stays_where_an_engine_uses_it(monkeypatch):
    horovod = ProcessSets()
    monkeypatch.setattr(shared_sets, "_module", lambda: horovod)
    monkeypatch.setattr(shared_sets, "_used", set())
    scripts = shared_sets.add_process_set([0, 1])
    ours = [shared_sets.process_set_of(ranks) for ranks in ([0, 1], [2, 3])]
    assert ours[0].process_set_id == scripts.process_set_id and ours[0] is not scripts
    again = horovod.ProcessSet([2, 3])
    assert shared_sets.add_process_set(again) is again and again.process_set_id == ours[1].process_set_id
    for one, used in ((scripts, ours[0]), (again, ours[1])):
        assert shared_sets.remove_process_set(one) and one.process_set_id is None
        assert used.process_set_id in horovod.there
        assert not shared_sets.remove_process_set(one), "it was removed before"
    alone = shared_sets.add_process_set([0, 3])
    assert shared_sets.remove_process_set(alone) and [0, 3] not in horovod.there.values()
    of_another_kind = shared_sets.add_process_set(horovod.ProcessSet(None))  # as of a communicator of mpi4py
    assert shared_sets.remove_process_set(of_another_kind)


def test_an_engine_is_on_process_sets_that_are_there_and_include_this_rank(engines):
    everyone, local, _ = engines(3)
    everyone._given.ranks = None  # as Horovod has it before its initialisation
    assert everyone.ranks == (0, 1, 2, 3) and local.ranks == (0, 1)
    local._given.included = lambda: False
    with pytest.raises(ValueError, match=r"includes this rank \(0\). Received: \[0, 1\]"):
        HorovodEngine(local._given)
    local._given.process_set_id = None
    with pytest.raises(ValueError, match="one of ranks \\[0, 1\\] that was not added, or has been removed"):
        HorovodEngine(local._given)
    everyone._binding.is_initialized = lambda: False
    with pytest.raises(RuntimeError, match="Expected hvd.init"):
        HorovodEngine()


@pytest.mark.skipif(Crowding(threading.get_native_id()).slowness() is None, reason="Linux does not tell")
def test_how_crowded_the_cores_are_is_told_by_the_thread_that_made_the_engine(engines):
    """Which trains, and need not be the process's main thread."""
    told = []

    def train():
        engine = engines(0)[0]
        for _ in range(3):
            spin(0.01)
            told.append(engine.crowding())

    thread = threading.Thread(target=train)
    thread.start()
    thread.join()
    assert len(told) == 3 and all(slowness is not None and slowness >= 1.0 for slowness in told)


def test_names_begin_anew_where_ranks_have_come_together_again(engines):
    """Those that have joined begin to count."""
    everyone, local, _ = engines(3)
    HorovodEngine.rebuild([])
    called = []
    for _ in range(2):
        assert [everyone.unique("a"), everyone.unique("a"), local.unique("a")] == ["a1", "a2", "a1"]
        assert [everyone.next_of(one._given, "b") for one in (everyone, local, local)] == ["b1", "b1", "b2"]
        HorovodEngine.rebuild([lambda: called.append("rebuilt")])
    assert called == ["rebuilt"] * 2


def test_what_is_to_be_forgotten_is_before_ranks_come_together_again(engines, monkeypatch):
    everyone, *_ = engines(3)

    class Waits:
        def forget(self):
            called.append("waits")

    called, waits = [], Waits()
    monkeypatch.setattr(process_set.farewell, "forget", lambda: called.append("farewell"))
    everyone.on_reset_begin(waits.forget)
    HorovodEngine.forget()
    assert called == ["waits", "farewell"]


def test_a_group_is_of_the_ranks_as_this_one_counts_them(engines, monkeypatch):
    everyone, local, _ = engines(3)
    prepared, asked = [], []
    monkeypatch.setattr("hvd_hetero.engine.farewell.prepare", prepared.append)

    def process_set_of(ranks, included=True):
        asked.append(ranks)
        return SimpleNamespace(process_set_id=7, ranks=ranks, included=lambda: ranks != [2, 3])

    monkeypatch.setattr(process_set, "process_set_of", process_set_of)
    assert everyone.group([0, 1, 2, 3]) is everyone and local.group([0, 1]) is local and not prepared
    some = everyone.group([0, 3])
    assert type(some) is type(everyone) and some.ranks == (0, 3)
    assert everyone.group([2, 3]) is None, "it is none of them, and has made the set with the others"
    assert asked == [[0, 3], [2, 3]] and prepared == [everyone, everyone]
    assert everyone.group([1, 0]) is not everyone, "in another order"


def test_of_a_horovod_that_was_shut_down_no_process_set_is_in_use(engines, monkeypatch):
    """A script that initialises it again, and adds one of the same ranks, got one that was not there."""
    added = []

    class ProcessSet:
        def __init__(self, ranks):
            self.ranks, self.process_set_id = ranks, None

    def add_process_set(ranks):
        added.append(ranks)
        return SimpleNamespace(ranks=ranks, process_set_id=1)

    module = SimpleNamespace(
        ProcessSet=ProcessSet,
        add_process_set=add_process_set,
        _basics=SimpleNamespace(_get_process_set_ids_and_ranks=lambda: {}),
    )
    monkeypatch.setattr(shared_sets, "_module", lambda: module)
    monkeypatch.setattr(shared_sets, "_used", set())
    engines(3)
    sys.modules["binding_of_a_test"].shutdown = lambda: None
    shared_sets.process_set_of([0, 1])
    binding.shutdown("torch")
    assert shared_sets.add_process_set([0, 1]).process_set_id == 1 and len(added) == 2


@pytest.mark.parametrize("given", [[0, 1], 0, "node"])
def test_the_ranks_of_a_process_set_are_none(given):
    with pytest.raises(TypeError, match="process_set: expected an hvd.ProcessSet, as hvd.add_process_set"):
        HorovodEngine(given)


@pytest.mark.parametrize("before", ["", "Graph execution error:\n\nDetected at node Sum defined at\nNode: 'Sum'\n"])
@pytest.mark.parametrize("after", ["", "\n\t [[{{node Allgather.None.0.float64/hvd_hetero.allgather.1}}]]"])
def test_what_horovod_says_is_found_in_what_tensorflow_says(before, after):
    assert reason_in(f"{before}The ranks differ.{after}") == "The ranks differ."
