"""Results that are kept for the user's next run: JSON files, each written in one step."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any


def key(facts: object) -> str:
    """Returns a short name (a hash) for these facts. Equal facts give equal names, whatever the order of their keys."""
    return hashlib.sha256(json.dumps(facts, sort_keys=True, ensure_ascii=True).encode()).hexdigest()[:20]


def load(folder: Path, name: str) -> str:
    """The text that was stored under this name; "" where there is none."""
    try:
        return _place(folder, name).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return ""


def store(folder: Path, name: str, content: Any) -> None:
    """Stores `content` as JSON under this name. Does nothing if that fails: the next run measures again."""
    with contextlib.suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        put(_place(folder, name), lambda path: path.write_text(json.dumps(content) + "\n", encoding="utf-8"))


def put(place: Path, write: Callable[[Path], object]) -> Path:
    """Returns `place` after `write` filled it; a reader sees the old content or the new one, never a part."""
    handle, name = tempfile.mkstemp(dir=place.parent, prefix=f".{place.name}.")
    os.close(handle)
    temporary = Path(name)
    try:
        write(temporary)
        temporary.chmod(0o644)
        os.replace(temporary, place)
    finally:
        temporary.unlink(missing_ok=True)
    return place


def _place(folder: Path, name: str) -> Path:
    return folder / f"{name}.json"
