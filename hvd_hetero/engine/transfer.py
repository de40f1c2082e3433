"""Times transfers between pairs of ranks, for `probe`, by collectives of the engine.

No process set is made for a pair, because it would have to exist on all ranks and slow every cycle of Horovod. Instead
all ranks call one all-to-all in which a rank sends rows to its partner only. So a time is that of a collective *through
Horovod*: it includes the negotiation and the empty messages to all other ranks, and nothing is subtracted.

- Both partners send at once, as neighbours in a ring do: the bandwidth is that of each direction while both are in use.
- All ranks start from a common small all-reduce. A transfer's time is the smaller of the partners': the earlier one
  also waits for the later to arrive, the later one sees the transfer alone.
- A transfer that takes STALL_S longer than the fastest of its size, and a multiple, was held up: a delayed
  acknowledgement of TCP (40 ms), a retransmission (200 ms). It tells nothing of the link's speed, is left out of the
  fit and counted instead.
- Sizes grow until a transfer takes long enough for its size to show, or the time allowed is used up. All ranks judge by
  the same exchanged times, hence make the same calls.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from hvd_hetero.policy.link import Link, fit_link

from .port import Engine

SMALLEST_BYTES = 1 << 10
LARGEST_BYTES = 1 << 24
GROWTH = 4
LONG_ENOUGH_S = 0.06        # beyond the time of the smallest size: a thousand times the error of a timer
REPEATS = 3
SMALL_BYTES = 1 << 16       # transfers up to this size are cheap and noisy, and repeated more often
SMALL_REPEATS = 5
STALL_S, STALL_FACTOR = 0.03, 3.0
WARM_UP_BYTES = 1 << 18
_SHORTEST_S = 1e-9

Pair = tuple[int, int]


@dataclass
class _Seen:
    """The measurements of one link: sizes and seconds of transfers, without stalled ones; `done` if they suffice."""

    sizes_bytes: list[int]
    seconds: list[float]
    stalls: int = 0
    done: bool = False

    def add(self, size: int, times: np.ndarray) -> None:
        fastest = float(times.min())
        kept = times[times <= max(fastest + STALL_S, fastest * STALL_FACTOR)]
        self.stalls += len(times) - len(kept)
        self.sizes_bytes += [size] * len(kept)
        self.seconds += kept.tolist()
        # Judged by the fastest transfer: on a rank with little CPU, some transfers of any size take long.
        self.done = fastest - min(self.seconds) > LONG_ENOUGH_S


class Timer:
    """Times transfers on one engine; every method is a collective call."""

    def __init__(self, engine: Engine, *, name: str, clock: Callable[[], float]) -> None:
        self._engine, self._name, self._clock = engine, name, clock
        self._began_s = clock()
        self._transfers = self._stalls = 0

    @functools.cached_property
    def _noise(self) -> np.ndarray:
        """Random bytes to send, which no layer of the network can compress."""
        return np.random.default_rng(0).integers(0, 256, LARGEST_BYTES, dtype=np.uint8)

    def elapsed_s(self) -> float:
        """Seconds since this timer was made: the maximum over the ranks, the same on all of them."""
        mine = np.array([self._clock() - self._began_s])
        return float(self._engine.allreduce_async(mine, name=f"{self._name}.elapsed", op="max").wait()[0])

    @property
    def stalled(self) -> float:
        """The fraction of all transfers so far that stalled; the same on all ranks. Not a collective call."""
        return self._stalls / max(self._transfers, 1)

    def warm_up(self) -> None:
        """Brings the connections into the state that they have in training, by one all-reduce of `WARM_UP_BYTES`.

        Without our repair `gloo_send_buffer`, Gloo sets a connection's send buffer to the size of the largest message
        of an all-reduce so far, and no other operation enlarges it. After only small all-reduces (4.5 kB), transfers of
        other collectives stall for 40 ms to seconds.
        """
        array: np.ndarray = np.zeros(WARM_UP_BYTES // 4, np.float32)
        self._engine.allreduce_async(array, name=f"{self._name}.warm_up").wait()

    def empty_s(self) -> float:
        """The duration of the all-to-all when no rank sends anything, in seconds: Horovod's part of each latency."""
        table, _ = self._times([], SMALLEST_BYTES, f"{self._name}.empty", self._clock(), math.inf)
        return float(np.min(np.max(table, axis=0)))

    def links(self, pairs: Sequence[Pair], *, title: str, allowed_s: float) -> dict[Pair, Link]:
        """Measures the links of disjoint pairs of ranks, which transfer at the same time.

        Args:
            pairs: the pairs, the same on all ranks.
            title: distinguishes the names of this call's operations.
            allowed_s: the approximate longest duration, in seconds. The smallest size is measured at least once, even
                if that takes longer.
        """
        seen = {pair: _Seen([], []) for pair in pairs}
        size, before_s = SMALLEST_BYTES, 0.0
        start_s = self._clock()
        while True:
            active = [pair for pair in pairs if not seen[pair].done]
            table, elapsed_s = self._times(active, size, f"{self._name}.{title}.{size}", start_s, allowed_s)
            for a, b in active:
                seen[a, b].add(size, np.maximum(np.minimum(table[a], table[b]), _SHORTEST_S))
            next_s = GROWTH * (elapsed_s - before_s)        # no part of a transfer grows faster than its size
            if all(link.done for link in seen.values()) or elapsed_s + next_s > allowed_s:
                break
            size, before_s = size * GROWTH, elapsed_s
            if size > LARGEST_BYTES:
                break
        self._stalls += sum(link.stalls for link in seen.values())
        self._transfers += sum(link.stalls + len(link.seconds) for link in seen.values())
        return {pair: fit_link(link.sizes_bytes, link.seconds) for pair, link in seen.items()}

    def _times(self, active: Sequence[Pair], size: int, name: str, start_s: float,
               allowed_s: float) -> tuple[np.ndarray, float]:
        """Times transfers of `size` bytes by the `active` pairs at once. Returns the same on all ranks.

        Repeats end early when `allowed_s` seconds have passed since `start_s`, so that a link that stalls does not use
        up the budget.

        Returns:
            The seconds of each transfer, an array of (ranks, repeats); and the seconds since `start_s`, the maximum
            over the ranks.
        """
        engine = self._engine
        partner = next((sum(pair) - engine.rank for pair in active if engine.rank in pair), None)
        splits = [size if rank == partner else 0 for rank in range(engine.size)]
        rows = self._noise[:sum(splits)]
        small = size <= SMALL_BYTES
        # Horovod negotiates faster for a name that it has seen before, as in training: the first transfer is left out.
        repeats, unseen = (SMALL_REPEATS, 1) if small else (REPEATS, 0)
        mine: list[float] = []
        for repeat in range(unseen + repeats):
            # what all ranks start from, and what each knows of the time that has passed
            passed = np.array([self._clock() - start_s])
            passed = engine.allreduce_async(passed, name=f"{self._name}.start", op="max").wait()
            if mine and float(passed[0]) > allowed_s:
                break
            before_s = self._clock()
            engine.alltoall_async(rows, splits=splits, name=name).wait()
            if repeat >= unseen:
                mine.append(self._clock() - before_s)
        row = np.array([[*mine, self._clock() - start_s]])
        table = np.asarray(engine.allgather_async(row, name=f"{name}.times").wait())
        return table[:, :-1], float(table[:, -1].max())
