"""Finds the files of a run's record, and reads their lines.

Each rank writes one file. Where hosts share no folder, a user brings the files together in one, with a subfolder for
each host, named as the host is. A rank of an elastic job may have run on several hosts, each with a file of that rank.
"""

from __future__ import annotations

import contextlib
import glob
import json
import math
import os
import re
from collections.abc import Iterator, Sequence
from typing import Any


def files(folder: str) -> dict[int, list[str]]:
    """The paths of the record files in `folder` and in its subfolders named after a host, by rank."""
    found: dict[int, list[str]] = {}
    for within in ("", "*"):
        for path in sorted(glob.glob(os.path.join(glob.escape(folder), within, "rank-*.jsonl"))):
            place, name = os.path.split(path)
            number = re.fullmatch(r"rank-(\d+)\.jsonl", name)
            if number and (not within or _host(path) == os.path.basename(place)):
                found.setdefault(int(number[1]), []).append(path)
    return found


def lines(paths: Sequence[str]) -> Iterator[str]:
    """Yields the lines of one rank's files. Sessions of several files come in the order in which they began.

    A session is what follows one header. A resumed run begins another one, and so does an elastic reset.
    """
    if len(paths) == 1:
        yield from _lines_of(paths[0])
        return
    sessions: list[tuple[float, list[str]]] = []
    for path in paths:
        sessions.append((-math.inf, []))
        for line in _lines_of(path):
            if (first := head(line)) is not None:
                began = first.get("t_s")  # by the clock of the host
                sessions.append((float(began) if isinstance(began, (int, float)) else 0.0, []))
            sessions[-1][1].append(line)
    for _, of_session in sorted(sessions, key=lambda session: session[0]):
        yield from of_session


def head(line: str) -> dict[str, Any] | None:
    """The JSON object of a header, the first line of a session; None for any other line."""
    with contextlib.suppress(ValueError):
        entry = json.loads(line) if line.startswith("{") else None
        if isinstance(entry, dict) and "format" in entry:
            return entry
    return None


def _host(path: str) -> str:
    """The host named in the first line of a file; "" if there is none."""
    with contextlib.suppress(OSError):
        return str((head(next(_lines_of(path), "")) or {}).get("host", ""))
    return ""


def _lines_of(path: str) -> Iterator[str]:
    with open(path, encoding="utf-8", errors="replace") as file:
        yield from filter(str.strip, file)
