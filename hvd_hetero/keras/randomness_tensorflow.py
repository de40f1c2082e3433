"""Where TensorFlow's random numbers are: its global generator. What `tf.random.normal` and its kin draw from is within
the operations of a graph, where nobody can read it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import tensorflow as tf


def random_state() -> dict[str, Any]:
    """The state of its global generator."""
    generator = _generator()
    return {} if generator is None else {"algorithm": int(generator.algorithm), "state": generator.state.numpy()}


def load_random_state(state: Mapping[str, Any]) -> None:
    """Goes on from `random_state()`, where the generator is of the same kind."""
    generator = _generator()
    if state and generator is not None and int(generator.algorithm) == state["algorithm"]:
        generator.state.assign(state["state"])


def seeds() -> None:
    """None: reading data draws nothing."""


def load_seeds(state: None) -> None:
    """Never called."""


def _generator() -> Any:
    """The global generator, which TensorFlow makes when it is asked for; None where it was told not to."""
    try:
        return tf.random.get_global_generator()
    except RuntimeError:  # operations have to be deterministic, and the script has set no generator
        return None
