"""The codecs of `hvd.Compression`, as far as PyTorch and Keras have them in common."""

from __future__ import annotations

from typing import Any

from .codec_spec import CodecSpec, LinkCodecs


class Compression:
    """The codecs that gradients can be sent with, for the argument `compression`.

    fp16 is scaled so that sums do not overflow. If the topology has several nodes, a codec is applied between nodes
    only. Codecs are applied to matrices of at least 1024 values; biases, norms and small tensors are sent as they are.
    `int8`, `int4`, `topk` and `powersgd` keep what they could not send, and send it later (error feedback).
    """

    none: Any = LinkCodecs()
    """No compression: gradients are sent in their own type."""

    fp16: Any = LinkCodecs(cross=CodecSpec(name="fp16"))
    """Values as fp16: half the bytes of fp32."""

    bf16 = LinkCodecs(cross=CodecSpec(name="bf16"))
    """Values as bfloat16: half the bytes of fp32, with its range and fewer digits than fp16."""

    int8 = LinkCodecs(cross=CodecSpec(name="int8"))
    """Values as signed bytes, with a scale for each block of 512: a quarter of the bytes of fp32."""

    auto = LinkCodecs(auto=True)
    """For each bucket of gradients the fastest of none, fp16 and int8, as timed on the links of the job: none where
    encoding takes longer than sending the bytes that it saves."""

    @staticmethod
    def int4(*, warmup_steps: int = 100) -> LinkCodecs:
        """Blocks of 128 values of 4 bits with a scale each: 17 bytes for each 128 bytes of fp32. int8 for the first
        `warmup_steps` steps."""
        return LinkCodecs(cross=CodecSpec(name="int4", block=128, warmup_steps=warmup_steps))

    @staticmethod
    def topk(density: float = 0.01, *, warmup_steps: int = 100) -> LinkCodecs:
        """The `density` * n largest values of a bucket; exact for the first `warmup_steps` steps."""
        return LinkCodecs(cross=CodecSpec(name="topk", density=density, warmup_steps=warmup_steps))

    @staticmethod
    def powersgd(rank: int = 4, *, warmup_steps: int = 100) -> LinkCodecs:
        """PowerSGD: each matrix as a product of two of `rank` columns; exact for the first `warmup_steps` steps."""
        return LinkCodecs(cross=CodecSpec(name="powersgd", rank=rank, warmup_steps=warmup_steps))

    @classmethod
    def per_link(cls, *, cross: Any = None, local: Any = None) -> LinkCodecs:
        """One codec between nodes and another one within nodes; None for none.

        Args:
            cross: any codec of this class, for sums between nodes.
            local: none, fp16 or bf16, for sums within a node.

        Raises:
            TypeError: an argument is not a codec of this class, or one from another `per_link` with its own `local`.
            ValueError: `local` is another one than none, fp16 and bf16.
        """
        between, within = cls._one(cross, "cross"), cls._one(local, "local")
        if within.auto:
            raise ValueError("local: expected none, fp16 or bf16. Received: auto.")
        return LinkCodecs(cross=between.cross, local=within.cross, auto=between.auto)

    @classmethod
    def _one(cls, compression: Any, argument: str) -> LinkCodecs:
        codecs = LinkCodecs() if compression is None else cls.named(compression)
        if codecs is None or not codecs.local.exact:
            raise TypeError(
                f"{argument}: expected one of hvd.Compression.none, fp16, bf16, int8, int4(...), topk(...), "
                f"powersgd(...). Received: {compression!r}."
            )
        return codecs

    @classmethod
    def named(cls, compression: Any) -> LinkCodecs | None:
        """Returns the codecs that `compression` stands for; None if it is not one of this class. PyTorch's subclass
        overrides it to accept Horovod's `none` and `fp16` as well."""
        return compression if isinstance(compression, LinkCodecs) else None
