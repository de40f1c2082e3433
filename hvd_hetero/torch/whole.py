"""Finds the whole numbers in a PyTorch dataset that can be read without loading samples, for a checksum."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import ConcatDataset, Subset, TensorDataset

from hvd_hetero.optimizers.data_checksum import rows_covered

WHOLE = {
    torch.bool, torch.int8, torch.int16, torch.int32, torch.int64,
    torch.uint8, torch.uint16, torch.uint32, torch.uint64,
}  # fmt: skip


def whole_numbers(dataset: Any) -> Iterator[Any]:
    """Yields the indices of a `Subset`, as `random_split` makes it, and the tensors of a `TensorDataset`, also within a
    `ConcatDataset`, for `checksum`. Yields nothing for other datasets, nor for derived ones that hold something else.
    """
    if isinstance(dataset, Subset):
        yield from _rows(getattr(dataset, "indices", ()))
        yield from whole_numbers(getattr(dataset, "dataset", None))
    elif isinstance(dataset, TensorDataset):
        for tensor in getattr(dataset, "tensors", ()):
            yield from _rows(tensor)
    elif isinstance(dataset, ConcatDataset):
        for part in getattr(dataset, "datasets", ()):
            yield from whole_numbers(part)


def _rows(values: Any) -> Iterator[Any]:
    """Yields `values`; of a tensor on a device only the rows that the checksum looks at; nothing for tensors that are
    floating-point, sparse or quantized."""
    if not isinstance(values, torch.Tensor):
        yield values
    elif values.dtype in WHOLE and values.layout is torch.strided:
        here = values.device.type == "cpu"
        yield (values if here else values[rows_covered(len(values), values.nbytes)].cpu()).numpy()
