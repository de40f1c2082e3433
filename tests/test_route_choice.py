"""Which route is fastest: the choices that follow from times."""

import pytest

from hvd_hetero.policy.link import Link
from hvd_hetero.policy.route_choice import MARGIN, choose_route, confirm_route, rivals

TIMED = {
    "flat": Link(latency_s=1e-3, bandwidth_bytes_per_s=8e6),
    "rails": Link(latency_s=5e-3, bandwidth_bytes_per_s=12e6),
    "leader": Link(latency_s=4e-3, bandwidth_bytes_per_s=11e6),
}


def test_small_buckets_stay_flat_and_large_ones_take_the_faster_way():
    assert choose_route(4096, TIMED, default="flat").route == "flat"
    large = choose_route(16e6, TIMED, default="flat")
    assert large.route == "rails" and large.predicted_s == pytest.approx(5e-3 + 16 / 12)
    assert "rails 1338.3 ms predicted; next leader" in large.reason


def test_flat_is_left_only_for_a_clear_gain():
    close = {"flat": TIMED["flat"], "rails": Link(latency_s=1e-3, bandwidth_bytes_per_s=8e6 / (1 - 0.8 * MARGIN))}
    assert choose_route(16e6, close, default="flat").route == "flat"
    alone = choose_route(16e6, {"flat": TIMED["flat"]}, default="flat")
    assert alone.route == "flat" and "next" not in alone.reason
    with pytest.raises(ValueError, match="default: expected one of flat, rails"):
        choose_route(1.0, close, default="star")


def test_a_trial_compares_what_is_near():
    assert rivals(16e6, TIMED, "rails") == ("rails", "leader")
    far = {**TIMED, "leader": TIMED["flat"], "flat": Link(latency_s=1.0, bandwidth_bytes_per_s=1e6)}
    assert rivals(16e6, {k: far[k] for k in ("rails", "flat")}, "rails") == ("rails",)


def test_a_trial_overrules_the_prediction_only_by_a_margin():
    assert confirm_route({"a": [1.0, 1.0, 9.0], "b": [0.95, 0.95, 0.95]}, "a", 1).route == "a"
    found = confirm_route({"a": [1.0, 1.0, 9.0], "b": [0.5, 0.5, 9.0]}, "a", 1)
    assert found.route == "b" and found.predicted_s == 0.5 and "measured a 1000.0 ms, b 500.0 ms" in found.reason


def test_a_trial_goes_by_what_routes_usually_take():
    """One quick sum may be luck, and one slow one a stall, whenever it is."""
    for before in range(8):
        luck, stall = ([usual] * before + [once] + [usual] * (7 - before) for usual, once in ((1.2, 0.1), (0.5, 9.0)))
        assert confirm_route({"flat": [1.0] * 8, "rails": luck}, "flat", 2**20).route == "flat"
        assert confirm_route({"flat": [1.0] * 8, "rails": stall}, "flat", 2**20).route == "rails"
