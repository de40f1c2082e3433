"""Deals streams that are each rank's own: a rank's samples of a global batch are what its stream yields next.

Horovod's scripts split large data in this way, each rank reading its own files. A rank with a larger share uses up more
of its stream, so streams are begun anew where they end, and an epoch is a number of global batches.
"""

from __future__ import annotations

from collections.abc import Iterator

from .agreement import agree_on
from .argument import check_whole
from .balancer import Balancer
from .sampler import agreement_of
from .stream import Order, StreamSampler

SHARDS = "streams of the ranks' own (sharded=True)"


def check_steps(steps: int | None) -> None:
    """Raises ValueError for what is not the length of an epoch in global batches."""
    if steps is None:
        raise ValueError(
            "steps_per_epoch: expected the number of global batches of an epoch, as the ranks' streams do not end "
            "together: the samples of all of them divided by the global batch, for instance. Received: none."
        )
    check_whole("steps_per_epoch", steps, least=1)


def check_no_steps(steps: int | None, *, instead: str = "") -> None:
    """Raises TypeError if the length of an epoch is given for data that has one itself.

    Args:
        instead: what to do, for the error.
    """
    if steps is not None:
        raise TypeError(
            "steps_per_epoch: expected none, as an epoch is all of the data, except with sharded=True. Received: "
            f"{steps!r}.{instead}"
        )


class ShardSampler(StreamSampler):
    """Says how many samples of its own stream this rank takes for each global batch. Constructing one is a collective
    call.

    Args:
        steps: global batches of an epoch.
        balancer: gives the shares.
        seed: random numbers that are drawn while reading are seeded with it.
        lookahead: how many batches may be ordered before they are used.

    Raises:
        TypeError: `balancer` is not a balancer.
        ValueError: on every rank, when arguments differ between ranks or are wrong.
    """

    def __init__(self, steps: int | None, *, balancer: Balancer, seed: int, lookahead: int) -> None:
        self._asked = steps
        super().__init__(None, balancer=balancer, seed=seed, drop_last=False, workers=0, lookahead=lookahead)

    def _agree(self) -> None:
        alike = {"dataset length": SHARDS, "steps_per_epoch": self._asked, "seed": self.seed}
        agree_on(self.balancer.engine, alike, name=agreement_of(self.balancer))
        check_steps(self._asked)  # the same on all ranks by now
        self.steps = int(self._asked or 0)
        self.length = self.steps * self.balancer.global_batch_size

    def orders(self) -> Iterator[Order]:
        """Yields the orders of an iteration: one for each global batch that is left of the epoch."""
        run, epoch = self.run, self.epoch
        for ordered in range(self.steps - self.position):
            shares = self.balancer.deal(self.balancer.step + 1 + ordered - self._answers).shares
            yield Order(run, epoch, self.balancer.rank, tuple(shares))

    @property
    def _order(self) -> dict[str, int]:
        return {"global_batch_size": self.balancer.global_batch_size, "steps_per_epoch": self.steps}
