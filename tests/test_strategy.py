"""Predicted throughput against simulated runs, and a choice that is exact where it can be and does not flip."""

import math
import random
from itertools import pairwise

import numpy as np
import pytest

from hvd_hetero.optimizers.local_sgd import LocalSGD
from hvd_hetero.policy.jitter import Jitter, StopSums, estimate, synchronous_step_s
from hvd_hetero.policy.local_round import ROUND_STEPS, round_lengths
from hvd_hetero.policy.partition import Bound, InfeasibleError, split
from hvd_hetero.policy.speed import SpeedModel
from hvd_hetero.policy.strategy import (
    Prediction,
    StrategyChoice,
    choose_strategy,
    predict_local,
    predict_synchronous,
)


def predict(models, global_batch_size, *, round_steps, bounds=None, jitters=None, exchange_s=0.0, merge_s=0.0):
    """What both strategies should achieve, with the best split of the global batch."""
    shares = split(models, global_batch_size, bounds)
    return (predict_synchronous(models, shares, jitters=jitters, exchange_s=exchange_s),
            predict_local(models, shares, round_steps=round_steps, merge_s=merge_s, jitters=jitters))


def model(seconds_per_sample=0.01, overhead_s=0.0):
    return SpeedModel(overhead_s=overhead_s, seconds_per_sample=seconds_per_sample)


class Clock:
    """When work is done on ranks that run and stop, in turn, for exponentially distributed times."""

    def __init__(self, walls, progress):
        self.walls, self.progress = walls, progress

    @classmethod
    def of(cls, rng, jitter, horizon_s):
        if not jitter.stalled:
            return cls(np.array([0.0, horizon_s]), np.array([0.0, horizon_s]))
        turns = int(2 * horizon_s * jitter.stalled / jitter.stall_s) + 200
        run, stop = rng.exponential(1.0 / jitter.stops_per_s, turns), rng.exponential(jitter.stall_s, turns)
        walls = np.concatenate([[0.0], np.cumsum(np.stack([run, stop], 1).ravel())])
        return cls(walls, np.concatenate([[0.0], np.cumsum(np.stack([run, 0 * stop], 1).ravel())]))

    @classmethod
    def of_all(cls, clocks):
        """The clock that runs while all do."""
        walls = np.unique(np.concatenate([c.walls for c in clocks]))
        walls = walls[walls <= min(c.walls[-1] for c in clocks)]
        runs = np.all([np.diff(np.interp(walls, c.walls, c.progress)) > 0.5 * np.diff(walls) for c in clocks], axis=0)
        return cls(walls, np.concatenate([[0.0], np.cumsum(np.diff(walls) * runs)]))

    def when(self, since_s, work_s):
        """The first moment at which so much was done since then."""
        target = np.interp(since_s, self.walls, self.progress) + work_s
        at = np.searchsorted(self.progress, target)
        return self.walls[at] - (self.progress[at] - target)


def simulated_step_s(times_s, jitters, exchange_s, *, steps=2500, seed=0):
    """The mean seconds of synchronous steps: everybody computes, the last starts an exchange that needs all running."""
    rng = np.random.default_rng(seed)
    horizon_s = 16 * steps * (max(times_s) + exchange_s)
    clocks = [Clock.of(rng, j, horizon_s) for j in jitters]
    together, now_s = Clock.of_all(clocks), 0.0
    sigma = np.sqrt(np.log1p(np.array([j.variation for j in jitters]) ** 2))
    for _ in range(steps):
        noise = np.exp(sigma * rng.standard_normal(len(sigma)) - sigma**2 / 2)
        done = [c.when(now_s, t * x) for c, t, x in zip(clocks, times_s, noise, strict=True) if t > 0.0]
        now_s = together.when(max(done), max(exchange_s, 1e-9))
    return now_s / steps


SHORT, LONG = Jitter(variation=0.05, stalled=0.1, stall_s=0.3), Jitter(variation=0.05, stalled=0.1, stall_s=4.0)


