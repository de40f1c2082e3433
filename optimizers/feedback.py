"""Sums over ranks that keep back what their codec could not send, and send it later: error feedback.

With e the residual and C the codec, in the units that are summed (weighted gradients), each rank does

    p = e + x;    q = C(p);    e = p - D(q)

so that over time everything is sent (Seide et al. 2014; Karimireddy et al. 2019, arXiv:1901.09847).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Mapping
from typing import Any

from hvd_hetero.codecs.block import BlockCodec
from hvd_hetero.codecs.lowrank import LowRank, orthonormal
from hvd_hetero.codecs.sparse import TopK
from hvd_hetero.codecs.verbs import exponent_of, verbs_of
from hvd_hetero.engine.port import Engine, Handle, Steps
from hvd_hetero.policy.partition import equal_shares

from .compressed import pieces_of

# Between two ranks so many pieces of so many values are under way at a time. Gathers go through sockets whose buffers
# the kernel sizes: with more under way than the queue of a slow link holds (1.25 MB at 100 Mbit/s and 100 ms), packets
# are lost, and TCP waits 200 ms to send them again. NCCL cuts what it sends itself, and on a GPU each piece costs.
SHORT_PIECE = 2**18
AHEAD = 2


class Feedback:
    """Arrays kept from step to step, by name, and what will replace them if the step counts."""

    def __init__(self) -> None:
        self._now: dict[str, Any] = {}
        self._next: dict[str, Any] = {}
        self._step = 0

    def _with_kept(self, array: Any, key: str) -> Any:
        """A copy of `array`, plus what was kept under `key`."""
        kept = self._now.get(key)
        return verbs_of(array).copied(array) if kept is None else array + kept

    def end_step(self, counts: bool) -> None:
        if counts:
            self._now.update(self._next)
            self._step += 1
        self._next = {}

    def release(self, engine: Engine) -> Any | None:
        kept = self._now.pop("residual", None)
        return kept if kept is None else verbs_of(kept).copied(kept)

    def state_dict(self) -> dict[str, Any]:
        return {"step": self._step, **self._now}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._now = dict(state)
        self._step = int(self._now.pop("step"))


class Gathered(Feedback):
    """Sums of blocks that cannot be summed as they travel.

    Each rank is dealt a part of the blocks: an all-to-all brings it that part from every rank, it adds them up in full
    precision, encodes the sum, and an all-gather brings the sums to all (the scatter-reduce-allgather of CGX,
    arXiv:2111.08617). That rounds twice; each rank keeps its own first error, and the second of its part. Between two
    ranks, an all-gather of everything brings as few bytes in one stage, and rounds once.

    Args:
        first: the codec of the first `warmup_steps` steps, with blocks of the same size. None: `codec`.
    """

    def __init__(self, codec: BlockCodec, *, first: BlockCodec | None = None, warmup_steps: int = 0) -> None:
        super().__init__()
        self._later, self._first, self._warmup_steps = codec, first or codec, warmup_steps
        self.name = codec.name

    @property
    def _codec(self) -> BlockCodec:
        """The codec of this step: the gentler one during the warm-up."""
        return self._first if self._step < self._warmup_steps else self._later

    def steps(self, engine: Engine, array: Any, *, name: str) -> Steps:
        values = array if self._codec.rounds else self._with_kept(array, "residual")
        if engine.size <= 2:
            return self._in_one_stage(engine, values, name=name)
        return self._in_two_stages(engine, values, name=name)

    def _in_one_stage(self, engine: Engine, values: Any, *, name: str) -> Steps:
        codec, result = self._codec, verbs_of(values).empty(values)
        pieces = pieces_of(len(values), unit=codec.block, least=None if engine.on_device(values) else SHORT_PIECE)
        under_way: deque[tuple[slice, Any, Handle]] = deque()
        for index, piece in enumerate([*pieces, *[None] * AHEAD]):
            if len(under_way) == AHEAD or (piece is None and under_way):
                at, mine, handle = under_way.popleft()
                own, rows = codec.decode(mine, values)[: at.stop - at.start], len(mine)
                received = yield handle
                result[at] = own
                if engine.size == 2:  # a sum of two is the same in either order
                    other = (1 - engine.rank) * rows
                    result[at] += codec.decode(received[other : other + rows], values)[: at.stop - at.start]
                if not codec.rounds:
                    values[at] -= own
            if piece is not None:
                encoded = codec.encode(values[piece])
                handle = engine.allgather_async(encoded, name=f"{name}.all.{index}")
                under_way.append((piece, encoded, handle))
        if not codec.rounds:
            self._next["residual"] = values
        return result

    def _in_two_stages(self, engine: Engine, array: Any, *, name: str) -> Steps:
        codec, values, handles, encoded = self._codec, array, [], []
        pieces = pieces_of(len(array), unit=codec.block)
        for index, piece in enumerate(pieces):
            encoded.append(codec.encode(values[piece]))
            parts = equal_shares(len(encoded[-1]), engine.size)
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
        for index, piece in enumerate(pieces_of(len(kept), unit=self._codec.block)):
            part, length = self._now.pop(f"part.{index}", None), piece.stop - piece.start
            if part is not None:
                rows = -(-length // self._codec.block)
                begin = piece.start + sum(equal_shares(rows, engine.size)[: engine.rank]) * self._codec.block
                part = part[: max(0, piece.stop - begin)]  # without the last row's filling
                kept[begin : begin + len(part)] += part
        return kept


class WarmedUp(Feedback, ABC):
    """Exact sums at first, while gradients still change their direction.

    Args:
        warmup_steps: for so many steps.
    """

    def __init__(self, *, warmup_steps: int) -> None:
        super().__init__()
        self._warmup_steps = warmup_steps

    def steps(self, engine: Engine, array: Any, *, name: str) -> Steps:
        if self._step < self._warmup_steps:
            return (yield engine.allreduce_async(array, name=f"{name}.exact"))
        return (yield from self._compressed(engine, array, name=name))

    @abstractmethod
    def _compressed(self, engine: Engine, array: Any, *, name: str) -> Steps:
        """The collectives of a sum after the first steps."""


class Sparse(WarmedUp):
    """Sums of each rank's largest entries."""

    name = "topk"

    def __init__(self, codec: TopK, *, warmup_steps: int = 0) -> None:
        super().__init__(warmup_steps=warmup_steps)
        self._codec = codec

    def _compressed(self, engine: Engine, array: Any, *, name: str) -> Steps:
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


