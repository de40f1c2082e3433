"""One real rank of tests/test_keras_horovod.py: the contract of the engine, on Horovod's TensorFlow operations."""

from __future__ import annotations

import sys
from pathlib import Path

import horovod.tensorflow.mpi_ops as binding
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from contract import check_engine

from hvd_hetero.engine.horovod_tensorflow import TensorflowEngine


def main() -> None:
    binding.init()
    engine = TensorflowEngine()
    engine.watch()
    check_engine(engine)
    # a view is sent, or written in place, as well, and what is sent may be read-only
    rows = np.ones((4, 2), np.float32)
    assert engine.allreduce_async(rows[:, 0], name="view").wait().tolist() == [binding.size()] * 4
    rows[:, 0] = engine.rank
    engine.broadcast_async(rows[:, 0], root=1, name="view").wait()
    assert rows.tolist() == [[1.0, 1.0]] * 4, rows
    fixed = np.ones(3)
    fixed.flags.writeable = False
    assert engine.allgather_async(fixed, name="fixed").wait().tolist() == [1.0] * 3 * binding.size()
    # one name, several types and groups
    for dtype in (np.float16, np.float32, np.float64, np.int64):
        assert engine.allreduce_async(np.ones(2, dtype), name="typed").wait().dtype == dtype
    if binding.size() > 2:
        pair = engine.group([0, 2])
        assert (pair is None) == (binding.rank() == 1)
        if pair is not None:
            check_engine(pair)
    engine.allreduce_async(np.ones(1), name="end").wait()  # nobody leaves before all are through
    assert "torch" not in sys.modules
    print("OK contract", flush=True)
    binding.shutdown()


if __name__ == "__main__":
    main()
