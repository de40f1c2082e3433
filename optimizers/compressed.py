"""Sums over ranks of which less travels. Here: what a reduction is, and those whose wire forms can be summed.

A reduction sums one flat array over the ranks of an engine, the same array at every step. Whatever ranks do to a result
they do alike, and results are the same on all of them, bit for bit, where their arithmetic is.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from hvd_hetero.codecs.codec import Codec, Identity
from hvd_hetero.codecs.half import ScaledHalf, scale_for
from hvd_hetero.codecs.verbs import NOT_FINITE, NOTHING, verbs_of
from hvd_hetero.engine.port import Engine, Steps


class Reduction(Protocol):
    """Sums a flat array over the ranks of an engine; one object for one array over all steps."""

    name: str

    def steps(self, engine: Engine, array: Any, *, name: str) -> Steps:
        """The collectives of one sum; returns the sum, which may be `array` itself or overwrite it."""

    def end_step(self, counts: bool) -> None:
        """Ends a step. Of one that does not count (it was not finite, or a rank failed), nothing is kept."""

    def release(self, engine: Engine) -> Any | None:
        """What is kept back, of the array's length, to be added to this rank's next array; keeps nothing any more."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


class KeepsNothing:
    """The end of a step for reductions that send everything, and so have no residual."""

    def end_step(self, counts: bool) -> None:
        pass

    def release(self, engine: Engine) -> None:
        return None


class Exact(KeepsNothing):
    """The plain sum, or that of a codec whose wire form can be summed and that keeps nothing back.

    Args:
        shape: in which the codec sees an array; None: as it is, flat.
    """

    def __init__(self, codec: Codec | None = None, *, shape: tuple[int, ...] | None = None) -> None:
        self._codec, self._shape = codec or Identity(), shape
        self.is_plain = isinstance(self._codec, Identity)
        self.name = "exact" if self.is_plain else type(self._codec).__name__

    def steps(self, engine: Engine, array: Any, *, name: str) -> Steps:
        wire, context = self._codec.encode(array if self._shape is None else array.reshape(self._shape))
        total = yield engine.allreduce_async(wire, name=name)
        return self._codec.decode(total, context).reshape(-1)

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        pass


SPARE = 10  # bits of float16's range that values can do without


class Half(KeepsNothing):
    """float16 sums that cannot overflow unseen.

    With the values travels each rank's exponent, in a slot of its own (a sum with zeros, so a gather): the scale of
    the next step. What has grown by more than the scale leaves room for is sent again as it is, and so is what has
    fallen so far that few digits are left of it; all ranks see the same infinity, and the same exponents, and do so
    together. The first step is exact.
    """

    name = "fp16"

    def __init__(self) -> None:
        self._codec = ScaledHalf()
        self._exponent: int | None = None

    def steps(self, engine: Engine, array: Any, *, name: str) -> Steps:
        verbs = verbs_of(array)
        slots = verbs.zeros([engine.size], array)
        slots[engine.rank] = verbs.exponent(array)
        scale = None if self._exponent is None else scale_for(self._exponent, engine.size)
        if scale is None:
            result = yield engine.allreduce_async(verbs.joined([array, slots]), name=f"{name}.exact")
            result, said = result[: len(array)], result[len(array) :]
        else:
            result, said = yield from self._scaled(engine, array, slots, scale, name=name)
        exponents = [int(value) for value in said.tolist()]
        now = max(exponents)
        if scale is not None and now != NOT_FINITE:
            assert self._exponent is not None
            # Of zeros nothing is known: the scale of what comes after them is none.
            fallen = now > NOTHING and (self._exponent == NOTHING or now < self._exponent - SPARE)
            if fallen or not verbs.all_finite([result]):
                result = yield engine.allreduce_async(verbs.copied(array), name=f"{name}.again")
        if now != NOT_FINITE:
            self._exponent = self._following(now)
        return result

    def _following(self, now: int) -> int:
        """The exponent for the scale of the next step. What falls is followed slowly, since gradients come and go, but
        as far as digits last."""
        if self._exponent is None:
            return now
        if now == NOTHING:
            return max(now, self._exponent - 1)
        return max(now, min(self._exponent - 1, now + SPARE))

    def _scaled(self, engine: Engine, array: Any, slots: Any, scale: float, *, name: str) -> Steps:
        verbs, pieces, handles = verbs_of(array), pieces_of(len(array)), []
        for index, piece in enumerate(pieces):
            wire = self._codec.encode(array[piece], scale)
            if index == len(pieces) - 1:
                wire = verbs.joined([wire, verbs.half(slots)])
            handles.append(engine.allreduce_async(wire, name=f"{name}.half.{index}"))
        result = verbs.empty(array)
        for piece, handle in zip(pieces, handles, strict=True):
            total = yield handle
            self._codec.decode_into(result[piece], total[: piece.stop - piece.start], scale)
        return result, total[pieces[-1].stop - pieces[-1].start :]

    def state_dict(self) -> dict[str, Any]:
        return {"exponent": self._exponent}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._exponent = state["exponent"]


PIECE = 2**20  # values that are encoded and sent at a time: while one piece travels, the next is encoded


def pieces_of(length: int, *, unit: int = 1, least: int | None = None) -> list[slice]:
    """Nearly equal pieces of at least `least` (default: `PIECE`) values, each but the last a multiple of `unit`."""
    count = max(1, length // (least or PIECE))
    each = -(-length // (count * unit)) * unit
    return [slice(begin, min(length, begin + each)) for begin in range(0, max(1, length), max(1, each))]
