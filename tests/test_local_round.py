"""Rounds that end together, weights that favour no objective, and merges that go as far as synchronous steps."""

import itertools
import random

import numpy as np
import pytest

from hvd_hetero.policy.local_round import (
    Contribution,
    contribution,
    default_bound_rounds,
    merge_factor,
    round_lengths,
    update_fraction,
)


def merge(contributions, deltas):
    """What all ranks apply: the sum of what is sent, times the factor from the sum of what is beside it."""
    total = sum(c.delta_factor * delta for c, delta in zip(contributions, deltas, strict=True))
    return merge_factor(np.sum([c.weight_and_reach for c in contributions], axis=0)) * total


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


def test_a_merge_of_single_steps_is_the_step_over_all_samples():
    rng = np.random.default_rng(2)
    deltas, samples = rng.normal(size=(5, 3)), [3.0, 10.0, 0.0, 7.0, 1.0]
    expected = np.average(deltas, axis=0, weights=samples)
    for reference in (1.0, 4.2, 1000.0):
        # The parts of the batch as promised; the short last batch that is here was cut otherwise.
        parts = zip(samples, (0.2, 0.4, 0.1, 0.25, 0.05), strict=True)
        merged = merge([contribution(n / reference, float(n > 0), part) for n, part in parts], deltas)
        assert np.allclose(merged, expected, rtol=1e-12)
    assert np.all(merge([contribution(0.0, 0.0, 0.2)] * 5, deltas) == 0.0)


def test_a_rank_without_a_step_has_no_weight_whatever_data_it_has():
    assert contribution(0.5, 0.0, 0.0).weight_and_reach == (0.0, 0.0)


def test_who_waits_for_a_merge_has_made_sixteen_updates_and_four_rounds():
    assert [default_bound_rounds(round_steps) for round_steps in (1, 2, 4, 5, 100)] == [16, 8, 4, 4, 4]


def test_a_merge_goes_as_far_as_synchronous_steps_over_its_samples():
    """Also where ranks make unlike numbers of steps, and some none: each sample weighs the same."""
    rng = np.random.default_rng(4)
    parts, batch = np.array([0.5, 0.3, 0.2]), 40
    for steps in ((3, 3, 3), (8, 2, 1), (5, 0, 0), (0, 1, 9)):
        gradients = [rng.normal(size=(k, 6)) for k in steps]
        sent = [contribution(part * batch * k, k, part * k) for part, k in zip(parts, steps, strict=True)]
        merged = merge(sent, [each.sum(axis=0) for each in gradients])
        by_sample = sum(part * each.sum(axis=0) for part, each in zip(parts, gradients, strict=True))
        assert np.allclose(merged, by_sample, rtol=1e-12)


def test_by_shard_the_merge_is_fednovas():
    """With its tau_eff, where a rank's part of the batch is its part of the data."""
    rng = np.random.default_rng(3)
    deltas, parts, norms = rng.normal(size=(3, 4)), np.array([0.5, 0.3, 0.2]), np.array([10.0, 4.0, 1.0])
    expected = (parts @ norms) * (parts / norms) @ deltas
    sent = [contribution(p, a, p * a) for p, a in zip(parts, norms, strict=True)]
    assert np.allclose(merge(sent, deltas), expected)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("same_rate", [True, False])
def test_only_fednova_ends_where_the_mean_of_all_shards_is_best(momentum, same_rate):
    optima, parts, steps = np.array([[0.0], [3.0], [9.0]]), (0.2, 0.3, 0.5), (40, 10, 5)
    rates = [0.001] * 3 if same_rate else [0.001, 0.002, 0.0004]
    best = float(np.average(optima[:, 0], weights=parts))
    ends = {}
    for name in ("shard", "samples"):
        model, kept = np.zeros(1), [np.zeros(1) for _ in steps]
        for _ in range(600):
            deltas = []
            for rank, (optimum, h, rate) in enumerate(zip(optima, steps, rates, strict=True)):
                x = model.copy()
                for _ in range(h):
                    kept[rank] = momentum * kept[rank] + (x - optimum)
                    x = x - rate * kept[rank]
                deltas.append(model - x)
            sent = [contribution(p, h * r, h * r / 3) if name == "shard" else contribution(h, h, h / 3)
                    for p, h, r in zip(parts, steps, rates, strict=True)]
            model = model - merge(sent, deltas)
        ends[name] = abs(float(model[0]) - best)
    assert ends["shard"] < 0.5 and ends["samples"] > 2.0       # the optima lie 9 apart


@pytest.mark.parametrize(("make", "message"), [
    (lambda: round_lengths([1.0], 0), "round_steps: .* Received: 0"),
    (lambda: round_lengths([], 4), "step_s: .* Received: \\[\\]"),
    (lambda: round_lengths([1.0, 0.0], 4), "step_s: .* Received: \\[1.0, 0.0\\]"),
    (lambda: Contribution(weight=-1.0), "weight: .* Received: -1.0"),
    (lambda: Contribution(weight=1.0, norm=0.0), "norm: .* Received: 0.0"),
    (lambda: contribution(float("nan"), 1, 1.0), "weight: .* Received: nan"),
    (lambda: contribution(1.0, 1, -1.0), "reach: .* Received: -1.0"),
    (lambda: contribution(1.0, -1, 1.0), "norm: .* Received: -1"),
    (lambda: merge_factor([1.0]), "sums: .* Received: \\[1.0\\]"),
])
def test_wrong_arguments_say_what_was_received(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_who_has_less_than_the_mean_makes_as_much_of_a_step():
    assert [update_fraction(share, 24, 3) for share in (1, 4, 8, 15, 0)] == [1 / 8, 1 / 2, 1.0, 1.0, 1.0]
    for share in range(1, 25):
        part = update_fraction(share, 24, 3)
        whole, less = contribution(share, 1.0, share / 24), contribution(share, part, share / 24)
        assert whole.delta_factor * 1.0 == pytest.approx(less.delta_factor * part)
        assert whole.weight_and_reach == less.weight_and_reach
