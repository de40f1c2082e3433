"""Checkpoints: a file that is whole or not there, one outcome on all ranks, and leaving at one step."""

import errno
import hashlib
import json
import os
import signal
import stat
import time
import tracemalloc

import numpy as np
import pytest

from hvd_hetero.engine import checkpoint as checkpoint_module
from hvd_hetero.engine import checkpoint_file, payload, termination
from hvd_hetero.engine.checkpoint import Checkpoint
from hvd_hetero.engine.checkpoint_file import CheckpointError, CheckpointFile
from hvd_hetero.engine.local import LocalEngine, SoloEngine, World
from hvd_hetero.engine.termination import EXIT_STATUS_LEFT


@pytest.fixture
def file(tmp_path):
    return CheckpointFile(tmp_path / "run" / "checkpoint")


def test_what_was_written_is_read(file):
    assert file.read() == (None, ""), "nothing yet"
    for content in (b"first", b"\n second \n", os.urandom(3_000_000), b""):
        file.write([content])
        assert file.read() == (content, "")
    assert sorted(path.name for path in file.path.parent.iterdir()) == ["checkpoint", "checkpoint.previous"]


def test_what_a_killed_process_has_left_goes_when_it_is_old(file):
    file.write([b"first"])
    old, new = (file.path.with_name(f".checkpoint.{pid}.new") for pid in (1, 2))
    for path in (old, new):
        path.write_bytes(b"half")
    os.utime(old, (0, 0))
    file.write([b"second"])
    assert not old.exists() and new.exists() and file.read() == (b"second", "")


def tear(path):
    path.write_bytes(path.read_bytes()[:-2])


def flip(path):
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def replace(content):
    return lambda path: path.write_bytes(content)


TICK_S = 0.02  # of the clock that files' times are from; a change sooner than that is not seen
DAMAGES = {
    "is torn": tear,
    "is damaged": flip,
    "is not one": replace(b"\x80\x02}q\x00."),
    "is of another kind": replace(json.dumps({"kind": "x", "bytes": 0, "sha256": ""}).encode() + b"\n"),
}


@pytest.mark.parametrize("text", [*DAMAGES, "is not one, empty"])
def test_a_broken_file_is_refused_and_the_one_before_is_used(file, text):
    damage = DAMAGES.get(text, replace(b""))
    file.write([b"first"])
    file.write([b"second"])
    time.sleep(TICK_S)
    damage(file.path)
    content, problem = file.read()
    assert content == b"first" and text.partition(",")[0] in problem and str(file.path) in problem
    file.write([b"third"])
    assert file.read() == (b"third", "")
    time.sleep(TICK_S)
    damage(file.path)
    assert file.read()[0] == b"first", "a broken file has not taken the place of a whole one"
    damage(file.previous)
    with pytest.raises(CheckpointError, match=text.partition(",")[0]):
        file.read()


def replace_by_another_job(path):
    CheckpointFile(path).write([b"of another"])
    flip(path)


def write_elsewhere(path):
    other = path.with_name("other")
    other.write_bytes(path.read_bytes())
    flip(other)
    other.rename(path)


@pytest.mark.parametrize("damage", [*DAMAGES.values(), replace_by_another_job, write_elsewhere])
def test_a_file_that_this_process_wrote_is_checked_if_it_was_changed_since(file, damage):
    for content in (b"first", b"second"):
        file.write([content])
    time.sleep(TICK_S)
    kept = file.previous.read_bytes()
    damage(file.path)
    if damage is replace_by_another_job:
        kept = file.previous.read_bytes()
        assert b"second" in kept
    file.write([b"third"])
    assert file.previous.read_bytes() == kept and file.read() == (b"third", "")


