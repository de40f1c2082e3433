"""The exceptions of the commands. Each message says what was expected, what was received, and what to do."""

from __future__ import annotations


class CommandError(Exception):
    """A failure that the user can do something about: `main` prints it without a traceback and returns `exit_code`."""

    exit_code = 1


class UsageError(CommandError):
    """The options of a command contradict one another, lack one, name something unknown, or have a wrong value.

    The exit code is that of `argparse`, which finds the other mistakes of a command line.
    """

    exit_code = 2


class MissingTool(CommandError):
    """Something that the build needs is missing or too old: a compiler, make, cmake, pip, MPI, CUDA, NCCL."""

    exit_code = 3


class MissingFramework(CommandError):
    """PyTorch or TensorFlow, as far as it is needed, is not installed or cannot be imported."""

    exit_code = 4


class DownloadFailed(CommandError):
    """pip could not download Horovod's source, or what it downloaded is not a whole archive of it."""

    exit_code = 5


class EditFailed(CommandError):
    """An edit does not fit the source: its text does not occur as often as it should, or its file is missing."""

    exit_code = 6


class BuildFailed(CommandError):
    """Building or installing failed in the compiler, cmake or pip; the message has the last lines of its output."""

    exit_code = 7
