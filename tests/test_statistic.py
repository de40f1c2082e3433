"""Statistics of a layer over all ranks."""

import numpy as np

from hvd_hetero.engine.local import World
from hvd_hetero.optimizers.statistic import merged_statistics


def merged(means, weights):
    def program(engine):
        mine = [np.array([means[engine.rank]])]
        return merged_statistics(mine, [], [], weight=weights[engine.rank], engine=engine, name="x")[0].tolist()

    return World(len(means)).run(program)


def test_means_are_of_the_samples_and_equal_where_no_rank_has_any():
    assert merged((1.0, 3.0), (3.0, 1.0)) == [[1.5]] * 2
    assert merged((1.0, 3.0), (0.0, 0.0)) == [[2.0]] * 2
    assert merged((1.0, np.nan), (1.0, 0.0)) == [[1.0]] * 2


def test_a_variance_that_is_not_finite_takes_its_mean_along():
    def program(engine):
        mean, variance = (np.array([10.0]), np.array([np.inf])) if engine.rank else (np.zeros(1), np.ones(1))
        return merged_statistics([], [(mean, variance)], [], weight=1.0, engine=engine, name="x")

    for mean, variance in World(2).run(program):
        assert (mean, variance) == (0.0, 1.0)
