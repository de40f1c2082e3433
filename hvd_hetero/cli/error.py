"""What the commands raise: every message says what was expected, what was received, and what to do."""

from __future__ import annotations


class CommandError(Exception):
    """A failure the user can act on; `main` prints it without a traceback and exits with `exit_code`."""

    exit_code = 1


class UsageError(CommandError):
    """The options contradict one another or name something unknown."""

    exit_code = 2


class MissingTool(CommandError):
    """A compiler, cmake, MPI or CUDA toolkit that the build needs is not there."""

    exit_code = 3


class MissingFramework(CommandError):
    """Neither PyTorch nor TensorFlow, or not the one that was asked for, is installed."""

    exit_code = 4


class DownloadFailed(CommandError):
    """pip could not bring Horovod's source, or brought something else."""

    exit_code = 5


class EditFailed(CommandError):
    """The text that an edit replaces is not in the source as often as it should be."""

    exit_code = 6


class BuildFailed(CommandError):
    """The compiler, cmake or pip ended with an error; the message holds the last lines and the log's path."""

    exit_code = 7
