"""The user's cache of built Horovod wheels: one folder per key, safe where two builds write to it at once.

The key of a wheel is a hash of all that the wheel depends on: see `Recipe.facts`.
"""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from hvd_hetero.cli.error import CommandError
from hvd_hetero.engine.cache import put
from hvd_hetero.engine.environment import cache_folder

ROOM_BYTES = 100_000_000  # of free space that a build requires at its start, rather than fail when the wheel is ready
RECORD = "build.json"
LOG = "build.log"


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

    Where no lock can be had (no `fcntl`, no right to write, a file system without locks), the context is entered
    without one.

    Args:
        path: the lock file; it is created, and stays.
        waiting: is called once if another process has the lock, before waiting for it.
    """
    file = None
    with contextlib.suppress(ImportError, OSError):
        import fcntl

        file = path.open("w")
    if file is None:
        yield
        return
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            waiting()
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError:
            pass
        yield


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

        `store` writes the wheel last, so that an entry with a wheel is complete.
        """
        return next(iter(sorted((self.folder / name).glob("*.whl"))), None)

    def store(self, name: str, wheel: Path, record: Mapping[str, object]) -> Path:
        """Copies a wheel and the record of its build into the entry of the key `name`, each atomically.

        The record is for people, in `build.json`. Returns the path of the wheel in the cache.
        """
        entry = self.entry(name)
        put(entry / RECORD, lambda path: path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8"))
        return put(entry / wheel.name, lambda path: shutil.copyfile(wheel, path))

    def lock(self, name: str, waiting: Callable[[], None]) -> contextlib.AbstractContextManager[None]:
        """The lock that a build of the key `name` holds: see `locked`, also for `waiting`.

        It saves a second build of the same wheel. Without locks two builds may run, and the cache stays consistent.

        Raises:
            CommandError: the cache cannot be written, or has too little free space for a wheel that it lacks.
        """
        self.entry(name, room=ROOM_BYTES)
        return locked(self.folder / f"{name}.lock", waiting)
