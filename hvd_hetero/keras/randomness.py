"""Where this process's random numbers are: Python's, numpy's, Keras's, and those of the back end."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

import keras
import numpy as np

from hvd_hetero.engine import randomness

from . import backend

_own: Any = importlib.import_module(f"{__package__}.randomness_{backend.NAME}")
GLOBAL = "global_seed_generator"  # what Keras's functions draw from that are given no seed


def random_state() -> dict[str, Any]:
    """The states of all of them."""
    return {**randomness.random_state(), "keras": _keras_state(), backend.NAME: _own.random_state()}


def load_random_state(state: Mapping[str, Any]) -> None:
    """Goes on from `random_state()`."""
    if state.get("keras") is not None and (generator := _generator(made=True)) is not None:
        generator.state.assign(state["keras"])
    if backend.NAME in state:
        _own.load_random_state(state[backend.NAME])
    randomness.load_random_state(state)  # in the end: a generator that Keras makes here takes its seed from Python's


class Aside:
    """Sets aside what Keras draws to read an epoch: torch's DataLoader takes a seed when it is begun, which is once
    more in an epoch that a resumed job ends, and Keras begins one more after the last batch."""

    def __init__(self) -> None:
        self._before: Any = None

    def begin(self) -> None:
        """What is drawn from now on counts for nothing."""
        self._before = _own.seeds()

    def end(self) -> None:
        """It counts again."""
        if self._before is not None:
            _own.load_seeds(self._before)
        self._before = None

    def forget(self) -> None:
        """What was drawn since `begin` counts after all."""
        self._before = None


def _keras_state() -> np.ndarray | None:
    """Where Keras's own generator is; None before anything was drawn from it."""
    generator = _generator(made=False)
    return None if generator is None else np.array(keras.ops.convert_to_numpy(generator.state))


def _generator(*, made: bool) -> Any:
    """Keras's own generator, `made` if there is none yet. Keras has no public name for it: None in a version that has
    another one."""
    try:
        from keras.src.backend.common.global_state import get_global_attribute
        from keras.src.random.seed_generator import global_seed_generator
    except ImportError:
        return None
    return global_seed_generator() if made else get_global_attribute(GLOBAL)
