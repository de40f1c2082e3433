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
        verbs, length = verbs_of(array), len(array)
        slots = verbs.zeros([engine.size], array)
        slots[engine.rank] = exponent_of(verbs.largest(array))
        scale = None if self._exponent is None else scale_for(self._exponent, engine.size)
        if scale is None:
            total = yield engine.allreduce_async(verbs.joined([array, slots]), name=f"{name}.exact")
            result = total[:length]
        else:
            wire = verbs.joined([self._codec.encode(array, scale), verbs.half(slots)])
            total = yield engine.allreduce_async(wire, name=f"{name}.half")
            result = self._codec.decode(total[:length], array, scale)
        exponents = [int(value) for value in total[length:].tolist()]
        if scale is not None and NOT_FINITE not in exponents and not math.isfinite(verbs.largest(result)):
            result = yield engine.allreduce_async(verbs.copied(array), name=f"{name}.again")
        now = max(exponents)
        if now != NOT_FINITE:  # a falling scale is followed slowly, since gradients come and go
            self._exponent = now if self._exponent is None else max(now, self._exponent - 1)
        return result

    def settle(self, finite: bool) -> None:
        pass

    def release(self, engine: Engine) -> None:
        return None

    def state_dict(self) -> dict[str, Any]:
        return {"exponent": self._exponent}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._exponent = state["exponent"]


class _Feedback:
    """Arrays kept from step to step, and what will replace them if the step counts."""

    kept: tuple[str, ...] = ()

    def __init__(self) -> None:
        self._now: dict[str, Any] = dict.fromkeys(self.kept)
        self._next: dict[str, Any] = {}
        self._step = 0

    def _with_residual(self, array: Any, key: str = "residual") -> Any:
        kept = self._now[key]
        return verbs_of(array).copied(array) if kept is None else array + kept

    def settle(self, finite: bool) -> None:
        if finite:
            self._now.update(self._next)
            self._step += 1
        self._next = {}

    def release(self, engine: Engine) -> Any | None:
        kept, self._now["residual"] = self._now["residual"], None
        return kept

    def state_dict(self) -> dict[str, Any]:
        return {"step": self._step, **self._now}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._step = int(state["step"])
        self._now = {key: state[key] for key in self.kept}


class Gathered(_Feedback):
    """Sums of blocks that cannot be summed as they travel.

    Each rank is dealt a part of the blocks: an all-to-all brings it that part from every rank, it adds them up in full
    precision, encodes the sum, and an all-gather brings the sums to all (the scatter-reduce-allgather of CGX,
    arXiv:2111.08617). That rounds twice; each rank keeps its own first error, and the second of its part.
    """

    kept = ("residual", "part_residual")

    def __init__(self, codec: BlockCodec) -> None:
        super().__init__()
        self._codec = codec
        self.name = codec.name

    def steps(self, engine: Engine, array: Any, *, name: str) -> Steps:
        codec, length = self._codec, len(array)
        values = array if codec.rounds else self._with_residual(array)
        rows = codec.encode(values)
        parts = _parts(len(rows), engine.size)
        handle = engine.alltoall_async(rows, splits=parts, name=f"{name}.scatter")
        if not codec.rounds:
            self._next["residual"] = values - codec.decode(rows, array)[:length]
        received, mine = (yield handle), parts[engine.rank]
        total = codec.decode(received[:mine], array)
        for rank in range(1, engine.size):
            total += codec.decode(received[rank * mine : (rank + 1) * mine], array)
        if not codec.rounds:
            total = self._with_residual(total, "part_residual")
        rows = codec.encode(total)
        handle = engine.allgather_async(rows, name=f"{name}.gather")
        if not codec.rounds:
            self._next["part_residual"] = total - codec.decode(rows, array)
        return codec.decode((yield handle), array)[:length]

    def release(self, engine: Engine) -> Any | None:
        kept, part = super().release(engine), self._now["part_residual"]
        self._now["part_residual"] = None
        if kept is not None and part is not None:
            rows = -(-len(kept) // self._codec.block)
            begin = sum(_parts(rows, engine.size)[: engine.rank]) * self._codec.block
            part = part[: max(0, len(kept) - begin)]  # without the last row's filling
            kept[begin : begin + len(part)] += part
        return kept


def _parts(rows: int, ranks: int) -> list[int]:
    """How many rows each rank is dealt."""
    each, more = divmod(rows, ranks)
    return [each + (rank < more) for rank in range(ranks)]


class Sparse(_Feedback):
    """Sums of each rank's largest entries.

    Args:
        warmup_steps: exact sums for so many steps, while gradients still change their direction.
    """

    kept = ("residual",)
    name = "topk"

    def __init__(self, codec: TopK, *, warmup_steps: int = 0) -> None:
        super().__init__()
        self._codec, self._warmup_steps = codec, warmup_steps

    def steps(self, engine: Engine, array: Any, *, name: str) -> Steps:
        if self._step < self._warmup_steps:
            return (yield engine.allreduce_async(array, name=f"{name}.exact"))
        verbs, codec = verbs_of(array), self._codec
        values = self._with_residual(array)
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

    kept = ("residual", "q")
    name = "powersgd"

    def __init__(self, codec: LowRank, *, warmup_steps: int = 0) -> None:
        super().__init__()
        self._codec, self._warmup_steps = codec, warmup_steps

    def _q(self, like: Any) -> list[Any]:
        """Q of the last step. A column that has died out would stay so: a new one takes its place."""
        codec = self._codec
        if self._now["q"] is None:
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
        values = self._with_residual(array)
        left = yield engine.allreduce_async(codec.left(values, self._q(array)), name=f"{name}.p")
        p = [orthonormal(matrix) for matrix in codec.split_left(left)]
        own = codec.right(values, p)
        handle = engine.allreduce_async(verbs.copied(own), name=f"{name}.q")
        values -= codec.product(p, codec.split_right(own))
        self._next["residual"] = values
        right = yield handle
        self._next["q"] = right
        return codec.product(p, codec.split_right(right))