@pytest.mark.parametrize(("times_s", "jitters", "exchange_s"), [
    ([1.0], [LONG], 0.3),
    ([1.0] * 4, [Jitter(variation=0.1)] * 4, 0.0),
    ([1.0] * 16, [Jitter(variation=0.3)] * 16, 0.2),
    ([1.0, 0.9, 0.5, 0.2], [Jitter(variation=0.2)] * 4, 0.1),
    ([1.0] * 4, [SHORT] * 4, 0.2),
    ([1.0] * 4, [LONG] * 4, 0.2),
    ([1.0] * 2, [Jitter(stalled=0.6, stall_s=3.0)] * 2, 0.0),
    ([1.0] * 8, [Jitter(stalled=0.2, stall_s=3.0)] * 8, 0.0),
    ([1.0] * 4, [Jitter(variation=0.1)] * 3 + [Jitter(stalled=0.3, stall_s=0.05)], 0.1),
    ([1.0, 1.0, 0.3, 0.1], [Jitter(), Jitter(variation=0.1), SHORT, Jitter(stalled=0.3, stall_s=2.0)], 0.0),
    ([1.0, 1.0, 0.3, 0.0], [Jitter(), Jitter(variation=0.1), SHORT, Jitter(stalled=0.3, stall_s=2.0)], 0.2),
])
def test_a_synchronous_step_takes_as_long_as_simulated(times_s, jitters, exchange_s):
    simulated_s = np.mean([simulated_step_s(times_s, jitters, exchange_s, seed=seed) for seed in range(2)])
    assert synchronous_step_s(times_s, jitters, exchange_s=exchange_s) == pytest.approx(simulated_s, rel=0.06)


def test_laws_of_a_synchronous_step():
    rng = random.Random(1)
    for _ in range(25):
        ranks = rng.randint(1, 5)
        times_s = [rng.choice([0.0, rng.random(), 1.0]) for _ in range(ranks)]
        jitters = [Jitter(variation=0.3 * rng.random(), stalled=rng.choice([0.0, 0.4 * rng.random()]),
                          stall_s=10 ** rng.uniform(-3, 1)) for _ in range(ranks)]
        step_s = synchronous_step_s(times_s, jitters, exchange_s=0.1)
        running = np.prod([1.0 - j.stalled for j in jitters])
        alone_s = max(j.alone_s(t) for t, j in zip(times_s, jitters, strict=True))
        assert step_s >= 0.995 * (alone_s + 0.1)
        worse = [Jitter(variation=j.variation + 0.1, stalled=j.stalled, stall_s=j.stall_s) for j in jitters]
        assert synchronous_step_s(times_s, worse, exchange_s=0.1) >= 0.995 * step_s
        worse = [Jitter(variation=j.variation, stalled=j.stalled + 0.1, stall_s=j.stall_s) for j in jitters]
        assert synchronous_step_s(times_s, worse, exchange_s=0.1) > step_s
        more = synchronous_step_s([*times_s, 0.5], [*jitters, Jitter(variation=0.2)], exchange_s=0.1)
        assert more >= 0.995 * step_s
        assert synchronous_step_s(times_s, jitters, exchange_s=0.3) == pytest.approx(step_s + 0.2 / running)
        scaled = [Jitter(variation=j.variation, stalled=j.stalled, stall_s=7.0 * j.stall_s) for j in jitters]
        assert synchronous_step_s([7.0 * t for t in times_s], scaled, exchange_s=0.7) == pytest.approx(7.0 * step_s)
    assert synchronous_step_s([3.0, 1.0], [Jitter()] * 2, exchange_s=0.5) == pytest.approx(3.5, rel=1e-3)
    assert synchronous_step_s([0.0], [Jitter()], exchange_s=0.5) == 0.5
    assert synchronous_step_s([2.0, 0.0], [Jitter(variation=0.8), Jitter()]) == pytest.approx(2.0, rel=5e-3)


def test_steady_ranks_with_the_best_shares_are_as_fast_either_way():
    models = [model(1 / 8), model(1 / 4), model(1 / 2), model(1 / 2)]
    synchronous, local = predict(models, 64, round_steps=16)
    assert synchronous.samples_per_s == pytest.approx(16.0, rel=1e-3) and local.samples_per_s == pytest.approx(16.0)
    assert synchronous.period_s == pytest.approx(4.0, rel=1e-3) and local.period_s == pytest.approx(64.0)
    assert local.round_lengths == (16,) * 4
    assert choose_strategy(synchronous, local).strategy == "synchronous"
    bounded, _ = predict(models, 64, round_steps=16, bounds=[Bound(upper=16)] + [Bound()] * 3)
    assert bounded.samples_per_s < 0.8 * synchronous.samples_per_s
    with pytest.raises(InfeasibleError):
        predict(models, 64, round_steps=16, bounds=[Bound(upper=8)] * 4)


