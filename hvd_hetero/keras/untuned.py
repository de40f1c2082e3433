"""Datasets that TensorFlow does not tune, so that destroying an iterator does not wait for its tuner.

TensorFlow tunes each iterator of a tf.data.Dataset in a thread. That thread sleeps for longer and longer, at last for a
minute, and may miss that it is to end, as the signal that wakes it comes before the flag is set (TensorFlow 2.21).
Destroying the iterator then waits for the thread, about as long as the iterator has lived: docs/measured.md says how
often.
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Iterator
from typing import Any

import keras


class UntunedDataset(keras.utils.PyDataset):
    """A PyDataset that TensorFlow does not tune: there is nothing to tune, as Python makes its batches."""

    def read(self, batches: Iterator[Any]) -> Iterator[Any]:
        """The batches that Keras reads from this dataset; a subclass may end them early."""
        return batches


def untuned(dataset: Any) -> Any:
    """The same tf.data.Dataset, with TensorFlow's tuner switched off."""
    options = sys.modules["tensorflow"].data.Options()
    options.autotune.enabled = False
    return dataset.with_options(options)


def _leave_untuned() -> None:
    """Makes Keras leave an `UntunedDataset` untuned, and read it through `read`. Keras has no public hook for what it
    makes of a PyDataset."""
    try:
        adapters = importlib.import_module("keras.src.trainers.data_adapters.py_dataset_adapter")
        as_made, as_read = adapters.PyDatasetAdapter.get_tf_dataset, adapters.PyDatasetAdapter._get_iterator
    except (ImportError, AttributeError):  # a later Keras has moved them
        return

    @functools.wraps(as_made)
    def get_tf_dataset(self: Any) -> Any:
        dataset = as_made(self)
        return untuned(dataset) if isinstance(self.py_dataset, UntunedDataset) else dataset

    @functools.wraps(as_read)
    def get_iterator(self: Any) -> Any:
        batches = as_read(self)
        return self.py_dataset.read(batches) if isinstance(self.py_dataset, UntunedDataset) else batches

    adapters.PyDatasetAdapter.get_tf_dataset = get_tf_dataset
    adapters.PyDatasetAdapter._get_iterator = get_iterator


_leave_untuned()
