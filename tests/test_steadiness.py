"""Stops of ranks that wait for nobody: they are a part of a rank's time, in shares and in the length of rounds."""

from __future__ import annotations

import json
import math
import random

import pytest

from hvd_hetero.optimizers.agreement import BalancerArguments
from hvd_hetero.optimizers.planner import Planner
from hvd_hetero.optimizers.steadiness import MEMORY, Steadiness
from hvd_hetero.optimizers.stop import StopMeter
from hvd_hetero.policy.jitter import StopSums, include_stops
from hvd_hetero.policy.partition import Bound
from hvd_hetero.policy.speed import Observation, SpeedModel

MODEL = SpeedModel(overhead_s=0.01, seconds_per_sample=0.002, standard_error=0.01, observations=20)


def test_stops_stretch_a_ranks_time_and_make_it_less_sure() -> None:
    found = include_stops(MODEL, StopSums(running_s=60.0, stopped_s=20.0, stops=9.0))
    assert found.time_s(10) == pytest.approx(MODEL.time_s(10) / 0.75)
    assert found.standard_error == pytest.approx((0.01**2 + (0.25 / 3) ** 2) ** 0.5)
    assert found.observations == MODEL.observations
    assert include_stops(MODEL, StopSums(60.0, 0.0, 0.0)) is MODEL
    assert include_stops(MODEL, StopSums(60.0, 20.0, 1.0), least_stops=2.0) is MODEL


def test_stops_are_forgotten() -> None:
    steadiness = Steadiness(2)
    steadiness.hear(0, [StopSums(10.0, 0.0, 0.0), StopSums(10.0, 10.0, 10.0)])
    assert steadiness.alone_s([1.0, 1.0]) == [1.0, 2.0]
    for step in range(MEMORY, 5 * MEMORY + 1, MEMORY):
        steadiness.hear(step, [StopSums(10.0, 0.0, 0.0)] * 2)
    assert steadiness.alone_s([1.0, 0.0]) == [1.0, 0.0]


def test_a_job_that_goes_on_knows_how_its_ranks_stalled() -> None:
    before, after = Steadiness(3), Steadiness(3)
    before.hear(5 * MEMORY, [StopSums(10.0, 0.0, 0.0), StopSums(10.0, 10.0, 10.0), StopSums(10.0, 0.0, 0.0)])
    after.load_state_dict(json.loads(json.dumps(before.state_dict())), [2, None, 1])
    for step in (0, 1):  # what was heard is forgotten from where it was heard
        assert after.alone_s([1.0, 1.0, 1.0]) == [1.0, 1.0, pytest.approx(2.0)]
        after.hear(5 * MEMORY + 1 + step, [StopSums()] * 3)


def planned(*, is_local: bool, stops: tuple[float, ...], seed: int = 0, steps: int = 400) -> Planner:
    """The planner of a job of four alike ranks, each of which is stopped for 1 s so many times in a second."""
    rng, meters = random.Random(seed), [StopMeter() for _ in stops]
    terms = BalancerArguments(
        global_batch_size=64, min_share=1, max_share=None, quantum=1, max_micro_batch=None, shares=None, adaptive=True,
        bounds=(Bound(lower=1),) * 4, first_shares=(16,) * 4, micro_caps=(None,) * 4,
    )  # fmt: skip
    planner = Planner(terms)
    planner.is_local = lambda step: is_local
    for step in range(steps):
        shares = planner.plan_at(step).shares
        running = [share * 0.01 * rng.lognormvariate(0.0, 0.03) for share in shares]
        times = [s + sum(1.0 for _ in range(10) if rng.random() < s * rate / 10)
                 for s, rate in zip(running, stops, strict=True)]  # fmt: skip
        for meter, share, time_s in zip(meters, shares, times, strict=True):
            meter.add(share, time_s)
        planner.observe(step, shares, times)
        planner.steadiness.hear(step, [meter.take() for meter in meters])
        if planner.announcement:
            planner.accept(planner.announcement, step)
        else:
            planner.look(step, measured_step_s=max(times))
    return planner


