"""Saves and restores the state of TensorFlow's global random generator. `tf.random.normal` and its kin draw from states
within operations, which cannot be read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import tensorflow as tf


def random_state() -> dict[str, Any]:
    """The state of TensorFlow's global generator; empty if there is none."""
    generator = _generator()
    return {} if generator is None else {"algorithm": int(generator.algorithm), "state": generator.state.numpy()}


def load_random_state(state: Mapping[str, Any]) -> None:
    """Restores what `random_state()` returned, if the generator uses the same algorithm."""
    generator = _generator()
    if state and generator is not None and int(generator.algorithm) == state["algorithm"]:
        generator.state.assign(state["state"])


def undoing_draws() -> Callable[[], object] | None:
    """None: reading data draws nothing."""
    return None


def _generator() -> Any:
    """The global generator, which TensorFlow makes on demand; None if it refuses to."""
    try:
        return tf.random.get_global_generator()
    except RuntimeError:  # with deterministic operations enabled, the script has to set a generator itself
        return None
