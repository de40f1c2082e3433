"""PowerSGD: approximates a gradient matrix by the product of two thin matrices, with one step of power iteration.

Vogels, Karimireddy & Jaggi 2019, arXiv:1905.13727, algorithm 1, where rank i holds M_i, its weighted gradient:

    P = sum_i M_i Q;    P = orthonormal columns of P;    Q = sum_i M_i^T P;    sum_i M_i ~ P Q^T

Both sums are linear in M_i, so they are ordinary all-reduces, also of weighted gradients. The next step starts from Q
(warm start).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .verbs import verbs_of

LEAST = 1e-37  # the inverse of much smaller numbers overflows float32
TINY = 1e-8  # columns shorter than this times the longest are taken for rounding errors, and become zero


def orthonormal(matrices: Sequence[Any]) -> list[Any]:
    """Makes the columns of each matrix [n, r] orthonormal by the Gram-Schmidt method. Returns new matrices.

    A column that depends linearly on those before it becomes zero; its part of the gradient stays in the residual. All
    matrices, of one type, are processed as one batch, padded with zeros, and the host reads no values: on a GPU the
    time depends on the number of kernels.
    """
    verbs = verbs_of(matrices[0])
    rows, columns = (max(matrix.shape[axis] for matrix in matrices) for axis in range(2))
    batch = verbs.zeros((len(matrices), rows, columns), matrices[0])
    parts = [whole[: len(matrix), : matrix.shape[1]] for whole, matrix in zip(batch, matrices, strict=True)]
    for part, matrix in zip(parts, matrices, strict=True):
        part[:] = matrix
    most = verbs.row_largest(batch.reshape(len(matrices), -1))
    batch *= verbs.inverse(most, LEAST).reshape(-1, 1, 1)  # so that squares neither overflow nor underflow
    tiny = TINY * verbs.row_largest((batch * batch).sum(1) ** 0.5)
    for j in range(columns):
        column, before = batch[:, :, j : j + 1], batch[:, :, :j]
        for _ in range(2 if j else 0):  # twice, as rounding leaves a part of the other columns ("twice is enough")
            column -= before @ (before.swapaxes(1, 2) @ column)
        norms = (column * column).sum(1).reshape(-1) ** 0.5
        column *= verbs.inverse(norms, tiny).reshape(-1, 1, 1)
    return parts


class LowRank:
    """The arithmetic of PowerSGD for matrices that are stored one after the other in a flat array.

    `optimizers.feedback.PowerSGDSum` communicates the factors, and keeps the residual.

    Args:
        shapes: (rows, columns) of each matrix, in the order in which they are stored.
        rank: columns of the thin factors; fewer for a matrix with fewer rows or columns.

    Attributes:
        ranks: for each matrix, the columns of its factors.
        length: the number of values of all matrices.
    """

    def __init__(self, shapes: Sequence[tuple[int, int]], *, rank: int) -> None:
        if rank < 1:
            raise ValueError(f"rank: expected at least 1. Received: {rank}.")
        self.shapes = [(int(rows), int(columns)) for rows, columns in shapes]
        self.ranks = [min(rank, rows, columns) for rows, columns in self.shapes]
        self.length = sum(rows * columns for rows, columns in self.shapes)

    @property
    def right_length(self) -> int:
        """The number of values that `right` returns."""
        return sum(columns * rank for (_, columns), rank in zip(self.shapes, self.ranks, strict=True))

    def matrices(self, flat: Any) -> list[Any]:
        """Returns views of the matrices in `flat`. Raises ValueError if it has another length."""
        if len(flat) != self.length:
            raise ValueError(f"Expected {self.length} values, of the shapes {self.shapes}. Received: {len(flat)}.")
        views, at = [], 0
        for rows, columns in self.shapes:
            views.append(flat[at : at + rows * columns].reshape(rows, columns))
            at += rows * columns
        return views

    def first_q(self, like: Any) -> list[Any]:
        """Returns Q for the first step, random and the same on all ranks: [columns, rank] for each matrix."""
        verbs = verbs_of(like)
        return [
            verbs.seeded((columns, rank), index, like)
            for index, ((_, columns), rank) in enumerate(zip(self.shapes, self.ranks, strict=True))
        ]

    def left(self, flat: Any, q: Sequence[Any]) -> Any:
        """Returns M Q of every matrix, one after the other in a flat array."""
        return self._flat([matrix @ right for matrix, right in zip(self.matrices(flat), q, strict=True)])

    def right(self, flat: Any, p: Sequence[Any]) -> Any:
        """Returns M^T P of every matrix, one after the other in a flat array."""
        return self._flat([matrix.T @ left for matrix, left in zip(self.matrices(flat), p, strict=True)])

    def split_left(self, flat: Any) -> list[Any]:
        """Returns views of the P of each matrix in `flat`, the (summed) result of `left`."""
        return self._split(flat, [rows for rows, _ in self.shapes])

    def split_right(self, flat: Any) -> list[Any]:
        """Returns views of the Q of each matrix in `flat`, the (summed) result of `right`."""
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
    """Whether factors of this rank have less than half the values of the matrix (the rule of torch's PowerSGD hook)."""
    return 2 * (rows + columns) * min(rank, rows, columns) < rows * columns
