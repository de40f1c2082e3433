"""`hvd-hetero report` and `hvd-hetero plan`: their numbers, words, pictures and errors, on traces that are known."""

import fcntl
import json
import os
import pty
import random
import re
import struct
import subprocess
import sys
import termios

import pytest
from simulated import RecordedRanks

from hvd_hetero.cli.main import main
from hvd_hetero.optimizers.record import Record
from hvd_hetero.policy.partition import Bound
from hvd_hetero.policy.replan import Plan
from hvd_hetero.trace import Trace, read


def record(folder, *, late=0.0, steps=60, speeds=(0.001, 0.004), shares=(32, 32), exchange=0.01, data=0.0,
           ahead=None):
    """A run of ranks that need `speeds` seconds for a sample; `late`: what rank 0 does beside, in every fifth step;
    `ahead`: which part of that time a rank is spared for now, by what it did not use of a quota."""
    dice, ranks = random.Random(1), RecordedRanks(folder, len(speeds))
    for trace in ranks.traces:
        trace.plan(Plan(version=0, step=0, shares=shares, reason="first plan"))
    for step in range(steps):
        compute = [speed * share * dice.uniform(0.99, 1.01) for speed, share in zip(speeds, shares, strict=True)]
        rest = [late if step % 5 == 0 else 0.0] + [0.0] * (len(speeds) - 1)
        extra = [part * seconds for part, seconds in zip(ahead or [0.0] * len(speeds), compute, strict=True)]
        compute = [seconds - more for seconds, more in zip(compute, extra, strict=True)]
        ranks.step(step, compute=compute, extra=extra, data=[data] * len(speeds), rest=rest, shares=shares,
                   exchange=exchange)
    ranks.read()


