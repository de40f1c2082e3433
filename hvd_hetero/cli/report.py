"""`hvd-hetero report`: which ranks of a run waited for which others, and why; read from the trace of the run."""

from __future__ import annotations

import argparse
from pathlib import Path

from hvd_hetero.cli.console import add_json_option, write_or_show
from hvd_hetero.cli.drawing import write_picture
from hvd_hetero.cli.report_content import SKIPPED_STEPS, read_report
from hvd_hetero.cli.report_picture import draw
from hvd_hetero.cli.report_table import show


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the command's options."""
    parser.add_argument("run", help="the folder with the run's trace: of hvd.Balancer(run=...) or HVD_HETERO_RUN")
    add_json_option(parser)
    parser.add_argument("--picture", type=Path, metavar="FILE", help="draw it into FILE (.png, .svg)")
    parser.add_argument("--skip", type=int, default=SKIPPED_STEPS, metavar="N",
                        help="leave out the first N steps of each session, in which frameworks compile (default: "
                             "%(default)s)")


def command(arguments: argparse.Namespace) -> int:
    """Prints the report or writes it as JSON, and draws the picture if asked for. Returns the exit code 0.

    Raises:
        UsageError: an option has a value out of range.
        CommandError: the trace cannot be read, or a file cannot be written.
    """
    report = read_report(arguments.run, skip=arguments.skip)
    try:
        write_or_show(report.as_dict(), arguments.json, show=lambda: show(report))
    finally:  # the picture is drawn also if the reader of the tables closes the pipe
        write_picture(lambda: draw(report), arguments.picture)
    return 0
