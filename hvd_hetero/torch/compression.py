"""`hvd.Compression`: Horovod's, and codecs that make less travel."""

from __future__ import annotations

from typing import Any

import horovod.torch as horovod
from horovod.torch.compression import Compressor, FP16Compressor, NoneCompressor

from hvd_hetero.codecs.codec import HorovodCompressor
from hvd_hetero.optimizers import compression as framework_free
from hvd_hetero.optimizers.recipe import Wire

__all__ = ["Compression", "Compressor", "FP16Compressor", "NoneCompressor", "is_ours", "wire_of"]


class Compression(horovod.Compression, framework_free.Compression):  # type: ignore[misc]
    """How gradients travel. `none` and `fp16` are Horovod's own, and mean what they mean there.

    With a balancer or a topology, fp16 is scaled so that sums do not overflow, and the others can be chosen as well:
    see `hvd_hetero.optimizers.compression.Compression`.
    """

    @classmethod
    def named(cls, compression: Any) -> Wire | None:
        """The codecs that are meant, by our names or by Horovod's; None where it is something else."""
        if compression is horovod.Compression.none:
            return Wire()
        if compression is horovod.Compression.fp16:
            return framework_free.Compression.fp16  # type: ignore[no-any-return]
        return super().named(compression)  # type: ignore[no-any-return]


def wire_of(compression: Any) -> Wire | HorovodCompressor:
    """What a user passed as `compression`: our codecs, or somebody's own compressor.

    Raises:
        TypeError: neither.
    """
    return Compression.named(compression) or HorovodCompressor(compression)


def is_ours(compression: Any) -> bool:
    """Whether only we know how to do it."""
    return isinstance(compression, Wire)
