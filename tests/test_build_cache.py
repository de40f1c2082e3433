"""The cache of built wheels, and what a build shows while it runs."""

from __future__ import annotations

import io
import multiprocessing
import os
import sys
from multiprocessing.synchronize import Event
from pathlib import Path
from types import SimpleNamespace

import pytest
from building import recipe

from hvd_hetero.cli import edits
from hvd_hetero.cli.cache import KEPT, Cache, default_folder, locked
from hvd_hetero.cli.cuda import Gpu
from hvd_hetero.cli.error import CommandError
from hvd_hetero.cli.progress import Progress, percent_done
from hvd_hetero.engine.cache import key, put


def test_the_key_follows_what_a_wheel_depends_on() -> None:
    assert key({"a": 1, "b": 2}) == key({"b": 2, "a": 1})
    base = key(recipe().facts())
    assert base == key(recipe(jobs=7, cmake="another").facts())
    for change in (
        {"edits": edits.chosen(["torch"], plain=True)},
        {"frameworks": {"torch": {"version": "3", "cxx11_abi": True, "cuda": None}}},
        {"frameworks": {"torch": {"version": "2", "cxx11_abi": False, "cuda": None}}},
        {"compiler_version": "gcc 13"},
        {"cpu_flags": ()},
        {"mpi": "Open MPI 4"},
        {"gpu": Gpu(cuda="12.4", nccl=True)},
    ):
        assert key(recipe(**change).facts()) != base, change


@pytest.mark.parametrize("name", ["CFLAGS", "CXXFLAGS", "LDFLAGS", "HOROVOD_NCCL_HOME", "HOROVOD_CUDA_HOME"])
def test_the_key_follows_the_variables_that_a_build_reads(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    base = key(recipe().facts())
    monkeypatch.setenv(name, "another")
    assert key(recipe().facts()) != base


def test_the_cache_is_the_users(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_folder() == tmp_path / "hvd_hetero" / "horovod"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert default_folder() == Path.home() / ".cache" / "hvd_hetero" / "horovod"


def test_a_wheel_is_found_once_it_is_whole(tmp_path: Path) -> None:
    cache, built = Cache(tmp_path / "cache"), tmp_path / "horovod-0.28.1-x.whl"
    built.write_bytes(b"wheel")
    assert cache.wheel("k") is None
    stored = cache.store("k", built, {"edits": []})
    assert cache.wheel("k") == stored and stored.read_bytes() == b"wheel"
    assert sorted(p.name for p in stored.parent.iterdir()) == ["build.json", built.name]

    def fail(path: Path) -> None:
        path.write_bytes(b"half")
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        put(stored, fail)
    assert stored.read_bytes() == b"wheel" and len(list(stored.parent.iterdir())) == 2


def _hold(folder: str, held: Event, release: Event) -> None:
    with Cache(Path(folder)).lock("k", lambda: None):
        held.set()
        release.wait(20)


def test_a_second_build_of_the_same_wheel_waits(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork" if sys.platform != "win32" else "spawn")
    held, release = context.Event(), context.Event()
    other = context.Process(target=_hold, args=(str(tmp_path), held, release))
    other.start()
    try:
        assert held.wait(20)
        said: list[str] = []

        def waiting() -> None:
            said.append("waiting")
            release.set()

        with Cache(tmp_path).lock("k", waiting):
            assert said == ["waiting"]
    finally:
        release.set()
        other.join(20)


def test_the_wheels_used_last_stay_and_older_entries_go(tmp_path: Path) -> None:
    cache, built = Cache(tmp_path / "cache"), tmp_path / "horovod-0.28.1-x.whl"
    built.write_bytes(b"wheel")
    names = [key(number) for number in range(KEPT + 5)]
    failed, locked_by_another, used_again, *others = names
    for age, name in enumerate(reversed(names)):
        with cache.lock(name, lambda: None):
            (cache.entry(name) / "build.log").touch() if name == failed else cache.store(name, built, {})
        os.utime(cache.folder / name, (1e9 - age, 1e9 - age))
    assert cache.wheel(used_again) is not None
    foreign = [cache.folder / "holiday", cache.folder / ("0" * 20)]
    for folder in foreign:
        folder.mkdir()
        (folder / "picture.png").touch()
        os.utime(folder, (1e8, 1e8))
    with cache.lock(locked_by_another, lambda: None):
        cache.prune()
    kept = {locked_by_another, used_again, *others[-KEPT + 1 :]}
    assert {path.stem for path in cache.folder.iterdir()} == {*kept, *(folder.name for folder in foreign)}
    assert all((folder / "picture.png").exists() for folder in foreign)


def test_without_locks_nobody_waits_and_a_cache_that_cannot_be_written_is_read(tmp_path: Path) -> None:
    with locked(tmp_path / "not there" / "lock", lambda: pytest.fail("nobody holds it")):
        pass
    cache, built = Cache(tmp_path / "cache"), tmp_path / "horovod-0.28.1-x.whl"
    built.write_bytes(b"wheel")
    stored = cache.store("k", built, {})
    (cache.folder / "k.lock").mkdir()  # a file that cannot be opened for writing, whoever we are
    with cache.lock("k", lambda: pytest.fail("nobody holds it")):
        assert cache.wheel("k") == stored


def test_a_full_disk_is_told_before_the_build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=300_000, total=total))
    cache, built, total = Cache(tmp_path), tmp_path / "horovod-0.28.1-x.whl", 10**9
    built.write_bytes(b"wheel")
    with pytest.raises(CommandError, match=r"0 MB are free, of 100 .*\n.*--cache-dir"):
        cache.lock("k", lambda: None)
    cache.store("k", built, {})  # what was built meanwhile may fit all the same
    with cache.lock("k", lambda: None):
        pass
    total = 0
    with cache.lock("other", lambda: None):  # of a file system that does not tell
        pass


def test_a_user_without_a_home_folder_is_told_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    def nowhere() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", nowhere)
    with pytest.raises(CommandError, match="set XDG_CACHE_HOME, or name a folder with --cache-dir"):
        default_folder()


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_percentages_are_read_from_makes_output() -> None:
    assert percent_done("  [ 42%] Building CXX object a.o") == 42
    assert percent_done("[100%] Linking") == 100
    assert percent_done("cc1plus: [x] 12%") is None


@pytest.mark.parametrize("stream", [io.StringIO(), Terminal()])
def test_progress_shows_stage_percent_and_time(stream: io.StringIO) -> None:
    now = iter(range(0, 10_000, 61))
    show = Progress(stream, clock=lambda: float(next(now)))
    show.stage("compiling")
    for n in range(101):
        show.line(f"[{n:3d}%] Building")
    show.done("built")
    shown = stream.getvalue()
    assert "[1:01] compiling" in shown and "compiling 100 %" in shown and shown.endswith("built\n")
    if stream.isatty():
        assert shown.count("\n") == 2 and "compiling  42 %" in shown
    else:
        assert "\r" not in shown and shown.count("\n") < 10
