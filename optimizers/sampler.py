"""Sampling: this rank's part of one global order, batch after batch and epoch after epoch."""

from __future__ import annotations

import threading
import zlib
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from .agreement import agree_on
from .argument import check_integer, check_whole
from .balancer import Balancer
from .control import ORIGINS
from .dealer import Dealer, cut

LOADED = (
    "Expected a new loop over data that is dealt to ranks after its place was loaded (state.restore(), "
    "load_state_dict()). Received: the next batch of the loop that was under way, from which samples would be missing. "
    "Leave the loop, and begin it anew."
)
SAME_DATA = "checksum of the data (every rank needs all of it, and the same seed for a random split)"


class Dealt(NamedTuple):
    """This rank's part of a global batch."""

    indices: np.ndarray  # of the samples; never none, so that a batch always has a form
    used: int  # how many of them are this rank's: 0 where it has no sample in a short batch, and the one is another's
    epoch: int


class ShareSampler:
    """The indices of this rank's samples in one global batch after the other.

    Every sample of an epoch comes up exactly once over all ranks, whatever the plan does. Nothing is repeated to make
    ranks even: the last batch of an epoch may be short (`drop_last`). Batches may be dealt before they are used, even
    by another thread and into the next epoch; what counts as done is what was used.

    Args:
        length: samples in the dataset, the same on all ranks.
        shuffle, seed: the order of epoch e depends on the seed and e alone.
        block: so many neighbouring samples stay together in it.
        checksum: of the data, as far as it is to be the same on all ranks.

    Raises:
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
    ) -> None:
        if not isinstance(balancer, Balancer):
            raise TypeError(f"balancer: expected an hvd.Balancer. Received: {balancer!r}.")
        self.balancer = balancer
        self._alike = {
            "dataset length": length, "shuffle": shuffle, "seed": seed, "drop_last": drop_last, "block": block,
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
        self.position = 0  # global batches of this epoch that were used
        self.loaded = 0  # so many times a state was
        self._resumed = False  # and nothing of it was dealt yet
        self._dealt: deque[int] = deque()  # sizes of batches dealt and not yet used
        self._next = 0  # the step in which the batch after them will be used: the plan is looked up by it
        self._run = 0  # so many times what was dealt and not used was dropped
        self._lock = threading.RLock()
        balancer.engine.remember(self.rebuild)

    def _agree(self) -> None:
        agree_on(self.balancer.engine, self._alike, name=f"hvd_hetero.{self.balancer.name}.dealer")

    def rebuild(self) -> None:
        """Deals to the ranks that there are now, from what was used. A collective call."""
        self._agree()
        with self._lock:
            self._drop()

    @property
    def epoch(self) -> int:
        """The epoch whose samples are being used."""
        return self.dealer.epoch

    def set_epoch(self, epoch: int) -> None:
        """Chooses the order of `epoch`, and starts at its beginning – unless it was resumed in the middle of it, or at
        its end: then nothing of it is left."""
        check_whole("epoch", epoch, least=0)
        if self._resumed and (epoch + 1, 0) == (self.dealer.epoch, self.position):
            self.dealer.epoch, self.position = epoch, len(self.dealer)
        elif epoch != self.dealer.epoch or not self._resumed:
            self.dealer.epoch, self.position, self._resumed = epoch, 0, False

    def rewind(self) -> None:
        """Deals again what was dealt and not used, from the next step on."""
        with self._lock:
            self._drop()
            self.end_epoch()
            self._next = self.balancer.step + 1

    def _drop(self) -> None:
        """Forgets what was dealt and not used, also what a thread is about to deal."""
        self._dealt.clear()
        self._run += 1

    def deal(self) -> Dealt:
        """The next batch. A batch without a sample of this rank holds one that is another rank's."""
        with self._lock:
            epochs, index = divmod(self.position + len(self._dealt), len(self.dealer))
            epoch = self.dealer.epoch + epochs
            batch = self.dealer.batch(epoch, index)
            step, run = self._next, self._run
        shares = self.balancer.deal(step).shares  # may wait, and `used` must not
        with self._lock:
            dealt = self._mine(batch, shares, epoch)
            if run == self._run:  # else it is of a run that is over
                self._dealt.append(dealt.used)
                self._next = step + 1
        return dealt

    def peek(self, index: int) -> Dealt:
        """Batch `index` from where the epoch is, as it would be dealt now; nothing is dealt."""
        epochs, place = divmod(self.position + index, len(self.dealer))
        epoch = self.dealer.epoch + epochs
        batch = self.dealer.batch(epoch, place)
        return self._mine(batch, self.balancer.plan_at(self.balancer.step + 1 + index).shares, epoch)

    def _mine(self, batch: np.ndarray, shares: Sequence[int], epoch: int) -> Dealt:
        mine = cut(batch, shares, self.balancer.rank)
        return Dealt(mine if len(mine) else batch[:1], len(mine), epoch)

    @property
    def pending(self) -> int:
        """Batches dealt and not yet used."""
        return len(self._dealt)

    def used(self) -> int:
        """The number of samples of the oldest batch dealt, which is now in use."""
        with self._lock:
            self.position += 1
            return self._dealt.popleft()

    @property
    def origin(self) -> int:
        """A number that stands for the epoch and the place in it of the batch in use. Other places have other ones, but
        for a few, which are soon left; epochs without an order of their own have the same."""
        epoch = self.dealer.epoch if self.dealer.shuffle else 0
        return zlib.crc32(f"{epoch} {self.position}".encode()) % ORIGINS

    def end_epoch(self) -> None:
        """Goes to the next epoch if this one is used up: a script without set_epoch() still sees another order."""
        with self._lock:
            epochs, self.position = divmod(self.position, len(self.dealer))
            self.dealer.epoch += epochs
            self._resumed = False

    def state_dict(self) -> dict[str, int]:
        """Where in which epoch: the number of global batches used."""
        return {
            "epoch": self.dealer.epoch,
            "position": self.position,
            "length": self.dealer.length,
            "seed": self.dealer.seed,
            "global_batch_size": self.dealer.global_batch_size,
        }

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Goes on where `state` was saved, on any number of ranks."""
        for name in ("length", "seed", "global_batch_size"):
            expected = getattr(self.dealer, name)
            if state[name] != expected:
                raise ValueError(f"Expected the state of a sampler with {name} {expected}. Received: {state[name]}.")
        with self._lock:
            self.dealer.epoch, self.position, self._resumed = state["epoch"], state["position"], True
            self.loaded += 1
            self._drop()
