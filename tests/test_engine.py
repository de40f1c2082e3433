"""The engines without Horovod: the contract, and what threads add to it."""

import functools
import gc
import threading
import time

import numpy as np
import pytest
from contract import check_engine

from hvd_hetero.engine import payload, port
from hvd_hetero.engine.callback import Rebuilds, WeakMethods
from hvd_hetero.engine.local import LocalEngine, SoloEngine, World
from hvd_hetero.engine.payload import (
    broadcast_bytes,
    broadcast_in_pieces,
    gather_bytes,
    gather_text,
    scatter_bytes,
)
from hvd_hetero.engine.port import (
    Chain,
    CollectiveError,
    Engine,
    base_name,
    numbered_name,
    rotating_name,
)
from hvd_hetero.optimizers.stateful_parts import StatefulParts
from hvd_hetero.policy.rank_words import by_rank


@pytest.mark.parametrize("size", [2, 3, 5])
def test_world_keeps_the_contract(size):
    World(size).run(check_engine)


def test_an_operation_that_is_complete_has_not_failed_although_a_rank_has_since_this_one_looked():
    world = World(2)
    group = world.subgroup((0, 1))
    first = LocalEngine(group, 0, (0, 1)).allreduce_async(np.ones(1), name="sum")

    class Late(threading.Event):
        def wait(self, timeout=None):
            before = self.is_set()
            if not before:  # the other rank comes right after this look, and fails before the next
                LocalEngine(group, 1, (0, 1)).allreduce_async(np.ones(1), name="sum")
                world.failed.set()
            return before

    first.call.ready = Late()
    assert first.wait().tolist() == [2.0]
    with pytest.raises(CollectiveError, match="another rank stopped"):
        group.check("sum", lambda: False)


def test_of_two_ranks_that_wait_for_each_other_one_goes_on():
    """As at the bounds of two optimizers' local steps, each at that of another one."""

    def program(engine):
        mine, theirs = (engine.rank, 1 - engine.rank)
        first = engine.allreduce_async(np.zeros(1), name=f"of rank {mine}")
        waited = engine.wait_avoiding_deadlock(first.done, name=f"of rank {mine}")
        engine.allreduce_async(np.zeros(1), name=f"of rank {theirs}").wait()
        first.wait()
        return waited

    assert not all(World(2).run(program, timeout_s=5))


def test_who_waits_in_what_came_after_waits_for_nobody_in_what_is_over():
    """One rank looks, then the sum ends, and then it sees the other one wait in the next."""
    looked = threading.Event()

    def program(engine):
        if engine.rank == 1:
            assert looked.wait(10)
        first = engine.allreduce_async(np.zeros(1), name="first")

        def over():
            if looked.is_set():
                return first.done()
            looked.set()
            deadline = time.monotonic() + 10
            while all(0 in call.arrays for call in engine._group.waited_for) and time.monotonic() < deadline:
                time.sleep(0.001)
            return False  # as it was when it looked

        waited = engine.wait_avoiding_deadlock(over, name="first") if engine.rank == 0 else first.wait() is not None
        engine.allreduce_async(np.zeros(1), name="second").wait()
        return waited

    assert World(2).run(program, timeout_s=30) == [True, True]


def test_solo_engine_is_an_engine_and_the_identity():
    engine = SoloEngine()
    assert isinstance(engine, Engine)
    array = np.arange(3.0)
    assert engine.allreduce_async(array, name="x").wait() is array and array.tolist() == [0, 1, 2]
    assert engine.allgather_async(array, name="y").wait().tolist() == [0, 1, 2]
    assert engine.group([0]).size == 1


def test_groups_reduce_among_themselves():
    def program(engine):
        group = engine.group([0, 2])
        if group is None:
            assert engine.rank == 1
            return None
        total = group.allreduce_async(np.array([float(engine.rank)]), name="pair").wait()
        return group.rank, group.ranks, total.tolist()

    assert World(3).run(program) == [(0, (0, 2), [2.0]), None, (1, (0, 2), [2.0])]


def test_sums_are_the_same_in_every_run_and_on_every_rank():
    def program(engine):
        values = np.random.RandomState(engine.rank).standard_normal(1000).astype(np.float32)
        return engine.allreduce_async(values, name="sum").wait().tobytes()

    first = World(5).run(program)
    assert len(set(first)) == 1 and first == World(5).run(program)


