"""What Horovod's Keras API accepts, the Keras face accepts: signatures read out of Horovod's source, and wrong
arguments that raise before anything is exchanged."""

import ast
import contextlib
import importlib.util
import inspect
import pickle
import threading
import types
import warnings
from pathlib import Path

import pytest

pytest.importorskip("keras", reason="pip install keras with TensorFlow or torch")
pytest.importorskip("horovod", reason="build it with hvd-hetero build-horovod")

import keras
import numpy as np

import hvd_hetero.keras as hvd
from hvd_hetero.engine.local import SoloEngine, World
from hvd_hetero.keras import backend
from hvd_hetero.keras.reduction import array_to_send

FOLDER = Path(importlib.util.find_spec("horovod").origin).parent
NAMES = ["allreduce", "allgather", "broadcast", "reducescatter", "load_model", "DistributedOptimizer"]
CALLBACKS = [
    "BestModelCheckpoint", "BroadcastGlobalVariablesCallback", "LearningRateScheduleCallback",
    "LearningRateWarmupCallback", "MetricAverageCallback",
]  # fmt: skip
# These two differ from each other: `save_weights_only` stands before `mode` in one, and is not in the other.
UNLIKE = ("keras/callbacks.py", "BestModelCheckpoint")


def theirs(path, name):
    """The parameters of a function of Horovod's, or of a class, and the defaults that are plain values."""
    found = next(node for node in ast.walk(ast.parse((FOLDER / path).read_text())) if getattr(node, "name", "") == name)
    if isinstance(found, ast.ClassDef):
        found = next(node for node in found.body if getattr(node, "name", "") == "__init__")
    names = [argument.arg for argument in found.args.args if argument.arg != "self"]
    defaults = dict(zip(reversed(names), reversed(found.args.defaults), strict=False))
    return names, {name: each.value for name, each in defaults.items() if isinstance(each, ast.Constant)}


CASES = [
    *((path, name) for path in ("keras/__init__.py", "tensorflow/keras/__init__.py") for name in NAMES),
    *((path, name) for path in ("keras/callbacks.py", "tensorflow/keras/callbacks.py") for name in CALLBACKS),
    ("tensorflow/__init__.py", "DistributedGradientTape"),
    ("tensorflow/functions.py", "broadcast_variables"),
    ("tensorflow/functions.py", "broadcast_object"),
    ("tensorflow/functions.py", "allgather_object"),
]


# What Horovod's modules import or use among themselves.
INTERNAL = {
    "LocalGradientAggregationHelper", "handle_average_backwards_compatibility", "check_extension", "refs_to_vars",
    "is_version_greater_equal_than", "split_list", "vars_to_refs",
}  # fmt: skip


