"""Computes from the record of a run which rank waited for which, and why.

In a synchronous step every rank waits until the last one has come, and then for the exchange itself. The last rank
waits only for the exchange, so that the wait w_i of rank i in a step divides into

    exchange = min_j w_j,     waited for the last rank = w_i - exchange.

The causes of the latter are what took the last rank longer than rank i since the step before: waiting for data,
computing, or the rest, which is all else that the script does (validation, saving, printing). Each counts in proportion
to how much longer it took. Local steps are left out, as no rank waits for a slow one there, up to `bound_rounds`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from .entry import Table
from .run import RankRun, Run

NOTEWORTHY = 0.02  # a rank that is last by less than this part of a step has not held up the others


class Causes(NamedTuple):
    """Seconds by cause: waiting for data, computing, and all else."""

    data: float = 0.0
    compute: float = 0.0
    rest: float = 0.0

    @property
    def whole(self) -> float:
        """The sum over all causes."""
        return self.data + self.compute + self.rest


@dataclass(frozen=True, kw_only=True)
class Waiting:
    """Which ranks waited for which, in the synchronous steps that all ranks recorded. Index i stands for `ranks[i]`.

    Attributes:
        ranks: the numbers of the ranks.
        steps: number of such steps.
        step_s: mean seconds of a step.
        exchange_s: mean seconds that the exchange of a step takes after the last rank has come.
        waited_s: [i][j]: seconds that rank i waited for rank j, over all steps.
        last: for each rank, the number of steps in which it was last by more than `NOTEWORTHY`.
        causes: for each rank, the seconds that all others waited for it, by what took it longer than them.
    """

    ranks: tuple[int, ...]
    steps: int
    step_s: float
    exchange_s: float
    waited_s: tuple[tuple[float, ...], ...]
    last: tuple[int, ...]
    causes: tuple[Causes, ...]

    @property
    def waited_part(self) -> float:
        """The part of all ranks' time in these steps in which they waited for another rank."""
        whole = self.step_s * self.steps * len(self.ranks)
        return sum(map(sum, self.waited_s)) / whole if whole else 0.0

    @property
    def exchange_part(self) -> float:
        """The part of a step that the exchange takes after the last rank has come."""
        return self.exchange_s / self.step_s if self.step_s else 0.0

    def waited_for(self, index: int) -> float:
        """Seconds that all others waited for rank `ranks[index]`."""
        return sum(row[index] for row in self.waited_s)


class Timed(NamedTuple):
    """Some steps of one rank, and `span_s`, the seconds from the end of the step before each to its own; nan if not
    recorded."""

    steps: Table
    span_s: np.ndarray

    @property
    def rest_s(self) -> np.ndarray:
        """The seconds of each span in which the rank neither waited nor computed; 0.0 if the span is not known."""
        known = self.steps.data_s + self.steps.compute_s + self.steps.wait_s
        return np.fmax(0.0, self.span_s - known)

    def where(self, chosen: np.ndarray) -> Timed:
        """Those of the steps for which `chosen` is True."""
        return Timed(self.steps[chosen], self.span_s[chosen])


def timed(run: RankRun, *, skip: int = 0) -> Timed:
    """The steps of one rank with their spans, without the first `skip` of each session.

    The first step of a session has no span.
    """
    return Timed(run.steps, run.spans_s).where(run.counted(skip))


def local_steps_of(run: RankRun, steps: Sequence[int] | np.ndarray) -> np.ndarray:
    """For each of `steps`, whether the rank made it as a local step."""
    turns = sorted((event.fields["step"], event.kind == "apart") for event in run.events
                   if event.kind in ("apart", "together"))
    local = np.array([False, *(apart for _, apart in turns)])
    return local[np.searchsorted([step for step, _ in turns], steps, side="right")]


