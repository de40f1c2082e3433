"""Forecasts: the best split is the best, and a rank that holds the others up is told of."""

import itertools
from dataclasses import replace

import pytest

from hvd_hetero.policy.forecast import Forecast, Way, advice, counts, forecasts
from hvd_hetero.policy.jitter import Jitter
from hvd_hetero.policy.partition import Bound, InfeasibleError, split, step_time_s
from hvd_hetero.policy.speed import SpeedModel
from hvd_hetero.policy.strategy import Prediction


def models(*seconds, overhead=0.0):
    return [SpeedModel(overhead_s=overhead, seconds_per_sample=each) for each in seconds]


def by_title(found):
    return {each.title: each for each in found}


def test_the_best_shares_are_the_fastest_and_local_steps_make_what_all_make_alone():
    found = by_title(forecasts(models(0.001, 0.002, 0.004, 0.004), 64, exchange_s=0.01))
    assert found["best shares"].shares == (32, 16, 8, 8)
    assert found["best shares"].step_s == pytest.approx(0.042, rel=1e-3)
    assert found["equal shares"].step_s == pytest.approx(0.074, rel=1e-3)
    assert found["best shares, local steps"].samples_per_s == pytest.approx(2000.0, rel=1e-3)
    assert found["best shares, local steps"].step_s is None
    # One rank alone exchanges nothing.
    assert found["without ranks 1 to 3"].shares == (64, 0, 0, 0)
    assert found["without ranks 1 to 3"].step_s == pytest.approx(0.064, rel=1e-3)
    assert found["without ranks 1 to 3"].without == (1, 2, 3)


@pytest.mark.parametrize("slow, word", [(0.004, "keep all"), (0.5, "leave them out")])
def test_a_rank_too_slow_for_a_single_sample_is_better_left_out(slow, word):
    found = forecasts(models(0.001, 0.001, slow), 64, bounds=[Bound(lower=1)] * 3)
    assert word in advice(found)
    without, whole = (by_title(found)[title].samples_per_s for title in ("without rank 2", "best shares"))
    assert (without > whole) == (slow > 0.1)


def test_bounds_hold_and_what_they_forbid_is_left_out_or_an_error():
    bounds = [Bound(lower=1, upper=40), Bound(lower=1, upper=12), Bound(lower=1)]
    found = by_title(forecasts(models(0.001, 0.002, 0.004), 64, bounds=bounds))
    assert "equal shares" not in found  # of 22, 21 and 21
    assert all(each.shares[1] <= 12 for each in found.values())
    assert "without rank 2" not in found  # 52 are left for 64
    tight = forecasts(models(0.001, 0.002), 64, bounds=[Bound(upper=40), Bound(upper=40)])
    assert advice(tight).startswith("The slowest rank cannot be done without")
    with pytest.raises(InfeasibleError):
        forecasts(models(0.001, 0.002), 64, bounds=bounds[:2])


def test_ranks_whose_steps_vary_make_synchronous_steps_longer_and_local_ones_not():
    steady, varying = (
        by_title(forecasts(models(0.001, 0.001), 64, jitters=[Jitter(variation=noise)] * 2)) for noise in (0.0, 0.3)
    )
    assert varying["best shares"].step_s > 1.1 * steady["best shares"].step_s
    local = [each["best shares, local steps"].samples_per_s for each in (steady, varying)]
    assert local[0] == pytest.approx(local[1])


def test_the_best_shares_are_predicted_to_be_no_slower_than_equal_ones():
    """As of a run on a busy machine: what balances the means of noisy ranks makes them wait for each other."""
    speeds = ((0.0, 0.00287), (0.116, 6e-5))
    ranks = [SpeedModel(overhead_s=overhead, seconds_per_sample=seconds) for overhead, seconds in speeds]
    found = by_title(forecasts(ranks, 64, jitters=[Jitter(variation=0.376), Jitter(variation=0.339)]))
    assert found["best shares"].step_s <= found["equal shares"].step_s


