"""Law 8 on real ranks: a table of wrong inputs and configurations, each an error on every rank, in seconds.

Prints `OK number name (s)` for each. In a call, `first` and `last` tell whether this is rank 0 or the last one: many
mistakes are made on one rank alone.
"""
# ruff: noqa: E501  (a table)

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

import torch
from checks import time_quickly
from torch import nn

import hvd_hetero.torch as hvd
from hvd_hetero.policy.topology import Topology

WHOLE, LONGEST_S = 12, 20.0


def model_of(width=4):
    torch.manual_seed(0)
    return nn.Linear(4, width)


def data_of(length=WHOLE * 3):
    return torch.utils.data.TensorDataset(torch.zeros(length, 4), torch.zeros(length, dtype=torch.int64))


def split_of(seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.utils.data.random_split(data_of(), [WHOLE * 2, WHOLE], generator=generator)[0]


def optimizer_of(balancer=None, width=4, kind=torch.optim.SGD, groups=lambda parameters: None, **options):
    balancer, parameters = balancer or hvd.Balancer(WHOLE), list(model_of(width).parameters())
    return hvd.DistributedOptimizer(kind(parameters, lr=0.1), balancer=balancer, groups=groups(parameters), **options)


class Split(torch.utils.data.IterableDataset):
    """A stream that each rank reads a part of, as for plain Horovod."""

    def __iter__(self):
        return ((torch.zeros(4), number % 97 % 2) for number in range(hvd.rank() ** 2, 40 * WHOLE, hvd.size()))


class Burning(torch.utils.data.Dataset):
    def __len__(self):
        return 4 * WHOLE

    def __getitem__(self, index):
        if hvd.rank() == 1 and index >= WHOLE:
            raise OSError("disk on fire")
        return torch.zeros(4), 0


def train(*, data=None, model=None, spoil=lambda model: None, terms=None, begin=True, **options):
    """A few steps, in which something goes wrong."""
    model = model or model_of()
    balancer = hvd.Balancer(WHOLE)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), balancer=balancer, **options)
    if not begin:
        return model(torch.zeros(2, 4)).sum().backward()
    spoil(model)
    data = data_of() if data is None else data
    for x, y in hvd.BalancedDataLoader(data, balancer=balancer, shuffle=False):
        if terms is not None:
            balancer.count(terms)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()


def forget(**options):
    """A step with shares, of an optimizer that was made without their balancer."""
    model = model_of()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), **options)
    for x, y in hvd.BalancedDataLoader(data_of(), balancer=hvd.Balancer(WHOLE)):
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()


@torch.no_grad()
def shift(model):
    if hvd.rank() == 1:
        model.weight.add_(1.0)


def torn_checkpoint(folder):
    state = hvd.elastic.TorchState(model_of(), epoch=0)
    checkpoint = hvd.Checkpoint(folder / "torn", state)
    checkpoint.save()
    if hvd.rank() == 0:
        path = folder / "torn"
        path.write_bytes(path.read_bytes()[:-1])
    hvd.barrier()
    try:
        checkpoint.restore()
    finally:
        checkpoint.close()


def foreign_checkpoint(folder):
    saved = hvd.Checkpoint(folder / "foreign", hvd.elastic.TorchState(model_of(), epoch=0))
    saved.save()
    saved.close()
    other = hvd.Checkpoint(folder / "foreign", hvd.elastic.TorchState(model_of(), batch=0))
    try:
        other.restore()
    finally:
        other.close()


def unwritable_checkpoint(folder):
    if hvd.rank() == 0:
        (folder / "file").write_text("")
    hvd.barrier()
    checkpoint = hvd.Checkpoint(folder / "file" / "below", hvd.elastic.TorchState(model_of()))
    try:
        checkpoint.save()
    finally:
        checkpoint.close()


