"""Local SGD on ranks that are threads: laws 1, 5 and 6, the fixed point, the bound, and the end."""

import math
import threading
import time

import numpy as np
import pytest
from merging import LENGTH, START, Turns, quadratic, rounds_of

from hvd_hetero.engine.local import World
from hvd_hetero.optimizers.latency_lr import LatencyLR
from hvd_hetero.optimizers.local_sgd import LocalSGD
from hvd_hetero.optimizers.outer import Outer, compensated
from hvd_hetero.policy.fragments import fragments_by_kind, fragments_of


@pytest.mark.parametrize("fragments", [1, 3])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_law_1_merging_every_step_is_synchronous_training(ranks, momentum, fragments):
    rule = LocalSGD(round_steps=1, bound_rounds=0, warmup_steps=0, fragments=fragments)

    def program(engine):
        rounds, store, balancer = rounds_of(engine, rule, START)
        h, a = quadratic(engine.rank)
        velocity = np.zeros(LENGTH)
        for _ in range(50):
            balancer.begin(1)
            velocity = momentum * velocity + h * (store.values - a)
            store.values -= 0.1 * velocity
            rounds.after_step(1.0, lr=0.1)
        return store.values

    x, velocity = START.copy(), np.zeros(LENGTH)
    for _ in range(50):
        velocity = momentum * velocity + np.mean([h * (x - a) for h, a in map(quadratic, range(ranks))], axis=0)
        x = x - 0.1 * velocity
    for values in World(ranks).run(program):
        np.testing.assert_allclose(values, x, rtol=1e-12, atol=1e-12)


def test_uneven_shares_count_by_their_samples():
    """The same law with shares 3, 1 and 0: the gradient of the whole global batch."""
    shares = (3, 1, 0)
    rule = LocalSGD(round_steps=1, bound_rounds=0, warmup_steps=0)

    def program(engine):
        rounds, store, balancer = rounds_of(engine, rule, START, whole=4, shares=shares, min_share=0)
        h, a = quadratic(engine.rank)
        for _ in range(50):
            balancer.begin(shares[engine.rank])
            if shares[engine.rank]:
                store.values -= 0.1 * h * (store.values - a)
            rounds.after_step(shares[engine.rank])
        return store.values

    x = START.copy()
    for _ in range(50):
        (h, a), (g, b) = quadratic(0), quadratic(1)
        x = x - 0.1 * (3 * h * (x - a) + g * (x - b)) / 4
    for values in World(3).run(program):
        np.testing.assert_allclose(values, x, rtol=1e-12)


@pytest.mark.parametrize("batches", [1, 2])
def test_a_learning_rate_counts_steps_and_not_merges(batches):
    """However many merges there were, and empty ones at the end of each of two phases."""
    rule = LocalSGD(round_steps=4, warmup_steps=0)

    def program(engine):
        rounds, store, balancer = rounds_of(engine, rule, START)
        rounds._batches = lambda: batches
        rate = LatencyLR(rule="linear", base_batch_size=1, global_batch_size=engine.size, warmup_steps=20)

        def advance():
            rate.advance(samples=engine.size, global_batch_size=engine.size, steps=balancer.dialogue.steps)

        balancer.dialogue.subscribe(advance)
        for _ in range(2):
            for step in range(15):
                for _ in range(batches):
                    balancer.begin(1)
                if step == 0:
                    rounds.begin()
                time.sleep(0.002 * engine.rank)
                rounds.after_step(1.0)
            rounds.finish()
        return rate.steps, rate.factor, rounds.merges

    for steps, factor, merges in World(3).run(program):
        assert (steps, factor) == (30, 3.0)
        assert merges != 30


