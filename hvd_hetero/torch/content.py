"""What a PyTorch job keeps, as bytes: tensors, numbers, texts and containers of them, and no code."""

from __future__ import annotations

import io
from typing import Any

import torch

from hvd_hetero.engine import randomness


def saved(value: Any, *, check: bool = True) -> bytes:
    """The bytes of `value`.

    Raises:
        TypeError: with `check`, for what could not be loaded again without running code from the file.
    """
    stream = io.BytesIO()
    torch.save(value, stream)
    try:
        if check:
            loaded(stream.getvalue())
    except Exception as error:
        raise TypeError(
            "Expected tensors, numbers, texts, and dicts, lists and tuples of them in what is kept. Received: others. "
            f"({error})"
        ) from error
    return stream.getvalue()


def loaded(content: bytes) -> Any:
    """What `saved` was given, with tensors on the CPU."""
    return torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)


def random_state() -> dict[str, Any]:
    """The states of this process's random numbers: Python's, numpy's, torch's."""
    gpus = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    return {**randomness.random_state(), "torch": torch.get_rng_state(), "cuda": gpus}


def load_random_state(state: dict[str, Any]) -> None:
    """Goes on from `random_state()`; GPUs only where there are as many."""
    randomness.load_random_state(state)
    torch.set_rng_state(state["torch"])
    if state["cuda"] and torch.cuda.is_available() and torch.cuda.device_count() == len(state["cuda"]):
        torch.cuda.set_rng_state_all(state["cuda"])
