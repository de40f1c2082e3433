"""Sources give `BalancedDataset` access by index to samples of arrays, sequences, PyDatasets and tf.data datasets."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import keras
import numpy as np

from hvd_hetero.engine import script

from .batch import Batch, array_of, as_floatx, joined, packed, rows_in, rows_of, stacked
from .stream import StreamSource, is_tf_data


class Source(Protocol):
    """Samples that can be loaded by index."""

    @property
    def block(self) -> int:
        """The number of neighbouring samples that are loaded together; shuffling keeps them together."""

    @property
    def arrays(self) -> Sequence[np.ndarray]:
        """Arrays that should be the same on all ranks, which compare their checksums: all samples if they are in
        memory, otherwise some of them or none."""

    def __len__(self) -> int: ...

    def take(self, indices: np.ndarray) -> Batch:
        """Loads the samples at `indices`, as one batch in this order."""


def source_of(x: Any, y: Any, sample_weight: Any, *, global_batch_size: int) -> Source:
    """Makes the source of a user's data.

    Args:
        x, y, sample_weight: arguments of `BalancedDataset`.
        global_batch_size: samples of a global batch.

    Raises:
        TypeError, ValueError: data whose samples have no index, or arguments that do not fit together.
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
    """Converts a user's input or target to an array; a pandas Series becomes a column of shape (n, 1), as in `fit`.

    Raises:
        ValueError: for None.
        TypeError: for what is not dense.
    """
    if leaf is None:
        raise ValueError(
            "Expected an array for each input and each target, since a batch of a PyDataset has no place for none. "
            "Received: None among them. Pass zeros for a target without a loss."
        )
    # pandas 3 says that it is of "pandas", and those before it of "pandas.core.series"
    of_pandas = any(
        cls.__name__ == "Series" and cls.__module__.partition(".")[0] == "pandas" for cls in type(leaf).__mro__
    )
    return array_of(leaf)[:, None] if of_pandas else array_of(leaf)


def _weighted_alike(given: tuple[Any, ...]) -> tuple[Any, ...]:
    """The tuple (x, y, sample_weight) with weights of 1 in the place of each None among its sample weights.

    Tuples without sample weights are returned as they are.
    """
    leaves = keras.tree.flatten(given[2]) if len(given) == 3 else []
    if all(leaf is not None for leaf in leaves):
        return given
    first = next(leaf for leaf in keras.tree.flatten(given[:2]) if leaf is not None)
    ones = np.ones(len(first), keras.config.floatx())
    return (*given[:2], keras.tree.map_structure(lambda leaf: ones if leaf is None else leaf, given[2]))


class ArraySource:
    """A source of arrays in memory, or nested structures of arrays, with samples along the first axis.

    Raises:
        ValueError, TypeError: arrays of unequal length, scalars, or what is not dense.
    """

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
        """The rows of all arrays at `indices`."""
        return keras.tree.map_structure(lambda leaf: as_floatx(leaf[indices]), self._arrays)


class SampleSource:
    """A source of single samples: an object with `__len__` and `__getitem__`.

    Each item is one sample: x, (x, y), (x, y, sample_weight), or a dictionary.
    """

    block = 1
    arrays: Sequence[np.ndarray] = ()

    def __init__(self, samples: Sequence[Any]) -> None:
        self._samples = samples

    def __len__(self) -> int:
        return len(self._samples)

    def take(self, indices: np.ndarray) -> Batch:
        """The samples at `indices`, stacked along a new first axis."""
        return stacked([packed(self._samples[int(index)]) for index in indices])


class BatchSource:
    """A source of the samples of a PyDataset, which are cut out of its batches.

    All batches but the last must have the same size. Shuffling keeps the samples of a batch together, so that a rank
    loads few batches. Batches must hold the same samples in each epoch: `BalancedDataset` shuffles, not the PyDataset.

    Raises:
        ValueError: the PyDataset is infinite.
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
        """Loads the batches of the samples at `indices`, and joins their rows.

        Raises:
            ValueError: a batch has another size than expected.
        """
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
