"""float16 on the wire without overflow: values are scaled by a power of two so that their sum over the ranks fits.

    s = 2 ** floor(log2(65504 / (2 N m))),    m = the largest |x| on any rank, N ranks

A power of two changes no mantissa; the 2 leaves room for values that grow until the next scale is known. float16 keeps
11 bits of mantissa, bfloat16 8. Values below m / 2 ** 24 or so are flushed to zero, as in any float16 with a scale.
"""

from __future__ import annotations

import math
from typing import Any

from .verbs import NOT_FINITE, NOTHING, verbs_of

GREATEST = 65504.0


def scale_for(exponent: int, ranks: int) -> float | None:
    """The factor for values of at most 2 ** exponent on each of `ranks`; None where no scale helps."""
    if exponent == NOT_FINITE:
        return None
    if exponent == NOTHING:
        return 1.0
    room = math.floor(math.log2(GREATEST / (2 * ranks)))
    return math.ldexp(1.0, min(room - exponent, 120))


class ScaledHalf:
    """Summable float16 with a scale that all ranks share."""

    def encode(self, array: Any, scale: float) -> Any:
        """`array` times `scale` as float16."""
        return verbs_of(array).half(array * scale)

    def decode_into(self, array: Any, wire: Any, scale: float) -> None:
        """Writes what `wire` stands for into `array`."""
        array[...] = wire
        array *= 1.0 / scale
