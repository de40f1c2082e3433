"""The content of `hvd-hetero report`: numbers from the trace of a run, and the advice that follows from them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

from hvd_hetero.cli.console import rate_text, seconds_text
from hvd_hetero.cli.error import CommandError, UsageError
from hvd_hetero.policy.rank_words import ranks_text
from hvd_hetero.policy.strategy import SYNCHRONOUS
from hvd_hetero.trace.reader import NewerFormatError, read
from hvd_hetero.trace.run import RankSummary, Run
from hvd_hetero.trace.waiting import Waiting, parts, waited_in_local_steps, waiting

SKIPPED_STEPS = 5  # steps at the start of a session that are left out by default: frameworks compile, caches fill
MOST_RANKS = 16  # up to so many ranks are listed one by one

# Fractions of the time: below them, advice does not mention waiting, the exchange, or loading of data.
WORTH_WAITING, WORTH_EXCHANGE, WORTH_DATA = 0.10, 0.15, 0.05
ONE_RANK = 0.6  # from this fraction of all waiting, advice names the one rank that was waited for
ONE_CAUSE = 0.5  # from this fraction of the waiting for that rank, advice names the one cause


@dataclass(frozen=True, kw_only=True)
class Report:
    """The report of one run.

    Attributes:
        run: the records of all ranks.
        skip: how many steps at the start of each session the numbers leave out.
        waits: who waited for whom in synchronous steps.
    """

    run: Run
    skip: int
    waits: Waiting

    @property
    def steps(self) -> int:
        """The number of steps of the rank that recorded the most, skipped ones included; of those that stayed."""
        return max((len(rank.steps) for rank in self.run.present.values()), default=0)

    @cached_property
    def synchronous_fraction(self) -> float:
        """The fraction of the steps that were synchronous and recorded by all ranks."""
        return self.waits.steps / max([1, *(len(rank.after(self.skip)) for rank in self.run.present.values())])

    @cached_property
    def summaries(self) -> tuple[RankSummary, ...]:
        """Speed, medians and history of shares of each rank, in the order of `run.ranks`."""
        return self.run.summaries(skip=self.skip)

    @cached_property
    def parts(self) -> dict[int, Mapping[str, float]]:
        """By rank: the fractions of its time that were "data", "compute", "wait" and "rest": see `waiting.parts`."""
        return {number: parts(rank, skip=self.skip) for number, rank in self.run.ranks.items()}

    @property
    def merges(self) -> int:
        """The number of merges of local steps, of the rank that recorded the most; of those that stayed."""
        return max((sum(event.kind == "merge" and "merge" in event.fields for event in rank.events)
                    for rank in self.run.present.values()), default=0)

    @property
    def plans_choose(self) -> bool:
        """Whether plans chose between synchronous and local steps, as with `strategy="auto"`.

        Otherwise, the strategy that they name says nothing: it is the default, also where all steps are local.
        """
        return any(plan.strategy != SYNCHRONOUS for plan in self.run.plans)

    def as_dict(self) -> dict[str, Any]:
        """All numbers and the advice, as a dict for JSON. The strategy of plans is None unless they chose one."""
        ranks = []
        for rank, summary in zip(self.run.ranks.values(), self.summaries, strict=True):
            numbers = {"rank": rank.rank, "host": rank.host, "parts": self.parts[rank.rank], **asdict(summary)}
            ranks.append({**numbers, "dropped": rank.dropped, "unreadable": rank.unreadable})
        plans = [asdict(plan) | ({} if self.plans_choose else {"strategy": None}) for plan in self.run.plans]
        waits = {**asdict(self.waits), "causes": [cause._asdict() for cause in self.waits.causes]}
        return {
            "folder": self.run.folder, "steps": self.steps, "skipped": self.skip, "merges": self.merges,
            "ranks": ranks, "waiting": waits, "plans": plans, "advice": advice(self),
        }


def read_run(folder: str, *, skip: int) -> Run:
    """Reads the run whose trace is in `folder`.

    Args:
        folder: the folder that `hvd.Balancer(run=...)` or `HVD_HETERO_RUN` named.
        skip: how many steps at the start of each session the caller leaves out.

    Raises:
        UsageError: `skip` is negative.
        CommandError: the folder has no readable trace, or no rank has a step beyond `skip`.
    """
    if skip < 0:
        raise UsageError(f"--skip: expected 0 or more. Received: {skip}.")
    try:
        run = read(folder)
    except NewerFormatError as error:
        raise CommandError(str(error)) from error
    except OSError as error:
        raise CommandError(f"{error}\n  What to do: name the folder that hvd.Balancer(run=...) or HVD_HETERO_RUN "
                           "named, of one job.") from error
    if not any(len(rank.after(skip)) for rank in run.ranks.values()):
        unreadable = sum(rank.unreadable for rank in run.ranks.values())
        also = f", and with {unreadable} lines that cannot be read" if unreadable else ""
        raise CommandError(f"expected a run of more than {skip} steps. Received: {folder}, of "
                           f"{max(len(rank.steps) for rank in run.ranks.values())}{also}.\n"
                           "  What to do: train for longer, or take --skip 0.")
    return run


def read_report(folder: str, *, skip: int) -> Report:
    """The report of the run whose trace is in `folder`. Raises CommandError as `read_run` does."""
    run = read_run(folder, skip=skip)
    return Report(run=run, skip=skip, waits=waiting(run, skip=skip))


# In words -------------------------------------------------------------------------------------------------------------


def percent_text(part: float) -> str:
    """A fraction as a percentage for people: 0.034 gives "3.4 %", 0.34 gives "34 %"."""
    return f"{100 * part:.0f} %" if part >= 0.0995 or part == 0 else f"{100 * part:.1f} %"


def shares_text(shares: Sequence[int]) -> str:
    """Shares for people: "37:16:5:6", or "5 to 37" for more than `MOST_RANKS` ranks."""
    return ":".join(map(str, shares)) if len(shares) <= MOST_RANKS else f"{min(shares)} to {max(shares)}"


def headline(report: Report) -> str:
    """The first line of the report: folder, ranks, steps, samples per second, and what is left out.

    The mean seconds of a step and the exchange's part of it are told if at least half of the steps were synchronous.
    """
    gone = report.run.gone
    summaries = [each for each in report.summaries if each.rank not in gone]
    samples_per_s = sum(summary.samples_per_s for summary in summaries)
    words = f"{report.run.folder}: {len(summaries)} rank{'s' * (len(summaries) != 1)}"
    if gone:
        words += f" (and {len(gone)} that left)"
    words += f", {report.steps} steps, {rate_text(samples_per_s)} samples/s"
    if report.synchronous_fraction >= 0.5:
        exchange = percent_text(report.waits.exchange_part)
        words += f"; {seconds_text(report.waits.step_s)} a step, of which the exchange {exchange}"
    if report.merges:
        words += f"; {report.merges} merges of local steps"
    sessions = " of each session" if any(rank.sessions > 1 for rank in report.run.ranks.values()) else ""
    return words + f". Without the first {report.skip} steps{sessions}." * bool(report.skip)


def advice(report: Report) -> list[str]:
    """What slows the run and what helps, one sentence each, the most important first; never empty."""
    waits, said = report.waits, []
    if mixed := [number for number, rank in report.run.ranks.items() if rank.mixed]:
        said.append(f"Several jobs, or balancers, have written the records of {ranks_text(mixed)} at a time, so no "
                    "number here is right: give each a folder of its own.")
    if waits.waited_part * report.synchronous_fraction >= WORTH_WAITING:
        said.append(_waiting_advice(waits, local=report.merges > 0))
    said += _local_step_advice(report)
    for number in report.run.present:
        data = report.parts[number]["data"]
        if data >= WORTH_DATA:
            said.append(f"Rank {number} waits for its data for {percent_text(data)} of its time: more num_workers (in "
                        "Keras, workers), or a quicker disk.")
    for number, rank in report.run.present.items():
        if rank.limited_by_loading:
            said.append(f"Rank {number} has as many samples as are loaded for it, one in "
                        f"{seconds_text(rank.loading_s)}: more num_workers there (in Keras, workers), or a quicker "
                        "disk, and it gets more.")
    if waits.exchange_part * report.synchronous_fraction >= WORTH_EXCHANGE:
        chosen = any(event.kind == "route" for rank in report.run.ranks.values() for event in rank.events)
        tries = "" if chosen else 'topology="auto" and hvd.Compression.auto try what is faster; '
        said.append(f"Exchanges take {percent_text(waits.exchange_part)} of a step once all ranks have come: {tries}"
                    "a larger global batch needs fewer of them, but changes what is learned.")
    said += _record_warnings(report)
    for rank in report.run.ranks.values():
        if rank.dropped or rank.unreadable:
            said.append(f"The record of rank {rank.rank} lacks {rank.dropped} lines that could not be written, and "
                        f"{rank.unreadable} that cannot be read.")
    return said or ["Nothing stands out: ranks hardly wait for each other, for data or for the exchange."]


def _local_step_advice(report: Report) -> list[str]:
    """Advice on ranks that wait although they make local steps: at merges, or at the end of local steps.

    Empty for a run that is mostly synchronous.
    """
    if not report.merges or report.synchronous_fraction >= 0.5:
        return []
    waited = {number: waited_in_local_steps(rank, skip=report.skip) for number, rank in report.run.present.items()}
    said = []
    number = max(waited, key=lambda each: waited[each][1])
    if (part := waited[number][1]) >= WORTH_WAITING:
        said.append(f"Rank {number} waits for {percent_text(part)} of its time at the end of local steps, as of an "
                    "epoch: it is through with its batches before the others are. See its max_share and quantum, and "
                    "whether the plan is adaptive.")
    number = max(waited, key=lambda each: waited[each][0])
    if (part := waited[number][0]) >= WORTH_WAITING:
        said.append(f"Rank {number} is at merges for {percent_text(part)} of its time, though steps are local: a "
                    "larger bound_rounds lets it go on without one, and with a larger round_steps there are fewer.")
    return said


def _record_warnings(report: Report) -> list[str]:
    """Warnings of missing records, of records that end early, and of ranks that changed their host."""
    run, said = report.run, []
    if run.missing:
        said.append(f"Plans are for {len(run.plans[-1].shares)} ranks, and there is no record of "
                    f"{ranks_text(run.missing)}: bring those of all hosts together, "
                    "each host's files into a folder of its name.")
    elif len(run.present) > 1 and not report.merges and report.waits.steps < 2:
        said.append("Too few steps were recorded by all ranks to tell who waits for whom.")
    last = max((rank.steps[-1].step for rank in run.present.values() if len(rank.steps)), default=0)
    for number, rank in run.present.items() if report.synchronous_fraction >= 0.5 or not report.merges else ():
        if len(rank.steps) and rank.steps[-1].step < last - rank.usual_batches:
            said.append(f"The record of rank {number} ends at step {rank.steps[-1].step} of {last}.")
    moved = {number: max(rank.hosts) for number, rank in run.present.items() if len(set(rank.hosts.values())) > 1}
    if moved:
        those = ranks_text(list(moved)).capitalize() if len(moved) <= MOST_RANKS else f"{len(moved)} ranks"
        said.append(f"{those} {'were' if len(moved) > 1 else 'was'} on other hosts before step {max(moved.values())}: "
                    "what is told of their speed and of who waited is of all of these. `hvd-hetero plan` takes the "
                    "last session.")
    return said


def _waiting_advice(waits: Waiting, *, local: bool) -> str:
    """Advice on waiting in synchronous steps: how much, for which rank, why, and what helps.

    Args:
        waits: who waited for whom; some waiting was recorded.
        local: whether the run already uses a local strategy, so that it need not be recommended.
    """
    total = sum(map(sum, waits.waited_s))
    index = max(range(len(waits.ranks)), key=waits.waited_for)
    words = f"Ranks wait for each other for {percent_text(waits.waited_part)} of the time"
    if waits.waited_for(index) < ONE_RANK * total:
        words += ", for one rank now and for another then"
        return f"{words}." if local else f'{words}: where each rank\'s steps vary, strategy="local" waits for nobody.'
    causes = waits.causes[index]
    name, seconds = max(causes._asdict().items(), key=lambda each: each[1])
    words += f", {percent_text(waits.waited_for(index) / total)} of that for rank {waits.ranks[index]}"
    if seconds < ONE_CAUSE * causes.whole:
        return words + "."
    help_with = {
        "data": ", whose data comes late: more num_workers there (in Keras, workers), or a quicker disk.",
        "compute": ", which computes for longer: see its max_share and quantum, whether the plan is adaptive, and "
                   "whether its speed varies (`hvd-hetero plan` says what other shares would make).",
        "rest": ", for what it does beside training (validation, saving, printing): share that out, or do it more "
                "rarely.",
    }
    return words + help_with[name]
