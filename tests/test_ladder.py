"""The ladder: who takes part in which merges, who is out, and the way back up."""

import random
from bisect import bisect_right

import pytest

from hvd_hetero.policy.ladder import (
    KEPT_STEPS,
    LEAST_IDLE_STEPS,
    TRY_STEPS,
    Rung,
    idle_since,
    merge_intervals,
    moves,
    plans_to_keep,
    rungs,
    trial,
)
from hvd_hetero.policy.local_round import round_lengths
from hvd_hetero.policy.partition import Bound, split, step_time_s
from hvd_hetero.policy.replan import Plan
from hvd_hetero.policy.speed import SpeedModel


def settled(step_s, *, round_steps=4, most=4, current=None):
    """The intervals that ranks of these speeds come to."""
    current = current or (1,) * len(step_s)
    for _ in range(10):
        current = merge_intervals(step_s, round_lengths(step_s, round_steps), current=current, most=most)
    return current


@pytest.mark.parametrize(("times", "expected"), [
    (1, 1), (2.9, 1), (3.9, 1), (4.1, 1), (6.9, 1), (7.1, 2), (8, 2), (12, 3), (16, 4), (1000, 4),
])
def test_a_rank_takes_part_as_often_as_one_of_its_steps_fits(times, expected):
    assert settled([0.1, 0.1 * times]) == (1, expected)


def test_the_fastest_rank_takes_part_in_each_merge_and_a_slower_one_in_no_more():
    for seed in range(200):
        step_s = [((seed * 7919 + rank * 104729) % 997 + 1) ** 2 / 1e4 for rank in range(5)]
        for current in ((1,) * 5, (4,) * 5, (1, 2, 3, 4, 1)):
            lengths = round_lengths(step_s, 4)
            found = merge_intervals(step_s, lengths, current=current, most=4)
            assert all(1 <= k <= 4 for k in found)
        found = settled(step_s)
        by_speed = [found[rank] for rank in sorted(range(5), key=lambda rank: step_s[rank])]
        assert by_speed[0] == 1 and by_speed == sorted(by_speed)
        assert settled(step_s[::-1]) == found[::-1], "whichever number it has"


def test_one_long_step_does_not_send_a_rank_down_at_once_and_noise_moves_nobody():
    lengths = (4, 1)
    assert merge_intervals([0.1, 4.0], lengths, current=(1, 1), most=4) == (1, 2)
    assert merge_intervals([0.1, 4.0], lengths, current=(1, 2), most=4) == (1, 4)
    for seconds in (0.7, 0.9, 1.05):  # 1.75 to 2.6 rounds
        assert merge_intervals([0.1, seconds], lengths, current=(1, 2), most=4) == (1, 2)


def test_short_rounds_send_nobody_down_for_noise():
    """In rounds of one step, r is no more than the ranks' own noise."""
    assert settled([0.1, 0.28, 0.2], round_steps=1) == (1, 1, 1)
    assert settled([0.1, 0.32, 0.2], round_steps=1) == (1, 3, 1)


def test_the_way_back_up_is_at_once():
    assert merge_intervals([0.1, 0.1], (4, 4), current=(1, 4), most=4) == (1, 1)


def test_no_interval_where_no_merge_may_be_missed():
    assert settled([0.1, 100.0], most=1) == (1, 1)


def test_rungs_and_who_moved():
    before, after = rungs((16, 16, 16, 16), (1,) * 4), rungs((50, 13, 1, 0), (1, 1, 3, 1))
    assert before == (Rung.EVERY_STEP,) * 4
    assert after == (Rung.EVERY_STEP, Rung.SMALLER_SHARE, Rung.FEWER_MERGES, Rung.OUT)
    moved = moves(before, after, "why")
    assert [(move.rank, move.after.title) for move in moved] == [(1, "smaller share"), (2, "fewer merges"), (3, "out")]
    assert all(move.reason == "why" and move.before == Rung.EVERY_STEP for move in moved)
    assert not moves(after, after, "why")
    assert rungs((4, 3, 3), (1, 1, 1)) == (Rung.EVERY_STEP,) * 3, "what does not divide is no smaller share"


def model(seconds_per_sample, overhead_s=0.0):
    return SpeedModel(overhead_s=overhead_s, seconds_per_sample=seconds_per_sample, standard_error=0.0, observations=20)


def plan(version, step, shares):
    return Plan(version=version, step=step, shares=shares, reason="")


BOUNDS = [Bound(lower=0)] * 3


def test_a_rank_is_out_where_one_sample_would_make_it_the_last():
    assert split([model(0.01), model(0.01), model(5.0)], 32, BOUNDS) == (16, 16, 0)


def test_a_rank_that_is_out_is_tried_again_and_ever_more_rarely():
    models = [model(0.01), model(0.01), model(0.17)]
    plans = [plan(0, 0, (11, 11, 10)), plan(1, 20, (14, 13, 5)), plan(2, 40, (16, 16, 0))]
    assert idle_since(plans, 2) == 40 and idle_since(plans, 0) is None
    waits = []
    for _ in range(4):
        step = plans[-1].step
        while (tried := trial(plans, models, step=step, bounds=BOUNDS)) is None:
            step += 1
        assert tried.shares == (16, 15, 1) and tried.version == plans[-1].version + 1 and "rank 2" in tried.reason
        assert tried.step == step and tried.predicted_step_s is None, "it is not made to shorten a step"
        waits.append(step - plans[-1].step)
        plans += [tried, plan(tried.version + 1, step + 10, (16, 16, 0))]
    assert waits == [LEAST_IDLE_STEPS * times for times in (1, 2, 4, 8)]


