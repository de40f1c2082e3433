"""Makes `tests/` importable for what several test files share, and chooses the back end of Keras in this process."""

import gc
import importlib
import math
import os
import sys
from pathlib import Path

import pytest

# Ranks that are threads need eager code. Real ranks get both back ends, from the tests that start them.
os.environ.setdefault("KERAS_BACKEND", "torch")

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(autouse=True)
def quick_timing(monkeypatch):
    """Ranks that are threads of one process time what their messages could take on few and small ones."""
    from hvd_hetero.optimizers import balancer, timing

    for name, value in {"SIZES_BYTES": dict.fromkeys((2**10, 2**14), math.inf), "QUICK_S": 0.0}.items():
        monkeypatch.setattr(timing, name, value)
    monkeypatch.setattr(balancer, "LOOK_CLOCK", lambda: 0.0)  # looks are as often on any machine


@pytest.fixture
def nothing_is_built_or_installed(monkeypatch):
    """No test may touch the environment it runs in, also when what it expects to fail does not."""
    from hvd_hetero.cli import build_horovod

    for name in ("download", "build_wheel", "install"):
        monkeypatch.setattr(build_horovod, name, lambda *_, name=name: pytest.fail(f"{name} was called"))


@pytest.fixture
def torch_there(monkeypatch):
    """PyTorch for CPUs is found, and no TensorFlow."""
    from hvd_hetero.cli import toolchain

    monkeypatch.setattr(toolchain, "torch_facts", lambda: {"version": "2.13.0", "cxx11_abi": True, "cuda": None})
    monkeypatch.setattr(toolchain, "tensorflow_facts", lambda: None)


def pytest_addoption(parser):
    parser.addoption("--slow", action="store_true", help="run the tests that repeat laws elsewhere as well")


def pytest_collection_modifyitems(config, items):
    if not config.getoption("--slow"):
        slow = [item for item in items if item.get_closest_marker("slow")]
        config.hook.pytest_deselected(items=slow)
        items[:] = [item for item in items if item not in slow]
    # The longest first: two processes share the tests, and one would be left with them at the end.
    items.sort(key=lambda item: (item.get_closest_marker("horovod") is None, "keras" not in item.path.name))


def pytest_collection_finish() -> None:
    """What is loaded by now stays, and is no concern of the collector: ranks that come together collect first."""
    if "hvd_hetero.torch" in sys.modules:
        importlib.import_module("hvd_hetero.torch.reducer")  # which the first optimizer would load
    gc.collect()
    gc.freeze()