def test_what_this_process_wrote_last_is_not_read_again_to_be_kept(file, monkeypatch):
    """All ranks wait meanwhile."""
    read = []
    original = checkpoint_file._read
    monkeypatch.setattr(checkpoint_file, "_read", lambda path, *rest: (read.append(path), original(path, *rest))[1])
    for content in (b"first", b"second", b"third"):
        file.write([content])
    assert read == []
    file.path.unlink()
    assert file.read()[0] == b"second"
    file.write([b"fourth"])
    CheckpointFile(file.path).write([b"of another process"])
    assert read[-1] == file.path and file.read()[0] == b"of another process"
    file.path.unlink()
    assert file.read()[0] == b"fourth"


def test_a_content_that_cannot_be_taken_apart_is_a_problem_of_the_file(file):
    def unpack(content):
        return json.loads(content.readline())

    file.write([b"[1]\n"])
    file.write([b"second"])
    found, problem = file.read(unpack)
    assert found == [1] and "cannot be taken apart: JSONDecodeError" in problem
    flip(file.path)
    found, problem = file.read(unpack)
    assert found == [1] and "is damaged" in problem


@pytest.mark.parametrize("length", [0, 1, 6, 7, 100])
def test_a_content_is_read_once_from_the_front_to_its_end(file, length):
    file.write([b"[7]\nsecond", b"third"])

    def unpack(content):
        return content.readline(), content.read(length), content.read(-1), content.read()

    whole = b"secondthird"
    assert file.read(unpack) == ((b"[7]\n", whole[:length], b"", whole[length:]), "")


@pytest.mark.parametrize("call", ["fsync", "replace"])
@pytest.mark.parametrize("number", [0, 1])
def test_a_stop_at_any_moment_leaves_a_whole_one(file, monkeypatch, call, number):
    file.write([b"first"])
    file.write([b"second"])
    original, calls = getattr(os, call), []

    def fails(*arguments):
        calls.append(arguments)
        if len(calls) > number:
            raise OSError(errno.ENOSPC, "No space left on device")
        return original(*arguments)

    monkeypatch.setattr(checkpoint_file.os, call, fails)
    with pytest.raises(OSError, match="No space"):
        file.write([b"third"])
    monkeypatch.undo()
    assert file.read()[0] in ((b"second", b"third") if call == "fsync" else (b"second",))
    assert not [path for path in file.path.parent.iterdir() if path.name.endswith(".new")]


class Words:
    """A state whose parts are words."""

    leaving = None
    synced = False

    def __init__(self, rank, shared=b"", own=b""):
        self.rank, self.shared, self.own, self.told = rank, shared, own, False

    def merge_models(self): ...

    def leave(self):
        self.told = True

    def shared_content(self):
        return self.shared

    def own_content(self):
        return self.own

    def load_shared_content(self, content):
        self.shared = content

    def load_own_content(self, content):
        self.own = content


def of_who_joins(engine):
    """The engine of another process in the place of one."""
    return LocalEngine(engine._group, engine.rank, engine.ranks)


def made(engine, path, state, **options):
    return Checkpoint(path, state, engine=engine, every_steps=options.get("every_steps"))


@pytest.mark.parametrize("elastic", [False, True])
def test_two_jobs_that_write_to_one_path_are_told(tmp_path, capfd, monkeypatch, elastic):
    monkeypatch.setattr(checkpoint_module, "is_elastic", lambda: elastic)
    one, other = (made(SoloEngine(), tmp_path / "x", Words(0, name)) for name in (b"one", b"other"))
    for job in (one, one, one):
        job.save()
    assert not capfd.readouterr().err
    other.save()
    said = capfd.readouterr().err
    assert ("Received: checkpoint 3. Another job writes there" in said) == (not elastic)
    other.save()
    assert not capfd.readouterr().err, "of each checkpoint once"
    one.save()
    said = capfd.readouterr().err
    words = "expected checkpoint 3 as the newest, as this job left or found it. Received: checkpoint 5. Another job"
    assert (words in said) == (not elastic)
    for job in (one, other):
        job.close()


