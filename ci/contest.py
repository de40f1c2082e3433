"""Contests: every contender of a scenario on the same emulated cluster, interleaved, medians of the repeats."""

from __future__ import annotations

import itertools
import json
import os
import platform
import re
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from emulation import Cluster, EmulatedRank, Finished

WORKER = str(Path(__file__).resolve().parent / "bench_worker.py")
_LINE = re.compile(r"BENCH (\{.*\})")
# The mixed cluster: with its node, the cores of each rank.
MIXED_RANKS = tuple(EmulatedRank(cores=cores, node=node) for cores, node in ((0.8, 0), (0.4, 0), (0.2, 1), (0.2, 1)))


@dataclass(frozen=True, kw_only=True)
class Contender:
    """One row of the table: what its worker is told, and how it is launched."""

    name: str
    arguments: tuple[str, ...]
    launcher: str = "horovodrun"  # or "processes", as torchrun starts them
    warmup: int = 6
    steps: int = 30


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """A cluster and the shares that suit it, which DDP gets by hand and each rank alone takes."""

    name: str
    ranks: tuple[EmulatedRank, ...]
    shares: tuple[int, ...]
    contenders: tuple[Contender, ...]
    link_mbit: float | None = None
    network: str = "auto"
    program: str = WORKER
    description: str = ""


@dataclass
class Outcome:
    """What was measured: contender name -> samples/s of each repeat, and the last repeat's records."""

    samples_per_s: dict[str, list[float]] = field(default_factory=dict)
    alone: dict[int, list[float]] = field(default_factory=dict)
    records: dict[str, list[dict[str, Any]]] = field(default_factory=dict)

    def median(self, name: str) -> float:
        return statistics.median(self.samples_per_s[name])

    def ideal(self) -> float:
        """The sum of what the ranks do alone, each with its share of the batch and nobody to wait for."""
        return sum(statistics.median(values) for values in self.alone.values())

    def ideals(self) -> list[float]:
        """The same in each repeat."""
        return [sum(each) for each in zip(*self.alone.values(), strict=True)]

    def ratio(self, name: str, *others: str) -> float:
        """The median over repeats of the ratio within a repeat, where drift of the machine cancels, to the best of
        `others`; without any, to the ideal."""
        mine = self.samples_per_s[name]
        rows = [self.samples_per_s[other] for other in others]
        theirs = [max(each) for each in zip(*rows, strict=True)] if rows else self.ideals()
        return statistics.median(a / b for a, b in zip(mine, theirs, strict=True))


def check(name: str, value: float, bar: float, *, at_most: bool = False) -> dict[str, Any]:
    """One line of what a scenario asks for: whether `value` reaches `bar`, or stays below it."""
    ok = value <= bar if at_most else value >= bar
    return {"name": name, "value": round(value, 3), "bar": bar, "ok": ok, "at_most": at_most}


def median_ratio(values: Sequence[float], others: Sequence[float]) -> tuple[float, float]:
    """The median of the ratios of neighbours, and its standard error: normal noise, at least two of each."""
    ratios = [a / b for a, b in zip(values, others, strict=True)]
    return statistics.median(ratios), 1.2533 * statistics.stdev(ratios) / len(ratios) ** 0.5


def records_of(finished: Finished, *, what: str, ranks: int) -> list[dict[str, Any]]:
    """What the ranks printed, by rank. Raises RuntimeError with the output where one of them failed."""
    records = [json.loads(found) for found in _LINE.findall(finished.output)]
    if finished.returncode or len(records) != ranks:
        said = finished.output  # the first rank that fails says why, the last ones only that it failed
        said = said if len(said) < 12_000 else f"{said[:8000]}\n[...]\n{said[-4000:]}"
        raise RuntimeError(f"{what} failed (exit status {finished.returncode}):\n{said}")
    return sorted(records, key=lambda record: record["rank"])


def window_of(records: Sequence[dict[str, Any]]) -> tuple[float, float]:
    """From when to when all ranks of a run trained and were timed, by the clock that they share. Raises RuntimeError
    where they did not at the same time."""
    first = max(record["ends_s"][0] for record in records)
    last = min(record["ends_s"][-1] for record in records)
    if last <= first:
        raise RuntimeError("Expected ranks that train at the same time. Received: one that made no step once it had "
                           "settled, or ended before another began.")
    return first, last


