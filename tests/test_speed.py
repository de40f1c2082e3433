"""The speed model: what was put in comes out, spikes do not count, and a change of speed is no change of share."""

import random

import pytest

from hvd_hetero.policy import regime
from hvd_hetero.policy.regime import last_plan_that_changed_speeds, since_last_speed_change
from hvd_hetero.policy.speed import Observation, SpeedModel, by_size, fit, middle, passes_of


def observe(rng, samples, count, *, overhead=0.0, each=1.0, noise=0.0, spikes=0.0):
    """`count` observations of one size, with relative noise and now and then a step of five times the time."""
    seen = []
    for _ in range(count):
        time_s = (overhead + samples * each) * max(0.3, rng.gauss(1.0, noise)) * (5.0 if rng.random() < spikes else 1.0)
        seen.append(Observation(samples=samples, compute_s=time_s))
    return seen


@pytest.mark.parametrize("overhead", [0.0, 1.0, 4.0, 16.0])
def test_overhead_and_slope_come_out_as_put_in(overhead):
    rng = random.Random(1)
    model = fit(observe(rng, 8, 10, overhead=overhead) + observe(rng, 32, 10, overhead=overhead))
    assert model.time_s(8) == pytest.approx(overhead + 8, rel=0.02)
    assert model.time_s(32) == pytest.approx(overhead + 32, rel=0.02)
    assert model.time_s(64) == pytest.approx(overhead + 64, rel=0.05)
    assert model.time_s(0) == 0.0 and model.observations == 20
    scattered = fit([o for b in range(4, 40, 3) for o in observe(rng, b, 1, overhead=overhead)])
    assert scattered.time_s(20) == pytest.approx(overhead + 20, rel=0.02)


def test_time_counts_an_overhead_per_micro_batch():
    model = SpeedModel(overhead_s=2.0, seconds_per_sample=1.0)
    assert [model.time_s(10, cap) for cap in (None, 10, 5, 4)] == [12.0, 12.0, 14.0, 16.0]


@pytest.mark.parametrize("shares", [(5, 10, 20, 40), (4, 16), (8, 9), (9, 8)])
def test_what_took_several_passes_shows_the_overhead_of_one(shares):
    """Ten seconds a pass and one a sample, of which a pass holds eight; and a pass more is no change of speed."""
    seen = [Observation(samples=b, compute_s=10.0 * passes_of(b, 8) + b, passes=passes_of(b, 8))
            for b in shares for _ in range(12)]
    assert since_last_speed_change(seen) == seen and last_plan_that_changed_speeds(windows([seen]), [0, 12]) == 0
    model = fit(seen)
    for b in (*shares, 13, 64):
        assert model.time_s(b, 8) == pytest.approx(10.0 * passes_of(b, 8) + b, rel=0.06)
    assert all(model.ratio(each) == pytest.approx(1.0, rel=0.06) for each in seen)


def test_spikes_do_not_count():
    for seed in range(20):
        rng = random.Random(seed)
        sizes = ((16, 20), (8, 20)) if seed % 2 else ((16, 40),)
        clean = [o for b, n in sizes for o in observe(rng, b, n, overhead=2.0, noise=0.03)]
        spiked = [Observation(samples=o.samples, compute_s=o.compute_s * (5 if i % 10 == 3 else 1))
                  for i, o in enumerate(clean)]
        assert fit(spiked).time_s(16) == pytest.approx(fit(clean).time_s(16), rel=0.03)
    short = observe(rng, 16, 20) + [Observation(samples=3, compute_s=15.0)]      # the short last batch of an epoch
    assert fit(short).time_s(16) == pytest.approx(16.0, rel=0.01)
    assert fit(short).overhead_s < 0.1
    one = [o for b in range(10, 30) for o in observe(rng, b, 1)]
    one[7] = Observation(samples=17, compute_s=85.0)
    assert fit(one).time_s(17) == pytest.approx(17.0, rel=0.02)


def test_one_size_takes_the_overhead_of_the_prior_scaled_or_none():
    seen = observe(random.Random(2), 10, 8, overhead=4.0, each=2.0)       # 24 s
    assert fit(seen).overhead_s == 0.0
    assert fit(seen).time_s(5) == pytest.approx(12.0)
    prior = SpeedModel(overhead_s=2.0, seconds_per_sample=1.0)            # twice as fast, the same proportions
    assert fit(seen, prior=prior).overhead_s == pytest.approx(4.0)
    assert fit(seen, prior=prior).time_s(5) == pytest.approx(14.0)


