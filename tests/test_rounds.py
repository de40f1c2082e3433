"""Rounds between merges: who waits for whom and who is heard of, which merges are missed, what is saved and goes on."""

import itertools
import math
import threading
import time

import numpy as np
import pytest
from merging import LENGTH, START, Turns, rounds_of

from hvd_hetero.engine.local import SoloEngine, World
from hvd_hetero.optimizers import attachment, control, merge_control
from hvd_hetero.optimizers.balancer import Balancer
from hvd_hetero.optimizers.control import Announcement
from hvd_hetero.optimizers.departure import PeerError
from hvd_hetero.optimizers.fragment import LocalWork
from hvd_hetero.optimizers.local_sgd import LocalSGD
from hvd_hetero.optimizers.merge_sender import MergeSender
from hvd_hetero.optimizers.outer import Outer
from hvd_hetero.optimizers.round_length import RoundLengths
from hvd_hetero.policy.local_round import NOTHING


@pytest.mark.parametrize("bound", [0, 1, 4])
@pytest.mark.parametrize("fragments", [1, 2])
def test_ranks_meet_elsewhere_between_their_merges(bound, fragments):
    """A slow rank's rounds are shorter, so it is at its bound while the others' next contribution is steps away."""
    rule = LocalSGD(round_steps=8, bound_rounds=bound, warmup_steps=0, fragments=fragments)

    def program(engine):
        rounds, store, balancer = rounds_of(engine, rule, START)
        rounds.lengths.hear = lambda compute_s: None
        rounds.lengths.by_rank = (8, 1)
        met = []
        for step in range(40):
            balancer.begin(1)
            store.values -= 0.01
            rounds.after_step(1.0)
            if step % 5 == 4:
                met.append(engine.allreduce_async(np.array([float(step)]), name="met").wait()[0] / 2)
        rounds.finish()
        return met, store.values

    (met, values), (also_met, others) = World(2).run(program, timeout_s=30)
    assert met == also_met == list(range(4, 40, 5))
    np.testing.assert_array_equal(values, others)


def test_a_finish_over_several_fragments_waits_where_the_watchdog_sees_it():
    """And nothing is under way afterwards, also where some fragments are at their end before the others."""
    waits = threading.Event()

    def program(engine):
        rounds, store, balancer = rounds_of(engine, LocalSGD(round_steps=2, fragments=2, warmup_steps=0), START)
        wait = engine.wait_for

        def watched(done, *, name):
            waits.set()
            return wait(done, name=name)

        balancer.begin(1)
        rounds.after_step(1.0, lr=0.1)
        if engine.rank:
            assert waits.wait(10.0), "rank 0 waits, and no watchdog knows of it"
        engine.wait_for = watched
        last = rounds.fragments[1]
        done = last.done
        asked = itertools.count()
        last.done = lambda: 0 in rounds._ended and next(asked) > 0 and done()
        rounds.finish()
        assert not any(fragment.under_way for fragment in rounds.fragments)
        return store.values.copy(), [fragment.sends for fragment in rounds.fragments]

    (one, sends), (other, others) = World(2).run(program, timeout_s=20)
    assert (one == other).all() and sends == others


