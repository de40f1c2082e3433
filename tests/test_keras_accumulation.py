"""What an optimizer that accumulates gradients makes of those that a plain one has added up."""

import keras
import numpy as np
import pytest

pytest.importorskip("horovod.torch", reason="build it with hvd-hetero build-horovod")

from hvd_hetero.keras.accumulation import begin_anew


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