def test_sizes_close_together_do_not_invent_an_overhead():
    for seed in range(40):
        rng = random.Random(seed)
        model = fit(observe(rng, 16, 6, noise=0.1) + observe(rng, 15, 6, noise=0.1))
        assert model.overhead_s < 0.3 * model.time_s(16)


def test_a_known_overhead_outlives_the_sizes_that_showed_it():
    rng = random.Random(3)
    model = fit(observe(rng, 32, 20, overhead=8.0, noise=0.02) + observe(rng, 8, 20, overhead=8.0, noise=0.02))
    for _ in range(4):          # later the window holds only sizes next to each other, and is looked at again and again
        close = observe(rng, 16, 30, overhead=8.0, noise=0.1) + observe(rng, 15, 30, overhead=8.0, noise=0.1)
        known = model
        for _ in range(300):
            known = fit(close, prior=known)
        assert known.overhead_s == pytest.approx(model.overhead_s, rel=0.05)
    assert model.overhead_s == pytest.approx(8.0, rel=0.15)


def test_the_standard_error_is_that_of_the_prediction():
    errors = []
    for seed in range(200):
        model = fit(observe(random.Random(seed), 16, 20, noise=0.1, spikes=0.02))
        errors.append((model.time_s(16) / 16 - 1.0) / model.standard_error)
    spread = (sum(e * e for e in errors) / len(errors)) ** 0.5
    assert 0.75 < spread < 1.35


def test_without_observations_the_prior_comes_back():
    prior = SpeedModel(overhead_s=1.0, seconds_per_sample=1.0)
    assert fit([], prior=prior) is prior
    assert fit([Observation(samples=0, compute_s=0.0)], prior=prior) is prior
    with pytest.raises(ValueError, match="at least one with samples.* Received: 0"):
        fit([])
    assert fit([Observation(samples=4, compute_s=0.0)] * 5).seconds_per_sample > 0.0      # a clock too coarse to see it


@pytest.mark.parametrize("factor", [2.0, 0.5])
@pytest.mark.parametrize("noise", [0.02, 0.1])
def test_a_change_of_speed_is_seen_within_six_steps(factor, noise):
    late = 0
    for seed in range(25):
        rng = random.Random(seed)
        seen = observe(rng, 16, 60, overhead=2.0, noise=noise, spikes=0.02)
        seen += observe(rng, 16, 6, overhead=2.0 * factor, each=factor, noise=noise, spikes=0.02)
        late += not 4 <= len(since_last_speed_change(seen)) <= 8
    assert late <= 1


def test_a_steady_speed_is_one_regime():
    false = 0
    for seed in range(6):
        rng, window = random.Random(seed), []
        for observation in observe(rng, 16, 300, noise=0.1, spikes=0.03):
            window = [*window[-63:], observation]
            false += len(since_last_speed_change(window)) < len(window)
    assert false <= 6       # of 1800: a single false alarm is seen for a few steps


@pytest.mark.parametrize("overhead", [0.0, 4.0, 16.0, 1000.0])
@pytest.mark.parametrize("shares", [(16, 4), (4, 16), (16, 14), (8, 32, 16)])
def test_a_change_of_share_is_no_change_of_speed(overhead, shares):
    rng = random.Random(4)
    seen = [o for b in shares for o in observe(rng, b, 20, overhead=overhead, noise=0.03)]
    assert since_last_speed_change(seen) == seen


def test_a_change_of_speed_is_seen_through_changes_of_share():
    rng = random.Random(5)
    before = observe(rng, 16, 30, overhead=3.0, noise=0.05) + observe(rng, 20, 10, overhead=3.0, noise=0.05)
    slow = [o for b, n in ((20, 6), (10, 15)) for o in observe(rng, b, n, overhead=6.0, each=2.0, noise=0.05)]
    assert 20 <= len(since_last_speed_change(before + slow)) <= 22      # long after the re-plan that it caused
    at_once = observe(rng, 18, 8, overhead=6.0, each=2.0, noise=0.05)
    assert len(since_last_speed_change(before + at_once)) == 8          # both changed in one step
    back = observe(rng, 10, 12, overhead=3.0, noise=0.05)
    assert len(since_last_speed_change(before + slow + back)) in (11, 12, 13)


