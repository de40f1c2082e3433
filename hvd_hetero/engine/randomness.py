"""Where this process's random numbers are: Python's and numpy's, as plain numbers. A framework's own are its face's."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np


def random_state() -> dict[str, Any]:
    """The states of both generators."""
    kind, keys, *rest = np.random.get_state(legacy=True)
    return {"python": random.getstate(), "numpy": [kind, np.asarray(keys).tolist(), *rest]}


def load_random_state(state: Mapping[str, Any]) -> None:
    """Goes on from `random_state()`, whose tuples may have become lists."""
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers), gauss))
    kind, keys, *rest = state["numpy"]
    np.random.set_state((kind, np.asarray(keys, dtype=np.uint32), *rest))
