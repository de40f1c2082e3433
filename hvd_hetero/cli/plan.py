"""`hvd-hetero plan`: predicts a job's throughput with other shares, fewer ranks, or local steps.

The speeds of the ranks come from the trace of a short run, or from samples per second given on the command line. The
predictions answer the questions before a long run, or before buying hardware: how much faster are uneven shares than
equal ones, does the slowest rank help or hold up the others, how much faster are local steps?
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from hvd_hetero.cli.console import TO_STDOUT, rate_text, rich_console, seconds_text, table, write
from hvd_hetero.cli.error import CommandError, UsageError
from hvd_hetero.cli.report_content import SKIP, run_in, shares_text
from hvd_hetero.optimizers.agreement import MOST
from hvd_hetero.policy.forecast import Forecast, advice, forecasts
from hvd_hetero.policy.jitter import Jitter, synchronous_step_s
from hvd_hetero.policy.local_round import ROUND_STEPS
from hvd_hetero.policy.partition import Bound, InfeasibleError
from hvd_hetero.policy.speed import Observation, SpeedModel, fit, passes_of
from hvd_hetero.trace.entry import bound_in
from hvd_hetero.trace.record import file_name
from hvd_hetero.trace.run import RankRun, Run
from hvd_hetero.trace.waiting import Timed, local_steps_of, timed

NEWEST = 256  # a rank's speed is fitted to so many of its newest steps, because the speed of a machine drifts
LEAST = 5  # with fewer steps, a rank's speed, or the time of a step with given shares, counts as unknown
USUAL_VARIATION = 0.03  # relative standard deviation of a rank's compute time, assumed where only speeds are given


@dataclass(frozen=True, kw_only=True)
class Seen:
    """What is known of a job's ranks: the input of the predictions.

    Every tuple has one entry per rank, in ascending order of rank.

    Attributes:
        ranks: the rank numbers.
        models: the speed model of each rank.
        jitters: how much the compute time of each rank varies from step to step.
        shares: the newest shares with measured synchronous steps, or the newest ones if there are none; empty if
            speeds were given instead of a run.
        step_s: measured seconds of a synchronous step with these shares; None if there is no such measurement.
        exchange_s: the part of a step that is not computing, in seconds: the exchange of gradients.
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
    if not said:  # traces of older versions have no such event
        return Bound(lower=1), None
    return bound_in(said[-1]), said[-1]["micro_batch"]


def speed_of(rank: RankRun, *, skip: int) -> tuple[SpeedModel, Jitter]:
    """The speed model of a rank, and how much its compute time varies around the model.

    Both are fitted to the newest steps with samples. Steps of earlier sessions count only if the last session has
    fewer than `LEAST` of them.

    Args:
        rank: the record of the rank.
        skip: how many steps to leave out at the start of each session.

    Raises:
        CommandError: the rank has fewer than `LEAST` steps with samples.
    """
    _, cap = limits_of(rank)
    begin = max(rank.session_starts, default=0)  # in an earlier session, another host may have had this rank number
    counted = [step for step in rank.after(skip) if step.samples > 0 and step.compute_s > 0]
    newest = [step for step in counted if step.step >= begin]
    seen = [Observation(samples=step.samples, compute_s=step.compute_s + step.extra_s,
                        passes=passes_of(step.samples, cap))
            for step in (newest if len(newest) >= LEAST else counted)]
    if len(seen) < LEAST:
        raise CommandError(f"expected {LEAST} steps of rank {rank.rank} with samples, or more. Received: {len(seen)}.\n"
                           "  What to do: train for longer, or take a smaller --skip.")
    older = seen[:-NEWEST]  # the prior is fitted to the other steps alone, so that no measurement counts twice
    model = fit(seen[-NEWEST:], prior=fit(older) if older else None)
    ratios = sorted(model.ratio(one) for one in seen[-NEWEST:])
    tenth = len(ratios) // 10  # left out at both ends: stalls, and a slow first step, are not noise
    kept = ratios[tenth : len(ratios) - tenth]
    jitter = Jitter(variation=statistics.pstdev(kept) / statistics.fmean(kept))
    return replace(model, loading_s=rank.loading_s), jitter


def seen_in(run: Run, *, skip: int) -> Seen:
    """The speeds, limits and step time of a run's ranks, from its trace.

    `exchange_s` is the measured time of a synchronous step minus its predicted compute time, at least 0.

    Args:
        run: the run; ranks that left the job before its end are not counted.
        skip: how many steps to leave out at the start of each session.

    Raises:
        CommandError: the record of a rank is missing, or has too few steps.
    """
    if run.missing:
        names = ", ".join(map(file_name, run.missing))
        raise CommandError(f"expected the records of all {len(run.plans[-1].shares)} ranks. Received none of "
                           f"{', '.join(map(str, run.missing))}.\n  What to do: bring {names} into {run.folder}.")
    ranks = list(run.present.values())
    models, jitters = zip(*(speed_of(rank, skip=skip) for rank in ranks), strict=True)
    bounds, micro_batch = zip(*map(limits_of, ranks), strict=True)
    shares, step_s = _measured(run, ranks, skip=skip)
    exchange_s = 0.0
    if step_s is not None:
        some = [i for i, share in enumerate(shares) if share]
        times = [models[i].time_s(shares[i], micro_batch[i]) for i in some]
        exchange_s = max(0.0, step_s - synchronous_step_s(times, [jitters[i] for i in some]))
    return Seen(ranks=tuple(rank.rank for rank in ranks), models=models, jitters=jitters, shares=shares, step_s=step_s,
                exchange_s=exchange_s, bounds=bounds, micro_batch=micro_batch)


