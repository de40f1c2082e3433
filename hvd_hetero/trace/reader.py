"""The reader: the record of a run, rank by rank, and what it amounts to.

A run may have been killed in the middle of a line, and resumed: lines that are no JSON are counted and passed over, and
what a resumed run does again (it goes back to its checkpoint) takes the place of the first time.
"""

from __future__ import annotations

import json
import math
import os
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import compress, pairwise
from statistics import median
from types import NoneType
from typing import Any, NamedTuple

from hvd_hetero.policy.partition import Bound
from hvd_hetero.policy.replan import Plan

from .files import files, lines
from .record import FIELDS, FORMAT

# What reports read of events, which are of no use without.
READ: dict[str, dict[str, Any]] = {
    "apart": {"step": int},
    "together": {"step": int},
    "wait": {"waited_s": (int, float), "missing": list},
    "parameters": {"ranks": list},
    "limits": {"lower": int, "upper": (int, NoneType), "quantum": int, "micro_batch": (int, NoneType)},
}
NEWEST = 64       # steps of a rank that are of late
PAUSE = 10.0      # an interval so many times longer than the median one is a pause (a checkpoint, a validation)


class NewerFormatError(Exception):
    """The record was written by a newer hvd_hetero."""


class Step(NamedTuple):
    """One step of one rank. Seconds that were not finite, and fields that the file lacks, are 0."""

    step: int
    t_s: float           # on the rank's own clock, as the step ended
    samples: int
    data_s: float
    compute_s: float
    wait_s: float
    bytes: int
    share: int
    extra_s: float = 0.0      # beyond compute_s, as plans reckon: loading, serving the communication, a quota's part
    loading_s: float = 0.0    # what its samples take to be loaded beside that, at least; 0: less than was noticed


@dataclass(frozen=True, kw_only=True)
class Event:
    """Something that happened on a rank."""

    t_s: float
    kind: str
    fields: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class RankSummary:
    """What a rank's record amounts to. Medians are over steps; 0.0 where there were none."""

    rank: int
    steps: int
    samples: int
    median_data_s: float
    median_compute_s: float
    median_wait_s: float
    samples_per_s: float
    bytes: int
    shares: tuple[tuple[int, int], ...]      # (step, share) wherever the share changed


@dataclass(kw_only=True)
class RankRun:
    """The record of one rank."""

    rank: int
    host: str = ""           # its name, of the last session
    steps: list[Step] = field(default_factory=list)
    plans: list[Plan] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    sessions: int = 0        # how often the run was started
    session_starts: set[int] = field(default_factory=set)      # the first step of each
    dropped: int = 0         # records that could not be written
    unreadable: int = 0      # lines that are not of this format

    @property
    def newest(self) -> list[Step]:
        """Its last steps with samples."""
        return [step for step in self.steps[-NEWEST:] if step.samples > 0]

    @property
    def loading_s(self) -> float:
        """Seconds that a sample took of late to be loaded beside computing, at least; 0.0: less than was noticed."""
        return _median(step.loading_s / step.samples for step in self.newest)

    def counted(self, skip: int) -> list[bool]:
        """Of each step, whether it is none of the first `skip` of its session."""
        found, place = [], 0
        for step in self.steps:
            place = 0 if step.step in self.session_starts else place
            found.append(place >= skip)
            place += 1
        return found

    def after(self, skip: int) -> list[Step]:
        """Its steps without the first `skip` of each session, in which frameworks compile and caches fill."""
        return list(compress(self.steps, self.counted(skip)))

    @property
    def _merging_s(self) -> dict[int, float]:
        """Seconds that the merges took which ended steps apart, by the step that came next."""
        return {event.fields["step"]: event.fields.get("wait_s", 0.0) for event in self.events
                if event.kind == "together"}

    def summary(self, *, skip: int = 0) -> RankSummary:
        """Medians, speed and the history of shares, without the first `skip` steps of each session."""
        steps = self.after(skip)
        shares = [(s.step, s.share) for i, s in enumerate(steps) if i == 0 or s.share != steps[i - 1].share]
        return RankSummary(
            rank=self.rank,
            steps=len(steps),
            samples=sum(s.samples for s in steps),
            median_data_s=_median(s.data_s for s in steps),
            median_compute_s=_median(s.compute_s for s in steps),
            median_wait_s=_median(s.wait_s for s in steps),
            samples_per_s=_samples_per_s(steps, self._merging_s),
            bytes=sum(s.bytes for s in steps),
            shares=tuple(shares),
        )


