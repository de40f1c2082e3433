"""Statistics of a layer over all ranks."""

import tracemalloc

import numpy as np
import pytest

from hvd_hetero.engine import payload
from hvd_hetero.engine.local import World
from hvd_hetero.engine.port import CollectiveError
from hvd_hetero.optimizers.statistic import Statistic, merge_statistics


def statistic(array):
    """Of an array, which is overwritten where it lies."""
    return Statistic(array.size, lambda: array.reshape(-1), lambda merged: None)


def merge(means=(), moments=(), numbers=(), *, weight, engine):
    merge_statistics(
        list(map(statistic, means)), [(statistic(mean), statistic(variance)) for mean, variance in moments],
        list(map(statistic, numbers)), weight=weight, engine=engine, name="x",
    )  # fmt: skip


def merged(means, weights):
    def program(engine):
        mine = np.array([means[engine.rank]])
        merge([mine], weight=weights[engine.rank], engine=engine)
        return mine.tolist()

    return World(len(means)).run(program)


def test_means_are_of_the_samples_and_equal_where_no_rank_has_any():
    assert merged((1.0, 3.0), (3.0, 1.0)) == [[1.5]] * 2
    assert merged((1.0, 3.0), (0.0, 0.0)) == [[2.0]] * 2
    assert merged((1.0, np.nan), (1.0, 0.0)) == [[1.0]] * 2


def test_a_variance_that_is_not_finite_takes_its_mean_along():
    def program(engine):
        mean, variance = (np.array([10.0]), np.array([np.inf])) if engine.rank else (np.zeros(1), np.ones(1))
        merge(moments=[(mean, variance)], weight=1.0, engine=engine)
        return mean, variance

    for mean, variance in World(2).run(program):
        assert (mean, variance) == (0.0, 1.0)


def gathered(rank):
    """Means of two types and of several lengths, one pair of moments, and numbers; some of them not finite."""
    random = np.random.default_rng(rank)
    means = [random.normal(size=size).astype(kind) for size, kind in ((7, "f4"), (0, "f8"), (1, "f8"), (30, "f4"))]
    moments = [(random.normal(size=(3, 4)), random.uniform(size=(3, 4)).astype("f4")) for _ in range(2)]
    if rank == 1:
        means[0][5], means[3][20], moments[1][1][2, 0] = np.nan, np.inf, np.nan
    return means, moments, [random.integers(1 << 40, size=5), random.integers(9, size=3, dtype=np.int32)]


def in_operations(engine):
    """The engine, and the bytes of each of its all-reduces."""
    lengths, call = [], engine.allreduce_async

    def start(array, **options):
        lengths.append(array.nbytes)
        return call(array, **options)

    engine.allreduce_async = start
    return engine, lengths


@pytest.mark.parametrize("elements", [1, 2, 3, 7, 40])
def test_what_is_merged_in_pieces_is_the_same_to_the_bit(monkeypatch, elements):
    def program(engine):
        engine, lengths = in_operations(engine)
        means, moments, numbers = mine = gathered(engine.rank)
        merge(means, moments, numbers, weight=(2.0, 0.5, 3.0)[engine.rank], engine=engine)
        return mine, lengths

    whole = World(3).run(program)
    monkeypatch.setattr(payload, "PIECE_BYTES", 8 * elements)
    for (expected, _), (found, lengths) in zip(whole, World(3).run(program), strict=True):
        assert repr(found) == repr(expected), "of the same types, and all that is not finite as well"
        np.testing.assert_equal(found, expected)
        assert max(lengths) <= max(8 * elements, 24), "24 say who weighs how much"
        assert np.isfinite(found[0][3]).all()


@pytest.mark.parametrize("lengths", [(3, 4), (3, 40), (40, 3), (30, 40)])
def test_statistics_of_unlike_lengths_are_an_error_on_every_rank(monkeypatch, lengths):
    monkeypatch.setattr(payload, "PIECE_BYTES", 80)

    def program(engine):
        mine = np.zeros(lengths[engine.rank])
        for kind in ("means", "numbers"):
            with pytest.raises(CollectiveError, match=r"'x\.lengths': expected"):
                merge(**{kind: [mine]}, weight=1.0, engine=engine)

    World(2).run(program, timeout_s=10)


def test_merging_takes_the_memory_of_some_pieces(monkeypatch):
    monkeypatch.setattr(payload, "PIECE_BYTES", 1 << 16)
    arrays = [[np.full(1 << 19, float(rank), np.float32) for _ in range(2)] for rank in range(2)]

    def program(engine):
        merge(arrays[engine.rank], weight=1.0, engine=engine)

    tracemalloc.start()
    try:
        World(2).run(program)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 1 << 21, "half of what one of the arrays takes on either rank"
    assert all((array == 0.5).all() for each in arrays for array in each)