def told(speeds: str, *, exchange_ms: float) -> Seen:
    """Ranks whose speeds are given on the command line, without a run.

    Args:
        speeds: samples per second of each rank, such as "800,800,320".
        exchange_ms: what the exchange of gradients adds to a step, in milliseconds.

    Raises:
        CommandError: `speeds` are not numbers above 0, or `exchange_ms` is negative or not finite.
    """
    try:
        rates = [float(word) for word in speeds.split(",")]
        models = tuple(SpeedModel(overhead_s=0.0, seconds_per_sample=1.0 / rate) for rate in rates)
    except (ValueError, ZeroDivisionError) as error:
        raise CommandError("--speeds: expected samples per second of each rank, above 0, as in 800,800,320. Received: "
                           f"{speeds}.") from error
    if not (math.isfinite(exchange_ms) and exchange_ms >= 0.0):
        raise CommandError(f"--exchange-ms: expected 0 or more. Received: {exchange_ms}.")
    return Seen(ranks=tuple(range(len(models))), models=models, shares=(), step_s=None, exchange_s=1e-3 * exchange_ms,
                jitters=(Jitter(variation=USUAL_VARIATION),) * len(models), bounds=(Bound(lower=1),) * len(models),
                micro_batch=(None,) * len(models))


def _measured(run: Run, ranks: Sequence[RankRun], *, skip: int) -> tuple[tuple[int, ...], float | None]:
    """The shares of the newest plan whose synchronous steps were measured, and the seconds of one of these steps.

    A plan counts if some rank recorded at least `LEAST` synchronous steps with its shares. The seconds are the mean,
    over such ranks, of a rank's median. If no plan counts: the shares of the newest plan, and None.
    """
    newest = tuple(rank.steps[-1].share for rank in ranks)
    plans = [(plan.step, plan.shares) for plan in run.plans if len(plan.shares) == len(ranks)] or [(0, newest)]
    made = [_synchronous(rank, skip=skip) for rank in ranks]
    end: float = math.inf  # the step from which the following plan holds
    for begin, shares in reversed(plans):
        found = [
            [each.span_s or 0.0 for each in steps if begin <= each.step.step < end and each.step.share == share]
            for steps, share in zip(made, shares, strict=True)
        ]
        if any(len(spans) >= LEAST for spans in found):
            return shares, statistics.fmean(statistics.median(spans) for spans in found if len(spans) >= LEAST)
        end = begin
    return plans[-1][1], None


def _synchronous(rank: RankRun, *, skip: int) -> list[Timed]:
    """The synchronous steps of known duration among the `NEWEST` newest steps of a rank."""
    alone = local_steps_of(rank, [step.step for step in rank.steps])
    return [each for each in timed(rank, skip=skip)[-NEWEST:] if each.span_s and each.step.step not in alone]


def show(seen: Seen, found: Sequence[Forecast], run: Run | None) -> None:
    """Prints the measured step, the table of forecasts, and the advice which ranks to keep.

    Args:
        seen: what is known of the ranks.
        found: the forecasts; speeds are shown relative to the first one.
        run: the run that `seen` comes from, or None.
    """
    console, make = rich_console()
    if run is not None and run.gone:
        console.print(f"Not counted, as they have left the job: ranks {', '.join(map(str, run.gone))}.", soft_wrap=True)
    if run is not None and seen.step_s is not None:
        words = f"{run.folder}: {seconds_text(seen.step_s)} a step with shares {shares_text(seen.shares)}, of which "
        console.print(f"{words}{seconds_text(seen.exchange_s)} beside computing.", markup=False, soft_wrap=True)
    rows = [[each.title, shares_text(each.shares), "–" if each.step_s is None else seconds_text(each.step_s),
             rate_text(each.samples_per_s), f"{each.samples_per_s / found[0].samples_per_s:.2f}"] for each in found]
    columns = ["predicted", "shares", "step", "samples/s", "times the first"]
    console.print(table(make, "What the hardware would make", columns, rows, left=["predicted", "shares"]))
    console.print(advice(found), markup=False, soft_wrap=True)


