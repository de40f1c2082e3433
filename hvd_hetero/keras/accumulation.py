"""Gradients added up over several batches: drops those of a plain optimizer that becomes a distributed one, and finds
those of variables in a layout, as layers may be frozen or thawed between two updates."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import keras

from .layout import BucketLayout, Spec


def begin_anew(optimizer: Any, passes: int) -> None:
    """Puts `optimizer` back to its last update, if it was given batches since: the next one is `passes` batches away.

    What was added up of them is each rank's own, and no part of an optimizer that was saved. Keras has no public name
    for what it adds up itself.
    """
    if over := int(keras.ops.convert_to_numpy(optimizer._iterations)) % passes:
        optimizer._iterations.assign(optimizer._iterations - over)
        for sums in getattr(optimizer, "_accumulated_gradients", ()):
            sums.assign(keras.ops.zeros_like(sums))


def places(layout: BucketLayout, specs: Sequence[Spec | None], variables: Sequence[Any]) -> dict[Hashable, Any]:
    """The places in a layout's buckets of each variable's gradient and, if there are any, marks (see `presence`)."""
    parts = iter(layout.parts)
    found: dict[Hashable, Any] = {id(v): next(parts) for v, s in zip(variables, specs, strict=False) if s is not None}
    for marks in parts:
        names = [*(("mark", id(v)) for v in variables), "samples"]
        found.update({name: marks[i : i + 1] for i, name in enumerate(names)})
    return found
