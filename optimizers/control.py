"""The control vector: what ranks tell each other with every gradient, at no message of its own.

It is summed like a gradient. Each rank writes into its own slots and leaves the others' zero, so the sum is a gather.
It holds, in this order:

    1                    loss terms of this rank; summed, those of the whole batch
    len(Slots) x ranks   `Slots` field by field, each a row of all ranks
    3 + ranks + 80       the next plan, written by rank 0 alone: version, predicted step, strategy; shares; reason
    1 + 1 + len(Norms)   exchanges to the next comparison of parameters; staleness; `Norms`

All ranks read the identical sum, and therefore hold the identical plan. The slots for the noise of the gradient are
there whether or not anybody measures it, so that all ranks' vectors have one length.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from hvd_hetero.policy.jitter import Ran
from hvd_hetero.policy.strategy import LOCAL, SYNCHRONOUS

REASON_LENGTH = 80  # characters of a plan's reason that travel
STRATEGIES = (SYNCHRONOUS, LOCAL)  # by the number that travels
LEAVES, STOPS, LAYS_OUT, CHOOSES = 1, 2, 4, 8  # in one slot
BATCHES, ORIGINS = 1 << 20, 15  # are told apart, in one slot: at most 2**24 together
PER_PLAN = 3  # slots of a plan beside its shares and reason


class Slots(NamedTuple):
    """What one rank says of itself, a number each; of the sum, for each of these a row of all ranks."""

    compute_s: Any
    samples: Any
    failed: Any
    dealt_ahead: Any
    running_s: Any  # these three: see `Ran`
    stopped_s: Any
    stops: Any
    flags: Any  # LEAVES, STOPS, LAYS_OUT, CHOOSES
    hash: Any
    place: Any  # the batch that it is at, and where that was dealt
    loading_s: Any


PER_RANK = len(Slots._fields)


@dataclass(frozen=True, kw_only=True)
class Announcement:
    """A plan on its way: it holds for the batches that no rank had dealt when it was sent."""

    version: int
    shares: tuple[int, ...]
    reason: str
    predicted_step_s: float
    strategy: str


class Norms(NamedTuple):
    """What tells how noisy last step's gradient was: one rank's part and, summed, that of all. Zeros: not measured."""

    squared_norm: float = 0.0  # of this rank's own mean gradient
    inverse_terms: float = 0.0  # 1 over the loss terms it is a mean of
    ranks: float = 0.0  # 1 where this rank had terms
    merged: float = 0.0  # squared norm of the merged gradient, as rank 0 sees it: others' rounding may differ


NORMS = len(Norms._fields)


@dataclass(frozen=True, kw_only=True)
class Look:
    """A look at whether parameters are the same: see `parameter_guard`. Zeros: none."""

    hash: int = 0  # of this rank's parameters
    interval: int = 0  # exchanges to the next look; rank 0 says it


@dataclass(frozen=True, kw_only=True)
class Report:
    """The sum of all ranks' control vectors, taken apart; where there is a value for each rank, index i is rank i."""

    count: float
    compute_s: tuple[float, ...]
    loading_s: tuple[float, ...]  # that a sample takes to be loaded beside computing, at least
    samples: tuple[float, ...]
    failed: tuple[int, ...]
    leaving: tuple[int, ...]  # ranks that were told to end
    stopping: tuple[int, ...]  # ranks that want all to stop training
    lays_out: bool  # whether any rank wants all to lay out their buckets anew
    chooses: bool  # whether any rank wants all to choose anew how buckets travel
    dealt_ahead: tuple[int, ...]  # batches after the one whose gradient this is
    ran: tuple[Ran, ...]
    staleness: float  # mean over the ranks
    announcement: Announcement | None
    norms: Norms
    hashes: tuple[int, ...]
    batches: tuple[int, ...]  # the global batch that each rank is at, `BATCHES` and more counted from 0; none where -1
    origins: tuple[int, ...]  # where in its epoch each rank's batch was dealt, below `ORIGINS`; not said where -1
    interval: int

    @property
    def busy_s(self) -> tuple[float, ...]:
        """Of each rank the seconds that its samples took; 0 where it has not said what computing them did."""
        said = zip(self.compute_s, self.loading_s, self.samples, strict=True)
        return tuple(max(compute_s, each_s * samples) if compute_s else 0.0 for compute_s, each_s, samples in said)


def length(ranks: int) -> int:
    """The number of elements of the control vector."""
    return 1 + PER_RANK * ranks + PER_PLAN + ranks + REASON_LENGTH + 2 + NORMS


