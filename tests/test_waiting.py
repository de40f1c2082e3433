"""Who waited for whom: every second that a rank waited is the exchange's or another rank's, and has a cause."""

import random

import numpy as np
import pytest
from simulated import RecordedRanks

from hvd_hetero.policy.replan import Plan
from hvd_hetero.trace import RankRun, Run, Step
from hvd_hetero.trace.entry import STEPS
from hvd_hetero.trace.waiting import local_steps_of, parts, timed, waiting


def test_every_second_of_waiting_is_the_exchanges_or_a_ranks_and_has_a_cause(tmp_path):
    dice, ranks = random.Random(3), RecordedRanks(tmp_path, 4)
    for step in range(200):
        busy = [[dice.uniform(0.1, 0.2) for _ in range(4)] for _ in range(3)]
        ranks.step(step, compute=busy[0], data=busy[1], rest=busy[2], exchange=dice.uniform(0.01, 0.02))
    found = waiting(ranks.read())
    assert found.steps == 200 and found.ranks == (0, 1, 2, 3)
    for rank, row in enumerate(found.waited_s):
        assert row[rank] == 0.0
        assert sum(row) + 200 * found.exchange_s == pytest.approx(sum(ranks.waits[rank]), rel=1e-3)
    for rank, causes in enumerate(found.causes):
        assert causes.whole == pytest.approx(found.waited_for(rank), rel=1e-6)
    assert sum(found.last) == pytest.approx(200, abs=5)  # but for those who came last by next to nothing


@pytest.mark.parametrize("cause", ["compute", "data", "rest"])
def test_a_late_rank_is_found_with_what_it_does_for_longer(tmp_path, cause):
    ranks = RecordedRanks(tmp_path, 3)
    for step in range(40):
        busy = {"compute": [0.1] * 3, "data": [0.0] * 3, "rest": [0.0] * 3}
        if step % 4 == 3:
            busy[cause][1] += 0.2
        ranks.step(step, **busy)
    found = waiting(ranks.read())
    assert found.last == (0, 10, 0)
    assert [row[1] for row in found.waited_s] == pytest.approx([2.0, 0.0, 2.0], rel=1e-3)
    assert getattr(found.causes[1], cause) == pytest.approx(4.0, rel=1e-3)
    assert found.exchange_s == pytest.approx(0.01, rel=1e-3)
    assert found.waited_part == pytest.approx(4.0 / (3 * 40 * found.step_s), rel=1e-2)
    assert parts(ranks.read().ranks[1])[cause] > parts(ranks.read().ranks[0])[cause]


def test_steps_apart_are_left_out_and_the_merge_that_ends_them_is_a_wait(tmp_path):
    ranks = RecordedRanks(tmp_path, 2)
    for step in range(30):
        if step == 10:
            for trace in ranks.traces:
                trace.event("apart", step=10)
        if step == 20:
            ranks.now += 1.0
            for rank, trace in enumerate(ranks.traces):
                trace.event("together", step=20, wait_s=float(rank == 0))
        ranks.step(step, compute=[0.1, 0.2])
    run = ranks.read()
    assert waiting(run).steps == 20
    assert waiting(run, skip=10).steps == 10
    # One second passed on both between two steps: rank 0 waited for it, rank 1 did something else.
    assert parts(run.ranks[0])["rest"] == pytest.approx(0.0, abs=1e-3)
    assert parts(run.ranks[1])["rest"] == pytest.approx(1.0 / (29 * 0.21 + 1.0), rel=1e-2)


def test_between_two_sessions_nothing_is_known(tmp_path):
    ranks = RecordedRanks(tmp_path, 2)
    for step in range(10):
        ranks.step(step, compute=[0.1, 0.1])
    ranks.now += 3600.0
    again = RecordedRanks(tmp_path, 2)
    again.now = ranks.now
    for trace in ranks.traces:
        trace.close()
    for step in range(10, 20):
        again.step(step, compute=[0.1, 0.1])
    run = again.read()
    assert run.ranks[0].sessions == 2 and run.ranks[0].host == "host0"
    steps, span_s = timed(run.ranks[0])
    assert steps.step[np.isnan(span_s)].tolist() == [0, 10]
    assert parts(run.ranks[0])["rest"] == pytest.approx(0.0, abs=1e-3)
    assert waiting(run).step_s == pytest.approx(0.11, rel=1e-2)


