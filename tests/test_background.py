"""Threads beside the script's: none of them is at work any more when the interpreter ends."""

import subprocess
import sys
import textwrap

import pytest

from hvd_hetero.engine import background

# The collector runs in a thread as it might by itself, and finds many tensors, while the script is at its end.
COLLECTS = """
    import gc, time, torch
    from hvd_hetero.engine import background

    class Cycle:
        pass

    gc.disable()
    for _ in range(300_000):
        one = Cycle()
        one.itself, one.tensor = one, torch.zeros(1)
    background.begin(gc.collect, name="collects")
    time.sleep(0.05)
"""
LEAVES = """
    import atexit, sys, threading, time
    atexit.register(lambda: print([each.name for each in threading.enumerate()]))  # called last
    from hvd_hetero.engine import background
    from hvd_hetero.engine.horovod_tensorflow import _Threads
    from hvd_hetero.engine.watch import Watch
    from hvd_hetero.policy.patience import Patience

    watches = [Watch(Patience()) for _ in range(2)]
    texts = [watch.introduce(rank) for rank, watch in enumerate(watches)]
    watches[0].meet(texts)
    assert not watches[0].explain()
    told = threading.Event()

    def again():
        told.wait()
        background.begin(lambda: time.sleep(0.1), name="of another")

    background.begin(again, name="again", end=told.set)
    threads = _Threads()
    for _ in range(3):
        threads.run(told.wait)  # a call that is under way at the end
    print(*sorted(each.name for each in threading.enumerate() if each.name != "hvd_hetero.answer"))
"""


def said_by(script):
    ended = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, timeout=60, check=False
    )
    assert ended.returncode == 0, ended
    return ended.stdout.splitlines()


def test_a_process_ends_well_whatever_is_at_work():
    pytest.importorskip("torch")
    assert said_by(COLLECTS) == []


def test_none_is_left_at_the_end():
    assert said_by(LEAVES) == [
        "MainThread again hvd_hetero.call hvd_hetero.call hvd_hetero.call hvd_hetero.questions hvd_hetero.questions "
        "hvd_hetero.watch hvd_hetero.watch",
        "['MainThread']",
    ]  # fmt: skip


def test_one_that_does_not_end_keeps_no_process():
    assert said_by("""
        import threading
        from hvd_hetero.engine import background

        background.LIMIT_S = 0.1
        background.begin(threading.Event().wait, name="for good")
        print("over")
    """) == ["over"]


def test_those_that_have_ended_are_forgotten():
    before = len(background._ends)
    for _ in range(20):
        background.begin(lambda: None, name="short")
        for each in list(background._ends):
            if each.name == "short":
                each.join()
    assert len(background._ends) <= before + 1
