"""Saves and restores the states of torch's random number generators, of the CPU and of each GPU. `Dropout` without a
seed draws from them."""

from __future__ import annotations

import torch

from hvd_hetero.engine.randomness import load_torch_state as load_random_state
from hvd_hetero.engine.randomness import torch_state as random_state

__all__ = ["load_random_state", "load_seeds", "random_state", "seeds"]


def seeds() -> torch.Tensor:
    """The state of the generator that a DataLoader draws its seed from."""
    return torch.get_rng_state()


def load_seeds(state: torch.Tensor) -> None:
    """Restores what `seeds()` returned."""
    torch.set_rng_state(state)