def test_local_ranks_go_at_their_own_rates():
    models, jitters = [model(1 / 8), model(1 / 2)], [Jitter(variation=0.5), Jitter(stalled=0.5, stall_s=100.0)]
    local = predict_local(models, [16, 4], round_steps=20, jitters=jitters)
    assert local.samples_per_s == pytest.approx(8 + 1) and local.round_lengths == (20, 10)
    assert local.period_s == pytest.approx(40.0)
    alone = predict_local(models, [16, 0], round_steps=20)
    assert alone.samples_per_s == pytest.approx(8.0) and alone.round_lengths == (20, 0)
    passes = predict_local([model(1 / 8, 1.0)], [16], round_steps=5, micro_batch=[4])
    assert passes.samples_per_s == pytest.approx(16 / 6)


def test_who_makes_equally_many_steps_is_no_faster_apart_where_shares_do_not_fit():
    models = [model(1 / 8), model(1 / 4)]
    equal = predict_local(models, [16, 16], round_steps=2)
    assert equal.samples_per_s == pytest.approx(8.0), "the slow one has still to make its steps"
    assert choose_strategy(predict_synchronous(models, [16, 16]), equal).strategy == "synchronous"
    jitters = [Jitter(), Jitter(stalled=0.5, stall_s=1.0)]
    fitting = predict_local(models, [16, 8], round_steps=2, jitters=jitters)
    assert fitting.samples_per_s == pytest.approx(8 + 2), "nobody waits for stops: shares follow them"


def simulated_rate(step_s, samples, round_steps, bound_rounds, merge_s, horizon_s):
    """Samples per second of ranks that go on while a merge is under way, until the bound."""
    lengths = round_lengths(step_s, round_steps)
    now, work, waits_for = [0.0] * len(step_s), [0] * len(step_s), [0] * len(step_s)
    sent, merged, done = [[]], [], 0
    while min(now) < horizon_s:
        i = min(range(len(step_s)), key=lambda rank: now[rank])
        over = [at for at in merged if at <= now[i]]
        if waits_for[i] > len(over) and work[i] >= bound_rounds * lengths[i]:  # at the bound: until the merge is there
            now[i] = merged[waits_for[i] - 1] if len(merged) >= waits_for[i] else now[i] + 0.01 * min(step_s)
            continue
        if waits_for[i] <= len(over) and work[i] >= lengths[i]:
            sent[-1].append(now[i])
            work[i], waits_for[i] = 0, waits_for[i] + 1
            if len(sent[-1]) == len(step_s):
                merged.append(max(sent[-1]) + merge_s)
                sent.append([])
            continue
        now[i], work[i], done = now[i] + step_s[i], work[i] + 1, done + samples[i]
    return done / horizon_s


@pytest.mark.parametrize("merge_s", [0.0, 0.7, 5.0, 9.9, 30.0, 90.0])
@pytest.mark.parametrize("bound_rounds", [0, 1, 2, 8])
def test_ranks_wait_for_a_merge_that_takes_longer_than_the_bound(bound_rounds, merge_s):
    models, samples = [model(1 / 8), model(1 / 4)], [8, 4]
    found = predict_local(models, samples, round_steps=5, bound_rounds=bound_rounds, merge_s=merge_s)
    rate = simulated_rate([1.0, 1.0], samples, 5, bound_rounds, merge_s, 4000.0)
    assert found.samples_per_s == pytest.approx(rate, rel=0.12)
    assert found.period_s == (max(5.0, merge_s) if bound_rounds else 5.0 + merge_s)


def test_a_usual_round_is_as_long_and_as_bounded_as_that_of_the_strategy():
    assert LocalSGD().round_steps == ROUND_STEPS
    for round_steps in (1, 2, 4, 32):
        usual, named = (predict_local([model()], [8], round_steps=round_steps, merge_s=90.0, bound_rounds=bound)
                        for bound in (None, LocalSGD(round_steps=round_steps).most_rounds))
        assert usual == named


