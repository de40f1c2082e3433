"""Datasets for which TensorFlow's autotuner is off, so that destroying an iterator does not wait for the tuner.

TensorFlow tunes each iterator of a tf.data.Dataset in a thread. That thread sleeps for longer and longer intervals, up
to a minute. It may miss that it should end, as the signal that wakes it comes before the flag is set (TensorFlow 2.21).
Destroying the iterator then waits for the thread, about as long as the iterator has lived. docs/measured.md says how
often that happens.
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Iterator
from typing import Any

import keras


class UntunedDataset(keras.utils.PyDataset):
    """A PyDataset for which TensorFlow's autotuner is off. It has nothing to tune, as Python makes the batches."""

    def read(self, batches: Iterator[Any]) -> Iterator[Any]:
        """The batches that Keras gets from this dataset. A subclass may override this, to end them early.

        Args:
            batches: the iterator that Keras has made of this dataset.
        """
        return batches


def untuned(dataset: Any) -> Any:
    """A tf.data.Dataset with the same elements, and with TensorFlow's autotuner off."""
    options = sys.modules["tensorflow"].data.Options()
    options.autotune.enabled = False
    return dataset.with_options(options)


def _leave_untuned() -> None:
    """Patches Keras to switch off the autotuner for an `UntunedDataset`, and to read it through `UntunedDataset.read`,
    in its order: Keras would draw another one from Python's random numbers, and so once more in a job that is resumed.

    Keras has no public hook for the tf.data.Dataset that it makes of a PyDataset. If a later Keras has moved the
    methods, nothing is patched.
    """
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
        if not isinstance(self.py_dataset, UntunedDataset):
            return as_read(self)
        self.shuffle = False
        return self.py_dataset.read(as_read(self))

    adapters.PyDatasetAdapter.get_tf_dataset = get_tf_dataset
    adapters.PyDatasetAdapter._get_iterator = get_iterator


_leave_untuned()
