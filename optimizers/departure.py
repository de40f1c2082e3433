"""Ranks that cannot go on, ranks that were told to end, and ranks that want all to stop."""

from __future__ import annotations

from collections.abc import Sequence

from .attachment import PeerError


class Flag:
    """A flag that a rank may raise in its control vector, and the first ranks that all ranks know to have raised it."""

    def __init__(self) -> None:
        self.said = False
        self.forget()

    def forget(self) -> None:
        """Forgets which ranks have raised it."""
        self._ranks: tuple[int, ...] = ()
        self._from_step = 0

    def hear(self, ranks: tuple[int, ...], step: int) -> None:
        """Notes that `ranks` have raised it, which all ranks know by batch `step`."""
        if ranks and not self._ranks:
            self._ranks, self._from_step = ranks, step

    def heard_by_all(self) -> None:
        """Notes that all ranks know by now what this one does, as they have synchronised."""
        self._from_step = 0

    def by(self, step: int) -> tuple[int, ...]:
        """The ranks that have raised it, if all ranks know that by batch `step`; none otherwise."""
        return self._ranks if step >= self._from_step else ()


class Departure:
    """Whether this rank fails, leaves or wants training to stop, as its control vectors say, and which others do."""

    def __init__(self) -> None:
        self.leaving = Flag()  # ranks that were told to end; they still are among other ranks than before
        self.stopping = Flag()  # ranks that want all to stop training
        self.restart()

    def restart(self) -> None:
        """Forgets which ranks were to leave, after an elastic reset."""
        self.failed = False
        self.error: Exception | None = None  # what the next exchange raises on this rank
        self.final = False  # this rank or another has failed, and this one is out of step with the others
        self.left_out: int | None = None  # the newest batch that a rank could not deliver, as all have heard
        self.leaving.forget()
        self.stopping.forget()

    def heard_by_all(self) -> None:
        """Says that all ranks have heard what this one has."""
        self.leaving.heard_by_all()
        self.stopping.heard_by_all()

    def fail(self, error: Exception | None = None) -> None:
        """This rank cannot go on. With an `error`, it trains on until the next exchange, which raises it here."""
        self.failed, self.error = True, error or self.error

    def check(self, what: str = "batch") -> None:
        """Raises RuntimeError where a rank has failed in a way that training cannot go on from."""
        if self.final:
            raise RuntimeError(
                f"Expected no further {what} after a rank could not go on. Received: one, after an error that was "
                "caught, while the others waited for something else than the exchange of a synchronous step: of one "
                "apart, of a layer, or with Keras of another optimizer. Go on from a checkpoint, in new processes."
            )

    def recover(self, error: Exception) -> None:
        """Takes back that this rank cannot go on, if `error` is why, and no exchange has said it."""
        if self.error is error:
            self.failed, self.error = False, None

    def hear_failed(self, ranks: Sequence[int], step: int) -> None:
        """Takes in that `ranks`, as Horovod numbers them, could not deliver batch `step`. All have heard it then: who
        has caught what this raises, on all ranks, can train on.

        Raises:
            PeerError: nobody takes in what else comes with it.
            Exception: what this rank failed with, if it was to be raised here.
        """
        self.left_out = step
        error, self.error, self.failed = self.error, None, False
        if error is not None:
            raise error
        names = ", ".join(map(str, ranks))
        raise PeerError(
            f"Expected every rank to deliver batch {step}. Received: rank {names} could not (its data loader "
            f"raised). The cause is in the output of rank {names}; this rank stops with it."
        )
