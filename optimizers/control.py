"""The control vector: measurements, flags and plans that ranks exchange in the all-reduce of a gradient bucket.

It is summed like a gradient. Each rank writes into its own slots and leaves those of other ranks 0, so the sum gathers
the slots of all ranks. It holds, in this order:

    1                    loss terms of this rank; summed, those of the whole batch
    len(Slots) x ranks   `Slots` field by field, each a row of all ranks
    3 + ranks + 80       the next plan, written by rank 0 alone: version, predicted step, strategy; shares; reason
    1 + 1 + len(Norms)   exchanges to the next comparison of parameters, by rank 0; staleness; `Norms`

All ranks read the identical sum, and therefore hold the identical plan. The slots for gradient noise are there whether
or not it is measured, so that the vectors of all ranks have the same length.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from hvd_hetero.policy.jitter import StopSums
from hvd_hetero.policy.strategy import LOCAL, SYNCHRONOUS

REASON_LENGTH = 80  # characters of a plan's reason that travel
STRATEGIES = (SYNCHRONOUS, LOCAL)  # a strategy travels as its index
LEAVES, STOPS, LAYS_OUT, CHOOSES = 1, 2, 4, 8  # bits of the slot `flags`
BATCHES, ORIGINS = 1 << 20, 15  # numbers of batches and origins in the slot `place`, which is at most 2**24
PER_PLAN = 3  # slots of a plan besides its shares and reason: version, predicted step, strategy


class Slots(NamedTuple):
    """The slots that each rank has: one number each when written, a list over all ranks when read from the sum."""

    compute_s: Any  # seconds per batch of computing, and of loading where the rank itself does; 0: not measured
    samples: Any  # samples per batch
    failed: Any  # 1: this rank cannot go on
    dealt_ahead: Any  # batches beyond the present one that are dealt, or may be without waiting
    running_s: Any  # this slot and the next two: see `StopSums`
    stopped_s: Any
    stops: Any
    flags: Any  # a sum of LEAVES, STOPS, LAYS_OUT, CHOOSES
    hash: Any  # of the parameters; 0: not compared now
    place: Any  # the present batch, and where in its epoch it was dealt: 1 + batch + BATCHES * (1 + origin); 0: none
    loading_s: Any  # seconds of loading per sample


PER_RANK = len(Slots._fields)


@dataclass(frozen=True, kw_only=True)
class Announcement:
    """A new plan as rank 0 sends it: without its first step, which follows from how far ranks have dealt."""

    version: int
    shares: tuple[int, ...]
    reason: str
    predicted_step_s: float
    strategy: str


class Norms(NamedTuple):
    """Norms of the last step's gradients, from which its noise is estimated; in the sum, those of all ranks summed.
    Zeros: not measured."""

    squared_norm: float = 0.0  # squared norm of this rank's own mean gradient
    inverse_terms: float = 0.0  # 1 / the number of loss terms that it is a mean over
    ranks: float = 0.0  # 1 if this rank had a loss term, else 0
    merged: float = 0.0  # squared norm of the merged gradient; rank 0 alone sends it, as rounding may differ by rank


NORMS = len(Norms._fields)


@dataclass(frozen=True, kw_only=True)
class ParameterComparison:
    """One rank's part in a comparison of parameters over all ranks: see `ParameterGuard`. Zeros: none is due."""

    hash: int = 0  # hash of this rank's parameters, 1 or more
    interval: int = 0  # exchanges until the next comparison; only rank 0's is sent


