"""`ci/bench adapt`: how fast the plan finds the best split, finds it again when a rank slows down, and then rests."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from contest import Contender, Scenario, check, launch
from emulation import Cluster

from hvd_hetero.policy.partition import split, step_time_s
from hvd_hetero.policy.speed import Observation, SpeedModel, fit

CONSTANT, AFTER = 300, 80  # steps at constant speed, and after rank 1 has become twice as slow
SLOW_RANK, SLOW_CORES = 1, 0.2
FOUND, FOUND_AGAIN = 20, 30


def models_of(records: list[dict[str, Any]], first: int, last: int) -> list[SpeedModel]:
    """Every rank's speed, from all its steps in [first, last): more than the balancer itself could know."""
    return [
        fit([Observation(samples=round(n), compute_s=s) for n, s in record["computes"][first:last] if n and s])
        for record in records
    ]


class Found(NamedTuple):
    """What one repeat found."""

    early: float
    """The compute time of a step with the plan after `FOUND` steps, divided by that with the best split."""
    again: float
    """The median step time, from `FOUND_AGAIN` steps after the slowdown on, divided by that with the best shares."""
    plans: int
    """The number of plans made in `CONSTANT` steps at constant speed."""


def adapt(scenario: Scenario, *, repeats: int, picture: Path, say: Callable[[str], None]) -> list[dict[str, Any]]:
    """The checks, by medians of the repeats; writes a picture of the last one's shares and step time over steps."""
    found = []
    for repeat in range(repeats):
        found.append(_once(scenario, picture=picture, say=say if repeat == 0 else lambda line: None))
        early, again, plans = found[-1]
        turn = f"repeat {repeat + 1}/{repeats}"
        say(f"{turn}: {early:.3f} after {FOUND} steps, {again:.3f} after the slowdown, {plans} plans")
    say(f"picture: {picture}")
    return [
        check(f"compute time with the plan after {FOUND} steps / with the best split",
              statistics.median(each.early for each in found), 1.05, at_most=True),
        check(f"step time {FOUND_AGAIN} steps after the slowdown / with the best shares",
              statistics.median(each.again for each in found), 1.10, at_most=True),
        check(f"plans in {CONSTANT} steps at constant speed, at most", max(each.plans for each in found), 3,
              at_most=True),
    ]  # fmt: skip


def _once(scenario: Scenario, *, picture: Path, say: Callable[[str], None]) -> Found:
    run = Contender(name="hvd_hetero", arguments=("hetero", "--every-step"), warmup=0, steps=CONSTANT + AFTER)
    slow = ["--slow-at", str(CONSTANT), "--slow-rank", str(SLOW_RANK), "--slow-cores", str(SLOW_CORES)]
    with Cluster(scenario.ranks, link_mbit=scenario.link_mbit) as cluster:
        say(cluster.describe())
        say(f"{CONSTANT} steps from equal shares, then rank {SLOW_RANK} at {SLOW_CORES} cores, {AFTER} steps more")
        records = launch(cluster, scenario, run, quick=False, extra=slow)
        whole = sum(scenario.shares)
        before = models_of(records, 5, CONSTANT)
        after = models_of(records, CONSTANT + 3, CONSTANT + AFTER)
        best, best_after = split(before, whole), split(after, whole)
        say(f"best split {':'.join(map(str, best))}, after the slowdown {':'.join(map(str, best_after))}")
        cluster.set_cores(SLOW_RANK, SLOW_CORES)
        fixed = Contender(name="best, fixed", arguments=("hetero", "--fixed", "--every-step"), warmup=10, steps=50)
        slowed = replace(scenario, shares=best_after)
        best_s = statistics.median(launch(cluster, slowed, fixed, quick=False)[0]["times_s"][10:])
    times, shares = records[0]["times_s"], [tuple(each) for each in records[0]["all_shares"]]
    settled_s = statistics.median(times[CONSTANT + FOUND_AGAIN :])
    plans = sum(a != b for a, b in zip(shares[:CONSTANT], shares[1:CONSTANT], strict=False))
    _draw(picture, times, shares)
    return Found(step_time_s(before, shares[FOUND]) / step_time_s(before, best), settled_s / best_s, plans)


def _draw(picture: Path, times: list[float], shares: list[tuple[int, ...]]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (upper, lower) = plt.subplots(2, 1, sharex=True, figsize=(9, 6))
    for rank in range(len(shares[0])):
        upper.step(range(len(shares)), [each[rank] for each in shares], where="post", label=f"rank {rank}")
    upper.set_ylabel("share, samples")
    upper.legend(ncols=4, fontsize=8)
    lower.plot([1e3 * seconds for seconds in times], linewidth=0.8)
    lower.set_ylabel("step, ms")
    lower.set_xlabel("step")
    lower.set_ylim(0)
    for axes in (upper, lower):
        axes.axvline(CONSTANT, color="grey", linestyle="--", linewidth=0.8)
    upper.set_title(f"From equal shares; at step {CONSTANT} rank {SLOW_RANK} becomes twice as slow", fontsize=10)
    figure.tight_layout()
    figure.savefig(picture, dpi=110)
