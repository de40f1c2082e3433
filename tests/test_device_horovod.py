"""Training on a device that is not the host's memory, as a GPU is, on real ranks: what it leaves is bit for bit what
training in host memory leaves, in each way of training."""

import sys

import pytest

pytest.importorskip("horovod.torch", reason="build it with hvd-hetero build-horovod")

from launch import WORKERS, horovodrun

sys.path.insert(0, str(WORKERS))

import other_device

CHECKS = (
    "sgd", "adamw", "passes", "masked", "clip", "no_sample", "sum", "buckets", "kept", "adascale", "fp16", "bf16",
    "int8", "int4", "topk", "powersgd", "local", "local_adamw_int8", "loader", "closure", "guarded", "one_look_a_step",
)  # fmt: skip


KERAS_CHECKS = ("sgd", "adamw", "int8", "local")

pytestmark = [
    pytest.mark.horovod,
    pytest.mark.skipif(not other_device.AVAILABLE, reason="this PyTorch has no back ends in Python"),
]


def holds(worker, checks, **env):
    launched = horovodrun(2, worker, *checks, **env)
    assert launched.returncode == 0, launched.output[-6000:]
    assert all(f"OK {name} " in launched.output for name in checks), launched.output[-6000:]


def test_training_on_another_device_is_what_it_is_in_host_memory():
    holds("device_worker.py", CHECKS)


@pytest.mark.slow
def test_fit_on_another_device_is_what_it_is_in_host_memory():
    pytest.importorskip("keras", reason="pip install keras")
    holds("keras_device_worker.py", KERAS_CHECKS, KERAS_BACKEND="torch", TF_CPP_MIN_LOG_LEVEL="3")
