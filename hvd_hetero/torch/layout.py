"""Lays out gradients in flat buckets, in the order in which they become ready."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import torch

from hvd_hetero.policy.buckets import WIRE as NAMES
from hvd_hetero.policy.buckets import as_ready, last_of_widest

# The type in which a gradient of each type travels.
WIRE: dict[torch.dtype, torch.dtype] = {getattr(torch, own): getattr(torch, wire) for own, wire in NAMES.items()}


def check_type(parameter: torch.nn.Parameter) -> None:
    """Raises TypeError for a parameter whose gradient cannot travel."""
    if parameter.dtype not in WIRE:
        instead = (
            " Hold pairs of real numbers, of which forward() takes torch.view_as_complex()."
            if parameter.dtype.is_complex
            else ""
        )
        raise TypeError(
            f"Expected parameters of a real floating type. Received: {parameter.dtype}, shape {list(parameter.shape)}."
            f"{instead}"
        )


def gradient_type(parameter: torch.Tensor) -> torch.dtype:
    """The type of a parameter's `p.grad`: its own, unless a script has set `p.grad_dtype`, which older versions of
    PyTorch lack."""
    return getattr(parameter, "grad_dtype", None) or parameter.dtype


Groups = int | Sequence[Sequence[torch.nn.Parameter]] | None


class BucketLayout:
    """Places every parameter's gradient in exactly one bucket. All gradients of a bucket have one type and one device.

    Args:
        bucket_bytes: at most so many bytes in a bucket, unless a single gradient is larger.
        groups: lists of parameters that share a bucket instead, or the number of buckets.
        tail: how many more elements there are at the end of a bucket that goes through no codec, the last one of the
            widest type.
        lossy: whether a parameter's gradient goes through a codec. Those that do share no bucket with the others, and
            the tail is never among them.
        sparse: parameters whose gradients are sparse, with the number of sparse dimensions. Parameters whose gradients
            turn out to be sparse are added to it.

    Attributes:
        buckets: flat tensors.
        lossy: for each bucket, whether it goes through a codec.
        members: the parameters of each bucket.
        views: for each bucket, views of it in the shapes of its members, in the same order.
        bucket_of: the index of a parameter's bucket, by the parameter's id: a tensor's own hash costs Python time.
        tail: the view of the tail, None without one.
        tail_in: the index of the bucket that has it.
        outdated: whether parameters have moved since the layout was made, as by `model.to(device)`.
    """

    def __init__(
        self,
        parameters: Sequence[torch.nn.Parameter],
        *,
        bucket_bytes: int,
        groups: Groups,
        tail: int,
        lossy: Callable[[torch.nn.Parameter], bool],
        sparse: dict[torch.nn.Parameter, int] | None = None,
    ) -> None:
        self.members = _grouped(list(reversed(parameters)), bucket_bytes, groups, lossy)
        self.lossy = [lossy(members[0]) for members in self.members]
        exact = [index for index, through in enumerate(self.lossy) if not through and tail]
        self.tail_in = last_of_widest({index: WIRE[self.members[index][0].dtype].itemsize for index in exact})
        self.buckets: list[torch.Tensor] = []
        self.views: list[list[torch.Tensor]] = []
        self.bucket_of: dict[int, int] = {}
        self.tail: torch.Tensor | None = None
        for index, members in enumerate(self.members):
            elements = sum(parameter.numel() for parameter in members)
            extra = tail if index == self.tail_in else 0
            flat = torch.zeros(elements + extra, dtype=WIRE[members[0].dtype], device=members[0].device)
            ends = list(itertools.accumulate(parameter.numel() for parameter in members))
            self.views.append([flat[at - p.numel() : at].view(p.shape) for at, p in zip(ends, members, strict=True)])
            self.bucket_of.update((id(parameter), index) for parameter in members)
            if extra:
                self.tail = flat[elements:]
            self.buckets.append(flat)
        self._shares = [_sharing(flat) for flat in self.buckets]
        self._sparse = {} if sparse is None else sparse
        self.outdated = False

    def fill(self, index: int, weight: float) -> None:
        """Writes its parameters' gradients times `weight` into bucket `index`; zeros for a parameter without one, and
        for one that was frozen since."""
        flat, views, grads = self.buckets[index], [], []
        self._leave_frozen(index)
        if self._kept(index):
            self._move(index)
        with torch.no_grad():
            if weight == 0.0:
                flat.zero_()
                return
            for parameter, view in zip(self.members[index], self.views[index], strict=True):
                grad = parameter.grad
                if grad is None or not parameter.requires_grad:
                    view.zero_()
                    continue
                if grad.is_sparse:
                    self._sparse[parameter] = grad.sparse_dim()
                    grad = grad.to_dense()
                views.append(view)
                grads.append(grad)
            if grads:  # one call for all of them, since each costs Python time
                torch._foreach_copy_(views, grads)
            if weight != 1.0:
                flat.mul_(weight)

    def _leave_frozen(self, index: int) -> None:
        """Takes what `p.grad` of frozen parameters holds out of bucket `index`: it is to stay as it is."""
        for parameter, view in zip(self.members[index], self.views[index], strict=True):
            if not parameter.requires_grad and _is_at(parameter.grad, view):
                parameter.grad = view.clone()

    def _kept(self, index: int) -> bool:
        """Whether a script still holds gradients of an earlier step that lie in bucket `index`, beside those in
        `p.grad`. Gradients that a script keeps must not change, as in one process."""
        others = _sharing(self.buckets[index]) - self._shares[index]
        return others > 0 and others > sum(
            _is_at(parameter.grad, view)
            for parameter, view in zip(self.members[index], self.views[index], strict=True)
        )

    def _move(self, index: int) -> None:
        """Leaves the memory of bucket `index` to the tensors that still use it, and gives the bucket new memory."""
        flat = self.buckets[index]
        views = list(self.views[index])
        if self.tail is not None and index == self.tail_in:
            views.append(self.tail)
        memory = torch.zeros_like(flat)
        for view in views:
            view.data = memory.as_strided(view.shape, view.stride(), view.storage_offset())
        flat.data = memory

    def deliver(self, index: int, flat: torch.Tensor) -> None:
        """Makes `flat`, the exchange's result for bucket `index`, the gradients of its parameters. Parameters that were
        frozen since are left out, as an optimizer of one process would leave them alone."""
        with torch.no_grad():
            if flat is not self.buckets[index]:
                self.buckets[index].copy_(flat)
            for parameter, view in zip(self.members[index], self.views[index], strict=True):
                if not parameter.requires_grad:
                    continue
                grad = parameter.grad
                if grad is not None and grad.is_sparse:
                    self._sparse[parameter] = grad.sparse_dim()
                kind = gradient_type(parameter)
                if self._sparse and parameter in self._sparse:
                    # Sparse, as autograd makes it, also if this rank had no sample.
                    parameter.grad = view.to(parameter.device, kind).to_sparse(self._sparse[parameter])
                elif view.dtype == kind and view.stride() == parameter.stride() and not (
                    self.outdated and view.device != parameter.device
                ):
                    if grad is None or grad.data_ptr() != view.data_ptr():
                        parameter.grad = view.detach()  # a script that keeps it shares the bucket's memory: see `_kept`
                elif grad is not None and grad.stride() == parameter.stride():
                    grad.copy_(view)
                else:  # fused optimizers expect the parameter's own strides, which differ in channels_last
                    parameter.grad = torch.empty_like(parameter, dtype=kind).copy_(view)


def _sharing(flat: torch.Tensor) -> int:
    """How many tensors share the memory of `flat`, up to a constant offset."""
    return int(torch._C._storage_Use_Count(flat.untyped_storage()._cdata))  # type: ignore[attr-defined]


def _is_at(grad: torch.Tensor | None, view: torch.Tensor) -> bool:
    if grad is None or grad.is_sparse or not grad.numel():
        return False
    return grad.data_ptr() == view.data_ptr()


def _grouped(
    ready_order: list[torch.nn.Parameter],
    bucket_bytes: int,
    groups: Groups,
    lossy: Callable[[torch.nn.Parameter], bool],
) -> list[list[torch.nn.Parameter]]:
    """The parameters of each bucket."""
    chosen: list[list[torch.nn.Parameter]] = []
    if isinstance(groups, int):
        whole = sum(p.numel() * WIRE[p.dtype].itemsize for p in ready_order)
        bucket_bytes = max(1, -(-whole // groups)) if groups > 0 else bucket_bytes
    elif groups is not None:
        ours = {id(p) for p in ready_order}
        chosen = [kept for group in groups if (kept := [p for p in group if id(p) in ours])]
    # A user's group is split only into parameters that go through a codec and those that do not.
    parts = [[p for p in group if lossy(p) is through] for group in chosen for through in (True, False)]
    chosen = [part for part in parts if part]
    taken = {id(p) for group in chosen for p in group}
    rest = [p for p in ready_order if id(p) not in taken]
    sizes = [p.numel() * WIRE[p.dtype].itemsize for p in rest]
    kinds = [(WIRE[p.dtype], p.device, lossy(p)) for p in rest]
    chosen += [[rest[i] for i in bucket] for bucket in as_ready(sizes, kinds, cap_bytes=bucket_bytes)]
    return chosen