@pytest.mark.parametrize(("trouble", "strategy"), [
    ({}, "synchronous"), ({"exchange_s": 0.01}, "synchronous"), ({"exchange_s": 1.0}, "local"),
    ({"jitters": [Jitter(variation=0.02)] * 4}, "synchronous"), ({"jitters": [Jitter(variation=0.5)] * 4}, "local"),
    ({"jitters": [Jitter()] * 3 + [Jitter(stalled=0.3, stall_s=5.0)]}, "local"),
    ({"exchange_s": 1.0, "merge_s": 1000.0}, "synchronous"),
])
def test_the_choice_for_known_clusters(trouble, strategy):
    choice = choose_strategy(*predict([model(0.1), model(0.1), model(0.2), model(0.4)], 24, round_steps=20, **trouble))
    assert choice.strategy == strategy
    assert "samples/s synchronous" in choice.reason and ("exact" in choice.reason) == (strategy == "synchronous")


def rates(synchronous, local=100.0):
    return (Prediction(strategy="synchronous", samples_per_s=synchronous, period_s=1.0),
            Prediction(strategy="local", samples_per_s=local, period_s=9.0))


@pytest.mark.parametrize(("rate", "chosen"), [
    (200.0, {None: "synchronous", "local": "synchronous", "synchronous": "synchronous"}),
    (95.1, {None: "synchronous", "local": "synchronous", "synchronous": "synchronous"}),
    (90.0, {None: "local", "local": "local", "synchronous": "synchronous"}),
    (84.9, {None: "local", "local": "local", "synchronous": "local"}),
])
def test_synchronous_wherever_it_is_near_and_otherwise_what_holds(rate, chosen):
    for current, strategy in chosen.items():
        choice = choose_strategy(*rates(rate), current=current)
        assert choice.strategy == strategy
        assert ("nothing changes" in choice.reason) == (rate == 90.0 and current is not None)


@pytest.mark.parametrize("truth", [0.7, 0.85, 0.9, 0.95, 1.0])
def test_the_choice_does_not_flip_back_and_forth_near_a_border(truth):
    rng, current, held = random.Random(7), None, []
    for _ in range(500):
        measured = rates(rng.gauss(100.0 * truth, 1.0), rng.gauss(100.0, 1.0))
        current = choose_strategy(*measured, current=current).strategy
        held.append(current)
    assert sum(a != b for a, b in pairwise(held)) <= 1


def test_between_the_borders_the_present_strategy_stays():
    assert choose_strategy(*rates(90.0), current="synchronous") == StrategyChoice(
        strategy="synchronous",
        reason="90 samples/s synchronous, 100 local: 10.0% slower, between 5% and 15% nothing changes")