def test_the_advice_is_for_the_best_that_fewer_ranks_make():
    models = [SpeedModel(overhead_s=0.0, seconds_per_sample=s) for s in (0.01, 0.01, 0.01)]
    models.append(SpeedModel(overhead_s=3.0, seconds_per_sample=0.01))
    found = forecasts(models, 48, bounds=[Bound(lower=1)] * 4)
    assert advice(found).startswith("Without rank 3 the others would make")


def test_a_gain_that_is_next_to_none_is_none():
    even = Forecast(way=Way.BEST, shares=(1, 1), prediction=Prediction(
        strategy="synchronous", samples_per_s=101.0, period_s=1.0))
    fewer = replace(even, way=Way.FEWER, shares=(2, 0), prediction=replace(even.prediction, samples_per_s=100.0))
    assert "add nothing" in advice([even, fewer])
    for rate, words in ((98.0, "keep all"), (102.0, "add nothing"), (104.0, "leave them out")):
        assert words in advice([even, replace(fewer, prediction=replace(even.prediction, samples_per_s=rate))])


def test_a_rank_whose_passes_hold_few_samples_is_predicted_to_take_many():
    ranks, caps = models(0.001, 0.001, overhead=0.05), [8, None]
    found = by_title(forecasts(ranks, 64, micro_batch=caps))
    assert found["equal shares"].step_s == pytest.approx(4 * 0.05 + 0.032, rel=1e-3)
    shares = found["best shares"].shares
    assert shares == split(ranks, 64, micro_batch=caps) and shares[0] < shares[1]
    assert found["best shares"].step_s == pytest.approx(step_time_s(ranks, shares, caps), rel=1e-3)
    local = found["best shares, local steps"]
    assert local.samples_per_s == pytest.approx(64 / step_time_s(ranks, shares, caps)), "all make equally many steps"


def test_local_steps_are_no_faster_where_bounds_hold_the_fast_rank_up():
    found = by_title(forecasts(models(0.001, 0.004), 64, bounds=[Bound(upper=32)] * 2))
    assert found["best shares, local steps"].samples_per_s == pytest.approx(64 / 0.128)


def test_two_ranks_that_are_left_exchange_as_all_do():
    found = by_title(forecasts(models(0.001, 0.001, 0.002), 60, exchange_s=0.5))
    assert found["without rank 2"].step_s == pytest.approx(0.53, rel=1e-3)
    assert found["without ranks 0, 2"].step_s == pytest.approx(0.06, rel=1e-3), "one alone does not"


def test_who_is_slowest_is_judged_at_a_usual_share():
    """A rank that has much overhead is not, where shares are large."""
    ranks = [SpeedModel(overhead_s=0.1, seconds_per_sample=0.001), SpeedModel(overhead_s=0.0, seconds_per_sample=0.01),
             SpeedModel(overhead_s=0.0, seconds_per_sample=0.005)]
    titles = [each.title for each in forecasts(ranks, 63) if each.way is Way.FEWER]
    assert titles == ["without rank 1", "without ranks 0, 1"]


def test_of_fewer_samples_than_ranks_the_slowest_are_left_out_first_as_well():
    titles = [each.title for each in forecasts(models(0.003, 0.004, 0.0031), 2) if each.way is Way.FEWER]
    assert titles == ["without rank 1", "without ranks 1, 2"]


def test_a_rank_alone_is_told_so_and_many_that_are_left_out_are_counted():
    assert advice(forecasts(models(0.001), 64)).startswith("There is one rank alone")
    slow = [each.title for each in forecasts(models(0.001, *[0.002] * 9), 64) if each.way is Way.FEWER]
    assert slow[7:] == ["without ranks 1 to 8", "without the 9 slowest ranks"]


def test_of_many_ranks_not_every_number_is_left_out():
    assert counts(0) == [] and counts(1) == [1] and counts(16) == list(range(1, 17))
    many = counts(255)
    assert many[:16] == list(range(1, 17)) and many[-1] == 255 and len(many) < 40
    assert all(1 <= after - before <= max(1, before // 4) for before, after in itertools.pairwise(many))
