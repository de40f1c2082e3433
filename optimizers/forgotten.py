"""A balancer that deals batches, and that nothing reduces gradients by: a script has forgotten to pass it on."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

from hvd_hetero.engine import script

if TYPE_CHECKING:
    from .balancer import Balancer


class _Dealt:
    """The batches that were dealt in this process, by whichever balancer."""

    def __init__(self) -> None:
        self.number = 0
        self.last_by: weakref.ref[Balancer] | None = None


_DEALT = _Dealt()


def deals(balancer: Balancer) -> None:
    """Notes that a balancer deals a batch."""
    _DEALT.number += 1
    if _DEALT.last_by is None or _DEALT.last_by() is not balancer:
        _DEALT.last_by = weakref.ref(balancer)


def ends(balancer: Balancer) -> None:
    """Notes that an epoch of a balancer's data is over: whatever comes next is of others."""
    if _DEALT.last_by is not None and _DEALT.last_by() is balancer:
        _DEALT.last_by = None


LOOKS = 2


class Forgotten:
    """To be made with what reduces gradients without a balancer."""

    def __init__(self) -> None:
        self._made, self._looks = _DEALT.number, LOOKS

    def check(self) -> None:
        """Before gradients are reduced, for the first time and the second: a tape is made within the loop, once the
        first batch was dealt.

        Raises:
            RuntimeError: what was dealt last, since this was made, is of a balancer without an optimizer.
        """
        if not self._looks:
            return
        self._looks -= 1
        last_by = None if _DEALT.last_by is None else _DEALT.last_by()
        if _DEALT.number > self._made and last_by is not None and not last_by.exchanges.ever:
            raise RuntimeError(
                "Expected the balancer of hvd.BalancedDataLoader or hvd.BalancedDataset also in what reduces the "
                "gradients. Received: none, so that all ranks would count alike, whatever their shares. Pass balancer= "
                "to hvd.DistributedOptimizer (Keras: also to hvd.load_model and hvd.DistributedGradientTape)."
            )


def warn_of_none(balancer: Balancer) -> None:
    """At the end of an epoch that a script trained on: warns where nothing has reduced gradients by the balancer."""
    if balancer.size > 1 and not balancer.exchanges.ever:
        script.warn(
            "Where this is training: expected hvd.DistributedOptimizer(..., balancer=balancer) with the loader's "
            "balancer. Received: none, and an epoch is over: unless the script averages gradients by itself, each rank "
            "has trained a model of its own; what else averages them counts all ranks alike, whatever their shares. "
            "For an evaluation, take hvd.EvaluationDataLoader, or iterate under torch.no_grad().",
        )
