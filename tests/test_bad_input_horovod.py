"""Law 8 on real ranks: whatever is wrong, every rank says so and none is left hanging. A table, in one launch."""

import re
from pathlib import Path

import pytest
from launch import horovodrun

from hvd_hetero.engine.build import installed_build

pytestmark = [
    pytest.mark.horovod,
    pytest.mark.skipif(installed_build() is None, reason="no Horovod installed: run `hvd-hetero build-horovod`"),
]


MISTAKES = 70


def test_every_mistake_is_an_error_on_every_rank():
    found = horovodrun(3, "bad_input_worker.py", timeout_s=200)
    passed = re.findall(r"OK \d+ (.*) \(", found.output)
    assert found.returncode == 0 and len(set(passed)) == len(passed) == MISTAKES, found.output[-6000:]
    told = Path(__file__).parent.parent / "docs" / "trouble.md"
    assert f"has a table of {MISTAKES} such mistakes" in told.read_text()
