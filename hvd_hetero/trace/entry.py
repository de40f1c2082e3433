"""The entries of a rank's record, one per line: a step, a plan or an event.

The functions that make an entry from a line, or a table of steps from several, raise ValueError, TypeError, KeyError,
OverflowError or RecursionError if a line has another format.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import NoneType
from typing import Any, NamedTuple

import numpy as np

from hvd_hetero.policy.partition import Bound
from hvd_hetero.policy.replan import Plan

# By kind of event: the fields that reports read, with their types. Events without them are not accepted.
READ: dict[str, dict[str, Any]] = {
    "apart": {"step": int},
    "together": {"step": int},
    "wait": {"waited_s": (int, float), "missing": list},
    "parameters": {"ranks": list},
    "limits": {"lower": int, "upper": (int, NoneType), "quantum": int, "micro_batch": (int, NoneType)},
}

LARGEST = 2.0**53  # up to here, whole numbers are exact as floats


class Step(NamedTuple):
    """One step of one rank: a row of the table that `steps_of` makes.

    Attributes:
        step: index of the global batch.
        t_s: when the step ended, in seconds since the epoch, by the clock of the rank's host.
        samples, share: the rank's samples, and its share by the plan.
        data_s: seconds waited for data.
        compute_s: seconds of compute.
        wait_s: seconds waited for the exchange, and for other ranks in it and in what the script sends itself.
        bytes: bytes that the rank sent.
        extra_s: seconds that its samples take beyond `compute_s` in the long run, which plans add: loading them in the
            training process, what is done after each step, serving the communication, and a CPU quota.
        loading_s: the least seconds that loading its samples takes while it computes; 0: not known.
    """

    step: int
    t_s: float
    samples: int
    data_s: float
    compute_s: float
    wait_s: float
    bytes: int
    share: int
    extra_s: float = 0.0
    loading_s: float = 0.0


WHOLE = ("step", "samples", "bytes", "share")  # the fields that are whole numbers
Table = Any  # of steps: an np.recarray with the dtype `STEPS`, whose columns no type checker knows
STEPS = np.dtype([(name, np.int64 if name in WHOLE else np.float64) for name in Step._fields])


@dataclass(frozen=True, kw_only=True)
class Event:
    """Something that happened on a rank, other than a step or a plan.

    Attributes:
        t_s: when, in seconds since the epoch.
        kind: what happened, such as "merge", "apart" (local steps begin) or "together" (they end).
        fields: more about it, by name.
    """

    t_s: float
    kind: str
    fields: dict[str, Any]


def plan_of(entry: dict[str, Any]) -> Plan:
    """Makes a plan from the JSON object of a plan."""
    plan = Plan(**{**entry, "shares": tuple(entry["shares"])})
    predicted_s = plan.predicted_step_s
    if not (isinstance(plan.reason, str) and isinstance(plan.strategy, str)
            and all(isinstance(number, int) for number in (plan.step, *plan.shares))
            and (predicted_s is None or math.isfinite(predicted_s))):
        raise TypeError(f"Expected a plan. Received: {entry}.")
    return plan


def bound_in(limits: Mapping[str, Any]) -> Bound:
    """Makes a bound of shares from the fields of an event "limits". Raises ValueError if they are no valid bound."""
    return Bound(lower=limits["lower"], upper=limits["upper"], quantum=limits["quantum"])


def event_of(entry: dict[str, Any]) -> Event:
    """Makes an event from the JSON object of an event."""
    event = Event(t_s=float(entry["t_s"]), kind=entry["event"], fields=dict(entry["fields"]))
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


def steps_of(fields: Sequence[str], lines: Sequence[str]) -> Table:
    """Makes a table of steps, with the dtype `STEPS`, from `lines`, each an array of the values of `fields`.

    Fields that the file lacks, numbers not finite or above `LARGEST`, and those below 0 (except `t_s`) are 0.
    """
    text = f"[{','.join(lines)}]"
    if '"' in text:  # which numpy would read as numbers
        raise TypeError(f"Expected numbers. Received: {text}.")
    values = np.array(json.loads(text), dtype=float)
    if values.shape != (len(lines), len(fields)):
        raise ValueError(f"Expected {len(fields)} values. Received: {text}.")
    found: Table = np.zeros(len(lines), STEPS).view(np.recarray)
    for name, column in zip(fields, values.T, strict=True):
        if name in Step._fields:
            valid = (np.abs(column) <= LARGEST) & ((column > 0.0) | (name == "t_s"))
            found[name] = np.where(valid, column, 0.0)
    return found