def reference(order, ranks, rule, samples, progress, intervals=None):
    """Overlapped rounds by the book, with one list per rank: the model after each merge, and every rank's own.

    In a merge each rank's progress counts by its batch, over the mean batch of all. A rank of interval k contributes
    nothing to k - 1 merges after each that it contributes to.
    """
    z, m = START.copy(), np.zeros(LENGTH)
    x = [START.copy() for _ in range(ranks)]
    work = [0] * ranks              # steps since the last contribution
    sent = [[] for _ in range(ranks)]       # of each merge under way: x when sent, None where nothing was
    seen = [0] * ranks              # merges taken in
    merged = []                     # (z before, z after)
    at = [0] * ranks
    said = []                       # of each merge: by rank, progress and steps

    def take_in(i):
        before, after = merged[seen[i]]
        when = sent[i].pop(0)
        x[i] = after + (x[i] - (before if when is None else when))
        seen[i] += 1

    def say(i, delta, steps):
        number = seen[i] + len(sent[i]) - 1
        while len(said) <= number:
            said.append({})
        said[number][i] = (delta, steps)

    for i in order:
        x[i] = x[i] + progress(i, at[i])
        at[i], work[i] = at[i] + 1, work[i] + 1
        while sent[i] and len(merged) > seen[i]:
            take_in(i)
        if not sent[i] and work[i] >= rule.round_steps:
            model = merged[-1][1] if merged else START
            sent[i].append(x[i].copy())
            say(i, x[i] - model, work[i])
            work[i] = 0
            for _ in range((intervals or [1] * ranks)[i] - 1):
                sent[i].append(None)
                say(i, np.zeros(LENGTH), 0)
            if len(merged) < len(said) and len(said[len(merged)]) == ranks:
                parts = said[len(merged)].items()
                batch = sum(k * samples[r] for r, (_, k) in parts) / sum(k / ranks for _, (_, k) in parts)
                delta = sum(samples[r] * d for r, (d, _) in parts) / batch
                before = z
                m = rule.outer.momentum * m + delta
                step = delta + rule.outer.momentum * m if rule.outer.nesterov else m
                z = z + rule.outer.learning_rate * step
                merged.append((before, z))
    return [after for _, after in merged], x, seen


@pytest.mark.parametrize("outer", [Outer(), Outer(learning_rate=0.7, momentum=0.9, nesterov=True),
                                   Outer(learning_rate=0.5, momentum=0.5)])
