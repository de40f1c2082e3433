"""Datasets that TensorFlow does not tune, so that nobody waits for its tuner.

A thread of its own tunes what an iterator of a tf.data.Dataset reads. It sleeps for longer and longer, at last for a
minute, and may miss that it is to end, as what wakes it up comes before it is told (TensorFlow 2.21). Who lets the
iterator go waits for it, about as long as it has lived: docs/measured.md has how often.
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Iterator
from typing import Any

import keras


class UntunedDataset(keras.utils.PyDataset):
    """One in which there is nothing to tune: Python makes its batches."""

    def read(self, batches: Iterator[Any]) -> Iterator[Any]:
        """The batches that Keras reads of it."""
        return batches


def untuned(dataset: Any) -> Any:
    """The same tf.data.Dataset, which nothing tunes."""
    options = sys.modules["tensorflow"].data.Options()
    options.autotune.enabled = False
    return dataset.with_options(options)


def _leave_untuned() -> None:
    """Lets Keras leave them so, and read them by `read`. It has no public place for what becomes of a PyDataset."""
    try:
        adapters = importlib.import_module("keras.src.trainers.data_adapters.py_dataset_adapter")
        as_made, as_read = adapters.PyDatasetAdapter.get_tf_dataset, adapters.PyDatasetAdapter._get_iterator
    except (ImportError, AttributeError):  # in a later Keras
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
