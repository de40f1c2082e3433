"""The programs of ci/bench, for seconds: what its ranks print is what its tables are made of."""

from __future__ import annotations

import random
import statistics
import sys
from dataclasses import replace
from pathlib import Path
from runpy import run_path

import pytest
from launch import horovodrun

CI = Path(__file__).resolve().parents[1] / "ci"
sys.path.insert(0, str(CI))

from contest import median_ratio, rate_of, rates_of, records_of  # noqa: E402

SHORT = ("--shares", "8:8", "--warmup", "2", "--steps", "4")


def records(program: str, *arguments: str, **env: str) -> list[dict]:
    """What each of two ranks measured."""
    found = records_of(horovodrun(2, CI / program, *arguments, **env), what=program, ranks=2)
    assert [record["rank"] for record in found] == [0, 1]
    return found


@pytest.mark.parametrize(
    ("program", "arguments"),
    [
        ("bench_worker.py", ("hetero", *SHORT)),
        pytest.param("bench_worker.py", ("horovod", *SHORT), marks=pytest.mark.slow),
        pytest.param(
            "bench_keras_worker.py", ("hetero", *SHORT, "--width", "16", "--layers", "1"), marks=pytest.mark.slow
        ),
    ],
)
def test_a_rank_says_how_fast_it_was_and_what_it_waited_for(program: str, arguments: tuple[str, ...]) -> None:
    for record in records(program, *arguments, KERAS_BACKEND="tensorflow"):
        assert record["samples_per_s"] == pytest.approx(16 / record["step_ms"] * 1e3, rel=0.01)
        if program == "bench_worker.py":
            assert len(record["ends_s"]) == len(record["samples"]) + 1 == 5
        if arguments[0] == "hetero":
            assert sum(record["shares"]) == 16
            assert len(record["waits_s"]) == len(record["busy_s"]) == 4


@pytest.mark.skipif(not (CI.parent / ".git").exists(), reason="no clone: there are no earlier revisions")
@pytest.mark.slow
@pytest.mark.parametrize("framework", ["torch", "keras"])
def test_two_versions_train_in_turn(framework: str, tmp_path: Path) -> None:
    versus = run_path(str(CI / "versus"))
    with pytest.raises(ValueError, match="expected one of this repository's. Received: no-such-revision"):
        versus["lay_out"]("no-such-revision", tmp_path)
    versus["lay_out"]("HEAD", tmp_path)
    small = ("--width", "16", "--layers", "1", "--shares", "8:8", "--blocks", "2")
    versions = {"torch": "alone", "keras": versus["BEFORE"]}  # both ways, in few launches
    small += ("--before", versions[framework])
    for record in records("versus_worker.py", str(tmp_path), "--framework", framework, *small):
        assert all(len(record[which][what]) == 2 for which in ("before", "now") for what in ("step_ms", "cpu_ms"))
        assert min(record["before"]["step_ms"] + record["now"]["step_ms"]) > 0


def test_ranks_apart_are_compared_while_all_of_them_train() -> None:
    def rank(begins: float, step_s: float, samples: list[int]) -> dict:
        return {"apart": True, "samples": samples, "ends_s": [begins + step_s * n for n in range(len(samples) + 1)]}

    early, late = rank(0.0, 1.0, [100, 100, 4, 4, 4]), rank(2.0, 0.5, [3, 3, 3, 3, 90, 90])
    assert rates_of([early, late]) == pytest.approx([4.0, (12 + 2 * 90) / 3])
    assert rate_of([early, late]) == pytest.approx(4.0 + 64.0)
    assert rates_of([early, rank(2.5, 2.0, [6])]) == pytest.approx([4.0, 3.0]), "a part of a step"
    with pytest.raises(RuntimeError, match="ended before another began"):
        rates_of([early, rank(5.0, 1.0, [1])])


def test_the_error_of_a_median_ratio_is_that_of_samples() -> None:
    draw, errors, claimed = random.Random(0), [], []
    for _ in range(300):
        drift = [draw.uniform(1.0, 2.0) for _ in range(40)]
        found, error = median_ratio([0.9 * d * draw.gauss(1, 0.05) for d in drift], drift)
        errors.append(found - 0.9)
        claimed.append(error)
    assert abs(statistics.mean(errors)) < 0.003
    assert statistics.stdev(errors) == pytest.approx(statistics.mean(claimed), rel=0.15)


@pytest.mark.slow
def test_a_rank_among_stragglers_says_what_all_have_learnt() -> None:
    times = ("--seconds", "3", "--settle-s", "1", "--snapshot-s", "1")
    first, second = records("straggler_worker.py", "local", "--shares", "8:8", *times)
    assert first["merges"] == second["merges"] > 0
    assert all(rate > 0 for rate in rates_of([first, second]))
    (_, before), *_, (_, after) = first["losses"]
    assert after < before - 1


@pytest.mark.slow
def test_the_study_of_local_sgd_learns() -> None:
    from study import CAUSES, DEFAULT
    from training import digits, is_local, together

    task = replace(digits(), steps=60)
    ideal, (local, merges) = together(task, "SGD", 0), is_local(task, CAUSES[DEFAULT], "SGD", 0)
    assert ideal < 1.0 and local < 1.3 * ideal  # 2.3 before the first step
    assert len(merges) > 10