def test_what_may_have_been_written_in_spite_of_an_error_is_no_other_job_s(tmp_path, capfd, monkeypatch):
    def fails(folder):
        raise OSError(errno.EIO, "Input/output error")

    job = made(SoloEngine(), tmp_path / "x", Words(0, b"one"))
    job.save()
    with monkeypatch.context() as patched, pytest.raises(CheckpointError, match="that before or this one"):
        patched.setattr(checkpoint_file, "_flush", fails)
        job.save()
    job.save()
    assert not capfd.readouterr().err
    job.close()


def test_a_rank_whose_others_are_gone_saves_what_all_share_and_not_over_a_newer_one(tmp_path):
    def program(engine):
        state = Words(engine.rank, b"committed", b"own")
        checkpoint = made(engine, tmp_path / "x", state)
        if engine.rank == 1:
            state.at_end_alone()
            state.shared = b"older"
            state.at_end_alone()
        checkpoint.close()
        assert state.at_end_alone is None

    World(2).run(program)
    state = Words(0, own=b"new")
    assert made(SoloEngine(), tmp_path / "x", state).restore()
    assert (state.shared, state.own) == (b"committed", b"new")


def test_each_rank_gets_what_all_share_and_its_own(tmp_path):
    def save(engine):
        made(engine, tmp_path / "x", Words(engine.rank, b"shared", b"own" * engine.rank)).save()

    def restore(engine):
        state = Words(engine.rank, own=b"new")
        return made(engine, tmp_path / "x", state).restore(), state.shared, state.own

    World(3).run(save)
    assert World(3).run(restore) == [(True, b"shared", b"own" * rank) for rank in range(3)]
    assert World(2).run(restore) == [(True, b"shared", b"new")] * 2, "on other ranks, what is their own begins anew"
    (tmp_path / "x").unlink()
    assert World(2).run(restore) == [(False, b"", b"new")] * 2


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_checkpoint_is_in_memory_once_on_each_rank_while_it_travels(tmp_path, monkeypatch, ranks):
    monkeypatch.setattr(payload, "PIECE_BYTES", 1 << 16)
    content = os.urandom(1 << 23)

    def restore(engine):
        state = Words(engine.rank)
        state.load_shared_content = lambda found: seen.append(hashlib.sha256(found).digest())
        state.load_own_content = lambda own: later.append(tracemalloc.get_traced_memory()[0])
        return made(engine, tmp_path / "x", state).restore()

    seen, later = [], []
    World(ranks).run(lambda engine: made(engine, tmp_path / "x", Words(engine.rank, content)).save())
    tracemalloc.start()
    try:
        assert World(ranks).run(restore) == [True] * ranks
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < (ranks + 0.5) * len(content)
    assert max(later) < 0.5 * len(content), "nor after that"
    assert seen == [hashlib.sha256(content).digest()] * ranks


def test_an_error_on_rank_0_is_one_on_all(tmp_path):
    def restore(engine):
        return made(engine, tmp_path / "x", Words(engine.rank)).restore()

    def save(engine):
        return made(engine, tmp_path / "x" / "below", Words(engine.rank)).save()

    def save_what_is_no_data(engine):
        state = Words(engine.rank)
        state.shared_content = lambda: json.dumps(object()).encode()
        return made(engine, tmp_path / "y", state).save()

    def save_what_is_no_data_on_one(engine):
        state = Words(engine.rank, own=b"" if engine.rank else None)
        state.own_content = lambda: state.own + b"own"
        return made(engine, tmp_path / "y", state).save()

    (tmp_path / "x").write_text("what is this?")
    for program, text in (
        (restore, "is not one"), (save, "There is none before it"), (save_what_is_no_data, "not JSON"),
        (save_what_is_no_data_on_one, "TypeError on rank 0"),
    ):  # fmt: skip
        errors = World(3).run(program, errors="return")
        assert all(isinstance(error, CheckpointError) and text in str(error) for error in errors), errors


