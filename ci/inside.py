"""What the tools of this folder do first: enter the virtual environment that ci/test and ci/demo use."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

_INSIDE = "HVD_HETERO_BENCH"  # set for a process that is in it


def enter_environment(script: str) -> None:
    """Runs `script` with its arguments in the virtual environment, made first where there is none, and ends with its
    status; returns at once where this process is in it."""
    if _INSIDE in os.environ:
        return
    os.environ[_INSIDE] = "1"
    enter = f'source "{Path(__file__).resolve().parent}/environment" && exec python "$0" "$@"'
    sys.exit(subprocess.call(["bash", "-c", enter, str(Path(script).resolve()), *sys.argv[1:]]))
