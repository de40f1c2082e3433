"""The control vector of a merge in local SGD: numbers that each rank sends with its contribution, in the same message.

It is summed over the ranks, like the control vector of `control`, which is its last part. It holds, in this order:

    4              weight and reach of the contribution (`policy.local_round`), `Contribution.spread`, 1 if finishing
    ROWS x ranks   local steps; samples; position // PART; position % PART: each a row with a slot for each rank
    the rest       the control vector of `control`
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hvd_hetero.policy.local_round import Contribution, merge_factor

from . import control
from .control import Report

WEIGHT, REACH, SPREAD, FINISHING, HEAD = range(5)
ROWS = 4  # numbers of each rank: steps, samples, and its position in two parts, each of which float32 holds exactly
PART = 1 << 20  # divides a position into these two parts


@dataclass(frozen=True, kw_only=True)
class MergeReport:
    """The fields of the summed control vectors of a merge. In lists by rank, index i is rank i.

    Attributes:
        sums: the sums over ranks of the weights, of the reaches, and of `Contribution.spread`.
        finishing: the number of ranks that are finishing, see `Rounds.finish`.
        steps: the local steps in each rank's contribution.
        samples: the samples of these steps, by rank.
        positions: the global batch that each rank was at when it contributed.
        control: what ranks said in the control vectors of the module `control`, for `Dialogue.incoming`.
    """

    sums: tuple[float, float, float]
    finishing: int
    steps: list[float]
    samples: list[float]
    positions: list[float]
    control: Report


def length(ranks: int) -> int:
    """The number of elements of the control vector of a merge."""
    return HEAD + ROWS * ranks + control.length(ranks)


def pack(
    contribution: Contribution,
    *,
    spread: float,
    finishing: bool,
    own: tuple[float, float, int],
    rank: int,
    ranks: int,
    control: Sequence[float],
) -> list[float]:
    """The control vector that one rank sends.

    Args:
        contribution: of this rank to the merge.
        spread: `Contribution.spread` of it.
        finishing: whether this rank is in `Rounds.finish`.
        own: the local steps and samples in the contribution, and the global batch that the rank is at.
        rank, ranks: this rank's number, and the number of ranks.
        control: the control vector of the module `control`, from `Dialogue.outgoing`.
    """
    vector = [*contribution.weight_and_reach, spread, float(finishing)]
    steps, samples, position = own
    for value in (steps, samples, *divmod(position, PART)):
        row = [0.0] * ranks
        row[rank] = float(value)
        vector += row
    return [*vector, *control]


def unpack(total: Sequence[float], *, ranks: int) -> MergeReport:
    """Unpacks the sum of all ranks' control vectors."""
    rows = [list(total[HEAD + row * ranks : HEAD + (row + 1) * ranks]) for row in range(ROWS)]
    return MergeReport(
        sums=(total[WEIGHT], total[REACH], total[SPREAD]),
        finishing=round(total[FINISHING]),
        steps=rows[0],
        samples=rows[1],
        positions=[PART * above + below for above, below in zip(rows[2], rows[3], strict=True)],
        control=control.unpack(total[HEAD + ROWS * ranks :], ranks=ranks),
    )


def scale(total: Sequence[float]) -> float:
    """The factor by which the sum of the ranks' weighted deltas is multiplied to give the merged delta; 0.0 if no rank
    contributed. `total` is the sum of the control vectors."""
    return merge_factor(total[WEIGHT : REACH + 1])
