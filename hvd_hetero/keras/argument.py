"""Checks arguments that come from Horovod's interface: reductions, and arguments that have no effect here."""

from __future__ import annotations

from typing import Any

from . import backend


def op_of(op: Any, *names: str) -> str:
    """The name of Horovod's reduction `op`, which has to be one of `names`.

    Raises:
        ValueError: for another reduction or anything else, also for a bool, which is meant for `average`.
    """
    for name in names:
        if isinstance(op, int) and not isinstance(op, bool) and op == getattr(backend.horovod, name):
            return name
    *most, last = (f"hvd.{name}" for name in names)
    raise ValueError(f"op: expected {', '.join(most)} or {last}. Received: {op!r}.")


def check_unused(**arguments: Any) -> None:
    """Raises TypeError for an argument, a name or device in Horovod, that is neither None nor a text: such a value was
    meant for another argument, and would be ignored."""
    for name, value in arguments.items():
        if value is not None and not isinstance(value, str):
            raise TypeError(
                f"{name}: expected a text, which Horovod takes in this place and which has no effect here. Received: "
                f"{value!r}. Pass arguments by their names."
            )