@pytest.mark.parametrize(("pace", "intervals"), [
    ((1, 1), None), ((3, 1), None), ((1, 2, 4), None), ((5, 1, 1, 2), None),
    ((4, 1), (1, 4)), ((6, 6, 1, 2), (1, 1, 4, 2)), ((1, 3), (3, 1)),
])
def test_overlapped_rounds_are_those_of_the_reference(pace, intervals, outer):
    """Ranks step at unlike paces, in an order that is the same every time; some take part in fewer merges."""
    ranks, rule = len(pace), LocalSGD(round_steps=3, bound_rounds=100, warmup_steps=0, outer=outer)
    random = np.random.RandomState(5)
    order = random.choice(ranks, size=160, p=np.array(pace) / sum(pace)).tolist()
    samples = [1 + 2 * rank for rank in range(ranks)]

    def progress(rank, step):
        return np.random.RandomState(100 * rank + step).standard_normal(LENGTH)

    turns = Turns(order)

    def program(engine):
        merged = []
        rounds, store, balancer = rounds_of(
            engine, rule, START, on_merge=lambda fields: merged.append(rounds.fragments[0].z.copy())
        )
        rounds.lengths.hear = lambda step_s: None
        rounds.lengths.intervals = intervals or (1,) * ranks
        for step in range(order.count(engine.rank)):
            turns.take(engine.rank)
            balancer.begin(1)
            store.values += progress(engine.rank, step)
            rounds.after_step(samples[engine.rank])
            turns.give()
        turns.take(-1)
        return merged, store.values

    expected, own, seen = reference(order, ranks, rule, samples, progress, intervals)
    found = World(ranks).run(program)
    assert len(expected) >= 2
    if intervals:
        assert len(expected) > len(reference(order, ranks, rule, samples, progress)[0]), "merges come more often"
    for rank, (merged, values) in enumerate(found):
        assert len(merged) == seen[rank]
        for mine, theirs in zip(merged, expected, strict=False):
            np.testing.assert_allclose(mine, theirs, rtol=1e-10, atol=1e-10)
        np.testing.assert_allclose(values, own[rank], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("codec", ["none", "fp16", "int8"])
@pytest.mark.parametrize("fragments", [1, 2])
@pytest.mark.parametrize("nodes", [None, ((0, 1), (2,))])
def test_all_hold_one_model_in_the_end_and_nothing_is_lost(codec, fragments, nodes):
    """Steps of unlike number, an end in the middle of a round: what all ranks sent is what all ranks did."""
    steps = (31, 8, 17)
    rule = LocalSGD(round_steps=4, bound_rounds=2, warmup_steps=0, fragments=fragments)

    def program(engine):
        models = {}
        rounds, store, balancer = rounds_of(engine, rule, np.zeros(64), codec=codec, nodes=nodes)
        rounds.lengths.hear = lambda step_s: None
        plain = codec == "none" and nodes is None
        assert rounds.lengths._most == 1 + (3 if plain and fragments == 1 else 0)
        assert [fragment.most_missed for fragment in rounds.fragments] == [3 if plain else 0] * fragments
        if rounds.lengths._most > 1:
            rounds.lengths.intervals = (1, 4, 2)  # some take part in fewer merges, where they can
        sent = np.zeros(64)
        for fragment in rounds.fragments:
            def send(weigh, fragment=fragment, inner=fragment.send):
                sent[store.cuts[fragment.index]] += fragment.store.read(fragment.index) - fragment.z
                return inner(weigh)

            def merge(fragment=fragment, inner=fragment.merge):
                result = inner()
                models.setdefault(fragment.index, []).append(fragment.z.tobytes())
                return result

            fragment.send, fragment.merge = send, merge
        done = np.zeros(64)
        for step in range(steps[engine.rank]):
            balancer.begin(1)
            change = np.random.RandomState(1000 * engine.rank + step).standard_normal(64)
            store.values += change
            done += change
            rounds.after_step(1.0)
            time.sleep(0.001 * engine.rank)
        rounds.finish()
        assert all(len(fragment._free) <= 2 for fragment in rounds.fragments), "copies are used again"
        return models, sent, done, store.values

    found = World(3).run(program)
    assert all(models == found[0][0] for models, *_ in found), "law 5, after each merge"
    assert len({values.tobytes() for *_, values in found}) == 1
    for _, sent, done, _ in found:
        np.testing.assert_allclose(sent, done, atol=1e-9)


@pytest.mark.parametrize("weights", ["samples", "fednova"])
def test_a_rank_without_samples_takes_nothing_away(weights):
    """Nor does one that has some in every second step: where each gradient is 1, each batch moves the model by 1."""
    rule = LocalSGD(round_steps=4, bound_rounds=0, warmup_steps=0, weights=weights)

    def program(engine):
        rounds, store, balancer = rounds_of(engine, rule, np.zeros(2))
        for step in range(40):
            samples = (1.0, 0.0, float(step % 2))[engine.rank]
            balancer.begin(int(samples))
            store.values += 1.0 if samples else 0.0
            rounds.after_step(samples, lr=1.0)
        rounds.finish()
        return store.values[0]

    assert World(3).run(program) == pytest.approx([40.0] * 3)


@pytest.mark.parametrize("intervals", [(1, 1, 1), (1, 4, 2)])
@pytest.mark.parametrize("weights", ["samples", "fednova"])
def test_the_model_moves_as_far_as_in_synchronous_steps_over_the_same_samples(weights, intervals):
    """However many steps ranks make in a round, also where one stalls, misses merges, or has a short last batch."""
    shares, batches = (5, 2, 1), 60
    rule = LocalSGD(round_steps=4, bound_rounds=3, warmup_steps=0, weights=weights)

    def program(engine):
        rounds, store, balancer = rounds_of(engine, rule, np.zeros(2), whole=8, shares=shares)
        if weights == "samples":
            rounds.lengths.hear = lambda compute_s: None
            rounds.lengths.intervals = intervals
        merged = []
        for step in range(batches):
            samples = shares[engine.rank] if step % 20 < 19 else (3, 1, 0)[engine.rank]
            balancer.begin(samples)
            if samples:
                store.values += [1.0, 0.0]
                store.values[1] += np.random.RandomState(100 * engine.rank + step).standard_normal() / samples**0.5
            rounds.after_step(float(samples), lr=0.1)
            stalls = engine.rank == 1 and step % 10 == 5
            time.sleep(0.03 if stalls else 0.001 * engine.rank)
            merged.append(rounds.merges)
        rounds.finish()
        owed = rounds.fragments[0].work  # by a rank whose last batch came to the last merge alone, without a sample
        return store.values[0], len(set(merged)), owed.batches if weights == "samples" else owed.rate_batches / 0.1

    found = World(3).run(program, timeout_s=30)
    owed = sum(left for *_, left in found)
    assert owed <= shares[2] / 8
    for moved, merges, _ in found:
        assert merges >= 3
        assert moved + owed == pytest.approx(batches, rel=1e-9)


@pytest.mark.parametrize("weights", ["samples", "fednova"])
def test_what_nobody_can_say_the_way_of_is_moved_in_the_next_merge(weights):
    """A rank without a sample comes to the last merge of one phase alone: the next phase makes up for it."""
    rule = LocalSGD(round_steps=4, bound_rounds=3, warmup_steps=0, weights=weights)

    def program(engine):
        rounds, store, balancer = rounds_of(engine, rule, np.zeros(1))
        for phase in range(2):
            rounds.begin()
            for step in range(3):
                idle = engine.rank == 1 and step == 2 and phase == 0
                if idle:
                    while not rounds.merges:  # the other has finished meanwhile
                        rounds.fragments[0].under_way or rounds._send(rounds.fragments[0])
                        rounds._serve(lambda fragment: False)
                        time.sleep(0.001)
                balancer.begin(0 if idle else 1)
                store.values += 0.0 if idle else 1.0
                rounds.after_step(0.0 if idle else 1.0, lr=0.1)
            rounds.finish()
            moved = float(store.values[0])
        return moved

    assert World(2).run(program, timeout_s=30) == pytest.approx([6.0, 6.0])


def test_fednova_finds_the_optimum_that_unnormalised_merges_miss():
    """Ranks with data of their own and unlike numbers of steps (Wang et al. 2020, theorem 1)."""
    lengths = (6, 2, 1)
    size = 5
    parts = [quadratic(rank, size) for rank in range(3)]
    optimum = sum(h * a for h, a in parts) / sum(h for h, _ in parts)

    def ended(weights):
        rule = LocalSGD(round_steps=6, bound_rounds=0, warmup_steps=0, weights=weights)

        def program(engine):
            rounds, store, balancer = rounds_of(engine, rule, np.zeros(size))
            h, a = parts[engine.rank]
            while rounds.merges < 1000:
                rounds.lengths.by_rank = lengths
                balancer.begin(1)
                store.values -= 0.005 * h * (store.values - a)
                rounds.after_step(1.0, lr=0.005)
            return store.values

        return World(3).run(program)[0]

    assert np.abs(ended("fednova") - optimum).max() < 0.02
    assert np.abs(ended("samples") - optimum).max() > 0.1


def test_progress_that_is_not_finite_is_given_up_by_its_rank_alone():
    rule = LocalSGD(round_steps=1, bound_rounds=0, warmup_steps=0)

    def program(engine):
        told = []
        rounds, store, balancer = rounds_of(engine, rule, START, on_merge=told.append)
        for step in range(3):
            balancer.begin(1)
            store.values += math.nan if (engine.rank, step) == (1, 1) else 1.0
            rounds.after_step(1.0)
        noise = [fields["noise"] for fields in told if "merge" in fields]
        assert noise == [1.0] * 3, "how far ranks drift apart is measured also in a merge that one gives up"
        return store.values, [fields for fields in told if "why" in fields]

    found = World(2).run(program)
    for rank, (values, told) in enumerate(found):
        np.testing.assert_array_equal(values, START + 3.0)
        assert [fields["dropped_steps"] for fields in told] == [1] * rank


def test_a_merge_of_nothing_finite_moves_nothing_and_neither_the_next_one_for_it():
    rule = LocalSGD(round_steps=2, bound_rounds=0, warmup_steps=0)

    def program(engine):
        rounds, store, balancer = rounds_of(engine, rule, START)
        for step in range(6):
            balancer.begin(1)
            store.values += math.nan if step == 3 else 1.0
            rounds.after_step(1.0)
        return store.values

    for values in World(2).run(program):
        np.testing.assert_array_equal(values, START + 4.0)


def test_compensation_is_the_formula_and_never_more_than_doubles():
    random = np.random.RandomState(0)
    gradient, w, eta, k, strength = *random.standard_normal((2, 50)), 0.1, 4, 0.7
    progress = -eta * k * gradient
    expected = []
    for g, move in zip(gradient, w, strict=True):
        change = strength * g * g * move
        expected.append(-eta * k * (g + max(-abs(g), min(abs(g), change))))
    found = compensated(progress, w, strength=strength, lr_sum=eta * k)
    np.testing.assert_allclose(found, expected, rtol=1e-12)
    assert compensated(progress, w, strength=0.0, lr_sum=1.0) is progress


def test_compensation_is_exact_to_first_order_where_the_fisher_is_the_hessian():
    """On 1/2 h (x - a)^2 with g^2 = h, the corrected gradient is that of where the model has moved to."""
    h, a, x, move = 2.0, 1.0, 1.0 + 2.0**-0.5, 0.1  # g = h (x - a) = 2^0.5, and g^2 = h
    gradient = h * (x - a)
    found = compensated(np.array([-gradient]), np.array([move]), strength=1.0, lr_sum=1.0)
    assert -found[0] == pytest.approx(h * (x + move - a))


@pytest.mark.parametrize("count", [1, 2, 3, 7, 20])
def test_every_tensor_is_in_one_fragment_and_they_are_nearly_even(count):
    sizes = np.random.RandomState(count).randint(1, 100, 12).tolist()
    chosen = fragments_of(sizes, count)
    assert sorted(index for members in chosen for index in members) == list(range(12))
    held = [sum(sizes[index] for index in members) for members in chosen]
    assert len(chosen) == min(count, 12) and max(held) - min(held) <= max(sizes)


@pytest.mark.parametrize(("wrong", "message"), [
    ({"round_steps": 0}, "round_steps: expected an integer of at least 1. Received: 0"),
    ({"round_steps": 2.5}, "round_steps: expected an integer"),
    ({"warmup_steps": -1}, "warmup_steps: expected"),
    ({"fragments": 0}, "fragments: expected"),
    ({"bound_rounds": -1}, "bound_rounds: expected a finite number, 0 or more"),
    ({"bound_rounds": 0.5}, "bound_rounds: expected 0, to wait for every merge, or at least 1"),
    ({"second_moments": "mine"}, "second_moments: expected one of global, own. Received: 'mine'"),
    ({"weights": "equal"}, "weights: expected one of samples, fednova. Received: 'equal'"),
    ({"compensation": math.inf}, "compensation: expected"),
    ({"drift_limit": 0}, "drift_limit: expected"), ({"drift_limit": "2"}, "drift_limit: expected .* Received: '2'"),
])
def test_wrong_arguments_say_what_was_expected(wrong, message):
    with pytest.raises(ValueError, match=message):
        LocalSGD(**wrong)


def test_an_outer_optimizer_needs_its_state():
    with pytest.raises(ValueError, match="nesterov: expected a momentum above 0"):
        Outer(nesterov=True)
    for wrong in ({"learning_rate": 0.0}, {"momentum": 1.0}, {"learning_rate": None}, {"momentum": "0.9"}):
        with pytest.raises(ValueError, match=f"{next(iter(wrong))}: expected a number"):
            Outer(**wrong)
    with pytest.raises(ValueError, match="outer: expected the state of Outer"):
        Outer().check_state({"momentum": np.zeros(3)})
    Outer(momentum=0.9, nesterov=True).check_state({})  # as of a job without a merge so far


def test_a_rank_whose_progress_is_not_finite_goes_on_from_the_last_merge_at_once():
    """Also where the next merge is yet to come: what it does meanwhile counts."""
    ahead = threading.Event()

    def program(engine):
        told = []
        rule = LocalSGD(round_steps=1, bound_rounds=4, warmup_steps=0)
        rounds, store, balancer = rounds_of(engine, rule, START, on_merge=told.append)
        for step in range(3):
            balancer.begin(1)
            assert engine.rank or ahead.wait(20.0)
            store.values += math.nan if (engine.rank, step) == (1, 0) else 1.0
            rounds.after_step(1.0)
            if (engine.rank, step) == (1, 1):
                ahead.set()
        rounds.finish()
        return store.values, sum("why" in fields for fields in told)

    (values, none), (others, once) = World(2).run(program)
    assert np.isfinite(values).all() and (values == others).all() and (none, once) == (0, 1)


def test_a_fragment_is_of_one_kind_and_of_each_there_are_so_many_at_most():
    kinds, sizes = ["a", "b", "a", "a", "b", "c"], [5, 1, 4, 3, 2, 9]
    assert fragments_by_kind(kinds, sizes, 2) == [[0], [2, 3], [4], [1], [5]]
    assert fragments_by_kind(kinds, sizes, 1) == [[0, 2, 3], [1, 4], [5]]
    assert fragments_by_kind([], [], 2) == []
