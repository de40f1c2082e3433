"""PowerSGD: a gradient matrix as the product of two thin ones, found by one step of power iteration.

Vogels, Karimireddy & Jaggi 2019, arXiv:1905.13727, algorithm 1, with N ranks that hold M_i (weighted):

    P = sum_i M_i Q;    P = orthonormal columns of P;    Q = sum_i M_i^T P;    sum_i M_i ~ P Q^T

Both sums are linear in M_i, so weights fold in and ordinary all-reduces do. Q starts the next step (warm start).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .verbs import verbs_of

LEAST = 1e-37  # below, float32 holds no inverse
TINY = 1e-8  # columns shorter than this times the longest are taken for noise of the others


def orthonormal(matrices: Sequence[Any]) -> list[Any]:
    """The columns of each matrix [n, r] made orthonormal, by Gram and Schmidt's method; of arrays of one type.

    A column that depends on those before it becomes zero; what it would have carried stays in the residual. All
    matrices are treated together, with zeros below the shorter ones, and the host is told nothing: what matters on a
    GPU is how often it is called.
    """
    verbs = verbs_of(matrices[0])
    rows, columns = (max(matrix.shape[axis] for matrix in matrices) for axis in range(2))
    batch = verbs.zeros((len(matrices), rows, columns), matrices[0])
    parts = [whole[: len(matrix), : matrix.shape[1]] for whole, matrix in zip(batch, matrices, strict=True)]
    for part, matrix in zip(parts, matrices, strict=True):
        part[:] = matrix
    most = verbs.row_largest(batch.reshape(len(matrices), -1))
    batch *= verbs.inverse(most, LEAST).reshape(-1, 1, 1)  # whose squares are neither too large nor too small
    tiny = TINY * verbs.row_largest((batch * batch).sum(1) ** 0.5)
    for j in range(columns):
        column, before = batch[:, :, j : j + 1], batch[:, :, :j]
        for _ in range(2 if j else 0):  # once more, since rounding leaves a part of the others ("twice is enough")
            column -= before @ (before.swapaxes(1, 2) @ column)
        norms = (column * column).sum(1).reshape(-1) ** 0.5
        column *= verbs.inverse(norms, tiny).reshape(-1, 1, 1)
    return parts


class LowRank:
    """The shapes and the arithmetic of PowerSGD for the matrices that lie one after the other in a flat array.

    Args:
        shapes: (rows, columns) of each matrix, in the order in which they lie.
        rank: columns of the thin factors.
        seed: of the first Q, the same on all ranks.
    """

    def __init__(self, shapes: Sequence[tuple[int, int]], *, rank: int = 4, seed: int = 0) -> None:
        if rank < 1:
            raise ValueError(f"rank: expected at least 1. Received: {rank}.")
        self.shapes = [(int(rows), int(columns)) for rows, columns in shapes]
        self.ranks = [min(rank, rows, columns) for rows, columns in self.shapes]
        self.seed = seed
        self.length = sum(rows * columns for rows, columns in self.shapes)

    @property
    def right_length(self) -> int:
        """The values that `right` returns."""
        return sum(columns * rank for (_, columns), rank in zip(self.shapes, self.ranks, strict=True))

    def matrices(self, flat: Any) -> list[Any]:
        """Views of the matrices in `flat`."""
        if len(flat) != self.length:
            raise ValueError(f"Expected {self.length} values, of the shapes {self.shapes}. Received: {len(flat)}.")
        views, at = [], 0
        for rows, columns in self.shapes:
            views.append(flat[at : at + rows * columns].reshape(rows, columns))
            at += rows * columns
        return views

    def first_q(self, like: Any) -> list[Any]:
        """Q before the first step: [columns, rank] for each matrix."""
        verbs = verbs_of(like)
        return [
            verbs.seeded((columns, rank), self.seed + index, like)
            for index, ((_, columns), rank) in enumerate(zip(self.shapes, self.ranks, strict=True))
        ]

    def left(self, flat: Any, q: Sequence[Any]) -> Any:
        """M Q of every matrix, flat, one after the other."""
        return self._flat([matrix @ right for matrix, right in zip(self.matrices(flat), q, strict=True)])

    def right(self, flat: Any, p: Sequence[Any]) -> Any:
        """M^T P of every matrix, flat, one after the other."""
        return self._flat([matrix.T @ left for matrix, left in zip(self.matrices(flat), p, strict=True)])

    def split_left(self, flat: Any) -> list[Any]:
        """The P of each matrix in what `left` returned."""
        return self._split(flat, [rows for rows, _ in self.shapes])

    def split_right(self, flat: Any) -> list[Any]:
        """The Q of each matrix in what `right` returned."""
        return self._split(flat, [columns for _, columns in self.shapes])

    def product_into(self, flat: Any, p: Sequence[Any], q: Sequence[Any]) -> None:
        """Writes P Q^T of every matrix into `flat`."""
        for matrix, left, right in zip(self.matrices(flat), p, q, strict=True):
            verbs_of(flat).product_into(matrix, left, right)

    def subtract_product(self, flat: Any, p: Sequence[Any], q: Sequence[Any]) -> None:
        """Subtracts P Q^T of every matrix from `flat`."""
        for matrix, left, right in zip(self.matrices(flat), p, q, strict=True):
            verbs_of(flat).subtract_product(matrix, left, right)

    def _flat(self, matrices: Sequence[Any]) -> Any:
        return verbs_of(matrices[0]).joined([matrix.reshape(-1) for matrix in matrices])

    def _split(self, flat: Any, heights: Sequence[int]) -> list[Any]:
        views, at = [], 0
        for height, rank in zip(heights, self.ranks, strict=True):
            views.append(flat[at : at + height * rank].reshape(height, rank))
            at += height * rank
        return views


def pays(rows: int, columns: int, rank: int) -> bool:
    """Whether factors of this rank are less than half of the matrix (the rule of torch's PowerSGD hook)."""
    return 2 * (rows + columns) * min(rank, rows, columns) < rows * columns
