"""What a Keras job keeps comes back as it was, and nothing in a file is run."""

import random

import keras
import numpy as np
import pytest

pytest.importorskip("horovod.torch", reason="build it with hvd-hetero build-horovod")

from hvd_hetero.engine.randomness import load_random_state, random_state
from hvd_hetero.keras import randomness
from hvd_hetero.keras.content import loaded, saved
from hvd_hetero.keras.elastic import KerasState, _is_gone
from hvd_hetero.keras.variables import Variables


def test_what_was_saved_is_loaded():
    value = {
        "a": [1, 2.5, None, True, "text", {"deep": np.arange(6.0).reshape(2, 3)}],
        "b": np.zeros((0, 3), np.int64),
        "c": (np.float32(0.1), np.int64(2**60)),
        "d": {},
    }
    found = loaded(saved(value))
    assert found["a"][:5] == value["a"][:5] and found["d"] == {}
    np.testing.assert_array_equal(found["a"][5]["deep"], value["a"][5]["deep"])
    assert found["b"].shape == (0, 3) and found["b"].dtype == np.int64
    assert found["c"] == [pytest.approx(0.1), 2**60]


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ({"names": np.array(["a", None], dtype=object)}, "an array of object"),
        ({"rows": np.zeros(2, dtype=[("a", int), ("b", float)])}, "an array of"),
        ({"counts": {(1, 2): 3}}, r"a dict with the key \(1, 2\)"),
        ({"what": {1, 2}}, "set is not JSON"),
    ],
)
def test_what_could_not_be_loaded_is_not_saved(value, words):
    with pytest.raises(TypeError, match=words):
        saved(value)


def test_variables_of_narrow_types_come_back_bit_for_bit():
    for dtype in ("float16", "bfloat16", "float32", "float64", "int32"):
        values = keras.ops.cast(np.linspace(-3.0, 3.0, 7), dtype)
        owner = type("Owner", (), {"variables": [keras.Variable(values, dtype=dtype, trainable=False)]})()
        state = loaded(saved(Variables(owner).state_dict()))
        owner.variables[0].assign(keras.ops.zeros(7, dtype))
        Variables(owner).load_state_dict(state)
        assert keras.ops.all(keras.ops.equal(owner.variables[0].value, values)), dtype


def test_a_model_computes_with_the_variables_that_it_was_given():
    def model():
        return keras.Sequential([keras.Input((2,)), keras.layers.Normalization()])

    x = np.array([[1.0, 2.0], [3.0, 7.0]], "float32")
    adapted, fresh = model(), model()
    adapted.layers[0].adapt(x)
    Variables(fresh).load_state_dict(Variables(adapted).state_dict())
    np.testing.assert_array_equal(fresh.predict(x, verbose=0), adapted.predict(x, verbose=0))


def test_other_variables_are_refused():
    owner = type("Owner", (), {"variables": [keras.Variable(np.zeros(3))]})()
    with pytest.raises(ValueError, match=r"Expected 1 variables of the shapes \[\(3,\)\]. Received: \[\(4,\)\]"):
        Variables(owner).load_state_dict({"0": np.zeros(4)})


def test_models_and_optimizers_that_are_not_built_are_told_by_name():
    """Their variables come later, and a state of those that there were would fit nothing."""

    def model():
        return keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])

    first, second, optimizer = model(), model(), keras.optimizers.Adam()
    first.compile(optimizer=keras.optimizers.Adam())
    with pytest.raises(ValueError, match=r"d_optimizer: expected an optimizer that.*Call d_optimizer.build\(model"):
        KerasState(first, d_optimizer=optimizer)
    for name in ("model", "critic"):
        unbuilt = {"model": first, name: keras.Sequential([keras.layers.Dense(1)])}
        with pytest.raises(ValueError, match=f"{name}: expected a model that is built.*keras.Input"):
            KerasState(**unbuilt)
    optimizer.build(second.trainable_variables)
    KerasState(first, critic=second, d_optimizer=optimizer, epoch=0)


class Layered(keras.Model):
    """Has the variables of its layers made in its first call."""

    def __init__(self):
        super().__init__()
        self.hidden, self.out = keras.layers.Dense(3, name="hidden"), keras.layers.Dense(1, name="out")
        self.flip, self.spare = keras.layers.RandomFlip(), keras.layers.Dense(4, name="spare")

    def call(self, inputs):
        return self.out(self.hidden(inputs))


class Doubling(keras.Model):
    """Has no variables, and a layer that never will."""

    def __init__(self):
        super().__init__()
        self.flat = keras.layers.Flatten()

    def call(self, inputs):
        return self.flat(inputs * 2)


def test_a_model_without_a_call_is_built_where_its_layers_are():
    """As a GAN, of which Keras says that it is not built, and which cannot be called."""
    gan = keras.Model()
    gan.generator = keras.Sequential([keras.Input((2,)), keras.layers.Dense(3)])
    gan.critic = keras.Sequential([keras.layers.Dense(1, name="verdict")])
    gan.compile()
    with pytest.raises(ValueError, match="whose layers are not: .*verdict"):
        KerasState(gan, epoch=0)
    gan.critic.build((None, 3))
    state = KerasState(gan, epoch=0)
    assert not gan.built and len(state._parts["model"].state_dict()) == 4


