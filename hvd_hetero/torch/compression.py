"""`hvd.Compression`: Horovod's compressors, and codecs that make gradients smaller on the wire."""

from __future__ import annotations

from typing import Any

import horovod.torch as horovod
from horovod.torch.compression import Compressor, FP16Compressor, NoneCompressor

from hvd_hetero.codecs.codec import HorovodCompressor
from hvd_hetero.optimizers import compression as framework_free
from hvd_hetero.optimizers.codec_spec import LinkCodecs

__all__ = ["Compression", "Compressor", "FP16Compressor", "NoneCompressor", "codecs_of", "is_ours"]


class Compression(horovod.Compression, framework_free.Compression):  # type: ignore[misc]
    """How gradients travel. `none` and `fp16` are Horovod's own, and mean what they mean there.

    With a balancer or a topology, fp16 is scaled so that sums do not overflow, and the others can be chosen as well:
    see `hvd_hetero.optimizers.compression.Compression`.
    """

    @classmethod
    def named(cls, compression: Any) -> LinkCodecs | None:
        """The codecs that `compression` names, as ours or as Horovod's; None if it is neither."""
        if compression is horovod.Compression.none:
            return LinkCodecs()
        if compression is horovod.Compression.fp16:
            return framework_free.Compression.fp16  # type: ignore[no-any-return]
        return super().named(compression)  # type: ignore[no-any-return]


def codecs_of(compression: Any) -> LinkCodecs | HorovodCompressor:
    """What a user passed as `compression`: our codecs, or a compressor of the user's own.

    Raises:
        TypeError: it is neither.
    """
    return Compression.named(compression) or HorovodCompressor(compression)


def is_ours(compression: Any) -> bool:
    """Whether `compression` is one of this package's codecs, which Horovod's own optimizer could not use."""
    return isinstance(compression, LinkCodecs)
