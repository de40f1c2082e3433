"""The back end of Keras. It decides which Horovod this process uses: `horovod.tensorflow` or `horovod.torch`."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from typing import Any, TypeVar

import keras

from hvd_hetero.engine.binding import engine_of
from hvd_hetero.engine.port import Engine
from hvd_hetero.engine.version import check_lowest, horovod_for

F = TypeVar("F", bound=Callable[..., Any])

NAME: str = keras.backend.backend()
if NAME not in ("tensorflow", "torch"):
    raise ImportError(
        f'Expected the back end "tensorflow" or "torch" of Keras, for which there is a Horovod. Received: "{NAME}". '
        "Set the environment variable KERAS_BACKEND before keras is imported."
    )

check_lowest("keras", *(["torch"] if NAME == "torch" else ["tensorflow", "tensorflow-cpu"]))
horovod: Any = horovod_for(NAME)


def horovod_error() -> type[Exception]:
    """The class of error that Horovod raises when another rank is gone."""
    error: type[Exception] = importlib.import_module("horovod.common.exceptions").HorovodInternalError
    return error


def traces() -> bool:
    """Whether the caller's code is being traced by TensorFlow, and so runs only once, not at each step."""
    return NAME == "tensorflow" and not sys.modules["tensorflow"].executing_eagerly()


def as_written(function: F) -> F:
    """Decorates a function that scripts call in a `tf.function`: AutoGraph does not convert it, nor what it calls."""
    if NAME != "tensorflow":
        return function
    decorated: F = importlib.import_module("tensorflow").autograph.experimental.do_not_convert(function)
    return decorated


def uncompiled(function: F) -> F:
    """Decorates a function that communicates with the torch back end: Dynamo, with `jit_compile`, does not compile it.
    """
    if NAME != "torch":
        return function
    decorated: F = importlib.import_module("torch").compiler.disable(function)
    return decorated


def form() -> Any:
    """The module that has this back end's operations on gradients: `gradient_tensorflow` or `gradient_torch`."""
    return importlib.import_module(f"{__package__}.gradient_{NAME}")


def engine(process_set: Any = None) -> Engine:
    """An engine over the ranks of `process_set` (default: all), on the Horovod of this process."""
    return engine_of(NAME, process_set)
