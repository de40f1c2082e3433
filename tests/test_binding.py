"""Initialising Horovod: who chooses its settings."""

import contextlib
import os
import subprocess
import sys
import threading
import time
import types

import numpy as np
import pytest
from spinning import spin

from hvd_hetero.engine import binding, elastic, farewell, machine, own_threads, shared_sets
from hvd_hetero.engine.local import World
from hvd_hetero.engine.port import CollectiveError


class Engine:
    """One of a framework that is there."""

    binding, failure = "a_binding", (CollectiveError,)

    def watch(self):
        pass

    def agree_on_rebuilds(self):
        return []


def stand_in(monkeypatch, **horovod):
    """For Horovod, of two ranks unless it says otherwise."""
    monkeypatch.setitem(sys.modules, "a_binding", types.SimpleNamespace(**{"size": lambda: 2, **horovod}))
    monkeypatch.setattr(binding, "_class", lambda framework: Engine)
    monkeypatch.setattr(binding, "check_versions", lambda engine, mine, stays: None)
    monkeypatch.setattr(binding, "prepare_wait", lambda: None)
    monkeypatch.setattr(binding, "prepare_init", lambda: None)
    monkeypatch.setattr(binding, "_prepares", {})
    monkeypatch.setattr(binding, "_again", {})
    monkeypatch.setattr(binding, "_together", set())


@pytest.mark.parametrize(("before", "prepared"), [(False, [0, 1]), (True, [])])
def test_settings_are_chosen_by_whoever_initialises_first_for_good(monkeypatch, before, prepared):
    """A process that initialises again, as ranks change, and one that joins have them alike."""
    state = {"there": before, "round": 0}
    chosen = []
    stand_in(monkeypatch, is_initialized=lambda: state["there"], init=lambda: state.update(there=True))
    monkeypatch.setattr(binding, "prepare_init", lambda: chosen.append(state["round"]))
    for state["round"] in range(2):
        binding.init("torch")
        state["there"] = False  # as after a shutdown
    assert chosen == prepared


class ProcessSet:
    def __init__(self, ranks=()):
        self.ranks = ranks


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("script_first", [False, True])
def test_the_threads_that_horovod_starts_are_known(monkeypatch, script_first, known):
    """Those of each initialisation anew, and of process sets that are made later. None is where the script has
    initialised Horovod, or where /proc does not tell, or tells the numbers of another namespace."""
    over, ran, there = threading.Event(), threading.Barrier(2), [script_first]

    def run():
        spin(0.02)
        ran.wait()
        over.wait()

    def start(*args):
        threading.Thread(target=run).start()
        there[0] = True
        ran.wait()
        return ProcessSet()

    def told():
        return None if own_threads.seconds() is None else round(own_threads.seconds() / 0.02)

    sets = types.SimpleNamespace(
        ProcessSet=ProcessSet, add_process_set=start,
        _basics=types.SimpleNamespace(_get_process_set_ids_and_ranks=dict),
    )  # fmt: skip
    stand_in(monkeypatch, is_initialized=lambda: there[0], init=start)
    monkeypatch.setattr(shared_sets, "_module", lambda: sets)
    monkeypatch.setattr(shared_sets, "_used", set())
    monkeypatch.setattr(own_threads, "_clock", machine.ThreadClock())
    if not known:
        monkeypatch.setattr(own_threads, "threads", lambda: {1})

    try:
        binding.init("torch")
        assert told() == (1 if known and not script_first else None)
        for made, make in enumerate((shared_sets.add_process_set, shared_sets.process_set_of)):
            make([0])
            assert told() == (2 + made if known and not script_first else None)
        there[0] = False  # as after a shutdown
        binding.init("torch")
        assert told() == (1 if known else None)
    finally:
        over.set()


def test_a_rank_that_was_in_the_job_before_others_joined_says_so(monkeypatch):
    stand_in(monkeypatch, is_initialized=lambda: False, init=lambda: None)
    said = []
    monkeypatch.setattr(binding, "check_versions", lambda engine, mine, stays: said.append(stays))
    for _ in range(2):
        binding.init("torch")
    assert said == [False, True]


