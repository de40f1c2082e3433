"""Sends values as float16 without overflow: they are scaled by a power of two so that their sum over the ranks fits.

    s = 2 ** floor(log2(65504 / (2 N m))),    m = the largest |x| on any rank, N ranks

Scaling by a power of two is exact. The factor 2 leaves room for values that grow, as the scale comes from the step
before. float16 keeps 11 bits of mantissa, bfloat16 8. Values below about m / 2 ** 24 become zero, as in any scaled
float16.
"""

from __future__ import annotations

import math
from typing import Any

from .verbs import NOT_FINITE, NOTHING, verbs_of

GREATEST = 65504.0


def scale_for(exponent: int, ranks: int) -> float | None:
    """Returns the factor s for values of at most 2 ** `exponent` on each of `ranks` ranks. None if there is an infinity
    or a NaN, which no scale makes finite."""
    if exponent == NOT_FINITE:
        return None
    if exponent == NOTHING:
        return 1.0
    room = math.floor(math.log2(GREATEST / (2 * ranks)))
    return math.ldexp(1.0, min(room - exponent, 120))


class ScaledHalf:
    """Encodes arrays as float16 that can be summed, with one scale for all ranks (see `scale_for`)."""

    def encode(self, array: Any, scale: float) -> Any:
        """Returns `array` times `scale` as float16."""
        return verbs_of(array).half(array * scale)

    def decode_into(self, array: Any, wire: Any, scale: float) -> None:
        """Writes the values of `wire`, divided by `scale`, into `array`."""
        array[...] = wire
        array *= 1.0 / scale
