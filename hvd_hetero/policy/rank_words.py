"""Ranks in words, for messages."""

from __future__ import annotations

from collections.abc import Sequence


def ranks_text(ranks: Sequence[int]) -> str:
    """"rank 3", or "ranks 0, 2 to 5", of ranks in order."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    texts = [f"{run[0]} to {run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs]
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(texts)}"


def by_rank(values: Sequence[object], ranks: Sequence[int] | None = None) -> str:
    """What ranks gave, for an error: "rank 0: 5; ranks 1 to 3: 6". Ranks that gave the same are named together.

    Args:
        values: one of each rank, in order, which are compared as texts.
        ranks: their numbers in the job; None: from 0.
    """
    found: dict[str, list[int]] = {}
    for rank, value in zip(range(len(values)) if ranks is None else ranks, values, strict=True):
        found.setdefault(str(value), []).append(rank)
    return "; ".join(f"{ranks_text(those)}: {value}" for value, those in found.items())