@pytest.mark.parametrize("seed", range(4))
def test_a_rank_that_is_often_stopped_gets_what_it_has_time_for(seed: int) -> None:
    """Stopped for a third of the time: two thirds of the others' speed, when nobody waits for it."""
    shares = planned(is_local=True, stops=(0.0, 0.5, 0.0, 0.0), seed=seed).plans[-1].shares
    assert 9 <= shares[1] <= 14 and all(16 <= share <= 19 for share in (shares[0], *shares[2:])), shares


@pytest.mark.parametrize("seed", range(4))
def test_stops_change_no_shares_where_all_wait_for_all(seed: int) -> None:
    assert len(planned(is_local=False, stops=(0.0, 0.5, 0.0, 0.0), seed=seed).plans) == 1


@pytest.mark.parametrize("seed", range(4))
def test_stops_that_all_have_alike_change_hardly_any(seed: int) -> None:
    plans = planned(is_local=True, stops=(0.1,) * 4, seed=seed).plans
    assert len(plans) <= 3 and all(12 <= share <= 20 for share in plans[-1].shares), [plan.shares for plan in plans]


@pytest.mark.parametrize("batches", [1, 3])
def test_every_second_of_a_rank_is_one_in_which_it_ran_or_was_stopped(batches: int) -> None:
    meter, times_s = StopMeter(), [0.1] * 20 + [1.1] + [0.1] * 5
    for time_s in times_s:
        meter.add(8, time_s, batches=batches)
    ran = meter.take()
    assert ran.stops == 1 and ran.stopped_s == pytest.approx(batches * 1.0)
    assert ran.running_s + ran.stopped_s == pytest.approx(batches * sum(times_s))


def test_a_short_batch_between_hides_no_stop() -> None:
    """The short last batch of each epoch of six; and a new size is known once it has come often enough."""
    meter = StopMeter()
    for size, time_s in [*([(8, 0.1)] * 5 + [(3, 0.05)]) * 4, (8, 1.1), *[(4, 0.1)] * 6, (4, 1.1)]:
        meter.add(size, time_s)
    ran = meter.take()
    assert (ran.stops, ran.stopped_s) == (2, pytest.approx(2.0))
    assert ran.running_s == pytest.approx(20 * 0.1 + 4 * 0.05 + 0.1 + 6 * 0.1 + 0.1)


def test_as_many_stops_as_are_enough_are_enough() -> None:
    for stops, unsteady, shares in ((1.0, False, False), (2.0, True, False), (3.0, True, False), (4.0, True, True)):
        steadiness = Steadiness(1)
        steadiness.hear(0, [StopSums(10.0, 10.0, stops)])
        assert (steadiness.jitters([MODEL], [[]])[0].stalled == 0.5) is unsteady, stops
        assert (steadiness.alone_s([1.0]) == [2.0]) is shares, stops
        assert (steadiness.alone([MODEL])[0] is not MODEL) is shares, stops


def test_what_was_heard_fades_with_the_batches_since_and_never_grows() -> None:
    for steps, left in ((0, 1.0), (MEMORY, math.exp(-1.0)), (-MEMORY, 1.0)):
        steadiness = Steadiness(1)
        steadiness.hear(MEMORY, [StopSums(0.0, 100.0, 10.0)])
        before = steadiness._ran[0, 1]
        steadiness.hear(MEMORY + steps, [StopSums(300.0, 0.0, 0.0)])
        ran = StopSums(*steadiness._ran[0])
        assert ran.stopped_s == pytest.approx(before * left) and ran.running_s == 300.0


def test_how_steps_vary_is_told_from_what_the_model_says_of_them() -> None:
    """Also of sizes that alternate, and where the model is off by a factor."""
    steadiness = Steadiness(3)
    seen = [[Observation(samples=n, compute_s=f * MODEL.time_s(n) * (1.0 + 0.1 * sign))
             for n in (10, 20, 30, 40) for sign in (-1, 0, 1)] for f in (1.0, 3.0)]  # fmt: skip
    found = [jitter.variation for jitter in steadiness.jitters([MODEL] * 3, [*seen, []])]
    assert found == [pytest.approx(0.14826), pytest.approx(0.14826), 0.0]
