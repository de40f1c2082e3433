"""What tests of repairs of Horovod share."""

from __future__ import annotations

import os

import pytest

from hvd_hetero.cli import edits
from hvd_hetero.engine.build import installed_build


def has_edit(name: str) -> bool:
    """Whether the installed Horovod has the named edit."""
    build = installed_build()
    return build is not None and name in build["edits"]


def needs(name: str) -> pytest.MarkDecorator:
    """Skips on a Horovod without the edit; HVD_HETERO_TEST_PLAIN=1 runs it there too, to see it fail."""
    assert name in edits.names(edits.all_edits()), f"no edit is called {name}: its tests would be skipped for ever"
    return pytest.mark.skipif(
        not (has_edit(name) or "HVD_HETERO_TEST_PLAIN" in os.environ),
        reason=f"the installed Horovod was built without {name}",
    )