@pytest.mark.parametrize("bad", [0, 1, 2])
def test_a_save_that_fails_on_one_rank_leaves_both_checkpoints(tmp_path, bad):
    def save(engine, *, words: bytes, fails: bool = False):
        state = Words(engine.rank, words)
        if fails and engine.rank == bad:
            state.own_content = lambda: b"" + object()
        return made(engine, tmp_path / "x", state).save()

    def restore(engine):
        state = Words(engine.rank)
        return made(engine, tmp_path / "x", state).restore() and state.shared

    for words in (b"first", b"second"):
        World(3).run(lambda engine, words=words: save(engine, words=words))
    files = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert len(files) == 2
    for _ in range(2):
        errors = World(3).run(lambda engine: save(engine, words=b"third", fails=True), errors="return")
        assert all(isinstance(error, CheckpointError) and f"on rank {bad}" in str(error) for error in errors), errors
        assert all("A whole one is kept" in str(error) for error in errors)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == files
    assert World(3).run(restore) == [b"second"] * 3


def test_all_leave_at_one_step_when_one_is_told(tmp_path):
    def program(engine):
        state = Words(engine.rank, b"%d" % engine.rank)
        job, steps = made(engine, tmp_path / "x", state), 0
        with pytest.raises(SystemExit) as left:
            while steps < 100:
                if steps == 7 and engine.rank == 2:
                    job._termination.hear()
                job.step()
                steps += 1
        return steps, left.value.code

    (steps, code), *others = World(3).run(program)
    assert code == EXIT_STATUS_LEFT and 7 <= steps <= 9 and others == [(steps, code)] * 2
    assert CheckpointFile(tmp_path / "x").read()[0] is not None


def test_a_script_may_have_several_checkpoints(tmp_path):
    """What ranks ask each other in each step is asked for each of them."""

    def program(engine):
        jobs = [made(engine, tmp_path / name, Words(engine.rank, b"")) for name in "xy"]
        for step in range(5):
            if step == 2 and engine.rank == 1:
                jobs[1]._termination.hear()
            for job in jobs:
                job.step()

    with pytest.raises(SystemExit):
        World(2).run(program)
    assert not (tmp_path / "x").exists() and CheckpointFile(tmp_path / "y").read()[0] is not None


def test_nobody_ends_an_elastic_job(tmp_path, monkeypatch):
    """There a rank that was told to end leaves at a commit."""
    monkeypatch.setattr("hvd_hetero.engine.checkpoint.is_elastic", lambda: True)

    def program(engine):
        job = made(engine, tmp_path / "x", Words(engine.rank, b"%d" % engine.rank), every_steps=3)
        if engine.rank == 1:
            job._termination.hear()
        for _ in range(5):
            job.step()
        return (tmp_path / "x").exists()

    assert World(3).run(program) == [True] * 3


def test_saves_when_due(tmp_path):
    def program(engine):
        job, seen = made(engine, tmp_path / "x", Words(engine.rank), every_steps=3), []
        for _ in range(7):
            job.step()
            seen.append((tmp_path / "x").exists())
        return seen

    assert World(1).run(program) == [[False, False, True, True, True, True, True]]


def test_the_same_sigterm_from_two_sides_is_one(tmp_path, monkeypatch):
    """As where all processes get it, and horovodrun, which gets it too, passes it on."""
    heard = []
    before = signal.signal(signal.SIGTERM, lambda *_: heard.append("as ever"))
    try:
        state = Words(0)
        job = Checkpoint(tmp_path / "x", state, engine=SoloEngine(), every_steps=None)
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGTERM)
        assert state.told and heard == []
        monkeypatch.setattr(termination, "ONE_S", 0.0)
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGTERM)
        assert heard == ["as ever"] * 2, "later ones act as ever"
        job.close()
    finally:
        signal.signal(signal.SIGTERM, before)