def test_initialising_twice_waits_for_nobody(monkeypatch):
    """As with Horovod: a library, or one rank's script, may do it again. After a shutdown, or where the first time
    failed, ranks come together."""
    there, met = [False], []
    stand_in(monkeypatch, is_initialized=lambda: there[0], init=lambda: there.__setitem__(0, True))

    def watch(engine):
        met.append(1)
        if len(met) == 1:
            raise CollectiveError("timed out")

    monkeypatch.setattr(Engine, "watch", watch)
    with pytest.raises(CollectiveError):
        binding.init("torch")
    for _ in range(3):
        binding.init("torch")
    assert len(met) == 2
    there[0] = False
    binding.init("torch")
    assert len(met) == 3


@pytest.mark.parametrize("elastic", [False, True])
def test_a_first_exchange_that_fails_says_how_gloo_sums(monkeypatch, capsys, elastic):
    """In an elastic job it fails where ranks die, too."""
    stand_in(monkeypatch, is_initialized=lambda: False, init=lambda: None)
    monkeypatch.setattr(binding, "is_elastic", lambda: elastic)
    monkeypatch.setattr(binding, "gloo_allreduce", lambda: "hierarchical")

    def fails(engine):
        raise CollectiveError("timed out")

    monkeypatch.setattr(Engine, "watch", fails)
    with pytest.raises(CollectiveError, match="timed out"):
        binding.init("torch")
    assert ("this one sums by 'hierarchical'" in capsys.readouterr().err) != elastic


SIZES = (
    "HOROVOD_SIZE", "HOROVOD_CONTROLLER", "HOROVOD_ELASTIC", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "PMI_SIZE",
    "PMI_RANK", "PMIX_RANK", "SLURM_STEP_NUM_TASKS", "WORLD_SIZE", "TORCHELASTIC_RUN_ID",
)  # fmt: skip


