"""Balancers that deal batches, and that nothing reduces gradients by: a script has forgotten to pass one on."""

from __future__ import annotations

import gc
import weakref
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .balancer import Balancer

_DEALING: weakref.WeakSet[Balancer] = weakref.WeakSet()


def deals(balancer: Balancer) -> None:
    """Notes that a balancer deals batches."""
    _DEALING.add(balancer)


def check_none_is_forgotten() -> None:
    """Before gradients are reduced for the first time without a balancer.

    Raises:
        RuntimeError: one deals batches, and no optimizer was made with it.
    """
    if _are_forgotten():
        gc.collect()  # it may be one that nobody holds any more
        if _are_forgotten():
            raise RuntimeError(
                "Expected the balancer of hvd.BalancedDataLoader or hvd.BalancedDataset also in what reduces the "
                "gradients. Received: none, so that all ranks would count alike, whatever their shares. Pass balancer= "
                "to hvd.DistributedOptimizer (Keras: also to hvd.load_model and hvd.DistributedGradientTape)."
            )


def _are_forgotten() -> bool:
    return any(not balancer.exchanges.ever for balancer in list(_DEALING))