@pytest.mark.parametrize("cause", ["compute", "data"])
def test_a_late_rank_is_not_waited_for_because_of_what_it_did_less_of(tmp_path, cause):
    ranks, other = RecordedRanks(tmp_path, 2), {"compute": "data", "data": "compute"}[cause]
    for step in range(20):
        ranks.step(step, **{cause: [0.3, 0.0], other: [0.1, 0.2]})
    causes = waiting(ranks.read()).causes[0]
    assert getattr(causes, cause) == causes.whole > 0 and getattr(causes, other) == 0.0


def test_a_step_that_one_rank_alone_recorded_tells_nothing_of_waiting(tmp_path):
    ranks = RecordedRanks(tmp_path, 2)
    for step in range(20):
        if step == 10:
            ranks.traces.pop().close()
        ranks.step(step, compute=[0.1, 0.2][: len(ranks.traces)])
    assert waiting(ranks.read()).steps == 10


def test_what_is_skipped_has_no_part_in_a_ranks_time(tmp_path):
    """A merge among the first steps is none of the others'."""
    ranks = RecordedRanks(tmp_path, 1)
    for step in range(40):
        if step == 10:
            ranks.traces[0].event("together", step=step, wait_s=0.5)
        ranks.step(step, compute=[0.1], rest=[0.1])
    run = ranks.read().ranks[0]
    assert parts(run, skip=20)["wait"] == pytest.approx(0.01 / 0.21, rel=1e-3)
    assert parts(run)["wait"] > 0.05


def test_a_step_that_ranks_make_apart_is_apart_from_its_first_to_before_they_come_together(tmp_path):
    ranks = RecordedRanks(tmp_path, 1)
    for step, kind in ((3, "apart"), (6, "together")):
        ranks.traces[0].event(kind, step=step, wait_s=0.0)
        ranks.traces[0].event("other")
    assert np.flatnonzero(local_steps_of(ranks.read().ranks[0], range(10))).tolist() == [3, 4, 5]


def test_who_comes_last_by_next_to_nothing_has_held_nobody_up(tmp_path):
    ranks = RecordedRanks(tmp_path, 2)
    for step in range(20):
        ranks.step(step, compute=[0.1, 0.1 + (0.0001 if step % 2 else 0.05)])
    assert waiting(ranks.read()).last == (0, 10)


def step_of(number, t_s, *, wait_s=0.0, compute_s=0.1):
    return Step(step=number, t_s=t_s, samples=4, data_s=0.0, compute_s=compute_s, wait_s=wait_s, bytes=0, share=4)


def run_of(*ranks, plans=()):
    """A run of ranks with these steps; all know these plans."""
    tables = [np.array(list(steps), STEPS).view(np.recarray) for steps in ranks]
    records = {rank: RankRun(rank=rank, steps=steps, plans=list(plans)) for rank, steps in enumerate(tables)}
    return Run(folder="", ranks=records)


def test_where_no_step_was_made_together_nobody_waited():
    for run in (run_of([], []), run_of([step_of(0, 1.0, wait_s=0.5)]), run_of([step_of(0, 1.0)], [step_of(1, 2.0)])):
        found = waiting(run)
        assert (found.steps, found.step_s, found.exchange_s) == (0, 0.0, 0.0)
        assert (found.waited_part, found.exchange_part) == (0.0, 0.0) and sum(found.last) == 0
    assert set(parts(run_of([]).ranks[0]).values()) == {0.0}


def test_the_exchange_is_a_part_of_the_time(tmp_path):
    ranks = RecordedRanks(tmp_path, 2)
    for step in range(20):
        ranks.step(step, compute=[0.1, 0.3], exchange=0.1)
    assert waiting(ranks.read()).exchange_part == pytest.approx(0.25, rel=1e-2)


