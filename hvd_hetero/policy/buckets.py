"""Buckets: which tensors travel together.

Gradients become ready one after another. Few large messages cost little latency, many small ones start earlier: a
bucket is closed when it is full, in the order in which tensors become ready (Li et al. 2020, "PyTorch Distributed",
section 3.2.3: 25 MB, and a small first bucket so that communication starts early). What becomes ready last has no
backward pass left to hide behind, so the last bucket may be kept small as well.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from .link import Link

Buckets = tuple[tuple[int, ...], ...]

FIXED_PART = 0.1  # of a bucket's time may be what an operation costs whatever its size
LEAST_BYTES = 2**20
# A second bucket costs every rank an operation, 0.1 to 0.2 ms of CPU: what has fewer bytes than this keeps one, as what
# could be hidden is worth less.
OVERLAP_BYTES = 2**20


def cap_bytes(line: Link, *, most: int) -> int:
    """How many bytes should travel together, where a sum of n takes latency + n / bandwidth.

    Small buckets start early and leave little for the end of the backward pass, but each pays the latency: the cap is
    the smallest at which that is `FIXED_PART` of the time, from `LEAST_BYTES` to `most`.
    """
    enough = line.latency_s * (1 / FIXED_PART - 1) * line.bandwidth_bytes_per_s
    return min(most, max(LEAST_BYTES, round(enough)))


def assign(sizes_bytes: Sequence[int], *, cap_bytes: int, last_cap_bytes: int | None = None) -> Buckets:
    """Consecutive indices, each in exactly one bucket; no bucket beyond its cap unless it holds a single tensor.

    Args:
        sizes_bytes: one size per tensor, in the order in which they become ready.
        cap_bytes: the most that travels together.
        last_cap_bytes: the same for the last bucket (default: `cap_bytes`).
    """
    for name, cap in (("cap_bytes", cap_bytes), ("last_cap_bytes", last_cap_bytes)):
        if cap is not None and cap < 1:
            raise ValueError(f"{name}: expected at least 1. Received: {cap}.")
    if sizes_bytes and min(sizes_bytes) < 0:
        raise ValueError(f"sizes_bytes: expected 0 or more each. Received: {min(sizes_bytes)}.")
    tail, held = len(sizes_bytes), 0      # where the last bucket begins
    while last_cap_bytes is not None and tail > 0 and (
            tail == len(sizes_bytes) or held + sizes_bytes[tail - 1] <= last_cap_bytes):
        tail -= 1
        held += sizes_bytes[tail]
    buckets: list[list[int]] = []
    held = 0
    for i, size in enumerate(sizes_bytes):
        if not buckets or i == tail or (i < tail and held + size > cap_bytes):
            buckets.append([])
            held = 0
        buckets[-1].append(i)
        held += size
    return tuple(tuple(bucket) for bucket in buckets)


def by_dtype(sizes_bytes: Sequence[int], dtypes: Sequence[Hashable], *, cap_bytes: int,
             last_cap_bytes: int | None = None) -> Buckets:
    """Buckets of one dtype each, in the order in which they are complete; `dtypes` may be any key per tensor.

    Within each dtype it is `assign`. The last cap concerns the dtype of the last tensor.
    """
    if len(dtypes) != len(sizes_bytes):
        raise ValueError(f"dtypes: expected one for each of {len(sizes_bytes)} tensors. Received: {len(dtypes)}.")
    of_dtype: dict[Hashable, list[int]] = {}
    for i, dtype in enumerate(dtypes):
        of_dtype.setdefault(dtype, []).append(i)
    buckets = []
    for dtype, members in of_dtype.items():
        chosen = assign([sizes_bytes[i] for i in members], cap_bytes=cap_bytes,
                        last_cap_bytes=last_cap_bytes if dtype == dtypes[-1] else None)
        buckets += [tuple(members[i] for i in bucket) for bucket in chosen]
    return tuple(sorted(buckets, key=lambda bucket: bucket[-1]))


def as_ready(sizes_bytes: Sequence[int], dtypes: Sequence[Hashable], *, cap_bytes: int) -> Buckets:
    """`by_dtype` for what becomes ready in this order, while more is computed: the last bucket, which has nothing left
    to hide behind, holds at most half of all."""
    whole = sum(sizes_bytes)
    last = min(cap_bytes, whole // 2) if whole > OVERLAP_BYTES else cap_bytes
    return by_dtype(sizes_bytes, dtypes, cap_bytes=cap_bytes, last_cap_bytes=last)