def test_what_is_soon_known_to_be_steady_is_no_change_for_the_whole_search_either(monkeypatch):
    rng, steady = random.Random(6), 0
    for _ in range(300):
        each, seen = 1.0, []
        for _ in range(rng.randint(1, 6)):
            each *= rng.choice([1.0, 1.0, 1.0, 1.2, 2.0])
            seen += observe(rng, rng.choice([8, 8, 16, 24]), rng.randint(1, 20), overhead=2.0, each=each,
                            noise=rng.choice([0.0, 0.02, 0.1]), spikes=0.03)
        wanted = {"minimum": rng.randint(2, 5), "tolerance": rng.choice([0.05, 0.15, 0.3])}
        if regime._steady(seen, *wanted.values()):
            steady += 1
            with monkeypatch.context() as patched:
                patched.setattr(regime, "_steady", lambda *of: False)
                assert since_last_speed_change(seen, **wanted) == seen
    assert 50 < steady < 250


def windows(*ranks):
    """Of each rank what was measured in which step, from stretches of observations."""
    return [list(enumerate(o for stretch in stretches for o in stretch)) for stretches in ranks]


@pytest.mark.parametrize("factor", [1.0, 1.15, 0.85])
def test_what_a_plan_does_to_speeds_counts_for_all_ranks(factor):
    rng = random.Random(6)
    grows = observe(rng, 16, 8, noise=0.03), observe(rng, 17, 8, each=factor, noise=0.03)
    shrinks = observe(rng, 16, 8, overhead=2.0, noise=0.03), observe(rng, 8, 8, overhead=2.0, each=factor, noise=0.03)
    once = windows(shrinks, grows)
    assert last_plan_that_changed_speeds(once, [0, 8]) == (8 if factor != 1.0 else 0)
    assert last_plan_that_changed_speeds(once[:1], [0, 8]) == 0, "overhead would do the same"
    later = windows([*shrinks, observe(rng, 9, 8, overhead=2.0, each=factor, noise=0.03)])
    both = [later[0], *windows([*grows, observe(rng, 16, 8, each=factor, noise=0.03)])]
    assert last_plan_that_changed_speeds(both, [0, 8, 16]) == (8 if factor != 1.0 else 0), "of the last plan none"
    assert last_plan_that_changed_speeds([window[8:] for window in both], [0, 8, 16]) == 0, "forgotten"
    without = last_plan_that_changed_speeds(both, [0, 8, 16])
    assert last_plan_that_changed_speeds(both, [0, 8, 16, 24]) == without, "nothing measured under the last plan"
    assert last_plan_that_changed_speeds([window[:11] for window in both], [0, 8]) == 0, "three steps say little"


