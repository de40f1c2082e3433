"""Sources of samples: whatever a user has, seen as samples with a number each."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import keras
import numpy as np

# Kinds of tf.data.Dataset, as TensorFlow calls them.
KEEPS_ELEMENTS = {"AssertCardinality", "Cache", "Options", "Prefetch", "Repeat", "Shard", "Shuffle", "Skip", "Take"}
BATCHES = {"Batch", "ParallelBatch", "PaddedBatch"}
MAPS = {"Map", "ParallelMap"}

Batch = Any  # a tuple (x,), (x, y) or (x, y, sample_weight) of nested arrays, or a dictionary


class Source(Protocol):
    """Samples that can be taken by number."""

    block: int  # neighbouring samples that are loaded together
    arrays: Sequence[np.ndarray]  # with all samples, where they are in memory

    def __len__(self) -> int: ...

    def take(self, indices: np.ndarray) -> Batch:
        """The batch of these samples, in this order."""


def source_of(x: Any, y: Any, sample_weight: Any, *, global_batch_size: int) -> Source:
    """The source for a user's arguments.

    Raises:
        TypeError, ValueError: for what has no numbered samples.
    """
    if not _is_tf_data(x) and _is_array_like(x):
        return ArraySource(x, y, sample_weight)
    if y is not None or sample_weight is not None:
        raise TypeError(
            f"y, sample_weight: expected none, because {type(x).__name__} holds them itself. Received: some. Let it "
            "give (x, y) or (x, y, sample_weight)."
        )
    if _is_tf_data(x):
        return StreamSource(x, global_batch_size=global_batch_size)
    if isinstance(x, keras.utils.PyDataset):
        return BatchSource(x)
    if hasattr(x, "__len__") and hasattr(x, "__getitem__"):
        return SampleSource(x)
    raise TypeError(
        "x: expected arrays, a keras.utils.PyDataset, a tf.data.Dataset of known length, or samples by number (with "
        f"__len__ and __getitem__). Received: {type(x).__name__}. A generator has no numbered samples: collect them."
    )


def _is_tf_data(x: Any) -> bool:
    """Whether x is a tf.data.Dataset, without importing TensorFlow."""
    return any(
        cls.__name__ == "DatasetV2" and cls.__module__.startswith("tensorflow.") for cls in type(x).__mro__
    )


def _is_array_like(x: Any) -> bool:
    return isinstance(x, (dict, list, tuple)) or hasattr(x, "shape")


def _array(leaf: Any) -> np.ndarray:
    """A numpy view of an array or tensor, where there is one."""
    if hasattr(leaf, "detach"):  # a torch tensor
        leaf = leaf.detach().cpu()
    return leaf.to_numpy() if hasattr(leaf, "to_numpy") else np.asarray(leaf)


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
    found = _array(leaf)
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


def _as_floatx(leaf: np.ndarray) -> np.ndarray:
    """Floating point in Keras' floatx, as `fit` makes it of arrays."""
    return leaf.astype(keras.config.floatx(), copy=False) if leaf.dtype.kind == "f" else leaf


def with_texts(batch: Batch) -> Batch:
    """The batch, with its texts as the tensors that TensorFlow, which alone has any, makes of them: Keras takes no
    arrays of them from a PyDataset."""
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
                "x, y, sample_weight: expected arrays with samples along their first axis. Received: a scalar."
            )
        lengths = sorted({len(leaf) for leaf in self.arrays})
        if len(lengths) != 1:
            raise ValueError(f"Expected arrays of the same number of samples. Received: {lengths}.")
        self._length = lengths[0]

    def __len__(self) -> int:
        return self._length

    def take(self, indices: np.ndarray) -> Batch:
        """Rows of the arrays."""
        return keras.tree.map_structure(lambda leaf: _as_floatx(leaf[indices]), self._arrays)


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
        return _stacked([packed(self._samples[int(index)]) for index in indices])


class BatchSource:
    """A PyDataset, whose batches are taken apart into samples.

    All batches but the last have to be of one size. Samples of a batch stay together in the order of an epoch, so that
    a rank loads few of them. Which samples a batch has must not change between epochs: shuffling is the balancer's.
    """

    arrays: Sequence[np.ndarray] = ()

    def __init__(self, batches: keras.utils.PyDataset) -> None:
        if batches.num_batches is None:
            raise ValueError("x: expected a PyDataset of finite length. Received: an infinite one.")
        self._batches = batches
        self.block = _rows(packed(batches[0]))
        self._length = self.block * (batches.num_batches - 1) + _rows(packed(batches[batches.num_batches - 1]))

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
            if _rows(batch) != expected:
                raise ValueError(
                    f"x: expected {expected} samples in batch {number} of the PyDataset: all batches but the last of "
                    f"one size. Received: {_rows(batch)}."
                )
            parts.append(_rows_of(batch, indices[start:stop] - number * self.block))
        return _joined(parts)


