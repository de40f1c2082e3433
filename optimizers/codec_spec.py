"""Codecs as a user names them, by name and numbers. A `CodecSpec` makes the reduction of each bucket.

Specs hold no state and are compared by their text, which must be the same on all ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

from hvd_hetero.codecs.block import Brain, Int4, Int8
from hvd_hetero.codecs.lowrank import LowRank, pays
from hvd_hetero.codecs.sparse import TopK

from .argument import check_whole
from .feedback import GatheredSum, PowerSGDSum, TopKSum
from .reduction import ExactSum, HalfPrecisionSum, Reduction

Shape = tuple[int, ...]

# Tensors of fewer elements go through no codec: indices and scales would cost as much as is saved; and each value of a
# bias, a norm's weight or another small tensor matters more than one of a large tensor.
EXACT_BELOW = 1024


def matrix_shape(shape: Shape) -> tuple[int, int]:
    """The number of rows and columns of a parameter of two axes or more seen as a matrix, whose values stay in their
    order: its axes are parted where that makes the fewest of both. PyTorch has the output channels of a convolution
    first, Keras last; and of Keras's attention, the first axis may be the heads."""
    cuts = [(math.prod(shape[:at]), math.prod(shape[at:])) for at in range(1, len(shape))]
    return min(cuts, key=sum)


@dataclass(frozen=True, kw_only=True)
class CodecSpec:
    """A codec, given by its name and numbers, without state.

    Args:
        name: "none", "fp16", "bf16", "int8", "int4", "topk" or "powersgd".
        block: for int8 and int4: the number of values that share a scale.
        density: for topk: the part of the entries that is sent.
        rank: for powersgd: the number of columns of the factors.
        warmup_steps: for topk and powersgd: the number of first steps that are exact; for int4: that use int8.
            Gradients change direction fastest at the start of a training, and a residual would be out of date when it
            is sent.

    Raises:
        ValueError: an unknown name, or a number that is out of range or of the wrong type.
    """

    name: str
    block: int = 512
    density: float = 0.01
    rank: int = 4
    warmup_steps: int = 100

    def __post_init__(self) -> None:
        if self.name not in _MAKERS:
            raise ValueError(f"name: expected one of {', '.join(_MAKERS)}. Received: {self.name!r}.")
        for name, least in (("warmup_steps", 0), ("rank", 1), ("block", 1)):
            check_whole(name, getattr(self, name), least=least)
        if not isinstance(self.density, Real) or isinstance(self.density, bool):
            raise ValueError(f"density: expected a number in (0, 1]. Received: {self.density!r}.")
        self.reduction([(64, 64)])  # raises ValueError if a number is out of range

    @property
    def exact(self) -> bool:
        """Whether gradients are sent unchanged."""
        return self.name == "none"

    @property
    def keeps(self) -> bool:
        """Whether its reductions keep residuals, which error feedback sends later."""
        return self.name in ("int8", "int4", "topk", "powersgd")

    @property
    def codec_warmup_steps(self) -> int:
        """The number of first steps in which the codec is more exact than later, and takes longer: its warm-up."""
        return self.warmup_steps if self.name in ("int4", "topk", "powersgd") else 0

    @property
    def needs_matrices(self) -> bool:
        """Whether the codec needs whole matrices, and so cannot work on the part of a bucket that one rank sums between
        nodes with "rails" or "scatter"."""
        return self.name == "powersgd"

    def takes(self, shape: Shape) -> bool:
        """Whether the gradient of a parameter of this shape goes through the codec; others are sent unchanged."""
        if self.exact or len(shape) < 2 or math.prod(shape) < EXACT_BELOW:
            return False
        return self.name != "powersgd" or pays(*matrix_shape(shape), self.rank)

    def reduction(self, shapes: Sequence[Shape]) -> Reduction:
        """A new reduction for a bucket of tensors of these shapes."""
        return _MAKERS[self.name](self, shapes)

    def __str__(self) -> str:
        numbers = {
            "int8": ["block"],
            "int4": ["block", "warmup_steps"],
            "topk": ["density", "warmup_steps"],
            "powersgd": ["rank", "warmup_steps"],
        }
        listed = ", ".join(f"{key}={getattr(self, key)}" for key in numbers.get(self.name, []))
        return f"{self.name}({listed})" if listed else self.name


_MAKERS: dict[str, Callable[[CodecSpec, Sequence[Shape]], Reduction]] = {
    "none": lambda spec, shapes: ExactSum(),
    "fp16": lambda spec, shapes: HalfPrecisionSum(),
    "bf16": lambda spec, shapes: GatheredSum(Brain()),
    "int8": lambda spec, shapes: GatheredSum(Int8(spec.block)),
    "int4": lambda spec, shapes: GatheredSum(
        Int4(spec.block), first=Int8(spec.block), warmup_steps=spec.warmup_steps
    ),
    "topk": lambda spec, shapes: TopKSum(TopK(spec.density), warmup_steps=spec.warmup_steps),
    "powersgd": lambda spec, shapes: PowerSGDSum(
        LowRank([matrix_shape(shape) for shape in shapes], rank=spec.rank), warmup_steps=spec.warmup_steps
    ),
}


@dataclass(frozen=True, kw_only=True)
class LinkCodecs:
    """The codecs between nodes and within nodes. Members of `hvd.Compression`, such as `int8`, are of this class.

    Args:
        cross: the codec between nodes; between all ranks if there is one level only.
        local: the codec within nodes: "none", "fp16" or "bf16".
        auto: whether the codec between nodes is chosen by timing, among none, fp16 and int8; then `cross` is not used.

    Raises:
        ValueError: another codec within nodes.
    """

    cross: CodecSpec = CodecSpec(name="none")
    local: CodecSpec = CodecSpec(name="none")
    auto: bool = False

    def __post_init__(self) -> None:
        if self.local.name not in ("none", "fp16", "bf16"):
            raise ValueError(
                f"local: expected none, fp16 or bf16, since links within a node are fast. Received: {self.local}."
            )

    @property
    def specs(self) -> tuple[CodecSpec, ...]:
        """The codecs that buckets may use between nodes."""
        return tuple(CodecSpec(name=name) for name in ("none", "fp16", "int8")) if self.auto else (self.cross,)

    @property
    def keeps(self) -> bool:
        """Whether any of these codecs keeps residuals from step to step."""
        return any(spec.keeps for spec in (*self.specs, self.local))

    def takes(self, shape: Shape) -> bool:
        """Whether the gradient of a parameter of this shape may go through any of these codecs."""
        return any(spec.takes(shape) for spec in (*self.specs, self.local))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Raises TypeError: this codec is made already. Only codecs that take numbers are made by a call."""
        raise TypeError(f"Expected a codec as it is. Received: a call of {self}. Leave the parentheses out.")

    def compress(self, tensor: Any) -> Any:
        """Raises TypeError. Horovod's functions call this to compress a tensor before an all-reduce, but the wire forms
        of these codecs cannot be summed by one."""
        raise TypeError(
            f"compression: expected hvd.Compression.none or fp16 in Horovod's functions. Received: {self}, which is "
            "for hvd.DistributedOptimizer."
        )

    def __str__(self) -> str:
        cross = "auto" if self.auto else str(self.cross)
        return cross if self.local.exact else f"per_link(cross={cross}, local={self.local})"
