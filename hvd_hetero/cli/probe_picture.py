"""The picture of `hvd-hetero probe`: nodes as boxes with their ranks, links as lines with latency and bandwidth."""

from __future__ import annotations

import importlib
import math
from itertools import combinations
from typing import Any

from hvd_hetero.cli.console import seconds_text
from hvd_hetero.cli.drawing import figure
from hvd_hetero.cli.probe_table import LinkRow, bandwidth_text, link_rows
from hvd_hetero.engine.probe_result import ProbeResult

BOX_HEIGHT, BOX_WIDTH = 0.42, 2.3       # height of one line of text, width of a box; about inches
MOST_LABELS = 6                         # nodes; with more, the labels of 21 lines or more would hide one another


def draw(found: ProbeResult) -> Any:
    """A figure of matplotlib with the nodes, ranks and links. Raises `CommandError` if matplotlib is not installed."""
    rows = link_rows(found)
    places = _places(found)
    across = max(abs(x) for x, _ in places) + BOX_WIDTH / 2 + 0.4
    tall = max(abs(y) + _height(found, index) / 2 for index, (_, y) in enumerate(places)) + 0.4
    drawn = figure(max(2.0 * across, 7.0), 2.0 * tall + 1.0, dpi=150)
    axes = drawn.add_subplot()
    axes.set(xlim=(-across, across), ylim=(-tall, tall), aspect="equal")
    axes.axis("off")
    axes.set_title(f"{found.size} ranks, {len(places)} nodes; links of a pair of ranks, through Horovod", fontsize=11)
    rates = [row.bandwidth_bytes_per_s for row in rows] or [1.0]
    colours, scales = importlib.import_module("matplotlib").colormaps, importlib.import_module("matplotlib.colors")
    scale = scales.LogNorm(min(rates) / 1.01, max(rates) * 1.01)
    for row in rows:
        if len(row.nodes) == 2:
            colour = colours["viridis_r"](0.15 + 0.75 * float(scale(row.bandwidth_bytes_per_s)))
            _line(axes, row, places, colour, 1.5 + 6.0 * float(scale(row.bandwidth_bytes_per_s)))
    for index, at in enumerate(places):
        _box(axes, found, index, at, next((row for row in rows if row.nodes == (index,)), None))
    return drawn


def _height(found: ProbeResult, index: int) -> float:
    node = found.topology.nodes[index]
    return BOX_HEIGHT * (len(node) + 1 + (len(node) > 1))


def _places(found: ProbeResult) -> list[tuple[float, float]]:
    """The centre (x, y) of each node's box: two side by side, more on a circle wide enough that boxes do not touch."""
    count = len(found.topology.nodes)
    if count == 1:
        return [(0.0, 0.0)]
    reach = max(math.hypot(BOX_WIDTH, _height(found, index)) for index in range(count)) + 1.2
    radius = reach / (2.0 * math.sin(math.pi / count))
    angles = [math.pi - 2.0 * math.pi * index / count for index in range(count)]
    return [(radius * math.cos(angle), radius * math.sin(angle)) for angle in angles]


def _line(axes: Any, row: LinkRow, places: list[tuple[float, float]], colour: Any, width: float) -> None:
    (x, y), (to_x, to_y) = (places[index] for index in row.nodes)
    axes.plot([x, to_x], [y, to_y], color=colour, linewidth=width, solid_capstyle="butt", zorder=1)
    if len(places) > MOST_LABELS:
        return
    # Lines that cross do so near their middles: their labels are moved off the middle, to alternating sides.
    crossing = len(places) > 3 and (row.nodes[1] - row.nodes[0]) % len(places) not in (1, len(places) - 1)
    number = list(combinations(range(len(places)), 2)).index((row.nodes[0], row.nodes[1]))
    along = 0.5 if not crossing else (0.36, 0.64)[number % 2]
    text = f"{bandwidth_text(row.bandwidth_bytes_per_s)}\n{seconds_text(row.latency_s)}"
    if row.contended > 1.05:
        text += f"\n÷ {row.contended:.1f} with all ranks"
    axes.text(x + along * (to_x - x), y + along * (to_y - y), text, ha="center", va="center", fontsize=8, zorder=2,
              bbox={"boxstyle": "round,pad=0.25", "facecolor": "white", "edgecolor": colour, "linewidth": 1.0})


def _box(axes: Any, found: ProbeResult, index: int, at: tuple[float, float], local: LinkRow | None) -> None:
    node = found.topology.nodes[index]
    hosts = ", ".join(dict.fromkeys(found.devices[rank].host_name for rank in node))
    lines = [f"node {index} · {hosts if len(hosts) <= 24 else hosts[:23] + '…'}"]
    lines += [f"rank {rank} · {found.devices[rank].cores:g} cores · {100 * found.shares[rank]:.0f} %" for rank in node]
    if local is not None:
        lines.append(f"{bandwidth_text(local.bandwidth_bytes_per_s)} · {seconds_text(local.latency_s)}")
    height = _height(found, index)
    left, bottom = at[0] - BOX_WIDTH / 2, at[1] - height / 2
    box = importlib.import_module("matplotlib.patches").FancyBboxPatch(
        (left, bottom), BOX_WIDTH, height, boxstyle="round,pad=0.08", facecolor="#f4f6f8", edgecolor="#456", zorder=3)
    axes.add_patch(box)
    for number, line in enumerate(lines):
        last = local is not None and number == len(lines) - 1
        axes.text(at[0], bottom + height - BOX_HEIGHT * (number + 0.5), line, ha="center", va="center", fontsize=9,
                  weight="bold" if number == 0 else "normal", color="#666" if last else "black", zorder=4)
