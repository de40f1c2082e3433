"""The contract of a codec, and the identity."""

from __future__ import annotations

import inspect
from typing import Any, Protocol


class Codec(Protocol):
    """A codec whose encoded arrays can be summed by an all-reduce."""

    def encode(self, array: Any) -> tuple[Any, Any]:
        """The wire form of `array`, and the context that `decode` needs. The wire form is contiguous."""

    def decode(self, wire: Any, context: Any) -> Any:
        """The array in its original type, from the wire form."""


class Identity:
    """Sends the array as it is."""

    def encode(self, array: Any) -> tuple[Any, Any]:
        return array, None

    def decode(self, wire: Any, context: Any) -> Any:
        return wire


class HorovodCompressor:
    """A codec out of anything with Horovod's `compress(tensor) -> (tensor, context)` and `decompress`."""

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
