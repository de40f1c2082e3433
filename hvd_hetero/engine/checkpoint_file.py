"""A checkpoint file that is never half-written, whenever the process or the machine stops.

The new file is written beside the old one, flushed to the disk, and only then takes its name (POSIX makes `rename`
atomic; the folder is flushed as well, or the name might not outlive a power cut). The one before is kept. A first line
says what the file is, how long, and its SHA-256, so a torn or foreign file is told from a checkpoint. Before a file
becomes the one before, it is read and checked, unless this process has written it and nobody has changed it since.
"""

from __future__ import annotations

import contextlib
import errno
import glob
import hashlib
import json
import os
import secrets
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, BinaryIO

KIND = "hvd_hetero checkpoint 1"
LONGEST_LINE = 4096
BLOCK_BYTES = 1 << 20  # of what is read only to be checked, as much is held in memory
LEFT_S = 3600.0  # a temporary file not written to for so many seconds was left by a process that was killed


class CheckpointError(RuntimeError):
    """A checkpoint cannot be read or written: see the methods that raise this."""


class Content:
    """The content of an open checkpoint file, which is read once, from the front to the end, and hashed meanwhile."""

    def __init__(self, file: BinaryIO, length: int) -> None:
        self._file, self._left, self._digest = file, length, hashlib.sha256()

    def read(self, length: int | None = None) -> bytes:
        """Returns the next `length` bytes, or as many as are left; None: all that are left."""
        return self._hashed(self._file.read(self._left if length is None else min(max(length, 0), self._left)))

    def readline(self) -> bytes:
        """Returns the next line, with the line break at its end."""
        return self._hashed(self._file.readline(self._left))

    def sha256(self) -> str:
        """Reads what is left, and returns the SHA-256 of the whole content."""
        while self.read(BLOCK_BYTES):
            pass
        return self._digest.hexdigest()

    def _hashed(self, found: bytes) -> bytes:
        self._digest.update(found)
        self._left -= len(found)
        return found


