"""The balancer of a Keras script."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from typing import Any

from hvd_hetero.engine.environment import run_folder
from hvd_hetero.engine.host import host_identity
from hvd_hetero.engine.port import Engine
from hvd_hetero.optimizers import balancer as framework_free
from hvd_hetero.policy.replan import ReplanRule
from hvd_hetero.trace.record import trace_of

from . import backend
from .factor import Factors


class Balancer(framework_free.Balancer):
    """Shares of the global batch in proportion to each rank's measured speed; one per training loop.

    Constructing it is a collective call. See `hvd_hetero.optimizers.balancer.Balancer` for the arguments. What a rank
    needs for its samples is measured from the end of one exchange of gradients to the start of the next, without any
    callback; a step in which something was compiled is left out.

    `BalancedDataset` announces each batch. A loop of one's own calls `balancer.begin(samples)` for each instead; then
    any number of exchanges belong to a batch. Without it they do where nothing loads ahead. `fit` with TensorFlow does:
    there an optimizer, or tapes with the same arguments, may be used several times in a `train_step`, but neither in a
    loop or a condition that TensorFlow makes (`for _ in tf.range(k)`, `tf.cond`), nor by calling one `tf.function`
    several times, nor with `run_eagerly=True`.

    Args:
        process_set: the ranks that train together (default: all).
        run: a folder for this run's trace, one file per rank; default: `HVD_HETERO_RUN`, or no trace. A second balancer
            has to have one of its own.
    """

    def __init__(
        self,
        global_batch_size: int,
        *,
        min_share: int = 1,
        max_share: int | None = None,
        quantum: int = 1,
        shares: Sequence[int] | None = None,
        adaptive: bool = True,
        rule: ReplanRule | None = None,
        process_set: Any = None,
        run: str | None = None,
        engine: Engine | None = None,
    ) -> None:
        engine = engine if engine is not None else backend.engine(process_set)
        super().__init__(
            engine,
            global_batch_size=global_batch_size,
            min_share=min_share,
            max_share=max_share,
            quantum=quantum,
            shares=shares,
            adaptive=adaptive,
            rule=rule,
            trace=trace_of(run or run_folder(), rank=engine.rank, clock=time.time, host=host_identity()[0]),
        )
        self.factors = Factors()  # of the optimizers' learning rates
        self._announced: deque[int] = deque()
        self._announced_terms: deque[float] = deque()  # of the first of them, where they are no samples
        self._told = False  # the script itself has begun the batch that is to be exchanged next
        self._instead = False  # and it begins those that are announced as well
        self._ahead = False  # batches are announced while others are in use

    def announce(self, samples: int) -> None:
        """Says that a batch of `samples` follows those announced before; may be called from a thread that loads."""
        if samples < 0:
            raise ValueError(f"samples: expected 0 or more. Received: {samples}.")
        self._announced.append(samples)

    def announce_terms(self, terms: float) -> None:
        """Says over how many loss terms the loss of the next batch announced is a mean, where these are no samples."""
        self._announced_terms.append(terms)

    def forget(self, *, ahead: bool = False) -> None:
        """Drops announcements: an epoch begins, or a fit was interrupted. The time since the last step, in which there
        may have been a validation, is not measured. `ahead`: batches will be announced while others are in use."""
        self._drop()
        self._ahead = ahead
        self.resume()

    def state_dict(self) -> dict[str, Any]:
        """What any balancer keeps, and where the factors of learning rates are."""
        return {**super().state_dict(), "factors": self.factors.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from `state`; what was announced for batches after it is dropped."""
        super().load_state_dict(state)
        self.factors.load_state_dict(state.get("factors", {}))
        self._drop()
        self._told = False

    def _drop(self) -> None:
        self._announced.clear()
        self._announced_terms.clear()
        self.exchanges.end_batch()
        self._instead, self._ahead = False, False

    def end_epoch(self) -> None:
        """Says that the samples of an epoch are used up: what is exchanged next is of another batch."""
        super().end_epoch()
        self.exchanges.end_batch()

    @property
    def idle(self) -> bool:
        """Whether this rank has no sample in the batch whose gradients come next: what it holds is another rank's."""
        return (self._announced[0] if self._may_begin else self.count_now) == 0

    @property
    def terms_due(self) -> float | None:
        """Over how many terms the loss of the batch is a mean whose gradients come next; None: nobody said."""
        if not self._may_begin:
            return self.count_now
        return self._announced_terms[0] if self._announced_terms else self._announced[0]

    @property
    def _may_begin(self) -> bool:
        """Whether the batch to be exchanged next may be one that is announced."""
        return bool(self._announced) and not self._told and not self._instead

    def begin(self, samples: int) -> None:
        """Starts a global batch of which this rank has `samples`, in a loop without a `BalancedDataset`."""
        super().begin(samples)
        self.exchanges.end_batch()
        self._told, self._instead = True, bool(self._announced)

    def begin_unseen(self) -> bool:
        """Whether an announced batch begins: the exchange asks, whose gradients are there. One that comes again is of
        the present batch where no other is announced.

        Raises:
            RuntimeError: nobody said how many samples this batch has.
        """
        if self._told:
            self._told = False
            return False
        if not self._may_begin:
            if self.exchanges.ran:
                if self._instead or not self._ahead:
                    return False
                self.fail()  # a rank that loads more slowly may not see it, and would wait for this one
            raise RuntimeError(
                "Expected the number of samples of this batch before its gradients are applied. Received: none. Fit on "
                "hvd.BalancedDataset(..., balancer=balancer), or call balancer.begin(samples) before each batch. Where "
                "batches are loaded ahead, as fit does with TensorFlow, nothing tells to which an optimizer is "
                "applied that is applied several times, in a loop of TensorFlow's or with run_eagerly=True: make one "
                "optimizer for each time, or write a loop with balancer.begin()."
            )
        if not self.timesheet.running:  # the first step of all: nobody was there when it began
            self.discard()
        self._begin(self._announced.popleft())
        self._ahead = self._ahead or bool(self._announced)
        if self._announced_terms:
            self.count(self._announced_terms.popleft())
        return True
