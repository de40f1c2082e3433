"""The versions of what ranks run on, compared when they come together."""

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

from .environment import fused_bytes, gloo_allreduce, repairs
from .port import Engine, gather_text
from .stderr import tell

PACKAGES = ("horovod", "numpy")  # and the framework
SUMS = "Gloo's all-reduce"
FUSED = "Bytes that travel as one"
_BUILT = "Build Horovod alike on all hosts, and set variables alike."
# What all ranks must have the same: ranks that differ exchange unlike messages, or wait for unlike ones.
VITAL = {"hvd_hetero": "Install the same on all.", SUMS: _BUILT, FUSED: _BUILT}
# On which the tests pass; setup.py says the same.
LOWEST = {"torch": (2, 4), "keras": (3, 10), "tensorflow-cpu": (2, 18), "tensorflow": (2, 18)}


def check_lowest(*packages: str) -> None:
    """Returns where each package is new enough, or not installed under this name.

    Raises:
        ImportError: one is older than what `LOWEST` says.
    """
    for name in packages:
        try:
            complaint = too_old(name, metadata.version(name))
        except metadata.PackageNotFoundError:
            continue
        if complaint is not None:
            raise ImportError(complaint)


def too_old(name: str, version: str) -> str | None:
    """What is wrong with this version of a package, and what to do; None where it is new enough."""
    if tuple(map(int, re.findall(r"\d+", version)[:2])) >= LOWEST[name]:
        return None
    return (
        f"Expected {name} {'.'.join(map(str, LOWEST[name]))} or newer. Received: {version}. Install a newer one, and "
        "build Horovod for it: hvd-hetero build-horovod."
    )


def horovod_for(framework: str) -> Any:
    """Horovod's module for "torch" or "tensorflow".

    Raises:
        ImportError: it is not there, or does not load; with what to do.
    """
    try:
        return importlib.import_module(f"horovod.{framework}")
    except ImportError as error:
        raise ImportError(
            f"Expected Horovod, built for the {framework} that is installed. Received: {error}. Build it: hvd-hetero "
            "build-horovod. What is there: hvd-hetero doctor."
        ) from error


def versions(framework: str) -> dict[str, str]:
    """By name: this package first, and what it rests on."""
    found = {"hvd_hetero": __version__, "Python": ".".join(platform.python_version_tuple()[:2])}
    faces = ("keras",) if "keras" in sys.modules else ()
    for name in (*PACKAGES, framework, *faces):
        for package in (name, f"{name}-cpu"):  # one of them, under one name: they are one version
            try:
                found[name] = metadata.version(package).partition("+")[0]  # so are builds for unlike hardware
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
    """Returns when all ranks have this version of this package; rank 0 warns of other differences. A collective call.

    `stays`: this rank was in the job before others joined.

    Raises:
        RuntimeError: on every rank, with who has which, where something of `VITAL` differs. Where ranks have joined
            that differ, those that stay raise what an exchange raises when a peer is gone: they go on without them.
    """
    texts = gather_text(engine, json.dumps({**mine, "stays": stays}), name="hvd_hetero.versions")
    said = [json.loads(text) for text in texts]
    stay = [bool(theirs.pop("stays", False)) for theirs in said]
    for name in mine:
        by_version: dict[str, list[int]] = {}
        for rank, theirs in enumerate(said):
            by_version.setdefault(theirs.get(name, "none"), []).append(rank)
        if len(by_version) == 1:
            continue
        text = ", ".join(f"{version} on rank {', '.join(map(str, ranks))}" for version, ranks in by_version.items())
        if name in VITAL:
            words = f"{name}: expected one version on all ranks. Received: {text}. {VITAL[name]}"
            of_those = {theirs.get(name, "none") for theirs, stays_too in zip(said, stay, strict=True) if stays_too}
            if stays and len(of_those) == 1:
                raise engine.failure[0](words)
            raise RuntimeError(words)
        if engine.rank == 0:
            tell(f"hvd_hetero: {name} differs between ranks: {text}.")
