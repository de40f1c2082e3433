"""The GPUs that this process may use, as NVIDIA's management library tells them; it is optional (nvidia-ml-py)."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

_LARGEST_LINK_COUNT = 18        # NVLinks of a Hopper GPU: NVML has no call that counts them
UNLIKE = (
    "GPUs are told in the order of the bus, but CUDA numbers unlike ones by speed: export CUDA_DEVICE_ORDER=PCI_BUS_ID "
    "on all hosts, and the numbers are the same"
)


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One GPU; `pcie` is like "gen4 x16", `nvlinks` the number of active NVLinks; None where NVML does not say."""

    model: str
    uuid: str
    memory_bytes: int
    pcie: str | None = None
    nvlinks: int | None = None


def installed_gpus(
    visible: str | None = None, library: Any = None, *, by_bus: bool = False
) -> tuple[tuple[Gpu, ...], str | None]:
    """Finds the GPUs that CUDA would see in this process.

    Args:
        visible: the text of CUDA_VISIBLE_DEVICES; None if it is not set.
        library: the module `pynvml`; None to import it.
        by_bus: whether CUDA numbers the GPUs in the order of the bus, as NVML does.

    Returns:
        The GPUs; and a note why there are none, or why CUDA may see others; None if there is nothing to note.
    """
    if library is None:
        try:
            library = importlib.import_module("pynvml")
        except ImportError:
            return (), "GPUs are not looked for: nvidia-ml-py is not installed (pip install nvidia-ml-py)"
    try:
        library.nvmlInit()
    except library.NVMLError as error:
        return (), f"no GPU: {error}"
    try:
        found = [_described(library, index) for index in range(library.nvmlDeviceGetCount())]
    except library.NVMLError as error:
        return (), f"GPUs cannot be read: {error}"
    finally:
        library.nvmlShutdown()
    chosen = visible_of(found, visible)
    if not chosen:
        return (), "no GPU" if not found else f"none of {len(found)} GPUs is in CUDA_VISIBLE_DEVICES={visible!r}"
    numbered = visible is None or any(name.strip().isdecimal() for name in visible.split(","))
    return chosen, UNLIKE if numbered and not by_bus and len({gpu.model for gpu in found}) > 1 else None


def visible_of(gpus: Sequence[Gpu], visible: str | None) -> tuple[Gpu, ...]:
    """Returns the GPUs that CUDA_VISIBLE_DEVICES names, in its order. As in CUDA, the list ends at the first name that
    is unknown."""
    if visible is None:
        return tuple(gpus)
    chosen: list[Gpu] = []
    for name in (part.strip() for part in visible.split(",")):
        if name.isdecimal():
            matching = list(gpus[int(name):int(name) + 1])
        else:
            matching = [gpu for gpu in gpus if name.startswith("GPU-") and gpu.uuid.startswith(name)]
        if len(matching) != 1:
            break
        chosen += matching
    return tuple(chosen)


def _described(library: Any, index: int) -> Gpu:
    handle = library.nvmlDeviceGetHandleByIndex(index)
    return Gpu(model=_text(library.nvmlDeviceGetName(handle)), uuid=_text(library.nvmlDeviceGetUUID(handle)),
               memory_bytes=int(library.nvmlDeviceGetMemoryInfo(handle).total), pcie=_pcie(library, handle),
               nvlinks=_nvlinks(library, handle))


def _text(value: str | bytes) -> str:
    """Old releases of pynvml return bytes."""
    return value.decode() if isinstance(value, bytes) else value


def _pcie(library: Any, handle: Any) -> str | None:
    """The fastest PCIe link that card and slot support, not the present one, which is slower while the GPU is idle."""
    try:
        generation = library.nvmlDeviceGetMaxPcieLinkGeneration(handle)
        return f"gen{generation} x{library.nvmlDeviceGetMaxPcieLinkWidth(handle)}"
    except library.NVMLError:
        return None


def _nvlinks(library: Any, handle: Any) -> int | None:
    count = None
    for link in range(_LARGEST_LINK_COUNT):
        try:
            count = (count or 0) + int(library.nvmlDeviceGetNvLinkState(handle, link))
        except library.NVMLError:
            break
    return count
