"""Codecs under the names that a user knows: the part of `hvd.Compression` that every face has."""

from __future__ import annotations

from typing import Any

from .recipe import Recipe, Wire


class Compression:
    """How gradients travel.

    fp16 is scaled so that sums do not overflow. Where the topology has several nodes a codec works between them. Only
    matrices of at least 1024 values go through one; biases, norms and small tensors travel as they are. `int8`, `int4`,
    `topk` and `powersgd` keep what they could not send, and send it later (error feedback).
    """

    none: Any = Wire()
    """As they are."""

    fp16: Any = Wire(cross=Recipe(name="fp16"))
    """Half the bytes of fp32."""

    bf16 = Wire(cross=Recipe(name="bf16"))
    """bfloat16: the bytes of fp16 and the range of fp32."""

    int8 = Wire(cross=Recipe(name="int8"))
    """Blocks of 512 signed bytes with a scale each: a quarter of the bytes."""

    auto = Wire(auto=True)
    """none, fp16 or int8 for each bucket, whichever is fastest when timed: where the codec takes longer than the bytes
    that it saves would, there is none."""

    @staticmethod
    def int4(*, warmup_steps: int = 100) -> Wire:
        """Blocks of 128 half bytes with a scale each, 17 of 128 bytes of fp32; int8 for the first `warmup_steps`."""
        return Wire(cross=Recipe(name="int4", block=128, warmup_steps=warmup_steps))

    @staticmethod
    def topk(density: float = 0.01, *, warmup_steps: int = 100) -> Wire:
        """The `density` * n largest values of a bucket; exact for the first `warmup_steps` steps."""
        return Wire(cross=Recipe(name="topk", density=density, warmup_steps=warmup_steps))

    @staticmethod
    def powersgd(rank: int = 4, *, warmup_steps: int = 100) -> Wire:
        """Matrices as products of two of `rank` columns; exact for the first `warmup_steps` steps."""
        return Wire(cross=Recipe(name="powersgd", rank=rank, warmup_steps=warmup_steps))

    @classmethod
    def per_link(cls, *, cross: Any = None, local: Any = None) -> Wire:
        """A codec between nodes and another one within them; None for none."""
        between, within = cls._one(cross, "cross"), cls._one(local, "local")
        if within.auto:
            raise ValueError("local: expected none, fp16 or bf16. Received: auto.")
        return Wire(cross=between.cross, local=within.cross, auto=between.auto)

    @classmethod
    def _one(cls, compression: Any, argument: str) -> Wire:
        wire = Wire() if compression is None else cls.named(compression)
        if wire is None or not wire.local.exact:
            raise TypeError(
                f"{argument}: expected one of hvd.Compression.none, fp16, bf16, int8, int4(...), topk(...), "
                f"powersgd(...). Received: {compression!r}."
            )
        return wire

    @classmethod
    def named(cls, compression: Any) -> Wire | None:
        """The codecs that are meant, None where it is something else."""
        return compression if isinstance(compression, Wire) else None
