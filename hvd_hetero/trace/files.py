"""The files of a run's record, and their lines.

Each rank writes one. Where hosts share no folder, the files of each come into a folder of its name, within one: a rank
of an elastic job may have been on several, of which each has a file of that rank.
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
    """The record files, by rank."""
    found: dict[int, list[str]] = {}
    for within in ("", "*"):
        for path in sorted(glob.glob(os.path.join(glob.escape(folder), within, "rank-*.jsonl"))):
            place, name = os.path.split(path)
            number = re.fullmatch(r"rank-(\d+)\.jsonl", name)
            if number and (not within or _host(path) == os.path.basename(place)):
                found.setdefault(int(number[1]), []).append(path)
    return found


def lines(paths: Sequence[str]) -> Iterator[str]:
    """The lines of a rank's files; of several files, session by session in the order in which these began."""
    if len(paths) == 1:
        yield from _lines_of(paths[0])
        return
    sessions: list[tuple[float, list[str]]] = []
    for path in paths:
        sessions.append((-math.inf, []))
        for line in _lines_of(path):
            if (first := head(line)) is not None:
                began = first.get("t_s")  # by the clock of its host
                sessions.append((float(began) if isinstance(began, (int, float)) else 0.0, []))
            sessions[-1][1].append(line)
    for _, of_session in sorted(sessions, key=lambda session: session[0]):
        yield from of_session


def head(line: str) -> dict[str, Any] | None:
    """The content of a session's first line; None if this is another line."""
    with contextlib.suppress(ValueError):
        entry = json.loads(line) if line.startswith("{") else None
        if isinstance(entry, dict) and "format" in entry:
            return entry
    return None


def _host(path: str) -> str:
    """The host of which a file tells first; "" where it does not."""
    with contextlib.suppress(OSError):
        return str((head(next(_lines_of(path), "")) or {}).get("host", ""))
    return ""


def _lines_of(path: str) -> Iterator[str]:
    with open(path, encoding="utf-8", errors="replace") as file:
        yield from filter(str.strip, file)
