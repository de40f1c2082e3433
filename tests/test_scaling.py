"""Learning-rate rules, ramps, and the noise of the gradient from uneven batches."""

import itertools
import math

import numpy as np
import pytest

from hvd_hetero.policy.scaling import (
    NoiseScale,
    NoiseSums,
    Ramp,
    adascale,
    damping,
    linear,
    noise_and_signal,
    sqrt,
    standing_batch,
)


def test_every_rule_is_1_at_the_tuned_batch_and_grows_with_the_batch():
    rules = [linear, sqrt, *(lambda s, noise=noise: adascale(s, noise) for noise in (None, 0.0, 0.3, 50.0, math.inf))]
    for rule in rules:
        assert rule(1.0) == 1.0
        gains = [rule(scale) for scale in (0.25, 0.5, 1.0, 2.0, 8.0)]
        assert all(a <= b for a, b in itertools.pairwise(gains))
        assert all(min(1.0, s) <= g <= max(1.0, s) for s, g in zip((0.25, 0.5, 1.0, 2.0, 8.0), gains, strict=True))
    assert (linear(4.0), sqrt(4.0)) == (4.0, 2.0)


def test_adascale_is_the_ratio_of_second_moments():
    """The gain makes one step on the large batch expect what r steps on the tuned one do."""
    for variance, mean_square, scale in ((3.0, 1.0, 4.0), (0.1, 2.0, 16.0), (5.0, 0.2, 0.5)):
        expected = (variance + mean_square) / (variance / scale + mean_square)
        assert adascale(scale, variance / mean_square) == pytest.approx(expected, rel=1e-14)
    assert adascale(8.0, 0.0) == 1.0 and adascale(8.0, math.inf) == 8.0
    assert adascale(8.0, None) == 1.0 and adascale(0.5, None) == 0.5  # not known: the safe end


@pytest.mark.parametrize("rule", [linear, sqrt, lambda scale: adascale(scale, 1.0)])
@pytest.mark.parametrize("scale", [0.0, -1.0, math.nan, math.inf])
def test_a_wrong_scale_raises(rule, scale):
    with pytest.raises(ValueError, match=r"scale: expected a finite number above 0. Received: "):
        rule(scale)


def test_only_more_than_usual_staleness_damps():
    assert damping(0.0, 0.0) == damping(7.0, 7.0) == damping(3.0, 7.0) == 1.0
    assert damping(10.0, 7.0) == 0.5
    with pytest.raises(ValueError, match=r"staleness: expected 0 or more. Received: -1"):
        damping(-1.0, 0.0)


def test_a_ramp_is_straight_and_ends_exactly():
    ramp, seen = Ramp(value=1.0, target=1.0).towards(3.3, 7), []
    for _ in range(9):
        ramp = ramp.next()
        seen.append(ramp.value)
    assert seen[:7] == pytest.approx([1.0 + 2.3 * (i + 1) / 7 for i in range(7)], rel=1e-12)
    assert seen[6:] == [3.3] * 3 and ramp.steps_left == 0
    for target in np.random.RandomState(0).uniform(0.1, 30.0, size=200):
        ramp = Ramp(value=1.0, target=float(target), steps_left=3).next().next().next()
        assert ramp.value == target
    assert Ramp(value=1.0, target=1.0, steps_left=3).next().value == 1.0  # no rounding on the spot


def test_a_ramp_turned_in_its_middle_goes_on_from_there():
    ramp = Ramp(value=1.0, target=5.0, steps_left=4).next().next()
    assert ramp.value == 3.0
    back = ramp.towards(1.0, 10)
    assert back.value == 3.0 and back.next().value == pytest.approx(2.8)
    assert ramp.towards(5.0, 10) is ramp, "the same target must not lengthen the ramp"


def test_the_standing_batch_ignores_what_is_short_now_and_then():
    assert standing_batch(64.0, [64.0, 64.0, 5.0], 64.0) == 64.0
    assert standing_batch(64.0, [48.0, 48.0, 5.0], 64.0) == 48.0
    assert standing_batch(48.0, [47.0, 5.0], 64.0) == 48.0  # within the dead band
    assert standing_batch(48.0, [48.0, 64.0], 64.0) == 64.0
    assert standing_batch(64.0, [63.99999], 64.0) == 64.0  # rounding of a sum
    assert standing_batch(64.0, [100.0], 64.0) == 64.0
    assert standing_batch(48.0, [0.0, 0.0], 64.0) == 48.0  # nothing known


def sums_of(gradients, batches):
    """What the ranks' mean gradients [ranks, dimension] and their batches add up to."""
    batches = np.asarray(batches, dtype=float)
    merged = batches @ gradients / batches.sum()
    return NoiseSums(
        squared_norms=float((gradients**2).sum()), inverse_batches=float((1 / batches).sum()), ranks=len(batches),
        merged=float(merged @ merged), batch=float(batches.sum()),
    )  # fmt: skip


def equal_batch_estimate(sums):
    """McCandlish et al. as commonly written, with the mean batch of a rank as the small one."""
    small, large = sums.batch / sums.ranks, sums.batch
    mean_square = sums.squared_norms / sums.ranks
    noise = (mean_square - sums.merged) / (1 / small - 1 / large)
    return noise, (large * sums.merged - small * mean_square) / (large - small)


