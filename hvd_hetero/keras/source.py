"""Sources of samples: whatever a user has, seen as samples with a number each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import keras
import numpy as np

from hvd_hetero.engine import script

from .batch import Batch, array_of, as_floatx, joined, packed, rows_in, rows_of, stacked
from .stream import StreamSource, is_tf_data


class Source(Protocol):
    """Samples that can be taken by number."""

    @property
    def block(self) -> int:
        """Neighbouring samples that are loaded together."""

    @property
    def arrays(self) -> Sequence[np.ndarray]:
        """Those that should be the same on all ranks: with all samples, where they are in memory."""

    def __len__(self) -> int: ...

    def take(self, indices: np.ndarray) -> Batch:
        """The batch of these samples, in this order."""


def source_of(x: Any, y: Any, sample_weight: Any, *, global_batch_size: int) -> Source:
    """The source for a user's arguments.

    Raises:
        TypeError, ValueError: for what has no numbered samples.
    """
    if not is_tf_data(x) and _is_array_like(x):
        return ArraySource(x, y, sample_weight)
    if y is not None or sample_weight is not None:
        raise TypeError(
            f"y, sample_weight: expected none, because {type(x).__name__} holds them itself. Received: some. Let it "
            "give (x, y) or (x, y, sample_weight)."
        )
    if is_tf_data(x):
        return StreamSource(x, global_batch_size=global_batch_size)
    if isinstance(x, keras.utils.PyDataset):
        return BatchSource(x)
    if hasattr(x, "__len__") and hasattr(x, "__getitem__"):
        return SampleSource(x)
    raise TypeError(
        "x: expected arrays, a keras.utils.PyDataset, a tf.data.Dataset of known length, or samples by number (with "
        f"__len__ and __getitem__). Received: {type(x).__name__}. A generator has no numbered samples: collect them. "
        "Of a torch DataLoader, take its dataset. Where this is a function of the epoch, BalancedDataset takes it, and "
        "a validation one of its datasets."
    )


def _is_array_like(x: Any) -> bool:
    return isinstance(x, (dict, list, tuple)) or hasattr(x, "shape")


def _column(leaf: Any) -> np.ndarray:
    """The array of a user's own: a pandas Series is a column, as `fit` makes it one."""
    if leaf is None:
        raise ValueError(
            "Expected an array for each input and each target, since a batch of a PyDataset has no place for none. "
            "Received: None among them. Pass zeros for a target without a loss."
        )
    # pandas 3 says that it is of "pandas", and those before it of "pandas.core.series"
    of_pandas = any(
        cls.__name__ == "Series" and cls.__module__.partition(".")[0] == "pandas" for cls in type(leaf).__mro__
    )
    found = array_of(leaf)
    if found.ndim == 0 and len(getattr(leaf, "shape", ())):  # numpy sees one object
        raise TypeError(
            f"Expected dense arrays with samples along the first axis. Received: a {type(leaf).__name__}. Make it "
            "dense (toarray(), tf.sparse.to_dense(), to_tensor()), or give an object of single samples, with __len__ "
            "and __getitem__, that makes each dense."
        )
    return found[:, None] if of_pandas else found


def _weighted_alike(given: tuple[Any, ...]) -> tuple[Any, ...]:
    """What was given, with weights of 1 for the outputs for which it has None among sample weights."""
    leaves = keras.tree.flatten(given[2]) if len(given) == 3 else []
    if all(leaf is not None for leaf in leaves):
        return given
    first = next(leaf for leaf in keras.tree.flatten(given[:2]) if leaf is not None)
    ones = np.ones(len(first), keras.config.floatx())
    return (*given[:2], keras.tree.map_structure(lambda leaf: ones if leaf is None else leaf, given[2]))


class ArraySource:
    """Arrays, or nested structures of them, with samples along the first axis."""

    block = 1

    def __init__(self, x: Any, y: Any, sample_weight: Any) -> None:
        if y is None and sample_weight is not None:
            raise ValueError("sample_weight: expected none without y. Received: some.")
        given = (x,) if y is None else (x, y) if sample_weight is None else (x, y, sample_weight)
        self._arrays = keras.tree.map_structure(_column, packed(_weighted_alike(given)))
        self.arrays: Sequence[np.ndarray] = keras.tree.flatten(self._arrays)
        if any(leaf.ndim == 0 for leaf in self.arrays):
            raise ValueError(
                "x, y, sample_weight: expected arrays with samples along their first axis. Received: a scalar. A list "
                "is one of several arrays: make an array of numbers, np.array(y)."
            )
        lengths = sorted({len(leaf) for leaf in self.arrays})
        if len(lengths) != 1:
            raise ValueError(f"Expected arrays of the same number of samples. Received: {lengths}.")
        self._length = lengths[0]

    def __len__(self) -> int:
        return self._length

    def take(self, indices: np.ndarray) -> Batch:
        """Rows of the arrays."""
        return keras.tree.map_structure(lambda leaf: as_floatx(leaf[indices]), self._arrays)


class SampleSource:
    """A sequence whose items are samples: x, (x, y), (x, y, sample_weight), or a dictionary."""

    block = 1
    arrays: Sequence[np.ndarray] = ()

    def __init__(self, samples: Sequence[Any]) -> None:
        self._samples = samples

    def __len__(self) -> int:
        return len(self._samples)

    def take(self, indices: np.ndarray) -> Batch:
        """The samples, stacked."""
        return stacked([packed(self._samples[int(index)]) for index in indices])


class BatchSource:
    """A PyDataset, whose batches are taken apart into samples.

    All batches but the last have to be of one size. Samples of a batch stay together in the order of an epoch, so that
    a rank loads few of them. Which samples a batch has must not change between epochs: shuffling is the balancer's.
    """

    arrays: Sequence[np.ndarray] = ()

    def __init__(self, batches: keras.utils.PyDataset) -> None:
        if batches.num_batches is None:
            raise ValueError("x: expected a PyDataset of finite length. Received: an infinite one.")
        for name in ("on_epoch_begin", "on_epoch_end"):
            if getattr(type(batches), name) is not getattr(keras.utils.PyDataset, name):
                script.warn(
                    "x: expected a PyDataset with the same batches in each epoch, of which the balancer deals the "
                    f"samples in another order. Received: one with a method {name}(), which is not called.",
                )
        self._batches = batches
        self.block = rows_in(packed(batches[0]))
        self._length = self.block * (batches.num_batches - 1) + rows_in(packed(batches[batches.num_batches - 1]))

    def __len__(self) -> int:
        return self._length

    def take(self, indices: np.ndarray) -> Batch:
        """The samples, cut out of the batches that have them."""
        parts = []
        numbers: np.ndarray = indices // self.block
        starts = [0, *(np.flatnonzero(np.diff(numbers)) + 1)]
        for start, stop in zip(starts, [*starts[1:], len(indices)], strict=True):
            batch, number = packed(self._batches[int(numbers[start])]), int(numbers[start])
            expected = min(self.block, self._length - number * self.block)
            if rows_in(batch) != expected:
                raise ValueError(
                    f"x: expected {expected} samples in batch {number} of the PyDataset: all batches but the last of "
                    f"one size. Received: {rows_in(batch)}."
                )
            parts.append(rows_of(batch, indices[start:stop] - number * self.block))
        return joined(parts)