def waiting(run: Run, *, skip: int = 0) -> Waiting:
    """Computes who waited for whom in a run.

    Args:
        skip: leaves out so many first steps of each session, in which frameworks compile and caches fill.
    """
    ranks = tuple(run.ranks)
    steps = np.unique(np.concatenate([record.steps.step for record in run.ranks.values()]))
    sizes = run.sizes_at(steps)
    # [:, rank, step]: seconds waited, those by cause, and the span; nan where they are not known.
    table = np.full((5, len(ranks), len(steps)), np.nan)
    for index, (rank, record) in enumerate(run.ranks.items()):
        seen = timed(record, skip=skip)
        # A rank that has left may have recorded a step that was undone and made again without it.
        seen = seen.where((rank < run.sizes_at(seen.steps.step)) & ~local_steps_of(record, seen.steps.step))
        rest_s = np.where(np.isnan(seen.span_s), np.nan, seen.rest_s)
        columns = (seen.steps.wait_s, seen.steps.data_s, seen.steps.compute_s, rest_s, seen.span_s)
        table[:, index, np.searchsorted(steps, seen.steps.step)] = columns
    # Which rank came last is known only if all have recorded the step.
    table = table[:, :, (sizes > 1) & (np.isfinite(table[0]).sum(axis=0) == sizes)]
    waits_s, took_s, spans_s = table[0], table[1:4], table[4]
    late, each = np.nanargmin(waits_s, axis=0), np.arange(table.shape[2])
    exchange_s = waits_s[late, each]
    seconds = np.nan_to_num(waits_s - exchange_s)
    known = np.isfinite(spans_s)
    span_s = np.where(known, spans_s, 0.0).sum(axis=0) / np.maximum(1, known.sum(axis=0))
    longest = seconds.max(axis=0)
    held_up = longest > NOTEWORTHY * span_s
    by_cause = seconds * _parts_longer(took_s, late)
    of_rank = [late == index for index in range(len(ranks))]
    return Waiting(
        ranks=ranks, steps=len(each), step_s=_mean(span_s[span_s > 0.0]), exchange_s=_mean(exchange_s),
        waited_s=tuple(zip(*(seconds[:, those].sum(axis=1).tolist() for those in of_rank), strict=True)),
        last=tuple(np.bincount(late[held_up], minlength=len(ranks)).tolist()),
        causes=tuple(Causes(*by_cause[:, :, those].sum(axis=(1, 2)).tolist()) for those in of_rank),
    )


def _parts_longer(took_s: np.ndarray, late: np.ndarray) -> np.ndarray:
    """What took the late rank of each step longer than each other one: parts by cause, which sum to 1.

    "compute" if nothing recorded took it longer.

    Args:
        took_s: [cause, rank, step], with the causes of `Causes`; nan where it is not known.
        late: the index of the late rank of each step.
    """
    longer = np.fmax(0.0, took_s[:, late, np.arange(len(late))][:, None] - took_s)
    whole = longer.sum(axis=0)
    longer[Causes._fields.index("compute"), whole == 0.0] = 1.0
    return longer / np.where(whole == 0.0, 1.0, whole)


def _mean(values: np.ndarray) -> float:
    return float(values.mean()) if len(values) else 0.0


def parts(run: RankRun, *, skip: int = 0) -> Mapping[str, float]:
    """The parts of a rank's time, which sum to 1: "data" (waited for data), "compute", "wait" (for other ranks and the
    exchange) and "rest". All are 0.0 if no span is known."""
    seen = timed(run, skip=skip)
    seen = seen.where(seen.span_s > 0.0)
    if not len(seen.steps):
        return {"data": 0.0, "compute": 0.0, "wait": 0.0, "rest": 0.0}
    merging = _merging_s(run, seen)
    rest = float(seen.rest_s.sum())
    sums = {
        "data": float(seen.steps.data_s.sum()),
        "compute": float(seen.steps.compute_s.sum()),
        "wait": float(seen.steps.wait_s.sum()) + min(merging, rest),
        "rest": max(0.0, rest - merging),
    }
    return {name: seconds / sum(sums.values()) for name, seconds in sums.items()}


def waited_in_local_steps(run: RankRun, *, skip: int = 0) -> tuple[float, float]:
    """The parts of a rank's time in local steps in which it waited for merges.

    Returns:
        The part for merges between local steps, and the part for merges that ended a phase of local steps, as at the
        end of an epoch. Both are 0.0 without local steps.
    """
    seen = timed(run, skip=skip)
    seen = seen.where((seen.span_s > 0.0) & local_steps_of(run, seen.steps.step))
    if not len(seen.steps):
        return 0.0, 0.0
    within = float(seen.steps.wait_s.sum())
    ends = _merging_s(run, seen)
    whole = float(seen.span_s.sum()) + max(0.0, ends - float(seen.rest_s.sum()))
    return within / whole, ends / whole


def _merging_s(run: RankRun, seen: Timed) -> float:
    """Seconds of the merges that ended phases of local steps, before or after one of the steps `seen`."""
    merging_s = run.merging_s
    steps = set(seen.steps.step.tolist()) if merging_s else ()
    return sum(took for step, took in merging_s.items() if step in steps or step - 1 in steps)
