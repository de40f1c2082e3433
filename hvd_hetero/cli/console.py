"""What the commands print: tables for people, made by the package rich, and JSON for programs."""

from __future__ import annotations

import argparse
import errno
import importlib
import json
import math
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from hvd_hetero.cli.error import CommandError
from hvd_hetero.engine.environment import under_mpi

TO_STDOUT = "-"
MINUTES_FROM_S = 600.0  # from this many seconds on, a duration is told in minutes
WIDTH = 132  # characters of a table's line where the output is no terminal with a size; horovodrun adds prefixes


def seconds_text(seconds: float) -> str:
    """A duration for people, with three significant digits: "85 µs", "1.2 ms", "3.4 s", "12 min", "3 h 5 min"."""
    if MINUTES_FROM_S <= seconds < math.inf:
        hours, minutes = divmod(round(seconds / 60), 60)
        return f"{hours} h {minutes} min" if hours else f"{minutes} min"
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if seconds >= 0.9995 * scale or unit == "µs":      # with three digits, 0.9995 is shown as 1
            break
    return f"{seconds / scale:.3g} {unit}"


def rate_text(rate: float) -> str:
    """A rate, as of samples per second, for people, without its unit: "24,870", "755", "31.42"."""
    return f"{rate:,.0f}" if rate >= 1000 else f"{rate:.4g}"


def rich_console() -> Any:
    """A `rich.console.Console` for the output. Raises `CommandError` if rich is not installed."""
    try:
        consoles = importlib.import_module("rich.console")
    except ImportError as error:
        raise CommandError(
            f"expected the package rich, which prints the tables. Received: {error}.\n"
            "  What to do: pip install rich, or take --json."
        ) from error
    console = consoles.Console(highlight=False)
    # mpirun may give its processes terminals, which nobody sees and which have no size. A shell of `srun --pty` has the
    # variables of MPI as well, and a terminal of somebody's.
    if not console.is_terminal or (under_mpi() and not _terminal_columns()):
        console = consoles.Console(highlight=False, width=WIDTH, force_terminal=False)
    console.on_broken_pipe = _nobody_reads  # rich's own method ends the process; `main` handles the exception
    return console


def _terminal_columns() -> int:
    """The width of the terminal that the output is; 0 if it has none."""
    try:
        return os.get_terminal_size(sys.stdout.fileno()).columns
    except (AttributeError, OSError, ValueError):  # no output, one that is no file or terminal, or a closed one
        return 0


def _nobody_reads() -> None:
    raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], *, left: Sequence[str]) -> Any:
    """A table of rich, with every column aligned to the right except for those named in `left`.

    Args:
        title: stands above the table.
        columns: the headings.
        rows: the cells as text; the markup of rich is not interpreted in them.
        left: headings of the columns that are aligned to the left.
    """
    escape = importlib.import_module("rich.markup").escape  # otherwise rich takes text in brackets for its markup
    made = importlib.import_module("rich.table").Table(title=title)
    for name in columns:
        made.add_column(name, justify="left" if name in left else "right", overflow="fold")
    for row in rows:
        made.add_row(*map(escape, row))
    return made


def add_json_option(parser: argparse.ArgumentParser) -> None:
    """Declares the option `--json [FILE]`, whose value is the `place` of `write_or_show`."""
    parser.add_argument("--json", nargs="?", const=TO_STDOUT, metavar="FILE",
                        help="write everything as JSON to FILE or, last in the line, to the output instead of text")


def write_or_show(result: dict[str, Any], place: str | None, *, show: Callable[[], None]) -> None:
    """Writes a result as JSON, as the option `--json [FILE]` asks for, and shows it to people.

    Args:
        result: a dict for JSON.
        place: `TO_STDOUT`: print the JSON and nothing else; a path: write the JSON to this file; None: no JSON.
        show: prints the result for people; is called unless `place` is `TO_STDOUT`, also if the file cannot be written.

    Raises:
        CommandError: the file cannot be written.
    """
    if place == TO_STDOUT:
        print(json.dumps(result), flush=True)
        return
    try:
        if place is not None:  # before the tables, whose reader may close the pipe early
            Path(place).write_text(json.dumps(result) + "\n", encoding="utf-8")
    except OSError as error:
        raise CommandError(f"--json: expected a file that can be written. Received: {error}.") from error
    finally:
        show()