@pytest.mark.filterwarnings("ignore:.*build:UserWarning")
@pytest.mark.parametrize("name", ["model", "critic"])
def test_models_that_say_they_are_built_and_are_not_are_told_by_name(name):
    """As a subclass of keras.Model says after `build(shape)`, with no variable made."""
    models = {"model": keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)]), name: Layered()}
    models["model"].compile(optimizer=keras.optimizers.SGD())
    models[name].build((None, 2))
    assert models[name].built and not models[name].weights
    expected = rf"{name}: expected a model that is built.*hidden, out, spare\..*on a batch: {name}\(x\[:1\]\)"
    with pytest.raises(ValueError, match=expected):
        KerasState(**models)
    models[name].hidden.build((None, 2))
    with pytest.raises(ValueError, match=r"whose layers are not: out, spare\."):
        KerasState(**models)
    models[name](np.zeros((1, 2)))
    state = KerasState(**models)
    assert len(state._parts[name].state_dict()) == 4, "and one that it never uses needs none"


@pytest.mark.filterwarnings("ignore:.*build:UserWarning")
def test_a_model_that_has_no_variables_is_built_without_any():
    model, called = Doubling(), Doubling()
    model.build((None, 2))
    called(np.zeros((1, 2)))
    trained = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    trained.compile(optimizer=keras.optimizers.SGD())
    state = KerasState(trained, one=model, other=called)
    assert state.one is model and not state._parts["other"].state_dict()


@pytest.mark.parametrize("value", [object(), {"f": lambda: 0}, np.array([object()])])
def test_what_is_no_data_is_refused(value):
    with pytest.raises((TypeError, ValueError)):
        loaded(saved(value))


def test_what_is_a_ranks_own_goes_on_where_other_layers_are_frozen():
    """Two of one shape: it was the first one's values that the second one got."""
    def job(frozen):
        model = keras.Sequential([keras.Input((2,)), *(keras.layers.Dense(2, name=name) for name in "ab")])
        model.add(keras.layers.BatchNormalization())
        for layer in model.layers:
            layer.trainable = layer.name != frozen
        model.compile(optimizer=keras.optimizers.SGD(), loss="mse")
        return KerasState(model)

    saves, loads = job("a"), job("b")
    saves.model.layers[-1].moving_mean.assign([5.0, 6.0])
    own = loaded(content := saves.own_content())["variables"]["model"]
    assert [value.tolist() for value in own.values()] == [[5.0, 6.0], [1.0, 1.0]], "all ranks have what is frozen"
    expected = loads.model.get_layer("b").get_weights()
    loads.load_own_content(content)
    for found, value in zip(loads.model.get_layer("b").get_weights(), expected, strict=True):
        np.testing.assert_array_equal(found, value)
    assert keras.ops.convert_to_numpy(loads.model.layers[-1].moving_mean).tolist() == [5.0, 6.0]


def test_random_numbers_go_on():
    random.seed(5)
    np.random.seed(6)
    state = loaded(saved(random_state()))
    expected = [random.random(), np.random.rand(), np.random.randn()]
    load_random_state(state)
    assert [random.random(), np.random.rand(), np.random.randn()] == expected


@pytest.mark.parametrize(("epoch", "batch"), [(2, 0), (1, 3)])
def test_a_job_that_is_finished_already_has_an_empty_history(epoch, batch):
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile(optimizer="sgd", loss="mse")
    found = KerasState(model, epoch=epoch, batch=batch).fit([None] * 3, epochs=2)
    assert found.history == {} and found.epoch == []


def test_the_history_is_of_all_that_is_left():
    """The rest of an epoch is a fit of its own."""

    class Batches(keras.utils.PyDataset):
        def __len__(self):
            return 3

        def __getitem__(self, index):
            return np.ones((2, 1)), np.ones((2, 1))

    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile(optimizer=keras.optimizers.SGD(), loss="mse", metrics=["mae"])
    found = KerasState(model, epoch=1, batch=2).fit(Batches(), epochs=4, verbose=0)
    assert found.epoch == [1, 2, 3] and {name: len(values) for name, values in found.history.items()} == {
        "loss": 3, "mae": 3,
    }  # fmt: skip


@pytest.mark.parametrize(("name", "text", "gone"), [
    ("UnknownError", "Horovod has been shut down. [Op:HorovodBroadcast] name: tuple.t", True),
    ("UnknownError", "Connection closed by peer [[{{node HorovodAllreduce_1}}]]", True),
    ("UnknownError", "HorovodInternalError: gradient failed [[{{node StatefulPartitionedCall}}]]", True),
    ("UnknownError", "PeerError: Expected every rank to deliver batch 3.", True),
    ("InvalidArgumentError", "Allreduce: Process set provided does not exist, or has not been registered.", True),
    ("UnknownError", "no such file", False),
    ("InvalidArgumentError", "Mismatched broadcast tensor shapes [Op:HorovodBroadcast]", False),
])
def test_errors_by_which_tensorflow_says_that_a_peer_is_gone(name, text, gone):
    error = type(name, (Exception,), {"__module__": "tensorflow.python.framework.errors_impl"})
    assert _is_gone(error(text)) == gone
    assert not _is_gone(ValueError(text))


def test_random_numbers_go_on_where_they_were():
    """Those that Keras and the back end draw without a seed as well."""

    def drawn():
        found = [keras.random.normal((3,)), keras.layers.Dropout(0.5)(keras.ops.ones((64,)), training=True)]
        if keras.backend.backend() == "tensorflow":
            import tensorflow as tf

            found[1] = tf.random.get_global_generator().normal((3,))
        return [np.array(keras.ops.convert_to_numpy(each)).tolist() for each in found] + [random.random()]

    drawn()
    state = loaded(saved(randomness.random_state()))
    expected = drawn()
    assert drawn() != expected
    randomness.load_random_state(state)
    assert drawn() == expected
    keras.utils.set_random_seed(5)  # makes Keras's own generator anew
    randomness.load_random_state(state)
    assert drawn() == expected
