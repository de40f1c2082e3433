"""When a new plan pays: quickly from a wrong start, quickly after a change, and hardly ever otherwise."""

import math
import random
from collections import deque
from dataclasses import replace
from functools import cache

import pytest

from hvd_hetero.policy.partition import Bound, equal_shares, split, step_time_s
from hvd_hetero.policy.regime import since_last_speed_change
from hvd_hetero.policy.replan import SETTLED, Plan, ReplanRule, decide
from hvd_hetero.policy.speed import Observation, SpeedModel, fit
from hvd_hetero.policy.strategy import LOCAL
from hvd_hetero.policy.trust_region import reachable

SPEEDS = (8.0, 4.0, 2.0, 2.0)
START = Plan(version=0, step=0, shares=(16, 16, 16, 16), reason="start")
LATE = ReplanRule(early_gain=1.0)      # waits for the warm-up, for the cool-down and for all observations


def known(*seconds_per_sample, observations=40, standard_error=0.01, overhead_s=0.0):
    return [SpeedModel(overhead_s=overhead_s, seconds_per_sample=s, standard_error=standard_error,
                       observations=observations, overhead_error=0.02) for s in seconds_per_sample]


@cache
def simulate(seed, *, whole=64, overhead=0.1, noise=0.1, spikes=0.02, steps=300, change_at=None, look_every=1,
             slow=range(0)):
    """Plans, and for each step how much longer than with the best shares it took, of a run from equal shares.

    `overhead` is its part of a step at equal shares; from `change_at` on rank 0 is half as fast. In the steps of `slow`
    rank 1 takes 1.6 times as long.
    """
    rng, ranks = random.Random(seed), range(len(SPEEDS))
    plans = [Plan(version=0, step=0, shares=equal_shares(whole, len(SPEEDS)), reason="start")]
    windows = [deque(maxlen=64) for _ in ranks]
    models, next_plan, excess = [None] * len(SPEEDS), None, []
    for step in range(steps):
        if next_plan is not None:
            plans.append(next_plan)
        factors = [2.0 if change_at is not None and step >= change_at and rank == 0 else 1.0 for rank in ranks]
        factors[1] *= 1.6 if step in slow else 1.0
        alpha, beta = overhead * whole / len(SPEEDS), 1.0 - overhead
        truth = [SpeedModel(overhead_s=alpha * f / s, seconds_per_sample=beta * f / s)
                 for f, s in zip(factors, SPEEDS, strict=True)]
        shares = plans[-1].shares
        excess.append(step_time_s(truth, shares) / step_time_s(truth, split(truth, whole)) - 1.0)
        for window, model, share in zip(windows, truth, shares, strict=True):
            time_s = model.time_s(share) * max(0.3, rng.gauss(1.0, noise)) * (5.0 if rng.random() < spikes else 1.0)
            if step >= 3 and step - plans[-1].step >= 2:
                window.append(Observation(samples=share, compute_s=time_s))
        next_plan = None
        if step % look_every == 0 and min(map(len, windows)) >= 5:
            models = [fit(since_last_speed_change(list(w)), prior=m) for w, m in zip(windows, models, strict=True)]
            next_plan = decide(plans[-1], models, step=step + 1, global_batch_size=whole, previous=plans[:-1])
    return plans, excess


@pytest.mark.parametrize("overhead", [0.0, 0.1, 0.2])
@pytest.mark.parametrize("whole", [64, 512])
def test_from_equal_shares_the_plan_is_within_5_percent_of_the_best_after_20_steps(whole, overhead):
    for seed in range(5):
        _, excess = simulate(seed, whole=whole, overhead=overhead, noise=0.03, steps=21, look_every=1 + seed % 4)
        assert excess[0] > 0.8
        assert excess[20] <= 0.05


@pytest.mark.parametrize("overhead", [0.0, 0.2])
@pytest.mark.parametrize("whole", [64, 512])
def test_when_a_rank_slows_down_the_step_is_within_10_percent_of_the_new_best_in_30_steps(whole, overhead):
    for seed in range(2):
        _, excess = simulate(seed, whole=whole, overhead=overhead, noise=0.05, steps=91, change_at=60, look_every=2)
        assert excess[60] > 0.25
        assert excess[90] <= 0.1


