"""Random numbers of its own for a part of a program, whatever else draws in the process."""

from __future__ import annotations

import contextlib
import os
import random
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

_one_at_a_time = threading.Lock()  # has the process's generators


def _renew() -> None:
    """Makes the lock anew in a forked process, where the thread that may hold it does not exist."""
    global _one_at_a_time
    _one_at_a_time = threading.Lock()


os.register_at_fork(after_in_child=_renew)


class Generator(NamedTuple):
    """A random number generator with one state for the whole process."""

    seed: Callable[[int], Any]
    get_state: Callable[[], Any]
    set_state: Callable[[Any], Any]


PYTHON = Generator(random.seed, random.getstate, random.setstate)
NUMPY = Generator(lambda seed: np.random.seed(seed % 2**32), np.random.get_state, np.random.set_state)


class Draws:
    """Within it, generators go on from where they were when it was left before, at first from `seed`; after it, from
    where they were.

    Args:
        further: generators, besides Python's and NumPy's.
    """

    def __init__(self, seed: int, *further: Generator) -> None:
        self._seed, self._generators = seed, (PYTHON, NUMPY, *further)
        self._states: list[Any] | None = None

    @contextlib.contextmanager
    def __call__(self) -> Iterator[None]:
        with _one_at_a_time:
            before = self._get()
            if self._states is None:
                for generator in self._generators:
                    generator.seed(self._seed)
            else:
                self._set(self._states)
            try:
                yield
            finally:
                self._states = self._get()
                self._set(before)

    def _get(self) -> list[Any]:
        return [generator.get_state() for generator in self._generators]

    def _set(self, states: list[Any]) -> None:
        for generator, state in zip(self._generators, states, strict=True):
            generator.set_state(state)
