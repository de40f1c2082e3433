"""The ladder: one rung at a time, down sooner than up, never everybody, and no flapping where windows are noisy."""

import math
import random

import pytest

from hvd_hetero.policy.ladder import LadderRule, Move, Rung, Window, decide_rungs, slownesses

EVERY, SMALLER, FEWER, OUT = Rung
GOOD, SOMEWHAT = Window(), Window(stalled=0.05)
BAD, WORST = Window(stalled=0.3), Window(stalled=0.9)


def follow(steps, *, rungs=None, rule=None):
    """The rungs after each window; `steps` is, for each window, what was measured of every rank."""
    rungs, seen, history = list(rungs or [EVERY] * len(steps[0])), [[] for _ in steps[0]], []
    for windows in steps:
        for past, window in zip(seen, windows, strict=True):
            past.append(window)
        moves = decide_rungs(rungs, seen, rule)
        assert len({m.rank for m in moves}) == len(moves) and [m.rank for m in moves] == sorted(m.rank for m in moves)
        for move in moves:
            assert move.before == rungs[move.rank] and abs(move.after - move.before) == 1 and move.reason
            rungs[move.rank], seen[move.rank] = move.after, []
        assert EVERY in rungs
        history.append(tuple(rungs))
    return history


def test_a_rank_goes_down_after_three_bad_windows_as_far_as_it_is_bad():
    for window, bottom in ((GOOD, EVERY), (SOMEWHAT, SMALLER), (BAD, FEWER), (WORST, OUT)):
        history = follow([(GOOD, window)] * 40)
        assert history[1] == (EVERY, EVERY)
        assert [rungs[1] for rungs in history[2::3]][:bottom] == list(Rung)[1:bottom + 1]
        assert history[-1] == (EVERY, bottom)


def test_a_rank_comes_back_after_six_good_windows_a_rung():
    history = follow([(GOOD, GOOD)] * 30, rungs=[EVERY, OUT])
    assert [rungs[1] for rungs in history] == [OUT] * 5 + [FEWER] * 6 + [SMALLER] * 6 + [EVERY] * 13
    assert follow([(GOOD, BAD)] * 30, rungs=[EVERY, OUT])[-1] == (EVERY, FEWER)


def test_bad_windows_count_in_a_row():
    assert follow([(GOOD, BAD), (GOOD, BAD), (GOOD, GOOD)] * 20)[-1] == (EVERY, EVERY)
    broken = [(GOOD, GOOD)] * 5 + [(GOOD, BAD)]
    assert follow(broken * 10, rungs=[EVERY, FEWER])[-1] == (EVERY, FEWER)


@pytest.mark.parametrize(("window", "words"), [
    (Window(slowness=9.0), "9 times slower"), (Window(stalled=0.1), "10% of the time"),
    (Window(link=0.5), "0.5 of a step"),
])
def test_the_worst_measurement_decides_and_is_the_reason(window, words):
    (move,) = decide_rungs([EVERY, EVERY], [[GOOD] * 3, [window] * 3])
    assert move[:3] == (1, EVERY, SMALLER) and words in move.reason and "3 windows" in move.reason
    together = Window(slowness=9.0, stalled=0.9, link=0.5)
    assert "90% of the time" in decide_rungs([EVERY, EVERY], [[GOOD] * 3, [together] * 3])[0].reason
    assert decide_rungs([EVERY, FEWER], [[GOOD] * 3, [GOOD] * 6]) == [
        Move(1, FEWER, SMALLER, "well within the limits of \"smaller share\", 6 windows in a row")]


@pytest.mark.parametrize("seed", range(6))
def test_somebody_stays_at_every_step_whatever_is_measured(seed):
    rng = random.Random(seed)
    ranks = rng.randint(1, 5)
    follow([[rng.choice([GOOD, SOMEWHAT, BAD, WORST, WORST, WORST]) for _ in range(ranks)] for _ in range(300)],
           rule=LadderRule(bad_windows=1, good_windows=2))
    rungs = follow([[WORST] * ranks] * 100)[-1]
    assert rungs == (EVERY,) + (OUT,) * (ranks - 1)       # of equals the lowest rank