def test_who_hears_of_sigterm_may_stop_before_who_came_later(monkeypatch):
    """As a checkpoint that is closed within `train`: what runs that hears as well."""
    heard = []
    before = signal.signal(signal.SIGTERM, lambda *_: heard.append("as ever"))
    try:
        first, second = (
            termination.TerminationHandler(lambda name=name: heard.append(name), say="it ends") for name in "ab"
        )
        first.close()
        os.kill(os.getpid(), signal.SIGTERM)
        assert heard == ["b"]
        second.close()
        os.kill(os.getpid(), signal.SIGTERM)
        assert heard == ["b", "as ever"]
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_file_system_that_flushes_no_folders_keeps_checkpoints(tmp_path, monkeypatch):
    def fsync(number, original=os.fsync):
        if stat.S_ISDIR(os.fstat(number).st_mode):
            raise OSError(errno.EINVAL, "Invalid argument")
        original(number)

    monkeypatch.setattr(os, "fsync", fsync)
    file = CheckpointFile(tmp_path / "x")
    for content in (b"first", b"second"):
        file.write([content])
        assert file.read() == (content, "")


def test_a_link_to_a_checkpoint_stays_one(tmp_path):
    (tmp_path / "large disk").mkdir()
    link = tmp_path / "x"
    link.symlink_to(tmp_path / "large disk" / "y")
    for content in (b"first", b"second"):
        CheckpointFile(link).write([content])
    assert link.is_symlink() and CheckpointFile(tmp_path / "large disk" / "y").read() == (b"second", "")
    assert [path.name for path in tmp_path.iterdir() if path != link] == ["large disk"]


def test_a_checkpoint_is_read_where_all_that_had_the_state_are_gone(tmp_path):
    """Of a job that these ranks have joined, before they had come to what those held."""
    World(2).run(lambda engine: made(engine, tmp_path / "x", Words(engine.rank, b"trained")).save())

    def program(engine):
        state = Words(engine.rank, b"new")
        job = made(engine, tmp_path / "x", state)
        job._joins = True
        assert job.restore() and state.shared == b"new"
        assert state.read_late()
        return state.shared

    assert World(2).run(program) == [b"trained"] * 2


def test_a_state_that_is_none_is_an_error_on_every_rank(tmp_path):
    def program(engine):
        made(engine, tmp_path / "x", Words(engine.rank) if engine.rank else object())

    for error in World(2).run(program, errors="return"):
        assert isinstance(error, TypeError) and "expected an hvd.elastic.TorchState" in str(error)
        assert "rank 0: object" in str(error) and "rank 1" not in str(error)


def test_an_interval_may_be_a_number_of_numpys_on_some_ranks(tmp_path):
    def program(engine):
        every_steps = (3, np.int64(3))[engine.rank]
        job, saves = made(engine, tmp_path / "x", Words(engine.rank), every_steps=every_steps), []
        job.save = lambda: saves.append(job._steps)
        for _ in range(7):
            job.step()
        return saves

    assert World(2).run(program) == [[3, 6]] * 2


@pytest.mark.parametrize("every_steps", [0, -1, 2.5, "often"])
def test_wrong_intervals(tmp_path, every_steps):
    with pytest.raises(ValueError, match="every_steps: expected"):
        Checkpoint(tmp_path / "x", Words(0), engine=SoloEngine(), every_steps=every_steps)


@pytest.mark.parametrize("every_steps", [(2, 3), (None, 3), (1, 0)])
def test_ranks_that_disagree_all_hear_of_it(tmp_path, every_steps):
    def program(engine):
        Checkpoint(tmp_path / "x", Words(engine.rank), engine=engine, every_steps=every_steps[engine.rank])

    before = signal.getsignal(signal.SIGTERM)
    for error in World(2).run(program, errors="return"):
        assert isinstance(error, ValueError) and "expected the same on every rank" in str(error)
        assert f"rank 1: {every_steps[1]}" in str(error)
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_rank_that_joins_makes_one_while_the_others_rebuild_theirs(tmp_path):
    def program(engine):
        job = made(engine, tmp_path / "x", Words(engine.rank, b"shared"))
        if engine.rank == 0:
            engine.rebuild()
        else:
            job = made(of_who_joins(engine), tmp_path / "x", Words(engine.rank))
        job.save()

    World(2).run(program)


