"""What all ranks must agree on before they train together, checked in one exchange.

A rank with a wrong argument does not raise alone, which would leave the others waiting: it says so in the exchange,
and every rank raises.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from numbers import Integral
from typing import Any

import numpy as np

from hvd_hetero.engine.environment import is_elastic
from hvd_hetero.engine.payload import gather_text
from hvd_hetero.engine.port import Engine
from hvd_hetero.engine.stderr import tell
from hvd_hetero.policy.partition import Bound, InfeasibleError, equal_shares, split
from hvd_hetero.policy.rank_words import by_rank
from hvd_hetero.policy.replan import ReplanRule
from hvd_hetero.policy.speed import SpeedModel

from .argument import check_whole

MOST = 2**24  # samples; shares travel as float32, which holds integers exactly up to here
WRONG = "wrong arguments"  # begins what a rank says that has some, instead of a text or a list (in JSON) of them


@dataclass(frozen=True, kw_only=True)
class BalancerArguments:
    """The arguments of a balancer on one rank and, once `agree` has filled them in, the values of all ranks.

    The arguments are described at `Balancer`.

    Attributes:
        identity: a number that stands for this rank's hardware: see `Engine.identity`.
        kind: a number that stands for the kind of its device: see `Engine.kind`.
        identities: the identities of all ranks, by rank; as the following ones, empty before `agree`.
        kinds: the kinds of their devices.
        bounds: the bounds of each rank's share.
        micro_caps: each rank's `max_micro_batch`.
        first_shares: the shares of the first plan.
    """

    global_batch_size: int
    min_share: int = 1
    max_share: int | None = None
    quantum: int = 1
    max_micro_batch: int | None = None
    shares: tuple[int, ...] | None = None
    adaptive: bool = True
    rule: ReplanRule = ReplanRule()
    identity: int = 0
    kind: int = 0
    identities: tuple[int, ...] = ()
    kinds: tuple[int, ...] = ()
    bounds: tuple[Bound, ...] = ()
    micro_caps: tuple[int | None, ...] = ()
    first_shares: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name, value in vars(self).items():  # NumPy's integers become Python's, as states hold
            plain = tuple(map(_plain, value)) if isinstance(value, tuple) else _plain(value)
            object.__setattr__(self, name, plain)

    @property
    def divided(self) -> tuple[int, ...]:
        """Ranks whose share may exceed their `max_micro_batch`, so that they split a batch into micro-batches."""
        whole = self.global_batch_size
        uppers = [whole if bound.upper is None else bound.upper for bound in self.bounds]
        most = uppers if self.adaptive else self.first_shares
        caps = [whole if cap is None else cap for cap in self.micro_caps]
        return tuple(rank for rank, (share, cap) in enumerate(zip(most, caps, strict=True)) if share > cap)

    def problem(self, size: int) -> str | None:
        """Returns an error message if an argument of this rank is wrong, on `size` ranks; else None."""
        for name in ("global_batch_size", "min_share", "quantum", "max_share", "max_micro_batch"):
            least, optional = 0 if name == "min_share" else 1, name.startswith("max")
            try:
                check_whole(name, getattr(self, name), least=least, optional=optional)
            except ValueError as error:
                return str(error)
            if (getattr(self, name) or 0) > MOST:
                return f"{name}: expected at most {MOST}. Received: {getattr(self, name)}."
        if not (self.adaptive is None or isinstance(self.adaptive, (Integral, np.bool_))):
            return f"adaptive: expected True or False. Received: {self.adaptive!r}."
        if not isinstance(self.rule, ReplanRule):
            return f"rule: expected an hvd.ReplanRule, or None. Received: {self.rule!r}."
        if self.max_share is not None and self.max_share < self.min_share:
            return f"max_share: expected at least min_share ({self.min_share}). Received: {self.max_share}."
        if self.shares is None:
            return None
        if not isinstance(self.shares, tuple) or len(self.shares) != size:
            return f"shares: expected one share for each of {size} ranks. Received: {self.shares!r}."
        if any(not isinstance(share, Integral) or not 0 <= share <= MOST for share in self.shares):
            return f"shares: expected integers from 0 to {MOST}. Received: {self.shares}."
        return None


def _plain(value: Any) -> Any:
    return int(value) if isinstance(value, Integral) and not isinstance(value, bool) else value


def without_stale_shares(engine: Engine, asked: BalancerArguments) -> BalancerArguments:
    """Returns `asked` without its `shares`, if these are of another number of ranks than an elastic job has now.

    Rank 0 then prints that. As every process was given the same shares, they hold again once that many ranks train.
    """
    shares = asked.shares
    if not isinstance(shares, tuple) or len(shares) == engine.size:
        return asked
    if engine.rank == 0:
        tell(f"hvd_hetero: shares= are those of {len(shares)} ranks, and there are {engine.size}: going on without.")
    return replace(asked, shares=None)


def agree(engine: Engine, mine: BalancerArguments, *, name: str) -> BalancerArguments:
    """Returns `mine` with the identities, kinds, bounds and micro-batch limits of all ranks, and the first shares.

    A collective call, which checks the arguments of all ranks.

    Args:
        mine: this rank's arguments.
        name: the name of the operation, the same on all ranks.

    Raises:
        ValueError: on every rank, if an argument of any rank is wrong or arguments differ: with what was expected, what
            was passed, and what to do.
    """
    with heard(engine, name=lambda: name):
        if (problem := mine.problem(engine.size)) is not None:
            raise ValueError(problem)
    same = {
        "global_batch_size": mine.global_batch_size,
        "adaptive": bool(mine.adaptive),
        "shares": mine.shares,
        "rule": mine.rule,
    }
    own = [mine.min_share, mine.max_share, mine.quantum, mine.max_micro_batch, mine.identity, mine.kind]
    lowers, uppers, quanta, micro_caps, identities, kinds = zip(*_agreed(engine, same, own, name=name), strict=True)
    bounds = tuple(
        Bound(lower=lower, upper=upper, quantum=quantum)
        for lower, upper, quantum in zip(lowers, uppers, quanta, strict=True)
    )
    return replace(
        mine,
        identities=identities,
        kinds=kinds,
        bounds=bounds,
        micro_caps=micro_caps,
        first_shares=_first_shares(mine, bounds),
    )


@contextlib.contextmanager
def heard(engine: Engine, *, name: Callable[[], str]) -> Iterator[None]:
    """A context for what this rank does before it comes to an agreement (`agree_on`, `agree_text`), such as checks of
    its arguments. An error in it is raised once the other ranks, which come to that agreement, have heard of it there
    and raise as well. In an elastic job it is this rank's alone: its process ends, and the others go on without it.

    Nothing in it may be collective, nor be counted by ranks: no `Engine.unique`, no `Engine.on_reset_end`.

    Args:
        name: returns the name of the agreement; is called if there was an error.
    """
    try:
        yield
    except Exception as error:
        if not is_elastic():
            _tell(engine, error, name=name())
        raise


def _tell(engine: Engine, error: Exception, *, name: str) -> None:
    """Takes part in an agreement with what this rank's error says."""
    gather_text(engine, f"{WRONG} ({str(error) or repr(error)})", name=name)


