"""Flattens gradients of the torch back end into tensors on their device, which `horovod.torch` sums there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
import torch

from hvd_hetero.codecs.codec import HorovodCompressor
from hvd_hetero.codecs.torch_verbs import VERBS
from hvd_hetero.engine.stopwatch import Stopwatch, stopwatch_of
from hvd_hetero.policy.buckets import WIRE

from .layout import Spec, Step

_TYPES = {name: getattr(torch, name) for name in WIRE}


def dense(gradient: Any, variable: Any) -> Any:
    """The gradient as a dense tensor."""
    return gradient.to_dense() if gradient is not None and gradient.is_sparse else gradient


def none_of(variable: Any) -> torch.Tensor | None:
    """A gradient of zeros for a variable; None if its type can have no gradient."""
    value = getattr(variable, "value", variable)
    return torch.zeros_like(value, requires_grad=False) if value.is_floating_point() else None


def constant(values: Sequence[float], like: torch.Tensor) -> torch.Tensor:
    """A vector of these values on the device of the gradient `like`, of the type in which that travels."""
    vector = torch.empty(len(values), dtype=_TYPES[spec(like).wire], device=like.device)
    VERBS.write(vector, values)
    return vector


def spec(gradient: torch.Tensor) -> Spec:
    """A gradient's shape and type."""
    return Spec(tuple(gradient.shape), str(gradient.dtype).removeprefix("torch."))


def tracing() -> bool:
    """False: `through` is never compiled."""
    return False


def part_of(owner: Any) -> int:
    """Always 0: with torch, it is not known how many exchanges of one batch a program makes."""
    return 0


def last_of(iterations: Any, passes: int) -> bool:
    """Whether an exchange follows the gradients of this iteration."""
    return passes == 1 or (int(iterations) + 1) % passes == 0


@torch.compiler.disable
@torch.no_grad()
def through(
    step: Step, gradients: Sequence[Any], last: bool, part: int, variables: Sequence[Any]
) -> list[Any]:
    """What `step` makes of the gradients, in their shapes and types. It may read and write `variables`."""
    layout = step.layout
    for index, members in enumerate(layout.members):
        pieces = [gradients[i].reshape(-1).to(_TYPES[layout.specs[i].wire]) for i in members]
        step.take(index, torch.cat(pieces), last, part)
    reduced: dict[int, Any] = {}
    for flat, members in zip(step.finish(last), layout.members, strict=True):
        pieces = flat.split([layout.specs[i].length for i in members])
        for i, piece in zip(members, pieces, strict=True):
            reduced[i] = piece.view(layout.specs[i].shape).to(_TYPES[layout.specs[i].dtype])
    return [reduced[i] for i in range(len(gradients))]


@torch.compiler.disable
@torch.no_grad()
def afterwards(call: Callable[[float], None], variables: Sequence[Any], rate: Any) -> None:
    """Calls `call` with the learning rate. The updates of `variables` made before this are complete."""
    call(float(rate))


def number(value: float) -> torch.Tensor:
    """A number that the host may set at any time."""
    return torch.tensor(value, dtype=torch.float64, device="cpu")  # compiled code would treat a float as a constant


def set_number(number: torch.Tensor, value: float) -> None:
    """Sets a number made by `number`."""
    number.fill_(value)


@torch.compiler.disable
@torch.no_grad()
def multiplied(rate: Any, number: torch.Tensor, *, after: Sequence[Any]) -> Any:
    """The learning rate times the number, in the type of the rate."""
    factor = float(number)
    if factor == 1.0:
        return rate
    rate = keras.ops.convert_to_tensor(rate)
    return (rate.detach().double() * factor).to(rate.dtype)


def flat(variables: Sequence[Any], dtype: str, into: torch.Tensor | None = None) -> torch.Tensor:
    """A copy of the variables, one after the other, in `into` if given."""
    return torch.cat([values(v).reshape(-1).to(_TYPES[dtype]) for v in variables], out=into)


def values(variable: Any) -> torch.Tensor:
    """A variable's values, which may not be written to."""
    found: torch.Tensor = variable.value.detach()
    return found


def assign(variable: Any, values: torch.Tensor) -> None:
    """Writes values of its shape to a variable."""
    variable.assign(values)


def zeros(length: int, dtype: str) -> torch.Tensor:
    """A vector of zeros on the device on which Keras makes its variables."""
    return keras.ops.zeros((length,), dtype=dtype)


zeros_like = torch.zeros_like
copied = torch.clone


def scaled_into(bucket: torch.Tensor, flat: torch.Tensor, weight: float) -> None:
    """Writes `flat` times `weight` into `bucket`."""
    bucket.copy_(flat)
    if weight != 1.0:
        bucket.mul_(weight)


Compressor = HorovodCompressor  # which takes tensors, as gradients are here


def stopwatch() -> Stopwatch:
    """The stopwatch that measures compute time on the device on which Keras computes."""
    return stopwatch_of(zeros(0, "float32").device)
