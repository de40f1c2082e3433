"""What is known of the speed of a job's ranks: from the trace of a run, or from numbers on the command line.

`hvd-hetero plan` predicts from it.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

from hvd_hetero.cli.error import CommandError, UsageError
from hvd_hetero.policy.jitter import Jitter, synchronous_step_s
from hvd_hetero.policy.partition import Bound
from hvd_hetero.policy.rank_words import ranks_text
from hvd_hetero.policy.speed import Observation, SpeedModel, fit, passes_of
from hvd_hetero.trace.entry import bound_in
from hvd_hetero.trace.record import file_name
from hvd_hetero.trace.run import RankRun, Run
from hvd_hetero.trace.waiting import Timed, local_steps_of

FITTED_STEPS = 256  # a rank's speed is fitted to so many of its newest steps, because the speed of a machine drifts
LEAST_STEPS = 5  # with fewer steps, a rank's speed, or the time of a step with given shares, counts as unknown
LONGEST_EXCHANGE_MS = 1e9  # twelve days
LEAST_RATE, LARGEST_RATE = 1e-9, 1e12  # samples per second of a rank that are plausible
USUAL_VARIATION = 0.03  # relative standard deviation of a rank's compute time, assumed where only speeds are given


@dataclass(frozen=True, kw_only=True)
class RankEstimates:
    """What is known of a job's ranks: the input of the predictions.

    Every tuple has one entry per rank, in ascending order of rank.

    Attributes:
        ranks: the rank numbers.
        models: the speed model of each rank.
        jitters: how much the compute time of each rank varies from step to step.
        shares: the newest shares with measured synchronous steps, or the newest ones if there are none; empty if
            speeds were given instead of a run.
        step_s: measured seconds of a synchronous step with these shares, for one global batch where it has several;
            None if there is no such measurement.
        exchange_s: the part of these seconds that is not computing: the exchange of gradients.
        bounds: the limits of each rank's share.
        micro_batch: the most samples that a rank puts through one forward and backward pass; None: no limit.
    """

    ranks: tuple[int, ...]
    models: tuple[SpeedModel, ...]
    jitters: tuple[Jitter, ...]
    shares: tuple[int, ...]
    step_s: float | None
    exchange_s: float
    bounds: tuple[Bound, ...]
    micro_batch: tuple[int | None, ...]


def limits_of(rank: RankRun) -> tuple[Bound, int | None]:
    """The limits of a rank's share, and its most samples per forward and backward pass (None: no limit).

    Both are those that the rank's `Balancer` recorded last.
    """
    said = [event.fields for event in rank.events if event.kind == "limits"]
    if not said:
        return Bound(lower=1), None
    return bound_in(said[-1]), said[-1]["micro_batch"]


def speed_of(rank: RankRun, *, skip: int) -> tuple[SpeedModel, Jitter]:
    """The speed model of a rank, and how much its compute time varies around the model.

    Both are fitted to the newest steps with samples. Steps of earlier sessions count only if the last session has
    fewer than `LEAST_STEPS` of them.

    Args:
        rank: the record of the rank.
        skip: how many steps to leave out at the start of each session.

    Raises:
        CommandError: the rank has fewer than `LEAST_STEPS` steps with samples.
    """
    _, cap = limits_of(rank)
    begin = max(rank.session_starts, default=0)  # in an earlier session, another host may have had this rank number
    counted = rank.counted(skip) & (rank.steps.samples > 0) & (rank.steps.compute_s > 0.0)
    newest = counted & (rank.steps.step >= begin)
    chosen = newest if newest.sum() >= LEAST_STEPS else counted
    steps = rank.steps[chosen]
    seen = [Observation(samples=samples, compute_s=compute_s, passes=batches * passes_of(-(-samples // batches), cap))
            for samples, compute_s, batches in zip(steps.samples.tolist(), (steps.compute_s + steps.extra_s).tolist(),
                                                   rank.batches[chosen].tolist(), strict=True)]
    if len(seen) < LEAST_STEPS:
        raise CommandError(f"expected {LEAST_STEPS} steps of rank {rank.rank} with samples, or more. Received: "
                           f"{len(seen)}.\n  What to do: train for longer, or take a smaller --skip.")
    older = seen[:-FITTED_STEPS]  # the prior is fitted to the other steps alone, so that no measurement counts twice
    model = fit(seen[-FITTED_STEPS:], prior=fit(older) if older else None)
    ratios = sorted(model.ratio(one) for one in seen[-FITTED_STEPS:])
    tenth = len(ratios) // 10  # left out at both ends: stalls, and a slow first step, are not noise
    kept = ratios[tenth : len(ratios) - tenth]
    jitter = Jitter(variation=statistics.pstdev(kept) / statistics.fmean(kept))
    return replace(model, loading_s=rank.loading_s), jitter


def estimates_from_run(run: Run, *, skip: int) -> RankEstimates:
    """The speeds, limits and step time of a run's ranks, from its trace.

    `exchange_s` is the measured time of a synchronous step minus its predicted compute time, at least 0.

    Args:
        run: the run; ranks that left the job before its end are not counted.
        skip: how many steps to leave out at the start of each session.

    Raises:
        CommandError: the record of a rank is missing, or has too few steps.
    """
    size = len(run.plans[-1].shares) if run.plans else 1 + max(run.ranks)
    if missing := [rank for rank in range(size) if rank not in run.ranks or not len(run.ranks[rank].steps)]:
        names = ", ".join(map(file_name, missing))
        raise CommandError(f"expected the records of all {size} ranks. Received none of "
                           f"{ranks_text(missing)}.\n  What to do: bring {names} into {run.folder}.")
    ranks = list(run.present.values())
    models, jitters = zip(*(speed_of(rank, skip=skip) for rank in ranks), strict=True)
    bounds, micro_batch = zip(*map(limits_of, ranks), strict=True)
    shares, step_s = _measured(run, ranks, skip=skip)
    exchange_s = 0.0
    if step_s is not None and any(shares):
        some = [i for i, share in enumerate(shares) if share]
        times = [models[i].time_s(shares[i], micro_batch[i]) for i in some]
        exchange_s = max(0.0, step_s - synchronous_step_s(times, [jitters[i] for i in some]))
    return RankEstimates(ranks=tuple(rank.rank for rank in ranks), models=models, jitters=jitters, shares=shares,
                         step_s=step_s, exchange_s=exchange_s, bounds=bounds, micro_batch=micro_batch)


def estimates_from_speeds(speeds: str, *, exchange_ms: float) -> RankEstimates:
    """Ranks whose speeds are given on the command line, without a run.

    Args:
        speeds: samples per second of each rank, such as "800,800,320".
        exchange_ms: what the exchange of gradients adds to a step, in milliseconds.

    Raises:
        UsageError: `speeds` are not numbers from `LEAST_RATE` to `LARGEST_RATE`, or `exchange_ms` is negative, too
            large or not a number.
    """
    try:
        rates = [float(word) for word in speeds.split(",")]
    except ValueError:
        rates = []
    if not rates or not all(LEAST_RATE <= rate <= LARGEST_RATE for rate in rates):
        raise UsageError(f"--speeds: expected samples per second of each rank, from {LEAST_RATE:g} to "
                         f"{LARGEST_RATE:g}, as in 800,800,320. Received: {speeds}.")
    models = tuple(SpeedModel(overhead_s=0.0, seconds_per_sample=1.0 / rate) for rate in rates)
    if not 0.0 <= exchange_ms <= LONGEST_EXCHANGE_MS:
        raise UsageError(f"--exchange-ms: expected 0 to {LONGEST_EXCHANGE_MS:g}. Received: {exchange_ms:g}.")
    count = len(models)
    return RankEstimates(ranks=tuple(range(count)), models=models, jitters=(Jitter(variation=USUAL_VARIATION),) * count,
                         shares=(), step_s=None, exchange_s=1e-3 * exchange_ms, bounds=(Bound(lower=1),) * count,
                         micro_batch=(None,) * count)


def _measured(run: Run, ranks: Sequence[RankRun], *, skip: int) -> tuple[tuple[int, ...], float | None]:
    """The shares of the newest plan whose synchronous steps were measured, and their seconds for one global batch.

    A plan counts if some rank recorded at least `LEAST_STEPS` synchronous steps with its shares. The seconds are the
    mean, over such ranks, of a rank's median. If no plan counts: the shares of the newest plan, and None.
    """
    newest = tuple(int(rank.steps[-1].share) for rank in ranks)
    plans = [(plan.step, plan.shares) for plan in run.plans if len(plan.shares) == len(ranks)] or [(0, newest)]
    made = [_synchronous(rank, skip=skip) for rank in ranks]
    end: float = math.inf  # the step from which the following plan holds
    for begin, shares in reversed(plans):
        found = [
            spans_s[(begin <= steps.step) & (steps.step < end) & (steps.share == share)].tolist()
            for (steps, spans_s), share in zip(made, shares, strict=True)
        ]
        if any(len(spans) >= LEAST_STEPS for spans in found):
            return shares, statistics.fmean(statistics.median(spans) for spans in found if len(spans) >= LEAST_STEPS)
        end = begin
    return plans[-1][1], None


def _synchronous(rank: RankRun, *, skip: int) -> Timed:
    """The synchronous steps of known duration among the `FITTED_STEPS` newest steps of a rank, with the seconds that
    each took for one global batch."""
    seen = Timed(rank.steps, rank.spans_s / rank.batches).where(rank.counted(skip))
    newest = Timed(seen.steps[-FITTED_STEPS:], seen.span_s[-FITTED_STEPS:])
    return newest.where((newest.span_s > 0.0) & ~local_steps_of(rank, newest.steps.step))
