"""The whole numbers in a PyTorch dataset that can be told without loading samples."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import ConcatDataset, Subset, TensorDataset


def whole_numbers(dataset: Any) -> Iterator[Any]:
    """Which samples a `Subset` has, as of `random_split`, and what a `TensorDataset` holds; none of other datasets. As
    arrays, or what they can be made of."""
    if isinstance(dataset, Subset):
        yield dataset.indices
        yield from whole_numbers(dataset.dataset)
    elif isinstance(dataset, TensorDataset):
        yield from (each.detach().cpu().numpy() for each in dataset.tensors if not _has_fractions(each))
    elif isinstance(dataset, ConcatDataset):
        for part in dataset.datasets:
            yield from whole_numbers(part)


def _has_fractions(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()
