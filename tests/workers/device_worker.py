"""One real rank of tests/test_device_horovod.py: trains on another device than the host's memory, and there as well.

Prints `OK name` for each way of training that ends with the same parameters: bit for bit on an emulated device, but for
rounding on a GPU (HVD_HETERO_TEST_DEVICE=cuda).
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
import tempfile
from pathlib import Path

import torch
from checks import expect, run_checks
from torch import nn

import hvd_hetero.torch as hvd

there = importlib.import_module(os.environ.get("HVD_HETERO_TEST_DEVICE", "other") + "_device")
there.install()

WHOLE, STEPS = 12, 5
DEVICE, HOST = torch.device(there.NAME, 0), torch.device("cpu")
DATA = torch.Generator().manual_seed(1)
X = torch.randn(STEPS, WHOLE, 8, generator=DATA).to(there.DTYPE)
Y = torch.randint(0, 3, (STEPS, WHOLE), generator=DATA)


def model_on(device, *, synchronised=True):
    """A network with batch statistics and a matrix that is large enough for codecs."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 64), nn.BatchNorm1d(64), nn.Tanh(), nn.Linear(64, 64), nn.Linear(64, 3))
    if synchronised:
        model = hvd.SyncBatchNorm.convert_sync_batchnorm(model)
    return moved(model.to(there.DTYPE), device)


def moved(model, device):
    """`model.to(device)`, which PyTorch does not do for tensors of a subclass."""
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            setattr(module, name, nn.Parameter(parameter.detach().to(device)))
        for name, buffer in list(module.named_buffers(recurse=False)):
            setattr(module, name, buffer.to(device))
    return model


def trained(device, *, kind=torch.optim.SGD, shares=(8, 4), passes=1, masked=False, clip=False, keep=False, rule=None,
            **options):  # fmt: skip
    """What a few steps leave: parameters and buffers."""
    model = model_on(device, synchronised="strategy" not in options)
    balancer = hvd.Balancer(WHOLE, shares=shares, adaptive=False, min_share=0)
    own = {"momentum": 0.9} if kind is torch.optim.SGD else {}
    optimizer = kind(model.parameters(), lr=0.05, foreach=True, **own)
    optimizer = hvd.DistributedOptimizer(
        optimizer, balancer=balancer, backward_passes_per_step=passes, **options
    )
    if rule:
        hvd.LatencyAwareLR(optimizer, balancer, rule=rule, base_batch_size=WHOLE // 2)
    for step in range(STEPS // passes * passes):
        first, samples = sum(shares[: hvd.rank()]), shares[hvd.rank()]
        x, y = (each[step, first : first + samples].to(device) for each in (X, Y))
        balancer.begin(samples)
        if step % passes == 0:
            optimizer.zero_grad()
        if masked:
            balancer.count(max(0, samples - 1))
            x, y = x[1:], y[1:]
        nn.functional.cross_entropy(model(x), y).backward()
        if (step + 1) % passes == 0:
            if clip:
                optimizer.synchronize()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
    if "strategy" in options:
        optimizer.merge(model)
    if keep:
        kept_and_restored(model, optimizer, balancer)
    return [there.inner_of(each).clone() for each in model.state_dict().values()]


def kept_and_restored(model, optimizer, balancer):
    """Broadcasts, a commit, and a checkpoint, all of which leave everything as it was."""
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    for parameter, kept in optimizer.state.items():
        assert all(each.device == parameter.device for each in kept.values() if each.ndim), kept
    state = hvd.elastic.TorchState(model, optimizer, balancer=balancer, epoch=0)
    state.commit()
    with torch.no_grad():
        model[0].weight.mul_(2.0)
    state.restore()
    state.sync()
    with kept_in_a_file(state) as checkpoint:
        checkpoint.save()
        with torch.no_grad():
            model[0].weight.mul_(2.0)
        assert checkpoint.restore()


@contextlib.contextmanager
def kept_in_a_file(state):
    folder = hvd.broadcast_object(tempfile.mkdtemp() if hvd.rank() == 0 else None, 0, name="folder")
    checkpoint = hvd.Checkpoint(Path(folder) / "job", state)
    try:
        yield checkpoint
    finally:
        checkpoint.close()


def alike(program=trained, **options):
    """A check that a program leaves the same on both devices; one with a codec, other than without."""

    def check():
        moved, here = program(DEVICE, **options), program(HOST, **options)
        differ = [index for index, pair in enumerate(zip(moved, here, strict=True)) if not there.alike(*pair)]
        assert not differ, f"tensors {differ} of the model"
        if "compression" in options:
            exact = program(HOST, **{name: value for name, value in options.items() if name != "compression"})
            assert not all(map(there.alike, exact, here)), "the codec did nothing"

    return check


def on_unlike_ranks(**options):
    """A check that a rank on the device and one on the host train together as two on the host do."""

    def check():
        here = trained(HOST, **options)
        for devices in ((HOST, DEVICE), (DEVICE, HOST)):
            mixed = trained(devices[hvd.rank()], **options)
            differ = [index for index, pair in enumerate(zip(mixed, here, strict=True)) if not there.alike(*pair)]
            assert not differ, f"tensors {differ} of the model on {devices[hvd.rank()]}"

    return check


def with_a_loader(device):
    """Batches from a loader, in parts, of a model partly in bfloat16; the mean of a validation."""
    torch.manual_seed(0)
    table, layer = moved(nn.ModuleList([nn.Embedding(40, 64), nn.Linear(64, 3).bfloat16()]), device)
    tokens = torch.arange(40).repeat(2)
    data = torch.utils.data.TensorDataset(tokens, tokens % 3)
    balancer = hvd.Balancer(WHOLE, shares=(8, 4), adaptive=False, max_micro_batch=3)
    parameters = [*table.parameters(), *layer.parameters()]
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(parameters, lr=0.5), balancer=balancer, bucket_bytes=4096
    )
    loader, told = hvd.BalancedDataLoader(data, balancer=balancer), []
    for batch in loader:
        optimizer.zero_grad()
        for x, y in balancer.micro_batches([each.to(device) for each in batch]):
            loss = nn.functional.cross_entropy(layer(table(x).bfloat16()).float(), y)
            loss.backward()
        told.append(there.inner_of(balancer.mean(loss.detach())))
        optimizer.step()
    return [there.inner_of(each).detach().clone() for each in (*parameters, torch.stack(told))]


def with_a_closure(device):
    """An optimizer that decides by the loss of all ranks."""
    torch.manual_seed(0)
    weight = nn.Parameter(torch.randn(8, 3, dtype=there.DTYPE).to(device))
    balancer = hvd.Balancer(WHOLE, shares=(8, 4), adaptive=False)
    optimizer = torch.optim.LBFGS([weight], lr=0.5, max_iter=4, line_search_fn="strong_wolfe")
    optimizer = hvd.DistributedOptimizer(optimizer, balancer=balancer)
    part = slice(0, 8) if hvd.rank() == 0 else slice(8, 12)
    for step in range(STEPS):
        x, y = (each[step, part].to(device) for each in (X, Y))
        balancer.begin(balancer.share)

        def closure(x=x, y=y):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(x @ weight, y)
            loss.backward()
            return loss

        optimizer.step(closure)
    return [there.inner_of(weight).detach().clone()]


def nudged(device, by):
    """The parameters after some steps, which change none, on a rank whose own were moved once; and as they were."""
    model, balancer = model_on(device), hvd.Balancer(WHOLE, shares=(8, 4), adaptive=False)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.0), balancer=balancer)
    start = model[0].weight.detach().clone()
    with torch.no_grad():
        model[0].weight.mul_(1.0 + by * hvd.rank())
    for _ in range(20):
        balancer.begin(balancer.share)
        optimizer.zero_grad()
        model(X[0, : balancer.share].to(device)).sum().backward()
        optimizer.step()
    return [there.inner_of(each).detach() for each in (model[0].weight, start)]


