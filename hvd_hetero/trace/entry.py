"""What one line of a record tells of: a step, a plan, an event.

Whatever is made of a line raises ValueError, TypeError or KeyError where it is none of this format.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import NoneType
from typing import Any, NamedTuple

from hvd_hetero.policy.partition import Bound
from hvd_hetero.policy.replan import Plan

# What reports read of events, which are of no use without.
READ: dict[str, dict[str, Any]] = {
    "apart": {"step": int},
    "together": {"step": int},
    "wait": {"waited_s": (int, float), "missing": list},
    "parameters": {"ranks": list},
    "limits": {"lower": int, "upper": (int, NoneType), "quantum": int, "micro_batch": (int, NoneType)},
}


class Step(NamedTuple):
    """One step of one rank. Seconds that were not finite, and fields that the file lacks, are 0."""

    step: int
    t_s: float           # on the rank's own clock, as the step ended
    samples: int
    data_s: float
    compute_s: float
    wait_s: float
    bytes: int
    share: int
    extra_s: float = 0.0      # beyond compute_s, as plans reckon: loading, serving the communication, a quota's part
    loading_s: float = 0.0    # what its samples take to be loaded beside that, at least; 0: less than was noticed


@dataclass(frozen=True, kw_only=True)
class Event:
    """Something that happened on a rank."""

    t_s: float
    kind: str
    fields: dict[str, Any]


def plan_of(entry: dict[str, Any]) -> Plan:
    """The plan that a line tells of."""
    plan = Plan(**{**entry, "shares": tuple(entry["shares"])})
    predicted_s = plan.predicted_step_s
    if not (isinstance(plan.reason, str) and isinstance(plan.strategy, str)
            and all(isinstance(number, int) for number in (plan.step, *plan.shares))
            and (predicted_s is None or math.isfinite(predicted_s))):
        raise TypeError(f"Expected a plan. Received: {entry}.")
    return plan


def bound_in(limits: Mapping[str, Any]) -> Bound:
    """The bound that an event "limits" tells of. Raises ValueError where it is none."""
    return Bound(lower=limits["lower"], upper=limits["upper"], quantum=limits["quantum"])


def event_of(entry: dict[str, Any]) -> Event:
    """The event that a line tells of."""
    event = Event(t_s=entry["t_s"], kind=entry["event"], fields=dict(entry["fields"]))
    for name, kinds in READ.get(event.kind, {}).items():
        if not isinstance(event.fields[name], kinds):
            raise TypeError(f"Expected {name} of {kinds}. Received: {entry}.")
    if event.kind == "together" and not math.isfinite(event.fields.get("wait_s", 0.0)):
        raise ValueError(f"Expected a finite wait_s. Received: {entry}.")
    if event.kind == "limits":
        bound_in(event.fields)
        if event.fields["micro_batch"] is not None and event.fields["micro_batch"] < 1:
            raise ValueError(f"Expected micro_batch of 1 or more. Received: {entry}.")
    return event


def step_of(fields: Sequence[str], values: Sequence[Any]) -> Step:
    """The step of which a line tells these fields."""
    if len(values) != len(fields):
        raise ValueError(f"Expected {len(fields)} values. Received: {values}.")
    for value in values:
        if value is not None and not isinstance(value, (int, float)):
            raise TypeError(f"Expected numbers. Received: {values}.")
    finite = [value if value and math.isfinite(value) else 0 for value in values]
    if fields == Step._fields:
        return Step._make(finite)
    seen = dict(zip(fields, finite, strict=True))
    return Step(**{name: seen.get(name, 0) for name in Step._fields})