def test_of_a_step_whose_length_is_not_known_the_rest_is_no_cause():
    """As of the first one that a rank which came later has made: what the others did beside says nothing of it."""
    late = [step_of(1, 3.0, wait_s=0.1)]
    early = [step_of(0, 1.0, wait_s=0.1), step_of(1, 3.0, wait_s=0.4)]
    for ranks, index in (((late, early), 0), ((early, late), 1)):
        causes = waiting(run_of(*ranks)).causes[index]
        assert (causes.rest, causes.compute) == (0.0, pytest.approx(0.3))
    both = [step_of(1, 3.0, wait_s=0.4)], [step_of(0, 1.0, wait_s=0.4), step_of(1, 3.0, wait_s=0.1)]
    causes = waiting(run_of(*both)).causes[1]
    assert (causes.rest, causes.compute) == (0.0, pytest.approx(0.3)), "nor where the late rank is known for longer"


def test_in_a_step_whose_length_is_not_known_any_wait_counts():
    assert waiting(run_of([step_of(0, 1.0, wait_s=0.011)], [step_of(0, 1.0, wait_s=0.01)])).last == (0, 1)
    assert waiting(run_of([step_of(0, 1.0, wait_s=0.01)], [step_of(0, 1.0, wait_s=0.01)])).last == (0, 0), "if any"


def test_as_many_ranks_wait_for_each_other_as_the_plan_had_then():
    """Three, and from step 2 on two; what rank 2 still recorded of that was undone."""
    plans = [Plan(version=0, step=0, shares=(4, 4, 4), reason=""), Plan(version=1, step=2, shares=(6, 6), reason="")]
    steps = [[step_of(number, 1.0 + number, wait_s=wait_s) for number in range(5)] for wait_s in (0.2, 0.1, 0.0)]
    found = waiting(run_of(steps[0], steps[1], steps[2][:3], plans=plans))
    assert found.steps == 5
    assert [list(row) for row in found.waited_s] == [
        [0.0, pytest.approx(0.3), pytest.approx(0.4)], [0.0, 0.0, pytest.approx(0.2)], [0.0, 0.0, 0.0]
    ]


def test_a_merge_in_the_first_step_that_counts_counts(tmp_path):
    ranks = RecordedRanks(tmp_path, 1)
    for step in range(20):
        if step == 10:
            ranks.now += 0.5
            ranks.traces[0].event("together", step=step, wait_s=0.5)
        ranks.step(step, compute=[0.1])
    run = ranks.read().ranks[0]
    assert parts(run, skip=10)["wait"] == pytest.approx((10 * 0.01 + 0.5) / (10 * 0.11 + 0.5), rel=1e-2)
    assert sum(parts(run, skip=10).values()) == pytest.approx(1.0, rel=1e-3)


def test_a_merge_in_a_step_that_does_not_count_counts_in_no_session(tmp_path):
    ranks = RecordedRanks(tmp_path, 1)
    for step in range(20):
        ranks.step(step, compute=[0.1], rest=[0.05])
    ranks.traces[0].restart(0)  # the job goes on in another session
    for step in range(20, 40):
        if step == 23:
            ranks.now += 0.5
            ranks.traces[0].event("together", step=step, wait_s=0.5)
        ranks.step(step, compute=[0.1], rest=[0.05])
    run = ranks.read().ranks[0]
    assert parts(run, skip=10)["wait"] == pytest.approx(0.01 / 0.16, rel=1e-2)
    summary = run.summary(skip=10)
    assert summary.samples_per_s == pytest.approx(summary.samples / summary.steps / 0.16, rel=1e-2)


def test_a_merge_after_the_last_step_makes_no_part_negative(tmp_path):
    """It is in no step's span, and may be longer than all else that is not known of them."""
    ranks = RecordedRanks(tmp_path, 1)
    for step in range(20):
        ranks.step(step, compute=[0.1], rest=[0.05])
    ranks.traces[0].event("together", step=20, wait_s=5.0)
    found = parts(ranks.read().ranks[0])
    assert min(found.values()) >= 0.0 and sum(found.values()) == pytest.approx(1.0)
