"""Sums over ranks with error feedback: what a codec could not send is kept as a residual, and sent later.

With x the array to be summed (a weighted gradient), e the residual, C the encoder and D the decoder, each rank does

    p = e + x;    q = C(p);    e = p - D(q)

and sends q, so that over time everything is sent (Seide et al. 2014; Karimireddy et al. 2019, arXiv:1901.09847). Each
class here is a `reduction.Reduction` of one array; `Route` uses one for each level of ranks.
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

from .reduction import pieces_of

# Two ranks exchange an array in pieces of about SHORT_PIECE values, at most AHEAD of them under way at a time. Gathers
# go through sockets whose buffers the kernel sizes: with more under way than the queue of a slow link holds (1.25 MB at
# 100 Mbit/s and 100 ms), packets are lost, and TCP waits 200 ms to send them again. On a GPU pieces are longer
# (`reduction.PIECE`): NCCL divides what it sends by itself, and each piece costs time.
SHORT_PIECE = 2**18
AHEAD = 2


class FeedbackSum:
    """Base class: keeps arrays of a reduction from step to step, by key, and replaces them if a step counts.

    During a step, `_now` holds what earlier steps kept (such as the "residual"), and subclasses write what is to
    replace it to `_next`. `end_step` takes that over if the step counts, and drops it otherwise.
    """

    def __init__(self) -> None:
        self._now: dict[str, Any] = {}
        self._next: dict[str, Any] = {}
        self._step = 0

    def _with_kept(self, array: Any, key: str) -> Any:
        """Returns a new array: `array` plus what is kept under `key`, if anything."""
        kept = self._now.get(key)
        return verbs_of(array).copied(array) if kept is None else array + kept

    def end_step(self, counts: bool) -> None:
        """Ends a step. One that does not count (not finite, or a rank failed) leaves what was kept before."""
        if counts:
            self._now.update(self._next)
            self._step += 1
        self._next = {}

    def take_residual(self, engine: Engine) -> Any | None:
        """Returns this rank's residual, as long as the array, and keeps it no longer; None if there is none."""
        kept = self._now.pop("residual", None)
        return kept if kept is None else verbs_of(kept).copied(kept)

    def state_dict(self) -> dict[str, Any]:
        """The number of steps that counted, and the kept arrays (not copied)."""
        return {"step": self._step, **self._now}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._now = dict(state)
        self._step = int(self._now.pop("step"))


