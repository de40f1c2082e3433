"""Finds scripts that pass a balancer to their data loader, but not to what reduces the gradients."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

from hvd_hetero.engine import script

if TYPE_CHECKING:
    from .balancer import Balancer


class _Dealt:
    """What is known of the batches dealt in this process.

    Attributes:
        number: how many batches all balancers together have dealt.
        last_by: the balancer that dealt the last one; None also once its epoch has ended.
        by: all balancers that have dealt one.
    """

    def __init__(self) -> None:
        self.number = 0
        self.last_by: weakref.ref[Balancer] | None = None
        self.by: weakref.WeakSet[Balancer] = weakref.WeakSet()

    @property
    def last_by_forgotten(self) -> Balancer | None:
        """The balancer that dealt the last batch, if it was never passed to an optimizer or tape; else None."""
        last_by = None if self.last_by is None else self.last_by()
        return None if last_by is None or last_by.exchanges.ever else last_by


_DEALT = _Dealt()


def deals(balancer: Balancer) -> None:
    """Notes that `balancer` deals a batch to a data loader; `Balancer.deal` calls this."""
    _DEALT.number += 1
    if _DEALT.last_by is None or _DEALT.last_by() is not balancer:
        _DEALT.last_by = weakref.ref(balancer)
        _DEALT.by.add(balancer)


def ends(balancer: Balancer) -> None:
    """Notes that an epoch of `balancer`'s data is over: gradients from now on are of other data.

    `Balancer.end_epoch` calls this.
    """
    if _DEALT.last_by is not None and _DEALT.last_by() is balancer:
        _DEALT.last_by = None


def dealt_by_stranger(to: Balancer) -> bool:
    """Whether `to` has dealt batches, but the last one was dealt by another balancer, which was never passed to an
    optimizer or tape."""
    return _DEALT.last_by_forgotten not in (None, to) and to in _DEALT.by


LOOKS = 2  # times that `UnusedBalancerCheck.check` looks


class UnusedBalancerCheck:
    """Checks that no forgotten balancer dealt the batches of an optimizer or tape that was made without one.

    Make one together with the optimizer or tape, and call `check` before it reduces gradients.
    """

    def __init__(self) -> None:
        self._made, self._looks = _DEALT.number, LOOKS

    def check(self) -> None:
        """Looks at the balancer of the last batch, in the first two calls; later calls do nothing.

        A second look is needed for a tape that is made within the training loop, after the first batch was dealt.

        Raises:
            RuntimeError: the last batch was dealt after this object was made, by a balancer that was never passed to an
                optimizer or tape.
        """
        if not self._looks:
            return
        self._looks -= 1
        if _DEALT.number > self._made and _DEALT.last_by_forgotten is not None:
            raise RuntimeError(
                "Expected the balancer of hvd.BalancedDataLoader or hvd.BalancedDataset also in what reduces the "
                "gradients. Received: none, so that all ranks would count alike, whatever their shares. Pass balancer= "
                "to hvd.DistributedOptimizer (Keras: also to hvd.load_model and hvd.DistributedGradientTape)."
            )


def warn_of_none(balancer: Balancer, *, evaluates: str) -> None:
    """Warns if `balancer` was never passed to an optimizer or tape, and there are several ranks.

    Args:
        balancer: of a data loader or dataset, which calls this at the end of an epoch that may have been training.
        evaluates: what an evaluation takes instead, which deserves no warning.
    """
    if balancer.size > 1 and not balancer.exchanges.ever:
        script.warn(
            "Where this is training: expected hvd.DistributedOptimizer(..., balancer=balancer) with the data's "
            "balancer. Received: none, and an epoch is over: unless the script averages gradients by itself, each rank "
            "has trained a model of its own; what else averages them counts all ranks alike, whatever their shares. "
            f"For an evaluation, take {evaluates}.",
        )
