"""Codecs whose wire form is rows of bytes, a row for each block of values. Such rows are gathered, never summed.

A row stands alone, so rows can be dealt to ranks: each sums the blocks that it was dealt, in full precision.
"""

from __future__ import annotations

from typing import Any, Protocol

from .verbs import rows_of, verbs_of


class BlockCodec(Protocol):
    """Turns flat arrays into rows of bytes and back."""

    name: str
    block: int
    """Values in a row."""
    rounds: bool
    """Whether values are merely rounded to another float, so that no error feedback is needed."""

    def encode(self, array: Any) -> Any:
        """uint8 of shape [ceil(n / block), bytes of a row] for a flat array of n values."""

    def decode(self, rows: Any, like: Any) -> Any:
        """The values of all rows, flat, in the type of `like`; the last row's filling included."""


class Brain:
    """bfloat16: float32's range with 8 bits of mantissa. Horovod cannot sum it, so it travels as bytes."""

    name = "bf16"
    block = 512
    rounds = True

    def encode(self, array: Any) -> Any:
        return verbs_of(array).as_bytes(verbs_of(array).brain_bits(rows_of(array, self.block)))

    def decode(self, rows: Any, like: Any) -> Any:
        verbs = verbs_of(rows)
        return verbs.from_brain_bits(verbs.from_bytes(rows, "int16"), like).reshape(-1)


class Int8:
    """Blocks of signed bytes, each with a float32 scale.

        q_j = round(x_j / s),    s = max |x| of the block / 127

    Error at most s / 2 per value. (Blockwise quantisation as in CGX, Markov et al. 2022, arXiv:2111.08617, section 4,
    with a symmetric range.) A block with an infinity or a NaN decodes to NaN.

    Args:
        block: values that share a scale.
    """

    name = "int8"
    rounds = False

    def __init__(self, block: int = 512) -> None:
        if block < 8 or block % 4:
            raise ValueError(f"block: expected a multiple of 4, at least 8. Received: {block}.")
        self.block = block

    def encode(self, array: Any) -> Any:
        verbs = verbs_of(array)
        values = rows_of(array, self.block)
        scale = verbs.nan_for_infinite(verbs.single(verbs.row_largest(values) / 127.0))  # either way it is lost
        divisor = verbs.widened(scale + (scale == 0), array).reshape(-1, 1)
        codes = verbs.rounded(values / divisor)  # not times the inverse, which rounds once more
        return verbs.beside([verbs.as_bytes(codes), verbs.as_bytes(scale.reshape(-1, 1))])

    def decode(self, rows: Any, like: Any) -> Any:
        verbs = verbs_of(rows)
        codes = verbs.widened(verbs.from_bytes(rows[:, : self.block], "int8"), like)
        codes *= verbs.widened(verbs.from_bytes(rows[:, self.block :], "float32"), like)
        return codes.reshape(-1)