class StreamSource:
    """A tf.data.Dataset of single samples, read in its order: each rank passes over the samples of the others.

    Its order has to be the same on all ranks: shuffle with a seed, or not at all.
    """

    block = 1
    arrays: Sequence[np.ndarray] = ()

    def __init__(self, samples: Any, *, global_batch_size: int) -> None:
        if _ends_in_batches(samples):
            raise ValueError(
                "x: expected a tf.data.Dataset of single samples: the balancer makes the batches. Received: one "
                "of batches. Leave its batch() out, or add unbatch(). Where such a batch is one sample: map(lambda "
                "*x: x), and heed no warning. In place of padded_batch(): pad all samples to one length, with map()."
            )
        if _maps_batches(samples):
            warnings.warn(
                "x: expected a tf.data.Dataset of single samples: the balancer makes the batches. Received: one of "
                "batches that a map() follows, each of which counts as one sample here. Leave its batch() out, or add "
                "unbatch(), unless that is meant.",
                stacklevel=4,
            )
        self._length = int(samples.cardinality())
        if self._length < 0:
            raise ValueError(
                "x: expected a tf.data.Dataset of known length. Received: one of unknown or infinite length. Say it "
                "with .apply(tf.data.experimental.assert_cardinality(n))."
            )
        self._size = global_batch_size
        self._whole = samples.batch(global_batch_size)
        self._stream: Iterator[Any] = iter(())
        self._at, self._batch = -1, None  # the global batch read last

    def __len__(self) -> int:
        return self._length

    def take(self, indices: np.ndarray) -> Batch:
        """These samples, in ascending order, out of the global batches that they are in."""
        parts = []
        for number in np.unique(indices // self._size).tolist():
            if number < self._at or self._at < 0:
                self._stream, self._at = self._whole.as_numpy_iterator(), -1
            while self._at < number:
                at, self._at = self._at, -1  # where reading fails, the stream has moved on all the same
                self._batch = packed(self._read())
                self._at = at + 1
            parts.append(_rows_of(self._batch, indices[indices // self._size == number] - number * self._size))
        return _joined(parts)


    def _read(self) -> Any:
        try:
            return next(self._stream)
        except Exception as error:
            told = getattr(error, "message", "")
            if type(error).__name__ != "InvalidArgumentError" or "batch tensors with different shapes" not in told:
                raise
            raise ValueError(
                f"Expected samples of one shape. Received: {told} Pad all to one length. Where the tf.data.Dataset "
                "makes batches before a map(), leave its batch() out, or add unbatch()."
            ) from error


def _ends_in_batches(dataset: Any) -> bool:
    """Whether a tf.data.Dataset makes batches, and nothing of them."""
    while (name := _kind(dataset)) in KEEPS_ELEMENTS:
        dataset = getattr(dataset, "_input_dataset", None)
    return name in BATCHES


def _maps_batches(dataset: Any) -> bool:
    """Whether a tf.data.Dataset makes batches and maps them, so that their rows stay: what takes a batch apart, as
    where it is a piece of text, makes a sample of it."""
    batches, mapped = dataset, False
    while (name := _kind(batches)) in KEEPS_ELEMENTS | MAPS:
        mapped |= name in MAPS
        batches = getattr(batches, "_input_dataset", None)
    return name in BATCHES and mapped and len(_leading(batches)) == 1 and _leading(batches) == _leading(dataset)


def _kind(dataset: Any) -> str:
    return type(dataset).__name__.strip("_").removesuffix("Dataset")


def _leading(dataset: Any) -> set[Any]:
    """The lengths of the first axes of a tf.data.Dataset's elements; None where that is not known, -1 for a number."""
    shapes = [getattr(leaf, "shape", None) for leaf in keras.tree.flatten(dataset.element_spec)]
    return {-1 if shape.rank == 0 else shape[0] if shape.rank else None for shape in shapes if shape is not None}


def _rows(batch: Batch) -> int:
    return len(keras.tree.flatten(batch)[0])


def _rows_of(batch: Batch, rows: np.ndarray) -> Batch:
    return keras.tree.map_structure(lambda leaf: _array(leaf)[rows], batch)


def _joined(parts: Sequence[Batch]) -> Batch:
    if len(parts) == 1:
        return keras.tree.map_structure(_as_floatx, parts[0])
    return keras.tree.map_structure(lambda *leaves: _one(np.concatenate, leaves, [x.shape[1:] for x in leaves]), *parts)


def _stacked(samples: Sequence[Batch]) -> Batch:
    def stack(*leaves: Any) -> np.ndarray:
        arrays = [_array(leaf) for leaf in leaves]
        return _one(np.stack, arrays, [x.shape for x in arrays])

    return keras.tree.map_structure(stack, *samples)


def _one(put: Any, arrays: Sequence[np.ndarray], shapes: Sequence[tuple[int, ...]]) -> np.ndarray:
    """`put` of all arrays, with samples of these shapes."""
    if len(set(shapes)) > 1:
        found = ", ".join(map(str, sorted(set(shapes))))
        raise ValueError(f"Expected samples of one shape. Received: {found}. Pad all to one length.")
    return _as_floatx(put(arrays))
