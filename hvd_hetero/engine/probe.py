"""The probe: finds out the devices of the ranks, the speed of the links between them, and which ranks form nodes.

`probe(engine)` is a collective call: all ranks return the same `ProbeResult`, bit for bit, so that decisions made from
it agree without another exchange. All transfers are collectives of the engine: see `transfer`.

The links within a host are timed pair of ranks by pair, on all hosts at once. The links between hosts are timed pair of
hosts by pair, between their first ranks. Then each pair of hosts is timed again with as many pairs of ranks at once as
the smaller host has ranks (the rails), to see whether these share one wire. Disjoint pairs of hosts are timed at once;
if they share a wire beyond the hosts (racks), each measures its part of the bandwidth.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from itertools import chain, combinations
from pathlib import Path
from typing import Any

import numpy as np

from hvd_hetero.policy.link import Link
from hvd_hetero.policy.rank_words import by_rank
from hvd_hetero.policy.topology import Topology, by_host, group, tournament

from . import cache
from .device import Device, core_gflop_per_s, describe_device
from .environment import cache_folder, gloo_interface, under_mpi
from .host import mpi_host, mpi_module
from .payload import gather_text
from .port import Engine
from .probe_result import ProbeResult
from .transfer import Pair, Timer

FORMAT = 1          # version of the cached file: raise it when a measured value changes its meaning
BUDGET_S = 10.0
MOST_STALLED = 0.6  # if a larger fraction of transfers stalled, the machine was busy, and the result is not cached
TYPICAL_BYTES = 1 << 20     # links are compared by their time at this size: of the order of a gradient bucket


def probe(engine: Engine, *, clock: Callable[[], float] = time.perf_counter, budget_s: float = BUDGET_S,
          fresh: bool = False, folder: Path | None = None, describe: Callable[[], Device] = describe_device,
          benchmark: Callable[[Callable[[], float]], float] = core_gflop_per_s) -> ProbeResult:
    """Measures the devices and links of all ranks, or returns the cached result for the same hardware. A collective
    call.

    Args:
        engine: the ranks.
        clock: returns the time in seconds.
        budget_s: the approximate longest duration, in seconds; the sizes of transfers are chosen accordingly.
        fresh: whether to measure even if there is a cached result.
        folder: where rank 0 caches results; None: in the user's cache folder.
        describe: returns the device of this rank.
        benchmark: returns the speed of one core in Gflop/s, given a clock.

    Raises:
        ValueError: on every rank, if arguments are wrong or differ between ranks.
        RuntimeError: on every rank, if a rank could not describe its device or benchmark its core.
    """
    name = engine.unique("hvd_hetero.probe.")
    timer = Timer(engine, name=name, clock=clock)
    devices, interfaces = _devices(engine, name, describe, {"budget_s": budget_s, "fresh": fresh})
    if not budget_s > 0.0:
        raise ValueError(f"budget_s: expected above 0, the seconds that probing may take. Received: {budget_s}.")
    key = cache.key({"format": FORMAT, "mpi": under_mpi(), "interfaces": interfaces,
                     "devices": [{**asdict(device), "notes": []} for device in devices]})
    place = folder if folder is not None or engine.rank else _users_folder()
    kept = None if fresh else _kept(engine, name, place, key, budget_s)
    if kept is not None:
        return replace(kept, cached=True)
    engine.allreduce_async(np.zeros(1, np.float32), name=f"{name}.benchmark").wait()   # cores are shared as in training
    speeds = _benchmarked(engine, name, benchmark, clock)
    found = _measured(timer, devices, speeds, budget_s)
    found = replace(found, seconds=timer.elapsed_s())
    if engine.rank == 0 and place is not None and found.stalled < MOST_STALLED:
        cache.store(place, key, {"key": key, "budget_s": budget_s, "probe": found.as_dict()})
    return found


def _users_folder() -> Path | None:
    """The folder of cached results; None for a user without a home folder, whose results are not cached."""
    try:
        return cache_folder() / "probe"
    except RuntimeError:
        return None


def _devices(
    engine: Engine, name: str, describe: Callable[[], Device], terms: dict[str, Any]
) -> tuple[tuple[Device, ...], list[str]]:
    """Gathers the devices of all ranks, and the network interfaces that Gloo was told to use ("" for none).

    Args:
        terms: the arguments of `probe` that have to be the same on all ranks, by name.

    Raises:
        RuntimeError: on every rank, if a rank could not describe its device.
        ValueError: on every rank, if `terms` differ.
    """
    mine: dict[str, Any] = {"terms": terms, "interface": gloo_interface()}
    try:
        mpi = mpi_module(engine.size)
        mine |= {"device": asdict(describe()), "mpi": mpi is not None}
    except Exception as error:      # told to all ranks, which raise below: none is left waiting
        mine["error"] = f"{type(error).__name__}: {error}"
    rows = [json.loads(text) for text in gather_text(engine, json.dumps(mine), name=f"{name}.device")]
    if failed := {rank: row["error"] for rank, row in enumerate(rows) if "error" in row}:
        raise RuntimeError("describe: expected every rank to describe its device. Received: "
                           + "; ".join(f"rank {rank}: {error}" for rank, error in failed.items()) + ".")
    for title in terms:
        said = [row["terms"][title] for row in rows]
        if len(set(said)) > 1:
            raise ValueError(f"{title}: expected the same on every rank. Received: {by_rank(said)}.")
    devices = tuple(Device.from_dict(row["device"]) for row in rows)
    if all(row["mpi"] for row in rows):     # only all together: asking MPI is a collective call of its own
        hosts = gather_text(engine, mpi_host(mpi), name=f"{name}.host")
        devices = tuple(replace(device, host=host) for device, host in zip(devices, hosts, strict=True))
    return devices, [row["interface"] for row in rows]


def _kept(engine: Engine, name: str, folder: Path | None, key: str, budget_s: float) -> ProbeResult | None:
    """Returns the result in rank 0's cache under `key`, on all ranks, if it was measured with at least this budget and
    every rank can read it; else None."""
    text = cache.load(folder, key) if folder is not None and engine.rank == 0 else ""
    texts = gather_text(engine, text, name=f"{name}.cache")
    try:
        content = json.loads(texts[0])
        ours = content["key"] == key and content["budget_s"] >= budget_s
        found = ProbeResult.from_dict(content["probe"]) if ours else None
        if found is not None and found.stalled >= MOST_STALLED:
            found = None
    except (ValueError, KeyError, TypeError, AttributeError):      # a file that is not ours, or half of one
        found = None
    sound = np.array([float(found is not None and found.size == engine.size)], dtype=np.float32)
    return found if engine.allreduce_async(sound, name=f"{name}.cache.sound", op="min").wait()[0] else None


def _benchmarked(engine: Engine, name: str, benchmark: Callable[[Callable[[], float]], float],
                 clock: Callable[[], float]) -> tuple[float, ...]:
    """Returns the speed of one core of each rank, in Gflop/s. Raises RuntimeError on every rank if it failed on any."""
    try:
        speed, failure = benchmark(clock), None
    except Exception as error:
        speed, failure = float("nan"), error
    speeds = np.asarray(engine.allgather_async(np.array([speed]), name=f"{name}.speed").wait())
    wrong = [rank for rank, value in enumerate(speeds) if not value > 0.0]
    if wrong:
        raise RuntimeError(f"benchmark: expected a speed above 0 of every rank. Received: none of rank {wrong[0]}"
                           f"{f' ({failure})' if failure else ', whose error says why'}.") from failure
    return tuple(speeds.tolist())


def _measured(timer: Timer, devices: tuple[Device, ...], speeds: tuple[float, ...], budget_s: float) -> ProbeResult:
    """Measures the links between these devices, and returns the `ProbeResult`, with `seconds` still 0."""
    names, size = [device.host for device in devices], len(devices)
    hosts = by_host(names)
    within = [tournament(host) for host in hosts]
    local_turns = [[pair for turns in within for pair in chain.from_iterable(turns[number:number + 1])]
                   for number in range(max(map(len, within)))]
    cross_turns = tournament(range(len(hosts)))
    rails_of = {(a, b): list(zip(hosts[a], hosts[b], strict=False)) for a, b in chain.from_iterable(cross_turns)}
    rail_turns = [railed for turn in cross_turns if (railed := [pair for pair in turn if len(rails_of[pair]) > 1])]

    latency, bandwidth = np.zeros((size, size)), np.full((size, size), np.inf)
    contended = np.ones((len(hosts), len(hosts)))
    timer.warm_up()
    empty_s = timer.empty_s()
    left = len(local_turns) + len(cross_turns) + len(rail_turns)

    def links(pairs: list[Pair]) -> dict[Pair, Link]:
        nonlocal left
        allowed_s = (budget_s - timer.elapsed_s()) / left
        left -= 1
        return timer.links(pairs, title=str(left), allowed_s=allowed_s)

    def enter(some: tuple[int, ...], others: tuple[int, ...], link: Link) -> None:
        for rows, columns in ((some, others), (others, some)):
            latency[np.ix_(rows, columns)] = link.latency_s
            bandwidth[np.ix_(rows, columns)] = link.bandwidth_bytes_per_s

    for turn in local_turns:
        for (one, other), link in links(turn).items():
            enter((one,), (other,), link)
    for turn in cross_turns:
        alone = links([rails_of[pair][0] for pair in turn])
        for a, b in turn:
            enter(hosts[a], hosts[b], alone[rails_of[a, b][0]])
    for turn in rail_turns:
        together = links([rail for pair in turn for rail in rails_of[pair]])
        for a, b in turn:
            rate = float(np.median([together[rail].bandwidth_bytes_per_s for rail in rails_of[a, b]]))
            contended[a, b] = contended[b, a] = max(1.0, bandwidth[rails_of[a, b][0]] / rate)

    topology = _topology(group(names, bandwidth), latency, bandwidth)
    return ProbeResult(devices=devices, core_gflop_per_s=speeds, hosts=hosts, latency_s=_rows(latency),
                 bandwidth_bytes_per_s=_rows(bandwidth), contended=_rows(contended), empty_s=empty_s,
                 stalled=timer.stalled, topology=topology, seconds=0.0)


def _topology(nodes: tuple[tuple[int, ...], ...], latency: np.ndarray, bandwidth: np.ndarray) -> Topology:
    """These nodes with the slowest local and the slowest cross link, of a pair of ranks alone."""
    node_of = {rank: node for node, ranks in enumerate(nodes) for rank in ranks}
    found: dict[bool, list[Link]] = {True: [], False: []}
    for a, b in combinations(range(len(node_of)), 2):
        link = Link(latency_s=float(latency[a, b]), bandwidth_bytes_per_s=float(bandwidth[a, b]))
        found[node_of[a] == node_of[b]].append(link)
    slowest = {inside: max(links, key=lambda link: link.time_s(TYPICAL_BYTES), default=None)
               for inside, links in found.items()}
    return Topology(nodes=nodes, local=slowest[True], cross=slowest[False])


def _rows(matrix: np.ndarray) -> tuple[tuple[float, ...], ...]:
    return tuple(tuple(row) for row in matrix.tolist())
