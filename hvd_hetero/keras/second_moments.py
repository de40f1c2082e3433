"""Second moments of Keras' optimizers, as `optimizers.second_moments` asks for them. On the host."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import keras

from hvd_hetero.optimizers.second_moments import Moments
from hvd_hetero.policy.second_moments import Mixture


def keepers_of(optimizer: Any) -> list[Any]:
    """The optimizers that update parameters: those within one, or itself."""
    return getattr(optimizer, "_inner_optimizers", None) or [getattr(optimizer, "inner_optimizer", optimizer)]


def has_second_moments(optimizer: Any) -> bool:
    """Whether an optimizer is one of Adam's kind."""
    return any(hasattr(keeper, "beta_2") for keeper in keepers_of(optimizer))


def moments_of(optimizer: Any) -> Iterator[Moments]:
    """Of Adam's kind is who keeps what Adam keeps under the same names; Keras has no public ones."""
    for keeper in keepers_of(optimizer):
        firsts, seconds = getattr(keeper, "_momentums", ()), getattr(keeper, "_velocities", ())
        if hasattr(keeper, "beta_1") and hasattr(keeper, "beta_2") and len(firsts) == len(seconds):
            for first, second in zip(firsts, seconds, strict=True):
                yield Moments(first, second, second, (float(keeper.beta_1), float(keeper.beta_2)), keeper.iterations)


def copy(second: Any) -> Any:
    """A variable's value, which stays."""
    return keras.ops.copy(second)


def mix(moments: Sequence[Moments], before: Sequence[Any], mixtures: Sequence[Mixture]) -> list[Any]:
    """Makes second moments their mixtures, and returns copies of them."""
    found = []
    for each, was, numbers in zip(moments, before, mixtures, strict=True):
        first, second = keras.ops.convert_to_tensor(each.first), keras.ops.convert_to_tensor(each.second)
        new = numbers.after * second + numbers.before * was + numbers.first * first * first
        each.second.assign(new)
        found.append(new)
    return found