def test_all_save_at_the_same_steps_once_a_rank_has_joined(tmp_path):
    """Ranks may have broken off in unlike steps, and a new one has made none."""

    def program(engine):
        job, saves = made(engine, tmp_path / "x", Words(engine.rank), every_steps=5), []
        job._steps = 13 if engine.rank == 0 else 12
        if engine.rank < 2:
            engine.rebuild()
        else:
            job = made(of_who_joins(engine), tmp_path / "x", Words(engine.rank), every_steps=5)
        job.save = lambda: saves.append(job._steps)
        for _ in range(8):
            job.step()
        return saves

    assert World(3).run(program) == [[15, 20]] * 3


def test_a_rank_that_joins_restores_nothing_before_training_begins(tmp_path):
    """The others have come to what they hold, and call nothing meanwhile; later on all of them restore."""

    def program(engine):
        state = Words(engine.rank, b"kept", b"own")
        job = made(engine, tmp_path / "x", state)
        job.save()
        assert job.restore(), "all have begun together"
        state.synced = True
        if engine.rank == 0:
            engine.rebuild()
        else:
            state = Words(engine.rank)
            job = made(of_who_joins(engine), tmp_path / "x", state)
            assert job.restore() and state.shared == b""
            state.synced = True
        assert job.restore()
        return state.shared

    assert World(2).run(program) == [b"kept"] * 2


def test_bytes_of_unlike_lengths_travel(tmp_path):
    from hvd_hetero.engine.payload import gather_bytes

    found = World(3).run(lambda engine: gather_bytes(engine, bytes(range(5 * engine.rank)), name="x"))
    assert found == [[bytes(range(5 * rank)) for rank in range(3)]] * 3
    assert np.frombuffer(found[0][2], np.uint8)[-1] == 9


def test_folders_that_are_not_there_are_made(tmp_path):
    file = CheckpointFile(tmp_path / "runs" / "today" / "checkpoint")
    file.write([b"first"])
    assert file.read() == (b"first", "")


@pytest.mark.parametrize("place", ["file/below", "folder", "closed/today/checkpoint"])
def test_a_place_where_none_can_be_written_shows_before_the_first_is_due(tmp_path, capfd, monkeypatch, place):
    (tmp_path / "file").write_text("")
    for name in ("folder", "closed"):
        (tmp_path / name).mkdir()
    monkeypatch.setattr(os, "access", lambda path, mode: os.fspath(path) != str(tmp_path / "closed"))  # root may all

    def make(engine, **options):
        return made(engine, tmp_path / place, Words(engine.rank), **options)

    errors = World(2).run(lambda engine: make(engine, every_steps=500), errors="return")
    assert all(isinstance(error, CheckpointError) and str(tmp_path / place) in str(error) for error in errors), errors
    World(2).run(make)  # a job that only reads one
    assert capfd.readouterr().err.count(f"no checkpoint can be written to {tmp_path / place}") == 1
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["closed", "file", "folder"]


@pytest.mark.parametrize("what", ["load_shared_content", "load_own_content"])
def test_what_one_rank_cannot_load_is_an_error_on_all(tmp_path, what):
    def restore(engine):
        state = Words(engine.rank)
        if engine.rank == 1:
            setattr(state, what, lambda content: json.loads(b"{"))
        made(engine, tmp_path / "x", state).restore()

    World(2).run(lambda engine: made(engine, tmp_path / "x", Words(engine.rank)).save())
    errors = World(2).run(restore, errors="return", timeout_s=10)
    assert all(isinstance(error, CheckpointError) and "JSONDecodeError" in str(error) for error in errors), errors