class CheckpointFile:
    """The newest checkpoint at `path`, and the one before at `path` with `.previous` added."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(os.path.realpath(path))  # a link stays one
        self.previous = self.path.with_name(self.path.name + ".previous")
        self._written: tuple[int, ...] | None = None  # `_stamp` of the file that this process wrote last

    def number(self) -> int:
        """Returns the number of the newest checkpoint here, from its first line: a job numbers its checkpoints 1, 2, …
        0 if there is none."""
        numbers = [0]
        for path in (self.path, self.previous):
            with contextlib.suppress(OSError, ValueError, TypeError, OverflowError), open(path, "rb") as file:
                head = json.loads(file.readline(LONGEST_LINE))
                numbers.append(int(head.get("number", 0)) if isinstance(head, dict) and head.get("kind") == KIND else 0)
        return max(numbers)

    def obstacle(self) -> str:
        """Returns why no checkpoint can be written here, as far as that shows without writing; "" if nothing does."""
        folder = next(filter(os.path.exists, self.path.parents))
        if os.path.isdir(self.path):
            return f"{self.path} is a folder"
        if not os.path.isdir(folder):
            return f"{folder} is not a folder"
        return "" if os.access(folder, os.W_OK | os.X_OK) else f"{folder} cannot be written to"

    def write(self, pieces: Sequence[bytes], *, number: int = 1) -> None:
        """Writes a checkpoint, and keeps the one before as `previous`.

        Args:
            pieces: the content, which is their concatenation.
            number: see the method `number`.

        Raises:
            OSError: the file cannot be written; the old files are unchanged.
        """
        self.path.parent.mkdir(parents=True, exist_ok=True)
        # Processes of several hosts or containers that share a folder may have one number.
        new = self.path.with_name(f".{self.path.name}.{os.getpid()}-{secrets.token_hex(4)}.new")
        self._clear()
        digest = hashlib.sha256()
        for piece in pieces:
            digest.update(piece)
        head = {"kind": KIND, "number": number, "bytes": sum(map(len, pieces)), "sha256": digest.hexdigest()}
        try:
            with open(new, "wb") as file:
                file.write(json.dumps(head).encode() + b"\n")
                for piece in pieces:
                    file.write(piece)
                file.flush()
                os.fsync(file.fileno())
            stamp = _stamp(new)
            if self._is_whole():  # a broken one must not replace a whole one
                os.replace(self.path, self.previous)
            os.replace(new, self.path)
            self._written = stamp
        except BaseException:
            with contextlib.suppress(OSError):
                new.unlink()
            raise
        _flush(self.path.parent)

    def _is_whole(self) -> bool:
        """Whether there is a file, and it is an intact checkpoint. The one that this process wrote last is not read
        again, which may take as long as writing it, unless it was changed."""
        return self.path.exists() and (_stamp(self.path) == self._written or _read(self.path)[1] is None)

    def _clear(self) -> None:
        """Removes temporary files of processes that were killed while they wrote."""
        for left in self.path.parent.glob(f".{glob.escape(self.path.name)}.*.new"):
            with contextlib.suppress(OSError):
                if time.time() - left.stat().st_mtime > LEFT_S:
                    left.unlink()

    def read(self, unpack: Callable[[Content], Any] = Content.read) -> tuple[Any, str]:
        """Reads the newest intact checkpoint.

        Args:
            unpack: reads what is wanted of the content, and returns it; by default all, as bytes. What it returns of a
                damaged checkpoint, or raises, is ignored.

        Returns:
            What `unpack` returned, None if there is no file; and what is wrong with a newer, damaged one, "" if there
            is none.

        Raises:
            CheckpointError: there are files, and none of them is an intact checkpoint.
        """
        problems: list[str] = []
        for path in (self.path, self.previous):
            try:
                found, problem = _read(path, unpack)
            except FileNotFoundError:  # or another job, which writes, has just moved it to where the one before is
                continue
            if problem is None:
                return found, "; ".join(problems)
            problems.append(f"{path} {problem}")
        if problems:
            raise CheckpointError(
                f"Expected a checkpoint of hvd_hetero. Received: {'; '.join(problems)}. Restore the file from "
                "elsewhere, or remove it to begin anew."
            )
        return None, ""


def _flush(folder: Path) -> None:
    """Flushes a folder's entries to the disk. Does nothing if the file system does not support that, or the folder is
    not readable."""
    try:
        number = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(number)
        finally:
            os.close(number)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.EACCES):
            raise


def _stamp(path: Path) -> tuple[int, ...]:
    """Returns what tells a file from another one, and from itself after it was written to."""
    found = path.stat()
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


def _read(path: Path, unpack: Callable[[Content], Any] = lambda content: None) -> tuple[Any, str | None]:
    """Returns what `unpack` returns, and None, if a file is an intact checkpoint; if not, None, and why it is none.
    Raises OSError if it cannot be read."""
    with open(path, "rb") as file:
        try:
            head = json.loads(file.readline(LONGEST_LINE))
            kind, length, expected = head["kind"], head["bytes"], head["sha256"]
        except (ValueError, KeyError, TypeError):
            return None, "is not one: its first line does not say so"
        if kind != KIND:
            return None, f"is of another kind: {kind!r} instead of {KIND!r}"
        there = os.fstat(file.fileno()).st_size - file.tell()
        if there != length:
            return None, f"is torn: {there} bytes of {length}"
        content, found, problem = Content(file, there), None, None
        try:
            found = unpack(content)
        except OSError:
            raise
        except Exception as error:  # of a content that is damaged, if its hash says so
            problem = f"cannot be taken apart: {type(error).__name__}: {error}"
        if content.sha256() != expected:
            return None, "is damaged: its SHA-256 is another one"
    return found, problem
