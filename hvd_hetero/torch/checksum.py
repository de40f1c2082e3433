"""Law 5, checked: all ranks hold the same parameters, bit for bit."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import torch

from hvd_hetero.engine.port import Engine


def checksum(tensors: Sequence[torch.Tensor]) -> int:
    """CRC-32 of the bytes of `tensors`, one after the other."""
    found = 0
    for tensor in tensors:
        flat = tensor.detach().contiguous().cpu().reshape(-1)
        found = zlib.crc32(flat.view(torch.uint8).numpy().data, found)
    return found


def check_alike(tensors: Sequence[torch.Tensor], *, engine: Engine, name: str) -> None:
    """Returns when all ranks hold the same bits. A collective call.

    Raises:
        RuntimeError: on every rank, naming those that differ from rank 0.
    """
    row = torch.tensor([checksum(tensors)], dtype=torch.int64)
    found = engine.allgather_async(row, name=name).wait().tolist()
    if others := [rank for rank, value in enumerate(found) if value != found[0]]:
        raise RuntimeError(
            "Expected the same parameters on every rank before ranks train apart. Received: others than rank 0's on "
            f"rank {', '.join(map(str, others))}. Call hvd.broadcast_parameters(model.state_dict(), root_rank=0) after "
            "making the optimizer, and load checkpoints on all ranks or before it."
        )
