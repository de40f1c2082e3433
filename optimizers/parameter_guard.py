"""Checks that all ranks hold the same parameters after synchronous steps, and are at the same batch of the data.

Every K exchanges each rank puts a hash of its parameters into the control vector, so the check costs no message. With
its hash, rank 0 says when the next check is due: K is chosen such that hashes take a small part of the time.

If hashes differ, all ranks compare their parameters with rank 0's. Mixed hardware rounds differently (other vector
units, another generation of GPU), and such differences grow from step to step in any data-parallel training. So if
they are no larger than rounding explains, all ranks take over rank 0's parameters, and training goes on. Larger
differences raise an error on every rank.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from hvd_hetero.codecs.verbs import verbs_of
from hvd_hetero.engine.port import Engine
from hvd_hetero.policy.rank_words import ranks_text

from .control import ParameterComparison
from .parameter_store import ParameterStore

BUDGET = 0.0005  # the part of rank 0's time that hashes may take; a rank of a tenth of its speed needs ten times that
FIRST = 1  # the exchange of the first check, counted from 0: it is over the parameters after one update
SHORTEST, LONGEST = 16, 2**16  # the least and the most exchanges from one check to the next
TOLERANCE = 1e-3  # L2 norm of a difference over that of rank 0's parameters: what is above is not rounding
HASHES = 2**24 - 1  # the number of different hashes; with 1 added, each is exact in fp32


class DivergedError(RuntimeError):
    """Raised on all ranks: they hold different parameters, or are at different batches, where they must not."""


def check_together(batches: Sequence[int], ranks: Sequence[int]) -> None:
    """Raises DivergedError, on all ranks alike, if ranks have exchanged gradients of different global batches.

    Args:
        batches: the number of each rank's global batch; below 0 if it has sent none, as after `hvd.join()`.
        ranks: the ranks' numbers in the job, for the message.
    """
    at: dict[int, list[int]] = {}
    for rank, batch in zip(ranks, batches, strict=True):
        if batch >= 0:
            at.setdefault(batch, []).append(rank)
    if len(at) <= 1:
        return
    found = "; ".join(f"batch {batch} on {ranks_text(which)}" for batch, which in sorted(at.items()))
    raise DivergedError(
        # Without the words by which scripts tell what to catch and go on from: "out of memory".
        f"Expected gradients of the same global batch from every rank. Received: {found}. A rank that cannot compute "
        "its part of a batch (too large, say) takes part without it: balancer.count(0), optimizer.step(). One that "
        "wants to stop says balancer.ask_to_stop(). All ranks take as many batches from a loader, also where one only "
        "looks at a batch (its dataset has samples to look at); they make as many backward passes over a batch, unless "
        "it is in balancer.micro_batches(batch) or with backward_passes_per_step; and all or none load a state of the "
        "balancer."
    )


def check_origins(origins: Sequence[int], ranks: Sequence[int]) -> None:
    """Raises DivergedError, on all ranks alike, if the ranks' loaders are at different epochs or places of the data.

    Args:
        origins: for each rank a number that stands for where its batch is from; below 0 if it has sent none.
        ranks: the ranks' numbers in the job, for the message.
    """
    first = next((origin for origin in origins if origin >= 0), -1)
    if others := [rank for rank, origin in zip(ranks, origins, strict=True) if origin not in (-1, first)]:
        raise DivergedError(
            "Expected the same batch of the same epoch from the loader of every rank. Received: another one on "
            f"{ranks_text(others)} than on the first that told, so that samples are used twice or never. Pass the same "
            "epoch to set_epoch() on all ranks, and load a loader's state on all or none. An IterableDataset or a "
            "sampler gives the same in the same order on every rank: what splits it by rank is to be left out, and "
            "what shuffles it by numbers of its own needs a seed; or it is sharded=True, with samples of each rank's "
            "own."
        )


class ParameterGuard:
    """Checks now and then that all ranks hold the same parameters. `GradientExchange` calls it with each exchange.

    Args:
        engine: the ranks that train together.
        parameters: returns this rank's parameters; None, on all ranks, while they are not known yet.
        name: prefix of the operations' names, the same on all ranks.
        tell: is called with the ranks that differ and by how much, for the trace, when rank 0's parameters were taken.
        clock: returns seconds.
    """

    def __init__(
        self,
        engine: Engine,
        parameters: Callable[[], ParameterStore | None],
        *,
        name: str,
        tell: Callable[[dict[str, Any]], None],
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._engine, self._parameters, self._name = engine, parameters, name
        self._tell, self._clock = tell, clock
        self._exchanges, self._due = 0, FIRST
        self._last = clock()  # when the last check ended on this rank
        self._looked = 0  # the exchange of the last check

    def outgoing(self) -> ParameterComparison:
        """What this rank sends for the check with the next exchange; zeros if none is due."""
        if self._exchanges < self._due or (parameters := self._parameters()) is None:
            return ParameterComparison()
        start = self._clock()
        found = 0
        for index in range(len(parameters.lossy)):
            found = (found * 31 + parameters.checksum(index)) % HASHES
        cost_s = self._clock() - start
        step_s = (start - self._last) / max(1, self._exchanges - self._looked)
        # At the first check, it is not known yet how long steps take.
        exchanges = math.ceil(cost_s / max(BUDGET * step_s, 1e-9)) if self._looked else SHORTEST
        self._last, self._looked = start + cost_s, self._exchanges
        return ParameterComparison(hash=1 + found, interval=min(LONGEST, max(SHORTEST, exchanges)))

    def incoming(self, hashes: Sequence[int], interval: int) -> None:
        """Takes in the hashes of all ranks, and ends one exchange. If hashes differ, this is a collective call.

        Args:
            hashes: of each rank; 0 for one that has sent none.
            interval: the number of exchanges from this check to the next, as rank 0 said.

        Raises:
            DivergedError: on every rank, if parameters differ by more than rounding.
        """
        said, self._exchanges = self._exchanges, self._exchanges + 1
        if not hashes or hashes[0] == 0:
            return
        self._due = said + interval
        others = [rank for rank, value in enumerate(hashes) if value not in (0, hashes[0])]
        if others:
            self._reconcile(others)

    def _reconcile(self, others: Sequence[int]) -> None:
        """Compares this rank's parameters with rank 0's, and takes rank 0's if no rank differs by more than rounding.
        `others`: the ranks whose hashes differ. A collective call."""
        parameters, engine = self._parameters(), self._engine
        assert parameters is not None
        squared, whole = 0.0, 0.0
        for index in range(len(parameters.lossy)):
            difference, norm = self._compare(parameters, index)
            squared, whole = squared + difference, whole + norm
        off = math.sqrt(squared / whole) if whole else math.sqrt(squared)
        row = np.array([off if math.isfinite(off) else math.inf])
        most = float(engine.allreduce_async(row, name=f"{self._name}.guard", op="max").wait()[0])
        first = engine.ranks[0]
        if most > TOLERANCE:
            raise DivergedError(
                f"Expected the same parameters on every rank after each step. Received: others than rank {first}'s on "
                f"{ranks_text([engine.ranks[rank] for rank in others])}, by {most:.2g} of their norm. Broadcast them "
                f"from rank {first} before training (hvd.broadcast_parameters; Keras: hvd.broadcast_variables), and "
                "change parameters and gradients on all ranks alike (PyTorch: who leaves backward() out calls "
                "optimizer.synchronize() before clipping, and who clips takes the norm of the optimizers' parameters)."
            )
        for index in range(len(parameters.lossy)):  # sent again, so that no rank has to hold a copy of the whole model
            parameters.write(index, self._first(parameters, index))
        self._tell({"ranks": list(others), "off": most})

    def _compare(self, parameters: ParameterStore, index: int) -> tuple[float, float]:
        """Returns, of fragment `index`, the squared norms of this rank's difference from rank 0's parameters, and of
        these. A collective call."""
        first = self._first(parameters, index)
        squared_norm = verbs_of(first).squared_norm
        return float(squared_norm(first - parameters.read(index))), float(squared_norm(first))

    def _first(self, parameters: ParameterStore, index: int) -> Any:
        """Returns a copy of rank 0's fragment `index`. A collective call."""
        flat = parameters.read(index)
        return self._engine.broadcast_async(flat, root=0, name=f"{self._name}.guard.{index}").wait()
