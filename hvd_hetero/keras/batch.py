"""Batches of nested arrays: their rows, and batches made of several or of samples."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np

Batch = Any  # a tuple (x,), (x, y) or (x, y, sample_weight) of nested arrays, or a dictionary


def array_of(leaf: Any) -> np.ndarray:
    """A numpy view of an array or tensor, where there is one. Raises TypeError for what is not dense."""
    if hasattr(leaf, "detach"):  # a torch tensor
        leaf = leaf.detach().cpu()
    found: np.ndarray = leaf.to_numpy() if hasattr(leaf, "to_numpy") else np.asarray(leaf)
    if found.ndim == 0 and len(getattr(leaf, "shape", ())):  # numpy has made one object of a sparse array
        raise TypeError(
            f"Expected dense arrays. Received: a {type(leaf).__name__}. Make it dense (toarray(), to_tensor(), "
            "tf.sparse.to_dense()), or give an object of single samples, with __len__ and __getitem__, that makes each "
            "dense."
        )
    return found


def as_floatx(leaf: np.ndarray) -> np.ndarray:
    """Floating point in Keras' floatx, as `fit` makes it of arrays."""
    return leaf.astype(keras.config.floatx(), copy=False) if leaf.dtype.kind == "f" else leaf


def check_elements(batch: Batch) -> None:
    """Raises TypeError for arrays of objects other than texts, such as sequences of unlike lengths, which Keras does
    not take."""
    objects = [leaf for leaf in keras.tree.flatten(batch) if leaf.dtype.kind == "O"]
    kinds = {type(each).__name__ for leaf in objects for each in leaf.flat if not isinstance(each, (str, bytes))}
    if kinds:
        raise TypeError(
            "x, y, sample_weight: expected arrays of numbers or, with TensorFlow, of texts. Received: one of objects "
            f"({', '.join(sorted(kinds))}). Make it one of numbers: pad sequences to one length "
            '(keras.utils.pad_sequences), and convert others with astype("float32"). A loop of your own gets them as '
            "they are: for x, y in dataset."
        )


def with_texts(batch: Batch) -> Batch:
    """The batch, with its texts as the tensors that TensorFlow, which alone has any, makes of them: Keras takes no
    arrays of them from a PyDataset. Raises what `check_elements` does."""
    check_elements(batch)
    if keras.backend.backend() != "tensorflow":
        return batch
    return keras.tree.map_structure(
        lambda leaf: keras.ops.convert_to_tensor(leaf, "string") if leaf.dtype.kind in "OSU" else leaf, batch
    )


def packed(sample: Any) -> Batch:
    """`sample` as a PyDataset's batches are: a tuple or a dictionary, with tuples for lists within it, of which tf.data
    takes none."""
    sample = keras.tree.lists_to_tuples(sample)
    return sample if isinstance(sample, (tuple, dict)) else (sample,)


def rows_in(batch: Batch) -> int:
    """How many rows a batch has."""
    return len(array_of(keras.tree.flatten(batch)[0]))


def rows_of(batch: Batch, rows: np.ndarray) -> Batch:
    """These rows of a batch, in this order."""
    return keras.tree.map_structure(lambda leaf: array_of(leaf)[rows], batch)


def joined(parts: Sequence[Batch]) -> Batch:
    """One batch of the rows of several."""
    if len(parts) == 1:
        return keras.tree.map_structure(as_floatx, parts[0])
    return keras.tree.map_structure(lambda *leaves: _one(np.concatenate, leaves, [x.shape[1:] for x in leaves]), *parts)


def stacked(samples: Sequence[Batch]) -> Batch:
    """A batch of single samples."""

    def stack(*leaves: Any) -> np.ndarray:
        arrays = [array_of(leaf) for leaf in leaves]
        return _one(np.stack, arrays, [x.shape for x in arrays])

    return keras.tree.map_structure(stack, *samples)


def _one(put: Any, arrays: Sequence[np.ndarray], shapes: Sequence[tuple[int, ...]]) -> np.ndarray:
    """One array made of several by `put`. Raises ValueError if `shapes`, those of their samples, differ."""
    if len(set(shapes)) > 1:
        found = ", ".join(map(str, sorted(set(shapes))))
        raise ValueError(f"Expected samples of one shape. Received: {found}. Pad all to one length.")
    return as_floatx(put(arrays))
