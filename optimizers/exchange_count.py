"""Counts the global batches whose gradients go into one exchange, for an optimizer that exchanges every few batches."""

from __future__ import annotations

from collections.abc import Callable


class ExchangeCount:
    """The global batches since the last exchange of one optimizer's gradients, the same number on all ranks.

    Args:
        backward_passes: returns how many backward passes the present batch has had, over all optimizers.
        batches_per_exchange: global batches per exchange; their gradients are summed, as in Horovod.

    Attributes:
        batches_per_exchange: as above; a script may change it between two exchanges.
    """

    def __init__(self, backward_passes: Callable[[], int], batches_per_exchange: int) -> None:
        self._backward_passes, self.batches_per_exchange = backward_passes, batches_per_exchange
        self._begun = 0  # see `begun`
        self._left_out: int | None = None  # backward passes when `forget` left out the present batch; None: it counts
        self._over = False  # whether the gradients of the present batch have been exchanged

    def begin(self) -> None:
        """Counts a global batch that begins."""
        self.begun += 1
        self._over = False

    @property
    def begun(self) -> int:
        """The number of global batches begun since the last exchange.

        If `forget` has left out the present batch, that batch counts again as soon as it has another backward pass. The
        pass may be of any optimizer: which optimizers' parameters get gradients in it may depend on the samples, and so
        differ between ranks."""
        again = self._left_out is not None and self._backward_passes() > self._left_out
        return self._begun + again

    @begun.setter
    def begun(self, number: int) -> None:
        self._begun, self._left_out = number, None

    def forget(self, *, present: bool) -> None:
        """Leaves out the earlier batches of the next exchange, whose gradients were cleared (by `zero_grad()`, say).
        `present`: leaves out the present batch as well."""
        self.begun = min(self.begun, 0 if present else 1)
        self._left_out = self._backward_passes() if present and not self._over else None

    def end(self) -> None:
        """Ends an exchange: the count starts at 0."""
        self.begun = 0
        self._over = True

    @property
    def complete(self) -> bool:
        """Whether as many global batches have begun as the next exchange takes."""
        return max(1, self.begun) >= self.batches_per_exchange

    @property
    def batches(self) -> int:
        """The number of global batches whose gradients are summed in the next exchange. At most `batches_per_exchange`,
        and fewer if the exchange comes early, as at the end of an epoch."""
        return max(1, min(self.begun, self.batches_per_exchange))
