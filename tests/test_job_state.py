"""What a state keeps of plain values is what they were at the commit, also where a script changes them in place."""

import threading

import numpy as np
import pytest
import torch

pytest.importorskip("keras", reason="pip install keras with TensorFlow or torch")
pytest.importorskip("horovod.torch", reason="build it with hvd-hetero build-horovod")

import keras

from hvd_hetero.keras.elastic import KerasState
from hvd_hetero.torch.elastic import TorchState


def keras_state(**values):
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile(optimizer=keras.optimizers.SGD())
    return KerasState(model, **values)


def torch_state(**values):
    return TorchState(torch.nn.Linear(2, 1), **values)


@pytest.mark.parametrize("made", [torch_state, keras_state])
def test_values_that_are_changed_in_place_go_back(made):
    lock = threading.Lock()
    state = made(losses=[], best={"a": [0]}, seen=set(), counts=np.zeros(2), mean=torch.zeros(2), lock=lock, epoch=0)

    def change():
        state.losses.append(1.0)
        state.best["a"][0] += 1
        state.seen.add(len(state.seen))
        state.counts += 1
        state.mean.add_(1)
        state.epoch += 1

    def found():
        return [state.losses, state.best["a"], state.seen, state.counts.tolist(), state.mean.tolist(), state.epoch]

    for kept in ([[], [0], set(), [0, 0], [0, 0], 0], [[1.0], [1], {0}, [1, 1], [1, 1], 1]):
        assert found() == kept
        for _ in range(2):  # going back twice is the same: what is kept is not what the script gets
            change()
            state.restore()
            assert found() == kept
        change()
        state.save()
    assert state.lock is lock, "what cannot be copied stays what it is"
