"""The record of a run as it was read: the entries of each rank, and summaries of them."""

from __future__ import annotations

import math
from collections.abc import Set
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from hvd_hetero.policy.replan import Plan

from .entry import STEPS, Event, Table

NEWEST = 64       # so many last steps of a rank count as its newest
LONG_LOADING = 0.75      # part of a step, from which on loading limits it
PAUSE = 10.0      # an interval so many times longer than the median is a pause (a checkpoint, a validation)


@dataclass(frozen=True, kw_only=True)
class RankSummary:
    """A summary of one rank's record. Medians are over its steps; 0.0 if there are none."""

    rank: int
    steps: int
    samples: int
    median_data_s: float
    median_compute_s: float
    median_wait_s: float
    samples_per_s: float
    bytes: int
    shares: tuple[tuple[int, int], ...]      # (step, share) for each step at which the share changed


@dataclass(kw_only=True)
class RankRun:
    """The record of one rank. Its steps are a table with the columns of `Step`."""

    rank: int
    host: str = ""           # name of the host of its last session
    hosts: dict[int, str] = field(default_factory=dict)        # name of the host of each session, by its first step
    steps: Table = field(default_factory=lambda: np.zeros(0, STEPS).view(np.recarray))
    plans: list[Plan] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    sessions: int = 0        # how often the run was started
    dropped: int = 0         # records that could not be written
    unreadable: int = 0      # lines that are not of this format

    @property
    def session_starts(self) -> Set[int]:
        """The first step of each session."""
        return self.hosts.keys()

    @property
    def mixed(self) -> bool:
        """Whether several processes have written the record at a time: within a session, steps only go on."""
        return bool((np.diff(self.steps.step) < 0).any())

    @property
    def newest(self) -> Table:
        """The rank's last steps with samples."""
        steps = self.steps[-NEWEST:]
        return steps[steps.samples > 0]

    @property
    def loading_s(self) -> float:
        """The least seconds per sample that loading took in the newest steps; 0.0: not known."""
        return _median(self.newest.loading_s / self.newest.samples)

    @property
    def limited_by_loading(self) -> bool:
        """Whether in most of the newest steps loading took longer than computing, and nearly as long as the step."""
        steps, spans_s = self.steps[-NEWEST:], self.spans_s[-NEWEST:]
        limits = steps.loading_s > np.fmax(steps.compute_s + steps.extra_s, LONG_LOADING * spans_s)
        return bool(2 * limits.sum() > len(self.newest))

    def next_step(self, t_s: float) -> int:
        """The step that the rank made or ended at `t_s`, a time by its own clock; after its last step, the one after
        that. Clocks of different hosts may differ, and steps do not."""
        at = int(np.searchsorted(self.steps.t_s, t_s))
        return int(self.steps.step[at] if at < len(self.steps) else self.steps.step[-1] + 1 if at else 0)

    @property
    def spans_s(self) -> np.ndarray:
        """For each step, the seconds from the end of the step before to its own; nan for the first step of a session,
        and where they are not known."""
        steps = self.steps
        apart = np.diff(steps.step)
        follows = (apart >= 1) & (apart <= self.usual_batches) & (np.diff(steps.t_s) >= 0.0) & ~self._is_start[1:]
        return np.concatenate([np.full(min(1, len(steps)), np.nan), np.where(follows, np.diff(steps.t_s), np.nan)])

    @property
    def usual_batches(self) -> int:
        """The global batches of most steps: 1, or `backward_passes_per_step`. A step has the number of its last one."""
        apart = np.diff(self.steps.step)[~self._is_start[1:]]
        return max(1, int(_median(apart[apart >= 1])))

    @property
    def batches(self) -> np.ndarray:
        """For each step, its global batches: fewer than usual in a step at the end of an epoch. As many as usual where
        the step before is not known."""
        apart = np.diff(self.steps.step, prepend=self.steps.step[:1])
        return np.where(np.isnan(self.spans_s), self.usual_batches, apart)

    @property
    def _is_start(self) -> np.ndarray:
        """For each step, whether it is the first of a session."""
        return np.isin(self.steps.step, list(self.session_starts))

    def counted(self, skip: int) -> np.ndarray:
        """For each step, whether it comes after the first `skip` steps of its session."""
        place = np.arange(len(self.steps))
        return place - np.maximum.accumulate(np.where(self._is_start, place, 0)) >= skip

    def after(self, skip: int) -> Table:
        """The steps without the first `skip` of each session, in which frameworks compile and caches fill."""
        return self.steps[self.counted(skip)]

    @property
    def merging_s(self) -> dict[int, float]:
        """Seconds of the merges that ended phases of local steps, by the step that came next.

        They come between two steps, so that no step has them in its `wait_s`.
        """
        found: dict[int, float] = {}
        for event in self.events:
            if event.kind == "together":  # one for each optimizer with local steps
                step = event.fields["step"]
                found[step] = found.get(step, 0.0) + event.fields.get("wait_s", 0.0)
        return found

    def summary(self, *, skip: int = 0) -> RankSummary:
        """Summarises the steps after the first `skip` of each session."""
        steps = self.after(skip)
        changes = steps[np.diff(steps.share, prepend=-1) != 0]
        return RankSummary(
            rank=self.rank,
            steps=len(steps),
            samples=int(steps.samples.sum()),
            median_data_s=_median(steps.data_s),
            median_compute_s=_median(steps.compute_s),
            median_wait_s=_median(steps.wait_s),
            samples_per_s=self._samples_per_s(skip),
            bytes=int(steps.bytes.sum()),
            shares=tuple(zip(changes.step.tolist(), changes.share.tolist(), strict=True)),
        )

    def _samples_per_s(self, skip: int) -> float:
        """Samples per second over the intervals between consecutive steps after the first `skip` of each session,
        without pauses (see `PAUSE`). Merges between them count as time, even where they are long."""
        merging_s = self.merging_s
        known = self.counted(skip + 1) & (self.spans_s > 0.0)
        steps, spans = self.steps[known], self.spans_s[known]
        spans = np.maximum(0.0, spans - [merging_s.get(step, 0.0) for step in steps.step.tolist()])
        kept = spans <= PAUSE * _median(spans)
        before = {step + 1 for step in self.after(skip).step.tolist()} if merging_s else ()
        whole = spans[kept].sum() + sum(took for step, took in merging_s.items() if step in before)
        return float(steps.samples[kept].sum() / whole) if whole else 0.0


