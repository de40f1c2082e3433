"""The guard: noise alone shortens no round, ranks that pull apart do, and the ratio is what a simulation measures."""

import math

import numpy as np
import pytest

from hvd_hetero.policy.guard import Guard, drift_ratio, noise_ratio
from hvd_hetero.policy.local_round import contribution, merge_factor, round_lengths

STEP_S = (1.0, 1.0, 2.0, 4.0)


def merge_of(contributions, deltas):
    """The merged delta and the drift ratio, from sums alone as ranks have them."""
    summed = sum(c.delta_factor * d for c, d in zip(contributions, deltas, strict=True))
    sums = np.sum([c.weight_and_reach for c in contributions], axis=0)
    spread = sum(c.spread(float(d @ d)) for c, d in zip(contributions, deltas, strict=True))
    mean = summed / sums[0]
    return merge_factor(sums) * summed, drift_ratio(spread, sums[0], float(mean @ mean))


def train(guard, *, pull, noise, merges=400, seed=0, width=60, rate=0.02, curvatures=(1.0, 2.0, 0.5, 1.5), start=0.0,
          guarded=True):
    """Local SGD by samples on noisy quadratics: the lengths of all rounds, and how far from the optimum it ends.

    `pull` is how far apart the ranks' optima lie; those differ in curvature, too, so long rounds end elsewhere.
    """
    rng = np.random.default_rng(seed)
    curvature = np.array(curvatures)
    optima = pull * np.random.default_rng(99).normal(size=(len(STEP_S), width))
    model, lengths, errors, ratios = np.full(width, start), [], [], []
    for _ in range(merges):
        lengths.append(guard.steps)
        steps = round_lengths(STEP_S, guard.steps)
        weights = np.array(steps) * curvature / np.dot(steps, curvature)
        best = weights @ optima              # of the samples that the ranks take: what steps without drift would reach
        deltas = []
        for h, a, optimum in zip(steps, curvature, optima, strict=True):
            x = model.copy()
            for _ in range(h):
                x -= rate * (a * (x - optimum) + noise * rng.normal(size=width))
            deltas.append(model - x)
        merged, drift = merge_of([contribution(h, h, h / len(steps)) for h in steps], deltas)
        model = model - merged
        errors.append(float(np.linalg.norm(model - best)))
        noise_alone = noise_ratio(len(steps))
        ratios.append(drift / noise_alone)
        guard = guard.after(drift, noise_alone) if guarded else guard
    return lengths, float(np.mean(errors[-50:])), ratios


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("start", [0.0, 30.0])
def test_noise_alone_shortens_no_round(seed, start):
    lengths, _, ratios = train(Guard(round_steps=32), pull=0.0, noise=1.0, seed=seed, start=start)
    assert min(lengths) == 32
    assert 0.85 < np.median(ratios[100:]) < 1.1       # the floor is where it is said to be


def test_after_noise_rounds_grow_back():
    lengths, _, _ = train(Guard(round_steps=24, length=3), pull=0.0, noise=1.0)
    assert lengths[-1] == 24
    assert all(b - a in (0, 1) for a, b in zip(lengths, lengths[1:], strict=False))


@pytest.mark.parametrize("seed", range(3))
def test_ranks_that_pull_apart_get_short_rounds_and_end_nearer_to_the_optimum(seed):
    free, error_free, _ = train(Guard(round_steps=64), pull=3.0, noise=0.3, seed=seed, guarded=False)
    lengths, error, _ = train(Guard(round_steps=64), pull=3.0, noise=0.3, seed=seed)
    assert min(free) == 64 and max(lengths[-100:]) <= 8
    assert error < 0.5 * error_free


def test_the_more_noise_hides_drift_the_longer_the_rounds():
    runs = [train(Guard(round_steps=64), pull=pull, noise=1.0)[0] for pull in (0.0, 0.2, 0.3, 2.0)]
    ends = [np.mean(lengths[-100:]) for lengths in runs]
    assert ends == sorted(ends, reverse=True)
    assert ends[0] == 64 and 24 < ends[1] < 50 and 5 < ends[2] < 24 and ends[3] < 3


