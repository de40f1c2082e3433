"""What commands print: tables for people, by rich, and JSON for programs."""

from __future__ import annotations

import errno
import importlib
import json
import math
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from hvd_hetero.cli.error import CommandError
from hvd_hetero.engine.environment import under_mpi

TO_STDOUT = "-"
LONG_S = 600.0  # of as much and more, minutes are told
WIDTH = 132  # of the tables where output is no terminal: horovodrun's prefix comes on top


def seconds_text(seconds: float) -> str:
    """Seconds for people: "85 µs", "1.2 ms", "3.4 s", "12 min", "3 h 5 min"."""
    if LONG_S <= seconds < math.inf:
        hours, minutes = divmod(round(seconds / 60), 60)
        return f"{hours} h {minutes} min" if hours else f"{minutes} min"
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if seconds >= 0.9995 * scale or unit == "µs":      # which is shown as 1
            break
    return f"{seconds / scale:.3g} {unit}"


def rate_text(rate: float) -> str:
    """Samples per second for people: "24,870", "755", "31.42"."""
    return f"{rate:,.0f}" if rate >= 1000 else f"{rate:.4g}"


def rich_console() -> tuple[Any, Any]:
    """rich's console, and its class of tables. Raises CommandError where it is not installed."""
    try:
        consoles, tables = importlib.import_module("rich.console"), importlib.import_module("rich.table")
    except ImportError as error:
        raise CommandError(
            f"expected the package rich, which prints the tables. Received: {error}.\n"
            "  What to do: pip install rich, or take --json."
        ) from error
    console = consoles.Console(highlight=False)
    if not console.is_terminal or under_mpi():  # whose processes have terminals that nobody sees
        console = consoles.Console(highlight=False, width=WIDTH, force_terminal=False)
    console.on_broken_pipe = _nobody_reads  # rich itself ends the process
    return console, tables.Table


def _nobody_reads() -> None:
    raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))


def table(make: Any, title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], *, left: Sequence[str]) -> Any:
    """A table whose columns stand to the right, but for those of `left`."""
    escape = importlib.import_module("rich.markup").escape  # what is in brackets, as of a host, is text
    made = make(title=title)
    for name in columns:
        made.add_column(name, justify="left" if name in left else "right", overflow="fold")
    for row in rows:
        made.add_row(*map(escape, row))
    return made


def write(found: dict[str, Any], place: str | None, *, otherwise: Callable[[], None]) -> None:
    """None; writes `found` as JSON to the output or a file, and prints tables by `otherwise` unless it went to the
    output. Raises CommandError where the file cannot be written."""
    if place == TO_STDOUT:
        print(json.dumps(found), flush=True)
        return
    try:
        if place is not None:  # first: nobody may read tables to their end
            Path(place).write_text(json.dumps(found) + "\n", encoding="utf-8")
    except OSError as error:
        raise CommandError(f"--json: expected a file that can be written. Received: {error}.") from error
    finally:
        otherwise()
