"""Reads and writes parameters as flat fragments, for merges of local steps and for the guard of equal parameters."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence

import torch

from hvd_hetero.policy.fragments import fragments_by_kind

from .layout import WIRE

KNOWN = 4  # arrays per fragment of which views are kept, such as the model, and the rank's own at its last two sends


class ParameterStore:
    """Reads and writes a rank's parameters as flat fragments. All parameters of a fragment have one type and device,
    and go through a codec all or none.

    Args:
        parameters: in the order of the model.
        count: fragments of each kind; None: many small ones.
        lossy: whether a parameter goes through a codec.
    """

    def __init__(
        self,
        parameters: Sequence[torch.nn.Parameter],
        count: int | None = None,
        lossy: Callable[[torch.nn.Parameter], bool] = lambda parameter: False,
    ) -> None:
        kinds = [(WIRE[p.dtype], p.device, lossy(p)) for p in parameters]
        fragments = fragments_by_kind(kinds, [p.numel() for p in parameters], count)
        self._members = [[parameters[index] for index in chosen] for chosen in fragments]
        self.lossy: list[bool] = [kinds[chosen[0]][2] for chosen in fragments]
        self.narrow = any(p.dtype != WIRE[p.dtype] for p in parameters)
        # The first and last parameter of each fragment stand for all of it: looking at each costs Python time.
        ends = [(kinds[at][:2], parameters[at]) for chosen in fragments for at in (chosen[0], chosen[-1])]
        self._ends = [(device, wire, parameter) for (wire, device), parameter in ends]
        self._known: dict[tuple[int, int], list[torch.Tensor]] = {}  # the least recently used first

    @property
    def misplaced(self) -> bool:
        """Whether parameters have moved to another device, or changed their type, since this was made."""
        return any(p.device != device or WIRE.get(p.dtype) != wire for device, wire, p in self._ends)

    def shapes(self, index: int) -> list[tuple[int, ...]]:
        return [tuple(p.shape) for p in self._members[index]]

    def empty(self, index: int, tail: int) -> torch.Tensor:
        first = self._members[index][0]
        length = sum(p.numel() for p in self._members[index])
        return torch.zeros(length + tail, dtype=WIRE[first.dtype], device=first.device)

    def control(self, length: int) -> torch.Tensor:
        return torch.zeros(length, dtype=torch.float64, device="cpu")

    def checksum(self, index: int) -> int:
        found = 0
        for tensor in self._members[index]:
            flat = tensor.detach().contiguous().cpu().reshape(-1)
            found = zlib.crc32(flat.view(torch.uint8).numpy().data, found)
        return found

    @torch.no_grad()
    def read(self, index: int, into: torch.Tensor | None = None) -> torch.Tensor:
        members = self._members[index]
        if into is None:
            return torch.cat([p.detach().reshape(-1) for p in members]).to(WIRE[members[0].dtype])
        torch._foreach_copy_(self._parts(index, into), members)
        return into

    @torch.no_grad()
    def write(self, index: int, flat: torch.Tensor) -> None:
        torch._foreach_copy_(self._members[index], self._parts(index, flat))

    @torch.no_grad()
    def shift(self, index: int, by: torch.Tensor) -> None:
        members, parts = self._members[index], self._parts(index, by)
        if all(p.dtype == by.dtype for p in members):
            torch._foreach_add_(members, parts)
        else:
            torch._foreach_add_(parts, members)
            torch._foreach_copy_(members, parts)

    @torch.no_grad()
    def blend(self, index: int, flat: torch.Tensor, part: float) -> None:
        torch._foreach_lerp_(self._members[index], self._parts(index, flat), 1.0 - part)

    def _parts(self, index: int, flat: torch.Tensor) -> list[torch.Tensor]:
        """Views of `flat`, one for each parameter of fragment `index`, in its shape. Merges use the same few arrays
        again and again, so the views of the last ones are kept, by the address of their memory. No other array can have
        the same address, as the views keep the memory alive."""
        key = index, flat.data_ptr()
        parts = self._known.pop(key, None)
        if parts is None or parts[0].data_ptr() != flat.data_ptr():  # differs in a copy of this object
            members = self._members[index]
            pieces = flat.split([p.numel() for p in members])
            parts = [piece.view(p.shape) for piece, p in zip(pieces, members, strict=True)]
            if len(self._known) == KNOWN * len(self._members):
                del self._known[next(iter(self._known))]
        self._known[key] = parts
        return parts