def test_plans_for_other_ranks_do_not_put_off_a_try():
    models = [model(0.01), model(0.01), model(0.17)]
    plans = [plan(0, 0, (11, 11, 10))]
    plans += [plan(number, 300 * number, (16 + number % 2, 16 - number % 2, 0)) for number in range(1, 8)]
    assert trial(plans, models, step=plans[-1].step + LEAST_IDLE_STEPS - 1, bounds=BOUNDS) is None
    assert trial(plans, models, step=plans[-1].step + LEAST_IDLE_STEPS, bounds=BOUNDS) is not None


def test_a_try_costs_no_more_than_its_price():
    models = [model(0.01), model(0.01), model(16.0)]  # a hundred times a step of the others
    plans = [plan(0, 0, (16, 16, 0))]
    usual_s = step_time_s(models, plans[0].shares)
    needed = TRY_STEPS * (16.0 / usual_s - 1.0) / 0.01  # a hundredth of the time
    assert trial(plans, models, step=int(needed) - 1, bounds=BOUNDS) is None
    assert trial(plans, models, step=int(needed) + 1, bounds=BOUNDS) is not None
    assert trial(plans, models, step=int(needed) + 1, bounds=BOUNDS, try_steps=2 * TRY_STEPS) is None


def test_each_pass_of_a_try_has_its_price():
    models = [model(0.01), model(0.01), model(0.01, overhead_s=4.0)]
    plans, bounds = [plan(0, 0, (16, 16, 0))], [Bound(), Bound(), Bound(quantum=4)]
    usual_s = step_time_s(models, plans[0].shares)
    needed, more = (TRY_STEPS * (step_time_s(models[2:], (4,), [cap]) / usual_s - 1.0) / 0.01 for cap in (None, 1))
    assert trial(plans, models, step=int(needed) + 1, bounds=bounds) is not None
    assert trial(plans, models, step=int(more) - 1, bounds=bounds, micro_batch=[None, None, 1]) is None
    assert trial(plans, models, step=int(more) + 1, bounds=bounds, micro_batch=[None, None, 1]) is not None


def test_the_plans_that_are_kept_tell_what_all_would():
    """Which one held lately, since when who is out, and how often who was tried; and there are few of them."""

    def told(plans, step):
        starts = [each.step for each in plans]
        lately = {at: plans[bisect_right(starts, at) - 1] for at in range(step - KEPT_STEPS, step + 1, 64)}
        back = [sum(new.shares[rank] > 0 == old.shares[rank] for old, new in zip(plans, plans[1:], strict=False))
                for rank in range(3)]
        return lately, back, [idle_since(plans, rank) for rank in range(3)]

    dice, step, plans, kept = random.Random(1), 0, [], []
    for version in range(300):
        shares = tuple(dice.choice([0, 1, 2]) if version % 10 == rank else 9 for rank in range(3))
        plans, step = [*plans, plan(version, step, shares)], step + 64 * dice.randint(1, 8)
        kept = plans_to_keep([*kept, plans[-1]], step)
        if step > KEPT_STEPS:
            assert told(kept, step) == told(plans, step) and kept[0] == plans[0]
    assert len(kept) < 0.5 * len(plans)


def test_a_try_respects_bounds_and_leaves_others_out():
    models = [model(0.01)] * 4
    plans = [plan(0, 0, (16, 16, 0, 0))]
    bounds = [Bound(upper=16), Bound(upper=16, quantum=4), Bound(quantum=4), Bound(quantum=4)]
    tried = trial(plans, models, step=10_000, bounds=bounds)
    assert tried is not None and tried.shares == (16, 12, 4, 0) or tried.shares == (12, 16, 4, 0)
    assert trial(plans, models, step=10_000, bounds=[Bound(lower=16), Bound(lower=16), Bound(), Bound()]) is None
    assert trial(plans, models, step=10_000, bounds=[Bound(), Bound(), Bound(upper=0), Bound(upper=0)]) is None
    assert trial([plan(0, 0, (8, 8, 8, 8))], models, step=10_000, bounds=[Bound()] * 4) is None


@pytest.mark.parametrize(("call", "message"), [
    (lambda: merge_intervals([], [], current=[], most=1), "one of each for every rank"),
    (lambda: merge_intervals([0.1, 0.0], [1, 1], current=[1, 1], most=1), "finite seconds above 0"),
    (lambda: merge_intervals([0.1], [1], current=[1], most=0), "at least 1"),
    (lambda: rungs((1, 2), (1,)), "one of each for every rank"),
    (lambda: rungs((1, -2), (1, 1)), "at least 0"),
])
def test_wrong_arguments_say_what_was_expected(call, message):
    with pytest.raises(ValueError, match=message):
        call()
