"""What an optimizer that accumulates gradients makes of those that a plain one has added up, and of local steps."""

import keras
import numpy as np
import pytest

pytest.importorskip("horovod.torch", reason="build it with hvd-hetero build-horovod")

from hvd_hetero.keras.accumulation import BatchWeights, begin_anew


@pytest.mark.parametrize("before", [4, 6])
def test_an_optimizer_that_was_saved_between_two_updates_begins_at_the_last_one(before):
    weight = keras.Variable(np.zeros(3), dtype="float32")
    optimizer = keras.optimizers.SGD(1.0, gradient_accumulation_steps=4)
    optimizer.build([weight])
    for _ in range(before):
        optimizer.apply([keras.ops.full((3,), 100.0)])
    begin_anew(optimizer, 4)
    assert int(optimizer.iterations) == 1
    found = []
    for gradient in (1.0, 2.0, 3.0, 6.0):
        optimizer.apply([keras.ops.full((3,), gradient)])
        found.append(float(np.array(keras.ops.convert_to_numpy(weight))[0]))
    assert found == [-100.0] * 3 + [-103.0]


class Scaled:
    """An optimizer that scales the loss and accumulates, with the weights of a rank's local steps; at 0."""

    def __init__(self, batches=3):
        self.weight = keras.Variable(np.zeros(3), dtype="float32")
        inner = keras.optimizers.SGD(1.0, gradient_accumulation_steps=batches)
        self.optimizer = keras.optimizers.LossScaleOptimizer(inner, initial_scale=8.0)
        self.optimizer.build([self.weight])
        self.weights = BatchWeights(batches, lambda: self.optimizer)

    def apply(self, gradient):
        self.optimizer.apply([self.optimizer.scale_loss(keras.ops.full((3,), gradient))])

    def step(self, share, gradient):
        """What an update counts for that ends with this local batch, else None; and the factor of its gradient."""
        factor = self.weights.before_batch(share)
        self.apply(gradient * factor)
        return self.weights.after_batch(share), factor

    @property
    def at(self):
        return float(keras.ops.convert_to_numpy(self.weight)[0])


def test_batches_of_an_update_count_by_their_shares_in_local_steps():
    made = Scaled()
    assert [made.step(*batch)[0] for batch in [(2, 1.0), (6, 4.0), (1, 8.0)]] == [None, None, 1.0]
    np.testing.assert_allclose(made.at, -(2 * 1.0 + 6 * 4.0 + 1 * 8.0) / 9, rtol=1e-6)


def test_a_batch_that_is_skipped_and_one_without_a_sample_count_for_nothing():
    made, infinity = Scaled(), float("inf")
    batches = [(7, infinity), (0, 0.0), (2, 1.0), (100, infinity), (6, 4.0)]
    assert [made.step(*batch)[0] for batch in batches] == [None] * 4 + [1.0]
    np.testing.assert_allclose(made.at, -(2 * 1.0 + 6 * 4.0) / 8, rtol=1e-6)
    assert [made.step(0, 0.0)[0] for _ in range(3)] == [None, None, 0.0]


def test_nothing_changes_while_the_share_stays():
    made = Scaled()
    assert [made.step(7, 1.0) for _ in range(6)] == [(None, 1.0), (None, 1.0), (1.0, 1.0)] * 2


def test_with_synchronous_batches_before_them_local_ones_count_alike():
    made = Scaled()
    made.apply(5.0)
    assert [made.step(2, 1.0), made.step(0, 0.0)] == [(None, 1.0), (0.5, 1.0)]
    assert made.at == -2.0
    made.step(4, 1.0)
    made.weights.begin_anew()  # ranks come together, and make a synchronous step
    made.apply(5.0)
    assert made.step(1, 3.0) == (1.0, 1.0) and made.at == -5.0
