"""Where torch's random numbers are, from which `Dropout` without a seed draws: those of the CPU, and of each GPU."""

from __future__ import annotations

import torch

from hvd_hetero.engine.randomness import load_torch_state as load_random_state
from hvd_hetero.engine.randomness import torch_state as random_state

__all__ = ["load_random_state", "load_seeds", "random_state", "seeds"]


def seeds() -> torch.Tensor:
    """Where the generator is that a DataLoader takes its seed from."""
    return torch.get_rng_state()


def load_seeds(state: torch.Tensor) -> None:
    """Goes on from `seeds()`."""
    torch.set_rng_state(state)
