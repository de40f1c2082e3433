"""Sums over ranks of which less travels: what each codec's wire form needs, and error feedback.

A reduction sums one flat array over the ranks of an engine, the same array at every step, and keeps what its codec
could not send. With e the residual and C the codec, in the units that are summed (weighted gradients), each rank does

    p = e + x;    q = C(p);    e = p - D(q)

so that over time everything is sent (Seide et al. 2014; Karimireddy et al. 2019, arXiv:1901.09847). Whatever ranks do
to a result they do alike, and results are the same on all of them, bit for bit, where their arithmetic is.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Protocol

from hvd_hetero.codecs.block import BlockCodec
from hvd_hetero.codecs.codec import Codec, Identity
from hvd_hetero.codecs.half import NOT_FINITE, ScaledHalf, exponent_of, scale_for
from hvd_hetero.codecs.lowrank import LowRank, orthonormal
from hvd_hetero.codecs.sparse import TopK
from hvd_hetero.codecs.verbs import verbs_of
from hvd_hetero.engine.port import Engine, Steps


class Reduction(Protocol):
    """Sums a flat array over the ranks of an engine; one object for one array over all steps."""

    name: str

    def steps(self, engine: Engine, array: Any, *, name: str) -> Steps:
        """The collectives of one sum; returns the sum, which may be `array` itself or overwrite it."""

    def settle(self, finite: bool) -> None:
        """Ends a step. Where the result was not finite, what is kept stays as it was before the step."""

    def release(self, engine: Engine) -> Any | None:
        """What is kept back, of the array's length, to be added to this rank's next array; keeps nothing any more."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


class Exact:
    """The plain sum, or that of a codec whose wire form can be summed and that keeps nothing back."""

    def __init__(self, codec: Codec | None = None) -> None:
        self._codec = codec or Identity()
        self.is_plain = isinstance(self._codec, Identity)
        self.name = "exact" if self.is_plain else type(self._codec).__name__

    def steps(self, engine: Engine, array: Any, *, name: str) -> Steps:
        wire, context = self._codec.encode(array)
        total = yield engine.allreduce_async(wire, name=name)
        return self._codec.decode(total, context)

    def settle(self, finite: bool) -> None:
        pass

    def release(self, engine: Engine) -> None:
        return None

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        pass


class Half:
    """float16 sums that cannot overflow unseen.

    With the values travels each rank's exponent, in a slot of its own (a sum with zeros, so a gather): the scale of
    the next step. What has grown by more than the scale leaves room for is sent again as it is; all ranks see the same
    infinity and do so together. The first step is exact.
    """

    name = "fp16"

    def __init__(self) -> None:
        self._codec = ScaledHalf()
        self._exponent: int | None = None

    def steps(self, engine: Engine, array: Any, *, name: str) -> Steps:
        verbs = verbs_of(array)
        slots = verbs.zeros([engine.size], array)
        slots[engine.rank] = exponent_of(verbs.largest(array))
        scale = None if self._exponent is None else scale_for(self._exponent, engine.size)
        if scale is None:
            result = yield engine.allreduce_async(verbs.joined([array, slots]), name=f"{name}.exact")
            result, said = result[: len(array)], result[len(array) :]
        else:
            result, said = yield from self._scaled(engine, array, slots, scale, name=name)
        exponents = [int(value) for value in said.tolist()]
        if scale is not None and NOT_FINITE not in exponents and not math.isfinite(verbs.largest(result)):
            result = yield engine.allreduce_async(verbs.copied(array), name=f"{name}.again")
        now = max(exponents)
        if now != NOT_FINITE:  # a falling scale is followed slowly, since gradients come and go
            self._exponent = now if self._exponent is None else max(now, self._exponent - 1)
        return result

    def _scaled(self, engine: Engine, array: Any, slots: Any, scale: float, *, name: str) -> Steps:
        verbs, pieces, handles = verbs_of(array), _pieces(len(array)), []
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

    def settle(self, finite: bool) -> None:
        pass

    def release(self, engine: Engine) -> None:
        return None

    def state_dict(self) -> dict[str, Any]:
        return {"exponent": self._exponent}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._exponent = state["exponent"]


