"""What importing the Keras face brings in, in fresh processes; and back ends for which there is no Horovod."""

import os
import subprocess
import sys

import pytest
from launch import python_path

from hvd_hetero.engine.build import installed_build

pytestmark = pytest.mark.skipif(installed_build() is None, reason="no Horovod: run `hvd-hetero build-horovod`")


def run(program, backend):
    path = python_path("", keras=True)
    env = {**os.environ, "KERAS_BACKEND": backend, "TF_CPP_MIN_LOG_LEVEL": "3", "PYTHONPATH": path}
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=env, check=False)


@pytest.mark.parametrize("backend", ["tensorflow", "torch"])
def test_one_back_end_does_not_bring_in_the_other(backend):
    program = "import sys, hvd_hetero.keras; print([name for name in ('torch', 'tensorflow') if name in sys.modules])"
    done = run(program, backend)
    assert done.stdout.strip() == f"['{backend}']", done.stderr[-2000:]


@pytest.mark.parametrize("other", ["jax", pytest.param("numpy", marks=pytest.mark.slow)])
def test_a_back_end_without_a_horovod_is_refused(other):
    """Keras itself says what it misses where jax is not installed; here it only claims to have that back end."""
    done = run(f"import keras; keras.backend.backend = lambda: {other!r}; import hvd_hetero.keras", "torch")
    assert done.returncode and 'Expected the back end "tensorflow" or "torch"' in done.stderr, done.stderr[-2000:]
    assert f'Received: "{other}"' in done.stderr


DEVICES = """
import hvd_hetero.keras as hvd
import tensorflow as tf

hvd.init()
processor = tf.config.list_physical_devices("CPU")[hvd.local_rank()]
tf.config.set_visible_devices([processor], "CPU")
tf.config.set_logical_device_configuration(processor, [tf.config.LogicalDeviceConfiguration()] * 2)
tf.config.threading.set_inter_op_parallelism_threads(1)
print(len(tf.config.list_logical_devices("CPU")))
"""


def test_a_script_chooses_its_devices_after_init():
    """As Horovod's examples do, each rank its GPU: TensorFlow refuses it once there is a variable or a tensor."""
    done = run(DEVICES, "tensorflow")
    assert done.stdout.split() == ["2"], done.stderr[-2000:]


REPLICAS = """
import tensorflow as tf

tf.config.set_logical_device_configuration(
    tf.config.list_physical_devices("CPU")[0], [tf.config.LogicalDeviceConfiguration()] * 2
)

import keras
import numpy as np

import hvd_hetero.keras as hvd

hvd.init()
balancer = hvd.Balancer(8)
with tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"]).scope():
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1), balancer=balancer)
    model.compile(optimizer, loss="mse", jit_compile=False)
model.fit(hvd.BalancedDataset(np.ones((16, 2)), np.ones(16), balancer=balancer), verbose=0)
"""


def test_several_replicas_in_one_process_are_an_error_that_says_so():
    done = run(REPLICAS, "tensorflow")
    assert done.returncode and "expected one replica in each process" in done.stderr, done.stderr[-2000:]