@pytest.mark.parametrize("path", ["keras", "tensorflow/keras", "tensorflow"])
def test_a_name_of_horovods_is_here_or_says_what_takes_its_place(path):
    tree = ast.parse((FOLDER / path / "__init__.py").read_text())
    names = {node.name for node in tree.body if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("horovod."):
            names |= {each.asname or each.name for each in node.names}
    modules = {each for each in names if importlib.util.find_spec(f"horovod.{path.replace('/', '.')}.{each}")}
    public = {name for name in names - modules - INTERNAL if not name.startswith("_")}
    assert len(public) > 20
    for name in public - set(dir(hvd)):
        with pytest.raises(AttributeError, match=rf"no attribute '{name}', which Horovod has\. \w+ "):
            getattr(hvd, name)
    with pytest.raises(AttributeError, match=r"no attribute 'TensorFlowState', which Horovod has\. Use hvd\.elastic\."):
        getattr(hvd.elastic, "TensorFlowState")  # noqa: B009
    with pytest.raises(AttributeError, match=r"no attribute 'all_reduce'$"):
        getattr(hvd, "all_reduce")  # noqa: B009


@pytest.mark.parametrize(("path", "name"), CASES)
def test_horovods_arguments_are_taken_in_their_places(path, name):
    names, defaults = theirs(path, name)
    ours = inspect.signature(getattr(hvd.callbacks if name in CALLBACKS else hvd, name)).parameters
    assert set(names) <= set(ours)
    for argument, default in defaults.items():
        # Horovod's own `average=True` raises with every `op`.
        assert ours[argument].default == default or (argument, default) == ("average", True), argument
    if name.endswith("_object") or (path, name) == UNLIKE:  # by name: `session` is TensorFlow 1's
        return
    if name == "DistributedOptimizer":
        names = names[:8]  # those after them are others in horovod.keras and horovod.tensorflow.keras
    assert list(ours)[: len(names)] == names
    by_name = [n for n in list(ours)[len(names) :] if ours[n].kind is inspect.Parameter.KEYWORD_ONLY]
    if name in ("DistributedOptimizer", "allreduce", "DistributedGradientTape"):
        assert by_name == list(ours)[len(names) :], "what is ours is passed by name"


def raises(kind, text, call):
    with pytest.raises(kind, match=text):
        call()


def test_wrong_reductions_say_what_was_expected():
    raises(ValueError, "expected None with op", lambda: hvd.allreduce(1.0, average=False, op=hvd.Sum))
    raises(ValueError, r"op: expected .*Received: True", lambda: hvd.allreduce(1.0, op=True))
    raises(ValueError, r"average: expected True.*Pass a reduction as op=", lambda: hvd.allreduce(1.0, "a", hvd.Sum))
    raises(TypeError, "is for hvd.DistributedOptimizer", lambda: hvd.allreduce(1.0, compression=hvd.Compression.int8))
    raises(TypeError, "hvd.Compression.none or fp16", lambda: hvd.allreduce(1.0, compression="fp16"))
    raises(ValueError, "hvd.Average or hvd.Sum", lambda: hvd.reducescatter([1.0], op=hvd.Max))


def test_what_is_no_array_is_told_apart():
    raises(TypeError, r"Received: a dict\..*map_structure\(hvd.allgather", lambda: array_to_send({"a": np.ones(2)}))
    assert array_to_send([1, 2]).tolist() == [1, 2] and array_to_send("text") == "text"


def test_what_is_no_variable_is_told_before_it_is_sent():
    """On every rank: the root has nothing to assign to."""
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    for wrong, text in ((model, "a Sequential"), (model.get_weights(), "a ndarray"), ({"rate": 0.1}, "a float")):
        raises(TypeError, f"variables: expected Keras variables.* Received: {text}",
               lambda wrong=wrong: hvd.broadcast_variables(wrong, root_rank=0))
    if keras.backend.backend() == "tensorflow":
        raises(TypeError, "gradtape: expected a tf.GradientTape", lambda: hvd.DistributedGradientTape(model))


def test_wrong_arguments_of_optimizers_and_models_say_what_was_expected():
    sgd = keras.optimizers.SGD
    balancer = hvd.Balancer(4, engine=SoloEngine())
    raises(
        TypeError,
        "name: expected a text",
        lambda: hvd.DistributedOptimizer(sgd(), hvd.Compression.fp16, balancer=balancer),
    )
    for compression, words in (
        (hvd.Compression.int4, "which has no compress.*Call it"),
        (types.SimpleNamespace(compress=id), "which has no decompress"),
        ("fp16", "such as hvd.Compression.fp16. Received: 'fp16'"),
    ):
        arguments = {"balancer": balancer, "compression": compression}
        raises(TypeError, words, lambda a=arguments: hvd.DistributedOptimizer(sgd(), **a))
    raises(
        ValueError,
        "at least 1",
        lambda: hvd.DistributedOptimizer(sgd(), backward_passes_per_step=0, balancer=balancer),
    )
    built = sgd()
    built.build([keras.Variable([1.0])])
    for optimizer in (built, sgd(gradient_accumulation_steps=3)):
        raises(
            ValueError,
            "new one with gradient_accumulation_steps=2",
            lambda optimizer=optimizer: hvd.DistributedOptimizer(
                optimizer, backward_passes_per_step=2, balancer=balancer
            ),
        )
    raises(TypeError, "custom_objects=", lambda: hvd.load_model("none.keras", {"Mine": sgd}))
    for of_balancer in (hvd.BalancedDataset, hvd.EvaluationDataset):
        words = "balancer: expected an hvd.Balancer. Received: 32."
        raises(TypeError, words, lambda make=of_balancer: make(np.ones((4, 1)), balancer=32))


@pytest.mark.parametrize("wrong, text", [
    ({"strategy": "async"}, "strategy: expected"),
    ({"compression": "int8"}, "compression: expected an object"),
    ({"op": True}, "op: expected"),
    ({"backward_passes_per_step": 0}, "at least 1"),
    ({"gradient_predivide_factor": 0.0}, "gradient_predivide_factor: expected"),
    ({"bucket_bytes": 0}, "bucket_bytes: expected"),
    ({"process_set": object()}, "process_set: expected None"),
    ({"device_dense": 4}, "device_dense: expected a text"),
    ({"topology": "star"}, "topology: expected"),
    ({"optimizer": "sgd"}, "optimizer: expected"),
])  # fmt: skip
@pytest.mark.parametrize("told", [True, False], ids=["balancer", "equal weights"])
def test_a_mistake_on_one_rank_is_an_error_on_all(wrong, text, told, monkeypatch):
    """After which they are as they were: what is made next is made alike."""
    if not told and "process_set" in wrong:
        return
    engines = threading.local()
    monkeypatch.setattr(backend, "engine", lambda process_set: engines.mine)

    def program(engine):
        engines.mine = engine
        balancer = hvd.Balancer(4, engine=engine) if told else None
        given = {"optimizer": keras.optimizers.SGD(), "balancer": balancer}
        with pytest.raises((TypeError, ValueError)) as raised:
            hvd.DistributedOptimizer(**{**given, **(wrong if engine.rank == 1 else {})})
        hvd.DistributedOptimizer(**given)
        return str(raised.value), engine.unique("")

    found, numbers = zip(*World(3).run(program), strict=True)
    assert text in found[1] and "rank 1:" not in found[1] and len(set(numbers)) == 1
    assert all("rank 1: " in found[rank] and text in found[rank] for rank in (0, 2))


def test_best_models_may_be_weights_alone():
    best = hvd.callbacks.BestModelCheckpoint
    assert best().filepath == "best.keras" and best("loss", 1, True).filepath == "best.weights.h5"
    assert best(filepath="other.keras").filepath == "other.keras" and best(save_weights_only=True).save_weights_only
    raises(TypeError, "mode= and save_freq=", lambda: best("val_accuracy", 0, "max"))
    raises(TypeError, 'monitor: expected the name of a metric, as "val_loss". Received: -1', lambda: best(-1))


def test_variables_are_left_out_of_a_broadcast():
    callback, variable = hvd.callbacks.BroadcastGlobalVariablesCallback(0), keras.Variable([1.0])
    callback.register_local_var(variable)
    assert id(variable) in callback._local


@pytest.mark.parametrize("wrong", [0.0, float("nan"), float("inf"), "2", True])
def test_a_divisor_that_is_none(wrong):
    with pytest.raises(ValueError, match="gradient_predivide_factor: expected a finite number other than 0"):
        hvd.DistributedOptimizer(
            keras.optimizers.SGD(), balancer=hvd.Balancer(4, engine=SoloEngine()), gradient_predivide_factor=wrong
        )


def test_stopping_together_takes_an_optimizer_that_the_model_was_not_compiled_with():
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(), balancer=hvd.Balancer(4, engine=SoloEngine()))
    for given in (optimizer, None):
        callback = hvd.callbacks.StopTogetherCallback(given)
        callback.set_model(model)
        with contextlib.nullcontext() if given else pytest.raises(ValueError, match="pass one of them"):
            callback.on_train_begin()


