"""What a PyTorch job keeps, as bytes: tensors, numbers, texts, numpy's arrays, and containers of them, and no code."""

from __future__ import annotations

import io
import pickle
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

import torch

from hvd_hetero.engine import numpy_pickle, randomness

# Types whose values torch.load takes whatever they hold. It is asked about all others, each time: a script may give a
# value of another type later. Tensors are most of the bytes, and need not be read again for that.
SAFE = {torch.Tensor, bool, int, float, str, bytes, type(None)}

torch.serialization.add_safe_globals([*numpy_pickle.NEEDED, set, complex])  # the last two PyTorch 2.4 has to be told of


def saved(value: Any) -> bytes:
    """The bytes of `value`. Raises TypeError for what could not be loaded again without running code from the file."""
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
    """What `saved` was given, with tensors on the CPU. Raises ValueError where there is something else."""
    try:
        return torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:  # whose text advises to run what is in the file
        raise ValueError(
            "Expected tensors, numbers, texts, arrays, and dicts, lists and tuples of them in what was kept. Received: "
            "others, or those of another version of numpy or PyTorch."
        ) from error


def _packed(value: Any) -> bytes:
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()


def _is_data(value: Any) -> bool:
    """Whether it can be saved and loaded."""
    try:
        loaded(_packed(value))
    except Exception:
        return False
    return True


def _parts(value: Any, place: str) -> Iterator[tuple[str, Any]]:
    """What containers hold, keys included, each with its place in words."""
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
    """The states of this process's random numbers: Python's, numpy's, torch's."""
    return {**randomness.random_state(), **randomness.torch_state()}


def load_random_state(state: dict[str, Any]) -> None:
    """Goes on from `random_state()`; GPUs only where there are as many."""
    randomness.load_random_state(state)
    randomness.load_torch_state(state)
