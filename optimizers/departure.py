"""Which ranks have failed, which were told to end their process, and which ask all ranks to stop training."""

from __future__ import annotations

from collections.abc import Sequence

from hvd_hetero.policy.rank_words import ranks_text


class PeerError(RuntimeError):
    """Raised where another rank has failed, which the error names: its data loader raised, or its script said so."""


class Flag:
    """A flag that any rank may raise in its control vector, and the ranks that raised it first.

    Attributes:
        said: whether this rank raises the flag in its control vectors.
    """

    def __init__(self) -> None:
        self.said = False
        self.forget()

    def forget(self) -> None:
        """Forgets which ranks have raised the flag. `said` stays as it is."""
        self._ranks: tuple[int, ...] = ()
        self._from_step = 0  # the global batch by which all ranks have received the flag

    def hear(self, ranks: tuple[int, ...], step: int) -> None:
        """Notes that an exchange says that `ranks` have raised the flag. Only the first such ranks are kept.

        Args:
            ranks: none, if nobody has.
            step: index of the global batch by which every rank has received that exchange.
        """
        if ranks and not self._ranks:
            self._ranks, self._from_step = ranks, step

    def heard_by_all(self) -> None:
        """Notes that all ranks have received what this one has, so that `by` need not wait for a later batch."""
        self._from_step = 0

    def by(self, step: int) -> tuple[int, ...]:
        """Returns the ranks that have raised the flag, if all ranks know of it at global batch `step`; else none."""
        return self._ranks if step >= self._from_step else ()


class Departure:
    """Whether this rank has failed, was told to end or asks all to stop, for its control vectors; and which others do.

    `Dialogue` sends what is set here, and takes in what the other ranks sent.
    """

    def __init__(self) -> None:
        self.leaving = Flag()  # ranks whose process was told to end: `said` holds beyond an elastic reset
        self.stopping = Flag()  # ranks that ask all ranks to stop training
        self.restart()

    def restart(self) -> None:
        """Forgets failures, and which ranks were to leave or asked to stop, after an elastic reset."""
        self.failed = False  # whether this rank cannot go on, which its next control vector says
        self.error: Exception | None = None  # what the next exchange raises on this rank
        self.final = False  # whether a rank has failed in a way after which this one cannot train on with the others
        self.left_out: int | None = None  # the last batch that all ranks leave out, as a rank could not deliver it
        self.leaving.forget()
        self.stopping.forget()

    def heard_by_all(self) -> None:
        """Notes that all ranks have received what this one has, as at the end of local steps (`Rounds.finish`)."""
        self.leaving.heard_by_all()
        self.stopping.heard_by_all()

    def fail(self, error: Exception | None = None) -> None:
        """Notes that this rank cannot go on; its next control vector says so.

        Args:
            error: what that exchange raises on this rank, which trains on until then.
        """
        self.failed, self.error = True, error or self.error

    def check(self, what: str = "batch") -> None:
        """Raises RuntimeError if a rank has failed and training cannot go on in these processes.

        Args:
            what: what was about to begin, for the message: "batch" or "merge".
        """
        if self.final:
            raise RuntimeError(
                f"Expected no further {what} after a rank could not go on. Received: one, after an error that was "
                "caught, while the others waited for something else than the exchange of a synchronous step: of one "
                "apart, of a layer, or with Keras of another optimizer. Go on from a checkpoint, in new processes."
            )

    def recover(self, error: Exception) -> None:
        """Takes back `fail(error)`, if no exchange has told the other ranks yet.

        With Keras, where data is loaded ahead: a dataset calls it when it is read anew after an error.
        """
        if self.error is error:
            self.failed, self.error = False, None

    def hear_failed(self, ranks: Sequence[int], step: int) -> None:
        """Takes in, from an exchange, that `ranks` could not deliver global batch `step`, and raises on every rank.

        All ranks learn of it in the same exchange, and take in nothing else that it brought but a plan. If all of them
        catch what is raised, they can train on.

        Args:
            ranks: their numbers in Horovod.
            step: index of the global batch.

        Raises:
            Exception: on a rank that called `fail` with an error: that error.
            PeerError: on all others.
        """
        self.left_out = step
        error, self.error, self.failed = self.error, None, False
        if error is not None:
            raise error
        names = ranks_text(ranks)
        raise PeerError(
            f"Expected every rank to deliver batch {step}. Received: {names} could not (its data loader raised, "
            f"or its script called balancer.fail()). The cause is in the output of {names}; this rank stops with "
            "it."
        )
