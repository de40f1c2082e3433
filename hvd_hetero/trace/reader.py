"""Reads the record of a run.

A run may have been killed in the middle of a line, and resumed. Lines of another format are counted and skipped. A
resumed run goes back to its checkpoint and makes some steps again: these replace those recorded before.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from .entry import Event, Table, event_of, plan_of, steps_of
from .files import files, lines
from .record import FIELDS, FORMAT
from .run import RankRun, Run

UNREADABLE = (ValueError, TypeError, KeyError, OverflowError, RecursionError)  # what a line of another format raises
TOGETHER = 4096  # lines of steps that are taken in at once


class NewerFormatError(Exception):
    """The record was written by a newer hvd_hetero."""


def read(folder: str | os.PathLike[str]) -> Run:
    """Reads the run that is recorded in `folder`; see `files` for the folder's layout.

    Raises:
        FileNotFoundError: the folder holds no record.
        NewerFormatError: a record was written by a newer hvd_hetero.
    """
    folder = os.fspath(folder)
    found = files(folder)
    if not found:
        raise FileNotFoundError("Expected a folder with the record of a run, rank-00000.jsonl and so on, or with one "
                                f"for each host, named as it. Received: {folder}.")
    return Run(folder=folder, ranks={rank: _Reader(rank).read(found[rank]) for rank in sorted(found)})


class _Reader:
    """Reads the lines of one rank's files into `run`.

    Lines of steps are taken in many at once, and before the header of the next session.
    """

    def __init__(self, rank: int) -> None:
        self.run = RankRun(rank=rank)
        self._fields: Sequence[str] = FIELDS
        self._lines: list[str] = []  # of steps that were not taken in yet
        self._tables: list[Table] = []  # of the steps so far
        self._plans_before: int | None = None  # from a header to the first step after it: how many plans came before
        self._events_before = 0

    def read(self, paths: Sequence[str]) -> RankRun:
        """Reads all files of the rank."""
        for line in lines(paths):
            try:
                entry = [] if line.startswith("[") else json.loads(line)
                if isinstance(entry, list):
                    self._lines.append(line)
                    if len(self._lines) == TOGETHER:
                        self._take_steps()
                elif isinstance(entry, dict) and "format" in entry:
                    self._begin_session(entry, ", ".join(paths))
                else:
                    _take(self.run, entry)
            except UNREADABLE:
                self.run.unreadable += 1
        self._end_session()
        self.run.steps = np.concatenate([self.run.steps, *self._tables]).view(np.recarray)
        return self.run

    def _begin_session(self, header: dict[str, Any], path: str) -> None:
        """Takes in a header. Raises NewerFormatError, or one of `UNREADABLE`."""
        self._end_session()
        _check(header["format"], path)
        run = self.run
        self._fields, self._plans_before, self._events_before = tuple(header["fields"]), len(run.plans), len(run.events)
        run.sessions += 1
        run.host = str(header.get("host") or run.host)

    def _end_session(self) -> None:
        """Drops the plans of a session that ends before its first step, unless no session has made a step so far."""
        self._take_steps()
        if self._plans_before is not None and self._tables:
            del self.run.plans[self._plans_before :]

    def _take_steps(self) -> None:
        """Takes in the lines of steps. The first step of a session undoes what earlier ones recorded from it on."""
        tables = _tables(self._fields, self._lines)
        self.run.unreadable += len(self._lines) - sum(map(len, tables))
        self._lines.clear()
        if tables and self._plans_before is not None:
            first = int(tables[0].step[0])
            _go_back(self.run, first, self._plans_before, self._events_before)
            self._tables = [earlier for table in self._tables if len(earlier := table[table.step < first])]
            self.run.hosts[first] = self.run.host
            self._plans_before = None
        self._tables += tables


def _tables(fields: Sequence[str], steps: Sequence[str]) -> list[Table]:
    """Tables of the steps in these lines, in order, none of them empty, without the lines of another format."""
    try:
        return [steps_of(fields, steps)] if steps else []
    except UNREADABLE:
        half = len(steps) // 2
        return _tables(fields, steps[:half]) + _tables(fields, steps[half:]) if half else []


def _check(version: int, path: str) -> None:
    """Raises NewerFormatError if a header has a format later than `FORMAT`."""
    if version > FORMAT:
        raise NewerFormatError(f"{path}: expected a record of format {FORMAT} or older. Received: {version}. "
                               "Read it with the hvd_hetero that wrote it.")


def _go_back(run: RankRun, step: int, plans_before: int, events_before: int) -> None:
    """Drops what the resumed session, which begins with `step`, has undone or made useless.

    That is what earlier sessions recorded from `step` on, and the plans that this session recorded before it loaded its
    checkpoint: of its plans for `step` or earlier, only the last one holds, in place of any later plan of an earlier
    session. Steps are not looked at.

    Args:
        run: is changed in place.
        step: the first step of the resumed session.
        plans_before, events_before: how many plans and events of `run` are of earlier sessions.
    """
    run.hosts = {start: host for start, host in run.hosts.items() if start < step}
    old, new_events = run.events[:events_before], run.events[events_before:]
    run.events = [event for event in old if not _is_from(event, step)] + new_events
    new = run.plans[plans_before:]
    holds = [plan for plan in new if plan.step <= step][-1:]
    since = holds[0].step if holds else step + 1
    kept = [plan for plan in run.plans[:plans_before] if plan.step < since]
    run.plans = kept + holds + [plan for plan in new if plan.step > step]


def _is_from(event: Event, step: int) -> bool:
    """Whether an event belongs to global batch `step` or a later one. Fields are free: "step" may be no number."""
    at = event.fields.get("step")
    return isinstance(at, int | float) and at >= step


def _take(run: RankRun, entry: Any) -> None:
    """Adds a plan, an event or a number of dropped lines to `run`. Raises one of `UNREADABLE` for anything else."""
    if "plan" in entry:
        run.plans.append(plan_of(entry["plan"]))
    elif "event" in entry:
        run.events.append(event_of(entry))
    else:
        run.dropped += int(entry["dropped"])