def agree_on(engine: Engine, values: Mapping[str, Any], *, name: str) -> None:
    """Checks that all ranks passed equal values. A collective call.

    Values are compared as text, so that they may be of any type.

    Args:
        values: by the names that the error gives them; the same names on all ranks.
        name: the name of the operation.

    Raises:
        ValueError: on every rank, if a value differs between ranks, or a rank had an error before: see `heard`.
    """
    _agreed(engine, values, None, name=name)


def _agreed(engine: Engine, values: Mapping[str, Any], own: Any, *, name: str) -> list[Any]:
    """The `own` of all ranks, which are for JSON, once it is checked that all passed equal `values`: see `agree_on`."""
    mine = [str(int(each)) if isinstance(each, (Integral, np.bool_)) else repr(each) for each in values.values()]
    said = gather_text(engine, json.dumps([mine, own]), name=name)
    wrong = [f"rank {rank}: {one}" for rank, one in zip(engine.ranks, said, strict=True) if one.startswith(WRONG)]
    if wrong:
        raise ValueError(f"Expected valid arguments on every rank. Received: {'; '.join(wrong)}.")
    table = list(map(json.loads, said))
    for column, title in enumerate(values):
        _same([texts[column] for texts, _ in table], title, engine)
    return [one for _, one in table]


def agree_text(engine: Engine, describe: Callable[[], str], *, title: str, name: str) -> None:
    """Checks that `describe()` gives the same text on all ranks. A collective call.

    Args:
        describe: returns this rank's text, or raises an error if its arguments are wrong, of which all ranks hear.
        title: what the text is about, for the error.
        name: the name of the operation.

    Raises:
        ValueError: on all ranks where texts differ, with the text of each rank; and on the other ranks where `describe`
            raised on one.
    """
    try:
        text = describe()
    except Exception as error:
        _tell(engine, error, name=name)
        raise
    _same(gather_text(engine, text, name=name), title, engine)


def _same(values: Sequence[object], title: str, engine: Engine) -> None:
    if len(set(values)) > 1:
        raise ValueError(f"{title}: expected the same on every rank. Received: {by_rank(values, engine.ranks)}.")


def _first_shares(arguments: BalancerArguments, bounds: tuple[Bound, ...]) -> tuple[int, ...]:
    """Returns the shares of the first plan: those given, or the most equal ones within the bounds.

    Raises:
        ValueError: the given shares, or any shares, cannot meet the bounds and the global batch size.
    """
    size, whole = len(bounds), arguments.global_batch_size
    least = sum(bound.lower for bound in bounds)
    if whole < least:
        raise ValueError(
            f"global_batch_size: expected at least {least}, the sum of all ranks' min_share over {size} ranks. "
            f"Received: {whole}. Use a larger global batch, fewer ranks, or min_share=0 for ranks that may idle."
        )
    if arguments.shares is None:
        return _equal_within(whole, bounds)
    if sum(arguments.shares) != whole:
        raise ValueError(f"shares: expected a sum of {whole}, the global batch. Received: {arguments.shares}.")
    for rank, (share, bound) in enumerate(zip(arguments.shares, bounds, strict=True)):
        if not bound.allows(share):
            raise ValueError(
                f"shares: expected for rank {rank} a multiple of {bound.quantum} between {bound.lower} and "
                f"{bound.upper if bound.upper is not None else whole} (its max_share is what its memory holds). "
                f"Received: {share}."
            )
    return arguments.shares


def _equal_within(whole: int, bounds: tuple[Bound, ...]) -> tuple[int, ...]:
    """Returns the shares of `whole` samples that are as equal as the bounds allow; ValueError if there are none."""
    equal = equal_shares(whole, len(bounds))
    if all(map(Bound.allows, bounds, equal)):
        return equal
    alike = [SpeedModel(overhead_s=0.0, seconds_per_sample=1.0, standard_error=0.0, observations=0)] * len(bounds)
    try:
        return split(alike, whole, bounds)
    except InfeasibleError as error:
        raise ValueError(str(error)) from error
