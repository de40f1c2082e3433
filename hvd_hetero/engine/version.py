"""Versions of this package and of what it depends on; compared between the ranks after `hvd.init()`."""

from __future__ import annotations

import hashlib
import importlib
import json
import platform
import re
import sys
from collections.abc import Mapping
from importlib import metadata
from typing import Any

from hvd_hetero import __version__
from hvd_hetero.policy.rank_words import by_rank

from .environment import fused_bytes, gloo_allreduce, repairs
from .payload import gather_text
from .port import Engine
from .stderr import tell

PACKAGES = ("horovod", "numpy")  # packages to compare, besides the framework
SUMS = "Gloo's all-reduce"
FUSED = "Bytes that travel as one"
_BUILT = "Build Horovod alike on all hosts, and set variables alike."
# What must be the same on all ranks, and what to do if it is not: ranks that differ here would exchange messages that
# do not fit together.
VITAL = {"hvd_hetero": "Install the same on all.", SUMS: _BUILT, FUSED: _BUILT}
# The lowest versions with which the tests pass; the same as in setup.py.
LOWEST = {"torch": (2, 4), "keras": (3, 10), "tensorflow-cpu": (2, 18), "tensorflow": (2, 18)}


def check_lowest(*packages: str) -> None:
    """Checks that each of these packages, if it is installed, has at least its version in `LOWEST`.

    Raises:
        ImportError: a package is older.
    """
    for name in packages:
        try:
            complaint = too_old(name, metadata.version(name))
        except metadata.PackageNotFoundError:
            continue
        if complaint is not None:
            raise ImportError(complaint)


def too_old(name: str, version: str) -> str | None:
    """Returns an error message if this version of a package is below its version in `LOWEST`; else None."""
    if tuple(map(int, re.findall(r"\d+", version)[:2])) >= LOWEST[name]:
        return None
    return (
        f"Expected {name} {'.'.join(map(str, LOWEST[name]))} or newer. Received: {version}. Install a newer one, and "
        "build Horovod for it: hvd-hetero build-horovod."
    )


def horovod_for(framework: str) -> Any:
    """Imports and returns Horovod's module for "torch" or "tensorflow".

    Raises:
        ImportError: the module is missing or does not load; the message says what to do.
    """
    try:
        return importlib.import_module(f"horovod.{framework}")
    except ImportError as error:
        raise ImportError(
            f"Expected Horovod, built for the {framework} that is installed. Received: {error}. Build it: hvd-hetero "
            "build-horovod. What is there: hvd-hetero doctor."
        ) from error


def versions(framework: str) -> dict[str, str]:
    """Returns the versions to compare between ranks, by name: of this package, Python, packages, and Horovod's repairs;
    and two settings of Horovod that must be the same on all ranks."""
    found = {"hvd_hetero": __version__, "Python": ".".join(platform.python_version_tuple()[:2])}
    faces = ("keras",) if "keras" in sys.modules else ()
    for name in (*PACKAGES, framework, *faces):
        for package in (name, f"{name}-cpu"):  # the first that is installed; both count as the same package
            try:
                found[name] = metadata.version(package).partition("+")[0]  # builds for other hardware count as the same
                break
            except metadata.PackageNotFoundError:
                continue
    edits = sorted(repairs())
    digest = hashlib.sha256("\n".join(edits).encode()).hexdigest()[:8]
    found["Horovod's repairs"] = f"{len(edits)} ({digest})" if edits else "none"
    found[SUMS] = gloo_allreduce()
    found[FUSED] = str(fused_bytes())
    return found


def check_versions(engine: Engine, mine: Mapping[str, str], *, stays: bool = False) -> None:
    """Checks that what is in `VITAL` is the same on all ranks; rank 0 warns of other differences. A collective call.

    Args:
        mine: this rank's `versions`.
        stays: whether this rank was in the job before an elastic reset.

    Raises:
        RuntimeError: on every rank, if something in `VITAL` differs; the message says which rank has which version.
        `engine.failure[0]`: instead, on the ranks that stay, if they agree among themselves. As after the loss of a
            peer, they then go on without the ranks that have joined.
    """
    texts = gather_text(engine, json.dumps({**mine, "stays": stays}), name="hvd_hetero.versions")
    said = [json.loads(text) for text in texts]
    stay = [bool(theirs.pop("stays", False)) for theirs in said]
    for name in mine:
        found = [theirs.get(name, "none") for theirs in said]
        if len(set(found)) == 1:
            continue
        text = by_rank(found)
        if name in VITAL:
            words = f"{name}: expected one version on all ranks. Received: {text}. {VITAL[name]}"
            of_those = {version for version, stays_too in zip(found, stay, strict=True) if stays_too}
            if stays and len(of_those) == 1:
                raise engine.failure[0](words)
            raise RuntimeError(words)
        if engine.rank == 0:
            tell(f"hvd_hetero: {name} differs between ranks: {text}.")
