"""A checksum of tensors, by which ranks compare their parameters bit for bit."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import torch


def checksum(tensors: Sequence[torch.Tensor]) -> int:
    """CRC-32 of the bytes of `tensors`, one after the other."""
    found = 0
    for tensor in tensors:
        flat = tensor.detach().contiguous().cpu().reshape(-1)
        found = zlib.crc32(flat.view(torch.uint8).numpy().data, found)
    return found