def test_at_constant_speed_there_are_at_most_3_plans_in_300_steps():
    for seed in range(4):
        plans, excess = simulate(seed, whole=64 if seed % 2 else 512, overhead=0.05 * seed, look_every=3)
        assert len(plans) - 1 <= 3
        assert sum(excess[100:]) / 200 < 0.08


@pytest.mark.parametrize("noise", [0.03, 0.06])
def test_a_plan_for_a_rank_that_was_slow_for_ten_steps_does_not_stay(noise):
    """Though its return gains less than what is asked for after so many plans."""
    late = []
    for seed in range(8):
        plans, excess = simulate(seed, noise=noise, steps=250, slow=range(28, 38), look_every=3)
        assert any(plan.shares[1] <= 13 for plan in plans), "the slowness made no plan"
        assert len(plans) - 1 <= 5
        late.append(sum(excess[150:]) / 100)
    assert sum(late) / len(late) < 0.04, late


def test_equal_ranks_stay_equal():
    rng, window = random.Random(9), [[], []]
    for step in range(64):
        for seen in window:
            seen.append(Observation(samples=32, compute_s=max(0.3, rng.gauss(1.0, 0.05))))
        if step >= 5:
            assert decide(Plan(version=0, step=0, shares=(32, 32), reason="start"), [fit(w) for w in window],
                          step=step, global_batch_size=64) is None


def test_the_new_plan_is_the_best_split_and_says_why():
    plan = decide(START, known(1 / 8, 1 / 4, 1 / 2, 1 / 2), step=30, global_batch_size=64)
    assert plan.shares == (32, 16, 8, 8) and plan.version == 1 and plan.step == 30
    assert plan.predicted_step_s == pytest.approx(4.0)
    assert "rank 2 is slowest" in plan.reason and len(plan.reason) <= 80


@pytest.mark.parametrize("hindrance", [
    {"step": 2, "rule": LATE}, {"step": 6, "rule": LATE},
    {"models": known(1 / 8, 1 / 4, 1 / 2, 1 / 2, observations=4), "rule": LATE},
    {"models": known(1 / 8, 1 / 4, 1 / 2, 1 / 2, standard_error=0.5)}, {"models": known(1.0, 1.0, 1.0, 1.0)},
    {"rule": ReplanRule(minimum_gain=0.6)}, {"rule": ReplanRule(dead_band=2.0)},
    {"measured_step_s": 1000.0},
])
def test_no_plan_where_it_would_not_pay(hindrance):
    free = {"models": known(1 / 8, 1 / 4, 1 / 2, 1 / 2), "step": 30, "global_batch_size": 64}
    assert decide(START, **free) is not None
    assert decide(START, **{**free, **hindrance}) is None


@pytest.mark.parametrize("early", [
    {"step": 3}, {"step": 1}, {"rule": ReplanRule(early_gain=0.49)}, {"step": 40},
])
def test_the_first_plan_is_replaced_after_two_observations_by_one_that_gains_much(early):
    soon = {"models": known(1 / 8, 1 / 4, 1 / 2, 1 / 2, observations=2), "step": 3, "global_batch_size": 64, **early}
    plan = decide(START, **soon)
    assert plan.shares == (32, 16, 8, 8)      # a gain of a half


@pytest.mark.parametrize("hindrance", [
    {"models": known(1 / 8, 1 / 4, 1 / 2, 1 / 2, observations=1)}, {"rule": ReplanRule(early_gain=0.51)},
    {"models": known(1 / 18, 1 / 16, 1 / 15, 1 / 14, observations=2)}, {"rule": LATE}, {"step": 0},
    {"models": known(1 / 8, 1 / 4, 1 / 2, 1 / 2, observations=2, standard_error=0.5)},
    {"models": [*known(1 / 18, observations=2), *known(1 / 16, 1 / 15, 1 / 14)], "step": 40},
    {"models": [*known(1 / 8, observations=1), *known(1 / 4, 1 / 2, 1 / 2)]},
    {"rule": ReplanRule(early_gain=0.1, minimum_gain=0.6)},
    {"models": known(1 / 60, 1.0, 1.0, 1.0, observations=2), "rule": ReplanRule(early_gain=0.4)},      # nor on the way
])
def test_the_first_plan_is_not_replaced_early_for_little_or_for_noise(hindrance):
    soon = {"models": known(1 / 8, 1 / 4, 1 / 2, 1 / 2, observations=2), "step": 3, "global_batch_size": 64}
    assert decide(START, **soon) is not None
    assert decide(START, **{**soon, **hindrance}) is None


