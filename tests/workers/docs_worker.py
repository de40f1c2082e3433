"""One real rank of tests/test_docs_horovod.py: `docs_worker.py torch|keras [PHRASE ...]` runs the code blocks of the
documents as they stand.

Prints `OK PHRASE` for each block, by a phrase that it has. What a block leaves out is given beside it: names, and for
`...` the lines that train. After it, the models of all ranks are alike.
"""

from __future__ import annotations

import importlib
import os
import re
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from checks import run_checks

ROOT = Path(__file__).resolve().parents[2]
FACE = sys.argv[1] if sys.argv[1:] and __name__ == "__main__" else "torch"
hvd = importlib.import_module(f"hvd_hetero.{FACE}")

GLOBAL_BATCH = 512
SAMPLES = 2 * GLOBAL_BATCH + 7  # the last batch is short
STEP = "optimizer.zero_grad(); loss = torch.nn.functional.cross_entropy(model(x), y); loss.backward()"


def blocks() -> list[str]:
    """The Python blocks of all documents, and what their diffs lead to."""
    found = []
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]:
        for language, block in re.findall(r"^```(python|diff)\n(.*?)^```$", path.read_text(), flags=re.M | re.S):
            lines = block.splitlines()
            if language == "diff":
                lines = [line[1:] for line in lines if not line.startswith("-")]
            found.append("\n".join(lines))
    return found


def completed(block: str) -> str:
    """The block with what trains in place of each `...`."""
    step = STEP if "optimizer.step()" in block else f"{STEP}; optimizer.step()"
    block = re.sub(r"^\.\.\.$", f"for x, y in loader:\n    {step}", block, flags=re.M)
    return re.sub(r"^( +)\.\.\.$", lambda found: found[1] + step, block, flags=re.M)


def of_torch() -> dict[str, Any]:
    """What a block finds: a model, its data, and what was made of them before."""
    import torch
    from torch import nn

    torch.manual_seed(0)
    data = torch.utils.data.TensorDataset(torch.randn(SAMPLES, 8), torch.randint(0, 3, (SAMPLES,)))
    model = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    balancer = hvd.Balancer(GLOBAL_BATCH)
    given = {"dataset": data, "validation": data, "model": model, "balancer": balancer, "epochs": 2, "time": time}
    given["loader"] = hvd.BalancedDataLoader(data, balancer=balancer)
    given.update(hvd=hvd, torch=torch, nn=nn, optimizer=optimizer, DataLoader=torch.utils.data.DataLoader)
    return given


def distributed(**arguments: Any) -> dict[str, Any]:
    given = of_torch()
    given["optimizer"] = hvd.DistributedOptimizer(
        given["optimizer"], given["model"].named_parameters(), balancer=given["balancer"], **arguments
    )
    return given


def readme() -> dict[str, Any]:
    given = of_torch()
    model = given["model"]
    loss_function = given["torch"].nn.functional.cross_entropy
    return {**given, "Model": lambda: model, "SGD": given["torch"].optim.SGD, "loss_function": loss_function}


def masked() -> dict[str, Any]:
    given = distributed()
    torch = given["torch"]
    x, y = next(iter(given["loader"]))
    losses = torch.nn.functional.cross_entropy(given["model"](x), y, reduction="none")
    return {**given, "losses": losses, "mask": (y != hvd.rank()).float(), "after": "optimizer.step()"}


def contrastive() -> dict[str, Any]:
    given = distributed()
    torch = given["torch"]
    x, _ = next(iter(given["loader"]))

    def sum_over_rows(queries: Any, keys: Any) -> Any:
        first = sum(hvd.allgather_object(len(queries))[: hvd.rank()])
        truth = torch.arange(first, first + len(queries))
        return torch.nn.functional.cross_entropy(queries @ keys.T, truth, reduction="sum")

    return {
        **given, "x": x, "encode": given["model"], "encode_other": given["model"], "sum_over_rows": sum_over_rows,
        "contrastive": lambda rows: (rows @ rows.T).square().mean(), "after": "loss.backward(); optimizer.step()",
    }  # fmt: skip


def in_parts() -> dict[str, Any]:
    given = of_torch()
    given["balancer"] = hvd.Balancer(GLOBAL_BATCH, max_micro_batch=100)
    given["loader"] = hvd.BalancedDataLoader(given["dataset"], balancer=given["balancer"])
    model, loss = given["model"], given["torch"].nn.functional.cross_entropy
    given["optimizer"] = hvd.DistributedOptimizer(given["optimizer"], balancer=given["balancer"])
    return {**given, "batch": next(iter(given["loader"])), "loss_of": lambda part: loss(model(part[0]), part[1])}


def streamed() -> dict[str, Any]:
    given = distributed()
    torch = given["torch"]

    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self):
            yield from given["dataset"]

    trained = f"for x, y in loader: {STEP}; optimizer.step()"
    return {**given, "stream": Stream(), "decode": torch.utils.data.default_collate, "after": trained}


def scheduled() -> dict[str, Any]:
    given = distributed()
    scheduler = given["torch"].optim.lr_scheduler.StepLR(given["optimizer"], 1)
    state = hvd.elastic.TorchState(given["model"], given["optimizer"], scheduler=scheduler, epoch=0, batch=0)
    return {**given, "scheduler": scheduler, "state": state}


