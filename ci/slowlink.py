"""`ci/bench slowlink`: sums and training over slow links, by every algorithm and codec."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from contest import MIXED_RANKS, check, records_of
from emulation import Cluster, EmulatedRank

Row = dict[str, Any]
HERE = Path(__file__).resolve().parent
ALLREDUCE, TRAINING = str(HERE / "allreduce_worker.py"), str(HERE / "bench_worker.py")
SIZES = {4096: "4 kB", 1 << 20: "1 MB", 16 << 20: "16 MB"}
BASE, OURS = "plain Horovod", "hvd_hetero"

# Equal ranks, so that sums are limited by links; training runs on the mixed ones of `ci/bench mixed`.
EVEN = tuple(EmulatedRank(cores=1.0, node=node) for node in (0, 0, 1, 1))
THREE = tuple(EmulatedRank(cores=1.0, node=node) for node in (0, 0, 1, 1, 2))
SHARES = "32:16:8:8"  # of the global batch; contenders find theirs, or take equal ones
# About 4 million parameters.
MODEL = ("--width", "400", "--layers", "2")
TRAINED = {
    "plain Horovod": ("horovod",),
    "plain Horovod, fp16": ("horovod", "--codec", "fp16"),
    "PyTorch DDP": ("ddp",),
    "DDP, fp16 hook": ("ddp", "--codec", "fp16"),
    "DDP, PowerSGD hook": ("ddp", "--codec", "powersgd"),
    "hvd_hetero": ("hetero", "--topology", "auto"),
    "hvd_hetero, fp16": ("hetero", "--topology", "auto", "--codec", "fp16"),
    "hvd_hetero, int8": ("hetero", "--topology", "auto", "--codec", "int8"),
    "hvd_hetero, int4": ("hetero", "--topology", "auto", "--codec", "int4"),
    "hvd_hetero, top-k": ("hetero", "--topology", "auto", "--codec", "topk"),
    "hvd_hetero, PowerSGD": ("hetero", "--topology", "auto", "--codec", "powersgd"),
}
# What the bar of training compares, besides losses: `--parts hooks`.
COMPARED = ("DDP, fp16 hook", "DDP, PowerSGD hook", "hvd_hetero, int8", "hvd_hetero, int4")
LOSS_STEPS, LOSS_SHARES = 80, "4:4:4:4"  # after which losses are compared, and of what batch: small, to be quick
DENSE_STEPS = 20  # of the codecs that want some first


def sums(
    ranks: Sequence[EmulatedRank],
    *,
    link_mbit: float | Sequence[float] | None,
    network: str = "auto",
    repeats: int,
    quick: bool,
    ways: str = "",
    say: Callable[[str], None],
) -> dict[str, Any]:
    """Seconds of every way at every size, and what `auto` said, lists over repeats: {"times", "choices"}."""
    times: dict[str, dict[int, list[float]]] = {}
    choices: list[dict[str, list[dict[str, Any]]]] = []
    counts = "5,3,2" if quick else "20,8,3"
    with Cluster(ranks, link_mbit=link_mbit, network=network) as cluster:
        say(cluster.describe())
        for _ in range(repeats):
            for contender in ("horovod", "ddp", "hetero"):
                command = [sys.executable, ALLREDUCE, contender, "--repetitions", counts]
                command += ["--ways", ways] if contender == "hetero" else []
                start = cluster.processes if contender == "ddp" else cluster.horovodrun
                record = records_of(start(command, timeout_s=400), what=contender, ranks=len(ranks))[0]
                for way, of_size in record["times_s"].items():
                    for size, seconds in of_size.items():
                        times.setdefault(way, {}).setdefault(int(size), []).append(seconds)
                if "choices" in record:
                    choices.append(record["choices"])
                    say(f"  probed in {record['probe_s']:.1f} s: nodes {record['nodes']}")
    return {"times": times, "choices": choices}


def ratio(times: dict[str, dict[int, list[float]]], way: str, size: int, base: str = BASE) -> float:
    """How many times faster than `base`: the median over repeats of the ratio within each."""
    return statistics.median(b / a for a, b in zip(times[way][size], times[base][size], strict=True))


def show_sums(result: dict[str, Any], say: Callable[[str], None]) -> None:
    times = result["times"]
    say(f"  {'':34s}" + "".join(f"{SIZES[size] + ', ms':>12s}{'x':>6s}" for size in SIZES))
    for way in times:
        cells = "".join(
            f"{1e3 * statistics.median(times[way][size]):12.1f}{ratio(times, way, size):6.2f}" for size in SIZES
        )
        say(f"  {way:34s}{cells}")
    for bucket, told in result["choices"][-1].items():
        for choice in told:
            say(f"  {bucket}: {choice['reason']}")


def predictions(result: dict[str, Any], size: int) -> list[float]:
    """Measured over predicted seconds, for each bucket of `size` that `auto` chose a way for: the median over launches
    of the ratio within each, since a prediction is for the job that made it."""
    found: dict[str, list[float]] = {}
    for launch, choices in enumerate(result["choices"]):
        for bucket, told in choices.items():
            title, _, length = bucket.rpartition(" ")
            if int(length) == size and told:
                measured = result["times"][title][size][launch]
                found.setdefault(title, []).append(measured / told[0]["predicted_s"])
    return [statistics.median(ratios) for ratios in found.values()]


def train(cluster: Cluster, name: str, *, steps: int, warmup: int, validate: bool) -> dict[str, Any]:
    """Rank 0's record of one contender's run."""
    command = [sys.executable, TRAINING, *TRAINED[name], *MODEL, "--dense-steps", str(DENSE_STEPS)]
    command += ["--warmup", str(warmup), "--steps", str(steps), "--shares", LOSS_SHARES if validate else SHARES]
    command += ["--validate"] if validate else []
    start = cluster.processes if name.startswith(("DDP", "PyTorch")) else cluster.horovodrun
    return records_of(start(command, timeout_s=550), what=name, ranks=len(cluster.ranks))[0]


def slowlink(
    *, repeats: int, quick: bool, parts: Sequence[str], say: Callable[[str], None]
) -> tuple[list[Row], list[Row]]:
    """The rows of all tables, and the checks."""
    rows: list[Row] = []
    checks: list[Row] = []
    for part, table in (("sums", _slow_sums), ("quick", _quick_sums)):
        if part in parts:
            table(rows, checks, repeats=repeats, quick=quick, say=say)
    if "three" in parts:
        say("\nSums, three nodes (2 + 2 + 1 ranks), the third behind 100 Mbit/s, the others at 1 Gbit/s")
        result = sums(THREE, link_mbit=[1000, 1000, 100], repeats=1, quick=True, say=say)
        _keep(rows, "three nodes, one slow link", result, say)
    for part, names in (("training", tuple(TRAINED)), ("hooks", COMPARED)):
        if part in parts:
            _training(rows, checks, names=names, repeats=repeats, quick=quick, say=say)
    return rows, checks


def _keep(rows: list[Row], title: str, result: dict[str, Any], say: Callable[[str], None]) -> None:
    show_sums(result, say)
    for way, of_size in result["times"].items():
        for size, seconds in of_size.items():
            rows.append({"where": title, "name": way, "bytes": size, "ms": 1e3 * statistics.median(seconds),
                         "of_plain_horovod": ratio(result["times"], way, size)})


def _slow_sums(
    rows: list[Row], checks: list[Row], *, repeats: int, quick: bool, say: Callable[[str], None]
) -> None:
    say("\nSums, two nodes of two ranks joined at 100 Mbit/s (x: times faster than plain Horovod)")
    result = sums(EVEN, link_mbit=100, repeats=repeats, quick=quick, say=say)
    _keep(rows, "100 Mbit/s", result, say)
    times, large = result["times"], 16 << 20
    for title, ways, bar in (
        ("two levels", ("flat", "rails", "leader"), 1.35),  # flat: in two levels within Horovod's Gloo
        ("fp16 between nodes", ("flat, fp16", "rails, fp16 between"), 2.6),
        ("int8 between nodes", ("rails, int8 between", "leader, int8 between"), 4.0),
        ("PowerSGD or top-k between nodes", ("rails, top-k 1 % between", "leader, PowerSGD rank 4 between"), 8.0),
    ):
        best = max(ways, key=lambda way: ratio(times, way, large))
        checks.append(check(f"100 Mbit/s, 16 MB: {title} ({best}) / plain Horovod", ratio(times, best, large), bar))


def _quick_sums(
    rows: list[Row], checks: list[Row], *, repeats: int, quick: bool, say: Callable[[str], None]
) -> None:
    for where, options in (
        ("1 Gbit/s", {"link_mbit": 1000.0}),
        ("one host", {"link_mbit": None, "network": "loopback"}),
    ):
        say(f"\nSums, {where}")
        ranks = EVEN if where == "1 Gbit/s" else tuple(EmulatedRank(cores=1.0) for _ in EVEN)
        result = sums(ranks, repeats=repeats, quick=quick, say=say, **options)  # type: ignore[arg-type]
        _keep(rows, where, result, say)
        for size, title in SIZES.items():
            checks.append(check(f"{where}, {title}: auto", ratio(result["times"], "auto", size), 0.97))
            if size >= 1 << 20:
                for over in predictions(result, size):
                    name = f"{where}, {title}: measured / predicted - 1"
                    checks.append(check(name, abs(over - 1), 0.25, at_most=True))


def _training(
    rows: list[Row], checks: list[Row], *, names: Sequence[str], repeats: int, quick: bool, say: Callable[[str], None]
) -> None:
    say("\nTraining, about 4 M parameters, ranks of 0.8 and 0.4, 0.2 and 0.2 cores joined at 100 Mbit/s")
    speed: dict[str, list[float]] = {}
    with Cluster(MIXED_RANKS, link_mbit=100) as cluster:
        for repeat in range(repeats):
            for name in names:
                adapts = name.startswith("hvd_hetero")
                warmup = 40 if adapts else DENSE_STEPS + 5 if "PowerSGD" in name else 3
                record = train(cluster, name, steps=4 if quick else 8, warmup=warmup, validate=False)
                speed.setdefault(name, []).append(record["samples_per_s"])
                say(f"  repeat {repeat + 1}/{repeats}: {name:24s} {record['samples_per_s']:7.1f} samples/s")
    losses: dict[str, float] = {}
    with Cluster(tuple(EmulatedRank(cores=0.5) for _ in MIXED_RANKS), network="loopback") as cluster:
        for name in dict.fromkeys((BASE, OURS, *names)):
            if name in (BASE, "DDP, PowerSGD hook") or name.startswith(OURS):
                record = train(cluster, name, steps=LOSS_STEPS, warmup=0, validate=True)
                losses[name] = record["validation_loss"]
                say(f"  {name:24s} validation loss after {LOSS_STEPS} steps {losses[name]:.4f}")
    for name, values in speed.items():
        rows.append({"where": "training", "name": name, "samples_per_s": statistics.median(values),
                     "validation_loss": losses.get(name)})
    hooks = [name for name in names if name.startswith("DDP")]
    # Each against fp32 on the same batches: ours deals samples in another order than DistributedSampler.
    over = {name: loss / losses[OURS if name.startswith(OURS) else BASE] - 1 for name, loss in losses.items()}
    near = {name: 0.01 if "int8" in name else 0.005 for name in names if name.startswith(OURS)}
    for name in near:
        say(f"  {name:24s} loss over fp32's {over[name]:+.1%}, of {near[name]:.1%} allowed")
    good = [name for name in near if over[name] <= near[name]]
    checks.append(check("training: codecs whose loss is as good as allowed", len(good), 1))
    if not good:
        return
    best = max(good, key=lambda name: statistics.median(speed[name]))
    as_good = [hook for hook in hooks if over.get(hook, 0.0) <= 0.005]  # fp16 loses nothing to see
    for title, others in (("the best of DDP's hooks", hooks), ("the best of those at such a loss", as_good)):
        gains = [speed[best][i] / max(speed[hook][i] for hook in others) for i in range(repeats)]
        checks.append(check(f"training: {best} / {title}", statistics.median(gains), 1.5))