def test_a_report_names_who_was_waited_for_and_why(tmp_path, capsys):
    record(tmp_path, late=0.5, speeds=(0.001, 0.001))
    assert main(["report", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert "2 ranks, 60 steps" in said and "host0" in said and "first plan" in said and "32:32" in said
    assert "of that for rank 0, for what it does beside training" in said
    assert main(["report", str(tmp_path), "--json", "--skip", "0"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["waiting"]["last"][0] == 12
    assert found["waiting"]["waited_s"][1][0] == pytest.approx(6.0, rel=0.1)
    assert found["ranks"][0]["parts"]["rest"] > 0.5 and found["ranks"][0]["host"] == "host0"


@pytest.mark.parametrize("run, words", [
    ({}, "for rank 1, which computes for longer"),
    ({"speeds": (0.001, 0.001), "exchange": 0.02}, "Exchanges take"),
    ({"speeds": (0.001, 0.001), "exchange": 0.001, "data": 0.01}, "waits for its data"),
    ({"speeds": (0.001, 0.001), "exchange": 0.001}, "Nothing stands out"),
])  # fmt: skip
def test_a_report_says_what_to_look_at(tmp_path, capsys, run, words):
    record(tmp_path, **run)
    assert main(["report", str(tmp_path)]) == 0
    assert words in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(("ends", "words"), [
    (False, "Rank 0 is at merges for 75 % of its time, though steps are local: a larger bound_rounds"),
    (True, "Rank 0 waits for 69 % of its time at the end of local steps, as of an epoch"),
])  # fmt: skip
def test_a_report_tells_of_a_rank_that_waits_though_ranks_step_apart(tmp_path, capsys, ends, words):
    ranks = RecordedRanks(tmp_path, 2)
    for step in range(60):
        for rank, trace in enumerate(ranks.traces):
            if step % 20 == 0 and ends:
                trace.event("together", step=step, wait_s=0.6 * (1 - rank))
            if step % 20 == 0:
                trace.event("apart", step=step)
                trace.event("merge", step=step, merge=0)
        waits = ends and step % 20 == 0
        ranks.step(step, compute=[0.01, 0.01] if ends else [0.01, 0.04], extra=[0.0, 0.0], data=[0.0, 0.0],
                   rest=[0.6 * waits, 0.6 * waits], shares=(32, 32), exchange=0.0)
    ranks.read()
    assert main(["report", str(tmp_path)]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert words in said and said.count("of its time") == 1


def test_what_ranks_waited_in_synchronous_steps_is_not_told_of_steps_apart(tmp_path, capsys):
    """As with strategy="auto", which goes apart since ranks wait; nor is a local strategy advised, which it has."""
    ranks = RecordedRanks(tmp_path, 2)
    for step in range(100):
        if step == 40:
            for trace in ranks.traces:
                trace.event("apart", step=step)
                trace.event("merge", step=step, merge=1)
        slow = [0.01, 0.01] if step >= 40 else [0.01, 0.04] if step % 2 else [0.04, 0.01]
        ranks.step(step, compute=slow, extra=[0.0, 0.0], data=[0.0, 0.0], rest=[0.0, 0.0], shares=(32, 32),
                   exchange=0.0)
    ranks.read()
    assert main(["report", str(tmp_path)]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "for one rank now and for another then." in said
    assert "though steps are local" not in said and "strategy=" not in said


def test_a_report_does_not_advise_what_the_run_has_and_says_whose_record_is_missing(tmp_path, capsys):
    record(tmp_path, speeds=(0.001, 0.001), exchange=0.02)
    with open(tmp_path / "rank-00000.jsonl", "a") as file:
        file.write('{"event": "route", "t_s": 1.0, "fields": {"bucket": "b"}}\n')
    assert main(["report", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert "Exchanges take" in said and "Compression.auto" not in said and "no record" not in said
    (tmp_path / "rank-00001.jsonl").unlink()
    assert main(["report", str(tmp_path)]) == 0
    assert "Plans are for 2 ranks, and there is no record of rank 1: bring" in " ".join(capsys.readouterr().out.split())


def record_of_loading(folder, *, each_s, shares, computes=(0.001, 0.001)):
    """A run in which others load for each rank, so many seconds for a sample."""
    ranks = RecordedRanks(folder, len(shares))
    for trace in ranks.traces:
        trace.plan(Plan(version=0, step=0, shares=shares, reason="first plan"))
    for step in range(60):
        compute = [each * share for each, share in zip(computes, shares, strict=True)]
        loading = [each * share for each, share in zip(each_s, shares, strict=True)]
        data = [max(0.0, loads - seconds) for loads, seconds in zip(loading, compute, strict=True)]
        ranks.step(step, compute=compute, data=data, loading=loading, shares=shares)
    ranks.read()


@pytest.mark.parametrize(("each_s", "limited"), [
    ((0.0, 0.009), True), ((0.0, 0.006), False), ((0.0, 0.0008), False), ((0.0, 0.0), False),
])  # fmt: skip
def test_a_report_names_a_rank_that_gets_what_is_loaded_for_it(tmp_path, capsys, each_s, limited):
    """Not if it has to wait for another rank's computing, however slowly its samples come."""
    record_of_loading(tmp_path, each_s=each_s, shares=(56, 8))
    assert main(["report", str(tmp_path)]) == 0
    words = "Rank 1 has as many samples as are loaded for it, one in 9 ms: more num_workers there"
    assert (words in " ".join(capsys.readouterr().out.split())) == limited


def test_a_plan_knows_how_fast_samples_come(tmp_path, capsys):
    """The more samples rank 1 has, the longer it waits for them, however fast it computes."""
    record_of_loading(tmp_path, each_s=(0.001, 0.003), shares=(40, 24), computes=(0.002, 0.0005))
    assert main(["plan", str(tmp_path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [rank["seconds_per_sample"] for rank in found["ranks"]] == pytest.approx([0.002, 0.0005], rel=0.02)
    assert [rank["loading_s"] for rank in found["ranks"]] == pytest.approx([0.001, 0.003], rel=0.02)
    ways = {way["title"]: way for way in found["forecasts"]}
    assert ways["best shares"]["shares"] in ([38, 26], [39, 25])
    assert ways["equal shares"]["step_s"] == pytest.approx(32 * 0.003 + 0.01, rel=0.02)


@pytest.mark.parametrize("empty", [False, True])
def test_without_the_record_of_the_slow_rank_nothing_is_said_of_waiting_and_nothing_planned(tmp_path, capsys, empty):
    record(tmp_path, speeds=(0.001, 0.001, 0.02), shares=(32, 32, 32))
    slow = tmp_path / "rank-00002.jsonl"
    slow.write_text("") if empty else slow.unlink()
    assert main(["report", str(tmp_path)]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "no record of rank 2" in said and "Exchanges take" not in said and "wait for each other" not in said
    assert main(["plan", str(tmp_path)]) == 1
    assert "bring rank-00002.jsonl" in capsys.readouterr().err


def test_without_the_record_of_a_rank_nothing_is_planned_though_no_plan_is_recorded(tmp_path, capsys):
    """Otherwise `--max-share 2:4` would be taken for the rank in the third place, which may be another one."""
    for rank in (0, 2, 3):
        with Trace(tmp_path, rank=rank, clock=lambda: 0.0) as trace:
            for step in range(20):
                trace.step(step=step, samples=8, compute_s=0.1, t_s=float(step))
    assert main(["plan", str(tmp_path), "--max-share", "2:4"]) == 1
    assert "expected the records of all 4 ranks. Received none of rank 1." in capsys.readouterr().err


@pytest.mark.parametrize("strategies", [("synchronous", "synchronous"), ("synchronous", "local")])
def test_a_report_tells_the_strategy_of_plans_that_chose_one(tmp_path, capsys, strategies):
    """With strategy="local", plans choose none, and name the default."""
    ranks = RecordedRanks(tmp_path, 2)
    for version, strategy in enumerate(strategies):
        for trace in ranks.traces:
            trace.plan(Plan(version=version, step=8 * version, shares=(8, 8), reason="of the test", strategy=strategy))
        for step in range(8 * version, 8 * version + 8):
            ranks.step(step, compute=[0.01] * 2, shares=(8, 8))
    ranks.read()
    chosen = "local" in strategies
    assert main(["report", str(tmp_path), "--json"]) == 0
    plans = json.loads(capsys.readouterr().out)["plans"]
    assert [plan["strategy"] for plan in plans] == (list(strategies) if chosen else [None, None])
    assert main(["report", str(tmp_path)]) == 0
    assert ("strategy" in capsys.readouterr().out) == chosen


@pytest.mark.parametrize("end", [40, 20])
def test_a_record_that_ends_early_counts_as_far_as_it_goes(tmp_path, capsys, end):
    record(tmp_path, speeds=(0.001, 0.001, 0.02), shares=(32, 32, 32))
    slow = tmp_path / "rank-00002.jsonl"
    lines = slow.read_text().splitlines()
    cut = next(i for i, line in enumerate(lines) if line.startswith(f"[{end},"))
    slow.write_text("\n".join(lines[:cut]) + "\n")
    assert main(["report", str(tmp_path)]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert f"The record of rank 2 ends at step {end - 1} of 59." in said
    assert end < 40 or "100 % of that for rank 2" in said
    assert "Exchanges take" not in said


def test_a_plan_rests_on_one_plan_of_the_run_where_a_record_ends_before_the_newest(tmp_path, capsys):
    ranks, speeds = RecordedRanks(tmp_path, 2), (0.001, 0.003)
    for first, shares in ((0, (32, 32)), (40, (48, 16))):
        for trace in ranks.traces:
            trace.plan(Plan(version=first, step=first, shares=shares, reason="of the test"))
        for step in range(first, first + 40):
            compute = [speed * share for speed, share in zip(speeds, shares, strict=True)]
            ranks.step(step, compute=compute, extra=(0.0, 0.0), data=(0.0, 0.0), rest=(0.0, 0.0), shares=shares,
                       exchange=0.01)
    ranks.read()
    path = tmp_path / "rank-00001.jsonl"
    path.write_text("".join(line for line in path.read_text().splitlines(keepends=True)
                            if not line.startswith(tuple(f"[{step}," for step in range(40, 80)))))
    assert main(["plan", str(tmp_path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["shares"] == [48, 16] and found["step_s"] == pytest.approx(0.058, rel=0.02)
    assert sum(found["forecasts"][0]["shares"]) == 64


def test_a_plan_finds_speeds_and_predicts_the_step_that_was_measured(tmp_path, capsys):
    record(tmp_path, speeds=(0.001, 0.003), shares=(40, 24))
    assert main(["plan", str(tmp_path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [rank["seconds_per_sample"] for rank in found["ranks"]] == pytest.approx([0.001, 0.003], rel=0.02)
    assert found["step_s"] == pytest.approx(24 * 0.003 + 0.01, rel=0.02)
    assert found["exchange_s"] == pytest.approx(0.01, rel=0.1)
    ways = {way["title"]: way for way in found["forecasts"]}
    assert ways["best shares"]["shares"] == [48, 16]
    assert ways["equal shares"]["step_s"] == pytest.approx(32 * 0.003 + 0.01, rel=0.02)
    assert ways["best shares"]["step_s"] == pytest.approx(0.058, rel=0.03)
    assert main(["plan", str(tmp_path), "--global-batch-size", "128", "--max-share", "0:60"]) == 0
    said = capsys.readouterr().out
    assert "60:68" in said and "The slowest rank cannot be done without: the others do not hold the batch." in said


@pytest.mark.parametrize("epoch", [12, 10, 3])
def test_steps_of_several_batches_are_told_as_such_and_planned_for_by_the_batch(tmp_path, capsys, epoch):
    """Gradients of 4 batches, or of fewer at the end of an epoch, make a step, and each pass costs 5 ms more."""
    ranks, begun = RecordedRanks(tmp_path, 2), 0
    for number in range(60):
        batches, shares = min(4, epoch - begun % epoch), (20, 44) if number < 30 else (44, 20)
        begun += batches
        compute = [batches * (0.005 + share * each_s) for share, each_s in zip(shares, (0.001, 0.003), strict=True)]
        ranks.step(begun - 1, compute=compute, shares=shares, batches=batches, exchange=0.001 * batches)
    spent_s = ranks.now - 1000.0
    ranks.read()
    assert main(["report", str(tmp_path), "--json", "--skip", "0"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert sum(rank["samples_per_s"] for rank in found["ranks"]) == pytest.approx(64 * begun / spent_s, rel=0.05)
    assert found["waiting"]["step_s"] == pytest.approx(spent_s / 60, rel=0.05)
    assert found["ranks"][1]["parts"]["compute"] > 0.97
    assert main(["plan", str(tmp_path), "--json", "--skip", "0"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [rank["seconds_per_sample"] for rank in found["ranks"]] == pytest.approx([0.001, 0.003], rel=0.1)
    assert found["step_s"] == pytest.approx(0.005 + 20 * 0.003 + 0.001)
    ways = {way["title"]: way["step_s"] for way in found["forecasts"]}
    assert ways["equal shares"] == pytest.approx(0.005 + 32 * 0.003 + 0.001, rel=0.03)
    assert ways["best shares"] == pytest.approx(0.005 + 48 * 0.001 + 0.001, rel=0.03)


def test_a_plan_knows_the_bounds_of_a_run_and_the_passes_of_a_share(tmp_path, capsys):
    """Rank 0 holds 8 samples at a time, each pass of which costs 10 ms more, and rank 1 holds 30 in all."""
    limits = [(Bound(lower=1), 8), (Bound(lower=1, upper=30), None)]
    ranks = RecordedRanks(tmp_path, 2)
    for trace, (bound, cap) in zip(ranks.traces, limits, strict=True):
        Record(trace).limits(bound, cap)

    def seconds(share):
        return -(-share // 8) * 0.01 + share * 0.001

    for step in range(60):
        shares = (10, 30) if step < 30 else (40, 24)
        ranks.step(step, compute=[seconds(shares[0]), shares[1] * 0.003], shares=shares)
    ranks.read()
    assert main(["plan", str(tmp_path), "--json", "--skip", "0"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["ranks"][0]["overhead_s"] == pytest.approx(0.01, rel=0.3)
    ways = {way["title"]: way for way in found["forecasts"]}
    assert "equal shares" not in ways
    assert ways["best shares"]["step_s"] == pytest.approx(0.01 + seconds(36), rel=0.02)  # 28 take rank 1 as long
    assert ways["without rank 1"]["step_s"] == pytest.approx(seconds(64), rel=0.05)
    assert main(["plan", str(tmp_path), "--skip", "0", "--max-share", "1:64"]) == 0
    assert "equal shares" in capsys.readouterr().out


def test_ranks_that_have_left_are_not_counted(tmp_path, capsys):
    """Of four ranks with 16 samples each, the last one leaves after 30 steps."""
    ranks = RecordedRanks(tmp_path, 4)
    for trace in ranks.traces:
        trace.plan(Plan(version=0, step=0, shares=(16,) * 4, reason="first plan"))
    for step in range(30):
        ranks.step(step, compute=[0.016] * 4, shares=(16,) * 4)
    ranks.traces.pop().close()
    for trace in ranks.traces:
        trace.plan(Plan(version=1, step=30, shares=(22, 21, 21), reason="other ranks"))
    for step in range(30, 90):
        ranks.step(step, compute=[0.022, 0.021, 0.021], shares=(22, 21, 21))
    ranks.read()
    assert main(["plan", str(tmp_path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["shares"] == [22, 21, 21] and [rank["rank"] for rank in found["ranks"]] == [0, 1, 2]
    assert main(["plan", str(tmp_path)]) == 0
    assert "left the job: rank 3" in capsys.readouterr().out
    assert main(["report", str(tmp_path)]) == 0
    assert "3 ranks (and 1 that left), 90 steps, " in capsys.readouterr().out


def test_a_rank_that_has_left_is_given_no_advice(tmp_path, capsys):
    ranks = RecordedRanks(tmp_path, 3)
    for trace in ranks.traces:
        trace.plan(Plan(version=0, step=0, shares=(16,) * 3, reason="first plan"))
    for step in range(30):
        ranks.step(step, compute=[0.01] * 3, data=[0.0, 0.0, 0.05], shares=(16,) * 3)
    ranks.traces.pop().close()
    for trace in ranks.traces:
        trace.plan(Plan(version=1, step=30, shares=(24, 24), reason="other ranks"))
    for step in range(30, 90):
        ranks.step(step, compute=[0.015] * 2, data=[0.0] * 2, shares=(24, 24))
    ranks.read()
    assert main(["report", str(tmp_path)]) == 0
    assert "waits for its data" not in capsys.readouterr().out


def test_a_report_may_be_of_nobody_but_a_rank_that_has_left(tmp_path, capsys):
    record(tmp_path)
    (tmp_path / "rank-00000.jsonl").rename(tmp_path / "rank-00002.jsonl")  # its newest plan is for two ranks
    (tmp_path / "rank-00001.jsonl").unlink()
    assert main(["report", str(tmp_path)]) == 0
    assert "0 ranks (and 1 that left)" in capsys.readouterr().out


def test_a_job_that_goes_on_with_fewer_ranks_from_an_early_step_counts_those_that_it_has(tmp_path, capsys):
    """The rank that is gone has recorded more steps than those that made them again."""
    record(tmp_path, speeds=(0.001, 0.004, 0.001), shares=(16, 16, 16), steps=200)
    again = RecordedRanks(tmp_path, 2)
    again.now = 1e6
    for trace in again.traces:
        trace.plan(Plan(version=0, step=0, shares=(24, 24), reason="first plan"))
    for step in range(40):
        again.step(step, compute=(0.024, 0.096), shares=(24, 24))
    again.read()
    assert main(["report", str(tmp_path)]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "2 ranks (and 1 that left), 40 steps" in said and "a step, of which the exchange" in said
    assert "of that for rank 1, which computes for longer" in said


def test_a_report_of_many_events_tells_the_last_ones_and_how_many_there_were(tmp_path, capsys):
    record(tmp_path)
    for rank, times in ((0, range(0, 20, 2)), (1, range(1, 21, 2))):
        with open(tmp_path / f"rank-{rank:05d}.jsonl", "a") as file:
            for at in times:
                fields = {"waited_s": 10 + at, "missing": [1 - rank], "line": "train.py:7"}
                file.write(json.dumps({"event": "wait", "t_s": 1e6 + at, "fields": fields}) + "\n")
    assert main(["report", str(tmp_path)]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "of 20 events, the last 12" in said and "waited 17 s" not in said
    assert all(f"waited {10 + at} s" in said for at in range(8, 20))


def test_a_plan_rests_on_what_a_quota_allows_in_the_long_run(tmp_path, capsys):
    record(tmp_path, speeds=(0.001, 0.003), shares=(52, 12), ahead=(0.0, 0.2))
    assert main(["plan", str(tmp_path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [rank["seconds_per_sample"] for rank in found["ranks"]] == pytest.approx([0.001, 0.003], rel=0.02)
    assert next(way for way in found["forecasts"] if way["title"] == "best shares")["shares"] == [48, 16]


def test_a_plan_needs_no_run_where_speeds_are_told(capsys):
    assert main(["plan", "--speeds", "800,800,320,320", "--exchange-ms", "20", "--global-batch-size", "560"]) == 0
    said = capsys.readouterr().out
    assert "200:200:80:80" in said and "140:140:140:140" in said and "2,240" in said and "keep all" in said


@pytest.mark.parametrize("line", [
    "[60, 1e400, 32, 0, NaN, -1e400, 0, 32, 1e400]",
    f"[60, {'9' * 400}, 32, 0, 0, 0, 0, 32, 0]",
    '{"event": "limits", "t_s": 1.0, "fields": {"lower": 1, "quantum": 1, "of": "another version"}}',
    '{"event": "limits", "t_s": 1.0, "fields": {"lower": "1", "upper": null, "quantum": 1, "micro_batch": null}}',
    '{"event": "apart", "t_s": 1.0, "fields": {}}',
    '{"event": "together", "t_s": 1.0, "fields": {"step": "now"}}',
    '{"event": "wait", "t_s": 1.0, "fields": {"waited_s": "long", "missing": [1]}}',
    '{"event": "parameters", "t_s": 1.0, "fields": {"ranks": null}}',
    '{"event": "parameters", "t_s": 1.0, "fields": null}',
    '{"event": "limits", "t_s": 1.0, "fields": {"lower": -5, "upper": null, "quantum": 0, "micro_batch": null}}',
    '{"event": "limits", "t_s": 1.0, "fields": {"lower": 1, "upper": null, "quantum": 1, "micro_batch": 0}}',
    '{"event": "together", "t_s": 1.0, "fields": {"step": 9, "wait_s": "nan"}}',
    '{"plan": {"version": 1, "step": 30, "shares": [32, 32], "reason": "", "predicted_step_s": "long"}, "t_s": 1.0}',
    '{"plan": {"version": 1, "step": 30, "shares": [32, 32], "reason": 3}, "t_s": 1.0}',
    "[" * 200_000,
])
def test_lines_that_are_of_no_use_end_no_command(tmp_path, capsys, line):
    def refused(constant):
        raise ValueError(constant)

    record(tmp_path)
    with open(tmp_path / "rank-00000.jsonl", "a") as file:
        file.write(line + "\n")
    assert main(["report", str(tmp_path)]) == 0
    assert "1e400" in line or "1 that cannot be read" in " ".join(capsys.readouterr().out.split())
    capsys.readouterr()
    for command in ("report", "plan"):
        assert main([command, str(tmp_path), "--json"]) == 0
        json.loads(capsys.readouterr().out, parse_constant=refused)


def test_a_report_of_many_ranks_tells_of_those_that_the_others_waited_for(tmp_path, capsys):
    record(tmp_path, speeds=(0.001,) * 47 + (0.004,), shares=(32,) * 48, steps=12)
    assert main(["report", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert "of 48 ranks, the 32 that the others waited for longest" in said and "host47" in said
    tables = [line for line in said.splitlines() if line.startswith("│")]
    assert len(tables) < 80 and max(map(len, tables)) <= 132


def test_a_plan_is_for_rounds_as_long_as_one_says(capsys):
    def local(*more):
        speeds = ["--speeds", "800,320", "--exchange-ms", "500", "--global-batch-size", "56"]
        assert main(["plan", *speeds, "--json", *more]) == 0
        ways = json.loads(capsys.readouterr().out)["forecasts"]
        return next(way["samples_per_s"] for way in ways if way["title"] == "best shares, local steps")

    assert local("--round-steps", "32") == local(), "nobody waits for a merge of ten steps"
    slow = ["--exchange-ms", "5000"]
    assert local(*slow, "--round-steps", "32") > local(*slow) == local(*slow, "--round-steps", "2")


@pytest.mark.parametrize("arguments, code, words", [
    (["report", "missing"], 1, "HVD_HETERO_RUN"),
    (["report", "{run}", "--skip", "100"], 1, "of more than 100 steps"),
    (["report", "{run}", "--skip", "-1"], 2, "--skip: expected 0 or more"),
    (["report", "{run}", "--picture", "{run}/report.nonsense"], 2, "--picture: expected a file name that ends in"),
    (["report", "{run}", "--picture", "{run}/missing/file.svg"], 1, "--picture: expected a file that can be written"),
    (["report", "{run}", "--json", "{run}/missing/file"], 1, "--json: expected a file"),
    (["plan", "missing"], 1, "HVD_HETERO_RUN"),
    (["plan", "{run}", "--skip", "-3"], 2, "--skip: expected 0 or more"),
    (["plan", "{run}", "--max-share", "7:4"], 2, "RANK:SAMPLES, of ranks 0 to 1"),
    (["plan", "{run}", "--max-share", "²:4"], 2, "RANK:SAMPLES, of ranks 0 to 1"),
    (["report", "{run}", "--picture", ""], 2, "--picture: expected a file name that ends in"),
    (["plan", "{run}", "--max-share", "0:4", "--max-share", "1:4"], 2, "--global-batch-size or --max-share"),
    (["plan", "{run}", "--skip", "58"], 1, "expected 5 steps of rank 0"),
    (["plan"], 2, "Received: neither"),
    (["plan", "--json", "{run}"], 2, "as the file of --json, which comes last"),
    (["plan", "--speeds", "1,2", "--global-batch-size", "8", "--skip", "3"], 2, "--skip: expected with a run alone"),
    (["plan", "{run}", "--exchange-ms", "3"], 2, "--exchange-ms: expected with --speeds alone"),
    (["plan", "{run}", "--speeds", "1,2"], 2, "Received: both"),
    (["plan", "--speeds", "800,fast", "--global-batch-size", "64"], 2, "--speeds: expected samples per second"),
    (["plan", "--speeds", "800,0", "--global-batch-size", "64"], 2, "--speeds: expected samples per second"),
    (["plan", "--speeds", "1e308,1e-308", "--global-batch-size", "64"], 2, "--speeds: expected samples per second"),
    (["plan", "--speeds", "800,nan", "--global-batch-size", "64"], 2, "--speeds: expected samples per second"),
    (["plan", "--speeds", "800,320"], 2, "--speeds: expected --global-batch-size N with it"),
    (["plan", "--speeds", "800,320", "--global-batch-size", "0"], 2, "--global-batch-size: expected a number from"),
    (["plan", "--speeds", "8,3", "--global-batch-size", "1"], 2, "--global-batch-size or --max-share"),
    (["plan", "--speeds", "8,3", "--global-batch-size", "9" * 23], 2, "--global-batch-size: expected a number from"),
    (["plan", "--speeds", "8,3", "--round-steps", "0", "--global-batch-size", "8"], 2, "--round-steps: expected 1"),
    (["plan", "--speeds", "8,3", "--exchange-ms", "-1", "--global-batch-size", "8"], 2, "--exchange-ms: expected 0"),
    (["plan", "--speeds", "8,3", "--exchange-ms", "1e300", "--global-batch-size", "8"], 2, "expected 0 to 1e+09"),
])  # fmt: skip
def test_what_cannot_be_read_or_written_is_told(tmp_path, capsys, arguments, code, words):
    record(tmp_path)
    assert main([word.format(run=tmp_path) for word in arguments]) == code
    assert words in capsys.readouterr().err


def test_who_reports_on_other_files_hears_that_they_cannot_be_read(tmp_path, capsys):
    (tmp_path / "rank-00000.jsonl").write_text("no record\nat all\n")
    assert main(["report", str(tmp_path)]) == 1
    assert "of 0, and with 2 lines that cannot be read" in capsys.readouterr().err


def test_a_report_is_drawn(tmp_path):
    record(tmp_path, late=0.2)
    place = tmp_path / "report.svg"
    assert main(["report", str(tmp_path), "--picture", str(place)]) == 0
    drawn = place.read_text()
    assert drawn.startswith("<?xml") and "<svg" in drawn


def test_a_report_of_a_job_that_lost_a_rank_is_of_the_steps_of_those_that_stayed(tmp_path, capsys):
    """Though the rank that is gone has recorded more plans, and steps that were undone."""
    ranks = RecordedRanks(tmp_path, 3)

    for version in range(5):
        for trace in ranks.traces:
            trace.plan(Plan(version=version, step=version, shares=(8, 8, 8), reason="of the test"))
    for step in range(30):
        ranks.step(step, compute=(0.01, 0.03, 0.01), extra=[0.0] * 3, data=[0.0] * 3, rest=[0.0] * 3, shares=(8, 8, 8),
                   exchange=0.001)  # fmt: skip
    ranks.read()
    for rank in range(2):  # go on from their commit, at step 0
        path = tmp_path / f"rank-{rank:05d}.jsonl"
        header, first, *_ = path.read_text().splitlines()
        plan = json.loads(first)
        plan["plan"] |= {"version": 9, "shares": [12, 12], "reason": "a rank is gone"}
        lines = [header, json.dumps(plan)]
        for step in range(100):
            compute = 0.03 if rank == 1 else 0.01
            wait = 0.001 if rank == 1 else 0.021
            lines.append(json.dumps([step, 1e6 + 0.031 * (step + 1), 12, 0.0, compute, wait, 0, 12, 0.0, 0.0]))
        with open(path, "a") as file:
            file.write("\n".join(lines) + "\n")
    assert main(["report", str(tmp_path)]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "2 ranks (and 1 that left)" in said and "100 % of that for rank 1" in said
    assert main(["report", str(tmp_path), "--json"]) == 0
    waiting = json.loads(capsys.readouterr().out)["waiting"]
    assert waiting["steps"] == 95 and waiting["waited_s"][0][1] == pytest.approx(95 * 0.02)


def test_a_plan_does_not_take_one_plans_step_time_for_anothers(tmp_path, capsys):
    """Also where a rank's share did not change."""
    ranks, speeds = RecordedRanks(tmp_path, 3), (0.012, 0.02, 0.012)
    for first, count, shares in ((0, 100, (8, 24, 8)), (100, 2, (20, 12, 8))):
        for trace in ranks.traces:
            trace.plan(Plan(version=first, step=first, shares=shares, reason="of the test"))
        for step in range(first, first + count):
            compute = [speed * share for speed, share in zip(speeds, shares, strict=True)]
            ranks.step(step, compute=compute, extra=[0.0] * 3, data=[0.0] * 3, rest=[0.0] * 3, shares=shares,
                       exchange=0.01)  # fmt: skip
    ranks.read()
    assert main(["plan", str(tmp_path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["shares"] == [8, 24, 8] and found["step_s"] == pytest.approx(0.49, rel=0.02)
    assert found["exchange_s"] == pytest.approx(0.01, abs=0.005)


def test_a_report_of_one_rank_has_nothing_to_say_of_waiting(tmp_path, capsys):
    record(tmp_path, speeds=(0.001,), shares=(32,), exchange=0.0)
    assert main(["report", str(tmp_path)]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "Nothing stands out" in said and ": 1 rank, 60 steps" in said


def resumed(folder, *, size=2, steps=60, first=0.0, after=60):
    """A job of two ranks that is started again, as one of `size` ranks, and then makes `steps` steps; `first`: what
    rank 1 computes for longer in the first of these."""
    record(folder, shares=(48, 16), speeds=(0.001, 0.003))
    again = RecordedRanks(folder, size)
    again.now = 1e6
    shares = (64 // size,) * size
    for trace in again.traces:
        trace.plan(Plan(version=0, step=0, shares=shares, reason="first plan"))
    for step in range(steps):
        compute = [0.048] * size
        compute[-1] += first if step == 0 else 0.0
        again.step(after + step, compute=compute, shares=shares)
    for trace in again.traces:
        trace.close()


@pytest.mark.parametrize("size", [1, 2])
def test_a_job_that_was_started_again_and_made_no_step_changes_nothing(tmp_path, capsys, size):
    record(tmp_path / "once", shares=(48, 16), speeds=(0.001, 0.003))
    resumed(tmp_path / "again", size=size, steps=0)
    for command in ("report", "plan"):
        found = []
        for name in ("once", "again"):
            assert main([command, str(tmp_path / name), "--json"]) == 0
            found.append({**json.loads(capsys.readouterr().out), "folder": ""})
        assert found[0] == found[1]


def test_a_plan_rests_on_the_last_session_of_a_run(tmp_path, capsys):
    """A job was resumed, and its ranks are on each other's hosts."""
    record(tmp_path, speeds=(0.001, 0.004), steps=200)
    first = {path.name: path.read_text() for path in tmp_path.iterdir()}
    record(tmp_path / "then", speeds=(0.004, 0.001), steps=60)
    for path in (tmp_path / "then").iterdir():
        lines = path.read_text().splitlines()
        for at, line in enumerate(lines):
            if line.startswith("["):
                step, end_s, rest = line.split(",", 2)
                lines[at] = f"[{int(step[1:]) + 200},{float(end_s) + 1000:.5f},{rest}"
        lines[0] = lines[0].replace("host0", "another").replace("host1", "host0").replace("another", "host1")
        (tmp_path / path.name).write_text(first[path.name] + "\n".join(lines) + "\n")
    assert main(["report", str(tmp_path)]) == 0
    assert "Ranks 0, 1 were on other hosts before step 200" in " ".join(capsys.readouterr().out.split())
    assert main(["plan", str(tmp_path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [rank["seconds_per_sample"] for rank in found["ranks"]] == pytest.approx([0.004, 0.001], rel=0.02)


def test_the_time_between_two_sessions_is_nobodys(tmp_path):
    for begins, since_s in ((0, 0.0), (12, 8.0)):
        with Trace(tmp_path, rank=0, clock=lambda: 0.0) as trace:
            for step in range(begins, begins + 12):
                trace.step(step=step, samples=10, t_s=since_s + step)
    assert read(tmp_path).ranks[0].summary(skip=0).samples_per_s == pytest.approx(10.0)


def test_a_host_in_brackets_is_no_markup(tmp_path, capsys):
    with Trace(tmp_path, rank=0, clock=lambda: 0.0, host="[/a]b") as trace:
        for step in range(10):
            trace.step(step=step, samples=4, compute_s=0.1, t_s=float(step))
    assert main(["report", str(tmp_path)]) == 0
    assert "[/a]b" in capsys.readouterr().out


def test_of_ranks_that_recorded_no_step_together_it_is_not_known_who_waits(tmp_path, capsys):
    for rank in range(2):
        with Trace(tmp_path, rank=rank, clock=lambda: 0.0) as trace:
            trace.plan(Plan(version=0, step=0, shares=(4, 4), reason="first plan"))
            for step in range(40 * rank, 40 * rank + 30):
                trace.step(step=step, samples=4, compute_s=0.05, wait_s=0.01, share=4, t_s=0.1 * step)
    assert main(["report", str(tmp_path)]) == 0
    assert "Too few steps were recorded by all ranks to tell who waits for whom." in capsys.readouterr().out


def test_where_no_cause_makes_half_of_the_waiting_none_is_named(tmp_path, capsys):
    ranks = RecordedRanks(tmp_path, 2)
    for step in range(60):
        ranks.step(step, compute=[0.05, 0.1], data=[0.0, 0.05], rest=[0.0, 0.05], shares=(4, 4))
    ranks.read()
    assert main(["report", str(tmp_path)]) == 0
    assert "100 % of that for rank 1.\n" in capsys.readouterr().out


def test_of_local_steps_alone_the_time_of_a_step_is_not_told(tmp_path, capsys):
    ranks = RecordedRanks(tmp_path, 2)
    for trace in ranks.traces:
        trace.plan(Plan(version=0, step=0, shares=(6, 2), reason="first plan"))
        trace.event("apart", step=0)
    for step in range(60):
        ranks.step(step, compute=[0.06, 0.06], shares=(6, 2))
    ranks.read()
    assert main(["plan", str(tmp_path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["shares"], found["step_s"], found["exchange_s"]) == ([6, 2], None, 0.0)
    assert main(["plan", str(tmp_path)]) == 0
    assert "a step with shares" not in capsys.readouterr().out


def test_events_are_told_in_the_order_of_steps_where_clocks_are_hours_apart(tmp_path, capsys):
    """As of a rank that comes from a host with a clock of its own."""
    now, offs = [1e6], (0, -7200, 7200)
    traces = [Trace(tmp_path, rank=rank, clock=lambda off=off: now[0] + off) for rank, off in enumerate(offs)]
    for step in range(60):
        now[0] += 0.1
        for rank, trace in enumerate(traces[: 1 + (step >= 20) + (step >= 40)]):
            if step in (20, 40):
                trace.event("ranks", rank=rank, size=1 + step // 20, step=step - 1)
            if step in (10, 30, 50) and rank == step // 20:
                trace.event("wait", waited_s=float(step), missing=[0], line="train.py:1")
            trace.step(step=step, samples=4, compute_s=0.05, share=4)
    for trace in traces:
        trace.close()
    assert main(["report", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    words = ["waited 10 s", "step 19 there were 2", "waited 30 s", "step 39 there were 3", "waited 50 s"]
    places = [said.index(each) for each in words]
    assert places == sorted(places) and said.count("there were") == 2


def test_of_shares_that_no_rank_recorded_there_is_no_forecast(tmp_path, capsys):
    """As by a version that did not record them."""
    with Trace(tmp_path, rank=0, clock=lambda: 0.0) as trace:
        for step in range(20):
            trace.step(step=step, samples=4, compute_s=0.1, t_s=float(step))
    assert main(["plan", str(tmp_path)]) == 2
    assert "--global-batch-size: expected a number from 1" in capsys.readouterr().err
    assert main(["plan", str(tmp_path), "--global-batch-size", "8"]) == 0


def test_the_first_steps_of_each_session_are_left_out(tmp_path, capsys):
    resumed(tmp_path, first=30.0)
    assert main(["report", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert "Ranks wait for each other" not in said and "5 steps of each session" in said
    assert main(["report", str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["waiting"]["steps"] == 110
    assert main(["report", str(tmp_path), "--skip", "0"]) == 0
    assert "for rank 1, which computes for longer" in capsys.readouterr().out


def test_what_a_session_did_again_begins_no_session(tmp_path):
    for begins, ends in ((0, 40), (40, 50), (20, 60)):
        with Trace(tmp_path, rank=0, clock=lambda: 0.0) as trace:
            for step in range(begins, ends):
                trace.step(step=step, samples=4)
    assert read(tmp_path).ranks[0].session_starts == {0, 20}


def test_a_plan_for_one_rank_speaks_of_no_others(capsys):
    assert main(["plan", "--speeds", "800", "--global-batch-size", "64"]) == 0
    assert "the others" not in capsys.readouterr().out


def test_files_are_written_where_nobody_reads_the_tables(tmp_path):
    record(tmp_path)
    words = [sys.executable, "-m", "hvd_hetero.cli.main", "report", str(tmp_path), "--json", str(tmp_path / "r.json"),
             "--picture", str(tmp_path / "r.svg")]
    read_end, write_end = os.pipe()
    os.close(read_end)
    with os.fdopen(write_end, "wb") as pipe:
        done = subprocess.run(words, stdout=pipe, stderr=subprocess.PIPE, check=False)
    assert (done.returncode, done.stderr) == (141, b"")
    assert json.loads((tmp_path / "r.json").read_text())["steps"] == 60 and (tmp_path / "r.svg").exists()


def test_a_closed_output_is_no_error(tmp_path):
    record(tmp_path)
    words = [sys.executable, "-m", "hvd_hetero.cli.main", "report", str(tmp_path)]
    done = subprocess.run(["sh", "-c", '"$@" >&-', "sh", *words], stderr=subprocess.PIPE, check=False)
    assert (done.returncode, done.stderr) == (0, b"")


@pytest.mark.parametrize("size, variables, least, most", [
    (60, {}, 50, 60),
    (60, {"PMI_RANK": "0"}, 50, 60),  # the shell of `srun --pty`
    (0, {"PMI_RANK": "0"}, 81, 132),  # what mpirun gives its processes
])  # fmt: skip
def test_tables_fit_the_terminal_that_somebody_sees(size, variables, least, most):
    words = ["plan", "--speeds", ",".join(["320"] * 40), "--global-batch-size", "4000"]
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24 if size else 0, size, 0, 0))
    kept = {name: value for name, value in os.environ.items() if name != "COLUMNS"}
    running = subprocess.Popen([sys.executable, "-m", "hvd_hetero.cli.main", *words], stdin=subprocess.DEVNULL,
                               stdout=theirs, env={**kept, "TERM": "xterm", **variables})
    os.close(theirs)
    text = b""
    with os.fdopen(ours, "rb", buffering=0) as end:
        try:
            while part := end.read(65536):
                text += part
        except OSError:  # of a terminal whose other end is closed
            pass
    assert running.wait() == 0
    lines = re.sub(r"\x1b\[[0-9;]*m", "", text.decode()).splitlines()
    widths = [len(line) for line in lines if line.startswith("┃")]
    assert widths and least <= max(widths) <= most, text.decode()


def test_a_report_says_that_two_jobs_wrote_one_record_at_a_time(tmp_path, capsys):
    for job in ("a", "b"):
        record(tmp_path / job)
    (tmp_path / "both").mkdir()
    for name in ("rank-00000.jsonl", "rank-00001.jsonl"):
        first, second = ((tmp_path / job / name).read_text().splitlines(keepends=True) for job in ("a", "b"))
        (tmp_path / "both" / name).write_text("".join(first[:30] + second[:30] + first[30:] + second[30:]))
    words = "have written the records of ranks 0, 1 at a time"
    assert main(["report", str(tmp_path / "both")]) == 0 and words in capsys.readouterr().out
    assert main(["report", str(tmp_path / "a")]) == 0 and words not in capsys.readouterr().out
