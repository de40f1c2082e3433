"""What importing the Keras face brings in, in fresh processes; and back ends for which there is no Horovod."""

import os
import subprocess
import sys

import pytest

from hvd_hetero.engine.build import installed_build

pytestmark = pytest.mark.skipif(installed_build() is None, reason="no Horovod: run `hvd-hetero build-horovod`")


def run(program, backend):
    env = {**os.environ, "KERAS_BACKEND": backend, "TF_CPP_MIN_LOG_LEVEL": "3"}
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
