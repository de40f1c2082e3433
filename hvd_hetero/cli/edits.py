"""The edits made to Horovod 0.28.1's source before it is built: what an edit is, which ones apply, and their use.

An edit is a search and a replacement with a reason. Its text must occur exactly as often as stated: a source that
differs from the one these edits were written for is refused and never built in silence.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from hvd_hetero.cli.error import EditFailed

HOROVOD_VERSION = "0.28.1"

Kind = Literal["compile", "repair", "speed"]


@dataclass(frozen=True, kw_only=True)
class Edit:
    """One replacement in one file; several edits may share a name and are then made together or not at all.

    `kind` says what it is for: "compile" (needed to build at all), "repair" (a bug, always on) or "speed" (off until
    an environment variable asks for it). `needs` lists what must be present for it: "torch", "tensorflow", "f16c", and
    "one_abi" for frameworks of one C++ ABI.
    An edit that `creates` adds a file, whose text is `replace`, and finds nothing.
    """

    name: str
    reason: str
    file: str
    find: str
    replace: str
    count: int = 1
    creates: bool = False
    kind: Kind = "repair"
    needs: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.name or not self.reason or bool(self.find) == self.creates or self.count < 1:
            raise ValueError(
                "an edit needs a name, a reason, a text to find (unless it creates its file) and a positive count. "
                f"Received: {self!r}"
            )
        if self.find == self.replace:
            raise ValueError(f"edit {self.name!r} replaces its text by itself")


def all_edits() -> tuple[Edit, ...]:
    """Every edit this package knows, in the order in which they are made."""
    from hvd_hetero.cli import (
        edit_compile,
        edit_cycle,
        edit_device,
        edit_driver,
        edit_elastic,
        edit_failure,
        edit_fusion,
        edit_handle,
        edit_hierarchy,
        edit_host,
        edit_repair,
        edit_run,
        edit_wait,
    )

    modules = (
        edit_compile,
        edit_repair,
        edit_elastic,
        edit_driver,
        edit_host,
        edit_run,
        edit_failure,
        edit_handle,
        edit_device,
        edit_wait,
        edit_cycle,
        edit_fusion,
        edit_hierarchy,
    )
    return tuple(edit for module in modules for edit in module.EDITS)


def chosen(present: Iterable[str], plain: bool = False) -> tuple[Edit, ...]:
    """The edits for a build with `present` (see `Edit.needs`); `plain` leaves only those that compile."""
    have = frozenset(present)
    return tuple(e for e in all_edits() if have.issuperset(e.needs) and not (plain and e.kind != "compile"))


def repairs(edits: Iterable[Edit]) -> tuple[Edit, ...]:
    """Those that change what Horovod does, and not only make it compile."""
    return tuple(edit for edit in edits if edit.kind != "compile")


def names(edits: Iterable[Edit]) -> list[str]:
    """The names of the edits, each once, in order."""
    return list(dict.fromkeys(e.name for e in edits))


def text_hash(edits: Sequence[Edit]) -> str:
    """A SHA-256 over everything the edits do, for the key of the cache."""
    digest = hashlib.sha256()
    for edit in edits:
        for part in (edit.file, edit.find, edit.replace, str(edit.count)):
            digest.update(part.encode() + b"\0")
    return digest.hexdigest()


def replaced(text: str, edit: Edit) -> str:
    """The text with the edit made in it; raises `EditFailed` when its text is not there `count` times."""
    found = text.count(edit.find)
    if found != edit.count:
        raise EditFailed(
            f"edit {edit.name!r} expected its text {edit.count} time(s) in {edit.file}, and found it {found} time(s).\n"
            f"  It starts with: {edit.find.strip().splitlines()[0]!r}\n"
            f"  It is there because: {edit.reason}\n"
            f"  What to do: build from the unchanged sdist of Horovod {HOROVOD_VERSION}; a different source needs "
            "different edits. Nothing was built."
        )
    return text.replace(edit.find, edit.replace)


def apply(edits: Sequence[Edit], root: Path) -> list[str]:
    """Makes the edits under `root` and returns their names; no file is written unless all of them can be made."""
    texts: dict[Path, str] = {}
    made: list[Edit] = []
    for edit in edits:
        path = root / edit.file
        if edit.creates:
            if path.exists() or path in texts:
                raise EditFailed(
                    f"edit {edit.name!r} expected no file {edit.file} in the source, as it makes it, and it is there.\n"
                    f"  What to do: build from the unchanged sdist of Horovod {HOROVOD_VERSION}. Nothing was built."
                )
            texts[path] = edit.replace
            made.append(edit)
            continue
        if path not in texts:
            if not path.is_file():
                raise EditFailed(
                    f"edit {edit.name!r} expected the file {edit.file} in the source, and it is not there.\n"
                    f"  What to do: build from the unchanged sdist of Horovod {HOROVOD_VERSION}. Nothing was built."
                )
            # newline="" keeps the line ends as they are
            with path.open(encoding="utf-8", newline="") as file:
                texts[path] = file.read()
        texts[path] = replaced(texts[path], edit)
        made.append(edit)
    for path, text in texts.items():
        with path.open("w", encoding="utf-8", newline="") as file:
            file.write(text)
    return names(made)
