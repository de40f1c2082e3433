"""Where in the user's script this process is, for people, as seen from whatever thread asks; warnings of that line."""

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


@contextlib.contextmanager
def _looking() -> Iterator[None]:
    """Around a look at the calls of other threads: no garbage is collected.

    Python 3.11 makes the object of a frame when one asks for it, and may collect garbage for its memory. Where a
    finalizer lets other threads run then, the frame may end and its memory go, and the process dies of it. Later
    versions collect between two instructions only.
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
    """The line of the script at which the main thread is."""
    with _looking():
        frame = _main_frame()
        if frame is None:
            return "an unknown line"
        frame = _of_script(frame) or frame
        return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} in {frame.f_code.co_name}"


def warn(text: str, category: type[Warning] = UserWarning) -> None:
    """Warns as of the script's line that this thread is at, or else the main one, wherever in the package that is found
    out. (What `skip_file_prefixes` of Python 3.12 does for one thread.)"""
    own = sys._getframe(1)
    with _looking():
        found = (_of_script(at) for at in (own, _main_frame()) if at is not None)
        frame = next(filter(None, found), own)
    module, registry = frame.f_globals.get("__name__"), frame.f_globals.setdefault("__warningregistry__", {})
    file, number = frame.f_code.co_filename, frame.f_lineno
    warnings.warn_explicit(text, category, file, number, module=module, registry=registry)


def calls_within(file: str) -> list[FrameType]:
    """The calls of functions of a file that are under way, the innermost of each thread."""
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
    """Whether any of these calls has not ended."""
    with _looking():
        tops = sys._current_frames().values()
        return any(frame is call for top in tops for frame, _ in traceback.walk_stack(top) for call in calls)


def stack() -> str:
    """What the main thread is doing, call by call, as a traceback shows it."""
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