def test_between_the_limits_nothing_swings():
    lengths, _, _ = train(Guard(round_steps=64), pull=0.25, noise=1.0, merges=800)
    late = lengths[400:]
    assert sum(b < a for a, b in zip(late, late[1:], strict=False)) <= 2


@pytest.mark.parametrize("width", [6, 12])
def test_noise_in_few_directions_shortens_few_rounds(width):
    lengths = [length for seed in range(4)
               for length in train(Guard(round_steps=16), pull=0.0, noise=1.0, seed=seed, width=width)[0]]
    assert min(lengths) >= 8 and np.mean(lengths) > 14


@pytest.mark.parametrize(("weights", "variances"), [
    ((8.0, 8.0, 4.0, 2.0), (1 / 8, 1 / 8, 1 / 4, 1 / 2)), ((1.0,) * 4, (8.0, 8.0, 4.0, 2.0)), ((1.0,) * 4, (1.0,) * 4),
])  # fmt: skip
def test_noise_has_the_noise_ratio(weights, variances):
    """Of weights by samples, and of equal ones as with FedNova."""
    rng = np.random.default_rng(5)
    scale = np.sqrt(variances)
    deltas = [s * rng.normal(size=40_000) for s in scale]
    _, drift = merge_of([contribution(w, 1, 1.0) for w in weights], deltas)
    assert drift == pytest.approx(noise_ratio(4), rel=0.03)


def test_a_common_direction_only_makes_the_ratio_smaller():
    rng = np.random.default_rng(6)
    steps = (8, 8, 4, 2)
    for strength in (0.0, 0.1, 0.3, 1.0, 10.0):
        direction = strength * rng.normal(size=20_000)
        deltas = [h * direction + np.sqrt(h) * rng.normal(size=20_000) for h in steps]
        sent = [contribution(h, h, h) for h in steps]
        assert merge_of(sent, deltas)[1] < 1.03 * noise_ratio(len(steps))


def test_the_drift_ratio_is_that_of_its_definition():
    rng = np.random.default_rng(7)
    deltas, parts, norms = rng.normal(1.0, 1.0, size=(3, 6)), (0.5, 0.3, 0.2), (10.0, 4.0, 1.0)
    moves = deltas / np.array(norms)[:, None]
    mean = np.average(moves, axis=0, weights=parts)
    expected = np.sqrt(np.average(np.sum((moves - mean) ** 2, axis=1), weights=parts)) / np.linalg.norm(mean)
    sent = [contribution(p, a, p * a) for p, a in zip(parts, norms, strict=True)]
    assert merge_of(sent, deltas)[1] == pytest.approx(expected)
    assert merge_of(sent[:1], deltas[:1])[1] == 0.0 == noise_ratio(1)
    assert drift_ratio(4.0, 2.0, 0.0) == drift_ratio(0.1, 2.0, 0.0) == float("inf")
    assert drift_ratio(0.0, 2.0, 0.0) == 0.0


def after(guard, *drifts, noise=1.0):
    for drift in drifts:
        guard = guard.after(drift, noise)
        assert 1 <= guard.steps <= guard.round_steps
    return guard


def test_bad_merges_halve_and_calm_ones_add_a_step_within_bounds():
    guard, half = Guard(round_steps=8), Guard(round_steps=8, length=4)
    assert guard.steps == 8
    assert after(guard, *[1.6] * 4).steps == 8 and after(guard, *[1.6] * 5).steps == 4
    assert after(guard, *[1.6] * 9).steps == 4 and after(guard, *[1.6] * 10).steps == 2
    assert after(half, *[1.0] * 4).steps == 4 and after(half, *[1.0] * 5).steps == 5
    assert after(half, *[1.35] * 50).steps == 4
    assert after(half, *[5.0] * 60).steps == 1 and after(half, *[0.1] * 60).steps == 8
    assert after(Guard(round_steps=7), *[1.6] * 5).steps == 3
    assert after(half, *[1.35] * 50, *[float("inf")] * 5).steps == 2             # long calm does not delay it


