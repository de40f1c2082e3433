"""The classes and functions that a pickle of numpy arrays and numbers refers to, for unpicklers with an allow-list."""

from __future__ import annotations

import _codecs
from typing import Any

import numpy as np

NEEDED: list[Any] = [
    np.ndarray,
    np.dtype,
    *{type(np.dtype(code)) for code in np.typecodes["All"]},
    np.empty(0).__reduce__()[0],  # these two have other places in other versions of numpy
    np.float64(0).__reduce__()[0],
    bytes,  # of an array without elements
    _codecs.encode,  # what bytes are made of in the pickles of torch.save
]
"""The classes and functions that an unpickler has to allow for numpy arrays and numbers. None of them runs code that is
in the pickle."""
