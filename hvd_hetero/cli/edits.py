"""The edits made to the source of Horovod 0.28.1 before it is compiled: their type, their choice, their application.

An edit searches a file for a text and replaces it. The text must occur exactly as often as the edit states: a source
that differs from the one that the edits were written for raises `EditFailed`, and is not built. The edits themselves
are in the modules `edit_*`.
"""

from __future__ import annotations

import hashlib
import importlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from hvd_hetero.cli.error import EditFailed

HOROVOD_VERSION = "0.28.1"
_MODULES = (
    "compile",
    "repair",
    "elastic",
    "elastic_workers",
    "elastic_hosts",
    "launcher",
    "output",
    "hosts",
    "failure",
    "handle",
    "gpu_copy",
    "wait",
    "cycle",
    "fusion",
    "hierarchy",
)  # hvd_hetero.cli.edit_…, in the order in which their edits are made

Kind = Literal["compile", "repair", "speed"]
Need = Literal["torch", "tensorflow", "f16c", "one_abi", "no_cuda"]


@dataclass(frozen=True, kw_only=True)
class Edit:
    """One replacement in one file of Horovod's source, or one new file.

    Attributes:
        name: what the edit belongs to. Edits of the same name make up one change and are made together or not at all;
            the record of a build lists these names.
        reason: what is wrong or slow in Horovod 0.28.1 without the edit, for people; "Part of NAME: ..." if the edit is
            one of several of that name, and what it does for them.
        file: the path of the file, relative to the root of the source.
        find: the text to replace.
        replace: the text that takes its place, or that of the new file.
        count: how often `find` must occur; each occurrence is replaced.
        creates: whether the edit creates `file`; then `find` is empty.
        kind: "compile" (Horovod does not build without it, or not well), "repair" (of a bug; always in effect) or
            "speed" (without effect until an environment variable turns it on).
        needs: what the build must have for the edit to be made, by the words of `toolchain.needs_met`: "torch",
            "tensorflow", "f16c" (the processor converts fp16), "one_abi" (PyTorch and TensorFlow share a C++ ABI, and
            the wheel has no GPU support), "no_cuda" (PyTorch is for CUDA, and there is no CUDA compiler for it).
    """

    name: str
    reason: str
    file: str
    find: str
    replace: str
    count: int = 1
    creates: bool = False
    kind: Kind = "repair"
    needs: tuple[Need, ...] = ()

    def __post_init__(self) -> None:
        if not self.name or not self.reason or bool(self.find) == self.creates or self.count < 1:
            raise ValueError(
                "an edit needs a name, a reason, a text to find (unless it creates its file) and a positive count. "
                f"Received: {self!r}"
            )
        if self.find == self.replace:
            raise ValueError(f"edit {self.name!r} replaces its text by itself")
        if unknown := set(self.needs) - set(get_args(Need)):
            raise ValueError(f"edit {self.name!r} expected needs of {', '.join(get_args(Need))}. Received: {unknown}.")


def all_edits() -> tuple[Edit, ...]:
    """All edits, whatever they need, in the order in which they are made."""
    modules = [importlib.import_module(f"hvd_hetero.cli.edit_{name}") for name in _MODULES]
    return tuple(edit for module in modules for edit in module.EDITS)


def chosen(met: Iterable[str], plain: bool = False) -> tuple[Edit, ...]:
    """The edits to make for a build, in order.

    Args:
        met: what the build has, by the words of `Edit.needs`.
        plain: choose edits of the kind "compile" alone, as for `build-horovod --plain`.
    """
    have = frozenset(met)
    return tuple(e for e in all_edits() if have.issuperset(e.needs) and not (plain and e.kind != "compile"))


def repairs(edits: Iterable[Edit]) -> tuple[Edit, ...]:
    """Those of `edits` that change what Horovod does: the kinds "repair" and "speed"."""
    return tuple(edit for edit in edits if edit.kind != "compile")


def names(edits: Iterable[Edit]) -> list[str]:
    """The names of `edits` in order, each once although several edits may share it."""
    return list(dict.fromkeys(e.name for e in edits))


def text_hash(edits: Sequence[Edit]) -> str:
    """A SHA-256, in hexadecimal, of everything that `edits` do to the source; reasons and names do not count.

    It is part of the wheel's key in the cache, and tells `doctor` whether Horovod has this version's repairs.
    """
    digest = hashlib.sha256()
    for edit in edits:
        for part in (edit.file, edit.find, edit.replace, str(edit.count)):
            digest.update(part.encode() + b"\0")
    return digest.hexdigest()


def replaced(text: str, edit: Edit) -> str:
    """`text` with the replacement of `edit` made in it.

    Raises `EditFailed` if `edit.find` does not occur exactly `edit.count` times.
    """
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
    """Makes `edits` in the source under `root`, all or none: no file is written unless every edit can be made.

    Returns:
        The names of the edits, each once.

    Raises:
        EditFailed: a file is missing, a file to create exists, or a text does not occur as often as stated.
    """
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
            # newline="" keeps the line endings as they are
            with path.open(encoding="utf-8", newline="") as file:
                texts[path] = file.read()
        texts[path] = replaced(texts[path], edit)
        made.append(edit)
    for path, text in texts.items():
        with path.open("w", encoding="utf-8", newline="") as file:
            file.write(text)
    return names(made)