def test_what_rank_0_cannot_read_is_an_error_on_all(tmp_path):
    (tmp_path / "x").mkdir()
    errors = World(2).run(
        lambda engine: made(engine, tmp_path / "x", Words(engine.rank)).restore(), errors="return", timeout_s=10
    )
    assert all(isinstance(error, CheckpointError) for error in errors), errors


def test_several_steps_at_a_time_save_where_they_pass_a_multiple(tmp_path):
    job, saves = made(SoloEngine(), tmp_path / "x", Words(0), every_steps=5), []
    job.save = lambda: saves.append(job._steps)
    for _ in range(7):
        job.step(3)
    assert saves == [6, 12, 15, 21]
    job.close()
    job = made(SoloEngine(), tmp_path / "x", Words(0), every_steps=1)
    job.save = lambda: saves.append(job._steps)
    job.step()
    job.step()
    assert saves[4:] == [1, 2]
    job.close()


def test_what_is_saved_is_what_ranks_have_come_to(tmp_path):
    """With a local strategy they hold other models until then."""
    state = Words(0, b"before", b"before")
    state.merge_models = lambda: vars(state).update(shared=b"one model", own=b"own of it")
    made(SoloEngine(), tmp_path / "x", state).save()
    other = Words(0)
    other.merge_models = lambda: vars(other).update(shared=b"under way", merged=True)
    made(SoloEngine(), tmp_path / "x", other).restore()
    assert (other.shared, other.own) == (b"one model", b"own of it")
    assert other.merged, "or what is under way would change it later"


def test_what_is_left_of_a_file_of_any_name_goes(tmp_path):
    file = CheckpointFile(tmp_path / "run[1].ckpt")
    left = tmp_path / ".run[1].ckpt.7.new"
    left.write_bytes(b"half")
    os.utime(left, (0, 0))
    file.write([b"first"])
    assert not left.exists()


def test_all_who_were_told_to_end_are_named(tmp_path, capfd):
    def program(engine):
        job = made(engine, tmp_path / "x", Words(engine.rank))
        if engine.rank > 0:
            job._termination.hear()
        for _ in range(3):
            job.step()

    World(3).run(program, errors="return")
    assert "told to end: ranks 1, 2. Saved" in capfd.readouterr().err


def test_sigterm_is_left_to_others_once_it_is_closed(tmp_path):
    before = signal.getsignal(signal.SIGTERM)
    job = made(SoloEngine(), tmp_path / "x", Words(0))
    assert signal.getsignal(signal.SIGTERM) != before
    job.close()
    assert signal.getsignal(signal.SIGTERM) == before


def test_it_is_said_that_an_older_checkpoint_is_used(tmp_path, capfd):
    job = made(SoloEngine(), tmp_path / "x", Words(0))
    for _ in range(2):
        job.save()
    tear(tmp_path / "x")
    assert job.restore() and "is torn" in capfd.readouterr().err
    job.close()


class Gone:
    """A standard error of which nobody reads any more."""

    def write(self, text):
        raise BrokenPipeError(32, "Broken pipe")

    flush = write


def test_sigterm_is_heard_and_saved_where_nobody_reads_what_a_rank_says(tmp_path, monkeypatch):
    """As on other hosts after the death of horovodrun: ranks go on, and who read their output has gone."""
    state = Words(0, b"shared")
    checkpoint = Checkpoint(tmp_path / "x", state, engine=SoloEngine(), every_steps=None)
    try:
        monkeypatch.setattr("sys.stderr", Gone())
        os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(SystemExit) as left:
            for _ in range(3):
                checkpoint.step()
        assert left.value.code == EXIT_STATUS_LEFT and checkpoint._file.read()[0] is not None
    finally:
        checkpoint.close()


