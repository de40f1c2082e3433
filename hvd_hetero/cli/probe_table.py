"""Prints what `hvd-hetero probe` has found, as tables and sentences."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import combinations, product
from typing import Any

from hvd_hetero.cli.console import rich_console, seconds_text, table
from hvd_hetero.engine.probe_result import ProbeResult
from hvd_hetero.engine.transfer import STALL_S
from hvd_hetero.policy.cost_model import expected_s
from hvd_hetero.policy.rank_words import ranks_text

MOST_ROWS = 16          # of the table of links; with more, the table shows the slowest link of each level alone
HOW_TO_START = "one rank: to see links, start it on several, such as `horovodrun -np 4 -H a:2,b:2 hvd-hetero probe`"
NOTEWORTHY_STALLS = 0.02  # fraction of transfers; if more than that stalled, the summary says so
EXPECTED_BYTES = 2**24  # size of the gradients for which the summary predicts the time of an all-reduce


@dataclass(frozen=True, kw_only=True)
class LinkRow:
    """The link of least bandwidth within one node, or between two nodes: a row of the table of links.

    Attributes:
        nodes: the index of the one node, or the indices of the two nodes that the link joins.
        title: the name of the row.
        latency_s: seconds that a transfer takes at least, with the agreement on the collective.
        bandwidth_bytes_per_s: the bandwidth for one pair of ranks.
        contended: how many times slower a transfer is while as many pairs transfer as the smaller host has ranks.
    """

    nodes: tuple[int, ...]
    title: str
    latency_s: float
    bandwidth_bytes_per_s: float
    contended: float = 1.0


def link_rows(found: ProbeResult) -> list[LinkRow]:
    """One row for each node of several ranks, and one for each pair of nodes, each with its slowest link."""
    nodes = found.topology.nodes
    rows = []
    for index, node in enumerate(nodes):
        if len(node) > 1:
            rows.append(_slowest(found, (index,), f"within node {index}", combinations(node, 2)))
    for a, b in combinations(range(len(nodes)), 2):
        rows.append(_slowest(found, (a, b), f"node {a} – node {b}", product(nodes[a], nodes[b])))
    return rows


def _slowest(found: ProbeResult, nodes: tuple[int, ...], title: str, pairs: Iterator[tuple[int, int]]) -> LinkRow:
    host = {rank: index for index, ranks in enumerate(found.hosts) for rank in ranks}
    a, b = min(pairs, key=lambda pair: found.bandwidth_bytes_per_s[pair[0]][pair[1]])
    return LinkRow(nodes=nodes, title=title, latency_s=found.latency_s[a][b],
                   bandwidth_bytes_per_s=found.bandwidth_bytes_per_s[a][b], contended=found.contended[host[a]][host[b]])


def by_level(rows: list[LinkRow]) -> list[LinkRow]:
    """The slowest of `rows` within a node, and the slowest between nodes; one of them is absent if it has no row."""
    levels = {"slowest within a node": 1, "slowest between nodes": 2}
    slowest = {title: min((row for row in rows if len(row.nodes) == count), default=None,
                          key=lambda row: row.bandwidth_bytes_per_s) for title, count in levels.items()}
    return [replace(row, title=title) for title, row in slowest.items() if row is not None]


def bandwidth_text(bytes_per_s: float) -> str:
    """A bandwidth for people, in MB/s (10^6 bytes)."""
    value = bytes_per_s / 1e6
    return f"{value:,.0f} MB/s" if value >= 100 else f"{value:.3g} MB/s"


def show(found: ProbeResult) -> None:
    """Prints the table of ranks, the table of links and the summary."""
    console = rich_console()
    console.print(_rank_table(found))
    if found.size > 1:
        console.print(_link_table(found))
    for line in summary(found):
        console.print(line, markup=False, soft_wrap=True)
    if found.size == 1:
        console.print(HOW_TO_START, markup=False, soft_wrap=True)


def _rank_table(found: ProbeResult) -> Any:
    gpus = ["GPUs of the host"] if any(device.gpus for device in found.devices) else []
    columns = ["rank", "node", "host", "processor", *gpus, "cores", "memory", "GFLOP/s of a core", "share by speed"]
    rows = []
    for rank, device in enumerate(found.devices):
        memory = f"{device.memory_bytes / 1e9:.1f} GB" if device.memory_bytes else "?"
        models = [gpu.model for gpu in device.gpus]
        named = ", ".join(f"{models.count(model)} × {model}" for model in dict.fromkeys(models)) or "–"
        rows.append([str(rank), str(found.topology.node_of(rank)), device.host_name, device.cpu,
                     *([named] if gpus else []), f"{device.cores:g}", memory, f"{found.core_gflop_per_s[rank]:.1f}",
                     f"{100 * found.shares[rank]:.1f} %"])
    return table("Ranks", columns, rows, left=["host", "processor", *gpus])


def _link_table(found: ProbeResult) -> Any:
    columns = ["link", "latency", "bandwidth", "with all ranks at once"]
    links, rows = link_rows(found), []
    for link in links if len(links) <= MOST_ROWS else by_level(links):
        several = len(link.nodes) > 1 and min(len(found.topology.nodes[node]) for node in link.nodes) > 1
        slower = f"{link.contended:.1f} × slower" if several else "–"
        rows.append([link.title, seconds_text(link.latency_s), bandwidth_text(link.bandwidth_bytes_per_s), slower])
    return table("Links of a pair of ranks, through Horovod", columns, rows, left=["link"])


def summary(found: ProbeResult) -> list[str]:
    """The lines below the tables: the nodes, how it was measured, stalls, expected times of all-reduce, and notes."""
    nodes = "; ".join(f"node {index}: {ranks_text(node)}" for index, node in enumerate(found.topology.nodes))
    took = f"{found.seconds:.1f} s" + (", by an earlier run on this hardware (--fresh measures again)"
                                       if found.cached else "")
    lines = [f"Nodes found: {nodes}. Measured in {took}."]
    if found.size > 1:
        lines.append("Latencies include what Horovod takes to agree; all ranks are through a collective that moves "
                     f"nothing after {seconds_text(found.empty_s)}.")
    if found.stalled > NOTEWORTHY_STALLS:
        lines.append(f"{100 * found.stalled:.0f} % of the transfers stalled for {1e3 * STALL_S:.0f} ms or more and are "
                     "left out: TCP waits for acknowledgements or sends again, or a rank waits for a core. Training "
                     "may stall likewise.")
    if any(device.gpus for device in found.devices):
        lines.append("Shares are by the processors' speed; the balancer measures what a GPU does in training.")
    lines += expectations(found)
    for note in dict.fromkeys(note for device in found.devices for note in device.notes):
        lines.append(f"note: {note}")
    return lines


def expectations(found: ProbeResult) -> list[str]:
    """A line with the predicted time to all-reduce 16 MiB: in one level, in two levels, with fp16, with int8.

    The formulas are in `hvd_hetero.policy.cost_model`. Empty for a single node, or if a link that they need is unknown.
    """
    topology = found.topology
    if len(topology.nodes) == 1 or topology.cross is None or (topology.local is None and not topology.is_flat):
        return []
    ways = {"in one level": ("flat", 1.0)}
    if not topology.is_flat:
        ways["in two levels"] = ("leader", 1.0)
    between = "flat" if topology.is_flat else "leader"
    ways.update({"with fp16 between nodes": (between, 2.0), "with int8": (between, 4.0)})
    times = {title: expected_s(how, EXPECTED_BYTES, topology, ratio=ratio) for title, (how, ratio) in ways.items()}
    listed = ", ".join(f"{title} {seconds_text(seconds)}" for title, seconds in times.items())
    return [f"Of 16 MiB of gradients these links make one expect, for a sum over all ranks: {listed}. "
            'topology="auto" and hvd.Compression.auto measure it, and choose.']
