"""Gradients that a plain optimizer has added up over batches, and which no distributed one goes on from."""

from __future__ import annotations

from typing import Any

import keras


def begin_anew(optimizer: Any, passes: int) -> None:
    """Puts `optimizer` to where its last update was, if batches have come since: its next one is `passes` batches away.

    What was added up of them is each rank's own, and no part of an optimizer that was saved. Keras has no public name
    for what it adds up itself.
    """
    if over := int(keras.ops.convert_to_numpy(optimizer._iterations)) % passes:
        optimizer._iterations.assign(optimizer._iterations - over)
        for sums in getattr(optimizer, "_accumulated_gradients", ()):
            sums.assign(keras.ops.zeros_like(sums))
