"""Which Horovod is installed and which repairs are in it, found out without importing it. Standard library only."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

BUILD_RECORD = "hvd_hetero_build.json"


def _package_folder() -> Path | None:
    try:
        spec = importlib.util.find_spec("horovod")
    except (ImportError, ValueError):
        return None
    if spec is None or not spec.submodule_search_locations:
        return None
    return Path(next(iter(spec.submodule_search_locations)))


def installed_build() -> dict[str, Any] | None:
    """The record of the installed Horovod's build, or None where no Horovod is installed.

    A Horovod that `hvd-hetero build-horovod` did not build has no record: its answer is `{"edits": []}`. Otherwise the
    keys are "horovod" (version), "edits" (names of the edits in it), "plain" (built without repairs), "frameworks"
    (name → version), "mpi" (its version), "gpu" ("cuda": the compiler's version, "nccl": whether it sums), and "built"
    (what Horovod answers to `mpi_built()` and its like).
    """
    folder = _package_folder()
    if folder is None:
        return None
    try:
        record = json.loads((folder / BUILD_RECORD).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        record = None
    if not isinstance(record, dict) or not isinstance(record.get("edits"), list):
        return {"edits": []}
    return record
