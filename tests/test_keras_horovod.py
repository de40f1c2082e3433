"""Keras on real Horovod, both back ends, under the real `horovodrun`: few launches, many checks in each."""

import re

import pytest
from launch import horovodrun

from hvd_hetero.engine.build import installed_build

pytestmark = [
    pytest.mark.horovod,
    pytest.mark.skipif(installed_build() is None, reason="no Horovod installed: run `hvd-hetero build-horovod`"),
]
QUIET = {"TF_CPP_MIN_LOG_LEVEL": "3", "TF_ENABLE_ONEDNN_OPTS": "0"}


def test_the_tensorflow_engine_keeps_the_contract():
    launched = horovodrun(3, "keras_engine_worker.py", HOROVOD_DYNAMIC_PROCESS_SETS="1", **QUIET)
    passed = re.findall(r"OK contract", launched.output)
    assert launched.returncode == 0 and len(passed) == 3, launched.output[-6000:]