def test_a_rank_that_raises_leaves_no_rank_hanging():
    def program(engine):
        if engine.rank == 1:
            raise ValueError("the cause")
        engine.allreduce_async(np.zeros(1), name="never").wait()

    with pytest.raises(ValueError, match="the cause"):
        World(3).run(program, timeout_s=10)
    outcome = World(3).run(program, timeout_s=10, errors="return")
    assert [type(error) for error in outcome] == [CollectiveError, ValueError, CollectiveError]


def test_waiting_uses_no_cpu():
    release = threading.Event()

    def program(engine):
        if engine.rank == 1:
            release.wait(5)
        elif engine.rank == 0:
            threading.Timer(0.3, release.set).start()
        import time

        before = time.thread_time()
        engine.allreduce_async(np.zeros(1), name="late").wait()
        return time.thread_time() - before

    assert max(World(2).run(program)) < 0.05


class Given:
    """A handle whose result is there once `ready` is set."""

    def __init__(self, result, ready=True):
        self.result, self.ready = result, ready

    def done(self):
        return self.ready

    def wait(self):
        if isinstance(self.result, Exception):
            raise self.result
        return self.result


def test_a_chain_starts_each_stage_when_the_one_before_is_done():
    first, started = Given(1, ready=False), []

    def steps():
        one = yield first
        started.append(one)
        two = yield Given(2)
        return one + two

    chain = Chain(steps())
    assert not chain.done() and not started
    first.ready = True
    assert chain.done() and started == [1] and chain.wait() == 3


def test_a_chain_may_end_without_a_stage_and_waits_through_all_of_them():
    def nothing():
        return 7
        yield

    assert Chain(nothing()).wait() == 7

    def two():
        return (yield Given((yield Given(3, ready=False)) + 1, ready=False))

    assert Chain(two()).wait() == 4


def test_a_stage_that_fails_ends_its_chain():
    ended = []

    def steps():
        try:
            yield Given(CollectiveError("gone"))
        finally:
            ended.append(True)

    chain = Chain(steps())
    with pytest.raises(CollectiveError, match="gone"):
        chain.wait()
    assert ended and chain.done()


def test_operations_that_take_turns_have_one_name_in_common():
    names = [f"{numbered_name('balancer1.lanes', number)}.bucket.0" for number in range(12)]
    assert len(set(names)) == 12
    assert {base_name(name) for name in names} == {"balancer1.lanes.bucket.0"}


def test_a_reset_rebuilds_nothing_that_nothing_holds_any_more():
    """Whether rubbish that holds itself was collected yet differs between ranks, and what is called is collective."""
    called = []

    class Thing:
        def __init__(self):
            self.itself = self

        def rebuild(self):
            called.append(self)

    gc.disable()
    try:
        kept, engine = Thing(), SoloEngine()
        for thing in (kept, Thing()):
            engine.on_reset_end(thing.rebuild)
        del thing
        engine.rebuild()
    finally:
        gc.enable()
    assert called == [kept]


def counted(engine):
    """The engine, and the lengths of what it broadcasts, gathers and deals."""
    lengths = []

    def start(call, array, **options):
        lengths.append(array.nbytes)
        return call(array, **options)

    for kind in ("broadcast_async", "allgather_async", "alltoall_async"):
        setattr(engine, kind, functools.partial(start, getattr(engine, kind)))
    return engine, lengths


