"""Callbacks that Keras calls in the thread that trains, also where `fit` is given a single one.

Where a back end is thread-safe, as torch is, Keras ends batches for callbacks in another thread, while the next one is
trained – unless one of them looks at batches. It looks for those in a list, and not at a callback that is passed by
itself (Keras 3.15). What that one saves, counts or says to other ranks would be of no batch in particular.
"""

from __future__ import annotations

import functools
from typing import Any

import keras


def _look_at_single_ones() -> None:
    """Makes Keras look at a single callback as at a list of one. It has no public hook for that."""
    try:
        configure = keras.callbacks.CallbackList._configure_async_dispatch
    except AttributeError:  # a later Keras has moved it
        return

    @functools.wraps(configure)
    def configure_async_dispatch(self: Any, callbacks: Any) -> None:
        configure(self, keras.tree.flatten(callbacks) if callbacks else callbacks)

    keras.callbacks.CallbackList._configure_async_dispatch = configure_async_dispatch


_look_at_single_ones()
