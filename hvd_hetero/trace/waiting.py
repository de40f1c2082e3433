"""Who waited for whom, and why.

In a synchronous step every rank waits until the last one has come, and then for the exchange itself. Whoever comes
last waits for nothing but the exchange, so of rank i's wait w_i in a step

    exchange = min_j w_j,     waited for the last rank = w_i - exchange.

It came last because of what it did longer than rank i since the step before: waiting for data, computing, or the rest,
which is whatever the script does beside (validation, saving, printing) – in proportion to how much longer each took.
In steps that ranks make apart nobody waits for whoever is slow, until the bound; these are left out.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import compress, pairwise
from typing import NamedTuple

from .entry import Step
from .run import RankRun, Run

NOTEWORTHY = 0.02  # of a step: who comes last by less has held nobody up


class Causes(NamedTuple):
    """Seconds by what took them."""

    data: float = 0.0
    compute: float = 0.0
    rest: float = 0.0

    @property
    def whole(self) -> float:
        return self.data + self.compute + self.rest


@dataclass(frozen=True, kw_only=True)
class Waiting:
    """Of the synchronous steps that several ranks recorded. Index i is `ranks[i]`.

    Attributes:
        ranks: their numbers.
        steps: how many steps.
        step_s: mean seconds of a step, over ranks that tell.
        exchange_s: mean seconds of a step that the exchange takes once all have come.
        waited_s: [i][j]: seconds that rank i waited for rank j, in all.
        last: in how many steps a rank came last, and was noticeably waited for.
        causes: why a rank was waited for: seconds of all who waited, by what it did longer than they.
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
        """The part of all ranks' time that went into waiting for another rank."""
        whole = self.step_s * self.steps * len(self.ranks)
        return sum(map(sum, self.waited_s)) / whole if whole else 0.0

    @property
    def exchange_part(self) -> float:
        """The part of the time that exchanges take when nobody is late."""
        return self.exchange_s / self.step_s if self.step_s else 0.0

    def waited_for(self, index: int) -> float:
        """Seconds that all others waited for rank `ranks[index]`."""
        return sum(row[index] for row in self.waited_s)


class Timed(NamedTuple):
    """A step, and the seconds since the end of the one before; None where that is not recorded."""

    step: Step
    span_s: float | None

    @property
    def rest_s(self) -> float:
        """The seconds that were neither waiting nor compute."""
        known = self.step.data_s + self.step.compute_s + self.step.wait_s
        return 0.0 if self.span_s is None else max(0.0, self.span_s - known)


def timed(run: RankRun, *, skip: int = 0) -> list[Timed]:
    """The steps of one rank, without the first `skip` of each session. Between two sessions of a resumed run nothing is
    known."""

    def span_s(before: Step, step: Step) -> float | None:
        follows = step.step == before.step + 1 and step.step not in run.session_starts
        return step.t_s - before.t_s if follows and step.t_s >= before.t_s else None

    first = [Timed(step, None) for step in run.steps[:1]]
    whole = first + [Timed(step, span_s(before, step)) for before, step in pairwise(run.steps)]
    return list(compress(whole, run.counted(skip)))


def apart(run: RankRun, steps: Sequence[int]) -> set[int]:
    """Which of these steps the rank made apart."""
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
    """Who waited for whom in a run, without the first `skip` steps of each session, in which frameworks
    compile and caches fill."""
    ranks = tuple(run.ranks)
    rows: dict[int, dict[int, Timed]] = {}
    for index, rank in enumerate(ranks):
        record = run.ranks[rank]
        alone = apart(record, [step.step for step in record.steps])
        for each in timed(record, skip=skip):
            if each.step.step not in alone:
                rows.setdefault(each.step.step, {})[index] = each
    waited = [[0.0] * len(ranks) for _ in ranks]
    last, causes = [0] * len(ranks), [Causes()] * len(ranks)
    exchanges, spans = [], []
    for step, found in rows.items():
        size = run.size_at(step) or len(ranks)
        # Ranks that have left may have recorded it before it was undone. Who came last is known only of whole rows.
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
    """What the late rank did longer than the other one; in seconds, which are to be scaled."""
    longer = Causes(
        data=max(0.0, late.step.data_s - other.step.data_s),
        compute=max(0.0, late.step.compute_s - other.step.compute_s),
        rest=max(0.0, late.rest_s - other.rest_s) if None not in (late.span_s, other.span_s) else 0.0,
    )
    return longer if longer.whole else Causes(compute=1.0)


def _added(so_far: Causes, why: Causes, seconds: float) -> Causes:
    return Causes(*(a + seconds * b / why.whole for a, b in zip(so_far, why, strict=True)))


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def parts(run: RankRun, *, skip: int = 0) -> Mapping[str, float]:
    """What a rank's time went into, as parts of it: "data", "compute", "wait" (for others and the exchange), "rest"."""
    seen = [each for each in timed(run, skip=skip) if each.span_s]
    whole = sum(each.span_s or 0.0 for each in seen)
    if not whole:
        return {"data": 0.0, "compute": 0.0, "wait": 0.0, "rest": 0.0}
    merging = _merging_s(run, seen[0].step.step)
    rest = sum(each.rest_s for each in seen)
    sums = {
        "data": sum(each.step.data_s for each in seen),
        "compute": sum(each.step.compute_s for each in seen),
        "wait": sum(each.step.wait_s for each in seen) + min(merging, rest),
        "rest": max(0.0, rest - merging),
    }
    return {name: seconds / max(whole, sum(sums.values())) for name, seconds in sums.items()}


def waited_apart(run: RankRun, *, skip: int = 0) -> tuple[float, float]:
    """Of a rank's time in steps that it made apart, the part that went into merges within them, and into those that
    ended them, as at the end of an epoch."""
    chosen = apart(run, [step.step for step in run.steps])
    seen = [each for each in timed(run, skip=skip) if each.span_s and each.step.step in chosen]
    if not seen:
        return 0.0, 0.0
    within = sum(each.step.wait_s for each in seen)
    ends = _merging_s(run, seen[0].step.step)
    whole = sum(each.span_s or 0.0 for each in seen) + max(0.0, ends - sum(each.rest_s for each in seen))
    return within / whole, ends / whole


def _merging_s(run: RankRun, first: int) -> float:
    """Seconds of the merges that ended steps apart, from step `first` on."""
    return sum(took for step, took in run.merging_s.items() if step >= first)
