"""Arguments of Horovod's: its reductions, and what has no meaning here but may be passed."""

from __future__ import annotations

from typing import Any

from . import backend


def op_of(op: Any, *names: str) -> str:
    """The name of a reduction that is one of these.

    Raises:
        ValueError: another one, or something else; a bool is meant for `average`.
    """
    for name in names:
        if isinstance(op, int) and not isinstance(op, bool) and op == getattr(backend.horovod, name):
            return name
    *most, last = (f"hvd.{name}" for name in names)
    raise ValueError(f"op: expected {', '.join(most)} or {last}. Received: {op!r}.")


def check_unused(**arguments: Any) -> None:
    """Raises TypeError for anything but a text where Horovod takes a name or a device: it is meant for another argument
    and would be passed over."""
    for name, value in arguments.items():
        if value is not None and not isinstance(value, str):
            raise TypeError(
                f"{name}: expected a text, which Horovod takes in this place and which has no effect here. Received: "
                f"{value!r}. Pass arguments by their names."
            )
