"""Law 3: shares sum to the global batch, respect every bound, and no other split has a smaller slowest rank."""

import itertools
import random

import numpy as np
import pytest

from hvd_hetero.policy.partition import Bound, InfeasibleError, equal_shares, micro_batches, split, step_time_s
from hvd_hetero.policy.speed import SpeedModel


def model(seconds_per_sample=1.0, overhead_s=0.0, loading_s=0.0):
    return SpeedModel(overhead_s=overhead_s, seconds_per_sample=seconds_per_sample, loading_s=loading_s)


def random_case(rng, *, uneven_quanta):
    ranks, whole = rng.randint(1, 4), rng.randint(1, 22)
    models = [model(rng.choice([1.0, 0.05 + rng.random()]), rng.choice([0.0, 0.0, 5 * rng.random()]),
                    rng.choice([0.0, 0.0, 1.5 * rng.random()])) for _ in range(ranks)]
    quantum, bounds = rng.choice([1, 1, 2, 3]), []
    for _ in range(ranks):
        lower = rng.choice([0, 0, 1, 3])
        bounds.append(Bound(lower=lower, upper=rng.choice([None, None, lower + rng.randint(0, 12)]),
                            quantum=rng.choice([1, 2, 3, 4]) if uneven_quanta else quantum))
    return models, whole, bounds, [rng.choice([None, None, rng.randint(1, 6)]) for _ in range(ranks)]


@pytest.mark.parametrize("uneven_quanta", [False, True])
def test_no_other_split_has_a_smaller_slowest_rank(uneven_quanta):
    rng, infeasible = random.Random(5), 0
    for _ in range(400):
        models, whole, bounds, caps = random_case(rng, uneven_quanta=uneven_quanta)
        grids = [[b for b in range(whole + 1) if bound.allows(b)] for bound in bounds]
        times = [step_time_s(models, shares, caps) for shares in itertools.product(*grids) if sum(shares) == whole]
        if not times:
            infeasible += 1
            with pytest.raises(InfeasibleError):
                split(models, whole, bounds, micro_batch=caps)
            continue
        shares = split(models, whole, bounds, micro_batch=caps)
        assert sum(shares) == whole
        assert all(bound.allows(b) for bound, b in zip(bounds, shares, strict=True))
        assert step_time_s(models, shares, caps) == min(times)
    assert 10 < infeasible < 300


def test_a_slower_rank_never_gets_more():
    rng = random.Random(6)
    for _ in range(300):
        models = [model(rng.choice([1.0, 2.0, 3.0]), rng.choice([0.0, 1.0, 2.0]), rng.choice([0.0, 1.5, 2.5]))
                  for _ in range(rng.randint(2, 6))]
        whole = rng.choice([rng.randint(1, 8), rng.randint(1, 60)])
        shares = split(models, whole)
        for a, b in itertools.permutations(range(len(models)), 2):
            times = [(models[a].time_s(n), models[b].time_s(n)) for n in range(1, whole + 2)]
            slower = all(of_a >= of_b for of_a, of_b in times) and any(of_a > of_b for of_a, of_b in times)
            assert not slower or shares[a] <= shares[b], (models, shares)


def test_large_batches_are_split_exactly_as_one_by_one_and_at_once():
    rng = random.Random(8)
    models = [model(0.01 + rng.random(), rng.random(), rng.choice([0.0, rng.random()])) for _ in range(16)]
    each_s = [max(each.seconds_per_sample, each.loading_s) for each in models]
    singly = [0] * 16
    for _ in range(3000):
        i = min(range(16), key=lambda i: (models[i].time_s(singly[i] + 1), each_s[i], i))
        singly[i] += 1
    assert split(models, 3000) == tuple(singly)
    assert sum(split(models, 10**12)) == 10**12  # one by one it would not end


@pytest.mark.parametrize("times", [1e12, 1e300])
def test_speeds_of_any_ratio_are_split_at_once(times):
    models = [model(1.0), model(1 / times), model(1 / times)]
    assert split(models, 2**40) == (0, 2**39, 2**39)  # one by one it would not end
    assert split(models, 2**40, [Bound(lower=1)] * 3) == (1, 2**39, 2**39 - 1)


def test_equal_speeds_give_equal_shares():
    for whole, ranks in itertools.product(range(1, 70), range(1, 7)):
        assert split([model()] * ranks, whole) == equal_shares(whole, ranks)


def test_shares_follow_speeds_and_overhead():
    assert split([model(1 / 8), model(1 / 4), model(1 / 2), model(1 / 2)], 64) == (32, 16, 8, 8)
    assert split([model(1.0), model(1.0, overhead_s=4.0)], 10) == (7, 3)
    assert split([model(1.0), model(1.0, overhead_s=40.0)], 10) == (10, 0)       # best left out
    assert split([model(1.0), model(1.0, overhead_s=40.0)], 10, [Bound(), Bound(lower=1)]) == (9, 1)


