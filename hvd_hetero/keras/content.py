"""Serialises what a Keras job keeps: arrays in numpy's format, and around them JSON. No code."""

from __future__ import annotations

import io
import json
from typing import Any

import numpy as np

ARRAY, PAIRS = "array", "pairs"  # keys in the JSON of what stands for an array, and for a dict


def saved(value: Any) -> bytes:
    """`value` as bytes. It may consist of numbers, texts, None, arrays, and dicts (with texts or numbers as keys),
    lists and tuples of them; a tuple becomes a list. Raises TypeError for anything else."""
    arrays: list[np.ndarray] = []

    def plain(part: Any) -> Any:
        if isinstance(part, dict):
            if odd := [key for key in part if not isinstance(key, (str, int, float, type(None)))]:
                raise TypeError(f"a dict with the key {odd[0]!r}")
            return {PAIRS: [[key, plain(each)] for key, each in part.items()]}
        if isinstance(part, (list, tuple)):
            return [plain(each) for each in part]
        if isinstance(part, np.generic):
            return part.item()
        if hasattr(part, "detach"):  # a torch tensor, where that is the back end
            part = part.detach().cpu().numpy()
        if isinstance(part, np.ndarray):
            if part.dtype.hasobject or part.dtype.names:
                raise TypeError(f"an array of {part.dtype}")
            # numpy's format does not know bfloat16 and its kin, whose values are all float32 as well.
            arrays.append(part.astype(np.float32) if part.dtype.kind == "V" else part)
            return {ARRAY: len(arrays) - 1}
        return part

    try:
        text = json.dumps(plain(value))
        stream = io.BytesIO()
        np.savez(stream, *arrays, text=np.array(text))
    except TypeError as error:
        raise TypeError(
            f"Expected numbers, texts, arrays, and dicts, lists and tuples of them in what is kept. Received: {error}."
        ) from error
    return stream.getvalue()


def loaded(content: bytes) -> Any:
    """The value that `saved` was given, with lists for tuples."""
    with np.load(io.BytesIO(content), allow_pickle=False) as file:
        arrays = {name: file[name] for name in file.files}

    def whole(part: Any) -> Any:
        if isinstance(part, dict) and PAIRS in part:
            return {key: whole(each) for key, each in part[PAIRS]}
        if isinstance(part, dict):
            return arrays[f"arr_{part[ARRAY]}"]
        if isinstance(part, list):
            return [whole(each) for each in part]
        return part

    return whole(json.loads(str(arrays["text"])))