class GatheredSum(FeedbackSum):
    """Sums arrays through a block codec, whose encoded rows cannot be summed: ranks gather, decode and add them.

    With more than two ranks, each rank sums a part of the blocks: an all-to-all brings it that part from every rank, it
    decodes and adds them in full precision and encodes the sum, and an all-gather brings the encoded sums to all ranks
    (the scatter-reduce-allgather of CGX, arXiv:2111.08617). Values are rounded twice: each rank keeps the error of its
    own array as "residual", and the error of the sums of its part as "part.<piece>". Two ranks gather everything
    instead, which takes as few bytes in one stage, and rounds once.

    Args:
        codec: the codec after the warm-up.
        first: the codec of the first `warmup_steps` steps, with blocks of the same size. None: `codec`.
    """

    def __init__(self, codec: BlockCodec, *, first: BlockCodec | None = None, warmup_steps: int = 0) -> None:
        super().__init__()
        self._later, self._first, self._warmup_steps = codec, first or codec, warmup_steps
        self.name = codec.name

    @property
    def _codec(self) -> BlockCodec:
        """The codec of the present step: `first` during the warm-up, `codec` afterwards."""
        return self._first if self._step < self._warmup_steps else self._later

    def steps(self, engine: Engine, array: Any, *, name: str) -> Steps:
        """The collectives of one sum of `array`; returns the sum. See `Reduction.steps`."""
        values = array if self._codec.rounds else self._with_kept(array, "residual")
        if engine.size <= 2:
            return self._in_one_stage(engine, values, name=name)
        return self._in_two_stages(engine, values, name=name)

    def _in_one_stage(self, engine: Engine, values: Any, *, name: str) -> Steps:
        """Sums over one or two ranks: gathers all encoded pieces, with at most `AHEAD` of them under way."""
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
        """Sums over three ranks or more: an all-to-all of each piece's blocks, then an all-gather of their sums."""
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
        """Adds up the rows of this rank's part of a piece, and encodes the sum.

        Args:
            received: the rows that the ranks sent, by rank; of all ranks equally many.
            like: an array of the type to decode to.
            ranks: how many ranks sent.
            key: under which the error of the encoding is kept.
        """
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

    def take_residual(self, engine: Engine) -> Any | None:
        """See `FeedbackSum.take_residual`; the errors of this rank's part of the sums are added at their places."""
        kept = super().take_residual(engine)
        if kept is None:
            return None
        for index, piece in enumerate(pieces_of(len(kept), unit=self._codec.block)):
            part, length = self._now.pop(f"part.{index}", None), piece.stop - piece.start
            if part is not None:
                rows = -(-length // self._codec.block)
                begin = piece.start + sum(equal_shares(rows, engine.size)[: engine.rank]) * self._codec.block
                part = part[: max(0, piece.stop - begin)]  # without the padding of the last row
                kept[begin : begin + len(part)] += part
        return kept


class WarmedUpSum(FeedbackSum, ABC):
    """Base class: sums exactly at first, while gradients still change their direction, and compressed later.

    Args:
        codec: compresses.
        warmup_steps: number of first steps with exact sums.
    """

    def __init__(self, codec: Any, *, warmup_steps: int) -> None:
        super().__init__()
        self._codec, self._warmup_steps = codec, warmup_steps

    def steps(self, engine: Engine, array: Any, *, name: str) -> Steps:
        """The collectives of one sum of `array`; returns the sum. See `Reduction.steps`."""
        if self._step < self._warmup_steps:
            return (yield engine.allreduce_async(array, name=f"{name}.exact"))
        return (yield from self._compressed(engine, array, name=name))

    @abstractmethod
    def _compressed(self, engine: Engine, array: Any, *, name: str) -> Steps:
        """The collectives of one sum of `array` after the warm-up; returns the sum, and may overwrite `array`."""


class TopKSum(WarmedUpSum):
    """Sums only the largest entries of each rank's array, which all ranks gather; the others stay in its residual."""

    name = "topk"
    _codec: TopK

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


FAR = 2.0**20  # a column of Q whose largest entry is not between 1 / FAR and FAR is scaled to about 1


class PowerSGDSum(WarmedUpSum):
    """Sums matrices as products P Q^T of thin ones (PowerSGD, see `codecs.lowrank`); Q is kept for the next step."""

    name = "powersgd"
    _codec: LowRank

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        if "q" in self._now and len(self._now["q"]) != self._codec.right_length:
            del self._now["q"]  # of another number of columns, `LowRank.ranks`

    def _q(self, like: Any) -> list[Any]:
        """Returns the Q of each matrix, [columns, rank], that this step starts from: that of the last step.

        A column of zeros would stay zero: a random one takes its place, the same on all ranks. A column far from 1 is
        scaled to about 1: Q grows with the gradients M, and so P = M Q would grow with their square.
        """
        codec = self._codec
        if "q" not in self._now:
            return codec.first_q(like)
        chosen = codec.split_right(verbs_of(like).copied(self._now["q"]))
        largest = verbs_of(like).joined([verbs_of(like).row_largest(matrix.T) for matrix in chosen]).tolist()
        for index, matrix in enumerate(chosen):
            for column in range(matrix.shape[1]):
                most = largest.pop(0)
                if most == 0.0:
                    seed = (7919 * self._step + 31 * index + column) % 2**32
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