FAR = 2.0**20


class Factored(WarmedUp):
    """Sums of matrices as products of thin ones (PowerSGD)."""

    name = "powersgd"

    def __init__(self, codec: LowRank, *, warmup_steps: int = 0) -> None:
        super().__init__(warmup_steps=warmup_steps)
        self._codec = codec

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        if "q" in self._now and len(self._now["q"]) != self._codec.right_length:
            del self._now["q"]  # of factors of another rank

    def _q(self, like: Any) -> list[Any]:
        """Q of the last step. A column that has died out would stay so: a new one takes its place. Columns that are far
        from 1 are brought there: P is M times these, and would go with the square of the gradients."""
        codec = self._codec
        if "q" not in self._now:
            return codec.first_q(like)
        chosen = codec.split_right(verbs_of(like).copied(self._now["q"]))
        largest = verbs_of(like).joined([verbs_of(like).row_largest(matrix.T) for matrix in chosen]).tolist()
        for index, matrix in enumerate(chosen):
            for column in range(matrix.shape[1]):
                most = largest.pop(0)
                if most == 0.0:
                    seed = (codec.seed + 7919 * self._step + 31 * index + column) % 2**32
                    matrix[:, column] = verbs_of(like).seeded((len(matrix),), seed, like)
                elif not 1.0 / FAR < most < FAR and math.isfinite(most):
                    matrix[:, column] *= math.ldexp(1.0, min(-exponent_of(most), 120))
        return chosen

    def _compressed(self, engine: Engine, array: Any, *, name: str) -> Steps:
        verbs, codec = verbs_of(array), self._codec
        values = self._with_kept(array, "residual")
        left = yield engine.allreduce_async(codec.left(values, self._q(array)), name=f"{name}.p")
        p = orthonormal(codec.split_left(left))
        own = codec.right(values, p)
        handle = engine.allreduce_async(verbs.copied(own), name=f"{name}.q")
        codec.subtract_product(values, p, codec.split_right(own))
        self._next["residual"] = values
        right = yield handle
        self._next["q"] = right
        codec.product_into(array, p, codec.split_right(right))
        return array
