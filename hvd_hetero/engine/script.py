"""Finds the line of the user's script that is being executed, from any thread; for messages and warnings."""

from __future__ import annotations

import contextlib
import gc
import os
import sys
import sysconfig
import threading
import traceback
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType

_OWN = Path(__file__).resolve().parent.parent
_OTHERS = tuple({path for name, path in sysconfig.get_paths().items() if "lib" in name})
_INSTALLED = ("site-packages", "dist-packages")  # of a user, of the distribution
_LIBRARIES = ("horovod", "torch", "tensorflow", "keras")  # wherever they are
_COLLECTS_BETWEEN = sys.version_info >= (3, 12)
_LOCK = threading.RLock()
_WAITS_FOR_THREADS = threading._shutdown.__code__  # type: ignore[attr-defined]


@contextlib.contextmanager
def _looking() -> Iterator[None]:
    """A context in which no garbage is collected, for looking at the frames of other threads.

    Python 3.11 creates a frame object when it is asked for, and may collect garbage while it allocates it. If a
    finalizer then lets other threads run, the frame may end and its memory be freed, and the process crashes. Python
    3.12 and later collect garbage only between two instructions.
    """
    if _COLLECTS_BETWEEN:
        yield
        return
    with _LOCK:
        collects = gc.isenabled()
        gc.disable()
        try:
            yield
        finally:
            if collects:
                gc.enable()


def line() -> str:
    """The script's line that the main thread executes, as text: "train.py:12 in main"; or that the script has ended,
    and the process waits for its other threads."""
    with _looking():
        frame = _main_frame()
        if frame is None:
            return "an unknown line"
        script = _of_script(frame)
        if script is None and any(at.f_code is _WAITS_FOR_THREADS for at, _ in traceback.walk_stack(frame)):
            return "the end of its script, where threads that are no daemons go on"
        frame = script or frame
        return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} in {frame.f_code.co_name}"


def warn(text: str, category: type[Warning] = UserWarning) -> None:
    """Issues a warning at the line of the script that this thread executes; if there is none, at the main thread's
    line. For one thread, `skip_file_prefixes` of Python 3.12 does the same."""
    own = sys._getframe(1)
    with _looking():
        found = (_of_script(at) for at in (own, _main_frame()) if at is not None)
        frame = next(filter(None, found), own)
    module, registry = frame.f_globals.get("__name__"), frame.f_globals.setdefault("__warningregistry__", {})
    file, number = frame.f_code.co_filename, frame.f_lineno
    warnings.warn_explicit(text, category, file, number, module=module, registry=registry)


def calls_within(file: str) -> list[FrameType]:
    """Returns, for each thread that is executing functions of the source file `file`, the innermost frame of them."""
    found = []
    with _looking():
        for top in sys._current_frames().values():
            frame: FrameType | None = top
            while frame is not None and frame.f_code.co_filename != file:
                frame = frame.f_back
            if frame is not None:
                found.append(frame)
    return found


def under_way(calls: Sequence[FrameType]) -> bool:
    """Whether any of these frames, as from `calls_within`, is still being executed."""
    with _looking():
        tops = sys._current_frames().values()
        return any(frame is call for top in tops for frame, _ in traceback.walk_stack(top) for call in calls)


def stack() -> str:
    """The stack of the main thread as text, in the form of a traceback."""
    with _looking():
        frame = _main_frame()
        return "" if frame is None else "".join(traceback.format_stack(frame))


def _main_frame() -> FrameType | None:
    return sys._current_frames().get(threading.main_thread().ident or 0)


def _of_script(frame: FrameType) -> FrameType | None:
    """The innermost frame that is neither of this package nor of any installed one; None where there is none."""
    at: FrameType | None = frame
    while at is not None:
        name = os.path.abspath(at.f_code.co_filename)
        installed = name.startswith((str(_OWN), *_OTHERS)) or any(part in Path(name).parts for part in _INSTALLED)
        library = str(at.f_globals.get("__name__", "")).split(".")[0] in _LIBRARIES
        if not installed and not library and not at.f_code.co_filename.startswith("<"):
            return at
        at = at.f_back
    return None
