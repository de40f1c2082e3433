"""Law 8 on real ranks: whatever is wrong, every rank says so and none is left hanging. A table, in one launch."""

import re

import pytest
from launch import horovodrun

from hvd_hetero.engine.build import installed_build

pytestmark = [
    pytest.mark.horovod,
    pytest.mark.skipif(installed_build() is None, reason="no Horovod installed: run `hvd-hetero build-horovod`"),
]


def test_every_mistake_is_an_error_on_every_rank():
    found = horovodrun(3, "bad_input_worker.py", timeout_s=200)
    passed = re.findall(r"OK \d+ (.*) \(", found.output)
    assert found.returncode == 0 and len(passed) >= 40, found.output[-6000:]
