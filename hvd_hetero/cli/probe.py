"""`hvd-hetero probe`: measures the devices of all ranks and the links between them, and groups the ranks into nodes.

All ranks run the command (`horovodrun -np 4 -H a:2,b:2 hvd-hetero probe`), and rank 0 prints the result.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from hvd_hetero.cli.console import add_json_option, write_or_show
from hvd_hetero.cli.drawing import write_picture
from hvd_hetero.cli.error import CommandError, MissingFramework, UsageError
from hvd_hetero.cli.probe_picture import draw
from hvd_hetero.cli.probe_table import show
from hvd_hetero.engine import binding
from hvd_hetero.engine.environment import launched
from hvd_hetero.engine.local import SoloEngine
from hvd_hetero.engine.port import Engine
from hvd_hetero.engine.probe import BUDGET_S, probe
from hvd_hetero.engine.probe_result import ProbeResult


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the command's options."""
    add_json_option(parser)
    parser.add_argument("--picture", type=Path, metavar="FILE", help="draw nodes and links into FILE (.png, .svg)")
    parser.add_argument("--fresh", action="store_true", help="measure, whatever an earlier run found")
    parser.add_argument("--budget", type=float, default=BUDGET_S, metavar="S",
                        help="seconds that measuring may take, about (default: %(default)g)")


def command(arguments: argparse.Namespace) -> int:
    """Measures on all ranks, and reports on rank 0. Returns the exit code 0.

    A process that no launcher started measures its own device alone.

    Raises:
        UsageError: an option has a value out of range, or options differ between ranks.
        MissingFramework: PyTorch, or a Horovod built for it, cannot be imported.
        CommandError: measuring failed, or a file cannot be written.
    """
    if launched():
        try:
            engine = binding.start()
        except ImportError as error:
            raise MissingFramework(
                f"expected PyTorch and a Horovod built for it. Received: {error}.\n"
                "  What to do: install torch, run `hvd-hetero build-horovod`; `hvd-hetero doctor` says more."
            ) from error
        except (RuntimeError, ValueError) as error:  # ranks that do not come together, or a wrong variable
            raise CommandError(str(error)) from error
    else:
        engine = SoloEngine()
    found = _found(engine, arguments)
    if engine.rank == 0:
        write_or_show(found.as_dict(), arguments.json, show=lambda: show(found))
        write_picture(lambda: draw(found), arguments.picture)
    return 0


def _found(engine: Engine, arguments: argparse.Namespace) -> ProbeResult:
    try:
        return probe(engine, budget_s=arguments.budget, fresh=arguments.fresh)
    except Exception as error:
        if not isinstance(error, (*engine.failure, ValueError, RuntimeError)):
            raise
        kind = UsageError if isinstance(error, ValueError) else CommandError
        raise kind(f"rank {engine.rank}: {error}") from error
