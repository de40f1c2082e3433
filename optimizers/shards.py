"""Deals streams that are each rank's own: a rank's samples of a global batch are what its stream yields next.

Horovod's scripts split large data in this way, each rank reading its own files. A rank with a larger share uses up more
of its stream, so streams are begun anew where they end, and an epoch is a number of global batches.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from .agreement import agree_on
from .argument import check_whole
from .balancer import Balancer
from .sampler import agreement_of
from .stream import Order, Start, StreamPlace, StreamSampler

SHARDS = "streams of the ranks' own (sharded=True)"
STATE = "state"  # as `resumes`: a stream goes on from what its own `state_dict()` gave


def check_steps(steps: int | None) -> None:
    """Raises ValueError for what is not the length of an epoch in global batches."""
    if steps is None:
        raise ValueError(
            "steps_per_epoch: expected the number of global batches of an epoch, as the ranks' streams do not end "
            "together: the samples of all of them divided by the global batch, for instance. Received: none."
        )
    check_whole("steps_per_epoch", steps, least=1)


def check_resumes(resumes: bool | str) -> None:
    """Raises ValueError for what does not say how a rank goes on in its stream."""
    if resumes not in (True, False, STATE):
        raise ValueError(f'resumes: expected True, False or "{STATE}". Received: {resumes!r}.')


def check_unsharded(steps: int | None, resumes: bool | str, *, instead: str = "") -> None:
    """Raises TypeError for arguments that are for streams of the ranks' own alone.

    Args:
        instead: what to do in place of giving `steps`, for the error.
    """
    if steps is not None:
        raise TypeError(
            "steps_per_epoch: expected none, as an epoch is all of the data, except with sharded=True. Received: "
            f"{steps!r}.{instead}"
        )
    if resumes is not True:
        raise TypeError(
            "resumes: expected True, as a state has the place in the data, except with sharded=True. Received: "
            f"{resumes!r}. To begin the data anew, load no state into it."
        )


class ShardSampler(StreamSampler):
    """Says how many samples of its own stream this rank takes for each global batch. Constructing one is a collective
    call.

    Args:
        steps: global batches of an epoch.
        balancer: gives the shares.
        seed: random numbers that are drawn while reading are seeded with it.
        lookahead: how many batches may be ordered before they are used.
        readers: the number of this rank's reading processes, which take turns, in each epoch from the first on.
        resumes: whether the state of a rank has the place in its stream; `STATE`: as the stream itself keeps it.

    Attributes:
        resumes: as given.
        passed_over: how many orders of the present iteration come before the first of a batch.

    Raises:
        TypeError: `balancer` is not a balancer.
        ValueError: on every rank, when arguments differ between ranks or are wrong.
    """

    def __init__(
        self,
        steps: int | None,
        *,
        balancer: Balancer,
        seed: int,
        lookahead: int,
        readers: int,
        resumes: bool | str,
    ) -> None:
        self._asked, self._readers, self.resumes = steps, readers, resumes
        self._start = Start(0, {})  # with the places after the batch in use
        self._ranks: tuple[int, int] | None = None  # the rank whose places these are, and how many there are
        super().__init__(None, balancer=balancer, seed=seed, drop_last=False, workers=0, lookahead=lookahead)

    def _agree(self) -> None:
        alike = {"dataset length": SHARDS, "steps_per_epoch": self._asked, "seed": self.seed}
        agree_on(self.balancer.engine, alike, name=agreement_of(self.balancer))
        check_steps(self._asked)  # the same on all ranks by now
        self.steps = int(self._asked or 0)
        self.length = self.steps * self.balancer.global_batch_size
        ranks = self.balancer.rank, self.balancer.size
        if ranks != self._ranks:  # in an elastic job other ranks have other streams
            self._ranks, self._start = ranks, Start(self._start.number + 1, {})

    def begin(self) -> bool:
        """Begins an iteration. Returns False if nothing of the epoch is left."""
        goes_on = super().begin()
        self.passed_over = self.position % self._readers
        return goes_on

    def orders(self) -> Iterator[Order]:
        """Yields the orders of an iteration: one for each global batch that is left of the epoch. First come those with
        which readers pass over their turns in the batches used before, so that each takes the turns that it would have
        had in an uninterrupted epoch."""
        run, epoch, rank, start = self.run, self.epoch, self.balancer.rank, self._start
        for _ in range(self.passed_over):
            yield Order(run, epoch, rank, None, start)
        for ordered in range(self.steps - self.position):
            if ordered == self._readers:
                start = Start(start.number, {})  # each has been told its place, which may be a large object
            shares = self.balancer.deal(self.balancer.step + 1 + ordered - self._answers).shares
            yield Order(run, epoch, rank, tuple(shares), start)

    def reached(self, reader: int, place: StreamPlace) -> None:
        """Says where in its stream a reader is after the batch that is in use now."""
        if self.resumes:
            self._start = Start(self._start.number, {**self._start.places, reader: place})

    def own_state_dict(self) -> dict[str, Any]:
        """The places of this rank's readers in their streams: the reader, and `StreamPlace.saved`, of each."""
        if not self.resumes:
            return {}
        places = [[reader, *place.saved] for reader, place in self._start.places.items()]
        return {"ranks": self._ranks, "readers": self._readers, "places": places}

    def load_own_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from the places of `state`, if it is that of this rank among as many, with as many readers."""
        if self.resumes and state and (tuple(state["ranks"]), state["readers"]) == (self._ranks, self._readers):
            places = {reader: StreamPlace.restored(place) for reader, *place in state["places"]}
            self._start = Start(self._start.number + 1, places)

    @property
    def _order(self) -> dict[str, int]:
        return {"global_batch_size": self.balancer.global_batch_size, "steps_per_epoch": self.steps}
