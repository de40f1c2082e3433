"""Reads the record of a run.

A run may have been killed in the middle of a line, and resumed. Lines of another format are counted and skipped. A
resumed run goes back to its checkpoint and makes some steps again: these replace those recorded before.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from typing import Any

from .entry import Event, event_of, plan_of, step_of
from .files import files, lines
from .record import FIELDS, FORMAT
from .run import RankRun, Run


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
    return Run(folder=folder, ranks={rank: _read_rank(rank, found[rank]) for rank in sorted(found)})


def _read_rank(rank: int, paths: Sequence[str]) -> RankRun:
    """Reads all files of one rank."""
    run = RankRun(rank=rank)
    fields: Sequence[str] = FIELDS
    plans_before: int | None = None      # from a header to the first step after it: how many plans came before
    events_before = 0
    for line in lines(paths):
        try:
            entry = json.loads(line)
            if isinstance(entry, dict) and "format" in entry:
                _check(entry["format"], ", ".join(paths))
                _forget_idle(run, plans_before)
                fields, plans_before, events_before = tuple(entry["fields"]), len(run.plans), len(run.events)
                run.sessions += 1
                run.host = str(entry.get("host") or run.host)
                continue
            if isinstance(entry, list) and plans_before is not None:
                first = step_of(fields, entry).step
                _go_back(run, first, plans_before, events_before)
                run.hosts[first] = run.host
                plans_before = None
            _take(run, fields, entry)
        except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
            run.unreadable += 1
    _forget_idle(run, plans_before)
    return run


def _check(version: int, path: str) -> None:
    """Raises NewerFormatError if a header has a format later than `FORMAT`."""
    if version > FORMAT:
        raise NewerFormatError(f"{path}: expected a record of format {FORMAT} or older. Received: {version}. "
                               "Read it with the hvd_hetero that wrote it.")


def _forget_idle(run: RankRun, plans_before: int | None) -> None:
    """Drops the plans of a session that ended before its first step, unless no session has made a step so far.

    `plans_before` is the number of plans before that session; None if the last session has made a step.
    """
    if plans_before is not None and run.steps:
        del run.plans[plans_before:]


def _go_back(run: RankRun, step: int, plans_before: int, events_before: int) -> None:
    """Drops what the resumed session, which begins with `step`, has undone or made useless.

    That is what earlier sessions recorded from `step` on, and the plans that this session recorded before it loaded its
    checkpoint: of its plans for `step` or earlier, only the last one holds, in place of any later plan of an earlier
    session.

    Args:
        run: is changed in place.
        step: the first step of the resumed session.
        plans_before, events_before: how many plans and events of `run` are of earlier sessions.
    """
    run.steps = [s for s in run.steps if s.step < step]
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


def _take(run: RankRun, fields: Sequence[str], entry: Any) -> None:
    """Adds the entry of one line to `run`. Raises ValueError, TypeError or KeyError for a line of another format."""
    if isinstance(entry, list):
        run.steps.append(step_of(fields, entry))
    elif "plan" in entry:
        run.plans.append(plan_of(entry["plan"]))
    elif "event" in entry:
        run.events.append(event_of(entry))
    else:
        run.dropped += int(entry["dropped"])
