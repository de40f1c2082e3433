"""`ci/bench study`: does delay compensation help, and is local SGD's final loss that of synchronous training?

    compensation    plain SGD and late merges, over a grid of lambda
    loss            local SGD on uneven ranks against synchronous training after the same samples; has the bar
    causes          the same on characters, with one thing changed at a time, and on three times the steps
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from contest import check
from training import EVEN, Task, Way, characters, digits, is_local, together

import hvd_hetero.torch as hvd

LAMBDAS, SEEDS = (0.0, 0.04, 200.0, 2000.0), (0, 1, 2)  # 0.04 is DC-ASGD's own; 0 comes first
BAR = 1.01  # local SGD's final validation loss over that of synchronous training, at most
Row, Say = dict[str, Any], Callable[[str], None]
DEFAULT = "default: rounds of 2"
EIGHT = hvd.LocalSGD(round_steps=8)
MILD = hvd.Outer(learning_rate=0.7, momentum=0.5, nesterov=True)
DILOCO = hvd.Outer(learning_rate=0.7, momentum=0.9, nesterov=True)
RULES = {DEFAULT: Way(), "rounds of 8": Way(rule=EIGHT)}
LONGER = RULES | {
    "default, own second moments": Way(rule=hvd.LocalSGD(second_moments="own")),
    "rounds of 4": Way(rule=hvd.LocalSGD(round_steps=4)),
    "rounds of 1": Way(rule=hvd.LocalSGD(round_steps=1)),
    "rounds of 4, outer Nesterov, 0.7 and 0.5": Way(rule=hvd.LocalSGD(round_steps=4, outer=MILD)),
}
CAUSES = LONGER | {
    "equal ranks in turn": Way(rule=EIGHT, shares=EVEN, uneven=False),
    # Second moments are estimated from first ones, which have to be there.
    "first moments reset, own second moments": Way(rule=replace(EIGHT, second_moments="own"), reset=True),
    "outer Nesterov, 0.7 and 0.5": Way(rule=replace(EIGHT, outer=MILD)),
    "outer Nesterov, 0.7 and 0.9": Way(rule=replace(EIGHT, outer=DILOCO)),
}


def warmed_up(steps: int) -> dict[str, Way]:
    """Ways with a longer warm-up, in parts of so many steps."""
    third, half = 3 * steps // 10, steps // 2
    return {
        "warm-up 30 %": Way(rule=replace(EIGHT, warmup_steps=third)),
        "warm-up 50 %": Way(rule=replace(EIGHT, warmup_steps=half)),
        "warm-up 30 %, rounds of 4, outer Nesterov, 0.7 and 0.5": Way(
            rule=hvd.LocalSGD(warmup_steps=third, round_steps=4, outer=MILD)),
    }


def mean(values: Sequence[float]) -> str:
    """Mean and standard deviation, as text; where a run diverged, how many did."""
    if wild := sum(not math.isfinite(value) for value in values):
        return f"{wild} of {len(values)} diverged"
    return f"{statistics.mean(values):.4f} ± {statistics.stdev(values):.4f}" if len(values) > 1 else f"{values[0]:.4f}"


def compensation(tasks: Sequence[Task], seeds: Sequence[int], strengths: Sequence[float], say: Say) -> list[Row]:
    """Plain SGD on even ranks, with merges one whole round late; over the same seeds for each lambda."""
    rows: list[Row] = []
    say("\n| task | steps late | lambda | final validation loss | minus lambda 0, pairwise |\n|---|---|---|---|---|")
    for task in tasks:
        sync = [together(task, "SGD", seed) for seed in seeds]
        say(f"| {task.name} | synchronous | | {mean(sync)} | |")
        for late in (4, 8):
            plain: list[float] = []
            for steps, strength in [(1, 0.0), *((late, strength) for strength in strengths)]:
                rule = hvd.LocalSGD(round_steps=late, compensation=strength, drift_limit=None)
                way = Way(rule=rule, shares=EVEN, uneven=False, late=steps)
                losses = [is_local(task, way, "SGD", seed)[0] for seed in seeds]
                plain = losses if steps == late and strength == 0.0 else plain
                less = mean([a - b for a, b in zip(losses, plain, strict=True)]) if strength else ""
                of = f"1, rounds of {late}" if steps == 1 else str(late)
                say(f"| {task.name} | {of} | {strength:g} | {mean(losses)} | {less} |")
                rows.append({"task": task.name, "round_steps": late, "steps_late": steps, "lambda": strength,
                             "losses": losses, "synchronous": sync})
    return rows


def final_loss(tasks: Sequence[Task], seeds: Sequence[int], ways: dict[str, Way], say: Say) -> list[Row]:
    """Synchronous training against ways of local SGD, after the same samples in the same order."""
    rows: list[Row] = []
    say("\n| task, steps | inside | way | synchronous | local SGD | ratio | of each seed | merges | drift / noise |\n"
        "|---|---|---|---|---|---|---|---|---|")
    for task in tasks:
        for inner in ("SGD, momentum 0.9", "AdamW"):
            sync = [together(task, inner, seed) for seed in seeds]
            for name, way in ways.items():
                runs = [is_local(task, way, inner, seed) for seed in seeds]
                losses, merges = [loss for loss, _ in runs], [one for _, merges in runs for one in merges]
                ratio = statistics.mean(losses) / statistics.mean(sync)
                ratios = " ".join(f"{a / b:.3f}" for a, b in zip(losses, sync, strict=True))
                drift = statistics.median(one["drift"] / one["noise"] for one in merges if one["noise"] > 0)
                say(f"| {task.name}, {task.steps} | {inner} | {name} | {mean(sync)} | {mean(losses)} | {ratio:.3f} | "
                    f"{ratios} | {len(merges) / len(seeds):.0f} | {drift:.2f} |")
                rows.append({"task": task.name, "steps": task.steps, "inside": inner, "way": name, "synchronous": sync,
                             "losses": losses, "ratio": ratio, "merges": len(merges) / len(seeds),
                             "drift_over_noise": drift, "shortest_round": min(one["longest"] for one in merges)})
    return rows


def study(*, quick: bool, parts: Sequence[str], say: Say) -> tuple[list[Row], list[Row]]:
    """The rows of all tables, and the checks: of what `strategy="local"` gives, where to be better is no failure."""
    torch.set_num_threads(1)
    tasks, seeds = [digits()] if quick else [digits(), characters()], SEEDS[:1] if quick else SEEDS
    rows: list[Row] = []
    checks: list[Row] = []
    if "compensation" in parts:
        rows += compensation(tasks, seeds, LAMBDAS[::2] if quick else LAMBDAS, say)
    if "loss" in parts:
        found = final_loss(tasks, seeds, RULES, say)
        rows += found
        checks = [check(f"local / synchronous, {row['task']}, {row['inside']}", row["ratio"], BAR, at_most=True)
                  for row in found if row["way"] == DEFAULT]
    if "causes" in parts:
        task, longer = tasks[-1], replace(tasks[-1], steps=3 * tasks[-1].steps)
        rows += final_loss([task], seeds, CAUSES | warmed_up(task.steps), say)
        rows += final_loss([longer], seeds, LONGER | warmed_up(longer.steps), say)
    return rows, checks
