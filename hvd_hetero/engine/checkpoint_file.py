"""A checkpoint file that is never half-written, whenever the process or the machine stops.

The new file is written beside the old one, flushed to the disk, and only then takes its name (POSIX makes `rename`
atomic; the folder is flushed as well, or the name might not outlive a power cut). The one before is kept. A first line
says what the file is, how long, and its SHA-256, so a torn or foreign file is told from a checkpoint.
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
from collections.abc import Sequence
from pathlib import Path

KIND = "hvd_hetero checkpoint 1"
LONGEST_LINE = 4096
LEFT_S = 3600.0  # a temporary file not written to for so many seconds was left by a process that was killed


class CheckpointError(RuntimeError):
    """A checkpoint cannot be read or written: see the methods that raise this."""


class CheckpointFile:
    """The newest checkpoint at `path`, and the one before at `path` with `.previous` added."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(os.path.realpath(path))  # a link stays one
        self.previous = self.path.with_name(self.path.name + ".previous")

    def number(self) -> int:
        """Returns the number of the newest checkpoint here, from its first line: a job numbers its checkpoints 1, 2, …
        0 if there is none. A file of an earlier version, without a number, counts as 1."""
        numbers = [0]
        for path in (self.path, self.previous):
            with contextlib.suppress(OSError, ValueError, TypeError, OverflowError), open(path, "rb") as file:
                head = json.loads(file.readline(LONGEST_LINE))
                numbers.append(int(head.get("number", 1)) if isinstance(head, dict) and head.get("kind") == KIND else 0)
        return max(numbers)

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
            if self.path.exists() and _problem(self.path) is None:  # a broken one must not replace a whole one
                os.replace(self.path, self.previous)
            os.replace(new, self.path)
        except BaseException:
            with contextlib.suppress(OSError):
                new.unlink()
            raise
        _flush(self.path.parent)

    def _clear(self) -> None:
        """Removes temporary files of processes that were killed while they wrote."""
        for left in self.path.parent.glob(f".{glob.escape(self.path.name)}.*.new"):
            with contextlib.suppress(OSError):
                if time.time() - left.stat().st_mtime > LEFT_S:
                    left.unlink()

    def read(self) -> tuple[bytes | None, str]:
        """Reads the newest intact checkpoint.

        Returns:
            Its content, None if there is no file; and what is wrong with a newer, damaged one, "" if there is none.

        Raises:
            CheckpointError: there are files, and none of them is an intact checkpoint.
        """
        problems: list[str] = []
        for path in (self.path, self.previous):
            try:
                problem = _problem(path)
                if problem is None:
                    return path.read_bytes().partition(b"\n")[2], "; ".join(problems)
            except FileNotFoundError:  # or another job, which writes, has just moved it to where the one before is
                continue
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


def _problem(path: Path) -> str | None:
    """Returns why a file is not an intact checkpoint; None if it is one. Raises OSError if it cannot be read."""
    with open(path, "rb") as file:
        try:
            head = json.loads(file.readline(LONGEST_LINE))
            kind, length, expected = head["kind"], head["bytes"], head["sha256"]
        except (ValueError, KeyError, TypeError):
            return "is not one: its first line does not say so"
        if kind != KIND:
            return f"is of another kind: {kind!r} instead of {KIND!r}"
        digest, found = hashlib.sha256(), 0
        while block := file.read(1 << 20):
            digest.update(block)
            found += len(block)
    if found != length:
        return f"is torn: {found} bytes of {length}"
    return None if digest.hexdigest() == expected else "is damaged: its SHA-256 is another one"