def test_the_first_of_the_ranks_that_train_a_model_saves_the_best_one(monkeypatch):
    """As in a process set, whose ranks train without the others."""
    saved = []
    monkeypatch.setattr(keras.callbacks.ModelCheckpoint, "_save_model", lambda self, *_: saved.append(rank))
    engine = types.SimpleNamespace(ranks=(1, 2))
    ours = types.SimpleNamespace(_reducer=types.SimpleNamespace(balancer=types.SimpleNamespace(engine=engine)))
    for optimizer, first in ((ours, 1), (types.SimpleNamespace(), 0)):
        for rank in range(3):
            monkeypatch.setattr(backend.horovod, "rank", lambda rank=rank: rank)
            best = hvd.callbacks.BestModelCheckpoint()
            best.set_model(types.SimpleNamespace(optimizer=optimizer))
            best._save_model(0, None, {})
        assert saved == [first]
        saved.clear()


def test_a_distributed_optimizer_is_pickled_as_a_plain_one():
    balancer = hvd.Balancer(4, engine=SoloEngine())
    optimizer = hvd.DistributedOptimizer(keras.optimizers.Adam(0.25), balancer=balancer)
    plain = pickle.loads(pickle.dumps(optimizer))
    assert isinstance(plain, keras.optimizers.Adam) and not hasattr(plain, "merge") and plain.learning_rate == 0.25


