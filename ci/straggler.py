"""`ci/bench straggler`: ranks that stall, a rank that is very slow, a very slow link; who waits, and who learns."""

from __future__ import annotations

import contextlib
import random
import statistics
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from contest import MIXED_RANKS, check, rates_of, records_of, window_of
from emulation import Cluster, EmulatedRank

Row = dict[str, Any]
WORKER = str(Path(__file__).resolve().parent / "straggler_worker.py")
BASE, OURS, LOCAL = "plain Horovod", "hvd_hetero", "hvd_hetero, local"
CONTENDERS = {  # name -> what the worker is told
    BASE: ("horovod",),
    "PyTorch DDP": ("ddp",),
    "DDP, post-local SGD": ("post-local",),
    OURS: ("hetero",),
    LOCAL: ("local",),
    "hvd_hetero, looser": ("local", "--round-steps", "4", "--bound-rounds", "6"),
}
STALL_S, EVERY_S = 1.0, 3.0


def _ranks(*cores: float) -> tuple[EmulatedRank, ...]:
    return tuple(EmulatedRank(cores=each, node=index // 2) for index, each in enumerate(cores))


SCENARIOS: dict[str, dict[str, Any]] = {
    "stalls": {"ranks": MIXED_RANKS, "shares": "32:16:8:8", "link_mbit": 1000.0, "stalls": (0, 1, 2, 3),
               "title": f"a random rank stopped for {STALL_S:g} s in every {EVERY_S:g} s"},
    "regular": {"ranks": MIXED_RANKS, "shares": "32:16:8:8", "link_mbit": 1000.0, "stalls": (1,), "epoch_samples": 6400,
                "title": f"rank 1 stopped for {STALL_S:g} s in every {EVERY_S:g} s, epochs of 100 batches"},
    "slow": {"ranks": _ranks(1.0, 0.4, 0.2, 0.1), "shares": "38:15:8:3", "link_mbit": 1000.0, "stalls": (),
             "title": "a rank ten times slower than the fastest"},
    "link": {"ranks": MIXED_RANKS, "shares": "32:16:8:8", "link_mbit": 20.0, "stalls": (),
             "title": "a link of 20 Mbit/s"},
}  # fmt: skip
# Equal batches, as a loader of one's own gives them: only the ladder's third rung helps.
EQUAL = {
    "ranks": _ranks(0.8, 0.4, 0.2, 0.03), "shares": "16:16:16:16", "period_us": 40_000,
    "title": "a rank 27 times slower than the fastest, equal batches",
    "contenders": {"in each merge": "0", "fewer merges": "3"}, "stalls": (),
}  # fmt: skip


class Staller:
    """Stops one of these ranks for a while, at random and again and again, as long as its `with` block lasts; the same
    ones each time. Raises at the end of the block what a stop failed with."""

    def __init__(self, cluster: Cluster, ranks: Sequence[int]) -> None:
        self._cluster, self._ranks, self._random = cluster, ranks, random.Random(1)
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._stops: list[tuple[int, float, float]] = []  # which rank, from when, to when
        self._failure: Exception | None = None

    def __enter__(self) -> Staller:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._end.set()
        self._thread.join()
        if self._failure is not None:
            raise self._failure

    def stopped(self, rank: int, window: tuple[float, float]) -> float:
        """The part of the time from and to which the rank was stopped, by time.perf_counter()."""
        parts = (min(to, window[1]) - max(begun, window[0]) for who, begun, to in self._stops if who == rank)
        return sum(max(0.0, part) for part in parts) / (window[1] - window[0])

    def _run(self) -> None:
        try:
            while not self._end.wait(EVERY_S - STALL_S):
                rank, begun = self._random.choice(self._ranks), time.perf_counter()
                self._cluster.stop(rank)
                self._end.wait(STALL_S)
                self._cluster.stop(rank, False)
                self._stops.append((rank, begun, time.perf_counter()))
        except Exception as error:
            self._failure = error


def reached_s(losses: Sequence[Sequence[float]], target: float) -> float:
    """Seconds until the loss was `target`, on the line between two looks; infinite where it never was."""
    for (before, above), (after, below) in zip(losses, losses[1:], strict=False):
        if below <= target < above:
            return before + (after - before) * (above - target) / (above - below)
    return float("inf")


def straggler(
    *, repeats: int, quick: bool, parts: Sequence[str], say: Callable[[str], None]
) -> tuple[list[Row], list[Row]]:
    """The rows of all tables, and the checks."""
    rows: list[Row] = []
    checks: list[Row] = []
    seconds = 30.0 if quick else 60.0
    for name, scenario in SCENARIOS.items():
        if name in parts:
            say(f"\n{scenario['title']}")
            _scenario(name, scenario, rows, checks, repeats=repeats, seconds=seconds, say=say)
    if "equal" in parts:
        _equal(rows, checks, repeats=repeats, seconds=seconds, say=say)
    return rows, checks


def _equal(rows: list[Row], checks: list[Row], *, repeats: int, seconds: float, say: Callable[[str], None]) -> None:
    """Local SGD with a rank that is in every merge, and in fewer."""
    say(f"\n{EQUAL['title']}")
    found: dict[str, list[Row]] = {}
    with Cluster(EQUAL["ranks"], link_mbit=1000.0, period_us=EQUAL["period_us"]) as cluster:
        say(cluster.describe())
        for _ in range(repeats):
            for title, most in EQUAL["contenders"].items():
                told = ("local", "--fixed", "--most-missed", most)
                records, _ = _run(cluster, told, seconds=seconds, scenario=EQUAL)
                rates = rates_of(records)
                found.setdefault(title, []).append({**records[0], "samples_per_s": sum(rates)})
                say(f"  {title:24s} {sum(rates):7.1f} samples/s  " + " ".join(f"{rate:.0f}" for rate in rates)
                    + f"  merges {records[0]['merges']}, waits {[record['waits'] for record in records]}"
                    + f"  loss after {records[0]['losses'][-1][0]:.0f} s {records[0]['losses'][-1][1]:.3f}")
    for title, runs in found.items():
        rows.append({"where": "equal", "name": title, "losses": runs[-1]["losses"],
                     "samples_per_s": statistics.median(run["samples_per_s"] for run in runs),
                     "merges": statistics.median(run["merges"] for run in runs)})
    each, fewer = (found[title] for title in EQUAL["contenders"])
    gain = statistics.median(b["samples_per_s"] / a["samples_per_s"] for a, b in zip(each, fewer, strict=True))
    checks.append(check("equal: throughput with fewer merges of the slow rank / without", gain, 1.0))


def _run(
    cluster: Cluster, contender: Sequence[str], *, seconds: float, scenario: Row
) -> tuple[list[Row], list[float]]:
    """The records of one run, and which part of the time each rank was stopped."""
    command = [sys.executable, WORKER, *contender, "--shares", scenario["shares"], "--seconds", str(seconds)]
    command += ["--settle-s", str(seconds / 4), "--epoch-samples", str(scenario.get("epoch_samples", 0))]
    start = cluster.processes if contender[0] in ("ddp", "post-local") else cluster.horovodrun
    staller = Staller(cluster, scenario["stalls"])
    with staller if scenario["stalls"] else contextlib.nullcontext():
        records = records_of(start(command, timeout_s=300), what=contender[0], ranks=len(cluster.ranks))
    window = window_of(records)
    return records, [staller.stopped(rank, window) for rank in range(len(records))]


def _alone(cluster: Cluster, shares: str) -> list[float]:
    rates = []
    for rank in range(len(cluster.ranks)):
        command = [sys.executable, WORKER, "alone", "--rank", str(rank), "--shares", shares, "--seconds", "8"]
        finished = cluster.processes([*command, "--settle-s", "2"], timeout_s=120, ranks=[rank])
        rates += rates_of(records_of(finished, what=f"rank {rank} alone", ranks=1))
    return rates


def _at_once(cluster: Cluster, shares: str) -> list[float]:
    """The rates of ranks that all train at once and exchange nothing: what they take from each other by being there."""
    command = [sys.executable, WORKER, "alone", "--shares", shares, "--seconds", "16", "--settle-s", "4"]
    finished = cluster.processes(command, timeout_s=120)
    return rates_of(records_of(finished, what="at once", ranks=len(cluster.ranks)))


def _scenario(
    name: str, scenario: Row, rows: list[Row], checks: list[Row], *, repeats: int, seconds: float,
    say: Callable[[str], None],
) -> None:
    found: dict[str, list[Row]] = {}
    with Cluster(scenario["ranks"], link_mbit=scenario["link_mbit"]) as cluster:
        say(cluster.describe())
        for _ in range(repeats):
            alone = _alone(cluster, scenario["shares"])
            say(f"  {'each rank alone, summed':24s} {sum(alone):7.1f} samples/s  "
                + " ".join(f"{rate:.0f}" for rate in alone))
            at_once = _at_once(cluster, scenario["shares"])
            say(f"  {'all at once, no exchange':24s} {sum(at_once):7.1f} samples/s  "
                + " ".join(f"{rate:.0f}" for rate in at_once) + f"  {sum(at_once) / sum(alone):.2f} of that")
            for title, contender in CONTENDERS.items():
                records, stopped = _run(cluster, contender, seconds=seconds, scenario=scenario)
                rates = rates_of(records)
                running = [(1 - part) * rate for part, rate in zip(stopped, alone, strict=True)]
                kept = [rate / could for rate, could in zip(rates, running, strict=True)]
                losses = records[0]["losses"]
                found.setdefault(title, []).append({"losses": losses, "of_alone": sum(rates) / sum(alone),
                                                    "kept": sum(rates) / sum(running)})
                say(f"  {title:24s} {sum(rates):7.1f} samples/s  " + " ".join(f"{rate:.0f}" for rate in rates)
                    + f"  of alone, while not stopped {' '.join(f'{part:.2f}' for part in kept)}"
                    + f"  loss after {losses[-1][0]:.0f} s {losses[-1][1]:.3f}"
                    + (f"  merges {records[0]['merges']}, waits {[record['waits'] for record in records]}"
                       if "merges" in records[0] else ""))
    times = {title: [reached_s(each["losses"], base["losses"][-1][1])
                     for each, base in zip(runs, found[BASE], strict=True)]
             for title, runs in found.items()}
    for title, runs in found.items():
        reached = statistics.median(times[title])
        rows.append({"where": name, "name": title, "of_alone": statistics.median(run["of_alone"] for run in runs),
                     "to_loss_s": reached, "losses": runs[-1]["losses"]})
        say(f"  {title:24s} reaches plain Horovod's last loss after {reached:6.1f} s")
    faster = statistics.median(a / b for a, b in zip(times[LOCAL], times[BASE], strict=True))
    than_ours = statistics.median(a / b for a, b in zip(times[LOCAL], times[OURS], strict=True))
    if scenario["stalls"]:
        kept = statistics.median(run["kept"] for run in found[LOCAL])
        checks.append(check(f"{name}: throughput of ranks while not stopped / alone", kept, 0.95))
    if name == "stalls":
        checks.append(check("stalls: time to plain Horovod's loss / its time", faster, 1 / 3, at_most=True))
        checks.append(check("stalls: time to that loss / our synchronous strategy's", than_ours, 0.8, at_most=True))
    elif name == "slow":
        of_alone = statistics.median(run["of_alone"] for run in found[LOCAL])
        checks.append(check("slow: throughput / all ranks alone", of_alone, 0.95))
    elif name == "link":
        checks.append(check("link: plain Horovod's time to its loss / ours", 1 / faster, 3.0))