def scaled() -> dict[str, Any]:
    given = distributed(strategy="auto")
    return {**given, "scaler": given["torch"].amp.GradScaler("cpu"), "after": "optimizer.merge()"}


def of_keras() -> dict[str, Any]:
    import keras

    keras.utils.set_random_seed(0)
    random = np.random.default_rng(0)
    x, y = random.normal(size=(SAMPLES, 8)).astype("float32"), random.integers(0, 3, SAMPLES)
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(3, activation="softmax")])
    return {"hvd": hvd, "keras": keras, "model": model, "x": x, "y": y, "x_val": x, "y_val": y, "EPOCHS": 2}


def for_fit() -> dict[str, Any]:
    given = of_keras()
    balancer = hvd.Balancer(GLOBAL_BATCH)
    optimizer = hvd.DistributedOptimizer(given["keras"].optimizers.SGD(0.1), balancer=balancer)
    given["model"].compile(optimizer, loss="sparse_categorical_crossentropy", jit_compile=False)
    dataset = hvd.BalancedDataset(given["x"], given["y"], balancer=balancer)
    return {**given, "dataset": dataset, "balancer": balancer, "tokens": given["x"], "labels": given["y"]}


def of_means() -> dict[str, Any]:
    given = of_keras()
    return {**given, "y": given["keras"].utils.to_categorical(given["y"])}


def from_files() -> dict[str, Any]:
    import tensorflow as tf

    given = for_fit()
    files = [f"{name}-{hvd.rank()}" for name in "ab"]
    for file in files:
        with tf.io.TFRecordWriter(file) as writer:
            for row in given["x"]:
                writer.write(row.tobytes())

    def parse(record: Any) -> Any:
        return tf.io.decode_raw(record, tf.float32), 1

    return {**given, "tf": tf, "files": files, "parse": parse, "after": "next(iter(data))"}


def own_loop() -> dict[str, Any]:
    import tensorflow as tf

    given = for_fit()
    keras, model = given["keras"], given["model"]
    optimizer, loss = keras.optimizers.SGD(0.1), keras.losses.SparseCategoricalCrossentropy()

    @tf.function
    def step(x: Any, y: Any) -> None:
        with tf.GradientTape() as tape:
            value = loss(y, model(x))
        tape = hvd.DistributedGradientTape(tape, balancer=given["balancer"])
        optimizer.apply(tape.gradient(value, model.trainable_variables), model.trainable_variables)

    return {**given, "optimizer": optimizer, "step": step}


# By face: a phrase that only this block has, and what gives the names in it.
PREPARED = {
    "torch": {
        "import hvd_hetero.torch as hvd": readme,
        "TorchState(model, optimizer, epoch=0, batch=0))": of_torch,
        "TorchState(model, optimizer, scheduler=scheduler": scheduled,
        "every_steps=500": distributed,
        'strategy="local")': of_torch,
        "scaler.load_state_dict": scaled,
        "balancer.count(int(mask.sum()))": masked,
        "loss = contrastive(embeddings)": contrastive,
        "loss = sum_over_rows(queries, keys)": contrastive,
        'name="training_loss"': distributed,
        "balancer.ask_to_stop()": lambda: {**distributed(), "deadline": time.monotonic() - hvd.rank()},
        'name="accuracy"': distributed,
        "balancer.micro_batches(batch)": in_parts,
        "collate_fn=decode": streamed,
        "balancer.end_epoch()": distributed,
        'topology="auto", compression=hvd.Compression.int8': of_torch,
    },
    "keras": {
        'loss="mse", jit_compile=False': of_means,
        "hvd.callbacks.RebalanceCallback(balancer)": of_keras,
        "terms=lambda x, y": for_fit,
        "sharded=True, steps_per_epoch=1000)": from_files,
        "state.fit(dataset": for_fit,
        "step(x, y)  # with a tape": own_loop,
    },
}
OF_OTHERS = ("WebDataset(urls[", "class BalancedTrainer", "torchmetrics.")  # libraries that the tests do not need


def block_of(phrase: str) -> str:
    (block,) = [block for block in blocks() if phrase in block]
    return block


def runs(phrase: str) -> Any:
    def check() -> None:
        given = PREPARED[FACE][phrase]()
        code = completed(block_of(phrase))
        exec(compile(f"{code}\n{given.get('after', '')}", phrase, "exec"), given)
        model = given["model"]
        values = model.get_weights() if FACE == "keras" else [p.detach().numpy() for p in model.parameters()]
        mine = [value.tobytes() for value in values]
        assert all(others == mine for others in hvd.allgather_object(mine)), phrase
        assert all(np.isfinite(value).all() for value in values)

    return check


def main() -> None:
    hvd.init(process_sets="dynamic")
    if FACE == "torch":
        import torch

        torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(hvd.broadcast_object(folder))
        chosen = sys.argv[2:] or list(PREPARED[FACE])
        run_checks(hvd, chosen, {phrase: runs(phrase) for phrase in chosen})
        hvd.shutdown()


if __name__ == "__main__":
    main()
