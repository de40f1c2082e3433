"""`hvd.Compression`: Horovod's, and codecs that make less travel."""

from __future__ import annotations

from typing import Any

import horovod.torch as horovod

from hvd_hetero.codecs.codec import HorovodCompressor
from hvd_hetero.optimizers.recipe import Recipe, Wire


class Compression(horovod.Compression):  # type: ignore[misc]
    """How gradients travel. `none` and `fp16` are Horovod's own, and mean what they mean there.

    With a balancer or a topology, fp16 is scaled so that sums do not overflow, and the others can be chosen as well.
    Where the topology has several nodes a codec works between them. Only matrices of at least 1024 values go through
    one; biases, norms and small tensors travel as they are. `int8`, `topk` and `powersgd` keep what they could not
    send, and send it later (error feedback).
    """

    bf16 = Wire(cross=Recipe(name="bf16"))
    """bfloat16: the bytes of fp16 and the range of fp32."""

    int8 = Wire(cross=Recipe(name="int8"))
    """Blocks of 512 signed bytes with a scale each: a quarter of the bytes."""

    auto = Wire(auto=True)
    """none, fp16 or int8 for each bucket, whichever is fastest when timed: where the codec takes longer than the bytes
    that it saves would, there is none."""

    @staticmethod
    def topk(density: float = 0.01, *, warmup_steps: int = 100) -> Wire:
        """The `density` * n largest values of a bucket; exact for the first `warmup_steps` steps."""
        return Wire(cross=Recipe(name="topk", density=density, warmup_steps=warmup_steps))

    @staticmethod
    def powersgd(rank: int = 4, *, warmup_steps: int = 100) -> Wire:
        """Matrices as products of two of `rank` columns; exact for the first `warmup_steps` steps."""
        return Wire(cross=Recipe(name="powersgd", rank=rank, warmup_steps=warmup_steps))

    @staticmethod
    def per_link(*, cross: Any = horovod.Compression.none, local: Any = horovod.Compression.none) -> Wire:
        """A codec between nodes and another one within them."""
        between, within = _wire(cross, "cross"), _wire(local, "local")
        if within.auto:
            raise ValueError("local: expected none, fp16 or bf16. Received: auto.")
        return Wire(cross=between.cross, local=within.cross, auto=between.auto)


def _wire(compression: Any, argument: str) -> Wire:
    wire = wire_of(compression)
    if not isinstance(wire, Wire) or not wire.local.exact:
        raise TypeError(
            f"{argument}: expected one of hvd.Compression.none, fp16, bf16, int8, topk(...), powersgd(...). "
            f"Received: {compression!r}."
        )
    return wire


def wire_of(compression: Any) -> Wire | HorovodCompressor:
    """What a user passed as `compression`: our codecs, or somebody's own compressor.

    Raises:
        TypeError: neither.
    """
    if compression is horovod.Compression.none:
        return Wire()
    if compression is horovod.Compression.fp16:
        return Wire(cross=Recipe(name="fp16"))
    return compression if isinstance(compression, Wire) else HorovodCompressor(compression)


def is_ours(compression: Any) -> bool:
    """Whether only we know how to do it."""
    return isinstance(compression, Wire)