@pytest.mark.parametrize(("told", "size", "comm", "outcome"), [
    ({}, 1, None, ""),
    ({"HOROVOD_SIZE": "1"}, 1, None, ""),
    ({"HOROVOD_SIZE": "3"}, 3, None, ""),
    ({"HOROVOD_SIZE": "3"}, 1, None, "Expected 3 ranks, which HOROVOD_SIZE"),
    ({"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "0"}, 1, None, "Expected 2 ranks, which OMPI"),
    ({"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "0"}, 1, [0], ""),  # of the script's own choice
    ({"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "0", "HOROVOD_SIZE": "1"}, 1, None, ""),  # a job within one
    ({"HOROVOD_SIZE": "3", "HOROVOD_ELASTIC": "1"}, 1, None, ""),  # the others have left
    ({"WORLD_SIZE": "4"}, 1, None, ""),
    ({"WORLD_SIZE": "4", "TORCHELASTIC_RUN_ID": "x"}, 1, None, "WORLD_SIZE says that 4 processes"),
    ({"SLURM_STEP_NUM_TASKS": "8"}, 1, None, "SLURM_STEP_NUM_TASKS says that 8 processes"),
    ({"SLURM_STEP_NUM_TASKS": "8", "PMIX_RANK": "0"}, 1, None, "by the MPI that Horovod was built with"),  # without one
    ({"SLURM_STEP_NUM_TASKS": "8", "HOROVOD_SIZE": "1"}, 1, None, ""),  # horovodrun -np 1 in each of 8 tasks
])  # fmt: skip
def test_a_rank_that_is_alone_though_several_were_started_does_not_train_by_itself(
    monkeypatch, capsys, told, size, comm, outcome
):
    for name in SIZES:
        monkeypatch.delenv(name, raising=False)
    for name, value in told.items():
        monkeypatch.setenv(name, value)
    stand_in(monkeypatch, is_initialized=lambda: False, init=lambda **kwargs: None, size=lambda: size)
    options = {"comm": comm} if comm else {}
    if outcome.startswith("Expected"):
        with pytest.raises(RuntimeError, match=outcome):
            binding.init("torch", **options)
    else:
        binding.init("torch", **options)
        said = capsys.readouterr().err
        assert outcome in said and bool(said) == bool(outcome)


@pytest.mark.parametrize(("took_s", "comes"), [
    ([300.0, 10.0, 200.0, 1.0], True),  # until the driver has hosts, and Gloo gives up a rank that loads too long
    ([10.0] * 20, False),
])  # fmt: skip
def test_a_long_wait_for_hosts_leaves_time_for_further_tries(monkeypatch, took_s, comes):
    now_s, left = [0.0], list(took_s)
    monkeypatch.setattr(binding, "time", types.SimpleNamespace(monotonic=lambda: now_s[0], sleep=lambda seconds: None))
    monkeypatch.setattr(binding, "is_elastic", lambda: True)

    def init():
        now_s[0] += left.pop(0)
        if left:
            raise ValueError("Horovod initialization failed. Please check log messages above.")

    horovod = types.SimpleNamespace(init=init, shutdown=lambda: None)
    with contextlib.nullcontext() if comes else pytest.raises(RuntimeError, match="Expected to reach all ranks"):
        binding._initialise(horovod)
    assert bool(left) is not comes


def test_ranks_wait_for_each_other_wherever_a_job_with_groups_may_end(monkeypatch):
    """An elastic job may sum on after its function has ended: in another one, or until its process ends. Within such a
    function a rank leaves alone."""
    waits = []

    class Waited:
        def allreduce_async(self, array, *, name):
            waits.append(name)
            return types.SimpleNamespace(done=lambda: True, wait=lambda: None)

        def wait_avoiding_deadlock(self, done, *, name):
            assert done() and name == waits[-1]

    stand_in(monkeypatch, shutdown=lambda: None)
    monkeypatch.setattr(Engine, "begin_train", lambda: None, raising=False)
    monkeypatch.setattr(Engine, "explain", lambda: "", raising=False)
    monkeypatch.setattr(Engine, "forget", farewell.forget, raising=False)
    monkeypatch.setattr(elastic, "run", lambda train, **rest: train)

    def ended():
        farewell._at_exit()
        found, waits[:] = len(waits), []
        return found

    def leaves():
        raise SystemExit(75)

    assert ended() == 0, "no group was made"
    farewell.prepare(Waited())
    assert ended() == 1
    train = binding.elastic_run("torch", lambda: ended(), gone=lambda error: False)
    assert [train(), ended(), train(), ended()] == [0, 2, 0, 2], "not within it, and at its end and that of the process"
    with pytest.raises(SystemExit):
        binding.elastic_run("torch", leaves, gone=lambda error: False)()
    assert ended() == 0
    binding.shutdown("torch")
    assert (len(waits), ended()) == (1, 1), "and at the end of the process no more"


def test_a_rank_that_others_wait_for_elsewhere_ends_without_a_farewell():
    """As one that calls `sys.exit()` in the midst of training: the others hear of it at once."""

    def program(engine):
        if engine.rank == 0:
            farewell.prepare(engine)
            try:
                farewell.say()
            finally:
                farewell.forget()
        took_s = time.monotonic() - began
        engine.allreduce_async(np.zeros(1), name="gradient").wait()
        return took_s

    began = time.monotonic()
    assert World(2).run(program)[0] < farewell.LIMIT_S / 2


STARTS_ANOTHER = """
import multiprocessing
import sys
import types

from hvd_hetero.engine import binding

if __name__ == "__main__":
    other = multiprocessing.get_context(sys.argv[1]).Process(target=print, args=("started",))
    other.start()
    other.join()
    sys.exit(other.exitcode)
binding._class = lambda framework: types.SimpleNamespace(binding="types")
binding._come_together = lambda framework: print("initialised", framework)
binding.init("torch")
"""


@pytest.mark.parametrize(
    ("method", "size", "taken"), [("spawn", 2, False), ("forkserver", 2, False), ("spawn", 1, True)]
)
def test_a_process_that_imports_the_script_of_a_rank_does_not_take_its_place(tmp_path, method, size, taken):
    """As a loading process does, from Python 3.14 on. In a job of one rank, it has no place to take."""
    script = tmp_path / "train.py"
    script.write_text(STARTS_ANOTHER)
    env = {**os.environ, "HOROVOD_SIZE": str(size)}
    ran = subprocess.run([sys.executable, str(script), method], env=env, capture_output=True, text=True, timeout=60)
    assert (ran.returncode == 0) == ("initialised torch" in ran.stdout) == ("started" in ran.stdout) == taken
    assert ('under `if __name__ == "__main__":`' in ran.stderr) == (not taken)
