"""Which engine: the one of the framework whose process this is."""

from __future__ import annotations

import importlib
from typing import Any

from .build import installed_build
from .environment import prepare_init
from .port import Engine

# framework -> our module and its engine
_ENGINES = {
    "torch": ("horovod", "HorovodEngine"),
    "tensorflow": ("horovod_tensorflow", "TensorflowEngine"),
}


def _class(framework: str) -> Any:
    if framework not in _ENGINES:
        raise ValueError(f"framework: expected one of {', '.join(_ENGINES)}. Received: {framework!r}.")
    module, name = _ENGINES[framework]
    return getattr(importlib.import_module(f"hvd_hetero.engine.{module}"), name)


def engine_of(framework: str, process_set: Any = None) -> Engine:
    """The engine on Horovod's binding of `framework`, "torch" or "tensorflow", once Horovod is initialised.

    One process uses one binding: each brings a Horovod of its own, which would have to be initialised by itself.
    """
    engine: Engine = _class(framework)(process_set)
    return engine


def watch(framework: str) -> None:
    """From here on, long waits of the ranks for each other are explained, and ended at last: see `engine.watch`. To be
    called whenever Horovod was initialised; a collective call."""
    _class(framework)().watch()


def start() -> Engine:
    """The engine of all ranks, initialised; for programs that have no face of a framework."""
    prepare_init()
    # Torch starts faster, where Horovod was built for both. A Horovod that others built does not say for what.
    built = (installed_build() or {}).get("frameworks", {"torch": ""})
    framework = next((name for name in _ENGINES if name in built), "torch")
    importlib.import_module(_class(framework).binding).init()
    watch(framework)
    return engine_of(framework)
