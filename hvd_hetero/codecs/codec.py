"""The contract of a codec whose output an all-reduce can sum, the identity, and Horovod's compressors as codecs."""

from __future__ import annotations

import inspect
from typing import Any, Protocol


class Codec(Protocol):
    """A codec whose encoded arrays can be summed by an all-reduce."""

    def encode(self, array: Any) -> tuple[Any, Any]:
        """Returns the array that is sent for `array`, which is contiguous, and the context that `decode` needs."""

    def decode(self, wire: Any, context: Any) -> Any:
        """Returns the array in its original type, from the one that was sent (or the sum of such) and the context."""


class Identity:
    """Sends the array as it is."""

    def encode(self, array: Any) -> tuple[Any, Any]:
        return array, None

    def decode(self, wire: Any, context: Any) -> Any:
        return wire


def name_of(compressor: Any) -> str:
    """The name of a user's compressor, the same on all ranks: of its class, or its own, as Horovod's are classes."""
    return compressor.__name__ if isinstance(compressor, type) else type(compressor).__name__


class HorovodCompressor:
    """The codec for a compressor in Horovod's form, as a user may have written one.

    Args:
        compression: an object with `compress(tensor) -> (tensor, context)` and `decompress(tensor, context)`.

    Raises:
        TypeError: `compression` lacks one of these methods.
    """

    def __init__(self, compression: Any) -> None:
        for method in ("compress", "decompress"):
            if not callable(getattr(compression, method, None)):
                hint = " Call it: what it returns is one." if inspect.isroutine(compression) else ""
                raise TypeError(
                    f"compression: expected an object with compress(tensor) and decompress(tensor, context), such as "
                    f"hvd.Compression.fp16. Received: {compression!r}, which has no {method}().{hint}"
                )
        self.compression = compression

    def encode(self, array: Any) -> tuple[Any, Any]:
        wire, context = self.compression.compress(array)
        return wire, context

    def decode(self, wire: Any, context: Any) -> Any:
        return self.compression.decompress(wire, context)
