"""Saves and restores the states of this process's random number generators: Python's, numpy's, Keras's and the back
end's."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any

import keras
import numpy as np

from hvd_hetero.engine import randomness

from . import backend

_own: Any = importlib.import_module(f"{__package__}.randomness_{backend.NAME}")
GLOBAL = "global_seed_generator"  # Keras's name of the generator that functions without a seed draw from


def random_state() -> dict[str, Any]:
    """The states of all these generators."""
    return {**randomness.random_state(), "keras": _keras_state(), backend.NAME: _own.random_state()}


def load_random_state(state: Mapping[str, Any]) -> None:
    """Restores what `random_state()` returned."""
    if state.get("keras") is not None and (generator := _generator(made=True)) is not None:
        generator.state.assign(state["keras"])
    if backend.NAME in state:
        _own.load_random_state(state[backend.NAME])
    randomness.load_random_state(state)  # last, as a generator that Keras makes above draws its seed from Python's


class Aside:
    """Undoes the random draws that Keras makes in order to read data, so that a resumed job draws the same numbers.

    torch's DataLoader draws a seed each time that it is begun. That happens once more in an epoch that is resumed, and
    Keras begins one more after the last batch."""

    def __init__(self) -> None:
        self._undo: Callable[[], object] | None = None

    def begin(self) -> None:
        """Notes the generator's state: what is drawn from now on will be undone by `end`."""
        self._undo = _own.undoing_draws()

    def end(self) -> None:
        """Restores the state noted by `begin`, if any."""
        if self._undo is not None:
            self._undo()
        self._undo = None

    def forget(self) -> None:
        """Keeps what was drawn since `begin`: `end` will not undo it."""
        self._undo = None


def _keras_state() -> np.ndarray | None:
    """The state of Keras's own generator; None before anything was drawn from it."""
    generator = _generator(made=False)
    return None if generator is None else np.array(keras.ops.convert_to_numpy(generator.state))


def _generator(*, made: bool) -> Any:
    """Keras's own generator. If there is none yet, it is made if `made`, else this is None. None also in a version of
    Keras that has moved it, as it has no public name."""
    try:
        from keras.src.backend.common.global_state import get_global_attribute
        from keras.src.random.seed_generator import global_seed_generator
    except ImportError:
        return None
    return global_seed_generator() if made else get_global_attribute(GLOBAL)
