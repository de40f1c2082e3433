"""Sums over ranks that send fewer bytes: the protocol `Reduction`, and reductions whose encoded arrays can be summed.

A reduction sums one flat array over the ranks of an engine, the same array at every step. All ranks compute the result
in the same way, so that it is the same on all of them, bit for bit, if their arithmetic is. `feedback` has the
reductions with error feedback.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from hvd_hetero.codecs.codec import Codec, Identity
from hvd_hetero.codecs.half import ScaledHalf, scale_for
from hvd_hetero.codecs.verbs import NOT_FINITE, NOTHING, verbs_of
from hvd_hetero.engine.port import Engine, Steps


class Reduction(Protocol):
    """Sums a flat array over the ranks of an engine. Each array has an object of its own, for all steps.

    Attributes:
        name: the codec's, for logs and the trace.
    """

    name: str

    def steps(self, engine: Engine, array: Any, *, name: str) -> Steps:
        """A generator that yields the handle of each collective of one sum, and is sent that one's result.

        Args:
            engine: the ranks to sum over.
            array: this rank's array, flat. It may be overwritten.
            name: prefix of the operations' names, the same on all ranks.

        Returns:
            The sum, which may be `array` itself.
        """

    def end_step(self, counts: bool) -> None:
        """Ends a step. If it does not count, as where a gradient was not finite or a rank failed, its residual is
        discarded, and that of the step before stays."""

    def take_residual(self, engine: Engine) -> Any | None:
        """Returns the residual to be added to this rank's next array, of the same length, and clears it; None: none."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


class WithoutResidual:
    """A base class for reductions that send everything, and so have no residual."""

    def end_step(self, counts: bool) -> None:
        pass

    def take_residual(self, engine: Engine) -> None:
        return None


class ExactSum(WithoutResidual):
    """An all-reduce of the array as it is, or encoded by a codec without residual whose encoded arrays can be summed.

    Args:
        codec: None: the array is sent as it is.
        shape: the shape in which the codec is given the array; None: flat.

    Attributes:
        is_plain: whether the array is sent as it is.
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


SPARE = 10  # by so many powers of two may values fall below the scale's before float16 leaves them too few digits


class HalfPrecisionSum(WithoutResidual):
    """An all-reduce in float16 with a scale that all ranks share, repeated in full precision where float16 fails.

    Beside its values each rank sends the exponent of its largest value, in a slot of its own, which the other ranks
    leave 0. The largest exponent of all ranks gives the scale of the next step. The array is sent again as it is, in
    the same step, if its sum overflowed, or if its values have fallen so far below the scale that float16 leaves them
    few digits. All ranks decide alike, as they see the same sum and exponents. The first step is exact.
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
            # Zeros tell nothing of the values that follow, for which a scale made of zeros is none.
            fallen = now > NOTHING and (self._exponent == NOTHING or now < self._exponent - SPARE)
            if fallen or not verbs.all_finite([result]):
                result = yield engine.allreduce_async(verbs.copied(array), name=f"{name}.again")
        if now != NOT_FINITE:
            self._exponent = self._following(now)
        return result

    def _following(self, now: int) -> int:
        """Returns the exponent for the scale of the next step, given the largest exponent `now`.

        It rises with the values at once. It falls by one a step, as gradients may grow again, but by more where it
        would be more than `SPARE` above the values.
        """
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


PIECE = 2**20  # values that are encoded and sent at a time: while one piece is sent, the next is encoded


def pieces_of(length: int, *, unit: int = 1, least: int | None = None) -> list[slice]:
    """Returns slices of `length` values: nearly equal pieces, each of about `least` (default: `PIECE`) values or more,
    and each except the last a multiple of `unit`."""
    count = max(1, length // (least or PIECE))
    each = -(-length // (count * unit)) * unit
    return [slice(begin, min(length, begin + each)) for begin in range(0, max(1, length), max(1, each))]