@dataclass(frozen=True, kw_only=True)
class Report:
    """The sum of all ranks' control vectors, unpacked. Where there is a value per rank, index i is rank i's."""

    count: float  # loss terms of all ranks
    compute_s: tuple[float, ...]  # seconds per batch of computing, and of loading in between; 0: not measured
    loading_s: tuple[float, ...]  # seconds per sample that loading takes at least, while the rank computes
    samples: tuple[float, ...]  # samples per batch
    failed: tuple[int, ...]  # ranks that cannot go on
    leaving: tuple[int, ...]  # ranks whose process was told to end
    stopping: tuple[int, ...]  # ranks that ask all ranks to stop training
    lays_out: bool  # whether any rank asks all to lay out their buckets anew
    chooses: bool  # whether any rank asks all to choose anew how buckets travel
    dealt_ahead: tuple[int, ...]  # batches dealt, or that may be, beyond the one whose gradient this is
    stop_sums: tuple[StopSums, ...]
    staleness: float  # mean over the ranks, in merges
    announcement: Announcement | None  # a new plan, if there is one
    norms: Norms
    hashes: tuple[int, ...]  # hashes of the parameters; 0: none
    batches: tuple[int, ...]  # index of the global batch that the rank is at, modulo `BATCHES`; -1: not told
    origins: tuple[int, ...]  # where in its epoch that batch was dealt, as a number below `ORIGINS`; -1: not told
    interval: int  # exchanges until the next comparison of parameters; 0: none was made

    @property
    def busy_s(self) -> tuple[float, ...]:
        """For each rank the seconds that a batch took: compute or loading, whichever is longer; 0: not measured."""
        said = zip(self.compute_s, self.loading_s, self.samples, strict=True)
        return tuple(max(compute_s, each_s * samples) if compute_s else 0.0 for compute_s, each_s, samples in said)


def length(ranks: int) -> int:
    """Returns the number of elements of the control vector of so many ranks."""
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
    comparison: ParameterComparison | None = None,
    dealt_ahead: int = 0,
    stop_sums: StopSums | None = None,
    staleness: float = 0.0,
    norms: Norms | None = None,
    batch: int | None = None,
    origin: int | None = None,
) -> list[float]:
    """Returns this rank's control vector. The arguments are described at `Slots` and `Report`.

    All integers in it are at most 2**24, so that fp32 holds them exactly.

    Args:
        ranks: the number of ranks.
        rank: this rank.
        count: this rank's loss terms.
        announcement: a new plan, on rank 0.
        batch: index of the global batch that this rank is at; None: not told.
        origin: where in its epoch that batch was dealt, below `ORIGINS`; None: not told.
    """
    comparison = comparison or ParameterComparison()
    vector = [0.0] * length(ranks)
    vector[0] = count
    vector[1 + rank : 1 + PER_RANK * ranks : ranks] = Slots(
        compute_s=compute_s,
        samples=samples,
        failed=float(failed),
        dealt_ahead=dealt_ahead,
        **(stop_sums or StopSums())._asdict(),
        flags=LEAVES * leaves + STOPS * stops + LAYS_OUT * lays_out + CHOOSES * chooses,
        hash=comparison.hash,
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
    vector[-NORMS - 2] = comparison.interval if rank == 0 else 0
    if norms is not None:
        vector[-NORMS:] = norms
    return vector


def _row(total: Sequence[float], field: str, *, ranks: int) -> list[float]:
    """Returns slot `field` of all ranks, from the sum of the control vectors."""
    begin = 1 + Slots._fields.index(field) * ranks
    return list(total[begin : begin + ranks])


def _flagged(flags: Sequence[float], flag: int) -> tuple[int, ...]:
    """Returns the ranks that have set a bit; `flags`: the slot of that name, by rank."""
    return tuple(rank for rank, value in enumerate(flags) if int(value) & flag)


def failed_in(total: Sequence[float], *, ranks: int) -> tuple[int, ...]:
    """Returns the ranks that cannot go on, from the sum of the control vectors."""
    return tuple(rank for rank, value in enumerate(_row(total, "failed", ranks=ranks)) if value > 0)


def unpack(total: Sequence[float], *, ranks: int) -> Report:
    """Unpacks the sum of all ranks' control vectors."""
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
        stop_sums=tuple(map(StopSums, rows.running_s, rows.stopped_s, rows.stops)),
        staleness=total[-NORMS - 1] / ranks,
        announcement=announcement,
        norms=Norms(*total[-NORMS:]),
    )
