"""Deals the samples of a dataset: each rank gets its part of every global batch, from one global order per epoch."""

from __future__ import annotations

import contextlib
import threading
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from .agreement import agree_on, heard
from .argument import check_integer, check_state, check_whole
from .balancer import Balancer, check_balancer
from .control import ORIGINS
from .dealer import Dealer, cut

LOADED = (
    "Expected a new loop over data that is dealt to ranks after its place was loaded (state.restore(), "
    "load_state_dict()). Received: the next batch of the loop that was under way, from which samples would be missing. "
    "Leave the loop, and begin it anew."
)
SAME_DATA = "checksum of the data (every rank needs all of it, and the same seed for a random split)"


class Dealt(NamedTuple):
    """This rank's part of a global batch.

    Attributes:
        indices: indices of samples in the dataset, at least one, so that the batch that is loaded has a shape.
        used: the number of samples of this rank. 0 if it has none in a short batch; `indices` has one of another rank's
            samples then.
        epoch: the epoch that the batch belongs to.
        whole: the number of samples of the global batch.
    """

    indices: np.ndarray
    used: int
    epoch: int
    whole: int


def agreement_of(balancer: Balancer) -> str:
    """The name under which ranks agree about what deals the samples, when that is made and after an elastic reset."""
    return f"hvd_hetero.{balancer.name}.dealer"


@contextlib.contextmanager
def arguments_heard(balancer: Balancer) -> Iterator[None]:
    """A context for what a rank does before it makes what deals the samples: of an error in it the others hear when
    they make theirs, and raise. See `heard`.

    Raises:
        TypeError: `balancer` is not a balancer; on this rank alone, which then does not know the others.
    """
    check_balancer(balancer)
    with heard(balancer.engine, name=lambda: agreement_of(balancer)):
        yield


