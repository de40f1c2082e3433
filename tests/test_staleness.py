"""Rounds that end together, weights that favour no objective, and damping that throws nothing away by itself."""

import itertools
import random

import numpy as np
import pytest

from hvd_hetero.policy.staleness import (
    Contribution,
    by_samples,
    by_shard,
    damping,
    factor,
    norm_of_rates,
    norm_of_steps,
    round_lengths,
)


def merge(contributions, deltas):
    """What all ranks apply: the sum of what is sent, times the factor from the sum of what is beside it."""
    total = sum(c.before * delta for c, delta in zip(contributions, deltas, strict=True))
    return factor(np.sum([c.beside for c in contributions], axis=0)) * total


def test_rounds_end_together():
    rng = random.Random(1)
    for _ in range(500):
        steps = [rng.choice([0.1, 0.2, 0.01 + rng.random()]) for _ in range(rng.randint(1, 8))]
        whole = rng.randint(1, 60)
        lengths = round_lengths(steps, whole)
        fastest = min(steps)
        assert max(lengths) == whole == lengths[steps.index(fastest)] and min(lengths) >= 1
        for step_s, length in zip(steps, lengths, strict=True):
            assert length == 1 or length * step_s <= whole * fastest * (1 + 1e-8)       # never late
            assert (length + 1) * step_s > whole * fastest * (1 - 1e-8)                 # nor early by a whole step
        for a, b in itertools.permutations(range(len(steps)), 2):
            assert steps[a] > steps[b] or lengths[a] >= lengths[b]      # no slower rank takes more


def test_round_lengths_of_known_speeds():
    assert round_lengths([1.0, 2.0, 4.0, 100.0], 16) == (16, 8, 4, 1)
    assert round_lengths([0.1, 0.3], 30) == (30, 10)          # 30 * 0.1 / 0.3 is below 10 by rounding in some orders
    assert all(round_lengths([s, s * k], k * 7) == (k * 7, 7) for k in range(1, 50) for s in (0.1, 0.3, 1 / 7))
    assert round_lengths([1.0, 2.0, 100.0], 16, shortest=2, longest=12) == (12, 8, 2)


def explicit_coefficients(rates, momentum):
    """How often each gradient goes into the delta: the optimizer run on unit vectors."""
    moved, state = np.zeros(len(rates)), np.zeros(len(rates))
    for k, rate in enumerate(rates):
        state = momentum * state + np.eye(len(rates))[k]
        moved += rate * state
    return moved


@pytest.mark.parametrize("momentum", [0.0, 0.5, 0.9, 0.99, 0.9999])
@pytest.mark.parametrize("steps", [0, 1, 2, 7, 50])
def test_norms_are_the_explicit_sums(steps, momentum):
    rng = np.random.default_rng(steps)
    rates = rng.uniform(0.0, 0.3, steps)
    assert norm_of_rates(rates, momentum=momentum) == pytest.approx(explicit_coefficients(rates, momentum).sum())
    constant = explicit_coefficients([0.1] * steps, momentum).sum()
    assert norm_of_steps(steps, momentum=momentum, rate=0.1) == pytest.approx(constant, rel=1e-6)
    if momentum == 0.0:
        assert norm_of_steps(steps) == steps


@pytest.mark.parametrize("momentum", [0.5, 0.9])
def test_the_norm_with_kept_momentum_is_that_of_a_later_round(momentum):
    state, steps = 0.0, 12
    for _ in range(20):
        moved = 0.0
        for _ in range(steps):
            state = momentum * state + 1.0
            moved += state
    assert norm_of_steps(steps, momentum=momentum, kept=True) == pytest.approx(moved)
    assert norm_of_steps(steps, momentum=momentum) < moved


def test_by_samples_the_merge_is_the_mean_over_samples():
    rng = np.random.default_rng(2)
    deltas, samples = rng.normal(size=(5, 3)), [3.0, 10.0, 0.0, 7.0, 1.0]
    expected = np.average(deltas, axis=0, weights=samples)
    for reference in (1.0, 4.2, 1000.0):
        merged = merge([by_samples(n / reference) for n in samples], deltas)
        assert np.allclose(merged, expected, rtol=1e-12)
    assert np.all(merge([by_samples(0.0)] * 5, deltas) == 0.0)