def test_the_best_one_is_the_one_that_stays():
    moves = decide_rungs([EVERY] * 3, [[WORST] * 3, [BAD] * 3, [WORST] * 3])
    assert [m.rank for m in moves] == [0, 2]
    assert [m.rank for m in decide_rungs([EVERY, EVERY, FEWER], [[WORST] * 3, [GOOD], [GOOD] * 3])] == [0]


def test_where_nobody_is_at_every_step_the_nearest_goes_up():
    (move,) = decide_rungs([OUT, FEWER, FEWER], [[GOOD], [BAD], [SOMEWHAT]])
    assert move == Move(2, FEWER, SMALLER, "no rank is at every step")
    assert decide_rungs([FEWER, FEWER], [[], [BAD]])[0].rank == 1      # rather one of which something is known
    moves = decide_rungs([OUT, FEWER], [[], [WORST] * 3])      # the last rank is not put out, but asked for more
    assert [m[:3] for m in moves] == [(1, FEWER, SMALLER)]


@pytest.mark.parametrize("mean", [0.01, 0.03, 0.1, 0.15, 0.2, 0.5, 0.8])
def test_noise_near_a_limit_moves_a_rank_seldom(mean):
    rng = random.Random(3)
    steps = [(GOOD, Window(stalled=min(max(rng.gauss(mean, 0.1 * mean), 0.0), 1.0))) for _ in range(1000)]
    history = follow(steps)
    ups = sum(b[1] < a[1] for a, b in zip(history, history[1:], strict=False))
    assert ups == 0 and history[-1][1] <= sum(limit <= 1.3 * mean for limit in LadderRule().stalled)


def test_every_rank_decides_the_same_and_nothing_is_changed():
    windows = [[GOOD] * 3, [BAD] * 3, [WORST] * 2]
    assert decide_rungs([EVERY] * 3, windows) == decide_rungs((0, 0, 0), [tuple(w) for w in windows])
    assert [len(w) for w in windows] == [3, 3, 2]


def test_slowness_is_against_the_median_of_the_others():
    assert slownesses([10.0, 10.0, 10.0, 1.0]) == (1.0, 1.0, 1.0, 10.0)
    assert slownesses([8.0, 1.0]) == (1 / 8, 8.0)
    assert slownesses([5.0]) == (1.0,)
    assert slownesses([4.0, 0.0]) == (pytest.approx(1e-9), math.inf)
    (move,) = decide_rungs([EVERY] * 2, [[Window(slowness=s)] * 3 for s in slownesses([4.0, 0.0])])
    assert move.rank == 1


def test_rungs_have_the_names_of_the_ladder():
    assert [str(rung) for rung in Rung] == ["every step", "smaller share", "fewer merges", "out"]


@pytest.mark.parametrize(("make", "message"), [
    (lambda: Window(slowness=0.0), "slowness: .* Received: 0.0"),
    (lambda: Window(slowness=float("nan")), "slowness: .* Received: nan"),
    (lambda: Window(stalled=1.1), "stalled: .* Received: 1.1"),
    (lambda: Window(link=-1.0), "link: .* Received: -1.0"),
    (lambda: LadderRule(stalled=(0.5, 0.1, 0.9)), "stalled: .* Received: \\(0.5, 0.1, 0.9\\)"),
    (lambda: LadderRule(bad_windows=6), "bad_windows and good_windows: .* Received: 6 and 6"),
    (lambda: LadderRule(relief=1.0), "relief: .* Received: 1.0 and 8.0"),
    (lambda: LadderRule(slowness=(1.5, 2.0, 3.0)), "relief: .* Received: 0.6 and 1.5"),
    (lambda: slownesses([]), "samples_per_s: .* Received: \\[\\]"),
    (lambda: slownesses([0.0, 0.0]), "a rank that computes. Received: \\[0.0, 0.0\\]"),
    (lambda: decide_rungs([], []), "current and windows: .* Received: 0 and 0"),
    (lambda: decide_rungs([EVERY], [[], []]), "Received: 1 and 2"),
])
def test_wrong_arguments_say_what_was_received(make, message):
    with pytest.raises(ValueError, match=message):
        make()
