"""What the pictures of `hvd-hetero probe` and `hvd-hetero report` share: matplotlib, and the option `--picture`."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hvd_hetero.cli.error import CommandError, UsageError


def figure(width: float, height: float, *, dpi: float) -> Any:
    """An empty figure of matplotlib, of so many inches and dots per inch.

    Raises `CommandError` if matplotlib is not installed.
    """
    try:
        figures = importlib.import_module("matplotlib.figure")
        agg = importlib.import_module("matplotlib.backends.backend_agg")
    except ImportError as error:
        raise CommandError(f"expected the package matplotlib, which draws. Received: {error}.\n"
                           "  What to do: pip install matplotlib, or leave out --picture.") from error
    made = figures.Figure(figsize=(width, height), dpi=dpi, layout="constrained")
    agg.FigureCanvasAgg(made)
    return made


def write_picture(draw: Callable[[], Any], place: Path | None) -> None:
    """Writes the figure that `draw` returns into a file, as the option `--picture FILE` asks for.

    Args:
        draw: returns a figure, as from `figure`.
        place: the file, in the format of its suffix (.png, .svg); None: do nothing.

    Raises:
        UsageError: `place` has no file name, or matplotlib has no format of its suffix.
        CommandError: the file cannot be written.
    """
    if place is None:
        return
    drawn = draw()
    try:
        if not place.name:
            raise ValueError("a path without a name")
        drawn.savefig(place)
    except ValueError as error:
        raise UsageError(f"--picture: expected a file name that ends in .png or .svg. Received: {error}.") from error
    except OSError as error:
        raise CommandError(f"--picture: expected a file that can be written. Received: {error}.") from error
