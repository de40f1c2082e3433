"""A random state of its own for a part of a program, apart from all else that draws random numbers in the process."""

from __future__ import annotations

import contextlib
import os
import random
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

_one_at_a_time = threading.RLock()  # is held by the thread that has its own states in the process's generators


def _renew() -> None:
    """Replaces the lock in a forked process, as the thread that may hold it does not exist there."""
    global _one_at_a_time
    _one_at_a_time = threading.RLock()


os.register_at_fork(after_in_child=_renew)


class Generator(NamedTuple):
    """The functions of a random number generator that has one state for the whole process."""

    seed: Callable[[int], Any]
    get_state: Callable[[], Any]
    set_state: Callable[[Any], Any]


PYTHON = Generator(random.seed, random.getstate, random.setstate)
NUMPY = Generator(lambda seed: np.random.seed(seed % 2**32), np.random.get_state, np.random.set_state)


class Draws:
    """A random state of its own: `with draws():` is a context in which the process's generators draw from it.

    The first time the state begins at `seed`; later it goes on from the end of the last such context. After each, the
    generators have the states that they had before it. One thread at a time can be in such a context.

    Args:
        seed: an integer.
        further: generators besides Python's and NumPy's.

    Attributes:
        states: the states of the generators at the end of the last context; None before the first one.
    """

    def __init__(self, seed: int, *further: Generator) -> None:
        self._seed, self._generators = seed, (PYTHON, NUMPY, *further)
        self.states: list[Any] | None = None

    @contextlib.contextmanager
    def __call__(self) -> Iterator[None]:
        with _one_at_a_time:
            before = self._get()
            if self.states is None:
                for generator in self._generators:
                    generator.seed(self._seed)
            else:
                self._set(self.states)
            try:
                yield
            finally:
                self.states = self._get()
                self._set(before)

    def _get(self) -> list[Any]:
        return [generator.get_state() for generator in self._generators]

    def _set(self, states: list[Any]) -> None:
        for generator, state in zip(self._generators, states, strict=True):
            generator.set_state(state)
