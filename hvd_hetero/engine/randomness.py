"""Saves and loads the states of this process's random generators: Python's and numpy's, and PyTorch's."""

from __future__ import annotations

import importlib
import random
from collections.abc import Mapping
from typing import Any

import numpy as np


def random_state() -> dict[str, Any]:
    """Returns the states of Python's and numpy's global generators, as plain numbers, lists and tuples."""
    kind, keys, *rest = np.random.get_state(legacy=True)
    return {"python": random.getstate(), "numpy": [kind, np.asarray(keys).tolist(), *rest]}


def load_random_state(state: Mapping[str, Any]) -> None:
    """Loads what `random_state` returned; tuples may have become lists, as in JSON."""
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers), gauss))
    kind, keys, *rest = state["numpy"]
    np.random.set_state((kind, np.asarray(keys, dtype=np.uint32), *rest))


def torch_state() -> dict[str, Any]:
    """Returns the states of PyTorch's generators, as tensors: that of the CPU, and that of each GPU."""
    torch = importlib.import_module("torch")
    gpus = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    return {"torch": torch.get_rng_state(), "cuda": gpus}


def load_torch_state(state: Mapping[str, Any]) -> None:
    """Loads what `torch_state` returned; tensors may have become arrays. The states of GPUs are loaded only if this
    process has as many GPUs."""
    torch = importlib.import_module("torch")
    torch.set_rng_state(torch.as_tensor(state["torch"]))
    if state["cuda"] and torch.cuda.is_available() and torch.cuda.device_count() == len(state["cuda"]):
        torch.cuda.set_rng_state_all([torch.as_tensor(each) for each in state["cuda"]])
