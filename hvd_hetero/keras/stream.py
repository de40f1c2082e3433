"""Reads samples by number from a tf.data.Dataset, which only gives them in order; there may be one for each epoch."""

from __future__ import annotations

import _thread
import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import numpy as np

from hvd_hetero.engine import script

from .batch import Batch, joined, packed, rows_of

# Kinds of tf.data.Dataset, by the names of TensorFlow's classes.
KEEPS_ELEMENTS = {
    "AssertCardinality", "Cache", "Filter", "IgnoreErrors", "Options", "Prefetch", "Repeat", "Shard", "Shuffle", "Skip",
    "Snapshot", "Take", "TakeWhile",
}  # fmt: skip
JOINS = {"Concatenate", "Zip"}
BATCHES = {"Batch", "MapAndBatch", "ParallelBatch", "PaddedBatch", "Rebatch"}
MAPS = {"Map", "ParallelMap"}
NOT_DENSE = {"RaggedTensorSpec", "SparseTensorSpec", "TensorArraySpec", "DatasetSpec"}  # specs of elements


class StreamSource:
    """A tf.data.Dataset of single samples, read in its order: each rank skips the samples of the others.

    Its order has to be the same on all ranks, and each time that it is read: shuffle with a seed and with
    `reshuffle_each_iteration=False`, or not at all.
    """

    block = 1
    _stream: Iterator[Any] | None = None

    def __init__(self, samples: Any, *, global_batch_size: int) -> None:
        check_samples(samples)
        if varies := _variation(samples):
            raise ValueError(
                "x: expected a tf.data.Dataset that gives its samples in the same order on all ranks, and each time "
                f"that it is read, as ranks read it unlike often. Received: one with {varies}. Say "
                "shuffle(n, seed=..., reshuffle_each_iteration=False), and leave deterministic=False out; to what "
                "shuffles by itself, as keras.utils.image_dataset_from_directory, say shuffle=False first. For another "
                "order in each epoch give a function of it: lambda epoch: dataset.shuffle(n, seed=epoch, "
                "reshuffle_each_iteration=False)."
            )
        self._length = int(samples.cardinality())
        if self._length < 0:
            raise ValueError(
                "x: expected a tf.data.Dataset of known length. Received: one of unknown or infinite length. Say it "
                "with .apply(tf.data.experimental.assert_cardinality(n))."
            )
        self._size = global_batch_size
        self._whole = samples.batch(global_batch_size)
        self._at, self._batch = -1, None  # the global batch read last

    def __len__(self) -> int:
        return self._length

    @property
    def arrays(self) -> Sequence[np.ndarray]:
        """The arrays of the first global batch, for a checksum; none if it cannot be read: the error is raised again
        when the batch is needed."""
        try:
            return keras.tree.flatten(self.take(np.arange(min(self._size, self._length))))
        except Exception:
            return ()

    def take(self, indices: np.ndarray) -> Batch:
        """The batch of these samples, whose numbers are in ascending order, read from the global batches they are in.
        """
        parts = []
        for number in np.unique(indices // self._size).tolist():
            if number < self._at or self._at < 0:
                self._end()
                self._stream, self._at = self._whole.as_numpy_iterator(), -1
            while self._at < number:
                at, self._at = self._at, -1  # -1 if reading fails: the stream has moved on, and is begun anew
                self._batch = read(self._stream)
                if self._batch is None:
                    raise ValueError(
                        f"x: expected {self._length} samples of the tf.data.Dataset, the cardinality that it has "
                        f"told. Received: no more after {(at + 1) * self._size}."
                    )
                self._at = at + 1
            parts.append(rows_of(self._batch, indices[indices // self._size == number] - number * self._size))
        return joined(parts)

    def _end(self) -> None:
        left, self._stream = [self._stream], None
        let_go(left)

    __del__ = _end


class EpochStreams:
    """A tf.data.Dataset for each epoch: see `StreamSource`.

    Args:
        make: returns the dataset of an epoch, the same on all ranks; all of one length.

    Attributes:
        epoch: the epoch whose samples `take` returns.
    """

    block = 1

    def __init__(self, make: Callable[[int], Any], *, global_batch_size: int) -> None:
        self._make, self._size = make, global_batch_size
        self.epoch = self._made = 0
        self._stream = self._of(0)

    def __len__(self) -> int:
        return len(self._stream)

    @property
    def arrays(self) -> Sequence[np.ndarray]:
        """The arrays of the first global batch of an epoch: see `StreamSource`."""
        return self._stream.arrays

    def take(self, indices: np.ndarray) -> Batch:
        """The batch of these samples of the epoch, whose numbers are in ascending order."""
        if self.epoch != self._made:
            stream = self._of(self.epoch)
            if len(stream) != len(self):
                raise ValueError(
                    "x: expected a tf.data.Dataset of as many samples for each epoch. Received: one of "
                    f"{len(self)} for epoch {self._made}, and of {len(stream)} for epoch {self.epoch}."
                )
            self._stream, self._made = stream, self.epoch
        return self._stream.take(indices)

    def _of(self, epoch: int) -> StreamSource:
        samples = self._make(epoch)
        if not is_tf_data(samples):
            raise TypeError(
                "x: expected a function that gives a tf.data.Dataset for the number of an epoch. Received: one that "
                f"gives {type(samples).__name__}."
            )
        return StreamSource(samples, global_batch_size=self._size)


def check_samples(samples: Any) -> None:
    """Raises ValueError for a tf.data.Dataset whose elements are no single samples, or of which no rows can be taken.
    """
    if _ends_in_batches(samples):
        raise ValueError(
            "x: expected a tf.data.Dataset of single samples: the balancer makes the batches. Received: one "
            "of batches. Leave its batch() out, or add unbatch(). Where such a batch is one sample: map(lambda "
            "*x: x), and heed no warning. In place of padded_batch(): pad all samples to one length, with map()."
        )
    if _maps_batches(samples):
        script.warn(
            "x: expected a tf.data.Dataset of single samples: the balancer makes the batches. Received: one of "
            "batches that a map() follows, each of which counts as one sample here. Leave its batch() out, or add "
            "unbatch(), unless that is meant.",
        )
    if other := _other_than_dense(samples):
        raise ValueError(
            "x: expected a tf.data.Dataset of dense samples of one shape. Received: one with elements of "
            f"{', '.join(other)}. Make them dense with map(), by to_tensor() or tf.sparse.to_dense(), and pad all "
            "to one length."
        )


def read(stream: Iterator[Any] | None) -> Batch | None:
    """The next batch of a tf.data.Dataset's numpy iterator; None at its end.

    Raises:
        ValueError: its samples have different shapes.
    """
    try:
        batch = next(stream or iter(()), None)
    except Exception as error:
        told = getattr(error, "message", "")
        if type(error).__name__ != "InvalidArgumentError" or "batch tensors with different shapes" not in told:
            raise
        raise ValueError(
            f"Expected samples of one shape. Received: {told} Pad all to one length. Where the tf.data.Dataset "
            "makes batches before a map(), leave its batch() out, or add unbatch()."
        ) from error
    return None if batch is None else packed(batch)


def let_go(left: list[Any]) -> None:
    """Destroys what `left` holds in a separate thread: the user's dataset is left to TensorFlow's tuner, which
    destroying an iterator may wait for; see `untuned`."""
    if left[0] is not None:
        # Not a `threading.Thread`: it takes a lock to start, which may be held when the collector runs this.
        with contextlib.suppress(RuntimeError):  # the interpreter is ending
            _thread.start_new_thread(left.clear, ())


def is_function(x: Any) -> bool:
    """Whether x can be called, and holds no samples itself."""
    return callable(x) and not any(hasattr(x, name) for name in ("shape", "__getitem__", "__len__"))


def is_tf_data(x: Any) -> bool:
    """Whether x is a tf.data.Dataset, without importing TensorFlow."""
    return any(cls.__name__ == "DatasetV2" and cls.__module__.startswith("tensorflow.") for cls in type(x).__mro__)


def _with_inputs(dataset: Any) -> Iterator[Any]:
    """A tf.data.Dataset and all datasets that it is made of, for which TensorFlow has no public name."""
    yield dataset
    for each in getattr(dataset, "_inputs", tuple)():
        yield from _with_inputs(each)


def _variation(dataset: Any) -> str:
    """A text that says what makes the order of a tf.data.Dataset's elements vary between ranks or iterations; empty if
    nothing is known to."""
    if dataset.options().deterministic is False:
        return "options().deterministic=False"
    for each in _with_inputs(dataset):
        if getattr(each, "_reshuffle_each_iteration", False):
            return "a shuffle() that has another order each time"
        if getattr(each, "_rerandomize", None):
            return "rerandomize_each_iteration=True"
        if getattr(each, "_deterministic", None) == "false":
            return "deterministic=False"
        if _kind(each) == "ParallelInterleave" and _is_told_to_vary(each):
            return "deterministic=False"
        seeds = [int(seed) for name in ("_seed", "_seed2") if (seed := getattr(each, name, None)) is not None]
        if seeds and not any(seeds):
            return f"a {'shuffle()' if _kind(each) == 'Shuffle' else 'random choice'} without a seed"
    return ""


def _is_told_to_vary(dataset: Any) -> bool:
    """Whether an interleave() of a tf.data.Dataset, or what it is made of, has `deterministic=False`. TensorFlow keeps
    that of an interleave() in its graph alone, of which there is none if it is made of arrays of more than 2 GB."""
    import tensorflow as tf

    with contextlib.suppress(tf.errors.OpError):
        ignore = tf.data.experimental.ExternalStatePolicy.IGNORE
        told = dataset._as_serialized_graph(external_state_policy=ignore).numpy()
        nodes = tf.compat.v1.GraphDef.FromString(told).node
        return any(node.attr["deterministic"].s == b"false" for node in nodes)
    return False


def _other_than_dense(dataset: Any) -> list[str]:
    """The kinds of a tf.data.Dataset's elements of which no rows can be taken, such as ragged tensors. None among the
    elements is no tensor, and is accepted."""
    kinds = {type(each).__name__ for each in keras.tree.flatten(getattr(dataset, "element_spec", ()))}
    return sorted(kinds & NOT_DENSE)


def _ends_in_batches(dataset: Any) -> bool:
    """Whether a tf.data.Dataset makes batches and leaves them as they are, also as pairs with batches of another one.
    """
    while (name := _kind(dataset)) in KEEPS_ELEMENTS:
        dataset = getattr(dataset, "_input_dataset", None)
    if name in JOINS:
        return all(map(_ends_in_batches, dataset._inputs()))
    return name in BATCHES


def _maps_batches(dataset: Any) -> bool:
    """Whether a tf.data.Dataset makes batches and then maps them so that their rows stay. If a map changes the number
    of rows, as when a batch is a piece of text, it is taken to make one sample of each batch."""
    batches, mapped = dataset, False
    while (name := _kind(batches)) in KEEPS_ELEMENTS | MAPS:
        mapped |= name in MAPS
        batches = getattr(batches, "_input_dataset", None)
    return name in BATCHES and mapped and len(_leading(batches)) == 1 and _leading(batches) == _leading(dataset)


def _kind(dataset: Any) -> str:
    return type(dataset).__name__.strip("_").removesuffix("Dataset")


def _leading(dataset: Any) -> set[Any]:
    """The lengths of the first axes of a tf.data.Dataset's elements: None if not known, -1 for a scalar."""
    shapes = [getattr(leaf, "shape", None) for leaf in keras.tree.flatten(dataset.element_spec)]
    return {-1 if shape.rank == 0 else shape[0] if shape.rank else None for shape in shapes if shape is not None}
