"""Computes from the record of a run which rank waited for which, and why.

In a synchronous step every rank waits until the last one has come, and then for the exchange itself. The last rank
waits only for the exchange, so that the wait w_i of rank i in a step divides into

    exchange = min_j w_j,     waited for the last rank = w_i - exchange.

The causes of the latter are what took the last rank longer than rank i since the step before: waiting for data,
computing, or the rest, which is all else that the script does (validation, saving, printing). Each counts in proportion
to how much longer it took. Local steps are left out, as no rank waits for a slow one there, up to `bound_rounds`.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import compress, pairwise
from typing import NamedTuple

from .entry import Step
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
    """A step, and `span_s`, the seconds from the end of the step before to its own end; None if not recorded."""

    step: Step
    span_s: float | None

    @property
    def rest_s(self) -> float:
        """The seconds of the span in which the rank neither waited nor computed; 0.0 if the span is not known."""
        known = self.step.data_s + self.step.compute_s + self.step.wait_s
        return 0.0 if self.span_s is None else max(0.0, self.span_s - known)


def timed(run: RankRun, *, skip: int = 0) -> list[Timed]:
    """The steps of one rank with their spans, without the first `skip` of each session.

    The first step of a session has no span.
    """

    def span_s(before: Step, step: Step) -> float | None:
        follows = step.step == before.step + 1 and step.step not in run.session_starts
        return step.t_s - before.t_s if follows and step.t_s >= before.t_s else None

    first = [Timed(step, None) for step in run.steps[:1]]
    whole = first + [Timed(step, span_s(before, step)) for before, step in pairwise(run.steps)]
    return list(compress(whole, run.counted(skip)))


def local_steps_of(run: RankRun, steps: Sequence[int]) -> set[int]:
    """Returns those of `steps` that the rank made as local steps."""
    turns = sorted((event.fields["step"], event.kind == "apart") for event in run.events
                   if event.kind in ("apart", "together"))
    begins = [step for step, _ in turns]
    found = set()
    for step in steps:
        at = bisect_right(begins, step) - 1
        if at >= 0 and turns[at][1]:
            found.add(step)
    return found


def waiting(run: Run, *, skip: int = 0) -> Waiting:
    """Computes who waited for whom in a run.

    Args:
        skip: leaves out so many first steps of each session, in which frameworks compile and caches fill.
    """
    ranks = tuple(run.ranks)
    rows: dict[int, dict[int, Timed]] = {}
    for index, rank in enumerate(ranks):
        record = run.ranks[rank]
        alone = local_steps_of(record, [step.step for step in record.steps])
        for each in timed(record, skip=skip):
            if each.step.step not in alone:
                rows.setdefault(each.step.step, {})[index] = each
    waited = [[0.0] * len(ranks) for _ in ranks]
    last, causes = [0] * len(ranks), [Causes()] * len(ranks)
    exchanges, spans = [], []
    for step, found in rows.items():
        size = run.size_at(step) or len(ranks)
        # A rank that has left may have recorded a step that was undone and made again without it. Which rank came last
        # is known only if all have recorded the step.
        row = {index: each for index, each in found.items() if ranks[index] < size}
        if not len(row) == size > 1:
            continue
        late = min(row, key=lambda index: row[index].step.wait_s)
        exchange = row[late].step.wait_s
        span = _mean([each.span_s for each in row.values() if each.span_s is not None])
        exchanges.append(exchange)
        spans += [span] if span else []
        longest = 0.0
        for index, each in row.items():
            seconds = each.step.wait_s - exchange
            waited[index][late] += seconds
            causes[late] = _added(causes[late], _why(row[late], each), seconds)
            longest = max(longest, seconds)
        last[late] += longest > NOTEWORTHY * (span or 0.0) and longest > 0.0
    return Waiting(
        ranks=ranks, steps=len(exchanges), step_s=_mean(spans), exchange_s=_mean(exchanges),
        waited_s=tuple(map(tuple, waited)), last=tuple(last), causes=tuple(causes),
    )


def _why(late: Timed, other: Timed) -> Causes:
    """What took the late rank longer than the other one: seconds by cause, which `_added` scales to the actual wait.

    "compute" if nothing recorded took it longer.
    """
    longer = Causes(
        data=max(0.0, late.step.data_s - other.step.data_s),
        compute=max(0.0, late.step.compute_s - other.step.compute_s),
        rest=max(0.0, late.rest_s - other.rest_s) if None not in (late.span_s, other.span_s) else 0.0,
    )
    return longer if longer.whole else Causes(compute=1.0)


def _added(so_far: Causes, why: Causes, seconds: float) -> Causes:
    """Adds `seconds` to the causes, divided in proportion to `why`."""
    return Causes(*(a + seconds * b / why.whole for a, b in zip(so_far, why, strict=True)))


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def parts(run: RankRun, *, skip: int = 0) -> Mapping[str, float]:
    """The parts of a rank's time, which sum to 1: "data" (waited for data), "compute", "wait" (for other ranks and the
    exchange) and "rest". All are 0.0 if no span is known."""
    seen = [each for each in timed(run, skip=skip) if each.span_s]
    whole = sum(each.span_s or 0.0 for each in seen)
    if not whole:
        return {"data": 0.0, "compute": 0.0, "wait": 0.0, "rest": 0.0}
    merging = _merging_s(run, seen)
    rest = sum(each.rest_s for each in seen)
    sums = {
        "data": sum(each.step.data_s for each in seen),
        "compute": sum(each.step.compute_s for each in seen),
        "wait": sum(each.step.wait_s for each in seen) + min(merging, rest),
        "rest": max(0.0, rest - merging),
    }
    return {name: seconds / max(whole, sum(sums.values())) for name, seconds in sums.items()}


def waited_in_local_steps(run: RankRun, *, skip: int = 0) -> tuple[float, float]:
    """The parts of a rank's time in local steps in which it waited for merges.

    Returns:
        The part for merges between local steps, and the part for merges that ended a phase of local steps, as at the
        end of an epoch. Both are 0.0 without local steps.
    """
    chosen = local_steps_of(run, [step.step for step in run.steps])
    seen = [each for each in timed(run, skip=skip) if each.span_s and each.step.step in chosen]
    if not seen:
        return 0.0, 0.0
    within = sum(each.step.wait_s for each in seen)
    ends = _merging_s(run, seen)
    whole = sum(each.span_s or 0.0 for each in seen) + max(0.0, ends - sum(each.rest_s for each in seen))
    return within / whole, ends / whole


def _merging_s(run: RankRun, seen: Sequence[Timed]) -> float:
    """Seconds of the merges that ended phases of local steps, before or after one of the steps `seen`."""
    steps = {each.step.step for each in seen}
    return sum(took for step, took in run.merging_s.items() if steps & {step - 1, step})
