"""Serialises what a PyTorch job keeps: tensors, numbers, texts, numpy's arrays and containers of them, but no code."""

from __future__ import annotations

import io
import pickle
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

import torch

from hvd_hetero.engine import numpy_pickle, randomness

# Types whose values torch.load(weights_only=True) always accepts. Values of other types are tried out at each save, as
# a script may change a value's type later. Tensors are most of the bytes, and are spared this second pass.
SAFE = {torch.Tensor, bool, int, float, str, bytes, type(None)}

torch.serialization.add_safe_globals([*numpy_pickle.NEEDED, set, complex])  # PyTorch 2.4 lacks the last two


def saved(value: Any) -> bytes:
    """`value` as bytes. Raises TypeError if it could not be loaded again without running code from the file."""
    asked = [(place, part) for place, part in _parts(value, "") if type(part) not in SAFE]
    if not _is_data([part for _, part in asked]):
        place, part = next((each for each in asked if not _is_data(each[1])), asked[0])
        raise TypeError(
            "Expected tensors, numbers, texts, arrays, and dicts, lists and tuples of them in what is kept. Received: "
            f"{place} of type {type(part).__module__}.{type(part).__qualname__}. Keep numbers or texts that it can be "
            "made of again."
        )
    return _packed(value)


def loaded(content: bytes) -> Any:
    """The value that `saved` was given, with tensors on the CPU. Raises ValueError if `content` holds other types."""
    try:
        return torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:  # replaced, as its text advises to run the code in the file
        raise ValueError(
            "Expected tensors, numbers, texts, arrays, and dicts, lists and tuples of them in what was kept. Received: "
            "others, or those of another version of numpy or PyTorch."
        ) from error


def _packed(value: Any) -> bytes:
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()


def _is_data(value: Any) -> bool:
    """Whether `value` can be saved, and loaded again without running code."""
    try:
        loaded(_packed(value))
    except Exception:
        return False
    return True


def _parts(value: Any, place: str) -> Iterator[tuple[str, Any]]:
    """The leaves of nested containers, keys included, each with a text that says where it is."""
    if type(value) in (dict, OrderedDict):
        for key, part in value.items():
            yield f"a key of {place}", key
            yield from _parts(part, f"{place}.{key}" if place else str(key))
    elif type(value) in (list, tuple):
        for index, part in enumerate(value):
            yield from _parts(part, f"{place}[{index}]")
    else:
        yield place, value


def random_state() -> dict[str, Any]:
    """The states of this process's random number generators: Python's, numpy's and torch's."""
    return {**randomness.random_state(), **randomness.torch_state()}


def load_random_state(state: dict[str, Any]) -> None:
    """Restores what `random_state()` returned; generators of GPUs only if there are as many GPUs."""
    randomness.load_random_state(state)
    randomness.load_torch_state(state)