def as_dict(seen: Seen, found: Sequence[Forecast]) -> dict[str, Any]:
    """The ranks' speeds, the measured step, the forecasts and the advice, as a dict for JSON."""
    ways = [{"title": each.title, "shares": each.shares, "step_s": each.step_s, "samples_per_s": each.samples_per_s,
             "without": each.without} for each in found]
    speeds = [{"rank": rank, "overhead_s": model.overhead_s, "seconds_per_sample": model.seconds_per_sample,
               "loading_s": model.loading_s, "variation": jitter.variation}
              for rank, model, jitter in zip(seen.ranks, seen.models, seen.jitters, strict=True)]
    return {"ranks": speeds, "shares": seen.shares, "step_s": seen.step_s, "exchange_s": seen.exchange_s,
            "forecasts": ways, "advice": advice(found)}


def _bounds(words: Sequence[str], bounds: Sequence[Bound]) -> list[Bound]:
    """The bounds of the ranks' shares, after each "RANK:SAMPLES" in `words` (`--max-share`) has set an upper bound.

    A lower bound above SAMPLES is lowered to it.

    Raises:
        CommandError: a word has another form, SAMPLES is 0, or the job has no such rank.
    """
    found = list(bounds)
    for word in words:
        rank, _, samples = word.partition(":")
        if not (rank.isdecimal() and samples.isdecimal() and int(rank) < len(found) and int(samples) > 0):
            raise CommandError(f"--max-share: expected RANK:SAMPLES, of ranks 0 to {len(found) - 1}. Received: {word}.")
        bound, most = found[int(rank)], int(samples)
        found[int(rank)] = replace(bound, lower=min(bound.lower, most), upper=most)
    return found


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the command's options."""
    parser.add_argument("run", nargs="?", help="the folder with a run's trace: of hvd.Balancer(run=...) or "
                                               "HVD_HETERO_RUN; a hundred steps do")
    parser.add_argument("--speeds", metavar="A,B,...", help="without a run: samples per second of each rank by itself")
    parser.add_argument("--exchange-ms", type=float, metavar="MS",
                        help="with --speeds: what the exchange of gradients adds to a step (default: 0)")
    parser.add_argument("--global-batch-size", type=int, metavar="N", help="of the job (default: the run's)")
    parser.add_argument("--round-steps", type=int, default=ROUND_STEPS, metavar="N",
                        help="of the fastest rank between two merges, where ranks make local steps (default: "
                             "%(default)s, as of hvd.LocalSGD)")
    parser.add_argument("--max-share", action="append", default=[], metavar="RANK:N",
                        help="the most samples that this rank's memory holds (default: the run's max_share); may be "
                             "given for several ranks")
    parser.add_argument("--json", nargs="?", const=TO_STDOUT, metavar="FILE",
                        help="write it as JSON to FILE, or to the output instead of the table")
    parser.add_argument("--skip", type=int, metavar="N",
                        help="leave out the first N steps of each of the run's sessions, in which frameworks compile "
                             f"(default: {SKIP})")


def command(arguments: argparse.Namespace) -> int:
    """Prints the forecasts, or writes them as JSON. Returns the exit code 0.

    Raises:
        UsageError: options are missing, or do not go together.
        CommandError: a value is out of range, the run cannot be read, or no shares are within the bounds.
    """
    if (arguments.run is None) == (arguments.speeds is None):
        raise UsageError("expected the folder of a run, or --speeds. Received: "
                         f"{'neither' if arguments.run is None else 'both'}.")
    if arguments.run is None and arguments.global_batch_size is None:
        raise UsageError("--speeds: expected --global-batch-size N with it. Received: none.")
    if arguments.run is None and arguments.skip is not None:
        raise UsageError(f"--skip: expected with a run alone, whose steps it leaves out. Received: {arguments.skip}.")
    if arguments.run is not None and arguments.exchange_ms is not None:
        raise UsageError("--exchange-ms: expected with --speeds alone; a run tells by itself. Received: "
                         f"{arguments.exchange_ms:g}.")
    if arguments.run is not None:
        skip = SKIP if arguments.skip is None else arguments.skip
        run = run_in(arguments.run, skip=skip)
        seen = seen_in(run, skip=skip)
    else:
        run, seen = None, told(arguments.speeds, exchange_ms=arguments.exchange_ms or 0.0)
    whole = arguments.global_batch_size if arguments.global_batch_size is not None else sum(seen.shares)
    if not 1 <= whole <= MOST:
        raise CommandError(f"--global-batch-size: expected a number from 1 to {MOST}. Received: {whole}.")
    if arguments.round_steps < 1:
        raise CommandError(f"--round-steps: expected 1 or more. Received: {arguments.round_steps}.")
    try:
        found = forecasts(seen.models, whole, bounds=_bounds(arguments.max_share, seen.bounds), jitters=seen.jitters,
                          exchange_s=seen.exchange_s, round_steps=arguments.round_steps, micro_batch=seen.micro_batch)
    except InfeasibleError as error:
        raise CommandError(f"{error}\n  What to do: another --global-batch-size or --max-share.") from error
    write(as_dict(seen, found), arguments.json, otherwise=lambda: show(seen, found, run))
    return 0
