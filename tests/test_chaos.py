"""`ci/chaos` and `ci/soak`: one short job that is disturbed, and whether the checks of such jobs see what is wrong."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.repair import has_edit

CI = Path(__file__).resolve().parent.parent / "ci"
sys.path.insert(0, str(CI))

from chaos_diary import SAMPLES, wrong_use  # noqa: E402
from chaos_report import Plan, Verdict, beginnings, judge, plans, recoveries_s, summary  # noqa: E402
from emulation import network  # noqa: E402
from held import Held, growth  # noqa: E402


@pytest.mark.slow
@pytest.mark.horovod
@pytest.mark.skipif(not has_edit("spared_hosts"), reason="this Horovod gives up hosts for one dead rank")
@pytest.mark.skipif(bool(network.namespaces_missing()), reason=network.namespaces_missing() or "-")
def test_a_job_of_which_a_rank_is_killed_loses_nothing() -> None:
    command = [sys.executable, str(CI / "chaos"), "--first", "2", "--seeds", "1", "--faults", "1", "--longest", "3"]
    environment = {**os.environ, "HVD_HETERO_BENCH": "1"}  # it is in its virtual environment
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, env=environment)
    assert done.returncode == 0 and "seed 2: nothing lost" in done.stdout, done.stdout + done.stderr[-6000:]
    assert "kill rank" in done.stdout and "1 recoveries from a kill" in done.stdout


def test_samples_lost_or_doubled_are_seen() -> None:
    every = list(range(SAMPLES))
    assert wrong_use(1, [(1, every[:100]), (1, every[100:]), (0, every)]) == []
    assert wrong_use(1, [(1, every[1:]), (1, every[5:7])]) == ["epoch 1: 1 samples lost, 2 doubled"]


def line(kind: str, t_s: float, **fields: object) -> dict:
    return {"kind": kind, "t_s": t_s, "pid": 1, "rank": 0, "size": 2, "host": "node0", **fields}


def test_a_job_that_went_behind_its_last_commit_is_seen() -> None:
    entries = [line("ranks", 0, batch=0), line("commit", 1, batch=5), line("ranks", 2, batch=5)]
    assert beginnings(entries) == []
    assert beginnings([*entries, line("commit", 3, batch=10), line("ranks", 4, batch=0)]) == [
        "began anew at batch 0 after a commit at 10"
    ]


def test_recoveries_are_timed_to_the_first_commit_of_other_ranks() -> None:
    entries = [line("ranks", 0, batch=0), line("commit", 9, batch=5), line("ranks", 12, batch=5),
               line("commit", 13.5, batch=10)]  # fmt: skip
    assert recoveries_s(entries, [10.0]) == [3.5]
    assert recoveries_s(entries, [14.0]) == [], "not over yet"


def test_a_plan_is_good_when_its_slowest_rank_is_nearly_as_fast_as_could_be() -> None:
    def steps(batch: int, shares: list[int]) -> list[dict]:
        said = {"batch": batch, "shares": shares}
        return [line("step", batch, **said, rank=rank, sample_s=(1.0, 2.0)[rank]) for rank in (1, 0)]

    entries = [line("ranks", 0, batch=0), *steps(1, [12, 12]), *steps(2, [12, 12]), *steps(3, [16, 8])]
    assert plans(entries) == [(3, True)]
    assert plans(entries[:-2]) == [(2, False)], "the job ended before"
    assert plans(entries, slowed=[(1.5, 2.5)]) == [], "a rank was slower than it says"
    assert plans(entries, slowed=[(3.5, 4.0)]) == [(3, True)], "the plan was good before"


def test_a_plan_that_was_never_good_is_late() -> None:
    def told(*found: tuple[int, bool]) -> str:
        verdict = Verdict(problems=(), recoveries_s=(), plans=tuple(Plan(steps, good=good) for steps, good in found))
        return summary([verdict])

    assert told((2, True), (500, False)).endswith("after 2 steps (worst 2); 1 of 2 not within 30")
    assert told((2, True), (4, False)).endswith("after 2 steps (worst 2); 0 of 1 not within 30"), "too short to tell"
    assert told((40, True), (500, False)).endswith("2 of 2 not within 30")
    assert told((500, False)).endswith("never; 1 of 1 not within 30")


@pytest.mark.parametrize(("result", "problem"), [
    ({}, None),
    ({"wrong": ["epoch 3: 1 samples lost, 0 doubled"]}, "epoch 3"),
    ({"losses": [1.0, 0.5, 1.2]}, "loss from 0.500 to 1.200"),
    ({"alike": False}, "different parameters"),
    ({"off": 0.1}, "off those of one process"),
])
def test_what_is_wrong_with_a_result_is_a_problem(tmp_path: Path, result: dict, problem: str | None) -> None:
    whole = {"alike": True, "wrong": [], "losses": [1.0, 0.5, 0.4], "epochs": 3, **result}
    (tmp_path / "result.json").write_text(json.dumps(whole))
    found = judge(tmp_path, ended="", output="", left=()).problems
    assert [text for text in found if problem is None or problem not in text] == [] and bool(found) == bool(problem)


def test_a_job_that_hangs_says_nothing_or_leaves_processes_has_problems(tmp_path: Path) -> None:
    found = judge(tmp_path, ended="hangs", output="x: DivergedError: y", left=(7,)).problems
    assert found == ("hangs", "no result", "a rank diverged: x: DivergedError: y", "processes left behind: 7")


def test_what_grows_is_seen() -> None:
    times = [float(t) for t in range(0, 600, 5)]
    flat = Held(name="rank 7", t_s=times, mib=[300.0] * len(times), files=[20] * len(times))
    leak = Held(name="launcher 8", t_s=times, mib=[300.0 + t / 10 for t in times], files=[20] * len(times))
    files = Held(name="rank 9", t_s=times, mib=[300.0] * len(times), files=[20 + int(t / 20) for t in times])
    assert growth([flat], least_s=300) == []
    assert [text.split(",")[0] for text in growth([flat, leak, files], least_s=300)] == [
        "launcher 8", "rank 9"
    ]  # fmt: skip
    assert growth([flat], least_s=1000) == ["no rank lived long enough to be judged"]
    assert growth([leak], least_s=300)[1:] == ["no rank lived long enough to be judged"]
