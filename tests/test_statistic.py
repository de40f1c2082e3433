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
