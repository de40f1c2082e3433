"""What became of a disturbed job: the checks that it has to hold, out of what its processes wrote."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from chaos_diary import COMMIT_EVERY

JUMP = 0.35  # a loss may rise by so much from commit to commit: noise of the batches, and no lost training
SLACK = 1.10  # of the best split's step time
SOON = 30  # steps in which a plan should be that good
MOST_OFF = 1e-7  # of weights in fp64 from those of one process, after some hundreds of steps


class Plan(NamedTuple):
    """Of a set of ranks."""

    steps: int  # until it was good, or until the ranks changed again
    good: bool


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """Of one job."""

    problems: tuple[str, ...]  # none: all held
    recoveries_s: tuple[float, ...]  # from the death of a rank to the next commit
    plans: tuple[Plan, ...]  # after each change of the ranks


def read_diaries(folder: Path, *, tail_bytes: int | None = None) -> list[dict[str, Any]]:
    """What the processes wrote, in the order of time; `tail_bytes`: only the last of each. A process may have been
    killed within a line."""
    found = []
    for path in folder.glob("process-*.jsonl"):
        content = path.read_bytes() if tail_bytes is None else _tail(path, tail_bytes)
        for line in content.decode(errors="replace").splitlines():
            try:
                found.append(json.loads(line))
            except ValueError:
                continue
    return sorted(found, key=lambda entry: entry["t_s"])


def _tail(path: Path, count: int) -> bytes:
    with open(path, "rb") as file:
        file.seek(max(0, file.seek(0, 2) - count))
        return file.read()


def jumps(losses: Sequence[float]) -> list[str]:
    """Where the loss jumps up between commits, as it does where training was lost."""
    pairs = enumerate(zip(losses, losses[1:], strict=False))
    return [f"loss from {a:.3f} to {b:.3f} at commit {at + 1}" for at, (a, b) in pairs if not b < a + JUMP]


def best_step_s(costs: Sequence[float], whole: int) -> float:
    """The step time of the best split of a batch over ranks with these seconds per sample."""
    shares = [0] * len(costs)
    for _ in range(whole):
        rank = min(range(len(costs)), key=lambda r: (shares[r] + 1) * costs[r])
        shares[rank] += 1
    return max(share * cost for share, cost in zip(shares, costs, strict=True))


def plans(entries: Sequence[dict[str, Any]], slowed: Sequence[tuple[float, float]] = ()) -> list[Plan]:
    """For each set of ranks, the steps until the plan was good. `slowed`: from when to when a rank was made slower than
    it says; plans looked for meanwhile are good ones for other speeds, and are not judged."""
    found: list[Plan] = []
    costs: dict[int, float] = {}
    first = None  # the batch at which a plan began to be looked for
    for entry in entries:
        if entry["kind"] == "ranks" and entry["rank"] == 0:
            costs, first = {}, entry["batch"]
            found.append(Plan(0, good=False))
        elif first is not None and any(a <= entry["t_s"] <= b for a, b in slowed):
            first = None
            found.pop()
        elif entry["kind"] == "step" and first is not None and len(entry["shares"]) == entry["size"]:
            costs[entry["rank"]] = entry["sample_s"]
            if entry["rank"] == 0 and len(costs) == entry["size"]:
                by_rank = [costs[rank] for rank in range(entry["size"])]
                step_s = max(share * cost for share, cost in zip(entry["shares"], by_rank, strict=True))
                good = step_s <= SLACK * best_step_s(by_rank, sum(entry["shares"]))
                found[-1] = Plan(entry["batch"] - first, good=good)
                first = None if good else first
    return found


def recoveries_s(entries: Sequence[dict[str, Any]], kills: Sequence[float]) -> list[float]:
    """Seconds from each time at which a rank was killed to the first commit of other ranks after it."""
    found = []
    changes = [entry["t_s"] for entry in entries if entry["kind"] == "ranks"]
    commits = [entry["t_s"] for entry in entries if entry["kind"] == "commit"]
    for at in kills:
        change = next((t for t in changes if t > at), None)
        commit = next((t for t in commits if change is not None and t > change), None)
        if commit is not None:
            found.append(commit - at)
    return found


def beginnings(entries: Sequence[dict[str, Any]]) -> list[str]:
    """Where ranks came together behind the last commit: every process that had the job's state was gone. A commit that
    not all ranks have reached may be lost with those that have."""
    found, committed = [], 0
    for entry in entries:
        if entry["kind"] == "ranks" and entry["rank"] == 0:
            if entry["batch"] < committed - COMMIT_EVERY:
                found.append(f"began anew at batch {entry['batch']} after a commit at {committed}")
            committed = entry["batch"]
        elif entry["kind"] == "commit":
            committed = entry["batch"]
    return found


def judge(
    folder: Path,
    *,
    ended: str,
    output: str,
    left: Sequence[int],
    kills: Sequence[float] = (),
    slowed: Sequence[tuple[float, float]] = (),
) -> Verdict:
    """The verdict on a job. `ended`: "" where it ended by itself and well; `left`: processes left behind; `kills`: when
    ranks were killed; `slowed`: see `plans`."""
    problems = [ended] if ended else []
    entries = read_diaries(folder)
    problems += beginnings(entries)
    result_path = folder / "result.json"
    if result_path.exists():
        result = json.loads(result_path.read_text())
        problems += result.get("wrong", [])
        if not result.get("off", 0.0) <= MOST_OFF:
            problems.append(f"weights are {result['off']:.2g} off those of one process")
        problems += jumps(result["losses"])
        if not result["alike"]:
            problems.append("ranks ended with different parameters")
    else:
        problems.append("no result")
    problems += [f"a rank diverged: {line}" for line in output.splitlines() if "DivergedError" in line][:1]
    if left:
        problems.append(f"processes left behind: {', '.join(map(str, left))}")
    return Verdict(
        problems=tuple(problems),
        recoveries_s=tuple(recoveries_s(entries, kills)),
        plans=tuple(plans(entries, slowed)),
    )


def summary(verdicts: Sequence[Verdict]) -> str:
    """One line on all jobs."""
    recoveries = [s for verdict in verdicts for s in verdict.recoveries_s]
    # Where the ranks changed again early, nothing is known.
    looked = [plan for verdict in verdicts for plan in verdict.plans if plan.good or plan.steps > SOON]
    failed = sum(bool(verdict.problems) for verdict in verdicts)
    parts = [f"{len(verdicts)} jobs, {failed} with problems"]
    if recoveries:
        median, worst = statistics.median(recoveries), max(recoveries)
        parts.append(f"{len(recoveries)} recoveries from a kill in {median:.1f} s (worst {worst:.1f} s)")
    if looked:
        late, good = sum(plan.steps > SOON for plan in looked), [plan.steps for plan in looked if plan.good]
        when = f"after {statistics.median(good):.0f} steps (worst {max(good)})" if good else "never"
        parts.append(f"a plan within 10 % of the best {when}; {late} of {len(looked)} not within {SOON}")
    return "; ".join(parts)
