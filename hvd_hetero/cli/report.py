"""`hvd-hetero report`: which ranks of a run waited for which others, and why; read from the trace of the run."""

from __future__ import annotations

import argparse
import importlib
from pathlib import Path

from hvd_hetero.cli.console import TO_STDOUT, write_or_show
from hvd_hetero.cli.error import CommandError
from hvd_hetero.cli.report_content import SKIPPED_STEPS, Report, read_report
from hvd_hetero.cli.report_table import show


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the command's options."""
    parser.add_argument("run", help="the folder with the run's trace: of hvd.Balancer(run=...) or HVD_HETERO_RUN")
    parser.add_argument("--json", nargs="?", const=TO_STDOUT, metavar="FILE",
                        help="write everything as JSON to FILE or, last in the line, to the output instead of tables")
    parser.add_argument("--picture", type=Path, metavar="FILE", help="draw it into FILE (.png, .svg)")
    parser.add_argument("--skip", type=int, default=SKIPPED_STEPS, metavar="N",
                        help="leave out the first N steps of each session, in which frameworks compile (default: "
                             "%(default)s)")


def command(arguments: argparse.Namespace) -> int:
    """Prints the report or writes it as JSON, and draws the picture if asked for. Returns the exit code 0.

    Raises:
        CommandError: the trace cannot be read, or a file cannot be written.
    """
    report = read_report(arguments.run, skip=arguments.skip)
    try:
        write_or_show(report.as_dict(), arguments.json, show=lambda: show(report))
    finally:  # the picture is drawn also if the reader of the tables closes the pipe
        _draw(report, arguments.picture)
    return 0


def _draw(report: Report, place: Path | None) -> None:
    if place is not None:
        try:
            importlib.import_module("hvd_hetero.cli.report_picture").draw(report, place)
        except (OSError, ValueError) as error:
            raise CommandError(f"--picture: expected a file that can be written. Received: {error}.") from error
