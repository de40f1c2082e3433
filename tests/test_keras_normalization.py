"""`hvd.SyncBatchNormalization` on ranks that are threads: BatchNormalization of one process on the global batch."""

import numpy as np
import pytest

pytest.importorskip("keras", reason="pip install keras with TensorFlow or torch")
pytest.importorskip("horovod", reason="build it with hvd-hetero build-horovod")

import keras

if keras.backend.backend() != "torch":
    pytest.skip("ranks are threads, which only eager code can be; real ranks are in test_keras_horovod.py",
                allow_module_level=True)

import torch

from hvd_hetero.engine.local import SoloEngine, World
from hvd_hetero.keras.balancer import Balancer
from hvd_hetero.keras.normalization import SyncBatchNormalization

BOUND = 2e-6  # on its torch back end Keras normalises in float32, whatever the type of the layer
SHARES = [(4, 3), (5, 1, 2), (6, 0, 1)]


def data(shape, shift=0.0):
    generator = np.random.RandomState(0)
    return [shift + generator.randn(*shape), generator.randn(*shape), generator.rand(*shape[:-1]) > 0.3]


def through(layer, x, weights, mask):
    """Output, and the gradients of mean(output * weights) over rows, of one rank or process."""
    x = torch.tensor(x, dtype=torch.float64, requires_grad=True)
    y = layer(x, training=True, mask=None if mask is None else torch.tensor(mask))
    loss = (y * torch.tensor(weights)).sum() / max(len(x), 1)
    gradients = torch.autograd.grad(loss, [x, layer.gamma.value, layer.beta.value])
    statistics = layer.moving_mean.numpy(), layer.moving_variance.numpy()
    return [y.detach().numpy(), *(g.numpy() for g in gradients), *statistics]


def test_a_layer_takes_a_new_name_where_the_ranks_have_become_others():
    """As the layer of a rank that joins has one."""
    engine = SoloEngine()
    layer, x = SyncBatchNormalization(engine=engine), np.ones((3, 2))
    layer(x, training=True)
    before = layer._rows
    engine.rebuild()
    layer(x, training=True)
    assert layer._rows is not before


@pytest.mark.parametrize("shares", SHARES)
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(("shape", "axis"), [((3,), -1), ((4, 3), -1), ((4, 2, 3), 1)])
def test_output_gradients_and_statistics_equal_one_process(shares, masked, shape, axis):
    if masked and axis == 1:
        return  # Keras itself has masks for the last axis alone
    whole = sum(shares)
    x, weights, mask = data((whole, *shape))
    mask = mask if masked else None
    expected = through(keras.layers.BatchNormalization(axis=axis, dtype="float64"), x, weights, mask)

    def program(engine):
        mine = slice(sum(shares[: engine.rank]), sum(shares[: engine.rank + 1]))
        layer = SyncBatchNormalization(axis=axis, dtype="float64", engine=engine)
        return through(layer, x[mine], weights[mine], None if mask is None else mask[mine])

    found = World(len(shares)).run(program)
    weighted = [np.array(share / whole) for share in shares]
    assert np.abs(np.concatenate([rank[0] for rank in found]) - expected[0]).max() <= BOUND
    dx = np.concatenate([rank[1] * weight for rank, weight in zip(found, weighted, strict=True)])
    assert np.abs(dx - expected[1]).max() <= BOUND
    for index in (2, 3):
        total = sum(np.nan_to_num(rank[index]) * weight for rank, weight in zip(found, weighted, strict=True))
        assert np.abs(total - expected[index]).max() <= BOUND
    for rank in found:
        assert np.abs(rank[4] - expected[4]).max() <= BOUND and np.abs(rank[5] - expected[5]).max() <= BOUND


def test_a_sample_that_is_another_ranks_is_left_out():
    x, weights, _ = data((5, 3))

    def program(engine):
        balancer = Balancer(5, engine=engine, shares=(5, 0), min_share=0)
        balancer.announce((5, 0)[engine.rank])
        layer = SyncBatchNormalization(dtype="float64", engine=engine, balancer=balancer)
        rows = slice(0, 5) if engine.rank == 0 else slice(0, 1)
        return through(layer, x[rows], weights[rows], None)

    expected = through(keras.layers.BatchNormalization(dtype="float64"), x, weights, None)
    first, idle = World(2).run(program)
    for a, b in zip(first, expected, strict=True):
        assert np.abs(a - b).max() <= BOUND
    assert np.abs(idle[4] - expected[4]).max() <= BOUND


def test_a_gradient_of_the_gradient_is_refused():
    def program(engine):
        x = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
        y = SyncBatchNormalization(dtype="float64", engine=engine)(x, training=True)
        (gradient,) = torch.autograd.grad((y**3).sum(), x, create_graph=True)
        with pytest.raises(RuntimeError, match="once_differentiable"):
            gradient.pow(2).sum().backward()

    World(2).run(program)


def test_a_saved_layer_loads_as_itself():
    layer = SyncBatchNormalization(momentum=0.7, engine=SoloEngine())
    again = keras.saving.deserialize_keras_object(keras.saving.serialize_keras_object(layer))
    assert type(again) is SyncBatchNormalization and again.momentum == 0.7


def test_what_it_cannot_do():
    with pytest.raises(ValueError, match="renorm"):
        SyncBatchNormalization(renorm=True)
    with pytest.raises(TypeError, match="balancer: expected an hvd.Balancer. Received: 64"):
        SyncBatchNormalization(balancer=64)


def test_what_flows_back_is_weighted_by_loss_terms():
    """Rows that do not enter the loss enter the statistics."""
    x, weights, _ = data((8, 3))
    terms, kept = (4, 1), np.array([1, 1, 1, 1, 0, 0, 1, 0])[:, None]

    def program(engine):
        balancer = Balancer(8, engine=engine, shares=(5, 3))
        balancer.announce((5, 3)[engine.rank])
        balancer.announce_terms(terms[engine.rank])
        layer = SyncBatchNormalization(dtype="float64", engine=engine, balancer=balancer)
        rows = slice(0, 5) if engine.rank == 0 else slice(5, 8)
        mean = len(x[rows]) / terms[engine.rank]  # `through` divides by rows
        return through(layer, x[rows], (weights * kept)[rows] * mean, None)

    expected = through(keras.layers.BatchNormalization(dtype="float64"), x, weights * kept * 8 / sum(terms), None)
    found = World(2).run(program)
    dx = np.concatenate([rank[1] * n / sum(terms) for rank, n in zip(found, terms, strict=True)])
    assert np.abs(dx - expected[1]).max() <= BOUND