def pack(
    *,
    ranks: int,
    rank: int,
    count: float,
    compute_s: float,
    samples: float,
    failed: bool,
    announcement: Announcement | None,
    loading_s: float = 0.0,
    leaves: bool = False,
    stops: bool = False,
    lays_out: bool = False,
    chooses: bool = False,
    look: Look | None = None,
    dealt_ahead: int = 0,
    ran: Ran | None = None,
    staleness: float = 0.0,
    norms: Norms | None = None,
    batch: int | None = None,
    origin: int | None = None,
) -> list[float]:
    """This rank's vector. Integers stay exact in fp32 up to 2**24."""
    look = look or Look()
    vector = [0.0] * length(ranks)
    vector[0] = count
    vector[1 + rank : 1 + PER_RANK * ranks : ranks] = Slots(
        compute_s=compute_s,
        samples=samples,
        failed=float(failed),
        dealt_ahead=dealt_ahead,
        **(ran or Ran())._asdict(),
        flags=LEAVES * leaves + STOPS * stops + LAYS_OUT * lays_out + CHOOSES * chooses,
        hash=look.hash,
        place=0 if batch is None else batch % BATCHES + 1 + (0 if origin is None else (origin + 1) * BATCHES),
        loading_s=loading_s,
    )
    if announcement is not None:
        at = 1 + PER_RANK * ranks
        text = announcement.reason.encode("ascii", "replace")[:REASON_LENGTH]
        strategy = float(STRATEGIES.index(announcement.strategy))
        vector[at : at + PER_PLAN] = [announcement.version, announcement.predicted_step_s, strategy]
        at += PER_PLAN
        vector[at : at + ranks] = announcement.shares
        vector[at + ranks : at + ranks + len(text)] = text
    vector[-NORMS - 1] = staleness
    vector[-NORMS - 2] = look.interval if rank == 0 else 0
    if norms is not None:
        vector[-NORMS:] = norms
    return vector


def _row(total: Sequence[float], field: str, *, ranks: int) -> list[float]:
    """One slot of all ranks, of a sum of control vectors."""
    begin = 1 + Slots._fields.index(field) * ranks
    return list(total[begin : begin + ranks])


def _flagged(flags: Sequence[float], flag: int) -> tuple[int, ...]:
    """The ranks that have set a flag."""
    return tuple(rank for rank, value in enumerate(flags) if int(value) & flag)


def failed_in(total: Sequence[float], *, ranks: int) -> tuple[int, ...]:
    """The ranks that have failed, according to a sum of control vectors."""
    return tuple(rank for rank, value in enumerate(_row(total, "failed", ranks=ranks)) if value > 0)


def unpack(total: Sequence[float], *, ranks: int) -> Report:
    """Takes the sum of all ranks' control vectors apart."""
    rows, at = Slots(*(_row(total, field, ranks=ranks) for field in Slots._fields)), 1 + PER_RANK * ranks
    announcement = None
    if total[at] > 0:
        version, predicted_step_s, strategy = total[at : at + PER_PLAN]
        at += PER_PLAN
        text = bytes(int(code) for code in total[at + ranks : at + ranks + REASON_LENGTH] if code > 0)
        announcement = Announcement(
            version=int(version),
            shares=tuple(int(share) for share in total[at : at + ranks]),
            reason=text.decode("ascii"),
            predicted_step_s=predicted_step_s,
            strategy=STRATEGIES[int(strategy)],
        )
    places = [int(value) - 1 for value in rows.place]
    return Report(
        count=total[0],
        compute_s=tuple(rows.compute_s),
        loading_s=tuple(rows.loading_s),
        samples=tuple(rows.samples),
        failed=failed_in(total, ranks=ranks),
        leaving=_flagged(rows.flags, LEAVES),
        stopping=_flagged(rows.flags, STOPS),
        lays_out=bool(_flagged(rows.flags, LAYS_OUT)),
        chooses=bool(_flagged(rows.flags, CHOOSES)),
        hashes=tuple(map(int, rows.hash)),
        batches=tuple(place % BATCHES if place >= 0 else -1 for place in places),
        origins=tuple(place // BATCHES - 1 if place >= 0 else -1 for place in places),
        interval=int(total[-NORMS - 2]),
        dealt_ahead=tuple(map(int, rows.dealt_ahead)),
        ran=tuple(map(Ran, rows.running_s, rows.stopped_s, rows.stops)),
        staleness=total[-NORMS - 1] / ranks,
        announcement=announcement,
        norms=Norms(*total[-NORMS:]),
    )