def table(folder):
    """Name, what is called, the error's text on the rank that it is about, and that of the others (None: the same)."""
    first, last, size = hvd.rank() == 0, hvd.rank() == hvd.size() - 1, hvd.size()
    elsewhere = "valid arguments on every rank"
    return [
        ("global batches differ", lambda: hvd.Balancer(WHOLE + last), "global_batch_size: expected the same"),
        ("a global batch below the ranks", lambda: hvd.Balancer(size - 1), "expected at least"),
        ("a global batch that is no number", lambda: hvd.Balancer("64" if last else 64), "integer", elsewhere),
        ("a negative share", lambda: hvd.Balancer(WHOLE, min_share=-1 if last else 1), "min_share", elsewhere),
        ("bounds that cross", lambda: hvd.Balancer(WHOLE, min_share=5, max_share=2 if last else 8), "max_share", elsewhere),
        ("memory for less than the batch", lambda: hvd.Balancer(WHOLE, max_share=2), "hold"),
        ("a share above a memory cap", lambda: hvd.Balancer(WHOLE, shares=[WHOLE - size + 1] + [1] * (size - 1),
                                                            max_share=5), "memory"),
        ("a quantum of nothing", lambda: hvd.Balancer(WHOLE, quantum=0 if last else 1), "quantum", elsewhere),
        ("too few shares", lambda: hvd.Balancer(WHOLE, shares=[WHOLE] if last else [WHOLE // size] * size), "one share for",
         elsewhere),
        ("shares differ", lambda: hvd.Balancer(WHOLE, shares=[4 + last, 4, 4 - last]), "shares: expected the same"),
        ("shares that are not the batch", lambda: hvd.Balancer(WHOLE, shares=[1] * size), "sum"),
        ("some adapt", lambda: hvd.Balancer(WHOLE, adaptive=first), "adaptive: expected the same"),
        ("datasets of unlike length", lambda: hvd.BalancedDataLoader(data_of(WHOLE * 3 + last), balancer=hvd.Balancer(WHOLE)),
         "dataset length: expected the same"),
        ("a random split on each rank", lambda: hvd.BalancedDataLoader(split_of(seed=int(last)), balancer=hvd.Balancer(WHOLE)),
         "every rank needs all of it, and the same seed for a random split"),
        ("seeds differ", lambda: hvd.BalancedDataLoader(data_of(), balancer=hvd.Balancer(WHOLE), seed=int(last)),
         "seed: expected the same"),
        ("some shuffle", lambda: hvd.BalancedDataLoader(data_of(), balancer=hvd.Balancer(WHOLE), shuffle=first),
         "shuffle: expected the same"),
        ("a dataset below a batch", lambda: hvd.BalancedDataLoader(data_of(WHOLE - 1), balancer=hvd.Balancer(WHOLE),
                                                                   drop_last=True), "drop_last=False"),
        ("a stream in parts", lambda: train(data=Split()), "what splits it by rank is to be left out"),
        ("a shuffled stream", lambda: hvd.BalancedDataLoader(Split(), balancer=hvd.Balancer(WHOLE), shuffle=True),
         "shuffle: expected False"),
        ("a batch size of one's own", lambda: hvd.BalancedDataLoader(data_of(), balancer=hvd.Balancer(WHOLE), batch_size=4),
         "batch_size: expected none"),
        ("codecs differ", lambda: optimizer_of(compression=hvd.Compression.int8 if last else hvd.Compression.fp16),
         "the same on every rank"),
        ("a codec in words", lambda: optimizer_of(compression="int8"), "hvd.Compression"),
        ("an unknown topology", lambda: optimizer_of(topology="star" if last else None), "topology: expected",
         "DistributedOptimizer"),
        ("a topology of other ranks", lambda: optimizer_of(topology=Topology(nodes=((0, 1), (2, 3, 4)))), "ranks"),
        ("topologies differ", lambda: optimizer_of(topology="leader" if last else "rails"), "the same on every rank"),
        ("an unknown strategy", lambda: optimizer_of(strategy="async"), "strategy: expected"),
        ("strategies differ", lambda: optimizer_of(strategy="local" if last else "synchronous"), "the same on every rank"),
        ("round lengths differ", lambda: optimizer_of(strategy=hvd.LocalSGD(round_steps=4 + last)), "the same on every rank"),
        ("a round of nothing", lambda: hvd.LocalSGD(round_steps=0), "round_steps"),
        ("passes differ", lambda: optimizer_of(backward_passes_per_step=1 + last), "the same on every rank"),
        ("no passes", lambda: optimizer_of(backward_passes_per_step=0), "at least 1"),
        ("ops differ", lambda: optimizer_of(op=hvd.Sum if last else hvd.Average), "the same on every rank"),
        ("an op without weights", lambda: optimizer_of(op=hvd.Adasum), "op: expected"),
        ("optimizers differ", lambda: optimizer_of(kind=torch.optim.Adam if last else torch.optim.SGD), "optimizer=SGD"),
        ("groups differ", lambda: optimizer_of(groups=lambda p: [[p[0]], [p[1]]] if last else [p[:2]]),
         "the same on every rank"),
        ("numbers of groups differ", lambda: optimizer_of(num_groups=1 + last), "the same on every rank"),
        ("sparse gradients differ", lambda: optimizer_of(sparse_as_dense=bool(last)), "the same on every rank"),
        ("models differ", lambda: optimizer_of(width=4 + last), "the same on every rank"),
        ("buckets of nothing", lambda: optimizer_of(bucket_bytes=0), "bucket_bytes"),
        ("an unknown rule", lambda: hvd.LatencyAwareLR(optimizer_of(b := hvd.Balancer(WHOLE)), b, rule="cubic"), "rule"),
        ("base batches differ", lambda: hvd.LatencyAwareLR(optimizer_of(b := hvd.Balancer(WHOLE)), b,
                                                           base_batch_size=WHOLE + last), "the same on every rank"),
        ("a balancer that was forgotten", forget, "Pass balancer= to"),
        ("a balancer that was forgotten beside a codec", lambda: forget(compression=hvd.Compression.int8), "Pass balancer= to"),
        ("ranks beside a balancer's", lambda: optimizer_of(process_set=hvd.ProcessSet([0, 1])), "process_set: expected none"),
        ("backward without a batch", lambda: train(begin=False), "BalancedDataLoader"),
        ("a negative count", lambda: train(terms=-1), "terms: expected"),
        ("a negative batch", lambda: hvd.Balancer(WHOLE).begin(-1), "samples: expected an integer of at least 0"),
        ("a loader that raises on a rank", lambda: train(data=Burning()),
         "disk on fire" if hvd.rank() == 1 else "rank 1 could not"),
        ("parameters that differ", lambda: train(spoil=shift), "others than rank 0's on rank 1"),
        ("a torn checkpoint", lambda: torn_checkpoint(folder), "is torn"),
        ("another job's checkpoint", lambda: foreign_checkpoint(folder), "state of a job with values"),
        ("no place for a checkpoint", lambda: unwritable_checkpoint(folder), "There is none before it"),
        ("steps between checkpoints", lambda: hvd.Checkpoint(folder / "x", hvd.elastic.TorchState(), every_steps=0),
         "every_steps: expected"),
        ("checkpoints at unlike steps", lambda: hvd.Checkpoint(folder / "x", hvd.elastic.TorchState(), every_steps=2 + last),
         "the same on every rank"),
    ]  # fmt: skip


def main() -> None:
    hvd.init(process_sets="dynamic")
    torch.set_num_threads(1)
    time_quickly()
    folder = Path(hvd.broadcast_object(tempfile.mkdtemp() if hvd.rank() == 0 else None, 0, name="folder"))
    for number, (name, call, text, *others) in enumerate(table(folder)):
        began = time.perf_counter()
        try:
            call()
        except Exception as error:
            said = f"{type(error).__name__}: {error}"
        else:
            said = "no error"
        took = time.perf_counter() - began
        accepted = (text, *others)
        good = any(each in said for each in accepted) and "HorovodInternalError" not in said and took < LONGEST_S
        seen = hvd.allgather_object((good, said, took), name="seen")
        assert all(ok for ok, *_ in seen), (name, seen)
        if hvd.rank() == 0:
            print(f"OK {number} {name} ({max(s for *_, s in seen):.1f} s)", flush=True)
    hvd.shutdown()


if __name__ == "__main__":
    sys.exit(main())
