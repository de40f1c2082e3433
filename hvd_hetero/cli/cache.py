"""The user's cache of built Horovod wheels: one folder per key, safe where two builds write to it at once.

The key of a wheel is a hash of all that the wheel depends on: see `Recipe.facts`. The cache keeps the `KEPT` wheels
that were used last; older ones are removed when another wheel has been built.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TextIO

from hvd_hetero.cli.error import CommandError
from hvd_hetero.engine.cache import put
from hvd_hetero.engine.environment import cache_folder

ROOM_BYTES = 100_000_000  # of free space that a build requires at its start, rather than fail when the wheel is ready
RECORD = "build.json"
LOG = "build.log"
KEPT = 8  # wheels that the cache keeps


def default_folder() -> Path:
    """The folder of the cache: `hvd_hetero/horovod` in XDG_CACHE_HOME, or in ~/.cache if that is not set.

    Raises:
        CommandError: XDG_CACHE_HOME is not set, and the user has no home folder.
    """
    try:
        return cache_folder() / "horovod"
    except RuntimeError as error:
        raise CommandError(
            f"expected a user with a home folder, or XDG_CACHE_HOME. Received: {error}\n"
            "  What to do: set XDG_CACHE_HOME, or name a folder with --cache-dir."
        ) from error


@contextlib.contextmanager
def locked(path: Path, waiting: Callable[[], None]) -> Iterator[None]:
    """A context in which one process at a time has the lock file `path`.

    Where no lock can be had (no right to write, a file system without locks), the context is entered without one.

    Args:
        path: the lock file; it is created, and stays.
        waiting: is called once if another process has the lock, before waiting for it.
    """
    with _lock(path, waiting) or contextlib.nullcontext():
        yield


def _lock(path: Path, waiting: Callable[[], None] | None) -> TextIO | None:
    """The lock file `path`, opened and locked until it is closed; None if no lock can be had.

    Args:
        path: the lock file, which is created.
        waiting: is called if another process has the lock, before waiting for it; None: do not wait.
    """
    with contextlib.ExitStack() as closing:
        try:
            file = closing.enter_context(path.open("w"))
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if waiting is None:
                return None
            waiting()
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError:
            return None
        closing.pop_all()
        return file


def _wheel_in(entry: Path) -> Path | None:
    return next(iter(sorted(entry.glob("*.whl"))), None)


def _is_entry(path: Path) -> bool:
    """Whether `path` is an entry of the cache: --cache-dir may name a folder that has other things in it too."""
    if not (re.fullmatch("[0-9a-f]{20}", path.name) and path.is_dir()):  # a key: see `engine.cache.key`
        return False
    return all(file.name.lstrip(".").startswith(("build.", "horovod-")) for file in path.iterdir())


class Cache:
    """The cached wheels in `folder`: a subfolder per key with the wheel, the record and the log of its build."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def entry(self, name: str, *, room: int = 0) -> Path:
        """The folder of the key `name`, which is created if it does not exist.

        Args:
            name: the key.
            room: bytes that must be free unless the folder already has a wheel; 0: do not check.

        Raises:
            CommandError: the folder cannot be created, or there is too little free space.
        """
        path = self.folder / name
        try:
            path.mkdir(parents=True, exist_ok=True)
            if room:
                usage = shutil.disk_usage(path)
                if usage.total and usage.free < room and not self.wheel(name):
                    free, needed = (f"{size / 1e6:.0f}" for size in (usage.free, room))
                    raise OSError(f"{free} MB are free, of {needed} that a wheel and its log take")
        except OSError as error:
            raise CommandError(
                f"expected to write the cache in {self.folder}. Received: {error}.\n"
                "  What to do: name another folder with --cache-dir, or set XDG_CACHE_HOME."
            ) from error
        return path

    def wheel(self, name: str) -> Path | None:
        """The path of the wheel of the key `name`, or None.

        `store` writes the wheel last, so that an entry with a wheel is complete. The entry counts as used now.
        """
        wheel = _wheel_in(self.folder / name)
        if wheel is not None:
            with contextlib.suppress(OSError):  # a cache that cannot be written
                os.utime(wheel.parent)
        return wheel

    def store(self, name: str, wheel: Path, record: Mapping[str, object]) -> Path:
        """Copies a wheel and the record of its build into the entry of the key `name`, each atomically.

        The record is for people, in `build.json`. Returns the path of the wheel in the cache.
        """
        entry = self.entry(name)
        put(entry / RECORD, lambda path: path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8"))
        return put(entry / wheel.name, lambda path: shutil.copyfile(wheel, path))

    def prune(self) -> None:
        """Removes the entries that were last used before the `KEPT` wheels that were used last, and their lock files.

        An entry that another process has locked stays, as does one that cannot be locked or removed. A process that has
        opened a lock file just before it is removed may build beside another one: see `lock`.
        """
        with contextlib.suppress(OSError):
            entries = sorted(filter(_is_entry, self.folder.iterdir()), key=lambda path: -path.stat().st_mtime)
            wheels = 0
            for entry in entries:
                if wheels >= KEPT and (file := _lock(lock := entry.with_suffix(".lock"), None)) is not None:
                    with file:
                        shutil.rmtree(entry, ignore_errors=True)
                        lock.unlink()
                wheels += _wheel_in(entry) is not None

    def lock(self, name: str, waiting: Callable[[], None]) -> contextlib.AbstractContextManager[None]:
        """The lock of a process that builds or installs the wheel of `name`: see `locked`, also for `waiting`.

        It saves a second build of the same wheel. Without locks two builds may run, and the cache stays consistent.

        Raises:
            CommandError: the cache cannot be written, or has too little free space for a wheel that it lacks.
        """
        self.entry(name, room=ROOM_BYTES)
        return locked(self.folder / f"{name}.lock", waiting)
