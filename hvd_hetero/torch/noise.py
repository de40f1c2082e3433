"""How noisy the gradient is, measured on its way: norms of the buckets of a torch model."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hvd_hetero.optimizers.noise import NoiseMeter

from .layout import BucketLayout


class GradientNoise(NoiseMeter):
    """A `NoiseMeter` that looks at buckets; it costs nothing until something is `measuring`."""

    def sees(self, layout: BucketLayout, index: int) -> None:
        """Bucket `index` holds this rank's gradients, and is about to be sent."""
        if self.measuring:
            self.add(index, _squared_norm(layout, index, layout.buckets[index]))

    def ends(
        self,
        layout: BucketLayout,
        results: Sequence[torch.Tensor],
        *,
        rank: int,
        terms: float,
        unit: float,
        gain: float,
        all_terms: float,
        batches: int,
    ) -> None:
        """A step is over, and `results` are the merged buckets. `unit` is how many terms weigh 1; the rest: `end`."""
        tell = self.measuring and rank == 0
        merged = [_squared_norm(layout, index, flat) for index, flat in enumerate(results)] if tell else []
        self.end(terms=terms, weight=terms / unit, merged=merged, gain=gain, all_terms=all_terms, batches=batches)


def _squared_norm(layout: BucketLayout, index: int, flat: torch.Tensor) -> torch.Tensor:
    """The squared norm of the gradients in bucket `index`: a scalar on its device.

    In float64, because the noise is a small difference of such norms.
    """
    tail = len(layout.tail) if layout.tail is not None and index == layout.tail_in else 0
    return torch.linalg.vector_norm(flat[: len(flat) - tail], dtype=torch.float64).square()
