"""The command `hvd-hetero`. The module of a subcommand is imported only if that one is used: `--help` stays quick."""

from __future__ import annotations

import argparse
import errno
import importlib
import os
import sys
from collections.abc import Sequence

from hvd_hetero import __version__
from hvd_hetero.cli.error import CommandError

# name → (module, one line of help); a module has add_arguments(parser) and command(arguments) -> int
COMMANDS = {
    "build-horovod": (
        "hvd_hetero.cli.build_horovod",
        "build Horovod 0.28.1 for the installed frameworks, with its repairs, and install it",
    ),
    "doctor": ("hvd_hetero.cli.doctor", "what is installed, which repairs Horovod has, and what is missing"),
    "probe": ("hvd_hetero.cli.probe", "measure the devices of all ranks and the links between them, under horovodrun"),
    "report": ("hvd_hetero.cli.report", "who waited for whom in a run, and why, out of its trace"),
    "plan": ("hvd_hetero.cli.plan", "what uneven shares, or fewer ranks, would make: from a trace, or from speeds"),
}


def parser(chosen: str | None = None) -> argparse.ArgumentParser:
    """The parser of the command line, with all subcommands.

    Args:
        chosen: the subcommand whose options are declared, for which its module is imported; None: none.
    """
    whole = argparse.ArgumentParser(prog="hvd-hetero", description="Training on mixed hardware with Horovod.")
    whole.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    commands = whole.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, (module, text) in COMMANDS.items():
        part = commands.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
        if name == chosen:
            importlib.import_module(module).add_arguments(part)
    return whole


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a subcommand and returns the exit code.

    That is what the subcommand returns, the `exit_code` of a `CommandError`, 130 after Ctrl-C, 141 if the reader of the
    output has closed the pipe, or 1 if the disk is full.

    Args:
        argv: the words of the command line, without the program; None: those of the process.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    chosen = next((word for word in words if word in COMMANDS), None)
    name = f"hvd-hetero {chosen}" if chosen else "hvd-hetero"
    try:
        try:
            arguments = parser(chosen).parse_args(words)
        except SystemExit:  # after --help and --version, or a mistake
            _flush()
            raise
        for stream in (sys.stdout, sys.stderr):
            if hasattr(stream, "reconfigure"):
                stream.reconfigure(errors="replace")  # the locale's encoding may have no dash, or no µ
        status = int(importlib.import_module(COMMANDS[arguments.command][0]).command(arguments))
        _flush()
        return status
    except CommandError as error:
        print(f"{name}: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print(f"{name}: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        _drop_output()
        return 141
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        if error.filename is None:
            _drop_output()
        print(f"{name}: {error.filename or 'the output'} cannot be written: {error.strerror}", file=sys.stderr)
        return 1


def _flush() -> None:
    if sys.stdout is not None:  # it is None if the shell has closed it
        sys.stdout.flush()


def _drop_output() -> None:
    """Drops what is left of the output; otherwise Python's last flush fails again, and the exit code is 120."""
    if sys.stdout is not None:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    sys.exit(main())