def test_a_rank_whose_step_takes_many_rounds_holds_up_no_merge():
    """Rank 1 makes a step while rank 0 makes 12, six rounds of 2; what it measures sends it down and up again."""
    steps = 20

    def merges_of(most_missed, slow=True):
        rule = LocalSGD(round_steps=2, bound_rounds=100, warmup_steps=0, most_missed=most_missed, drift_limit=None)
        turns = Turns(([0] * 12 + [1]) * steps)

        def program(engine):
            told, rungs = [], []
            rounds, store, balancer = rounds_of(engine, rule, START, on_merge=told.append)
            balancer.ladder._tell = rungs.append
            for step in range((12, 1)[engine.rank] * steps):
                turns.take(engine.rank)
                balancer.begin(1)
                store.values += 1.0
                rounds.after_step(1.0, compute=(1.0, 12.0 if engine.rank == 1 and (slow or step < steps // 2) else 1.0))
                turns.give()
            turns.take(-1)
            rounds.finish()
            return told, rungs, store.values

        (told, rungs, values), (others, same, equal) = World(2).run(program)
        assert (values == equal).all() and rungs == same
        assert sum(fields["samples"] for fields in told) == 13 * steps, "every step counts once"
        return told, rungs

    never, rungs = merges_of(0)
    assert len(never) <= steps + 3 and not rungs
    missed, rungs = merges_of(3)
    assert len(missed) >= 3 * steps, "four merges for each step of rank 1, less the first few"
    assert [(move.rank, move.after.title) for move in rungs] == [(1, "fewer merges")]
    assert "one merge of 1, 2" in rungs[0].reason and max(f["carried_steps"] for f in missed[12:-3]) <= 12
    _, rungs = merges_of(3, slow=False)
    assert [move.after.title for move in rungs] == ["fewer merges", "every step"]


@pytest.mark.parametrize("lookahead", [0, 3])
def test_a_plan_holds_for_the_same_batches_on_a_rank_that_misses_merges(lookahead):
    """Rank 1 deals ahead while plans come in, and says for how far, also for answers that it has not heard."""
    rule = LocalSGD(round_steps=2, bound_rounds=2, warmup_steps=0, drift_limit=None)

    def program(engine):
        rounds, store, balancer = rounds_of(engine, rule, START, whole=8)
        random = np.random.RandomState(engine.rank)
        rounds.lengths.hear = lambda step_s: None
        rounds.lengths.intervals = (1, 4)
        balancer.lookahead = lookahead if engine.rank == 1 else 0
        planner, used = balancer.planner, {}
        for step in range(300):
            while len(used) <= step + balancer.lookahead:
                used[len(used)] = balancer.deal(len(used)).shares
            balancer.begin(used[step][engine.rank])
            if engine.rank == 0 and planner.announcement is None:
                version = planner.plans[-1].version + 1
                share = 1 + version % 7  # never that of the plan before
                planner.announcement = Announcement(
                    version=version, shares=(share, 8 - share), reason="", predicted_step_s=0.0,
                    strategy="synchronous",
                )
            rounds.after_step(float(used[step][engine.rank]))
            first = 0.02 if engine.rank == 0 and step < 6 else 0.0  # rank 1 is as far ahead as it may be
            time.sleep(first + random.choice([0, 0, 0.0003, 0.001]) * (2 - engine.rank))
        rounds.finish()
        return dict(list(used.items())[:300]), len(planner.plans)

    (mine, plans), (theirs, _) = World(2).run(program)
    assert plans > 10 and mine == theirs


def test_steps_without_samples_are_no_measure_of_other_ranks():
    lengths = RoundLengths(LocalSGD(round_steps=4, drift_limit=None), 3, most_missed=3)
    for _ in range(5):
        lengths.watch((1.0, 1.0, 1.0), 1.0, steps=(4, 4, 4), samples=(8, 4, 0))
        lengths.hear((0.1, 0.2, 1e-4))
    assert lengths.by_rank == (4, 2, 4) and lengths.intervals == (1, 1, 1)
    lengths.watch((1.0, 1.0, 1.0), 1.0, steps=(4, 2, 4), samples=(8, 0, 4))
    lengths.hear((0.1, 1e-4, 0.2))
    assert lengths.by_rank == (4, 4, 4), "the length of one that has none now does not stay"


def test_a_rank_that_has_samples_again_and_no_known_time_gets_no_length_from_those_of_others():
    lengths = RoundLengths(LocalSGD(round_steps=4), 3, most_missed=3)
    lengths.watch((1.0, 1.0, 1.0), 1.0, steps=(4, 4, 4), samples=(8, 4, 0))
    lengths.hear((0.1, 2.0, 0.0))
    assert lengths.by_rank == (4, 1, 4) and lengths.intervals == (1, 2, 1)
    lengths.watch((1.0, 1.0, 1.0), 1.0, steps=(4, 4, 4), samples=(8, 4, 1))
    lengths.hear((0.1, 2.0, 0.0))
    assert lengths.by_rank == (4, 4, 4) and lengths.intervals == (1, 1, 1)


@pytest.mark.parametrize("reach", [1.0, 3.0])
def test_the_drift_of_a_merge_is_in_no_unit_and_noise_is_that_of_the_ranks_with_samples(reach):
    lengths = RoundLengths(LocalSGD(round_steps=4), 3)
    seen = lengths.watch((12.0, reach, 60.0), reach**2, steps=(2, 2, 2), samples=(8, 4, 0))
    assert seen == pytest.approx((2.0, 1.0))
    for sums, square in (((12.0, reach, 60.0), math.inf), ((0.0, 0.0, 0.0), 0.0)):
        assert lengths.watch(sums, square, steps=(2, 2, 2), samples=(8, 4, 0)) == (0.0, 0.0)


@pytest.mark.parametrize("rule", [
    LocalSGD(weights="fednova"), LocalSGD(fragments=2), LocalSGD(bound_rounds=0), LocalSGD(most_missed=0),
])
def test_no_merge_is_missed_where_that_would_do_harm(rule):
    def program(engine):
        rounds, *_ = rounds_of(engine, rule, START)
        for _ in range(5):
            rounds.lengths.hear((0.1, 10.0))
        return rounds.lengths.intervals

    assert World(2).run(program) == [(1, 1)] * 2


def test_the_guard_does_not_take_a_merge_that_ranks_missed_for_agreement():
    lengths = RoundLengths(LocalSGD(round_steps=8), 2, most_missed=3)
    for _ in range(40):  # one rank alone agrees with itself; both together pull apart
        lengths.watch((2.0, 2.0, 400.0), 1.0, steps=(8, 8), samples=(8, 8))
        for _ in range(3):
            lengths.watch((1.0, 1.0, 1.0), 1.0, steps=(8, 0), samples=(8, 0))
    assert lengths.longest == 1


def test_a_rank_without_samples_is_not_missed_in_a_merge():
    lengths = RoundLengths(LocalSGD(round_steps=8), 3, most_missed=3)
    for steps in ((8, 8, 8), *[(8, 8, 0)] * 19):
        lengths.watch((2.0, 2.0, 400.0), 1.0, steps=steps, samples=(8, 8, 0))
    assert lengths.longest == 1


class Merges:
    """What exchanges gradients for a balancer, where all that is exchanged are merges."""

    def __init__(self, rounds):
        self._rounds = rounds

    def on_begin(self): ...

    def on_count(self): ...

    def withdraw(self):
        return self._rounds.withdraw()


def said_by_all(ranks, rule, *, intervals=None, fails=lambda rounds, step: step == 5):
    """What each rank says in the end where rank 1 fails, before which step `fails(rounds, step)` tells."""

    def program(engine):
        rounds, store, balancer = rounds_of(engine, rule, START)
        balancer.exchanges.attach(Merges(rounds))
        if intervals:
            rounds.lengths.hear = lambda step_s: None
            rounds.lengths.intervals = intervals
        for step in range(40):
            if engine.rank == 1 and fails(rounds, step):
                balancer.fail()
                return "failed"
            balancer.begin(1)
            try:
                rounds.after_step(1.0)
            except PeerError as error:
                assert balancer.departure.final, "there is no further merge with a rank that has failed"
                return str(error)
        return "never heard"

    return World(ranks).run(program)


def test_a_rank_that_fails_while_it_misses_merges_is_heard_of():
    def fails(rounds, step):
        return len(rounds.fragments[0]._pending) > 1  # it is to miss merges

    rule = LocalSGD(round_steps=1, bound_rounds=2, warmup_steps=0)
    heard, failed = said_by_all(2, rule, intervals=(1, 4), fails=fails)
    assert failed == "failed" and "rank 1 could not" in heard


def test_a_stalled_rank_holds_nobody_up_until_the_bound():
    rule = LocalSGD(round_steps=2, bound_rounds=3, warmup_steps=0)
    stalled, steps = threading.Event(), []

    def program(engine):
        rounds, store, balancer = rounds_of(engine, rule, START)
        for step in range(12):
            if engine.rank == 1 and step == 1:
                assert stalled.wait(20)
            balancer.begin(1)
            store.values += 1.0
            if engine.rank == 0:
                steps.append(step)
                if len(steps) == 8:  # 2 until it sends, 6 until the bound: the next thing it does is wait
                    threading.Timer(0.2, stalled.set).start()
                assert len(steps) <= 8 or stalled.is_set(), "went on beyond the bound"
            rounds.after_step(1.0)
        rounds.finish()
        return rounds.waits, store.values

    (waits, values), (_, others) = World(2).run(program)
    assert waits == 1 and (values == others).all()


def test_a_rank_that_fails_is_heard_of():
    ended = said_by_all(3, LocalSGD(round_steps=2, bound_rounds=2, warmup_steps=0))
    assert ended[1] == "failed"
    assert all("rank 1 could not" in ended[rank] for rank in (0, 2)), ended


def test_the_guard_shortens_rounds_where_ranks_pull_apart():
    def lengths(pull):
        rule = LocalSGD(round_steps=16, bound_rounds=0, warmup_steps=0, drift_limit=1.5)

        def program(engine):
            rounds, store, balancer = rounds_of(engine, rule, np.zeros(400))
            random = np.random.RandomState(engine.rank)
            for _ in range(400):
                balancer.begin(1)
                store.values += random.standard_normal(400) + pull * (-1) ** engine.rank
                rounds.after_step(1.0)
            return rounds.lengths.by_rank

        return World(2).run(program)

    calm, is_local = lengths(0.0), lengths(2.0)
    assert calm == [(16, 16)] * 2
    assert is_local[0] == is_local[1] and max(is_local[0]) <= 4


def test_a_saved_state_goes_on():
    rule = LocalSGD(round_steps=2, bound_rounds=0, warmup_steps=0, outer=Outer(learning_rate=0.7, momentum=0.9))

    def steps(engine, store, rounds, balancer, first, last):
        for step in range(first, last):
            balancer.begin(1)
            store.values += np.random.RandomState(step + 100 * engine.rank).standard_normal(LENGTH)
            rounds.after_step(1.0)

    def program(engine):
        rounds, store, balancer = rounds_of(engine, rule, START)
        steps(engine, store, rounds, balancer, 0, 10)
        rounds.finish()
        state = rounds.state_dict()
        again, copy, other = rounds_of(engine, rule, store.values)
        again.fragments[0].work.batches = 0.5  # owed, by what is not done any more
        again.load_state_dict(state)
        again.begin()
        rounds.begin()
        steps(engine, store, rounds, balancer, 10, 20)
        steps(engine, copy, again, other, 10, 20)
        return (store.values == copy.values).all(), again.merges == rounds.merges

    assert World(2).run(program) == [(True, True)] * 2


@pytest.mark.parametrize(("saved", "longest"), [(16, 4), (2, 2)])
def test_rounds_are_as_long_as_a_state_has_them_and_no_longer_than_the_rule_says(saved, longest):
    lengths = heard([0.1, 2.0], rule=LocalSGD(round_steps=4), most_missed=3)
    assert lengths.by_rank == (4, 1) and lengths.intervals == (1, 2)
    lengths.resume(saved)
    assert lengths.longest == longest and lengths.by_rank == (longest,) * 2 and lengths.intervals == (1, 1)


def test_rounds_that_begin_anew_know_nothing_of_the_steps_before():
    lengths = RoundLengths(LocalSGD(round_steps=4), 2)
    lengths.hear([0.1, 0.4])
    assert lengths.by_rank == (4, 1)
    lengths.resume(4)
    lengths.hear([0.1, 0.1])
    assert lengths.by_rank == (4, 4), "not half of what was heard before"


def test_the_place_of_a_long_job_is_exact_in_single_precision():
    position = 5 * 2**24 + 1
    row = merge_control.pack(
        NOTHING, spread=0.0, finishing=False, own=(1.0, 1.0, position), rank=1, ranks=2,
        control=[0.0] * control.length(2),
    )
    said = merge_control.unpack(np.array(row, np.float32).tolist(), ranks=2)
    assert said.positions == [0, position]


@pytest.mark.parametrize(("options", "rounds"), [
    ({}, 8), ({"round_steps": 4}, 4), ({"round_steps": 1}, 16), ({"round_steps": 32}, 4), ({"bound_rounds": 3}, 3),
    ({"round_steps": 2, "bound_rounds": 0}, 0),
])  # fmt: skip
def test_short_rounds_let_a_rank_go_as_many_steps_ahead_as_usual_ones(options, rounds):
    assert LocalSGD(**options).most_rounds == rounds


@pytest.mark.parametrize("fails", ["fail", "stop"])
@pytest.mark.parametrize("at", range(16, 24))
@pytest.mark.parametrize("bound", [0, 1])
def test_a_failure_is_heard_of_whichever_fragment_the_others_wait_for(fails, at, bound, monkeypatch):
    monkeypatch.setattr(attachment, "FAIL_WAIT_S", 3.0)
    rule = LocalSGD(round_steps=4, bound_rounds=bound, warmup_steps=0, fragments=2, drift_limit=None)

    def program(engine):
        rounds, store, balancer = rounds_of(engine, rule, START)
        balancer.exchanges.attach(Merges(rounds))
        for step in range(40):
            if engine.rank == 1 and step == at:
                if fails == "fail":
                    return balancer.fail()
                balancer.fail_at_exchange(KeyError("the loader's"))
            balancer.begin(1)
            try:
                rounds.after_step(1.0)
            except (PeerError, KeyError) as error:
                return repr(error)
        return "never heard"

    heard, own = World(2).run(program, timeout_s=10)
    assert heard.startswith("PeerError") and "rank 1 could not" in heard
    assert own is None if fails == "fail" else own.startswith("KeyError")


def heard(*step_s, rule=None, most_missed=0):
    """The lengths of rounds after these seconds of a step, by rank, one merge after the other."""
    lengths = RoundLengths(rule or LocalSGD(round_steps=8), len(step_s[0]), most_missed=most_missed)
    for each in step_s:
        lengths.hear(each)
    return lengths


def test_ranks_whose_steps_take_nearly_as_long_have_rounds_of_one_length():
    assert heard([1.0, 1.09]).by_rank == (8, 8)
    assert heard([1.0, 1.15]).by_rank[1] < 8
    assert heard([2.0, 1.0]).by_rank == (4, 8) and heard([2.0, 1.0]).intervals == (1, 1)


def test_a_steps_length_is_smoothed_over_merges_and_kept_where_nothing_is_said():
    assert heard([1.0, 1.0], [1.0, 3.0]).by_rank == (8, 4), "2 s: the mean of what was known and what is heard"
    assert heard([1.0, 2.0], [0.0, 0.0]).by_rank == (8, 4)
    assert heard([1.0, 2.0], [2.0, 0.0]).by_rank == heard([1.5, 2.0]).by_rank


def test_a_merge_tells_how_far_a_rank_is_from_where_the_foremost_has_sent_and_how_long_ago_it_has():
    rule = LocalSGD(round_steps=2, bound_rounds=4, warmup_steps=0, drift_limit=None)
    order = [0] * 5 + [1] * 2 + [0] + [1] * 2 + [0, 1]  # a merge ends as the later one sends, and is heard a step on
    turns = Turns(order)

    def program(engine):
        told = []

        def tell(fields):
            told.append([fields[name] for name in ("step", "behind", "carried_steps", "samples")])

        rounds, store, balancer = rounds_of(engine, rule, START, on_merge=tell)
        late = []
        balancer.dialogue.subscribe(lambda: late.append(balancer.dialogue.staleness))
        for _ in range(order.count(engine.rank)):
            turns.take(engine.rank)
            balancer.begin(1)
            rounds.after_step(1.0)
            turns.give()
        turns.take(-1)
        return told, late

    turns.order.append(-1)
    first, second = World(2).run(program)
    assert first == ([[5, -4, 4, 4.0], [6, -1, 1, 6.0]], [2.0, 0.5])
    assert second == ([[2, -1, 1, 4.0], [4, 1, 1, 6.0]], [0.5, 0.5])


@pytest.mark.parametrize(("bound", "batches", "ahead"), [(2, 1, 32), (2, 3, 96), (1.03, 1, 17), (0, 1, 1), (0, 2, 2)])
def test_batches_that_a_rank_may_begin_before_it_sees_the_merge(bound, batches, ahead):
    rounds, *_ = rounds_of(SoloEngine(), LocalSGD(round_steps=16, bound_rounds=bound), START)
    rounds._batches = lambda: batches
    assert rounds.most_ahead == ahead


def test_of_two_optimizers_the_merges_of_one_carry_measurements_and_plans():
    """Those of the first to begin; of two, each rank could hear first of another."""
    rule = LocalSGD(round_steps=1, warmup_steps=0)
    rounds, _, balancer = rounds_of(SoloEngine(), rule, START)
    other, _, beside = rounds_of(SoloEngine(), rule, START)
    other.balancer = balancer
    balancer.strategies.begins(other)
    balancer.planner.announcement = Announcement(
        version=1, shares=(1,), reason="", predicted_step_s=0.5, strategy="synchronous"
    )
    observed, taken, told = [], [], []
    balancer.planner.observe = lambda *seen, **_: observed.append(seen)
    balancer.step_timer.take_stops = lambda: taken.append(True) or control.StopSums()
    balancer.departure.heard_by_all = lambda: told.append(True)
    balancer.begin(1)
    other.after_step(1.0, compute=(1.0, 0.5))
    other.finish()
    assert not told, "flags travel with the other's merges, of which ranks may have heard unlike numbers"
    assert not observed and len(balancer.plans) == 1 and balancer.dialogue.staleness == 0.0
    assert not taken, "or stops would be said to nobody"
    rounds.after_step(1.0, compute=(1.0, 0.5))
    rounds.finish()
    assert observed and taken and told and len(balancer.plans) == 2


@pytest.mark.parametrize("interval", [1, 4])
def test_a_rank_deals_on_once_it_has_heard_as_many_answers_as_merges_that_it_has_spoken_for(interval):
    """In advance, too."""
    rounds, _, balancer = rounds_of(SoloEngine(), LocalSGD(round_steps=2, warmup_steps=0, drift_limit=None), START)
    rounds.lengths.hear = lambda step_s: None
    rounds.lengths.intervals = (interval,)
    bounds, horizon = [], balancer.dialogue.horizon
    balancer.dialogue.subscribe(lambda: bounds.append(horizon._bound))
    for _ in range(3):
        balancer.begin(1)
        rounds.after_step(1.0)
    assert [bound < math.inf for bound in bounds] == [True] * (interval - 1) + [False]


@pytest.mark.parametrize(("fragments", "sends"), [
    (1, [0, 0, 0, 1, 1, 1, 1, 2]), (2, [0, 1, 1, 2, 2, 3, 3, 4]), (4, [1, 2, 3, 4, 5, 6, 7, 8]),
])  # fmt: skip
def test_fragments_merge_in_turn(fragments, sends):
    """Each once in a round, spread over it; and in the next phase again from the first one on."""
    rule = LocalSGD(round_steps=4, warmup_steps=0, fragments=fragments, drift_limit=None)
    rounds, store, balancer = rounds_of(SoloEngine(), rule, START)
    for _ in range(2):
        rounds.begin()
        before, found = sum(fragment.sends for fragment in rounds.fragments), []
        for _ in range(8):
            balancer.begin(1)
            rounds.after_step(1.0)
            found.append(sum(fragment.sends for fragment in rounds.fragments) - before)
        assert found == sends
        rounds.finish()


def test_what_a_rank_needs_for_a_batch_is_the_median_of_its_steps_since_it_last_said_it():
    """By seconds of a sample: a stall is no property of the share."""
    rule = LocalSGD(round_steps=5, warmup_steps=0, drift_limit=None)
    rounds, store, balancer = rounds_of(SoloEngine(), rule, START)
    said = []
    balancer.planner.observe = lambda step, samples, seconds, *_, **__: said.append((samples, seconds))
    for samples, seconds in [(4.0, 4.0), (2.0, 90.0), (8.0, 16.0), (0.0, 5.0), (4.0, 12.0)] + [(0.0, 0.0)] * 5:
        balancer.begin(1)
        rounds.after_step(1.0, compute=(samples, seconds))
    rounds._serve(lambda fragment: False)
    assert said == [((4.0,), (12.0,))] * 2, "and that is said until there is more"
    rounds.finish()
    rounds.begin()
    for _ in range(6):
        balancer.begin(1)
        rounds.after_step(1.0)
    assert said[-1] == ((0.0,), (0.0,)), "but not in another phase, whose steps may be others"


def test_stops_make_the_rounds_of_the_rank_shorter_that_has_them():
    rounds, store, balancer = rounds_of(SoloEngine(), LocalSGD(round_steps=1, warmup_steps=0), START)
    balancer.planner.steadiness.hear(0, [control.StopSums(10.0, 10.0, 10.0)])
    found = []
    rounds.lengths.hear = lambda step_s: found.extend(step_s)
    balancer.begin(1)
    rounds.after_step(1.0, compute=(1.0, 0.5))
    rounds.finish()
    assert found[0] == pytest.approx(1.0)


def test_each_phase_begins_with_the_first_lane_as_after_a_failure_ranks_may_have_left_off_at_others():
    rounds, store, balancer = rounds_of(SoloEngine(), LocalSGD(round_steps=1, warmup_steps=0), START)
    found = []
    for steps in (1, 2, 1):
        rounds.begin()
        for _ in range(steps):
            balancer.begin(1)
            rounds.after_step(1.0)
            found.append(rounds.fragments[0].operation.split(".")[1])
    assert found == ["0", "0", "1", "0"]


def test_nothing_is_owed_or_under_way_of_steps_that_were_broken_off():
    rounds, store, balancer = rounds_of(SoloEngine(), LocalSGD(round_steps=2, warmup_steps=0), START)
    rounds.fragments[0].done = lambda: False
    for _ in range(3):
        balancer.begin(1)
        rounds.after_step(1.0)
    assert rounds.fragments[0].under_way and rounds.fragments[0].work.steps == 1
    rounds.begin()
    assert not rounds.fragments[0].under_way and rounds.fragments[0].work == LocalWork()


def test_a_rank_that_gives_way_at_its_bound_lets_its_loader_deal_on():
    """Another rank waits for this one in a validation, say, and the answer to this one's contribution comes later."""
    rounds, store, balancer = rounds_of(SoloEngine(), LocalSGD(round_steps=1, bound_rounds=1, warmup_steps=0), START)
    rounds.fragments[0].done = lambda: False
    balancer.engine.wait_avoiding_deadlock = lambda done, *, name: False
    for _ in range(2):
        balancer.begin(1)
        assert balancer.dialogue.horizon._bound == math.inf or rounds.fragments[0].under_way
        rounds.after_step(1.0)
    assert rounds.fragments[0].under_way and balancer.dialogue.horizon._bound == math.inf


def test_a_rank_that_withdraws_contributes_nothing_more():
    rounds, store, _ = rounds_of(SoloEngine(), LocalSGD(round_steps=4, warmup_steps=0), START)
    rounds.balancer.begin(1)
    store.values += 1.0
    rounds.after_step(1.0)
    over = rounds.withdraw()
    assert over() and np.array_equal(rounds.fragments[0].z, START)


def test_rounds_that_are_restarted_owe_nothing_and_have_no_momentum():
    rule = LocalSGD(round_steps=1, warmup_steps=0, outer=Outer(momentum=0.5))
    rounds, store, balancer = rounds_of(SoloEngine(), rule, START)
    for samples in (1, 1, 0):
        balancer.begin(samples)
        rounds.after_step(float(samples))
    rounds.finish()
    rounds.fragments[0].work.batches = 0.5
    assert rounds.fragments[0].outer_state and rounds.merges
    rounds.restart()
    assert not rounds.fragments[0].outer_state and not rounds.merges and rounds.fragments[0].work == LocalWork()


@pytest.mark.parametrize("weights", ["samples", "fednova"])
def test_a_delta_that_is_not_finite_leaves_no_trace_in_the_sums_of_a_merge(weights):
    """It would make the drift between the other ranks unknown, and the merge go less far."""
    balancer = Balancer(SoloEngine(), global_batch_size=8)
    rule = LocalSGD(round_steps=2, weights=weights)
    sender = MergeSender(rule, balancer, leads=lambda: True, most_ahead=lambda: 0)
    work = LocalWork()
    work.add(8.0, lr=0.1, part=1.0)
    for square, counts in ((math.inf, False), (math.nan, False), (4.0, True)):
        assert bool(sender.weigh(work, square).weight) == counts
        sums = merge_control.unpack(sender.outgoing(0, finishing=False, answers=1), ranks=1).sums
        assert all(map(math.isfinite, sums)) and (sums[2] > 0) == counts
