"""What the tools of this folder have in common: the virtual environment that they run in, and kinds of arguments."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

_INSIDE = "HVD_HETERO_BENCH"  # set for a process that is in it


def enter_environment(script: str) -> None:
    """Becomes a process that runs `script` with its arguments in the virtual environment, made first where there is
    none; returns at once where this process is in it. Signals reach the script, which clears up after itself."""
    if _INSIDE in os.environ:
        return
    os.environ[_INSIDE] = "1"
    # The environment's last step is into the checkout; paths among the arguments are as seen from here.
    enter = f'source "{Path(__file__).resolve().parent}/environment" && cd "$OLDPWD" && exec python "$0" "$@"'
    os.execvp("bash", ["bash", "-c", enter, str(Path(script).resolve()), *sys.argv[1:]])


def positive(text: str) -> int:
    """An argument that is a whole number of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number of at least 1, received {text!r}")
    return int(text)


def new_file(text: str) -> Path:
    """An argument that is a file to write, when all is done."""
    path = Path(text).resolve()
    if path.is_dir() or not os.access(path.parent, os.W_OK):
        raise argparse.ArgumentTypeError(f"expected a file in a folder that can be written to, received {text!r}")
    return path