def test_single_merges_decide_nothing_and_harmless_drift_is_none():
    guard = Guard(round_steps=8)
    assert after(guard, *[1.0, 1.0, 100.0, 1.0, 1.0] * 10).steps == 8
    assert after(guard, *[2.0, 2.0, 0.01, 2.0, 2.0] * 2, 2.0, 2.0).steps == 8    # nor does a single calm one for long
    assert after(guard, *[0.01], *[2.0] * 12).steps < 8
    assert after(guard, *[0.7] * 30, noise=0.1).steps == 8


@pytest.mark.parametrize(("make", "message"), [
    (lambda: Guard(round_steps=0), "round_steps and length: .* Received: 0 and None"),
    (lambda: Guard(round_steps=4, length=5), "Received: 4 and 5"),
    (lambda: Guard(round_steps=4, calm=1.5), "calm and limit: .* Received: 1.5 and 1.5"),
    (lambda: Guard(round_steps=4, calm=0.9), "calm and limit: .* Received: 0.9 and 1.5"),
    (lambda: Guard(round_steps=4, settle_merges=0), "Received: 0, 0 and 0.0"),
    (lambda: Guard(round_steps=4, inverse_square=9.0), "Received: 5, 0 and 9.0"),
    (lambda: Guard(round_steps=4).after(float("nan"), 1.0), "drift and noise: .* Received: nan and 1.0"),
    (lambda: Guard(round_steps=4).after(1.0, -1.0), "Received: 1.0 and -1.0"),
    (lambda: drift_ratio(-1.0, 1.0, 1.0), "spread_sum .* Received: -1.0 and 1.0"),
    (lambda: drift_ratio(1.0, 0.0, 1.0), "weight_sum: .* Received: 0.0"),
])
def test_wrong_arguments_say_what_was_received(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize("make", [
    lambda: Guard(round_steps=4, length=0), lambda: Guard(round_steps=4, merges=-1), lambda: Guard(round_steps=0),
    lambda: Guard(round_steps=4, inverse_square=-0.1), lambda: Guard(round_steps=4).after(1.0, math.inf),
    lambda: Guard(round_steps=4).after(1.0, math.nan), lambda: Guard(round_steps=4).after(-1.0, 1.0),
    lambda: drift_ratio(math.inf, 1.0, 1.0), lambda: drift_ratio(math.inf, 1.0, math.inf),
    lambda: drift_ratio(1.0, 1.0, -1.0), lambda: drift_ratio(1.0, math.inf, 1.0), lambda: drift_ratio(1.0, -1.0, 1.0),
])
def test_a_single_number_that_is_none_is_refused(make):
    with pytest.raises(ValueError, match="expected .* Received: "):
        make()


def test_the_shortest_and_calmest_guard_is_one():
    """Rounds of one step, which nothing shortens; ranks that do not drift; and a change after each merge."""
    guard = Guard(round_steps=1, calm=1.0, settle_merges=1)
    for drift in (0.0, 1.0, 5.0, math.inf):
        assert guard.after(drift, 0.0).steps == guard.after(drift, 1.0).steps == 1
    guard = Guard(round_steps=8, settle_merges=1)
    assert [guard.after(drift, 1.0).steps for drift in (0.0, 1.0, 1.35, 1.6, math.inf)] == [8, 8, 8, 4, 4]
    assert [Guard(round_steps=8, length=4, settle_merges=1).after(d, 1.0).steps for d in (0.0, 1.35, 1.6)] == [5, 4, 2]


def test_what_was_seen_is_forgotten_with_a_change_of_length():
    guard = Guard(round_steps=8, length=4)
    for drift, steps in ((1.6, 2), (1.0, 5)):
        changed = after(guard, *[drift] * 5)
        assert changed.steps == steps and (changed.merges, changed.inverse_square) == (0, 0.0)


def test_a_mean_is_of_the_inverse_squares_of_what_drift_is_of_noise():
    guard = after(Guard(round_steps=8), 1.25, 2.0, 1.0, 0.0)
    assert guard.merges == 4 and guard.inverse_square == pytest.approx((0.64 + 0.25 + 1.0 + 2.0) / 4)
