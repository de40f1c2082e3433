"""Saves and restores the states of torch's random number generators, of the CPU and of each GPU. `Dropout` without a
seed draws from them."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

from hvd_hetero.engine.randomness import load_torch_state as load_random_state
from hvd_hetero.engine.randomness import torch_state as random_state

__all__ = ["load_random_state", "random_state", "undoing_draws"]


def undoing_draws() -> Callable[[], object] | None:
    """What restores the present state of the generator from which a DataLoader draws its seed."""
    return functools.partial(torch.set_rng_state, torch.get_rng_state())
