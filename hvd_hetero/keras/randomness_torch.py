"""Where torch's random numbers are, from which `Dropout` without a seed draws: those of the CPU, and of each GPU."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch


def random_state() -> dict[str, Any]:
    """The states of its generators."""
    gpus = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    return {"cpu": torch.get_rng_state(), "cuda": gpus}


def load_random_state(state: Mapping[str, Any]) -> None:
    """Goes on from `random_state()`, whose tensors have become arrays; GPUs only where there are as many."""
    torch.set_rng_state(torch.as_tensor(state["cpu"]))
    if state["cuda"] and torch.cuda.is_available() and torch.cuda.device_count() == len(state["cuda"]):
        torch.cuda.set_rng_state_all([torch.as_tensor(each) for each in state["cuda"]])


def seeds() -> torch.Tensor:
    """Where the generator is that a DataLoader takes its seed from."""
    return torch.get_rng_state()


def load_seeds(state: torch.Tensor) -> None:
    """Goes on from `seeds()`."""
    torch.set_rng_state(state)