def rates_of(records: Sequence[dict[str, Any]]) -> list[float]:
    """Samples per second of each rank while all trained: who begins late or ends early does not leave the others a
    machine of their own. A step that is partly in that time counts as far as it is."""
    window = window_of(records)
    rates = []
    for record in records:
        done = list(itertools.accumulate(record["samples"], initial=0.0))
        at_first, at_last = np.interp(window, record["ends_s"], done)
        rates.append(float(at_last - at_first) / (window[1] - window[0]))
    return rates


def rate_of(records: Sequence[dict[str, Any]]) -> float:
    """Samples per second of all ranks together."""
    if records[0].get("apart"):
        return sum(rates_of(records))
    return statistics.mean(record["samples_per_s"] for record in records)


def launch(
    cluster: Cluster, scenario: Scenario, contender: Contender, *, quick: bool, extra: Sequence[str] = ()
) -> list[dict[str, Any]]:
    """The records of one run of `contender`. Raises RuntimeError with its output when it fails."""
    steps = max(10, contender.steps // 2) if quick else contender.steps
    command = [
        sys.executable,
        scenario.program,
        *contender.arguments,
        *("--shares", ":".join(map(str, scenario.shares)), "--warmup", str(contender.warmup), "--steps", str(steps)),
        *extra,
    ]
    start = cluster.horovodrun if contender.launcher == "horovodrun" else cluster.processes
    return records_of(start(command, timeout_s=240), what=contender.name, ranks=len(scenario.ranks))


def run_alone(cluster: Cluster, scenario: Scenario, *, quick: bool) -> dict[int, float]:
    """Samples per second of each rank by itself."""
    alone = {}
    for rank in range(len(scenario.ranks)):
        command = [sys.executable, scenario.program, "alone", "--rank", str(rank)]
        command += ["--shares", ":".join(map(str, scenario.shares))]
        command += ["--warmup", "5", "--steps", "15" if quick else "30"]
        finished = cluster.processes(command, timeout_s=240, ranks=[rank])
        alone[rank] = records_of(finished, what=f"rank {rank} alone", ranks=1)[0]["samples_per_s"]
    return alone


def contest(scenario: Scenario, *, repeats: int, quick: bool, say: Callable[[str], None]) -> Outcome:
    """All contenders in turn, `repeats` times over."""
    outcome = Outcome()
    with Cluster(scenario.ranks, link_mbit=scenario.link_mbit, network=scenario.network) as cluster:
        say(cluster.describe())
        for repeat in range(repeats):
            for rank, value in run_alone(cluster, scenario, quick=quick).items():
                outcome.alone.setdefault(rank, []).append(value)
            ideal = sum(values[-1] for values in outcome.alone.values())
            say(f"repeat {repeat + 1}/{repeats}: {'each rank alone, summed':28s} {ideal:7.1f} samples/s")
            for contender in scenario.contenders:
                records = launch(cluster, scenario, contender, quick=quick)
                value = rate_of(records)
                outcome.samples_per_s.setdefault(contender.name, []).append(value)
                outcome.records[contender.name] = records
                shares = records[0]["shares"]
                note = f"  shares {':'.join(map(str, shares))}" if shares else ""
                say(f"repeat {repeat + 1}/{repeats}: {contender.name:28s} {value:7.1f} samples/s{note}")
    return outcome


def where_steps_go(records: Sequence[dict[str, Any]]) -> dict[str, float] | None:
    """Means over the steps of a synchronous run of ours, in ms: what a rank is busy; how much longer the rank that is
    slowest in this step; and the exchange after that, since who comes last waits for nothing else. None for others."""
    if "busy_s" not in records[0]:
        return None
    busy = list(zip(*(record["busy_s"] for record in records), strict=True))
    waits = list(zip(*(record["waits_s"] for record in records), strict=True))
    mean = statistics.mean(statistics.mean(step) for step in busy)
    return {
        "busy_ms": 1e3 * mean,
        "slowest_ms": 1e3 * (statistics.mean(map(max, busy)) - mean),
        "exchange_ms": 1e3 * statistics.mean(map(min, waits)),
    }


def machine() -> dict[str, Any]:
    """Where something is measured, before it is."""
    import torch

    model = ""
    if os.path.exists("/proc/cpuinfo"):
        with open("/proc/cpuinfo") as lines:
            model = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "")
    return {
        "cpu": model,
        "cores": len(os.sched_getaffinity(0)),
        "load_before": os.getloadavg()[0],
        "python": platform.python_version(),
        "torch": torch.__version__,
        "date": time.strftime("%Y-%m-%d"),
    }
