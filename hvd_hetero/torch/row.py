"""Cuts batches by samples, however they nest their tensors and arrays: those with as many rows as the batch has samples
are taken to have one row per sample."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any, TypeVar

import numpy as np
import torch
from torch.nn.utils.rnn import PackedSequence, pack_sequence, pad_packed_sequence
from torch.utils import _pytree as pytree

from hvd_hetero.engine import script

Batch = TypeVar("Batch")
ARRAYS = (torch.Tensor, np.ndarray)
FEW = 3  # a tuple of no more elements is rather one of fields than of samples


def has_rows(leaf: Any, samples: int) -> bool:
    """Whether `leaf` is a tensor or an array with one row per sample, and not one for all samples, such as the weights
    of classes."""
    if isinstance(leaf, torch.Tensor):
        return leaf.ndim > 0 and leaf.size(0) == samples  # of a nested tensor, len() and the shape raise
    return isinstance(leaf, np.ndarray) and leaf.ndim > 0 and len(leaf) == samples


def is_listed(node: Any, samples: int) -> bool:
    """Whether `node` is a list with one element per sample, such as names or images of unlike sizes, or a tuple of as
    many, as `zip(*samples)` gives. A list of as many fields, whose tensors have a row per sample, is none; but one
    tensor of several alike may have as many rows by chance, as a sequence of unlike ones."""
    if type(node) not in (list, tuple) or len(node) != samples:
        return False
    if _are_texts(node):
        return True
    if type(node) is tuple and samples <= FEW and _may_be_fields(node, samples):
        return False
    with_rows = [has_rows(leaf, samples) for leaf in _leaves(node) if isinstance(leaf, ARRAYS)]
    return not any(with_rows) or (not all(with_rows) and _are_alike(node))


def _are_texts(node: Any) -> bool:
    """Whether `node` has texts alone, as PyTorch's `default_collate` makes tuples of them."""
    return bool(node) and all(isinstance(each, (str, bytes)) for each in node)


def _are_alike(node: Any) -> bool:
    return len({_form(each) for each in node}) == 1


def _may_be_fields(node: tuple[Any, ...], samples: int) -> bool:
    """Whether a tuple of a few elements may be one of fields: these are unlike each other, or nested, or have the
    samples along some axis, as the two states of an LSTM."""
    arrays = [leaf for leaf in _leaves(node) if isinstance(leaf, ARRAYS)]
    along = any(getattr(each, "is_nested", False) or samples in each.shape for each in arrays)
    return along or not _are_alike(node) or any(isinstance(each, (list, tuple)) for each in node)


def _form(node: Any) -> tuple[Any, ...]:
    """The form of one sample, which all samples share: the types and numbers of dimensions of its tensors, and the
    types of what else it holds."""
    return tuple((each.dtype, each.ndim) if isinstance(each, ARRAYS) else type(each) for each in _leaves(node))


def is_packed(node: Any, samples: int) -> bool:
    """Whether `node` is a `PackedSequence` with one sequence per sample."""
    return isinstance(node, PackedSequence) and int(node.batch_sizes[0]) == samples


def has_samples(batch: Any, samples: int) -> bool:
    """Whether anything in `batch` has one row, element or sequence per sample."""
    leaves = _leaves(batch, lambda node: _is_leaf(node, samples, batch))
    return any(is_of(leaf, samples) for leaf in leaves for is_of in (has_rows, is_listed, is_packed))


def _leaves(node: Any, is_leaf: Callable[[Any], bool] | None = None) -> Iterator[Any]:
    for leaf in pytree.tree_leaves(node, is_leaf=is_leaf):
        held = _held(leaf)
        if held is None:
            yield leaf
        else:
            yield from _leaves(held, is_leaf)


def _is_leaf(node: Any, samples: int, batch: Any) -> bool:
    """Whether a part of `batch` is cut as it is. A batch that is a tuple is one of fields, if not of texts."""
    if isinstance(node, PackedSequence):
        return True
    return is_listed(node, samples) and (node is not batch or type(node) is list or _are_texts(node))


