"""Reads and mixes the second moments of Keras's optimizers, on the host, for `optimizers.second_moments`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import keras

from hvd_hetero.optimizers.second_moments import Moments
from hvd_hetero.policy.second_moments import Mixture

from . import backend
from .factor import inner


def keepers_of(optimizer: Any) -> list[Any]:
    """The optimizers that update parameters: those within one, or itself."""
    return getattr(optimizer, "_inner_optimizers", None) or [inner(optimizer)]


def _is_adam(keeper: Any) -> bool:
    """Whether an optimizer is of Adam's kind: Adam, AdamW, Nadam or Lamb. With `amsgrad` it is none: what divides its
    steps are the largest second moments that there have been."""
    kind = keras.optimizers.Adam, keras.optimizers.Nadam, keras.optimizers.Lamb
    return isinstance(keeper, kind) and not getattr(keeper, "amsgrad", False)


def moments_of(optimizer: Any) -> Iterator[Moments]:
    """Those of all variables. Keras has no public names for them."""
    for keeper in filter(_is_adam, keepers_of(optimizer)):
        betas, steps = (float(keeper.beta_1), float(keeper.beta_2)), float(keeper.iterations)
        for first, second in zip(getattr(keeper, "_momentums", ()), getattr(keeper, "_velocities", ()), strict=True):
            if second is not None:  # there is none for variables that gradients overwrite
                yield Moments(first, second, betas, steps)


def copy(second: Any) -> Any:
    """A copy of a variable's value."""
    form = backend.form()
    return form.copied(form.values(second))


def mix(moments: Sequence[Moments], before: Sequence[Any], mixtures: Sequence[Mixture]) -> list[Any]:
    """Makes second moments their mixtures, and returns copies of them."""
    form, found = backend.form(), []
    for each, was, numbers in zip(moments, before, mixtures, strict=True):
        first, second = form.values(each.first), form.values(each.second)
        if bool((second == was).all()):  # there was no gradient, which Keras does not count by variable
            found.append(was)
            continue
        new = numbers.after * second + numbers.before * was + numbers.first * first * first
        form.assign(each.second, new)
        found.append(new)
    return found