@pytest.mark.parametrize("name", ["on_epoch_begin", "on_epoch_end"])
def test_what_a_pydataset_would_do_between_epochs_is_told_to_be_left_out(name):
    class Batches(keras.utils.PyDataset):
        def __len__(self):
            return 2

        def __getitem__(self, index):
            return np.ones((2, 3)), np.ones((2, 1))

    balancer = hvd.Balancer(4, engine=SoloEngine())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        hvd.BalancedDataset(Batches(), balancer=balancer)
    shuffling = type("Shuffling", (Batches,), {name: lambda self: None})
    with pytest.warns(UserWarning, match=rf"{name}\(\), which is not called"):
        hvd.BalancedDataset(shuffling(), balancer=balancer)


def test_what_takes_the_place_of_a_balancer_a_state_or_a_checkpoint_is_named(tmp_path):
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    calls, elastic, balancer = hvd.callbacks, hvd.elastic, "balancer: expected an hvd.Balancer. Received: 8"
    raises(TypeError, balancer, lambda: calls.RebalanceCallback(8))
    raises(TypeError, balancer, lambda: calls.TraceCallback(str(tmp_path), 8))
    raises(TypeError, "checkpoint: expected an hvd.Checkpoint. Received: 'x'", lambda: calls.CheckpointCallback("x"))
    for kind in (elastic.CommitStateCallback, elastic.UpdateBatchStateCallback, elastic.UpdateEpochStateCallback):
        raises(TypeError, "state: expected an elastic state.* Received: 3", lambda kind=kind: kind(3))
    state = elastic.KerasState(model)
    raises(TypeError, r"state with a batch, as of KerasState", lambda: elastic.UpdateBatchStateCallback(state))
    raises(TypeError, r"state with an epoch, as of KerasState", lambda: elastic.UpdateEpochStateCallback(state))
    for number in (0, "5", 2.5):
        raises(ValueError, "batches_per_commit: expected an integer of at least 1",
               lambda number=number: elastic.CommitStateCallback(state, number))
    raises(TypeError, "model: expected a keras.Model. Received: 3", lambda: elastic.KerasState(3))
    raises(TypeError, "optimizer: expected a keras.optimizers.Optimizer", lambda: elastic.KerasState(model, 3))


def test_a_single_number_has_no_axis_along_which_to_gather():
    for value in (2.5, True, np.float32(1)):
        raises(ValueError, r"value: expected an array.* Give a list of it", lambda value=value: hvd.allgather(value))
