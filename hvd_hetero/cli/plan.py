"""`hvd-hetero plan`: predicts a job's throughput with other shares, fewer ranks, or local steps.

The speeds of the ranks come from the trace of a short run, or from samples per second given on the command line. The
predictions answer the questions before a long run, or before buying hardware: how much faster are uneven shares than
equal ones, does the slowest rank help or hold up the others, how much faster are local steps?
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from hvd_hetero.cli.console import (
    TO_STDOUT,
    add_json_option,
    rate_text,
    rich_console,
    seconds_text,
    table,
    write_or_show,
)
from hvd_hetero.cli.error import UsageError
from hvd_hetero.cli.rank_estimates import RankEstimates, estimates_from_run, estimates_from_speeds
from hvd_hetero.cli.report_content import SKIPPED_STEPS, read_run, shares_text
from hvd_hetero.optimizers.agreement import MOST
from hvd_hetero.policy.forecast import Forecast, advice, forecasts
from hvd_hetero.policy.local_round import ROUND_STEPS
from hvd_hetero.policy.partition import Bound, InfeasibleError
from hvd_hetero.policy.rank_words import ranks_text
from hvd_hetero.trace.run import Run


def show(estimates: RankEstimates, found: Sequence[Forecast], run: Run | None) -> None:
    """Prints the measured step, the table of forecasts, and the advice which ranks to keep.

    Args:
        estimates: what is known of the ranks.
        found: the forecasts; speeds are shown relative to the first one.
        run: the run that `estimates` comes from, or None.
    """
    console = rich_console()
    if run is not None and run.gone:
        console.print(f"Not counted, as they have left the job: {ranks_text(run.gone)}.", soft_wrap=True)
    if run is not None and estimates.step_s is not None:
        words = f"{run.folder}: {seconds_text(estimates.step_s)} a step with shares {shares_text(estimates.shares)}, "
        words += f"of which {seconds_text(estimates.exchange_s)} beside computing."
        console.print(words, markup=False, soft_wrap=True)
    rows = [[each.title, shares_text(each.shares), "–" if each.step_s is None else seconds_text(each.step_s),
             rate_text(each.samples_per_s), f"{each.samples_per_s / found[0].samples_per_s:.2f}"] for each in found]
    columns = ["predicted", "shares", "step", "samples/s", "times the first"]
    console.print(table("What the hardware would make", columns, rows, left=["predicted", "shares"]))
    console.print(advice(found), markup=False, soft_wrap=True)


def as_dict(estimates: RankEstimates, found: Sequence[Forecast]) -> dict[str, Any]:
    """The ranks' speeds, the measured step, the forecasts and the advice, as a dict for JSON."""
    ways = [{"title": each.title, "shares": each.shares, "step_s": each.step_s, "samples_per_s": each.samples_per_s,
             "without": each.without} for each in found]
    speeds = [{"rank": rank, "overhead_s": model.overhead_s, "seconds_per_sample": model.seconds_per_sample,
               "loading_s": model.loading_s, "variation": jitter.variation}
              for rank, model, jitter in zip(estimates.ranks, estimates.models, estimates.jitters, strict=True)]
    return {"ranks": speeds, "shares": estimates.shares, "step_s": estimates.step_s, "exchange_s": estimates.exchange_s,
            "forecasts": ways, "advice": advice(found)}


def _bounds(words: Sequence[str], bounds: Sequence[Bound]) -> list[Bound]:
    """The bounds of the ranks' shares, after each "RANK:SAMPLES" in `words` (`--max-share`) has set an upper bound.

    A lower bound above SAMPLES is lowered to it.

    Raises:
        UsageError: a word has another form, SAMPLES is 0, or the job has no such rank.
    """
    found = list(bounds)
    for word in words:
        rank, _, samples = word.partition(":")
        if not (rank.isdecimal() and samples.isdecimal() and int(rank) < len(found) and int(samples) > 0):
            raise UsageError(f"--max-share: expected RANK:SAMPLES, of ranks 0 to {len(found) - 1}. Received: {word}.")
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
    add_json_option(parser)
    parser.add_argument("--skip", type=int, metavar="N",
                        help="leave out the first N steps of each of the run's sessions, in which frameworks compile "
                             f"(default: {SKIPPED_STEPS})")


def command(arguments: argparse.Namespace) -> int:
    """Prints the forecasts, or writes them as JSON. Returns the exit code 0.

    Raises:
        UsageError: options are missing, out of range or do not go together, or no shares are within the bounds.
        CommandError: the run cannot be read, or has too few steps.
    """
    if (arguments.run is None) == (arguments.speeds is None):
        received = "neither" if arguments.run is None else "both"
        if arguments.run is None and arguments.json not in (None, TO_STDOUT):
            received = f"{arguments.json} as the file of --json, which comes last in the line"
        raise UsageError(f"expected the folder of a run, or --speeds. Received: {received}.")
    if arguments.run is None and arguments.global_batch_size is None:
        raise UsageError("--speeds: expected --global-batch-size N with it. Received: none.")
    if arguments.run is None and arguments.skip is not None:
        raise UsageError(f"--skip: expected with a run alone, whose steps it leaves out. Received: {arguments.skip}.")
    if arguments.run is not None and arguments.exchange_ms is not None:
        raise UsageError("--exchange-ms: expected with --speeds alone; a run tells by itself. Received: "
                         f"{arguments.exchange_ms:g}.")
    if arguments.run is not None:
        skip = SKIPPED_STEPS if arguments.skip is None else arguments.skip
        run = read_run(arguments.run, skip=skip)
        estimates = estimates_from_run(run, skip=skip)
    else:
        run, estimates = None, estimates_from_speeds(arguments.speeds, exchange_ms=arguments.exchange_ms or 0.0)
    whole = arguments.global_batch_size if arguments.global_batch_size is not None else sum(estimates.shares)
    if not 1 <= whole <= MOST:
        raise UsageError(f"--global-batch-size: expected a number from 1 to {MOST}. Received: {whole}.")
    if arguments.round_steps < 1:
        raise UsageError(f"--round-steps: expected 1 or more. Received: {arguments.round_steps}.")
    bounds = _bounds(arguments.max_share, estimates.bounds)
    try:
        found = forecasts(estimates.models, whole, bounds=bounds, jitters=estimates.jitters,
                          exchange_s=estimates.exchange_s, round_steps=arguments.round_steps,
                          micro_batch=estimates.micro_batch)
    except InfeasibleError as error:
        raise UsageError(f"{error}\n  What to do: another --global-batch-size or --max-share.") from error
    write_or_show(as_dict(estimates, found), arguments.json, show=lambda: show(estimates, found, run))
    return 0
