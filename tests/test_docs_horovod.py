"""The code blocks of the documents run as they stand, on real ranks, and leave one model on all of them."""

import sys

import pytest

pytest.importorskip("horovod.torch", reason="build it with hvd-hetero build-horovod")

from launch import WORKERS, horovodrun

sys.path.insert(0, str(WORKERS))

import docs_worker

pytestmark = pytest.mark.horovod


def test_each_block_is_run_once():
    phrases = [*docs_worker.OF_OTHERS, *(phrase for each in docs_worker.PREPARED.values() for phrase in each)]
    for block in docs_worker.blocks():
        assert sum(phrase in block for phrase in phrases) == 1, block
    for phrase in phrases:
        assert docs_worker.block_of(phrase)


def runs(face, **env):
    launched = horovodrun(2, "docs_worker.py", face, **env)
    assert launched.returncode == 0, launched.output[-6000:]
    for phrase in docs_worker.PREPARED[face]:
        assert f"OK {phrase} (" in launched.output, launched.output[-6000:]


def test_blocks_of_pytorch_run():
    runs("torch")


@pytest.mark.slow
def test_blocks_of_keras_run():
    pytest.importorskip("horovod.tensorflow", reason="build it with hvd-hetero build-horovod")
    runs("keras", KERAS_BACKEND="tensorflow", TF_CPP_MIN_LOG_LEVEL="3")
