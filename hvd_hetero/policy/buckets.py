"""Buckets: which tensors are summed together, in one operation.

Gradients become ready one after another. Few large messages cost little latency; many small ones start earlier. A
bucket is closed when it is full, in the order in which tensors become ready (Li et al. 2020, "PyTorch Distributed",
section 3.2.3: 25 MB, and a small first bucket so that communication starts early). No backward pass is left to hide
the exchange of the last bucket, so it may be kept small as well.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence

from .link import Link

# The type in which a gradient of each type travels. Horovod cannot sum bfloat16, and a sum of several float16 may
# overflow: both travel as float32, which holds either's range. `compression=` makes the wire narrower on request.
WIRE = {"float64": "float64", "float32": "float32", "bfloat16": "float32", "float16": "float32"}

Buckets = tuple[tuple[int, ...], ...]

FIXED_PART = 0.1  # the fraction of a bucket's time that latency may take
LEAST_BYTES = 2**20  # no cap is smaller
# Gradients of fewer bytes in all are not split for overlap: a second bucket costs every rank an operation, 0.1 to 0.2
# ms of CPU, and less communication than that could be hidden.
OVERLAP_BYTES = 2**20
LAST_PART = 0.25  # while a model's first layers are computed there is time for what the others have sent


def cap_bytes(line: Link, *, most: int) -> int:
    """The size in bytes up to which buckets should be filled.

    Small buckets start early and leave little communication for the end of the backward pass, but each costs the
    latency. The cap is the smallest at which the latency is `FIXED_PART` of the time, within `LEAST_BYTES` and `most`.

    Args:
        line: the time of an all-reduce: latency + bytes / bandwidth.
        most: the largest cap, in bytes.
    """
    enough = line.latency_s * (1 / FIXED_PART - 1) * line.bandwidth_bytes_per_s
    return min(most, max(LEAST_BYTES, round(enough)))


def last_of_widest(widths: Mapping[int, int]) -> int | None:
    """The bucket in which a control vector travels: the last one of the widest type; None if there is no bucket.

    Counts of loss terms that a narrower type rounds would round the gradients, which are divided by their sum.

    Args:
        widths: bytes of an element, by the number of the bucket.
    """
    return max(widths, key=lambda index: (widths[index], index), default=None)


def assign(sizes_bytes: Sequence[int], *, cap_bytes: int, last_cap_bytes: int | None = None) -> Buckets:
    """Buckets of consecutive tensor indices. Each index is in exactly one bucket.

    A bucket exceeds its cap only if it holds a single tensor.

    Args:
        sizes_bytes: one size per tensor, in the order in which they become ready.
        cap_bytes: the most bytes of a bucket.
        last_cap_bytes: the most bytes of the last bucket (default: `cap_bytes`).

    Raises:
        ValueError: a cap below 1, or a negative size.
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
        if not buckets or i == tail or held + size > cap_bytes:
            buckets.append([])
            held = 0
        buckets[-1].append(i)
        held += size
    return tuple(tuple(bucket) for bucket in buckets)


def by_dtype(sizes_bytes: Sequence[int], dtypes: Sequence[Hashable], *, cap_bytes: int,
             last_cap_bytes: int | None = None) -> Buckets:
    """Buckets of tensors of one dtype each, in the order in which they are complete.

    Tensors of each dtype are put into buckets by `assign`.

    Args:
        sizes_bytes: one size per tensor, in the order in which they become ready.
        dtypes: a key per tensor; those with equal keys may share a bucket.
        cap_bytes: the most bytes of a bucket.
        last_cap_bytes: the most bytes of the last bucket of the last tensor's dtype (default: `cap_bytes`).

    Raises:
        ValueError: as `assign`, or not one dtype per tensor.
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
    """Buckets as of `by_dtype` for gradients that become ready in this order during a backward pass.

    The last bucket holds at most `LAST_PART` of all bytes, or one tensor, as no computation is left to hide its
    exchange. With `OVERLAP_BYTES` or less in all, it has no smaller cap than the others.
    """
    whole = sum(sizes_bytes)
    last = min(cap_bytes, int(whole * LAST_PART)) if whole > OVERLAP_BYTES else cap_bytes
    return by_dtype(sizes_bytes, dtypes, cap_bytes=cap_bytes, last_cap_bytes=last)