def test_a_plan_that_comes_early_leaves_nobody_out():
    decided = {"step": 4, "global_batch_size": 8, "bounds": [Bound(quantum=2)] * 4}
    few = replace(START, shares=(2, 2, 2, 2))
    assert decide(few, known(0.1, 0.1, 0.1, 9.0, observations=2), **decided) is None      # nothing less, for rank 3
    assert 0 in decide(few, known(0.1, 0.1, 0.1, 9.0), **{**decided, "step": 8}).shares


def test_a_plan_that_comes_early_keeps_to_the_bounds():
    current, bounds = replace(START, shares=(22, 21, 21, 0)), [Bound(), Bound(), Bound(lower=12), Bound(upper=0)]
    models = known(1 / 8, 1 / 8, 1.0, 1.0, observations=2)
    assert decide(current, models, step=4, global_batch_size=64, bounds=bounds).shares == (26, 26, 12, 0)


def test_only_the_first_plan_is_replaced_early():
    later = replace(START, version=1, step=10)
    rules = ReplanRule(), LATE, ReplanRule(minimum_observations=1)
    assert [rule.observations_needed(START) for rule in rules] == [2, 5, 1]
    assert [rule.observations_needed(later) for rule in rules] == [5, 5, 1]
    assert decide(later, known(1 / 8, 1 / 4, 1 / 2, 1 / 2, observations=2), step=13, global_batch_size=64) is None


def test_the_cool_down_is_long_once_plans_were_made_and_short_after_a_change_of_speed():
    models, far = known(1 / 8, 1 / 4, 1 / 2, 1 / 2), replace(START, version=2, step=100)
    earlier = (replace(START, step=80), replace(START, version=1, step=90))
    decided = {"global_batch_size": 64, "previous": earlier}
    assert decide(far, models, step=110, **decided) is None
    assert decide(far, models, step=121, **decided) is not None
    models[0] = replace(models[0], observations=6)
    assert decide(far, models, step=110, **decided) is not None


def test_a_plan_moves_no_share_beyond_the_trust_region():
    models = known(1 / 60, 1.0, 1.0, 1.0)
    plan = decide(START, models, step=30, global_batch_size=64)
    assert plan.shares[0] == 32 and min(plan.shares) >= 4
    assert decide(plan, models, step=60, global_batch_size=64, previous=(START,)).shares[0] > 55
    out = replace(START, shares=(0, 22, 21, 21))       # a rank that was left out comes back in more than single samples
    assert decide(out, known(1.0, 1.0, 1.0, 1.0), step=30, global_batch_size=64).shares[0] >= 4


def test_without_a_trust_region_a_plan_goes_as_far_as_it_pays():
    bounds = [Bound(lower=1, quantum=q) for q in (1, 2, 1, 4)]
    models = known(8.0, 8.0, 8.0, 1.0)
    rule = ReplanRule(trust_region=math.inf)
    found = decide(START, models, step=50, global_batch_size=64, bounds=bounds, rule=rule)
    assert found.shares == split(models, 64, bounds) != decide(
        START, models, step=50, global_batch_size=64, bounds=bounds).shares


def test_a_move_that_turns_back_is_halved_unless_the_speed_changed():
    before, current = replace(START, shares=(8, 24, 16, 16)), replace(START, version=1, shares=(24, 8, 16, 16))
    models = known(1 / 12, 1 / 20, 1 / 16, 1 / 16)
    damped = decide(current, models, step=60, global_batch_size=64, previous=(before,))
    assert damped.shares == (18, 12, 17, 17)
    models[0] = replace(models[0], observations=6)
    assert decide(current, models, step=60, global_batch_size=64, previous=(before,)).shares == (13, 16, 18, 17)


def test_bounds_hold_always_and_a_plan_that_they_forbid_is_replaced_at_once():
    models = known(1 / 8, 1 / 4, 1 / 2, 1 / 2)
    bounds = [Bound(upper=20), Bound(quantum=4), Bound(lower=6), Bound(lower=6)]
    plan = decide(START, models, step=30, global_batch_size=64, bounds=bounds)
    assert all(b.allows(share) for b, share in zip(bounds, plan.shares, strict=True)) and sum(plan.shares) == 64
    plan = decide(START, models, step=1, global_batch_size=64, bounds=[Bound(upper=12)] + [Bound()] * 3)
    assert plan.shares[0] <= 12 and "bounds" in plan.reason
    assert decide(START, known(*[1.0] * 4), step=0, global_batch_size=32).shares == (8, 8, 8, 8)