def test_by_shard_the_merge_is_fednovas():
    rng = np.random.default_rng(3)
    deltas, parts, norms = rng.normal(size=(3, 4)), np.array([0.5, 0.3, 0.2]), np.array([10.0, 4.0, 1.0])
    expected = (parts @ norms) * (parts / norms) @ deltas
    assert np.allclose(merge([by_shard(p, a) for p, a in zip(parts, norms, strict=True)], deltas), expected)
    gone = merge([by_shard(0.5, 10.0), by_shard(0.3, 4.0), by_shard(0.2, 0.0)], deltas)       # no step of the last
    kept = parts[:2] / 0.8
    assert np.allclose(gone, (kept @ norms[:2]) * (kept / norms[:2]) @ deltas[:2])


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("same_rate", [True, False])
def test_only_fednova_ends_where_the_mean_of_all_shards_is_best(momentum, same_rate):
    optima, parts, steps = np.array([[0.0], [3.0], [9.0]]), (0.2, 0.3, 0.5), (40, 10, 5)
    rates = [0.001] * 3 if same_rate else [0.001, 0.002, 0.0004]
    best = float(np.average(optima[:, 0], weights=parts))
    ends = {}
    for name in ("shard", "samples"):
        model = np.zeros(1)
        for _ in range(600):
            deltas = []
            for optimum, h, rate in zip(optima, steps, rates, strict=True):
                x, m = model.copy(), np.zeros(1)
                for _ in range(h):
                    m = momentum * m + (x - optimum)
                    x = x - rate * m
                deltas.append(model - x)
            sent = [by_shard(p, norm_of_steps(h, momentum=momentum, rate=r)) if name == "shard" else by_samples(h)
                    for p, h, r in zip(parts, steps, rates, strict=True)]
            model = model - merge(sent, deltas)
        ends[name] = abs(float(model[0]) - best)
    assert ends["shard"] < 0.5 and ends["samples"] > 2.0       # the optima lie 9 apart


def test_damping_is_by_what_is_staler_than_the_median():
    assert damping([7, 7, 7, 7]) == damping([7] * 4, rule="inverse") == (1.0,) * 4      # nobody loses anything
    assert damping([0, 1, 1, 4]) == (1.0, 1.0, 1.0, 0.5)
    assert damping([0, 1, 1, 4, 1], rule="inverse") == (1.0, 1.0, 1.0, 1 / 3, 1.0)
    assert damping([0, 0, 9], exponent=0.0) == (1.0, 1.0, 1.0)
    for seed, rule in itertools.product(range(50), ("power", "inverse")):
        ages = [random.Random(seed * 10 + i).randint(0, 9) for i in range(5)]
        factors = damping(ages, rule=rule)
        assert all(0.0 < f <= 1.0 for f in factors) and sum(f == 1.0 for f in factors) >= 3
        assert all(factors[i] >= factors[j] for i in range(5) for j in range(5) if ages[i] <= ages[j])


def test_damping_one_rank_shortens_no_step():
    same = np.array([[1.0, 2.0]] * 3)
    for c in damping([0, 0, 8]), damping([5, 0, 0], rule="inverse"):
        assert min(c) < 1.0
        assert np.allclose(merge([by_samples(4.0, damping=d) for d in c], same), same[0])
        assert np.allclose(merge([by_shard(1 / 3, 4.0, damping=d) for d in c], same), same[0])
    apart = [np.array([1.0]), np.array([1.0]), np.array([-8.0])]
    damped = merge([by_samples(1.0, damping=d) for d in damping([0, 0, 8])], apart)
    assert damped[0] > np.mean(apart)


@pytest.mark.parametrize(("make", "message"), [
    (lambda: round_lengths([1.0], 0), "round_steps, .* Received: 0, 1 and None"),
    (lambda: round_lengths([1.0], 4, shortest=5), "Received: 4, 5 and None"),
    (lambda: round_lengths([], 4), "step_s: .* Received: \\[\\]"),
    (lambda: round_lengths([1.0, 0.0], 4), "step_s: .* Received: \\[1.0, 0.0\\]"),
    (lambda: Contribution(weight=-1.0), "weight: .* Received: -1.0"),
    (lambda: Contribution(weight=1.0, norm=0.0), "norm: .* Received: 0.0"),
    (lambda: by_samples(float("nan")), "samples: .* Received: nan"),
    (lambda: by_samples(1.0, damping=1.5), "damping: .* Received: 1.5"),
    (lambda: by_shard(0.5, -1.0), "part and norm: .* Received: 0.5 and -1.0"),
    (lambda: factor([1.0]), "beside: .* Received: \\[1.0\\]"),
    (lambda: norm_of_steps(-1), "steps: .* Received: -1"),
    (lambda: norm_of_steps(3, momentum=1.0), "momentum: .* Received: 1.0"),
    (lambda: norm_of_rates([0.1, -0.1]), "rate: .* Received: \\[0.1, -0.1\\]"),
    (lambda: damping([0, -1]), "staleness: .* Received: \\[0, -1\\]"),
    (lambda: damping([0], rule="none"), "rule: expected power or inverse. Received: 'none'"),
    (lambda: damping([0], exponent=-1.0), "exponent: .* Received: -1.0"),
])
def test_wrong_arguments_say_what_was_received(make, message):
    with pytest.raises(ValueError, match=message):
        make()