@pytest.mark.parametrize("batches", [(8, 8, 8), (20, 3, 1), (1, 31), (5, 2, 1, 8)])
def test_noise_and_signal_are_unbiased_for_uneven_batches(batches):
    """Mean over 20,000 draws against the truth, in standard errors; the formula for equal batches is far off."""
    rng, dimension, trials = np.random.RandomState(1), 6, 20_000
    mean = rng.standard_normal(dimension)
    deviation = np.linspace(0.5, 2.0, dimension)
    truth = float((deviation**2).sum()), float(mean @ mean)
    ours, theirs = [], []
    scale = deviation / np.sqrt(np.asarray(batches, dtype=float))[:, None]  # of a mean over b samples
    for _ in range(trials):
        sums = sums_of(mean + scale * rng.standard_normal((len(batches), dimension)), batches)
        ours.append(noise_and_signal(sums))
        theirs.append(equal_batch_estimate(sums))
    for index in range(2):
        column = np.array(ours)[:, index]
        assert abs(column.mean() - truth[index]) < 4 * column.std() / math.sqrt(trials)
        wrong = np.array(theirs)[:, index]
        off = abs(wrong.mean() - truth[index]) / (wrong.std() / math.sqrt(trials))
        assert off < 4 if len(set(batches)) == 1 else off > 8, "uneven batches must show the bias, or nothing is shown"


def test_no_estimate_from_one_rank_or_from_what_is_not_finite():
    one = NoiseSums(squared_norms=4.0, inverse_batches=1 / 8, ranks=1, merged=4.0, batch=8)
    assert noise_and_signal(one) is None
    assert noise_and_signal(NoiseSums(squared_norms=math.inf, inverse_batches=1, ranks=2, merged=1, batch=4)) is None
    assert noise_and_signal(NoiseSums(squared_norms=0, inverse_batches=0, ranks=0, merged=0, batch=0)) is None


def test_means_of_noise_and_signal_not_of_their_ratio():
    seen = NoiseScale(smoothing=0.5)
    assert seen.samples is None
    for noise, signal in ((8.0, 1.0), (4.0, 4.0), (12.0, 1.0)):
        seen = seen.seen(noise, signal)
    assert seen.samples == pytest.approx((1.0 + 1.0 + 6.0) / (0.125 + 1.0 + 0.5))
    assert NoiseScale().seen(-1.0, 2.0).samples == 0.0
    assert NoiseScale().seen(1.0, -2.0).samples == math.inf
    with pytest.raises(ValueError, match="smoothing: expected .* Received: 1.0"):
        NoiseScale(smoothing=1.0)


def test_another_target_makes_no_warm_up_shorter():
    ramp = Ramp(value=1.0, target=8.0, steps_left=100).towards(4.0, 10)
    assert (ramp.target, ramp.steps_left) == (4.0, 100) and ramp.towards(2.0, 300).steps_left == 300


def test_a_batch_that_is_nearly_whole_is_whole_whatever_it_was_before():
    assert standing_batch(48.0, [62.0], 64.0) == 64.0 and standing_batch(32.0, [60.9], 64.0) == 64.0
    assert standing_batch(32.0, [60.7], 64.0) == 60.7
    assert standing_batch(48.0, [], 64.0) == standing_batch(48.0, [0.0], 64.0) == 48.0
    assert standing_batch(0.25, [0.5], 2.0) == 0.5 and standing_batch(0.25, [], 2.0) == 0.25, "of less than a sample"


@pytest.mark.parametrize("wrong", [{"squared_norms": math.inf}, {"merged": math.inf}, {"batch": 0.0}, {"ranks": 1}])
def test_one_number_that_is_none_leaves_no_estimate(wrong):
    sums = {"squared_norms": 4.0, "inverse_batches": 0.5, "ranks": 2, "merged": 1.0, "batch": 8.0}
    assert noise_and_signal(NoiseSums(**sums)) is not None
    assert noise_and_signal(NoiseSums(**{**sums, **wrong})) is None


def test_without_smoothing_the_last_estimate_counts_and_the_weight_is_that_of_what_was_seen():
    seen = NoiseScale(smoothing=0.0).seen(8.0, 2.0).seen(6.0, 3.0)
    assert (seen.samples, seen.weight) == (2.0, 1.0)
    seen = NoiseScale(smoothing=0.9).seen(8.0, 2.0).seen(8.0, 2.0)
    assert seen.weight == pytest.approx(1.0 - 0.9**2) and seen.noise == pytest.approx(8.0 * seen.weight)
    assert NoiseScale().seen(1.0, 0.5).samples == 2.0


def test_a_ramp_at_its_end_stays_there():
    assert Ramp(value=2.0, target=2.0, steps_left=0).next() == Ramp(value=2.0, target=2.0)
    with pytest.raises(ValueError, match="steps_left: expected 0 or more. Received: -1"):
        Ramp(value=2.0, target=2.0, steps_left=-1)