def _held(node: Any) -> dict[Any, Any] | None:
    """What a mapping (such as a tokenizer returns) or a dataclass holds, by name. PyTorch's pytrees take these for
    single leaves. None for anything else."""
    if isinstance(node, Mapping):
        return dict(node)
    if dataclasses.is_dataclass(node) and not isinstance(node, type):
        names = [field.name for field in dataclasses.fields(node)]
        return {name: getattr(node, name) for name in names if hasattr(node, name)}
    return None


def _holding(node: Any, parts: dict[Any, Any]) -> Any:
    """A copy of the mapping or dataclass `node` that holds `parts` instead."""
    if isinstance(node, Mapping) and not isinstance(node, MutableMapping):
        return type(node)(parts)  # type: ignore[call-arg]
    made = copy.copy(node)
    if isinstance(made, MutableMapping):
        made.update(parts)
    else:
        for name, part in parts.items():
            object.__setattr__(made, name, part)  # also in a frozen dataclass
    return made


def _cut_packed(packed: PackedSequence, part: slice) -> PackedSequence:
    """The sequences `part` of a packed batch. None of them cannot be packed by PyTorch: then the result has a first
    time step of no sequence, which recurrent layers take, and unpacking gives none."""
    rows, lengths = pad_packed_sequence(packed, batch_first=True)
    chosen = [row[:length] for row, length in zip(rows[part], lengths[part].tolist(), strict=True)]
    if not chosen:
        none = torch.empty(0, dtype=torch.int64, device=packed.data.device)
        return PackedSequence(packed.data[:0], packed.batch_sizes.new_zeros(1), none, none)
    return pack_sequence(chosen, enforce_sorted=packed.sorted_indices is None)


def _rows(tensor: Any, part: slice) -> Any:
    """The rows `part` of a tensor, also of nested and sparse ones, which cannot be sliced, or of an array."""
    if isinstance(tensor, np.ndarray):
        return tensor[part]
    if tensor.is_nested:
        chosen = list(tensor.unbind()[part])
        if tensor.layout is torch.jagged and not chosen:
            return torch.nested.nested_tensor_from_jagged(tensor.values()[:0], offsets=tensor.offsets()[:1])
        return torch.nested.as_nested_tensor(chosen, dtype=tensor.dtype, device=tensor.device, layout=tensor.layout)
    if tensor.layout is torch.strided:
        return tensor[part]
    numbers = torch.arange(tensor.size(0), device=tensor.device)[part]
    return tensor.to_sparse_coo().index_select(0, numbers).to_sparse(layout=tensor.layout)


def cut(batch: Batch, part: slice, samples: int) -> Batch:
    """A copy of `batch` with the samples `part` alone. What has no row per sample, of which there are `samples`, stays
    whole."""

    def cut_leaf(leaf: Any) -> Any:
        if is_packed(leaf, samples):
            return _cut_packed(leaf, part)
        if (held := _held(leaf)) is not None:
            return _holding(leaf, cut(held, part, samples))
        if has_rows(leaf, samples):
            return _rows(leaf, part)
        return leaf[part] if is_listed(leaf, samples) else leaf

    return pytree.tree_map(  # type: ignore[no-any-return]
        cut_leaf, batch, is_leaf=lambda node: _is_leaf(node, samples, batch)
    )


def fewer_rows(batch: Any, samples: int) -> int | None:
    """The number of rows of the batch's tensors, if all have the same, and fewer than `samples`; else None. None also
    if a tensor has `samples` along another dimension."""
    if has_samples(batch, samples):
        return None
    tensors = [each for each in _leaves(batch) if isinstance(each, torch.Tensor) and each.ndim and not each.is_nested]
    rows = {len(each) for each in tensors}
    along = any(samples in each.shape for each in tensors)
    return min(rows) if len(rows) == 1 and min(rows) < samples and not along else None


def none_of(batch: Batch) -> Batch:
    """A batch without samples in the form of `batch`, whose single sample is another rank's."""
    if not has_samples(batch, 1):
        script.warn(
            "Expected a batch of tensors, in containers, mappings or dataclasses, which is cut where a rank has no "
            f"sample. Received: {type(batch).__name__}, which keeps one of another rank. It weighs nothing in the "
            "gradient; a script that counts by itself is to count none where balancer.samples is 0.",
            RuntimeWarning,
        )
    return cut(batch, slice(0), 1)