@dataclass(frozen=True, kw_only=True)
class Run:
    """The record of a run.

    Attributes:
        folder: where it was read from.
        ranks: the records by rank.
    """

    folder: str
    ranks: dict[int, RankRun]

    @cached_property
    def plans(self) -> tuple[Plan, ...]:
        """The plans of the run, oldest first, which are the same on all ranks.

        They are those of the rank with the most plans among those `present` at the end. Ranks that left an elastic job
        may have recorded plans that were undone.
        """
        longest: list[Plan] = []
        for rank in self.present.values():
            longest = max(longest, rank.plans, key=len)
        return tuple(longest)

    @cached_property
    def present(self) -> dict[int, RankRun]:
        """The records of the ranks that trained at the end: as many as the newest plan has shares.

        Others have left an elastic job, or the job went on from a checkpoint without them.
        """
        # There always is a rank 0. Looking for the rank that recorded last would compare clocks of different hosts.
        those = [self.ranks[0]] if 0 in self.ranks and len(self.ranks[0].steps) else self.ranks.values()
        last = max(those, key=lambda run: run.steps[-1].t_s if len(run.steps) else 0.0)
        size = len(last.plans[-1].shares) if last.plans else math.inf
        return {rank: run for rank, run in self.ranks.items() if rank < size}

    @property
    def missing(self) -> tuple[int, ...]:
        """The ranks of the newest plan that have no recorded step, as when their files are missing."""
        size = len(self.plans[-1].shares) if self.plans else 0
        return tuple(rank for rank in range(size) if rank not in self.ranks or not len(self.ranks[rank].steps))

    def sizes_at(self, steps: np.ndarray) -> np.ndarray:
        """The number of ranks in each of `steps`, by the plan that held then; if no plan is recorded, of all ranks."""
        if not self.plans:
            return np.full(len(steps), len(self.ranks))
        at = np.searchsorted([plan.step for plan in self.plans], steps, side="right") - 1
        return np.array([len(plan.shares) for plan in self.plans])[np.maximum(at, 0)]

    @property
    def gone(self) -> tuple[int, ...]:
        """The ranks with a record that are not `present` at the end."""
        return tuple(sorted(set(self.ranks) - set(self.present)))

    def summaries(self, *, skip: int = 0) -> tuple[RankSummary, ...]:
        """One summary per rank, in the order of ranks."""
        return tuple(rank.summary(skip=skip) for rank in self.ranks.values())


def _median(values: np.ndarray) -> float:
    return float(np.median(values)) if len(values) else 0.0
