"""Which gradients there are, where a batch decides that and each rank has another one."""

import numpy as np
import pytest

pytest.importorskip("keras", reason="pip install keras with TensorFlow or torch")
pytest.importorskip("horovod", reason="build it with hvd-hetero build-horovod")

import keras

import hvd_hetero.keras as hvd
from hvd_hetero.engine.local import World
from hvd_hetero.keras.balancer import Balancer
from hvd_hetero.keras.optimizer import make_reducer
from hvd_hetero.optimizers.compression import Compression

LARGE = (40, 40)


def reducer_of(engine, codecs=Compression.none, passes=1):
    balancer = Balancer(8, adaptive=False, engine=engine)
    return make_reducer(
        compression=codecs, op=hvd.Average, predivide=1.0, balancer=balancer, topology=None, bucket_bytes=None,
        passes=passes,
    )  # fmt: skip


def variables_of(*shapes):
    return [keras.Variable(np.zeros(shape, "float32")) for shape in shapes]


def test_where_no_rank_has_any_gradient_there_is_none():
    def program(engine):
        reducer, variables = reducer_of(engine), variables_of((3,), (2,))
        found = []
        for samples, gradients in (
            ((4, 4), [None, None]),
            ((8, 0), [keras.ops.ones(3) if engine.rank else None, None]),  # of a rank without samples
            ((4, 4), [keras.ops.ones(3) if engine.rank else None, None]),
            ((0, 0), [None, None]),
        ):
            reducer.balancer.begin(samples[engine.rank])
            reduced = reducer.reduced(gradients, variables, 0)
            found.append([None if g is None else keras.ops.convert_to_numpy(g).tolist() for g in reduced])
        return found

    none = [None, None]
    assert World(2).run(program) == [[none, none, [[0.5] * 3, None], [[0.0] * 3, [0.0] * 2]]] * 2


def test_what_a_codec_kept_back_comes_where_no_rank_has_a_gradient():
    """Law 6: nothing is lost, also of a layer that batches leave out."""

    def program(engine):
        reducer = reducer_of(engine, Compression.topk(density=0.05, warmup_steps=0))
        variables = variables_of(LARGE, (3,))
        draw = np.random.RandomState(engine.rank).standard_normal(LARGE)
        first = keras.ops.convert_to_tensor(draw.astype("float32"))
        total, nones = 0.0, 0
        for step in range(100):
            reducer.balancer.begin(4)
            mine = [None if step else first, keras.ops.ones(3)]
            large, _ = reducer.reduced(mine, variables, 0)
            nones += large is None
            total = total + (0.0 if large is None else keras.ops.convert_to_numpy(large))
        return total, draw, nones

    (total, mine, nones), (other, others, _) = World(2).run(program)
    assert np.array_equal(total, other) and nones > 0
    np.testing.assert_allclose(total, (mine + others) / 2, atol=1e-6)


def test_layers_may_be_frozen_and_thawed_between_the_batches_of_an_update():
    """Nothing of a batch is left for a later update, nor taken for another variable's of the same shape."""

    def program(engine):
        reducer, (a, b, c) = reducer_of(engine, passes=3), variables_of((2,), (2,), (1,))
        found = []
        for step, present in enumerate([(a, b), (a,), (a,), (a, b), (a,), (a, b), (b, c), (a, c), (a, c)]):
            reducer.balancer.begin((1, 3)[engine.rank])
            gradients = [keras.ops.full(v.shape, 4.0 * engine.rank + step) for v in present]
            found.append([keras.ops.convert_to_numpy(g)[0] for g in reducer.reduced(gradients, present, step)])
        return found[2::3]

    # Means over ranks are 3 + step; of a batch that a variable is not in, 0.
    assert World(2).run(program) == [[[12.0], [21.0, 14.0], [21.0, 30.0]]] * 2