@pytest.mark.parametrize("length", [0, 1, 12, 13, 24, 50])
def test_long_bytes_travel_in_pieces_and_short_ones_in_one_operation(monkeypatch, length):
    monkeypatch.setattr(payload, "PIECE_BYTES", 12)
    whole = bytes(range(length))

    def program(engine):
        engine, lengths = counted(engine)
        mine = whole if engine.rank == 1 else b"else"
        assert broadcast_bytes(engine, mine, root=1, name="x") == whole
        pieces = [12] * (length // 12) + [length % 12] * (length % 12 > 0 or length == 0)
        assert lengths == [8, *pieces], "what says how long it is, and the pieces"
        lengths.clear()
        each = [whole[: rank * length // 2] for rank in range(engine.size)]
        assert gather_bytes(engine, each[engine.rank], name="y") == each
        total = sum(map(len, each))
        assert len(lengths) == 2 if total <= 12 else max(lengths[1:]) <= 12 // engine.size
        at_one = gather_bytes(engine, each[engine.rank], name="z", root=1)
        assert at_one == (each if engine.rank == 1 else [])
        lengths.clear()
        parts = each if engine.rank == 1 else []
        assert scatter_bytes(engine, parts, root=1, name="w") == each[engine.rank], "who has none need not say so"
        assert len(lengths) == 2 if total <= 12 else max(lengths[1:]) <= 12

    World(3).run(program)


@pytest.mark.parametrize("lengths", [(13, 14), (5, 30), (30, 24), (24, 12), (3, 4)])
def test_bytes_of_unlike_lengths_are_an_error_on_every_rank(monkeypatch, lengths):
    monkeypatch.setattr(payload, "PIECE_BYTES", 12)

    def program(engine):
        with pytest.raises(CollectiveError, match="'x': expected"):
            broadcast_in_pieces(engine, np.zeros(lengths[engine.rank], np.uint8), root=0, name="x")

    World(2).run(program, timeout_s=10)


def test_names_by_turns_are_few_and_alike_on_all_ranks():
    def program(engine):
        names = [rotating_name(engine, "x.") for _ in range(port.ROTATING_NAMES)]
        assert len(set(names)) == port.ROTATING_NAMES
        engine.unique("another")
        return [*names, *(rotating_name(engine, "x.") for _ in range(50))]

    first, second = World(2).run(program)
    assert first == second and len(set(first)) == port.ROTATING_NAMES


def test_a_method_that_is_added_twice_is_called_once():
    class Thing:
        called = 0

        def rebuild(self):
            self.called += 1

    thing, methods = Thing(), WeakMethods()
    for _ in range(2):
        methods.add(thing.rebuild)
    methods.call()
    assert thing.called == 1


@pytest.mark.parametrize("start", [
    lambda engine: engine.allreduce_async(np.zeros(1), name="x", op=("sum", "max")[engine.rank]),
    lambda engine: engine.broadcast_async(np.zeros(1), name="x", root=engine.rank),
])  # fmt: skip
def test_ranks_that_ask_for_unlike_operations_all_hear_of_it(start):
    found = World(2).run(lambda engine: start(engine).wait(), errors="return")
    assert [type(each) for each in found] == [CollectiveError] * 2


def test_what_was_summed_is_no_result_where_it_lies():
    """The port says nothing of it: who takes it for the result is to notice."""

    def program(engine):
        array = np.ones(3)
        return engine.allreduce_async(array, name="x").wait().tolist() == [2.0] * 3 and np.isnan(array).all()

    assert all(World(2).run(program))


def test_texts_of_several_lines_come_as_one_of_each_rank():
    texts = ["a\nb", "", "c"]
    found = World(3).run(lambda engine: gather_text(engine, texts[engine.rank], name="x"))
    assert found == [["a b", "", "c"]] * 3


@pytest.mark.parametrize("made, add", [
    (WeakMethods, lambda kept, thing: kept.add(thing.state_dict)),
    (Rebuilds, lambda kept, thing: kept.add(thing.state_dict, by_all=True)),
    (StatefulParts, lambda kept, thing: kept.add(thing)),
])  # fmt: skip
def test_what_is_gone_leaves_nothing_behind(made, add):
    """A script may make a loader for each of its epochs."""

    class Thing:
        def state_dict(self): ...

    kept = made()
    for _ in range(100):
        add(kept, Thing())
    (held,) = (one for one in vars(kept).values() if isinstance(one, (list, dict)))
    assert len(held) <= 1


def test_a_handle_is_waited_for_once_and_a_name_is_under_way_once():
    def program(engine):
        first = engine.allreduce_async(np.zeros(1), name="x")
        if engine.rank == 0:
            with pytest.raises(ValueError, match="at most one collective of this name"):
                engine.allreduce_async(np.zeros(1), name="x")
        engine.allreduce_async(np.zeros(1), name="y").wait()
        first.wait()
        with pytest.raises(RuntimeError, match="waited for"):
            first.wait()

    World(2).run(program)


def test_ranks_that_gave_the_same_are_named_together():
    assert by_rank([5]) == "rank 0: 5" and by_rank([5, 6]) == "rank 0: 5; rank 1: 6"
    assert by_rank(["a", "b", "a", "a", "a", "b", "c", "a"]) == "ranks 0, 2 to 4, 7: a; ranks 1, 5: b; rank 6: c"
    assert by_rank([*[1] * 63, 2]) == "ranks 0 to 62: 1; rank 63: 2"