def test_a_checkpoint_is_found_on_whatever_host_it_is(tmp_path, capsys):
    """Hosts that share no folder: rank 0 of the job that goes on is on another one than that of the job before."""

    def run(engine, first, text=None):
        state = Words(engine.rank)
        place = tmp_path / str((engine.rank + first) % 3) / "x"
        checkpoint = Checkpoint(place, state, engine=engine, every_steps=None)
        found = checkpoint.restore()
        if text is not None:
            state.shared = text
            checkpoint.save()
        checkpoint.close()
        return found, state.shared

    assert World(3).run(lambda engine: run(engine, 0, b"first")) == [(False, b"first")] * 3
    assert World(3).run(lambda engine: run(engine, 1)) == [(True, b"first")] * 3
    said = capsys.readouterr().err
    assert said.count("is used") == 1 and "is on the host of rank 2: it is used" in said
    assert World(3).run(lambda engine: run(engine, 2, b"second")) == [(True, b"second")] * 3
    for first in range(3):
        assert World(3).run(lambda engine, first=first: run(engine, first)) == [(True, b"second")] * 3
    (tmp_path / "2" / "x").unlink()
    assert World(3).run(lambda engine: run(engine, 0)) == [(True, b"first")] * 3


def test_each_checkpoint_is_newer_than_all_that_any_host_has_or_had(tmp_path):
    """Or a host that comes back with an old one would be believed."""

    def numbers():
        return [CheckpointFile(tmp_path / str(rank) / "x").number() for rank in range(2)]

    def program(engine):
        place = tmp_path / str(engine.rank)
        job = made(engine, place / "x", Words(engine.rank))
        job.save()
        if engine.rank == 0:
            found.append(numbers())
            for path in place.iterdir():
                path.unlink()
        engine.rebuild()
        if engine.rank == 0:
            write = job._file.write
            job._file.write = fails
        with pytest.raises(CheckpointError, match="no space"):
            job.save()
        if engine.rank == 0:
            job._file.write = write
        job.save()

    def fails(*_, **__):
        raise OSError("no space")

    found = []
    CheckpointFile(tmp_path / "1" / "x").write([b""], number=5)
    World(2).run(program)
    assert [*found, numbers()] == [[6, 5], [7, 5]]


def test_what_another_process_has_written_before_it_is_read_is_not_another_job_s(tmp_path, capfd):
    """As the last checkpoint of the process before, which was still at its end."""
    before, job = (made(SoloEngine(), tmp_path / "x", Words(0)) for _ in range(2))
    before.save()
    job.restore()
    job.save()
    assert "Another job writes there" not in capfd.readouterr().err


def test_only_who_writes_needs_a_place_to_write_to(tmp_path, capfd, monkeypatch):
    monkeypatch.setattr(os, "access", lambda path, mode: "closed" not in os.fspath(path))  # root may all

    def make(engine, open_to, **options):
        place = tmp_path / ("open" if engine.rank == open_to else "closed")
        place.mkdir(exist_ok=True)
        made(engine, place / "x", Words(engine.rank), **options)

    World(2).run(lambda engine: make(engine, 0, every_steps=5))
    errors = World(2).run(lambda engine: make(engine, 1, every_steps=5), errors="return")
    assert all(isinstance(error, CheckpointError) for error in errors)
    World(2).run(lambda engine: make(engine, 1))
    assert f"no checkpoint can be written to {tmp_path / 'closed' / 'x'}" in capfd.readouterr().err


def test_of_several_checkpoints_of_a_state_the_last_saves_at_the_end_also_when_others_are_closed(tmp_path):
    state = Words(0)
    first, last = (made(SoloEngine(), tmp_path / name, state) for name in "ab")
    first.close()
    assert state.at_end == last.save
    last.close()
    assert state.at_end is None is state.at_end_alone


def test_of_a_file_the_head_tells_which_it_is(tmp_path):
    file = CheckpointFile(tmp_path / "x")
    assert file.number() == 0
    file.write([b"one"], number=3)
    assert file.number() == 3
    file.path.rename(file.previous)
    assert file.number() == 3
    for torn in (b"", b"{", b"[]\n", b'{"kind": "another"}\n', b"\xff\n"):
        file.path.write_bytes(torn)
        assert file.number() == 3