@pytest.mark.parametrize(("make", "message"), [
    (lambda: Observation(samples=-1, compute_s=1.0), "samples: expected 0 or more.* Received: -1"),
    (lambda: Observation(samples=1, compute_s=float("nan")), "compute_s: .* Received: nan"),
    (lambda: Observation(samples=1, compute_s=1.0, passes=0), "passes: expected 1 or more. Received: 0"),
    (lambda: SpeedModel(overhead_s=-1.0, seconds_per_sample=1.0), "overhead_s: .* Received: -1"),
    (lambda: SpeedModel(overhead_s=0.0, seconds_per_sample=0.0), "Bound\\(upper=0\\). Received: 0"),
    (lambda: since_last_speed_change([], minimum=1), "Received: 1, 0.15"),
])
def test_wrong_arguments_say_what_was_received(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_a_size_that_comes_often_is_not_all_that_is_known():
    """As one short batch an epoch, where shares change with every batch: the others are the most."""
    seen = [Observation(samples=n, compute_s=0.1 + 0.01 * n) for n in [*range(20, 60), 8, 8, 8]]
    model = fit(seen)
    assert model.time_s(100) == pytest.approx(1.1, rel=0.05) and model.time_s(20) == pytest.approx(0.3, rel=0.05)


def test_the_last_shift_is_sought_where_windows_reach_over_a_plan_alone(monkeypatch):
    """A rank that is out keeps its old window: plans since then say nothing of it, nor of the others."""
    from hvd_hetero.policy import regime

    asked = []
    monkeypatch.setattr(regime, "_surely_changed", lambda old, new: asked.append(1) or 0.0)
    seen = Observation(samples=4, compute_s=0.1)
    out, others = [(step, seen) for step in range(8)], [(step, seen) for step in range(1490, 1500)]
    assert regime.last_plan_that_changed_speeds([out, others], [0, *range(10, 1500, 10)]) == 0
    assert not asked


def test_steps_without_samples_are_no_part_of_a_regime():
    """They are neither before nor after a change of speed: a change is seen through them."""
    rng, none = random.Random(12), Observation(samples=0, compute_s=0.0)
    before, after = observe(rng, 1, 20, noise=0.02), observe(rng, 1, 8, each=2.0, noise=0.02)
    assert len(since_last_speed_change([*before, *after])) == 8, "single samples are samples"
    mixed = [each for pair in zip([*before, *after], [none] * 28, strict=True) for each in pair]
    assert since_last_speed_change(mixed) == after


@pytest.mark.parametrize("wrong", [{"minimum": 1}, {"tolerance": 0.0}, {"tolerance": -0.1}])
def test_what_is_no_change_has_to_be_said(wrong):
    with pytest.raises(ValueError, match="minimum and tolerance: expected at least 2, and above 0"):
        since_last_speed_change([], **wrong)
    assert since_last_speed_change([], minimum=2, tolerance=0.01) == []


@pytest.mark.parametrize("make", [
    lambda: Observation(samples=1, compute_s=float("inf")), lambda: Observation(samples=1, compute_s=-1.0),
    lambda: SpeedModel(overhead_s=float("inf"), seconds_per_sample=1.0),
    lambda: SpeedModel(overhead_s=0.0, seconds_per_sample=float("inf")),
    lambda: SpeedModel(overhead_s=0.0, seconds_per_sample=1.0, standard_error=-0.1),
    lambda: SpeedModel(overhead_s=0.0, seconds_per_sample=1.0, overhead_error=-0.1),
    lambda: SpeedModel(overhead_s=0.0, seconds_per_sample=1.0, observations=-1),
    lambda: SpeedModel(overhead_s=0.0, seconds_per_sample=1.0, loading_s=-1.0),
    lambda: SpeedModel(overhead_s=0.0, seconds_per_sample=1.0, loading_s=float("inf")),
])
def test_a_single_number_that_is_none_is_refused(make):
    with pytest.raises(ValueError, match="expected .* Received: "):
        make()


def test_a_median_is_the_middle_one_or_between_the_two_in_the_middle():
    assert [middle(each) for each in ([7.0], [1.0, 4.0], [1.0, 2.0, 9.0], [1.0, 2.0, 4.0, 9.0])] == [7.0, 2.5, 2.0, 3.0]


def test_a_single_sample_takes_its_time():
    model = SpeedModel(overhead_s=2.0, seconds_per_sample=1.0, overhead_error=0.0)
    assert model.time_s(1) == model.time_s(1, 8) == 3.0 and model.time_s(0) == model.time_s(0, 8) == 0.0
    assert by_size([Observation(samples=1, compute_s=2.0), Observation(samples=0, compute_s=1.0)]) == {1.0: [2.0]}


def test_one_slow_step_of_a_size_is_no_change_of_speed_however_many_there_are_of_others():
    steady = [Observation(samples=8, compute_s=1.0)] * 10
    later = [Observation(samples=16, compute_s=2.0)] * 5 + [Observation(samples=8, compute_s=2.0)]
    assert len(since_last_speed_change(steady + later)) == 16


def test_a_model_knows_between_which_samples_it_was_measured():
    """A step or two of a size, as the short last batch of an epoch, may have been anything."""
    seen = [Observation(samples=b, compute_s=0.1 * b, passes=2) for b in (4, 4, 8, 8, 8, 20, 20, 20, 20, 64, 64)]
    assert fit(seen).measured == (8, 20)
    low, high = fit(seen[:2]).measured
    assert low > 10**9 and high == 0


@pytest.mark.parametrize("sizes", [(8,), (8, 16)])
def test_a_model_knows_by_how_much_its_speed_drifted(sizes):
    """The ratios of both halves to the fitted time; spikes do not count."""
    def seconds(at, size):
        return (1.0 + 0.1 * size) * (1.1 if at >= 20 else 0.9) * (5.0 if at % 9 == 3 else 1.0)

    seen = [Observation(samples=sizes[at % len(sizes)], compute_s=seconds(at, sizes[at % len(sizes)]))
            for at in range(40)]
    older, newer = fit(seen).halves
    assert older < 1.0 < newer and newer / older == pytest.approx(1.1 / 0.9, rel=0.01)
    assert fit(seen[20:]).halves == pytest.approx((1.0, 1.0), rel=0.02)
    assert fit(seen[:1]).halves is None
