"""The samples of a batch, however it nests its tensors: the rows of those that have as many."""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from torch.utils import _pytree as pytree

Batch = TypeVar("Batch")


def has_rows(leaf: Any, samples: int) -> bool:
    """Whether it is a tensor of so many samples, and not one for all of them, such as a number or classes' weights."""
    return isinstance(leaf, torch.Tensor) and leaf.ndim > 0 and len(leaf) == samples


def is_listed(node: Any, samples: int) -> bool:
    """Whether it is a list with one element for each sample, as of names or of images of unlike sizes."""
    if type(node) is not list or len(node) != samples:
        return False
    return not any(has_rows(leaf, samples) for leaf in pytree.tree_leaves(node))


def has_samples(batch: Any, samples: int) -> bool:
    """Whether anything in `batch` is of so many samples."""
    leaves = pytree.tree_leaves(batch, is_leaf=lambda node: is_listed(node, samples))
    return any(has_rows(leaf, samples) or is_listed(leaf, samples) for leaf in leaves)


def cut(batch: Batch, part: slice, samples: int) -> Batch:
    """`batch`, of so many samples, with those of `part` alone. What is not of so many samples stays whole."""
    return pytree.tree_map(  # type: ignore[no-any-return]
        lambda leaf: leaf[part] if has_rows(leaf, samples) or is_listed(leaf, samples) else leaf,
        batch,
        is_leaf=lambda node: is_listed(node, samples),
    )
