"""The array operations ("verbs") that codecs use, for torch tensors. See `verbs.Verbs` for what each returns."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from .verbs import BLOCK, NOT_FINITE, NOTHING, exponent_of

_KINDS = {
    "int8": torch.int8,
    "int16": torch.int16,
    "int32": torch.int32,
    "float32": torch.float32,
    "float64": torch.float64,
}


SAMPLED_FROM = 1 << 16  # values of an array from which on `top` is faster with a sample
SAMPLE = 20_000  # values of the sample, about
SAFETY = 1.5  # so many times as many values as are wanted are expected above the sample's quantile


class TorchVerbs:
    """The operations that codecs need, for torch tensors on any device."""

    def zeros(self, shape: Sequence[int], like: torch.Tensor) -> torch.Tensor:
        return torch.zeros(tuple(shape), dtype=like.dtype, device=like.device)

    def empty(self, like: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(like)

    def seeded(self, shape: Sequence[int], seed: int, like: torch.Tensor) -> torch.Tensor:
        drawn = np.random.RandomState(seed).standard_normal(tuple(shape))
        return torch.from_numpy(drawn).to(dtype=like.dtype, device=like.device)

    def write(self, array: torch.Tensor, values: Sequence[float]) -> None:
        # From memory that is not pinned, a copy to a GPU would wait for all work queued on the GPU.
        pinned = array.device.type == "cuda"
        array.copy_(torch.tensor(values, dtype=array.dtype, device="cpu", pin_memory=pinned), non_blocking=pinned)

    def largest(self, array: torch.Tensor) -> float:
        return float(_largest(array)) if array.numel() else 0.0

    def exponent(self, array: torch.Tensor) -> int | torch.Tensor:
        if array.device.type == "cpu" or not array.numel():
            return exponent_of(self.largest(array))
        largest = _largest(array)  # stays on the GPU, so that the host need not wait for it
        mantissa, exponent = torch.frexp(largest)
        found = (exponent - (mantissa == 0.5).int()).where(largest != 0, NOTHING)
        return found.where(largest.isfinite(), NOT_FINITE).to(array.dtype)

    def all_finite(self, arrays: Sequence[torch.Tensor]) -> bool:
        found = [_largest(array).isfinite() for array in arrays if array.numel()]
        if len({array.device for array in found}) == 1:
            return bool(torch.stack(found).all())  # one transfer to the host
        return all(map(bool, found))

    def inverse(self, numbers: torch.Tensor, least: torch.Tensor) -> torch.Tensor:
        return numbers.reciprocal().where(~(numbers <= least), 0.0)

    def squared_norm(self, array: torch.Tensor) -> torch.Tensor:
        return torch.linalg.vector_norm(array, dtype=torch.float64).square()

    def squares(self, array: torch.Tensor) -> float:
        if array.device.type != "cpu" or len(array) <= BLOCK:  # a GPU sums in many parts, which keeps the digits
            return float(torch.dot(array, array))
        return sum(torch.stack([torch.dot(block, block) for block in array.split(BLOCK)]).tolist())

    def difference_into(self, array: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
        torch.sub(left, right, out=array)

    def row_largest(self, rows: torch.Tensor) -> torch.Tensor:
        return rows.abs().amax(dim=1)

    def rounded(self, array: torch.Tensor) -> torch.Tensor:
        return array.round_().nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0).to(torch.int8)

    def half(self, array: torch.Tensor) -> torch.Tensor:
        return array.half()

    def nan_for_infinite(self, array: torch.Tensor) -> torch.Tensor:
        return array * 0 + array

    def single(self, array: torch.Tensor) -> torch.Tensor:
        return array.float()

    def widened(self, array: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        return array.to(like.dtype)

    def brain_bits(self, array: torch.Tensor) -> torch.Tensor:
        return array.to(torch.bfloat16).view(torch.int16)

    def from_brain_bits(self, bits: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        return bits.view(torch.bfloat16).to(like.dtype)

    def as_bytes(self, array: torch.Tensor) -> torch.Tensor:
        return array.contiguous().view(torch.uint8)

    def from_bytes(self, rows: torch.Tensor, kind: str) -> torch.Tensor:
        flat = rows.contiguous().reshape(-1)
        flat = flat.clone() if flat.storage_offset() else flat  # a wider type needs its first byte aligned
        return flat.view(_KINDS[kind]).reshape(len(rows), rows.shape[1] // _KINDS[kind].itemsize)

    def beside(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        return torch.cat(list(parts), dim=1)

    def joined(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        return torch.cat(list(parts))

    def top(self, array: torch.Tensor, count: int) -> torch.Tensor:
        magnitudes, length = array.abs(), array.numel()
        if count >= length:
            return torch.arange(length, dtype=torch.int32, device=array.device)
        # Looks for the largest only among the values that are not below a quantile of a sample, which nearly always
        # include them. Not on a GPU, where topk over all values takes less time than reading on the host how many
        # values are left.
        if length >= SAMPLED_FROM and array.device.type == "cpu":
            sample = magnitudes[:: length // SAMPLE]
            beyond = min(len(sample), int(SAFETY * len(sample) * count / length) + 32)
            near = (~(magnitudes < sample.kthvalue(len(sample) - beyond + 1).values)).nonzero().reshape(-1)
            if len(near) >= count:
                chosen = torch.topk(magnitudes[near], count, sorted=False).indices
                return near[chosen].to(torch.int32).sort().values
        return torch.topk(magnitudes, count, sorted=False).indices.to(torch.int32).sort().values

    def take(self, array: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
        return array[indices.long()]

    def clear_at(self, array: torch.Tensor, indices: torch.Tensor) -> None:
        array.index_fill_(0, indices.long(), 0.0)

    def add_at(self, array: torch.Tensor, indices: torch.Tensor, values: torch.Tensor) -> None:
        array[indices.long()] += values

    def product_into(self, matrix: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
        torch.mm(left, right.T, out=matrix)

    def subtract_product(self, matrix: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
        matrix.addmm_(left, right.T, alpha=-1)

    def copied(self, array: torch.Tensor) -> torch.Tensor:
        return array.clone()

    def like(self, array: torch.Tensor | np.ndarray, like: torch.Tensor) -> torch.Tensor:
        return torch.as_tensor(array).to(dtype=like.dtype, device=like.device, copy=True)


def _largest(array: torch.Tensor) -> torch.Tensor:
    low, high = torch.aminmax(array)  # by far the fastest way to max |x|
    return torch.maximum(-low, high)


VERBS = TorchVerbs()