class _Feedback:
    """Arrays kept from step to step, by name, and what will replace them if the step counts."""

    def __init__(self) -> None:
        self._now: dict[str, Any] = {}
        self._next: dict[str, Any] = {}
        self._step = 0

    def _with_kept(self, array: Any, key: str) -> Any:
        """A copy of `array`, plus what was kept under `key`."""
        kept = self._now.get(key)
        return verbs_of(array).copied(array) if kept is None else array + kept

    def settle(self, finite: bool) -> None:
        if finite:
            self._now.update(self._next)
            self._step += 1
        self._next = {}

    def release(self, engine: Engine) -> Any | None:
        return self._now.pop("residual", None)

    def state_dict(self) -> dict[str, Any]:
        return {"step": self._step, **self._now}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._now = dict(state)
        self._step = int(self._now.pop("step"))


class Gathered(_Feedback):
    """Sums of blocks that cannot be summed as they travel.

    Each rank is dealt a part of the blocks: an all-to-all brings it that part from every rank, it adds them up in full
    precision, encodes the sum, and an all-gather brings the sums to all (the scatter-reduce-allgather of CGX,
    arXiv:2111.08617). That rounds twice; each rank keeps its own first error, and the second of its part. Between two
    ranks, an all-gather of everything brings as few bytes in one stage, and rounds once.
    """

    def __init__(self, codec: BlockCodec) -> None:
        super().__init__()
        self._codec = codec
        self.name = codec.name

    def steps(self, engine: Engine, array: Any, *, name: str) -> Steps:
        pieces = _pieces(len(array), unit=self._codec.block)
        values = array if self._codec.rounds else self._with_kept(array, "residual")
        if engine.size <= 2:
            return self._in_one_stage(engine, values, pieces, name=name)
        return self._in_two_stages(engine, values, pieces, name=name)

    def _in_one_stage(self, engine: Engine, values: Any, pieces: list[slice], *, name: str) -> Steps:
        codec, handles, encoded = self._codec, [], []
        for index, piece in enumerate(pieces):
            encoded.append(codec.encode(values[piece]))
            handles.append(engine.allgather_async(encoded[-1], name=f"{name}.all.{index}"))
        result = verbs_of(values).empty(values)
        for piece, handle, mine in zip(pieces, handles, encoded, strict=True):
            length, rows = piece.stop - piece.start, len(mine)
            own = codec.decode(mine, values)[:length]
            received = yield handle
            if engine.size == 1:
                result[piece] = own
            else:  # a sum of two is the same in either order
                other = (1 - engine.rank) * rows
                result[piece] = codec.decode(received[other : other + rows], values)[:length]
                result[piece] += own
            if not codec.rounds:
                values[piece] -= own
        if not codec.rounds:
            self._next["residual"] = values
        return result

    def _in_two_stages(self, engine: Engine, array: Any, pieces: list[slice], *, name: str) -> Steps:
        codec, values, handles, encoded = self._codec, array, [], []
        for index, piece in enumerate(pieces):
            encoded.append(codec.encode(values[piece]))
            parts = _parts(len(encoded[-1]), engine.size)
            handles.append(engine.alltoall_async(encoded[-1], splits=parts, name=f"{name}.scatter.{index}"))
        if not codec.rounds:
            self._next["residual"] = values
            for piece, rows in zip(pieces, encoded, strict=True):
                values[piece] -= codec.decode(rows, array)[: piece.stop - piece.start]
        for index, handle in enumerate(handles):
            rows = self._summed((yield handle), array, engine.size, key=f"part.{index}")
            handles[index] = engine.allgather_async(rows, name=f"{name}.gather.{index}")
        result = verbs_of(array).empty(array)
        for piece, handle in zip(pieces, handles, strict=True):
            result[piece] = codec.decode((yield handle), array)[: piece.stop - piece.start]
        return result

    def _summed(self, received: Any, like: Any, ranks: int, *, key: str) -> Any:
        """The sum of what all ranks sent of this rank's part, encoded."""
        codec, mine = self._codec, len(received) // ranks
        total = codec.decode(received[:mine], like)
        for rank in range(1, ranks):
            total += codec.decode(received[rank * mine : (rank + 1) * mine], like)
        if codec.rounds:
            return codec.encode(total)
        total = self._with_kept(total, key)
        rows = codec.encode(total)
        total -= codec.decode(rows, like)
        self._next[key] = total
        return rows

    def release(self, engine: Engine) -> Any | None:
        kept = super().release(engine)
        if kept is None:
            return None
        for index, piece in enumerate(_pieces(len(kept), unit=self._codec.block)):
            part, length = self._now.pop(f"part.{index}", None), piece.stop - piece.start
            if part is not None:
                rows = -(-length // self._codec.block)
                begin = piece.start + sum(_parts(rows, engine.size)[: engine.rank]) * self._codec.block
                part = part[: max(0, piece.stop - begin)]  # without the last row's filling
                kept[begin : begin + len(part)] += part
        return kept


PIECE = 2**20  # values that are encoded and sent at a time: while one piece travels, the next is encoded


def _pieces(length: int, *, unit: int = 1) -> list[slice]:
    """Nearly equal pieces of at least `PIECE` values, each but the last a multiple of `unit`."""
    count = max(1, length // PIECE)
    each = -(-length // (count * unit)) * unit
    return [slice(begin, min(length, begin + each)) for begin in range(0, max(1, length), max(1, each))]


def _parts(rows: int, ranks: int) -> list[int]:
    """How many rows each rank is dealt."""
    each, more = divmod(rows, ranks)
    return [each + (rank < more) for rank in range(ranks)]


class Sparse(_Feedback):
    """Sums of each rank's largest entries.

    Args:
        warmup_steps: exact sums for so many steps, while gradients still change their direction.
    """

    name = "topk"

    def __init__(self, codec: TopK, *, warmup_steps: int = 0) -> None:
        super().__init__()
        self._codec, self._warmup_steps = codec, warmup_steps

    def steps(self, engine: Engine, array: Any, *, name: str) -> Steps:
        if self._step < self._warmup_steps:
            return (yield engine.allreduce_async(array, name=f"{name}.exact"))
        verbs, codec = verbs_of(array), self._codec
        values = self._with_kept(array, "residual")
        wire = codec.encode(values)
        handle = engine.allgather_async(wire, name=f"{name}.gather")
        verbs.clear_at(values, codec.places(wire))
        self._next["residual"] = values
        rows, total = (yield handle), verbs.zeros([len(array)], array)
        for rank in range(engine.size):
            codec.add_to(total, rows[rank * len(wire) : (rank + 1) * len(wire)])
        return total


class Factored(_Feedback):
    """Sums of matrices as products of thin ones (PowerSGD).

    Args:
        warmup_steps: exact sums for so many steps.
    """

    name = "powersgd"

    def __init__(self, codec: LowRank, *, warmup_steps: int = 0) -> None:
        super().__init__()
        self._codec, self._warmup_steps = codec, warmup_steps

    def _q(self, like: Any) -> list[Any]:
        """Q of the last step. A column that has died out would stay so: a new one takes its place."""
        codec = self._codec
        if "q" not in self._now:
            return codec.first_q(like)
        chosen = codec.split_right(verbs_of(like).copied(self._now["q"]))
        for index, matrix in enumerate(chosen):
            for column in range(matrix.shape[1]):
                if verbs_of(like).largest(matrix[:, column]) == 0.0:
                    seed = (codec.seed + 7919 * self._step + 31 * index + column) % 2**32
                    matrix[:, column] = verbs_of(like).seeded((len(matrix),), seed, like)
        return chosen

    def steps(self, engine: Engine, array: Any, *, name: str) -> Steps:
        if self._step < self._warmup_steps:
            return (yield engine.allreduce_async(array, name=f"{name}.exact"))
        verbs, codec = verbs_of(array), self._codec
        values = self._with_kept(array, "residual")
        left = yield engine.allreduce_async(codec.left(values, self._q(array)), name=f"{name}.p")
        p = [orthonormal(matrix) for matrix in codec.split_left(left)]
        own = codec.right(values, p)
        handle = engine.allreduce_async(verbs.copied(own), name=f"{name}.q")
        values -= codec.product(p, codec.split_right(own))
        self._next["residual"] = values
        right = yield handle
        self._next["q"] = right
        return codec.product(p, codec.split_right(right))