def test_loading_beside_computing_takes_its_time_by_itself():
    limited = model(0.1, overhead_s=1.0, loading_s=0.5)
    assert [limited.time_s(n) for n in (0, 1, 2, 3, 10)] == pytest.approx([0.0, 1.1, 1.2, 1.5, 5.0])
    assert limited.time_s(10, micro_batch=1) == pytest.approx(11.0)
    assert split([limited, model(0.1)], 60) == (10, 50)
    assert split([limited, model(0.1)], 2) == (0, 2)


def test_micro_batches_cost_their_overhead():
    models = [model(1.0, 3.0), model(1.0, 3.0)]
    assert split(models, 12, micro_batch=[2, None]) == (4, 8)       # 4 + 2 * 3 s against 8 + 3 s; equal would be 15 s
    assert step_time_s(models, (4, 8), [2, None]) == 11.0


def test_equal_shares_and_micro_batches():
    for share, cap in itertools.product(range(0, 40), [None, 1, 3, 7, 64]):
        parts = micro_batches(share, cap)
        assert sum(parts) == share and (not parts or max(parts) - min(parts) <= 1)
        assert all(0 < part <= (cap or share) for part in parts)
        assert len(parts) == (0 if share == 0 else 1 if cap is None else -(-share // cap))
    assert equal_shares(10, 4) == (3, 3, 2, 2)


@pytest.mark.parametrize(("whole", "bounds", "message"), [
    (5, [Bound(lower=3), Bound(lower=3)], "at least 6"),
    (50, [Bound(upper=20), Bound(upper=9, quantum=1)], "at most 29"),
    (9, [Bound(quantum=2), Bound(quantum=2)], "multiple of 2"),
    (11, [Bound(quantum=4), Bound(quantum=6)], "nearest below is 10"),
    (11, [Bound(lower=5, upper=7, quantum=4), Bound()], "multiple of 4 between 5 and 7"),
])
def test_what_cannot_be_split_says_why(whole, bounds, message):
    with pytest.raises(InfeasibleError, match=message):
        split([model(), model()], whole, bounds)


def test_wrong_arguments_say_what_was_received():
    with pytest.raises(ValueError, match="expected one for each of 2 models. Received: 1"):
        split([model(), model()], 4, [Bound()])
    with pytest.raises(ValueError, match="Received: 1 and 0"):
        split([model()], 0)
    with pytest.raises(ValueError, match="upper: expected at least lower"):
        Bound(lower=3, upper=2)
    for wrong, received in (({"quantum": 0}, "0 and 0"), ({"lower": -1}, "-1 and 1")):
        with pytest.raises(ValueError, match=f"Received: {received}"):
            Bound(**wrong)


def test_a_slower_rank_has_no_more_than_a_faster_one_of_the_same_quantum():
    random = np.random.default_rng(11)
    for _ in range(200):
        speeds = np.sort(random.uniform(0.5, 4.0, 4))[::-1]  # the slowest first
        models = [SpeedModel(overhead_s=0.0, seconds_per_sample=s) for s in speeds]
        bounds = [Bound(quantum=3), Bound(quantum=3), Bound(quantum=4), Bound(quantum=4)]
        shares = split(models, int(random.integers(30, 90)), bounds)
        assert shares[0] <= shares[1] and shares[2] <= shares[3], (speeds, shares)


def test_of_nothing_every_rank_has_nothing():
    assert equal_shares(0, 3) == (0, 0, 0) and step_time_s([], []) == 0.0
    assert micro_batches(0, None) == micro_batches(0, 4) == ()


@pytest.mark.parametrize(("make", "message"), [
    (lambda: equal_shares(4, 0), "Received: 4 and 0"),
    (lambda: equal_shares(-1, 2), "Received: -1 and 2"),
    (lambda: micro_batches(-1, None), "Received: -1 and None"),
    (lambda: micro_batches(4, 0), "Received: 4 and 0"),
    (lambda: split([model()], 4, micro_batch=[0]), "micro_batch: expected at least 1 or None for rank 0. Received: 0"),
])
def test_numbers_of_which_one_is_wrong_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_a_pass_may_hold_a_single_sample():
    """Then each sample costs a pass, and the rank without that cap takes the most."""
    models = [model(1.0, 1.0), model(1.0, 1.0)]
    shares = split(models, 30, micro_batch=[1, None])
    assert shares == (10, 20) and step_time_s(models, shares, [1, None]) == 21.0
    assert micro_batches(3, 1) == (1, 1, 1)
