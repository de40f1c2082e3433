"""What the tests of `hvd-hetero build-horovod` share: recipes, programs that pretend, and how a command fails."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from hvd_hetero.cli import edits
from hvd_hetero.cli.cuda import Gpu
from hvd_hetero.cli.main import main
from hvd_hetero.cli.recipe import Recipe


def recipe(**changes: object) -> Recipe:
    facts: dict[str, object] = {
        "edits": edits.chosen(["torch"]),
        "frameworks": {"torch": {"version": "2", "cxx11_abi": True, "cuda": None}},
        "compiler": "c++",
        "compiler_version": "gcc 12",
        "cmake": "cmake",
        "cpu_flags": ("avx",),
        "mpi": None,
        "gpu": Gpu(),
        "plain": False,
        "jobs": 2,
    }
    return Recipe(**{**facts, **changes})  # type: ignore[arg-type]


def program(folder: Path, name: str, text: str) -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / name
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def fails(arguments: list[str], code: int, capsys: pytest.CaptureFixture[str]) -> str:
    """What the command printed; it must end with `code`, and without a traceback."""
    assert main(arguments) == code
    said = capsys.readouterr().err
    assert "Traceback" not in said
    return said
