"""Prints the report of a run (`hvd-hetero report`) as tables and sentences."""

from __future__ import annotations

from typing import Any

from hvd_hetero.cli.console import rate_text, rich_console, seconds_text, table
from hvd_hetero.cli.report_content import MOST_RANKS, Report, advice, headline, percent_text, shares_text
from hvd_hetero.policy.rank_words import ranks_text
from hvd_hetero.trace.run import Run
from hvd_hetero.trace.waiting import Waiting

MOST_PLANS = 12  # rows of the table of plans, and lines about events
MOST_ROWS = 32  # ranks in the table of where the time went
MOST_COLUMNS = 8  # ranks that have a column of their own in the table of waiting, so that it fits a terminal


def show(report: Report) -> None:
    """Prints the headline, the tables of time, waiting and plans, the noteworthy events, and the advice."""
    console = rich_console()

    def say(line: str) -> None:
        console.print(line, markup=False, soft_wrap=True)

    say(headline(report))
    console.print(_rank_table(report))
    ranks, waited = len(report.run.ranks), any(map(any, report.waits.waited_s))
    if ranks > MOST_ROWS:
        say(f"… of {ranks} ranks, {f'the {MOST_ROWS} that the others waited for longest' if waited else MOST_ROWS}.")
    if waited:
        console.print(_waiting_table(report.waits))
        if ranks > MOST_COLUMNS:
            say(f"… at most the {MOST_COLUMNS} of {ranks} ranks that the others waited for longest.")
    if plans := report.run.plans:
        console.print(_plan_table(report))
        if len(plans) > MOST_PLANS:
            say(f"… of {len(plans)} plans, the last {MOST_PLANS}.")
    events = _noteworthy(report.run)
    if len(events) > MOST_PLANS:
        say(f"… of {len(events)} events, the last {MOST_PLANS}:")
    for event in events[-MOST_PLANS:]:
        say(event)
    for line in advice(report):
        say(line)


def _rank_table(report: Report) -> Any:
    waits, rows = report.waits, []
    ranks = list(report.run.ranks.values())
    for index in sorted(_waited_for_longest(waits, MOST_ROWS)):
        rank, summary = ranks[index], report.summaries[index]
        part = report.parts[rank.rank]
        share = str(rank.steps[-1].share) if len(rank.steps) else "–"
        last = percent_text(waits.last[index] / waits.steps) if waits.steps else "–"
        rows.append([str(rank.rank), rank.host or "–", share, rate_text(summary.samples_per_s),
                     *(percent_text(part[name]) for name in ("compute", "data", "wait", "rest")), last])
    columns = ["rank", "host", "last share", "samples/s", "compute", "data", "waiting", "rest", "came last in"]
    return table("Where the time of each rank went", columns, rows, left=["host"])


def _waited_for_longest(waits: Waiting, most: int) -> list[int]:
    """Indices into `waits.ranks` of at most `most` ranks that the others waited for longest, longest first."""
    return sorted(range(len(waits.ranks)), key=waits.waited_for, reverse=True)[:most]


def _waiting_table(waits: Waiting) -> Any:
    indices = sorted(i for i in _waited_for_longest(waits, MOST_COLUMNS) if waits.waited_for(i) > 0)
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
        rows.append([f"because of its {name}", *map(percent_text, values), ""])
    columns = ["", *(f"for rank {waits.ranks[j]}" for j in indices), "in all"]
    return table(f"Who waited for whom, in {waits.steps} synchronous steps", columns, rows, left=[""])


def _plan_table(report: Report) -> Any:
    plans = report.run.plans[-MOST_PLANS:]
    rows = []
    for plan in plans:
        expected = seconds_text(plan.predicted_step_s) if plan.predicted_step_s else "–"
        strategy = [plan.strategy] if report.plans_choose else []
        rows.append([str(plan.step), shares_text(plan.shares), *strategy, expected, plan.reason])
    columns = ["from step", "shares", *(["strategy"] if report.plans_choose else []), "expected step", "why"]
    return table("Plans", columns, rows, left=["shares", "strategy", "why"])


def _noteworthy(run: Run) -> list[str]:
    """Sentences about recorded events, in the order of steps: changed ranks, repaired parameters, changed links, long
    waits.

    Several ranks may record the same event; each sentence appears once.
    """
    lines: list[str] = []
    events = [(rank.next_step(event.t_s), event.t_s, rank.rank, event) for rank in run.ranks.values()
              for event in rank.events]
    for _, _, rank, event in sorted(events, key=lambda each: each[:3]):
        fields = event.fields
        if event.kind == "ranks":
            size = fields.get("size", "?")
            there = "was 1 rank" if size == 1 else f"were {size} ranks"
            lines.append(f"After step {fields.get('step', '?')} there {there}.")
        elif event.kind == "parameters":
            lines.append(f"Parameters of {ranks_text(fields.get('ranks', []))} were off by rounding, and mended.")
        elif event.kind == "links" and "reason" in fields:
            chosen = "others were chosen" if fields.get("changed") else "they stayed the same"
            lines.append(f"At step {fields.get('step', '?')}: {fields['reason']}. Ways to sum gradients were "
                         f"timed, and {chosen}.")
        elif event.kind == "wait":
            missing = fields.get("missing", [])
            lines.append(f"Rank {rank} waited {seconds_text(float(fields.get('waited_s', 0)))} for "
                         f"{ranks_text(missing) if missing else 'others'}, at {fields.get('line', 'an unknown line')}.")
    return list(dict.fromkeys(lines))