class ShareSampler:
    """Returns the indices of this rank's samples in each global batch. Constructing one is a collective call.

    Every sample of an epoch is dealt exactly once over all ranks, whatever the plan is. No sample is repeated to give
    all ranks the same number: the last batch of an epoch may be short (`drop_last`). Batches may be dealt before they
    are used, even by another thread and into the next epoch. Only batches that were used count as done.

    Args:
        length: samples in the dataset, the same on all ranks.
        balancer: gives the shares.
        shuffle, seed: the order of epoch e depends on the seed and e alone.
        drop_last: whether a short last batch of an epoch is dropped.
        block: so many neighbouring samples stay together in the order.
        checksum: of those parts of the data that have to be the same on all ranks.
        ordered_by: what puts the samples in the order of each epoch, if it is not this sampler, with its seed.

    Attributes:
        content: a checksum of the order of the epoch whose batches are in use, if it is another's.
        position: the number of global batches of this epoch that were used.
        loaded: how many times `load_state_dict` was called.

    Raises:
        TypeError: `balancer` is not a balancer.
        ValueError: on every rank, when the arguments differ between ranks.
    """

    def __init__(
        self,
        length: int,
        *,
        balancer: Balancer,
        shuffle: bool,
        seed: int,
        drop_last: bool,
        block: int = 1,
        checksum: int = 0,
        ordered_by: str = "",
    ) -> None:
        check_balancer(balancer)
        self.balancer, self.content = balancer, 0
        self._alike = {
            "sampler": ordered_by or "none",
            "sampler length" if ordered_by else "dataset length": length,
            "shuffle": shuffle,
            "seed": seed,
            "drop_last": drop_last,
            "block": block,
            SAME_DATA: checksum,
        }
        self._agree()
        check_whole("length", length, least=0)  # the same on all ranks by now
        check_integer("seed", seed)
        self.dealer = Dealer(
            length,
            global_batch_size=balancer.global_batch_size,
            shuffle=shuffle,
            seed=seed,
            drop_last=drop_last,
            block=block,
        )
        self.position = 0
        self.loaded = 0
        self._resumed = False  # whether a state was loaded, and no iteration begun since
        self._dealt: deque[int] = deque()  # this rank's samples of each batch that is dealt and not yet used
        self._next = 0  # the step in which the next batch to be dealt will be used; its plan gives the shares
        self._run = 0  # how many times the batches that were dealt and not used were dropped
        self._lock = threading.RLock()
        balancer.engine.on_reset_end(self.rebuild)

    def _agree(self) -> None:
        agree_on(self.balancer.engine, self._alike, name=agreement_of(self.balancer))

    def rebuild(self) -> None:
        """Drops the batches that are not used yet, so that they are dealt again to the present ranks. A collective
        call, made after an elastic reset."""
        self._agree()
        with self._lock:
            self._drop()

    @property
    def epoch(self) -> int:
        """The epoch whose samples are being used."""
        return self.dealer.epoch

    def set_epoch(self, epoch: int) -> None:
        """Sets the epoch, and starts at its beginning. If a state from within this epoch was loaded, it continues from
        there; if the state is from the end of this epoch, no batch of the epoch is left."""
        check_whole("epoch", epoch, least=0)
        if self._resumed and (epoch + 1, 0) == (self.dealer.epoch, self.position):
            self.dealer.epoch, self.position = epoch, len(self.dealer)
        elif epoch != self.dealer.epoch or not self._resumed:
            self.dealer.epoch, self.position, self._resumed = epoch, 0, False

    def bookmark(self) -> Callable[[], None]:
        """Returns a function that goes back to the present place in the data, after an iteration that was no training.
        """
        place = self.dealer.epoch, self.position, self._resumed

        def go_back() -> None:
            self.dealer.epoch, self.position, self._resumed = place

        return go_back

    def rewind(self) -> None:
        """Drops the batches that are not used yet: the next ones are dealt for the step after the present one."""
        with self._lock:
            self._drop()
            self.end_epoch()
            self._next = self.balancer.step + 1

    def _drop(self) -> None:
        """Drops the batches that are not used yet, also one that a thread deals at this moment."""
        self._dealt.clear()
        self._run += 1

    def deal(self) -> Dealt:
        """Returns this rank's part of the next global batch. May wait until the plan for its step is certain."""
        with self._lock:
            epochs, index = divmod(self.position + len(self._dealt), len(self.dealer))
            epoch = self.dealer.epoch + epochs
            batch = self.dealer.batch(epoch, index)
            step, run = self._next, self._run
        shares = self.balancer.deal(step).shares  # may wait, and `used` must not
        with self._lock:
            dealt = self._mine(batch, shares, epoch)
            if run == self._run:  # otherwise it was dropped meanwhile
                self._dealt.append(dealt.used)
                self._next = step + 1
        return dealt

    def peek(self, index: int) -> Dealt:
        """Returns this rank's part of the batch that is `index` batches after those used, as it would be dealt by the
        present plan. Does not deal it."""
        epochs, place = divmod(self.position + index, len(self.dealer))
        epoch = self.dealer.epoch + epochs
        batch = self.dealer.batch(epoch, place)
        return self._mine(batch, self.balancer.plan_at(self.balancer.step + 1 + index).shares, epoch)

    def _mine(self, batch: np.ndarray, shares: Sequence[int], epoch: int) -> Dealt:
        mine = cut(batch, shares, self.balancer.rank)
        return Dealt(mine if len(mine) else batch[:1], len(mine), epoch, len(batch))

    @property
    def pending(self) -> int:
        """The number of batches that are dealt and not yet used."""
        return len(self._dealt)

    def leave_out(self) -> None:
        """Says that nobody takes a batch that was dealt: those after it are dealt for earlier steps. It is pending
        until `used` has counted it."""
        with self._lock:
            self._next -= 1

    def used(self) -> int:
        """Says that the oldest dealt batch is in use from now on. Returns this rank's number of samples in it."""
        with self._lock:
            self.position += 1
            return self._dealt.popleft()

    @property
    def origin(self) -> int:
        """A hash, below `ORIGINS`, of the epoch and the position in it of the batch in use. Ranks compare it in each
        exchange, to notice that their loaders are at different batches. Different positions may have the same hash, but
        not for many steps. Without shuffling, the epoch is left out: all epochs have one order, or that of `content`.
        """
        order = self.dealer.epoch if self.dealer.shuffle else self.content
        return zlib.crc32(f"{order} {self.position}".encode()) % ORIGINS

    def end_epoch(self) -> None:
        """Goes to the next epoch if all batches of this one were used, so that a script without set_epoch() gets
        another order."""
        with self._lock:
            epochs, self.position = divmod(self.position, len(self.dealer))
            self.dealer.epoch += epochs
            self._resumed = False

    def state_dict(self) -> dict[str, int]:
        """The epoch, the number of its global batches that were used, and the arguments that decide the order."""
        return {
            "epoch": self.dealer.epoch,
            "position": self.position,
            "length": self.dealer.length,
            "seed": self.dealer.seed,
            "global_batch_size": self.dealer.global_batch_size,
        }

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continues from `state`, which any number of ranks may have saved.

        Raises:
            TypeError, ValueError: `state` is not that of a sampler, or was saved with another length, seed or global
                batch size.
        """
        check_state(state, "epoch", "position", "length", "seed", "global_batch_size", of="a sampler or loader")
        for name in ("length", "seed", "global_batch_size"):
            expected = getattr(self.dealer, name)
            if state[name] != expected:
                raise ValueError(
                    f"Expected the state of a sampler with {name} {expected}. Received: {state[name]}. Its place is "
                    "one in the same data, in the same order and batches."
                )
        with self._lock:
            self.dealer.epoch, self.position, self._resumed = state["epoch"], state["position"], True
            self.loaded += 1
            self._drop()