def guarded():
    """A rank whose parameters are off by rounding gets rank 0's, and one that is further off ends the job."""
    assert torch.equal(*nudged(DEVICE, 2e-7))
    expect("others than rank 0's on rank 1", lambda: nudged(DEVICE, 0.1), kind=hvd.DivergedError)


def one_look_a_step():
    """The host asks the device for values once in a step: for the control vector, after the exchange."""
    model, balancer = model_on(DEVICE), hvd.Balancer(WHOLE, shares=(8, 4))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.05, foreach=True), balancer=balancer)
    counts = []
    for step in range(40):
        x, y = (each[step % STEPS, : balancer.share].to(DEVICE) for each in (X, Y))
        balancer.begin(balancer.share)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        there.looks.clear()
        loss.backward()
        optimizer.step()
        counts.append(len(there.looks))
    assert sorted(counts)[len(counts) // 2] == 1, counts


Compression = hvd.Compression
CHECKS = {
    "sgd": alike(),
    "adamw": alike(kind=torch.optim.AdamW),
    "passes": alike(passes=2),
    "masked": alike(masked=True),
    "clip": alike(clip=True),
    "no_sample": alike(shares=(12, 0)),
    "sum": alike(op=hvd.Sum),
    "buckets": alike(bucket_bytes=4096),
    "kept": alike(kind=torch.optim.AdamW, keep=True),
    "adascale": alike(rule="adascale"),
    "fp16": alike(compression=Compression.fp16),
    "bf16": alike(compression=Compression.bf16),
    "int8": alike(compression=Compression.int8),
    "int4": alike(compression=Compression.int4(warmup_steps=1)),
    "topk": alike(compression=Compression.topk(0.1, warmup_steps=1)),
    "powersgd": alike(compression=Compression.powersgd(1, warmup_steps=1)),
    "local": alike(strategy=hvd.LocalSGD(round_steps=2, bound_rounds=0)),
    "local_adamw_int8": alike(
        strategy=hvd.LocalSGD(round_steps=2, bound_rounds=0), kind=torch.optim.AdamW, compression=Compression.int8
    ),
    "loader": alike(with_a_loader),
    "closure": alike(with_a_closure),
    "unlike": on_unlike_ranks(clip=True),
    "unlike_kept": on_unlike_ranks(kind=torch.optim.AdamW, keep=True),
    "unlike_int8": on_unlike_ranks(compression=Compression.int8),
    "unlike_local": on_unlike_ranks(
        strategy=hvd.LocalSGD(round_steps=2, bound_rounds=0), kind=torch.optim.AdamW, compression=Compression.int8
    ),
    "guarded": guarded,
    "one_look_a_step": one_look_a_step,
}


def main() -> None:
    hvd.init(process_sets="dynamic")
    torch.set_num_threads(1)
    with there.Device():
        run_checks(hvd, sys.argv[1:] or CHECKS, CHECKS)
    hvd.shutdown()


if __name__ == "__main__":
    main()
