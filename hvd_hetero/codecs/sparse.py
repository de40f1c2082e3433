"""Top-k: the entries of largest magnitude are sent with their indices; the others stay in the residual.

Sparse Communication for Distributed Gradient Descent (Aji & Heafield 2017, arXiv:1704.05021). Biased: without error
feedback it diverges. The indices differ between ranks, so entries are all-gathered: each of N ranks receives N k
entries of 8 bytes, against 2 (N - 1) / N n values of 4 bytes in a ring all-reduce of n values. So top-k sends less if
the density k / n is below about 1 / N.
"""

from __future__ import annotations

from typing import Any

from .verbs import verbs_of


class TopK:
    """Encodes the `density` * n entries of largest magnitude of an array of n entries.

    Args:
        density: the fraction of the entries that is sent, in (0, 1].
    """

    def __init__(self, density: float) -> None:
        if not 0.0 < density <= 1.0:
            raise ValueError(f"density: expected a number in (0, 1]. Received: {density}.")
        self.density = density

    def count(self, length: int) -> int:
        """Returns k, the number of entries that are sent of an array of `length` entries: at least 1."""
        return min(length, max(1, round(self.density * length)))

    def encode(self, array: Any) -> Any:
        """Returns uint8 of shape [k, 4 + bytes of a value]: for each entry its index (int32), then its value."""
        verbs = verbs_of(array)
        places = verbs.top(array, self.count(len(array)))
        values = verbs.take(array, places)
        return verbs.beside([verbs.as_bytes(places.reshape(-1, 1)), verbs.as_bytes(values.reshape(-1, 1))])

    def places(self, rows: Any) -> Any:
        """Returns the indices in `rows`, the output of `encode`: int32 of shape [k]."""
        return verbs_of(rows).from_bytes(rows[:, :4], "int32").reshape(-1)

    def add_to(self, array: Any, rows: Any) -> None:
        """Adds the entries in `rows`, the output of `encode`, to a dense `array`."""
        verbs = verbs_of(array)
        kind = "float64" if rows.shape[1] == 12 else "float32"
        verbs.add_at(array, self.places(rows), verbs.from_bytes(rows[:, 4:], kind).reshape(-1))
