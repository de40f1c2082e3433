"""Splits a model's tensors into fragments, each of which is read, sent and written as one array."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

PIECE = 1 << 22  # elements of a fragment, where one is as small as it may be


def fragments_by_kind(kinds: Sequence[Hashable], sizes: Sequence[int], count: int | None) -> list[list[int]]:
    """Splits tensors into fragments that hold one kind each, such as a type and a device.

    Args:
        kinds, sizes: of each tensor.
        count: fragments of each kind, at most; None: so many that each has about `PIECE` elements, or one tensor.

    Returns:
        The indices of the tensors of each fragment.
    """
    chosen = []
    for kind in dict.fromkeys(kinds):
        members = [index for index, one in enumerate(kinds) if one == kind]
        held = [sizes[index] for index in members]
        for fragment in fragments_of(held, 1 + sum(held) // PIECE if count is None else count):
            chosen.append([members[place] for place in fragment])
    return chosen


def fragments_of(sizes: Sequence[int], count: int) -> list[list[int]]:
    """Splits tensors of these sizes into at most `count` fragments of nearly equal size.

    The largest tensors are placed first, each in the smallest fragment so far (longest processing time first, Graham
    1969).

    Returns:
        The indices of the tensors of each fragment, in ascending order.

    Raises:
        ValueError: `count` is less than 1.
    """
    if count < 1:
        raise ValueError(f"count: expected at least 1. Received: {count}.")
    count = max(1, min(count, len(sizes)))
    held = [0] * count
    chosen: list[list[int]] = [[] for _ in range(count)]
    for index in sorted(range(len(sizes)), key=lambda index: (-sizes[index], index)):
        least = min(range(count), key=lambda fragment: (held[fragment], len(chosen[fragment]), fragment))
        chosen[least].append(index)
        held[least] += sizes[index]
    return [sorted(members) for members in chosen]
