"""Patience: what is long follows from how long steps take."""

import math

import pytest

from hvd_hetero.engine.environment import patience
from hvd_hetero.policy.patience import Patience


def test_follows_the_steps():
    even = [0.2] * 50
    assert Patience().warn_after_s(even) == Patience().min_warn_s, "not less than ordinary pauses"
    slow = [10.0 + 0.5 * (i % 3 - 1) for i in range(50)]
    assert 10.0 < Patience().warn_after_s(slow) < 40.0
    twice = Patience().warn_after_s([2 * s for s in slow])
    assert twice == pytest.approx(2 * Patience().warn_after_s(slow)), "scales with steps"


def test_a_few_long_steps_change_nothing():
    steps = [1.0 + 0.01 * (i % 7) for i in range(100)]
    assert Patience().warn_after_s([*steps, 300.0, 500.0]) == pytest.approx(Patience().warn_after_s(steps), rel=0.2)


def test_before_steps_are_known_it_is_long():
    assert Patience().warn_after_s([0.1] * 3) == Patience().startup_warn_s
    assert Patience(bound_s=10.0).warn_after_s([]) == 5.0, "a word comes before the end"


def test_what_is_given_holds():
    assert Patience(fixed_warn_s=3.0).warn_after_s([50.0] * 50) == 3.0
    assert Patience(bound_s=30.0).end_after_s([0.1] * 50) == 30.0
    assert Patience(bound_s=30.0).end_after_s([100.0] * 50) == 200.0, "but no ordinary step ends the job"
    assert Patience(fixed_warn_s=400.0).end_after_s([]) == 600.0, "also where a wait is reported late"
    assert Patience(fixed_warn_s=900.0).end_after_s([]) == 1800.0, "but not before it is"


@pytest.mark.parametrize("wrong", [{"fixed_warn_s": 0.0}, {"bound_s": -1.0}, {"steps": 0}, {"min_warn_s": 0.0}])
def test_wrong_lengths(wrong):
    with pytest.raises(ValueError, match="above 0"):
        Patience(**wrong)


def test_horovods_variables_are_heard(monkeypatch):
    for name in ("HOROVOD_STALL_CHECK_DISABLE", "HOROVOD_STALL_CHECK_TIME_SECONDS"):
        monkeypatch.delenv(name, raising=False)
    for value, bound_s in (("", 600.0), ("0", math.inf), ("7", 7.0)):
        monkeypatch.setenv("HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", value)
        limits = patience()
        assert limits.bound_s == bound_s and 0 < limits.warn_after_s([]) <= 60 <= max(60, limits.end_after_s([]))


@pytest.mark.parametrize(("text", "off"), [("1", True), ("2", True), ("0", False), ("", False), ("false", False)])
def test_what_horovod_takes_for_a_stall_check_that_is_off(monkeypatch, text, off):
    monkeypatch.setenv("HOROVOD_STALL_CHECK_DISABLE", text)
    assert (patience() is None) is off


@pytest.mark.parametrize("name", ["HOROVOD_STALL_CHECK_TIME_SECONDS", "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS"])
@pytest.mark.parametrize("text", ["abc", "-1", "nan"])
def test_times_that_are_none_are_told(monkeypatch, name, text):
    monkeypatch.setenv(name, text)
    with pytest.raises(ValueError, match=f"{name}: expected seconds, 0 or more. Received: '{text}'"):
        patience()


def test_as_many_steps_as_are_asked_for_are_enough():
    assert Patience(steps=1).warn_after_s([100.0]) == 100.0
    assert Patience(steps=2).warn_after_s([100.0]) == Patience().startup_warn_s
    assert Patience(steps=2).warn_after_s([100.0] * 2) == 100.0


def test_lengths_may_be_of_less_than_a_second():
    short = Patience(fixed_warn_s=0.5, bound_s=0.5, startup_warn_s=0.5, min_warn_s=0.5, deviations=0.5)
    assert (short.warn_after_s([]), short.end_after_s([])) == (0.5, 1.0)
