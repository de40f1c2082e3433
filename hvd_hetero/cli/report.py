"""`hvd-hetero report`: who waited for whom in a run, and why; out of its trace."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hvd_hetero.cli.console import rich_console, seconds_text, table
from hvd_hetero.cli.error import CommandError
from hvd_hetero.policy.strategy import SYNCHRONOUS
from hvd_hetero.trace.reader import NewerFormatError, Run, read
from hvd_hetero.trace.waiting import Waiting, parts, waiting

SKIP = 5  # steps in which frameworks compile, and caches fill
MOST_RANKS = 16  # in the table of who waited for whom; of more, those that were waited for longest
MOST_PLANS = 12
TO_STDOUT = "-"

# Parts of the time from which on something is worth a word.
WORTH_WAITING, WORTH_EXCHANGE, WORTH_DATA = 0.10, 0.15, 0.05
ONE_RANK = 0.6  # of all waiting was for one rank
ONE_CAUSE = 0.5  # of the waiting for it has one cause


@dataclass(frozen=True, kw_only=True)
class Report:
    """What there is to say of a run."""

    run: Run
    skip: int
    waits: Waiting

    @property
    def steps(self) -> int:
        """The most that a rank recorded."""
        return max(len(rank.steps) for rank in self.run.ranks.values())

    @property
    def together(self) -> float:
        """The part of the steps that were synchronous."""
        return self.waits.steps / max(1, self.steps - self.skip)

    @property
    def merges(self) -> int:
        """How often ranks merged that made steps apart."""
        return max(sum(event.kind == "merge" and "merge" in event.fields for event in rank.events)
                   for rank in self.run.ranks.values())

    def as_dict(self) -> dict[str, Any]:
        """Everything, as JSON takes it."""
        ranks = []
        for rank, summary in zip(self.run.ranks.values(), self.run.summaries(skip=self.skip), strict=True):
            numbers = {"rank": rank.rank, "host": rank.host, "parts": parts(rank, skip=self.skip), **asdict(summary)}
            ranks.append({**numbers, "dropped": rank.dropped, "unreadable": rank.unreadable})
        waits = {**asdict(self.waits), "causes": [cause._asdict() for cause in self.waits.causes]}
        return {
            "folder": self.run.folder, "steps": self.steps, "skipped": self.skip, "merges": self.merges,
            "ranks": ranks, "waiting": waits, "plans": [asdict(plan) for plan in self.run.plans],
            "advice": advice(self),
        }


def report_of(folder: str, *, skip: int = SKIP) -> Report:
    """The report of the run in `folder`. Raises CommandError where there is none that can be read."""
    try:
        run = read(folder)
    except (FileNotFoundError, NewerFormatError) as error:
        raise CommandError(f"{error}\n  What to do: name the folder that hvd.Balancer(run=...) or HVD_HETERO_RUN "
                           "named, of one job.") from error
    if not any(rank.steps[skip:] for rank in run.ranks.values()):
        raise CommandError(f"expected a run of more than {skip} steps. Received: {folder}, of "
                           f"{max(len(rank.steps) for rank in run.ranks.values())}.\n"
                           "  What to do: train for longer, or take --skip 0.")
    return Report(run=run, skip=skip, waits=waiting(run, skip=skip))


# In words -------------------------------------------------------------------------------------------------------------


def percent(part: float) -> str:
    """A part of a whole for people."""
    return f"{100 * part:.0f} %" if part >= 0.0995 or part == 0 else f"{100 * part:.1f} %"


def shares_text(shares: Sequence[int]) -> str:
    """Shares for people; of many ranks the least and the most."""
    return ":".join(map(str, shares)) if len(shares) <= MOST_RANKS else f"{min(shares)} to {max(shares)}"


def headline(report: Report) -> str:
    """What run this is."""
    summaries = report.run.summaries(skip=report.skip)
    samples_per_s = sum(summary.samples_per_s for summary in summaries)
    words = f"{report.run.folder}: {len(summaries)} ranks, {report.steps} steps, {samples_per_s:,.4g} samples/s"
    if report.together >= 0.5:
        exchange = percent(report.waits.exchange_part)
        words += f"; {seconds_text(report.waits.step_s)} a step, of which the exchange {exchange}"
    if report.merges:
        words += f"; {report.merges} merges of steps apart"
    return words + f". Without the first {report.skip} steps." * bool(report.skip)


def advice(report: Report) -> list[str]:
    """What to look at, most important first."""
    waits, said = report.waits, []
    if waits.waited_part * report.together >= WORTH_WAITING:
        said.append(_of_waiting(waits))
    for rank in report.run.ranks.values():
        data = parts(rank, skip=report.skip)["data"]
        if data >= WORTH_DATA:
            said.append(f"Rank {rank.rank} waits for its data for {percent(data)} of its time: more num_workers (in "
                        "Keras, workers), or a quicker disk.")
    if waits.exchange_part * report.together >= WORTH_EXCHANGE:
        said.append(f"Exchanges take {percent(waits.exchange_part)} of a step once all ranks have come: "
                    'topology="auto" and hvd.Compression.auto try what is faster; larger global batches need fewer.')
    for rank in report.run.ranks.values():
        if rank.dropped or rank.unreadable:
            said.append(f"The record of rank {rank.rank} lacks {rank.dropped} lines that could not be written, and "
                        f"{rank.unreadable} that cannot be read.")
    return said or ["Nothing stands out: ranks hardly wait for each other, for data or for the exchange."]


def _of_waiting(waits: Waiting) -> str:
    """For whom ranks waited, why, and what helps."""
    total = sum(map(sum, waits.waited_s))
    index = max(range(len(waits.ranks)), key=waits.waited_for)
    words = f"Ranks wait for each other for {percent(waits.waited_part)} of the time"
    if waits.waited_for(index) < ONE_RANK * total:
        return (f"{words}, for one rank now and for another then: where each rank's steps vary, "
                'strategy="local" waits for nobody.')
    causes = waits.causes[index]
    name, seconds = max(causes._asdict().items(), key=lambda each: each[1])
    words += f", {percent(waits.waited_for(index) / total)} of that for rank {waits.ranks[index]}"
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


# In tables ------------------------------------------------------------------------------------------------------------


def show(report: Report) -> None:
    """None; prints the tables and what follows from them."""
    console, make = rich_console()
    say: Callable[[str], None] = lambda line: console.print(line, markup=False, soft_wrap=True)  # noqa: E731
    say(headline(report))
    console.print(_of_ranks(report, make))
    if any(map(any, report.waits.waited_s)):
        console.print(_who_waited(report.waits, make))
    if plans := report.run.plans:
        console.print(_of_plans(report, make))
        if len(plans) > MOST_PLANS:
            say(f"… of {len(plans)} plans, the last {MOST_PLANS}.")
    for event in _noteworthy(report.run):
        say(event)
    for line in advice(report):
        say(line)


def _of_ranks(report: Report, make: Any) -> Any:
    rows = []
    for rank, summary in zip(report.run.ranks.values(), report.run.summaries(skip=report.skip), strict=True):
        part = parts(rank, skip=report.skip)
        share = str(rank.steps[-1].share) if rank.steps else "–"
        index = report.waits.ranks.index(rank.rank)
        last = percent(report.waits.last[index] / report.waits.steps) if report.waits.steps else "–"
        rows.append([str(rank.rank), rank.host or "–", share, f"{summary.samples_per_s:,.4g}",
                     *(percent(part[name]) for name in ("compute", "data", "wait", "rest")), last])
    columns = ["rank", "host", "last share", "samples/s", "compute", "data", "waiting", "rest", "came last in"]
    return table(make, "Where the time of each rank went", columns, rows, left=["host"])


def _who_waited(waits: Waiting, make: Any) -> Any:
    indices = sorted(range(len(waits.ranks)), key=waits.waited_for, reverse=True)[:MOST_RANKS]
    indices = sorted(i for i in indices if waits.waited_for(i) > 0)
    rows = []
    for i in sorted(range(len(waits.ranks)), key=lambda i: -sum(waits.waited_s[i]))[:MOST_RANKS]:
        cells = ["–" if i == j else seconds_text(waits.waited_s[i][j]) for j in indices]
        rows.append([f"rank {waits.ranks[i]}", *cells, seconds_text(sum(waits.waited_s[i]))])
    rows.sort(key=lambda row: int(row[0].split()[1]))
    total = seconds_text(sum(map(sum, waits.waited_s)))
    rows.append(["all", *(seconds_text(waits.waited_for(j)) for j in indices), total])
    for name in ("compute", "data", "rest"):
        whole = [waits.causes[j].whole for j in indices]
        values = [getattr(waits.causes[j], name) / w if w else 0.0 for j, w in zip(indices, whole, strict=True)]
        rows.append([f"because of its {name}", *map(percent, values), ""])
    columns = ["", *(f"for rank {waits.ranks[j]}" for j in indices), "in all"]
    return table(make, f"Who waited for whom, in {waits.steps} synchronous steps", columns, rows, left=[""])


def _of_plans(report: Report, make: Any) -> Any:
    plans = report.run.plans[-MOST_PLANS:]
    changes = any(plan.strategy != SYNCHRONOUS for plan in plans)  # else the script has fixed it
    rows = []
    for plan in plans:
        expected = seconds_text(plan.predicted_step_s) if plan.predicted_step_s else "–"
        strategy = [plan.strategy] if changes else []
        rows.append([str(plan.step), shares_text(plan.shares), *strategy, expected, plan.reason])
    columns = ["from step", "shares", *(["strategy"] if changes else []), "expected step", "why"]
    return table(make, "Plans", columns, rows, left=["shares", "strategy", "why"])


def _ranks(numbers: Sequence[int]) -> str:
    return f"rank{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}" if numbers else "others"


def _noteworthy(run: Run) -> list[str]:
    """Changes of ranks and long waits, as they were recorded; each once, however many ranks tell of it."""
    lines: list[str] = []
    for rank in run.ranks.values():
        for event in rank.events:
            fields = event.fields
            if event.kind == "ranks":
                lines.append(f"From step {fields.get('step', '?')} on there were {fields.get('size', '?')} ranks.")
            elif event.kind == "parameters":
                lines.append(f"Parameters of {_ranks(fields.get('ranks', []))} were off by rounding, and mended.")
            elif event.kind == "wait":
                lines.append(f"Rank {rank.rank} waited {seconds_text(float(fields.get('waited_s', 0)))} for "
                             f"{_ranks(fields.get('missing', []))}, at {fields.get('line', 'an unknown line')}.")
    return list(dict.fromkeys(lines))[:MOST_PLANS]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the command's options."""
    parser.add_argument("run", help="the folder with the run's trace: of hvd.Balancer(run=...) or HVD_HETERO_RUN")
    parser.add_argument("--json", nargs="?", const=TO_STDOUT, metavar="FILE",
                        help="write everything as JSON to FILE, or to the output instead of tables")
    parser.add_argument("--picture", type=Path, metavar="FILE", help="draw it into FILE (.png, .svg)")
    parser.add_argument("--skip", type=int, default=SKIP, metavar="N",
                        help="leave out the first N steps, in which frameworks compile (default: %(default)s)")


def command(arguments: argparse.Namespace) -> int:
    """Prints the report; 0."""
    if arguments.skip < 0:
        raise CommandError(f"--skip: expected 0 or more. Received: {arguments.skip}.")
    report = report_of(arguments.run, skip=arguments.skip)
    write(report.as_dict(), arguments.json, otherwise=lambda: show(report))
    if arguments.picture is not None:
        from hvd_hetero.cli import report_picture

        try:
            report_picture.draw(report, arguments.picture)
        except (OSError, ValueError) as error:
            raise CommandError(f"--picture: expected a file that can be written. Received: {error}.") from error
    return 0


def write(found: dict[str, Any], place: str | None, *, otherwise: Callable[[], None]) -> None:
    """None; writes `found` as JSON to the output or a file, and prints tables by `otherwise` unless it went to the
    output. Raises CommandError where the file cannot be written."""
    if place == TO_STDOUT:
        print(json.dumps(found), flush=True)
        return
    otherwise()
    if place is not None:
        try:
            Path(place).write_text(json.dumps(found) + "\n", encoding="utf-8")
        except OSError as error:
            raise CommandError(f"--json: expected a file that can be written. Received: {error}.") from error