@dataclass(frozen=True, kw_only=True)
class Run:
    """The records of all ranks, by rank."""

    folder: str
    ranks: dict[int, RankRun]

    @cached_property
    def plans(self) -> tuple[Plan, ...]:
        """The plans of the run. All ranks hold the same ones; they are taken from the rank that recorded the most, of
        those that stayed: what others had seen may have been undone."""
        longest: list[Plan] = []
        for rank in self.present.values():
            longest = max(longest, rank.plans, key=len)
        return tuple(longest)

    @cached_property
    def present(self) -> dict[int, RankRun]:
        """The ranks that there were at the end, by the newest plan: others have left an elastic job, or the job went on
        from a checkpoint without them."""
        # There is always a rank 0; to look for who recorded last would be to compare the clocks of hosts.
        those = [self.ranks[0]] if 0 in self.ranks and self.ranks[0].steps else self.ranks.values()
        last = max(those, key=lambda run: run.steps[-1].t_s if run.steps else 0.0)
        size = len(last.plans[-1].shares) if last.plans else math.inf
        return {rank: run for rank, run in self.ranks.items() if rank < size}

    @property
    def missing(self) -> tuple[int, ...]:
        """The numbers of ranks of the newest plan of whose steps there is no record."""
        size = len(self.plans[-1].shares) if self.plans else 0
        return tuple(rank for rank in range(size) if rank not in self.ranks or not self.ranks[rank].steps)

    def size_at(self, step: int) -> int | None:
        """How many ranks there were in a step, by the plan that held then; None where no plan is recorded."""
        at = bisect_right(self._begins, step) - 1
        return len(self.plans[max(0, at)].shares) if self.plans else None

    @cached_property
    def _begins(self) -> list[int]:
        return [plan.step for plan in self.plans]

    @property
    def gone(self) -> tuple[int, ...]:
        """The others' numbers."""
        return tuple(sorted(set(self.ranks) - set(self.present)))

    def summaries(self, *, skip: int = 0) -> tuple[RankSummary, ...]:
        """One summary per rank, in the order of ranks."""
        return tuple(rank.summary(skip=skip) for rank in self.ranks.values())


