"""A real GPU, with what `other_device` has: ranks of a host that has fewer GPUs than ranks share them.

NCCL refuses ranks of one host that share a GPU. With a host id of its own each rank counts as a host, and NCCL goes
through sockets.
"""

from __future__ import annotations

import contextlib
import os
import warnings
from typing import Any

import torch

NAME = "cuda"
DTYPE = torch.float64  # of what is compared: rounding changes no decision then, as of a codec
EXACT = False  # sums come in another order than in host memory
RANDOM = True
looks: list[str] = []  # operations that waited for the device


def inner_of(value: Any) -> Any:
    """The tensor in host memory with the values of one of the device; anything else as it is."""
    return value.detach().cpu() if isinstance(value, torch.Tensor) else value


def install() -> None:
    """Gives this rank its GPU; before `hvd.init()`."""
    local_rank, count = int(os.environ.get("HOROVOD_LOCAL_RANK", "0")), torch.cuda.device_count()
    if int(os.environ.get("HOROVOD_LOCAL_SIZE", "1")) > count:
        os.environ["NCCL_HOSTID"] = f"process{os.getpid()}"  # a rank's number may change
    torch.cuda.set_device(local_rank % count)


def index() -> int:
    """Which of the devices this rank has."""
    return torch.cuda.current_device()


def alike(there: torch.Tensor, here: torch.Tensor) -> bool:
    """Whether two results are the same, but for rounding."""
    bound = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 1e-2}.get(here.dtype, 0.0)
    return torch.allclose(there, here, rtol=bound, atol=bound)


@contextlib.contextmanager
def Device() -> Any:
    """Within it, waiting for the device is noted."""

    def noted(message: Any, *others: Any, **named: Any) -> None:
        if "synchronizing CUDA operation" in str(message):
            looks.append(str(message))
        else:
            shown(message, *others, **named)

    shown = warnings.showwarning
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = noted
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")
