"""The per-user cache of built wheels: one folder per key, written so that two builds at once cannot harm each other."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from hvd_hetero.cli.error import CommandError
from hvd_hetero.engine.cache import put
from hvd_hetero.engine.environment import cache_folder

ROOM_BYTES = 100_000_000  # that have to be free before minutes of compiling, so that a wheel is not thrown away
RECORD = "build.json"
LOG = "build.log"


def default_folder() -> Path:
    """`hvd_hetero/horovod` in the user's cache: XDG_CACHE_HOME, or ~/.cache. Raises `CommandError` where there is none.
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
    """Held by one process at a time; calls `waiting` once when another holds it. By several where the system, the file
    system or the rights to it allow no locks."""
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
    """The wheels of one user, by key."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def entry(self, name: str, *, room: int = 0) -> Path:
        """The folder of a key, made if need be; raises `CommandError` where that cannot be, or where it has no wheel
        and fewer bytes than `room` are free."""
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
        """The wheel of a key, or None. It is put in last, so that where it is, all else is too."""
        return next(iter(sorted((self.folder / name).glob("*.whl"))), None)

    def store(self, name: str, wheel: Path, record: Mapping[str, object]) -> Path:
        """Puts the wheel and its record into the cache, each in one step, and returns the wheel's place."""
        entry = self.entry(name)
        put(entry / RECORD, lambda path: path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8"))
        return put(entry / wheel.name, lambda path: shutil.copyfile(wheel, path))

    def lock(self, name: str, waiting: Callable[[], None]) -> contextlib.AbstractContextManager[None]:
        """Held by one build of a key at a time: see `locked`. The cache stays whole also where two builds run."""
        self.entry(name, room=ROOM_BYTES)
        return locked(self.folder / f"{name}.lock", waiting)
