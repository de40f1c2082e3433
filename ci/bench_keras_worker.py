"""One rank of one contender of `ci/bench mixed --framework keras`; prints how fast, as a line of JSON.

Contenders share the model, the data and the number of threads; they differ in who averages gradients, and in shares.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sysconfig
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("KERAS_BACKEND", "tensorflow")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
import tensorflow as tf
from emulation.worker.emulation_hold import hold, release

CONTEXT = 64


def windows() -> np.ndarray:
    """Windows of characters of the standard library's sources: int32 of shape [windows, CONTEXT + 1]."""
    text = b"".join(path.read_bytes() for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")))
    codes = np.frombuffer(text, dtype=np.uint8) % 128
    count = (len(codes) - 1) // CONTEXT
    starts = CONTEXT * np.arange(count)[:, None] + np.arange(CONTEXT + 1)
    return codes[starts].astype(np.int32)


def char_lm(width: int, layers: int) -> keras.Model:
    """A causal Transformer of about the size of examples/torch_char_lm.py's."""
    x = keras.Input((CONTEXT,), dtype="int32")
    hidden = keras.layers.Embedding(128, width)(x)
    for _ in range(layers):
        normed = keras.layers.LayerNormalization()(hidden)
        hidden += keras.layers.MultiHeadAttention(4, width // 4)(normed, normed, use_causal_mask=True)
        wide = keras.layers.Dense(4 * width, activation="gelu")(keras.layers.LayerNormalization()(hidden))
        hidden += keras.layers.Dense(width)(wide)
    return keras.Model(x, keras.layers.Dense(128)(keras.layers.LayerNormalization()(hidden)))


def averaged_by_horovod(base: type) -> type:
    """What one writes by hand: an all-reduce of each gradient before it is applied."""
    import horovod.tensorflow as horovod

    def apply(self: Any, grads: Any, trainable_variables: Any = None) -> None:
        averaged = [
            horovod.allreduce(tf.convert_to_tensor(g), name=f"gradient.{i}", op=horovod.Average, ignore_name_scope=True)
            for i, g in enumerate(grads)
        ]
        base.apply(self, averaged, trainable_variables)  # type: ignore[attr-defined]

    return type(base.__name__, (base,), {"apply": apply})


class Contender:
    """How one contender sets up and makes a step: `step()` trains on one batch and returns when it is done."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        tf.config.threading.set_intra_op_parallelism_threads(1)
        tf.config.threading.set_inter_op_parallelism_threads(arguments.inter_op_threads)
        keras.utils.set_random_seed(0)
        self.shares = [int(share) for share in arguments.shares.split(":")]
        self.model, self.rows = char_lm(arguments.width, arguments.layers), windows()
        self.optimizer: Any = keras.optimizers.AdamW(1e-3)
        self.balancer: Any = None
        self.rank = int(os.environ.get("RANK", "0")) if arguments.rank is None else arguments.rank
        self.whole = sum(self.shares)
        if arguments.contender == "alone":
            self.whole = self.shares[self.rank]
        elif arguments.contender == "horovod":
            import horovod.tensorflow as horovod  # with its own settings

            horovod.init()
            self.rank = horovod.rank()
            self.optimizer.__class__ = averaged_by_horovod(type(self.optimizer))
        else:
            hvd: Any = importlib.import_module(f"{arguments.package}.keras")
            hvd.init()
            self.rank = hvd.rank()
            fixed = {"shares": self.shares, "adaptive": False} if arguments.fixed else {}
            self.balancer = hvd.Balancer(global_batch_size=self.whole, **fixed)
            self.optimizer = hvd.DistributedOptimizer(
                self.optimizer, balancer=self.balancer, bucket_bytes=arguments.bucket_bytes
            )
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        self.model.compile(optimizer=self.optimizer, loss=loss, jit_compile=False)
        self.equal = arguments.contender == "horovod"
        self.draw = np.random.RandomState(self.rank)
        # Traced before a core is a fifth of one; the second size makes it a graph for any.
        self.step()
        self.step(1)

    def step(self, more: int = 0) -> None:
        samples = (self.whole // len(self.shares) if self.equal else self.whole) + more
        if self.balancer is not None:
            samples = self.balancer.share + more
            self.balancer.announce(samples)
        batch = self.rows[self.draw.randint(0, len(self.rows), samples)]
        self.model.train_on_batch(batch[:, :-1], batch[:, 1:])


def parser() -> argparse.ArgumentParser:
    """What a worker may be told."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("contender", choices=["alone", "horovod", "hetero"])
    parser.add_argument("--shares", default="32:16:8:8", help="sum: the global batch; each: alone's")
    parser.add_argument("--rank", type=int, help="of `alone`: which share")
    parser.add_argument("--warmup", type=int, default=10)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--width", type=int, default=136)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--fixed", action="store_true", help="hetero: the given shares, never re-planned")
    parser.add_argument("--inter-op-threads", type=int, default=1, help="operations that a rank runs side by side")
    parser.add_argument("--bucket-bytes", type=int)
    parser.add_argument("--package", default="hvd_hetero", help="hetero: its name, where there are two versions")
    return parser


def main() -> None:
    arguments = parser().parse_args()
    contender = Contender(arguments)
    balancer, whole = contender.balancer, contender.whole
    hold()
    for _ in range(arguments.warmup):
        contender.step()
    cpu, ends, waits = time.process_time(), [time.perf_counter()], []
    for _ in range(arguments.steps):
        contender.step()
        ends.append(time.perf_counter())
        if balancer is not None:
            waits.append(contender.optimizer._reducer.wait_s)
    seconds, cpu = ends[-1] - ends[0], time.process_time() - cpu
    release()
    record = {
        "rank": contender.rank,
        "samples_per_s": whole * arguments.steps / seconds,
        "apart": arguments.contender == "alone",  # then that is what this rank did, and not all of them
        "samples": [whole] * arguments.steps,
        "ends_s": ends,
        "step_ms": 1e3 * seconds / arguments.steps,
        "cpu_ms": 1e3 * cpu / arguments.steps,
        "parameters": contender.model.count_params(),
        "shares": balancer.plan.shares if balancer is not None else None,
    }
    if balancer is not None:
        record["waits_s"] = waits
        record["busy_s"] = [end - start - wait for start, end, wait in zip(ends, ends[1:], waits, strict=False)]
    print("BENCH " + json.dumps(record), flush=True)


if __name__ == "__main__":
    main()
