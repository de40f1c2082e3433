"""The engines without Horovod: the contract, and what threads add to it."""

import threading

import numpy as np
import pytest
from contract import check_engine

from hvd_hetero.engine.local import SoloEngine, World
from hvd_hetero.engine.port import CollectiveError, Engine


@pytest.mark.parametrize("size", [2, 3, 5])
def test_world_keeps_the_contract(size):
    World(size).run(check_engine)


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
        total = np.array([float(engine.rank)])
        group.allreduce_async(total, name="pair").wait()
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
