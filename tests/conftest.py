"""Makes `tests/` importable for what several test files share, and chooses the back end of Keras in this process."""

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
    from hvd_hetero.optimizers import timing

    for name, value in {"SIZES_BYTES": (2**10, 2**14), "LARGE_S": 0.0, "QUICK_S": 0.0}.items():
        monkeypatch.setattr(timing, name, value)


def pytest_addoption(parser):
    parser.addoption("--slow", action="store_true", help="run the tests that repeat laws elsewhere as well")


def pytest_collection_modifyitems(config, items):
    if not config.getoption("--slow"):
        slow = [item for item in items if item.get_closest_marker("slow")]
        config.hook.pytest_deselected(items=slow)
        items[:] = [item for item in items if item not in slow]