def read(folder: str | os.PathLike[str]) -> Run:
    """The run recorded in a folder.

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
    run = RankRun(rank=rank)
    fields: Sequence[str] = FIELDS
    plans_before: int | None = None      # set from the header of a resumed run to its first step
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
                first = _step(fields, entry).step
                _go_back(run, first, plans_before, events_before)
                run.session_starts.add(first)
                plans_before = None
            _take(run, fields, entry)
        except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
            run.unreadable += 1
    _forget_idle(run, plans_before)
    return run


def _check(version: int, path: str) -> None:
    if version > FORMAT:
        raise NewerFormatError(f"{path}: expected a record of format {FORMAT} or older. Received: {version}. "
                               "Read it with the hvd_hetero that wrote it.")


def _forget_idle(run: RankRun, plans_before: int | None) -> None:
    """None; forgets the plans of a session that ended before its first step, where an earlier one made some."""
    if plans_before is not None and run.steps:
        del run.plans[plans_before:]


def _go_back(run: RankRun, step: int, plans_before: int, events_before: int) -> None:
    """None; forgets what earlier sessions recorded from `step` on, and the plans that this one began with before it
    went on from a state."""
    run.steps = [s for s in run.steps if s.step < step]
    run.session_starts = {start for start in run.session_starts if start < step}
    old, new_events = run.events[:events_before], run.events[events_before:]
    run.events = [event for event in old if event.fields.get("step", -1) < step] + new_events
    new = run.plans[plans_before:]
    holds = [plan for plan in new if plan.step <= step][-1:]
    since = holds[0].step if holds else step + 1
    kept = [plan for plan in run.plans[:plans_before] if plan.step < since]
    run.plans = kept + holds + [plan for plan in new if plan.step > step]


def _take(run: RankRun, fields: Sequence[str], entry: Any) -> None:
    """None; adds what one line says. Raises ValueError, TypeError or KeyError where it says nothing of this format."""
    if isinstance(entry, list):
        run.steps.append(_step(fields, entry))
    elif "plan" in entry:
        run.plans.append(_plan(entry["plan"]))
    elif "event" in entry:
        run.events.append(_event(entry))
    else:
        run.dropped += entry["dropped"]


def _plan(entry: dict[str, Any]) -> Plan:
    plan = Plan(**{**entry, "shares": tuple(entry["shares"])})
    predicted_s = plan.predicted_step_s
    if not (isinstance(plan.reason, str) and isinstance(plan.strategy, str)
            and all(isinstance(number, int) for number in (plan.step, *plan.shares))
            and (predicted_s is None or math.isfinite(predicted_s))):
        raise TypeError(f"Expected a plan. Received: {entry}.")
    return plan


def bound_in(limits: Mapping[str, Any]) -> Bound:
    """The bound that an event "limits" tells of. Raises ValueError where it is none."""
    return Bound(lower=limits["lower"], upper=limits["upper"], quantum=limits["quantum"])


def _event(entry: dict[str, Any]) -> Event:
    event = Event(t_s=entry["t_s"], kind=entry["event"], fields=dict(entry["fields"]))
    for name, kinds in READ.get(event.kind, {}).items():
        if not isinstance(event.fields[name], kinds):
            raise TypeError(f"Expected {name} of {kinds}. Received: {entry}.")
    if event.kind == "together" and not math.isfinite(event.fields.get("wait_s", 0.0)):
        raise ValueError(f"Expected a finite wait_s. Received: {entry}.")
    if event.kind == "limits":
        bound_in(event.fields)
        if event.fields["micro_batch"] is not None and event.fields["micro_batch"] < 1:
            raise ValueError(f"Expected micro_batch of 1 or more. Received: {entry}.")
    return event


def _step(fields: Sequence[str], values: Sequence[Any]) -> Step:
    if len(values) != len(fields):
        raise ValueError(f"Expected {len(fields)} values. Received: {values}.")
    for value in values:
        if value is not None and not isinstance(value, (int, float)):
            raise TypeError(f"Expected numbers. Received: {values}.")
    finite = [value if value and math.isfinite(value) else 0 for value in values]
    if fields == Step._fields:
        return Step._make(finite)
    seen = dict(zip(fields, finite, strict=True))
    return Step(**{name: seen.get(name, 0) for name in Step._fields})


def _median(values: Iterable[float]) -> float:
    seen = list(values)
    return float(median(seen)) if seen else 0.0


def _samples_per_s(steps: Sequence[Step], merging_s: Mapping[int, float]) -> float:
    """Samples over time: of the intervals between consecutive steps that are no pauses, and of `merging_s`, what the
    merges took that ended steps apart, by the step that came next."""
    pairs = [(b, b.t_s - a.t_s) for a, b in pairwise(steps) if b.step == a.step + 1 and b.t_s > a.t_s]
    spans = [(step.samples, max(0.0, span - merging_s.get(step.step, 0.0))) for step, span in pairs]
    longest = PAUSE * _median(span for _, span in spans)
    spans = [(samples, span) for samples, span in spans if span <= longest]
    merging = sum(took for step, took in merging_s.items() if steps and steps[0].step < step <= steps[-1].step + 1)
    whole = sum(span for _, span in spans) + merging
    return sum(samples for samples, _ in spans) / whole if whole else 0.0