@pytest.mark.parametrize(("make", "message"), [
    (lambda: Jitter(variation=-0.1), "variation: .* Received: -0.1"),
    (lambda: Jitter(stalled=1.0, stall_s=1.0), "stalled: .* Received: 1.0"),
    (lambda: Jitter(stalled=0.1), "stall_s: .* Received: 0.0 with stalled 0.1"),
    (lambda: synchronous_step_s([1.0], []), "times_s and jitters: .* Received: \\[1.0\\] and 0"),
    (lambda: synchronous_step_s([1.0], [Jitter()], exchange_s=-1.0), "exchange_s: .* Received: -1.0"),
    (lambda: predict_local([model()], [4], round_steps=2, merge_s=-1.0), "merge_s: .* Received: -1.0"),
    (lambda: predict_local([model()], [4], round_steps=0), "round_steps.* Received: 0"),
    (lambda: predict_synchronous([model()], [4, 4]), "samples: expected one for each of 1 models. Received: 2"),
    (lambda: predict_synchronous([model()], [4], jitters=[]), "jitters: .* Received: 0"),
    (lambda: predict_synchronous([model()] * 2, [0, 0]), "not all 0. Received: 2 models and \\[0, 0\\]"),
    (lambda: Prediction(strategy="other", samples_per_s=1.0, period_s=1.0), "strategy: .* Received: 'other'"),
    (lambda: Prediction(strategy="local", samples_per_s=0.0, period_s=1.0), "Received: 0.0 and 1.0"),
    (lambda: choose_strategy(*rates(1.0)[::-1]), "in this order. Received: local and synchronous"),
    (lambda: choose_strategy(*rates(1.0), current="other"), "current: .* Received: 'other'"),
])
def test_wrong_arguments_say_what_was_received(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_very_many_ranks_that_stop_often_have_a_time_as_well():
    """The part of the time in which all run at once is no number any more."""
    step_s = synchronous_step_s([0.1] * 512, [Jitter(stalled=0.8, stall_s=1.0)] * 512, exchange_s=0.01)
    assert step_s > 1e6


@pytest.mark.parametrize(("make", "message"), [
    (lambda: Jitter(variation=math.inf), "variation: .* Received: inf"),
    (lambda: Jitter(stall_s=math.inf), "stall_s: .* Received: inf"),
    (lambda: Jitter(stall_s=-1.0), "stall_s: .* Received: -1.0"),
    (lambda: synchronous_step_s([], []), "times_s and jitters: .* Received: \\[\\] and 0"),
    (lambda: synchronous_step_s([1.0, -1.0], [Jitter()] * 2), "times_s and jitters: .* Received: \\[1.0, -1.0\\]"),
    (lambda: synchronous_step_s([1.0, math.inf], [Jitter()] * 2), "times_s and jitters: .* Received: \\[1.0, inf\\]"),
    (lambda: synchronous_step_s([1.0], [Jitter()], exchange_s=math.inf), "exchange_s: .* Received: inf"),
    (lambda: Prediction(strategy="local", samples_per_s=math.inf, period_s=1.0), "Received: inf and 1.0"),
    (lambda: Prediction(strategy="local", samples_per_s=1.0, period_s=0.0), "Received: 1.0 and 0.0"),
    (lambda: predict_local([model()], [4], round_steps=2, merge_s=math.inf), "merge_s: .* Received: inf"),
    (lambda: predict_local([model()] * 2, [4, -1], round_steps=2), "Received: 2 models and \\[4, -1\\]"),
    (lambda: predict_synchronous([], []), "a model at least.* Received: 0 models and \\[\\]"),
])
def test_a_single_number_that_is_none_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_where_nobody_computes_the_exchange_waits_for_those_that_are_stopped():
    assert synchronous_step_s([0.0, 0.0], [Jitter(stalled=0.5, stall_s=1.0), Jitter()], exchange_s=0.5) == 1.0
    assert Jitter().stops_per_s == 0.0 and Jitter(stalled=0.5, stall_s=2.0).stops_per_s == 0.5


def test_very_many_short_stops_are_a_lower_speed():
    """Of one rank: 100 s of work, in which it is stopped a thousand times for 0.1 s, or ever shorter and more often."""
    for stall_s in (0.1, 0.01, 0.001):
        assert synchronous_step_s([100.0], [Jitter(stalled=0.5, stall_s=stall_s)]) == pytest.approx(200.0, rel=0.01)
    few, many = (synchronous_step_s([s] * 4, [Jitter(stalled=0.3, stall_s=1.0)] * 4) / s for s in (69.9, 70.1))
    assert few == pytest.approx(many, rel=0.01), "no step where stops begin to be taken for that"


def test_a_choice_of_synchronous_training_says_why():
    for rate in (100.0, 200.0):
        assert "nothing is faster" in choose_strategy(*rates(rate)).reason
    assert "only 1.0% slower" in choose_strategy(*rates(99.0)).reason


def test_a_rank_that_was_only_ever_stopped_is_not_taken_for_one_that_never_runs():
    """It has not said yet for how long it runs between two stops."""
    for ran in (StopSums(0.0, 3.0, 2.0), StopSums(5.0, 0.0, 0.0), StopSums(), StopSums(5.0, 3.0, 1.0)):
        assert estimate(ran, variation=0.2, least_stops=2.0) == Jitter(variation=0.2)
    assert estimate(StopSums(6.0, 2.0, 4.0), least_stops=4.0) == Jitter(stalled=0.25, stall_s=0.5)


@pytest.mark.parametrize("rare_s", [1e-4, 1e3])
def test_a_rank_that_hardly_ever_stops_changes_no_step_however_long_it_stops(rare_s):
    """What is integrated over reaches from the shortest to the longest stops of any rank."""
    stops, rare = Jitter(stalled=0.3, stall_s=1.0), Jitter(stalled=1e-9, stall_s=rare_s)
    alone = synchronous_step_s([1.0, 0.2, 1.0], [stops, stops, Jitter()], exchange_s=0.1)
    for jitters in ([stops, stops, rare], [rare, stops, stops]):
        assert synchronous_step_s([1.0, 0.2, 1.0], jitters, exchange_s=0.1) == pytest.approx(alone, rel=0.02)
