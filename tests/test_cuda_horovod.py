"""Training on a real GPU, on real ranks, which share it where there are fewer GPUs than ranks."""

import pytest
import torch

pytest.importorskip("horovod.torch", reason="build it with hvd-hetero build-horovod")

from test_device_horovod import CHECKS as WAYS
from test_device_horovod import KERAS_CHECKS, holds
from test_elastic_horovod import elastic_job

from hvd_hetero.engine.build import installed_build

pytestmark = [
    pytest.mark.horovod,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"),
    pytest.mark.skipif(not (installed_build() or {}).get("gpu", {}).get("cuda"), reason="this Horovod is for CPUs"),
]

CHECKS = (
    "sgd", "clipped", "fused_adamw", "capturable_adamw", "scaled", "bfloat16", "sparse", "another_stream", "prefetched",
    "small_buckets", "one_group", "compiled", "cuda_graphs", "loader_with_pinned_memory", "moved", "moved_local",
    "compute_is_timed_where_it_happens", "identical_to_plain_horovod",
)  # fmt: skip


def test_what_is_particular_to_a_gpu():
    holds("cuda_worker.py", CHECKS)


def test_training_on_a_gpu_is_what_it_is_in_host_memory():
    holds("device_worker.py", WAYS, HVD_HETERO_TEST_DEVICE="cuda")


def test_fit_on_a_gpu_is_what_it_is_in_host_memory():
    pytest.importorskip("keras", reason="pip install keras")
    holds("keras_device_worker.py", KERAS_CHECKS, KERAS_BACKEND="torch", HVD_HETERO_TEST_DEVICE="cuda")


@pytest.mark.parametrize("kind", ["KILL", "TERM"])
def test_a_rank_goes_and_another_joins(tmp_path, kind):
    found = elastic_job(tmp_path, 3, kind, HVD_HETERO_TEST_DEVICE="cuda")
    assert found["sizes"] == [3, 2, 3]
    assert found["once"] == [True, True, True] and found["alike"] and found["batches"] == 39
    assert found["off"] < 1e-9, "the same as one process on the same global batches"
