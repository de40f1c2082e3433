"""Functions of TensorFlow that were traced for the ranks that there are, and have to be traced anew for others.

A graph names the operations of its ranks, so it is of no use to others; and a rank that joins makes what a function
needs while it traces it, which those that stay have to do as well.
"""

from __future__ import annotations

import sys
import weakref
from types import FrameType
from typing import Any

import tensorflow as tf


class Traces:
    """The functions whose graphs exchange gradients."""

    def __init__(self) -> None:
        self._functions: weakref.WeakSet[Any] = weakref.WeakSet()

    def note(self) -> None:
        """The functions that this thread is tracing are among them."""
        frame: FrameType | None = sys._getframe()
        while frame is not None:
            function = frame.f_locals.get("self")
            if isinstance(function, tf.types.experimental.PolymorphicFunction):
                self._functions.add(function)
            frame = frame.f_back

    def forget(self) -> None:
        """They are traced anew when they are called next."""
        for function in self._functions:
            cache = function._function_cache  # there is no public way
            for context, kind in list(cache._primary):
                cache.delete(kind, context)
        self._functions.clear()


TRACES = Traces()
