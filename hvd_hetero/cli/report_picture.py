"""The picture of `hvd-hetero report`: where the time went, who waited for whom, shares and step time over the steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hvd_hetero.cli.drawing import figure
from hvd_hetero.cli.report_content import MOST_RANKS, Report
from hvd_hetero.trace.waiting import timed

COLOURS = {"compute": "#4c78a8", "data": "#f2a541", "exchange": "#9d9d9d", "waiting": "#d1495b", "rest": "#c9b79c"}
POINTS = 400  # of a line; of more steps than that, consecutive ones share a point


def draw(report: Report) -> Any:
    """A figure of matplotlib with the report. Raises `CommandError` if matplotlib is not installed."""
    drawn = figure(12, 7.5, dpi=120)
    (time, who), (shares, speed) = drawn.subplots(2, 2)
    drawn.suptitle(report.run.folder, fontsize=10)
    _time(time, report)
    _who(who, report, drawn)
    _shares(shares, report)
    _speed(speed, report)
    shares.sharex(speed)
    return drawn


def _time(axes: Any, report: Report) -> None:
    """Draws where the time of each rank went, in percent, as stacked bars."""
    ranks = list(report.run.ranks.values())
    exchange = report.waits.exchange_part
    left = [0.0] * len(ranks)
    shown = [report.parts[rank.rank] for rank in ranks]
    pieces = {
        "compute": [part["compute"] for part in shown],
        "data": [part["data"] for part in shown],
        "exchange": [min(exchange, part["wait"]) for part in shown],
        "waiting": [max(0.0, part["wait"] - exchange) for part in shown],
        "rest": [part["rest"] for part in shown],
    }
    for name, widths in pieces.items():
        widths = [100 * width for width in widths]
        axes.barh(range(len(ranks)), widths, left=left, color=COLOURS[name], label=name, height=0.7)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    names = [f"rank {rank.rank}" + (f" ({rank.host})" if rank.host else "") for rank in ranks]
    if len(ranks) <= MOST_RANKS:
        axes.set_yticks(range(len(ranks)), names, fontsize=8)
    else:
        axes.set_ylabel("rank")
    axes.invert_yaxis()
    axes.set(xlabel="% of the time", xlim=(0, 100), title="Where the time went")
    axes.legend(ncols=5, fontsize=7, loc="lower center", bbox_to_anchor=(0.5, -0.28), frameon=False)


def _who(axes: Any, report: Report, drawn: Any) -> None:
    """Draws the seconds that each rank (row) waited for each other one (column), as a heat map."""
    waits = report.waits
    if not any(map(any, waits.waited_s)):
        axes.axis("off")
        axes.text(0.5, 0.5, "no rank waited for another\nin a synchronous step", ha="center", va="center")
        return
    image = axes.imshow(waits.waited_s, cmap="Reds", vmin=0.0)
    drawn.colorbar(image, ax=axes, label="seconds", shrink=0.8)
    axes.set(xlabel="for rank", ylabel="rank", title=f"Who waited for whom, {waits.steps} synchronous steps")
    if len(waits.ranks) <= MOST_RANKS:
        axes.set_xticks(range(len(waits.ranks)), waits.ranks)
        axes.set_yticks(range(len(waits.ranks)), waits.ranks)
        most = max(map(max, waits.waited_s))
        for i, row in enumerate(waits.waited_s):
            for j, seconds in enumerate(row):
                if i != j:
                    colour = "white" if seconds > 0.6 * most else "black"
                    axes.text(j, i, f"{seconds:.3g}", ha="center", va="center", fontsize=8, color=colour)


def _shares(axes: Any, report: Report) -> None:
    for rank in report.run.ranks.values():
        axes.step(rank.steps.step, rank.steps.share, where="post", linewidth=1.2, label=f"rank {rank.rank}")
    axes.set(ylabel="samples", title="Shares of the global batch", ylim=(0, None))
    axes.yaxis.get_major_locator().set_params(integer=True)
    if len(report.run.ranks) <= MOST_RANKS:
        axes.legend(ncols=4, fontsize=7)


def _speed(axes: Any, report: Report) -> None:
    """Draws the duration of each rank's steps in ms, and a dashed line where a new plan begins."""
    for rank in report.run.ranks.values():
        seen = timed(rank, skip=report.skip)
        seen = seen.where(seen.span_s > 0.0)
        axes.plot(_thinned(seen.steps.step.tolist()), _thinned((1e3 * seen.span_s).tolist()), linewidth=0.8)
    for plan in report.run.plans[1:]:
        axes.axvline(plan.step, color="grey", linestyle="--", linewidth=0.7)
    axes.set(xlabel="step", ylabel="ms", title="Time of a step (dashed: a new plan)", ylim=(0, None))


def _thinned(values: Sequence[float]) -> list[float]:
    """`values` reduced to at most `POINTS`: the (upper) medians of equally many consecutive ones."""
    each = -(-len(values) // POINTS) or 1
    groups = [sorted(values[i : i + each]) for i in range(0, len(values), each)]
    return [group[len(group) // 2] for group in groups]
