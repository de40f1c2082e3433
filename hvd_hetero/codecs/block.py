"""Codecs that encode each block of values as a row of bytes (bf16, int8, int4). Such rows cannot be summed.

A row can be decoded without the others. So rows are sent to different ranks, and each rank decodes and sums the blocks
that it receives, in full precision.
"""

from __future__ import annotations

from typing import Any, Protocol

from .verbs import rows_of, verbs_of


class BlockCodec(Protocol):
    """A codec that encodes flat arrays as rows of bytes."""

    name: str
    block: int
    """The number of values that a row encodes."""
    rounds: bool
    """Whether the codec only rounds each value to a shorter float, with so small an error that gradients need no
    error feedback."""

    def encode(self, array: Any) -> Any:
        """Returns uint8 of shape [ceil(n / block), bytes of a row] for a flat array of n values."""

    def decode(self, rows: Any, like: Any) -> Any:
        """Returns the values of all rows as a flat array in the type of `like`, with the padding of the last row."""


class Brain:
    """bfloat16: float32's range with 8 bits of mantissa. Horovod cannot sum it, so it is sent as bytes."""

    name = "bf16"
    block = 512
    rounds = True

    def encode(self, array: Any) -> Any:
        return verbs_of(array).as_bytes(verbs_of(array).brain_bits(rows_of(array, self.block)))

    def decode(self, rows: Any, like: Any) -> Any:
        verbs = verbs_of(rows)
        return verbs.from_brain_bits(verbs.from_bytes(rows, "int16"), like).reshape(-1)


class _Integers:
    """Blocks of signed integers, each with a float32 scale.

        q_j = round(x_j / s),    s = max |x| of the block / `most`

    Error at most s / 2 per value. (Blockwise quantisation as in CGX, Markov et al. 2022, arXiv:2111.08617, section 4,
    with a symmetric range.) A block with an infinity or a NaN decodes to NaN.

    Args:
        block: values that share a scale.
    """

    name: str
    rounds = False
    most: float
    """The largest integer that a value is encoded as; the least one is its negative."""
    in_a_byte = 1

    def __init__(self, block: int = 512) -> None:
        if block < 8 or block % 4:
            raise ValueError(f"block: expected a multiple of 4, at least 8. Received: {block}.")
        self.block = block

    def encode(self, array: Any) -> Any:
        verbs = verbs_of(array)
        values = rows_of(array, self.block)
        scale = verbs.nan_for_infinite(verbs.single(verbs.row_largest(values) / self.most))  # the block decodes to NaN
        divisor = verbs.widened(scale + (scale == 0), array).reshape(-1, 1)
        codes = verbs.rounded(values / divisor)  # multiplying by the inverse would round once more
        return verbs.beside([self._packed(verbs.as_bytes(codes)), verbs.as_bytes(scale.reshape(-1, 1))])

    def decode(self, rows: Any, like: Any) -> Any:
        verbs, width = verbs_of(rows), self.block // self.in_a_byte
        codes = self._unpacked(rows[:, :width], like)
        codes *= verbs.widened(verbs.from_bytes(rows[:, width:], "float32"), like)
        return codes.reshape(-1)

    def _packed(self, codes: Any) -> Any:
        """Returns the bytes that are sent, for codes of one byte each."""
        return codes

    def _unpacked(self, rows: Any, like: Any) -> Any:
        """Returns the codes in the type of `like`, for the bytes that were received."""
        return verbs_of(rows).widened(verbs_of(rows).from_bytes(rows, "int8"), like)


class Int8(_Integers):
    """One byte per value, from -127 to 127; see `_Integers`."""

    name = "int8"
    most = 127.0


class Int4(_Integers):
    """Half a byte per value, from -7 to 7; see `_Integers`.

    A byte holds a value of the first half of its block in its lower four bits, and one of the second half in its upper.
    """

    name = "int4"
    most = 7.0
    in_a_byte = 2

    def _packed(self, codes: Any) -> Any:
        half = self.block // 2
        return codes[:, :half] & 15 | codes[:, half:] << 4

    def _unpacked(self, rows: Any, like: Any) -> Any:
        verbs = verbs_of(rows)
        codes = verbs.widened(verbs.beside([rows & 15, rows >> 4]) ^ 8, like)
        codes -= 8.0  # two's complement of four bits: with the sign bit inverted, they count from -8
        return codes
