"""Second moments of Keras' optimizers as of the global batch; real ranks are in test_keras_horovod.py."""

import keras
import numpy as np
import pytest

pytest.importorskip("horovod.torch", reason="build it with hvd-hetero build-horovod")

from hvd_hetero.keras.second_moments import copy, mix, moments_of
from hvd_hetero.optimizers.second_moments import SecondMoments
from hvd_hetero.policy.second_moments import mixture

BETAS = 0.9, 0.999
OF_ADAM = {
    "Adam": keras.optimizers.Adam, "AdamW": keras.optimizers.AdamW, "Nadam": keras.optimizers.Nadam,
    "Lamb": keras.optimizers.Lamb,
    "scaled": lambda lr: keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(lr), initial_scale=8.0),
    "accumulates": lambda lr: keras.optimizers.Adam(lr, gradient_accumulation_steps=2),
}
OTHERS = {
    "SGD": lambda: keras.optimizers.SGD(0.1, momentum=0.9), "RMSprop": keras.optimizers.RMSprop,
    "Adamax": keras.optimizers.Adamax, "Lion": keras.optimizers.Lion,
    "AMSGrad": lambda: keras.optimizers.Adam(amsgrad=True),
}
if hasattr(keras.optimizers, "ScheduleFreeAdamW"):  # since Keras 3.14; its "momentums" are weights
    OTHERS["ScheduleFreeAdamW"] = keras.optimizers.ScheduleFreeAdamW


@pytest.mark.filterwarnings("ignore:Gradients do not exist")
@pytest.mark.parametrize("name", list(OF_ADAM))
def test_second_moments_are_those_of_a_slow_reference(name):
    """At a rate of 0, so that gradients are known; the second variable has none in the last steps."""
    variables = [keras.Variable(np.ones(shape), dtype="float64") for shape in ((3, 2), (4,))]
    optimizer = OF_ADAM[name](0.0)
    optimizer.build(variables)
    moments = SecondMoments(moments_of, copy=copy, mix=mix, exchanges=True)
    generator, scale = np.random.default_rng(0), 8.0 if name == "scaled" else 1.0
    expected = [[0.0, 0.0, 0] for _ in variables]  # moments, and updates in them
    for step in range(12):
        moments.before_step(optimizer)
        frozen = step >= 8 and name != "accumulates"
        gradients = [generator.standard_normal(variable.shape) for variable in variables]
        for _ in range(2 if name == "accumulates" else 1):
            given = [keras.ops.convert_to_tensor(scale * g) for g in gradients]
            optimizer.apply([given[0], None if frozen else given[1]], variables)
        moments.after_step(optimizer, 0.25, sent=True)
        for index, gradient in enumerate(gradients[: 1 if frozen else 2]):
            first, second, _ = expected[index]
            before = second
            first, second = 0.9 * first + 0.1 * gradient, 0.999 * second + 0.001 * gradient**2
            numbers = mixture(0.25, betas=BETAS, steps=step + 1, new=1)
            second = numbers.after * second + numbers.before * before + numbers.first * first**2
            expected[index] = [first, second, step + 1]
    for each, (_, second, _) in zip(moments_of(optimizer), expected, strict=True):  # Lamb multiplies in float32
        np.testing.assert_allclose(keras.ops.convert_to_numpy(each.second), second, rtol=1e-6)


@pytest.mark.parametrize("name", list(OTHERS))
def test_who_is_not_of_adams_kind(name):
    optimizer = OTHERS[name]()
    variable = keras.Variable(np.ones(3), dtype="float32")
    optimizer.build([variable])
    assert not list(moments_of(optimizer))
