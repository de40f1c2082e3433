"""Seeds for parts of a program that draw random numbers of their own with PyTorch: see `Draws`."""

from __future__ import annotations

import hashlib

import torch

from hvd_hetero.optimizers.draws import Generator

TORCH = Generator(
    torch.default_generator.manual_seed,
    lambda: torch.get_rng_state().numpy(),  # a tensor would come from another process in shared memory, with a file
    lambda state: torch.set_rng_state(torch.from_numpy(state)),
)


def seed_of(*place: int) -> int:
    """A seed of 56 bits, a different one for each place."""
    return int.from_bytes(hashlib.sha256(repr(place).encode()).digest()[:7], "big")