def test_every_rank_decides_the_same():
    models = known(0.1, 0.1, 0.3, 0.2)
    assert len({decide(START, models, step=30, global_batch_size=64) for _ in range(3)}) == 1


@pytest.mark.parametrize(("make", "message"), [
    (lambda: Plan(version=0, step=-1, shares=(1,), reason=""), "Received: 0 and -1"),
    (lambda: Plan(version=-1, step=0, shares=(1,), reason=""), "Received: -1 and 0"),
    (lambda: Plan(version=0, step=0, shares=(1, -1), reason=""), "Received: \\(1, -1\\)"),
    (lambda: ReplanRule(minimum_gain=-0.1), "minimum_gain: expected a number, 0 or more. Received: -0.1"),
    (lambda: ReplanRule(trust_region=1.0), "trust_region: .* Received: 1.0"),
    (lambda: ReplanRule(minimum_observations=0), "minimum_observations: expected a number, 1 or more. Received: 0"),
    (lambda: ReplanRule(cooldown_steps="3"), "cooldown_steps: expected a number, 0 or more. Received: '3'"),
    (lambda: ReplanRule(dead_band=None), "dead_band: expected a number, 0 or more. Received: None"),
    (lambda: ReplanRule(trust_region=[2]), r"trust_region: expected a number above 1.* Received: \[2\]"),
    (lambda: decide(START, known(1.0), step=9, global_batch_size=64), "the plan's 4 ranks. Received: 1"),
])
def test_wrong_arguments_say_what_was_received(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def model_of(seconds_per_sample, observations=20):
    return SpeedModel(overhead_s=0.0, seconds_per_sample=seconds_per_sample, standard_error=0.01,
                      observations=observations)


def test_other_shares_are_no_other_strategy():
    current = Plan(version=0, step=0, shares=(32, 32), reason="", strategy=LOCAL)
    plan = decide(current, [model_of(0.01), model_of(0.03)], step=50, global_batch_size=64)
    assert plan is not None and plan.shares != (32, 32) and plan.strategy == LOCAL


def test_a_rank_that_never_had_a_sample_keeps_no_plan_from_the_others():
    current = Plan(version=0, step=0, shares=(32, 32, 0), reason="")
    models = [model_of(0.01), model_of(0.03), model_of(0.02, observations=0)]
    bounds = [Bound(), Bound(), Bound(upper=0)]
    plan = decide(current, models, step=50, global_batch_size=64, bounds=bounds)
    assert plan is not None and plan.shares[0] > 32


def test_a_rule_may_ask_for_nothing():
    rule = ReplanRule(warmup_steps=0, minimum_observations=1, minimum_gain=0.0, dead_band=0.0, cooldown_steps=0,
                      early_cooldown_steps=0)
    models = known(1 / 8, 1 / 4, 1 / 2, 1 / 2, observations=1)
    assert decide(START, models, step=0, global_batch_size=64, rule=rule).shares == (32, 16, 8, 8)


def test_a_plan_comes_in_the_first_step_that_may_have_one_and_not_before():
    models = known(1 / 8, 1 / 4, 1 / 2, 1 / 2)
    rules = {7: LATE, 10: ReplanRule(warmup_steps=10), 12: replace(LATE, early_cooldown_steps=12), 1: ReplanRule()}
    for first, rule in rules.items():
        made = [step for step in range(30) if decide(START, models, step=step, global_batch_size=64, rule=rule)]
        assert made == list(range(first, 30)), rule


def test_every_rank_that_has_a_share_is_measured_before_a_plan():
    """However small its share, and however well the others are known."""
    current = replace(START, version=1, shares=(31, 16, 16, 1))
    models = known(1 / 8, 1 / 4, 1 / 2, 1 / 8)
    for observations, planned in ((4, False), (5, True)):
        models[3] = replace(models[3], observations=observations)
        found = decide(current, models, step=50, global_batch_size=64)
        assert (found is not None) is planned, observations


def test_ranks_that_were_all_measured_for_a_short_time_have_not_changed_their_speed():
    """Only a rank that is known for a cool-down at most, and half as long as another, has: the long cool-down holds."""
    far = replace(START, version=2, step=100)
    earlier = (replace(START, step=80), replace(START, version=1, step=90))
    decided = {"step": 110, "global_batch_size": 64, "previous": earlier}
    assert decide(far, known(1 / 8, 1 / 4, 1 / 2, 1 / 2, observations=15), **decided) is None
    for most, observations, planned in ((38, 20, False), (38, 19, True), (100, 21, False), (100, 20, True)):
        models = known(1 / 8, 1 / 4, 1 / 2, 1 / 2, observations=most)
        models[0] = replace(models[0], observations=observations)
        assert (decide(far, models, **decided) is not None) is planned, (most, observations)


def test_a_move_as_large_as_the_dead_band_is_none():
    current = replace(START, shares=(20, 20, 20, 20))
    models = known(1 / 21, 1 / 19, 1 / 20, 1 / 20, standard_error=0.0)
    for dead_band, planned in ((0.05, False), (0.049, True)):
        found = decide(current, models, step=50, global_batch_size=80, rule=ReplanRule(dead_band=dead_band))
        assert (found is not None) is planned, dead_band


def test_a_plan_saves_as_much_of_a_step_as_the_rule_asks_for():
    """Of what is known exactly; the more plans there were lately, the more it has to be."""
    current, models = replace(START, shares=(24, 16, 12, 12)), known(1 / 26, 1 / 16, 1 / 11, 1 / 11, standard_error=0.0)
    models = [replace(model, overhead_error=0.0) for model in models]
    best = split(models, 64)
    gain = 1.0 - step_time_s(models, best) / step_time_s(models, current.shares)
    assert gain > 0.05
    for part, planned in ((0.98, True), (1.02, False)):
        rule = ReplanRule(minimum_gain=part * gain)
        assert (decide(current, models, step=50, global_batch_size=64, rule=rule) is not None) is planned, part
        # Of a step that takes twice as long with what no plan changes it is half.
        rule, twice = replace(rule, minimum_gain=part * gain / 2), 2 * step_time_s(models, current.shares)
        found = decide(current, models, step=50, global_batch_size=64, rule=rule, measured_step_s=twice)
        assert (found is not None) is planned, part
        if found is not None:
            assert found.predicted_step_s == pytest.approx(twice * (1.0 - gain / 2))


def test_a_plan_knows_how_many_passes_a_share_takes():
    """A second a pass, of which one of rank 1's holds 8 samples."""
    models, caps = known(0.01, 0.01, overhead_s=1.0), (None, 8)
    current = Plan(version=0, step=0, shares=(32, 32), reason="")
    plan = decide(current, models, step=50, global_batch_size=64, micro_batch=caps)
    assert plan.shares[1] < 32 and "rank 1 is slowest" in plan.reason
    assert plan.predicted_step_s == pytest.approx(step_time_s(models, plan.shares, caps))
    assert decide(current, models, step=50, global_batch_size=32, micro_batch=caps).shares == (24, 8)
    assert f"it takes {models[1].time_s(32, 8):.4g} s" in plan.reason


def test_a_share_shrinks_by_the_square_of_what_it_may_grow_by():
    current = Plan(version=0, step=0, shares=(32, 8, 8, 8, 8), reason="")
    for trust_region, least in ((1.25, 24), (2.0, 8), (3.0, 3), (5.0, 1)):
        plan = decide(current, known(1.0, *[1e-4] * 4), step=50, global_batch_size=64,
                      rule=ReplanRule(trust_region=trust_region))
        assert plan.shares[0] == least and max(plan.shares[1:]) <= 8 * trust_region, trust_region


def test_a_plan_has_shares():
    with pytest.raises(ValueError, match="shares: expected one of 0 or more for each rank. Received: \\(\\)"):
        Plan(version=0, step=0, shares=(), reason="")


def after_plans(count, *, shares=(24, 16, 12, 12)):
    """The plan that holds and those before it, where so many of them were made lately; and a step of a new one."""
    plans = [replace(START, shares=shares, version=number, step=1000 + 25 * number) for number in range(count + 1)]
    return plans[-1], {"previous": plans[:-1], "step": plans[-1].step + 25, "global_batch_size": 64}


def exact(*seconds_per_sample):
    return [replace(each, overhead_error=0.0) for each in known(*seconds_per_sample, standard_error=0.0)]


@pytest.mark.parametrize(("plans", "changed", "times"), [
    (0, False, 1.0), (1, False, 1.0), (2, False, 2.5), (3, False, 4.0), (5, False, 4.0),
    (1, True, 1.0), (2, True, 5.0), (3, True, 8.0),
])
def test_the_more_plans_there_were_lately_the_more_has_to_be_gained(plans, changed, times):
    """And twice as much by what rests on a new speed, once there were some."""
    models = exact(1 / 26, 1 / 16, 1 / 11, 1 / 11)
    current, asked = after_plans(plans)
    models[0] = replace(models[0], observations=12 if changed else 40)
    gain = 1.0 - step_time_s(models, split(models, 64)) / step_time_s(models, current.shares)
    for part, planned in ((0.98, True), (1.02, False)):
        rule = ReplanRule(minimum_gain=part * gain / times, dead_band=0.0)
        assert (decide(current, models, rule=rule, **asked) is not None) is planned, part


@pytest.mark.parametrize(("halves", "observations", "lasts"), [
    ((1.0, 1.0), 50, True), ((0.95, 1.05), 50, True), ((1.0, 1.0), 49, False), (None, 50, False),
    ((1.2, 0.9), 50, False), ((0.9, 1.2), 50, False),
])
@pytest.mark.parametrize("unit_s", [1.0, 1e-3])
def test_a_gain_that_lasts_is_taken_however_many_plans_there_were(halves, observations, lasts, unit_s):
    """It lasts if the older half of 50 observations or more of each rank offers it as well as the newer: that much of a
    whole step, with what no plan changes."""
    models = [replace(each, observations=observations) for each in exact(*(unit_s / n for n in (24, 16, 12, 12)))]
    models = [replace(models[0], halves=halves), *(replace(each, halves=halves and (1.0, 1.0)) for each in models[1:])]
    current, asked = after_plans(3, shares=(27, 14, 11, 12))      # rank 0 takes a tenth too long
    found = decide(current, models, **asked)
    assert (found is not None) is lasts
    if found is not None:
        assert found.shares == (24, 16, 12, 12)
    rule = ReplanRule(minimum_gain=0.12)      # which holds for any gain
    assert decide(current, models, rule=rule, **asked) is None
    found = decide(current, models, measured_step_s=3.0 * unit_s, **asked)
    assert (found is not None) is (lasts and min(halves) == 1.0)


@pytest.mark.parametrize(("turns", "apart", "least"), [
    (0, SETTLED, 20), (1, SETTLED, SETTLED), (2, SETTLED, 3 * SETTLED), (2, SETTLED - 1, 20),
])
def test_the_more_plans_turned_back_for_a_gain_that_lasts_the_longer_the_next_one_waits(turns, apart, least):
    """Plans that turned back sooner were made for no such gain."""
    models = [replace(each, observations=50, halves=(1.0, 1.0)) for each in exact(1 / 24, 1 / 16, 1 / 12, 1 / 12)]
    there, back = (27, 14, 11, 12), (24, 16, 12, 12)
    since = [there if ago % 2 == 0 else back for ago in range(turns + 2)]      # the last plan first
    plans = [replace(START, version=number, step=1000 + apart * number, shares=shares)
             for number, shares in enumerate([since[-1], since[-1], *reversed(since)])]
    *previous, current = plans      # so many that otherwise more is asked for
    for held, planned in ((least - 1, False), (least, True)):
        found = decide(current, models, step=current.step + held, global_batch_size=64, previous=previous)
        assert (found is not None) is planned, held


def test_a_first_plan_is_not_replaced_early_for_a_gain_that_lasts():
    models = [replace(each, observations=50, halves=(1.0, 1.0)) for each in exact(1 / 24, 1 / 16, 1 / 12, 1 / 12)]
    start, rule = replace(START, shares=(27, 14, 11, 12)), ReplanRule(early_cooldown_steps=100)
    for step, planned in ((99, False), (100, True)):
        assert (decide(start, models, step=step, global_batch_size=64, rule=rule) is not None) is planned


def test_a_move_that_turns_back_is_not_halved_if_its_gain_lasts():
    before, current = replace(START, shares=(24, 16, 12, 12)), replace(START, version=1, shares=(28, 12, 12, 12))
    asked = {"step": 100, "global_batch_size": 64, "previous": (before,)}
    models = [replace(each, observations=50) for each in exact(1 / 24, 1 / 16, 1 / 12, 1 / 12)]
    assert decide(current, models, **asked).shares == (26, 14, 12, 12)
    models = [replace(each, halves=(1.0, 1.0)) for each in models]
    assert decide(current, models, **asked).shares == (24, 16, 12, 12)


@pytest.mark.parametrize(("ranks", "plans", "errors"), [
    (4, 0, 2.0), (4, 2, 2.0), (4, 3, 3.0), (64, 0, math.sqrt(2.0 * math.log(64.0))),
])
def test_a_gain_that_errors_of_measurement_explain_is_none(ranks, plans, errors):
    """So many standard errors: the slowest of many ranks is far from the mean by luck."""
    models = exact(*[1 / 26, 1 / 16, 1 / 11, 1 / 11] * (ranks // 4))
    current, asked = after_plans(plans, shares=(24, 16, 12, 12) * (ranks // 4))
    asked["global_batch_size"] *= ranks // 4
    best = split(models, asked["global_batch_size"])
    times = [[m.time_s(b) for m, b in zip(models, shares, strict=True)] for shares in (current.shares, best)]
    both = {each.index(max(each)) for each in times}
    border = (max(times[0]) / max(times[1]) - 1.0) / errors / math.sqrt(len(both))
    for part, planned in ((0.98, True), (1.02, False)):
        noisy = [replace(model, standard_error=part * border) for model in models]
        found = decide(current, noisy, rule=ReplanRule(minimum_gain=0.0, dead_band=0.0), **asked)
        assert (found is not None) is planned, part


@pytest.mark.parametrize(("caps", "overhead_s", "shares"), [(None, 0.0, (24, 40)), ((8, None), 1.0, (16, 48))])
def test_a_share_that_shrinks_is_as_uncertain_as_one_that_grows(caps, overhead_s, shares):
    """Rank 0 is the slowest before and after, in a time that rests on its overhead; also if that is of several passes.
    """
    current = replace(START, shares=(32, 32))
    for bounds in ([Bound(), Bound(upper=shares[1])], [Bound(lower=shares[0]), Bound()]):
        found = []
        for overhead_error in (0.0, 0.5, 1.5):
            models = known(0.02 if overhead_s else 1.0, 0.01, overhead_s=overhead_s, standard_error=0.0)
            models = [replace(model, overhead_error=overhead_error) for model in models]
            found.append(decide(current, models, step=50, global_batch_size=64, bounds=bounds, micro_batch=caps))
        assert found[0].shares == found[1].shares == shares and found[2] is None


def test_a_rank_that_comes_back_may_be_the_slowest():
    current, bounds = replace(START, shares=(0, 22, 21, 21)), [Bound(quantum=4)] + [Bound()] * 3
    models = [replace(model, overhead_error=0.0) for model in known(5.2, 1.0, 1.0, 1.0, standard_error=0.0)]
    assert decide(current, models, step=50, global_batch_size=64, bounds=bounds).shares == (4, 20, 20, 20)


def test_a_share_that_loading_limits_may_grow_from_little():
    """How long computing takes is not known well for so many samples; it is by far not what they take."""
    held = Plan(version=2, step=0, shares=(3, 61), reason="too far")
    slow, fast = (replace(each, overhead_error=0.15) for each in known(0.001, 0.001))
    told = {"step": 60, "global_batch_size": 64, "rule": ReplanRule(trust_region=math.inf)}
    plan = decide(held, [replace(slow, loading_s=0.0045), replace(fast, loading_s=0.00147)], **told)
    assert plan is not None and plan.shares == (16, 48)
    # Of computing that takes as long, it would be too little.
    computes = [replace(slow, seconds_per_sample=0.0045), replace(fast, seconds_per_sample=0.00147)]
    assert decide(held, computes, **told) is None


@pytest.mark.parametrize(("plans", "shares"), [(3, (1, 10, 10, 11)), (1, (1, *[9] * 7))])
def test_a_small_share_grows_where_a_part_of_the_way_gains_too_little(plans, shares):
    """Of a rank that has recovered. With eight ranks, no other one has a sample less before it has all of its own."""
    current, asked = after_plans(plans, shares=shares)
    asked["global_batch_size"] = whole = sum(shares)
    models, taken = exact(*[1.0] * len(shares)), []
    while (plan := decide(current, models, **asked)) is not None:
        assert max(plan.shares) <= max(current.shares)
        taken.append(plan.shares[0])
        asked = {**asked, "previous": (*asked["previous"], current)[-plans:], "step": plan.step + 25}
        current = plan
    assert taken == [2, 4, 8] and current.shares == (8,) * len(shares) and sum(current.shares) == whole


def test_a_share_shrinks_to_nothing_where_a_part_of_the_way_gains_too_little():
    """Each pass of rank 0 takes long, however few its samples are."""
    models = [replace(exact(0.01)[0], overhead_s=30.0), *exact(1.0, 1.0, 1.0)]
    current, asked = replace(START, version=1, shares=(4, 20, 20, 20)), {"step": 50, "global_batch_size": 64}
    plan = decide(current, models, **asked)
    assert plan.shares == (1, 21, 21, 21) and "on the way" in plan.reason
    assert decide(plan, models, **{**asked, "step": 100}, previous=(current,)).shares == (0, 22, 21, 21)


def test_there_are_shares_within_reach_whatever_came_before_and_none_goes_back_by_more_than_half():
    """Up to a quantum."""
    rng = random.Random(3)
    for _ in range(300):
        limits = [Bound(lower=0, quantum=rng.choice([1, 2, 3, 4, 8])) for _ in range(rng.randint(2, 5))]
        current, last = ([each.quantum * rng.randint(0, 6) for each in limits] for _ in range(2))
        if not (whole := sum(current)):
            continue
        models = known(*(rng.uniform(0.1, 3.0) for _ in limits))
        best, damped = (reachable(current, models, limits, trust_region=2.0, last=one)[0] for one in (None, last))
        for shares in (best, damped):
            assert sum(shares) == whole and all(map(Bound.allows, limits, shares))
        for limit, new, least, now, old in zip(limits, best, damped, current, last, strict=True):
            if (new - now) * (now - old) < 0:
                assert abs(least - now) < abs(new - now) / 2 + limit.quantum


def test_a_part_of_the_way_is_not_gone_for_little_or_for_noise():
    current, asked = after_plans(3, shares=(1, 10, 10, 11))
    asked["global_batch_size"] = 32
    free = exact(1.0, 1.0, 1.0, 1.0)
    found = decide(current, free, **asked)
    assert found.shares[0] == 2 and found.reason.endswith("on the way to shares with 8 s") and len(found.reason) <= 80
    assert decide(current, free, rule=ReplanRule(minimum_gain=0.07), **asked) is None      # four times that, by now
    noisy, noisier = ([replace(each, standard_error=error) for each in free] for error in (0.01, 0.1))
    assert decide(current, noisy, **asked) is not None and decide(current, noisier, **asked) is None
    rule, last = ReplanRule(minimum_gain=0.05), asked["previous"][-1]
    assert decide(current, free, rule=rule, **asked) is not None
    asked["previous"] = (*asked["previous"][:-1], replace(last, shares=(4, 9, 9, 10)))
    assert decide(current, free, rule=rule, **asked) is None      # of the way back, a half counts
    lasting = [replace(each, observations=50, halves=(1.0, 1.0)) for each in free]
    assert decide(current, lasting, rule=ReplanRule(minimum_gain=0.2), **asked) is not None      # unless it lasts
    assert decide(current, exact(5.0, 1.0, 1.0, 1.0), **asked) is None      # the whole way is not far


def test_a_share_returns_at_once_to_what_its_rank_was_measured_at_and_no_further():
    current = replace(START, version=1, shares=(60, 4))
    asked = {"step": 50, "global_batch_size": 64}
    for each_s in (1.0, 0.01):
        slow, fast = exact(1.0, each_s)
        assert decide(current, [slow, fast], **asked).shares == (56, 8)
        measured = replace(fast, measured=(4, 32))
        assert decide(current, [slow, measured], **asked).shares == (32, 32)
    held = [replace(each, measured=(8, 60)) for each in exact(1.0, 0.01)]
    assert decide(replace(current, shares=(60, 60)), held, step=50, global_batch_size=120).shares == (8, 112)
