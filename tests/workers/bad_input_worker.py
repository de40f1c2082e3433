"""Law 8 on real ranks: a table of wrong inputs and configurations, each an error on every rank, in seconds.

Prints `OK number name (s)` for each. In a call, `first` and `last` tell whether this is rank 0 or the last one: many
mistakes are made on one rank alone, the last one, which is told another text than the others are.
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
    """Name, what is called, a part of the error's text on all ranks; or of that on the last rank, and then, if the
    mistake is that rank's alone, of that on all others, which the last rank's has not."""
    first, last, size = hvd.rank() == 0, hvd.rank() == hvd.size() - 1, hvd.size()

    def elsewhere(text):
        return f"ValueError: Expected valid arguments on every rank. Received: rank 2: wrong arguments ({text}"

    def optimizer(name, text, made=optimizer_of, **wrong):
        """An optimizer that the last rank alone makes with wrong arguments. Its error begins with `text`."""
        said = "DistributedOptimizer: expected the same on every rank. Received: ranks 0, 1: topology="
        return name, lambda: made(**(wrong if last else {})), f"Error: {text}", said

    def loader(name, text, make=lambda **options: hvd.BalancedDataLoader(**{"dataset": data_of(), **options}), **wrong):
        """The same of a loader."""
        options = wrong if last else {}
        return name, lambda: make(balancer=hvd.Balancer(WHOLE), **options), f"Error: {text}", elsewhere(text)

    def by_a_codec(**options):
        """An optimizer without a balancer."""
        return hvd.DistributedOptimizer(torch.optim.SGD(model_of().parameters(), lr=0.1),
                                        **{"compression": hvd.Compression.int8, **options})

    return [
        ("global batches differ", lambda: hvd.Balancer(WHOLE + last), "global_batch_size: expected the same"),
        ("a global batch below the ranks", lambda: hvd.Balancer(size - 1), "expected at least"),
        ("a global batch that is no number", lambda: hvd.Balancer("64" if last else 64), "Error: global_batch_size",
         elsewhere("global_batch_size: expected an integer")),
        ("a negative share", lambda: hvd.Balancer(WHOLE, min_share=-1 if last else 1), "Error: min_share",
         elsewhere("min_share")),
        ("bounds that cross", lambda: hvd.Balancer(WHOLE, min_share=5, max_share=2 if last else 8), "Error: max_share",
         elsewhere("max_share")),
        ("memory for less than the batch", lambda: hvd.Balancer(WHOLE, max_share=2), "hold"),
        ("a share above a memory cap", lambda: hvd.Balancer(WHOLE, shares=[WHOLE - size + 1] + [1] * (size - 1),
                                                            max_share=5), "memory"),
        ("a quantum of nothing", lambda: hvd.Balancer(WHOLE, quantum=0 if last else 1), "Error: quantum", elsewhere("quantum")),
        ("too few shares", lambda: hvd.Balancer(WHOLE, shares=[WHOLE] if last else [WHOLE // size] * size),
         "Error: shares", elsewhere("shares: expected one share for")),
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
        loader("a shuffled stream", "shuffle: expected False", dataset=Split(), shuffle=True),
        loader("a batch size of one's own", "batch_size: expected none", batch_size=4),
        loader("a sampler without a length", "sampler: expected an iterable", sampler=iter([0])),
        loader("batches in any order", "in_order: expected True", in_order=False),
        loader("numbered samples of one's own", "sharded: expected an IterableDataset", sharded=True),
        loader("the length of an epoch", "steps_per_epoch: expected none", steps_per_epoch=3),
        loader("a loader for a dataset", "dataset: expected the dataset itself", dataset=torch.utils.data.DataLoader([1])),
        loader("a stream without numbers", "dataset: expected a map-style dataset", dataset=iter([1])),
        loader("less than no process", "num_workers", num_workers=-1),
        loader("an argument of no loader", "DataLoader.__init__() got an unexpected", works=2),
        loader("looking ahead by less than nothing", "lookahead: expected",
               lambda **options: hvd.BalancedBatchSampler(12, **options), lookahead=-1),
        ("codecs differ", lambda: optimizer_of(compression=hvd.Compression.int8 if last else hvd.Compression.fp16),
         "the same on every rank"),
        optimizer("a codec in words", "compression: expected", compression="int8"),
        optimizer("an unknown topology", "topology: expected", topology="star"),
        ("a topology of other ranks", lambda: optimizer_of(topology=Topology(nodes=((0, 1), (2, 3, 4)))), "ranks"),
        ("topologies differ", lambda: optimizer_of(topology="leader" if last else "rails"), "the same on every rank"),
        optimizer("an unknown strategy", "strategy: expected", strategy="async"),
        ("strategies differ", lambda: optimizer_of(strategy="local" if last else "synchronous"), "the same on every rank"),
        ("round lengths differ", lambda: optimizer_of(strategy=hvd.LocalSGD(round_steps=4 + last)), "the same on every rank"),
        ("a round of nothing", lambda: hvd.LocalSGD(round_steps=0), "round_steps"),
        ("passes differ", lambda: optimizer_of(backward_passes_per_step=1 + last), "the same on every rank"),
        optimizer("no passes", "backward_passes_per_step: expected an integer of at least 1", backward_passes_per_step=0),
        ("ops differ", lambda: optimizer_of(op=hvd.Sum if last else hvd.Average), "the same on every rank"),
        optimizer("an op without weights", "op: expected", op=hvd.Adasum),
        optimizer("division by nothing", "gradient_predivide_factor: expected", gradient_predivide_factor=0.0),
        ("optimizers differ", lambda: optimizer_of(kind=torch.optim.Adam if last else torch.optim.SGD), "optimizer=SGD"),
        ("groups differ", lambda: optimizer_of(groups=lambda p: [[p[0]], [p[1]]] if last else [p[:2]]),
         "the same on every rank"),
        ("numbers of groups differ", lambda: optimizer_of(num_groups=1 + last), "the same on every rank"),
        ("sparse gradients differ", lambda: optimizer_of(sparse_as_dense=bool(last)), "the same on every rank"),
        ("models differ", lambda: optimizer_of(width=4 + last), "the same on every rank"),
        optimizer("buckets of nothing", "bucket_bytes: expected", bucket_bytes=0),
        optimizer("groups of no parameters", "groups: expected a whole number or lists", groups=lambda parameters: "all"),
        optimizer("a parameter in two groups", "groups: expected each parameter in one", groups=lambda p: [p[:1], p]),
        optimizer("names of no parameter", "named_parameters: expected every parameter", named_parameters=[]),
        optimizer("a model for an optimizer", "optimizer: expected", kind=lambda parameters, lr: model_of()),
        optimizer("an unknown strategy without a balancer", "strategy: expected", by_a_codec, strategy="async"),
        optimizer("no passes without a balancer", "backward_passes_per_step", by_a_codec, backward_passes_per_step=0),
        ("an unknown rule", lambda: hvd.LatencyAwareLR(optimizer_of(b := hvd.Balancer(WHOLE)), b,
                                                       rule="cubic" if last else "linear"),
         "Error: rule: expected", "LatencyAwareLR: expected the same on every rank. Received: ranks 0, 1: rule=linear"),
        ("base batches differ", lambda: hvd.LatencyAwareLR(optimizer_of(b := hvd.Balancer(WHOLE)), b,
                                                           base_batch_size=WHOLE + last), "the same on every rank"),
        ("a balancer that was forgotten", forget, "Pass balancer= to"),
        ("a balancer that was forgotten beside a codec", lambda: forget(compression=hvd.Compression.int8), "Pass balancer= to"),
        optimizer("ranks beside a balancer's", "process_set: expected none", process_set=hvd.ProcessSet([0, 1])),
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
        culprit = hvd.rank() == hvd.size() - 1
        good = (text if culprit else (*others, text)[0]) in said and not (culprit and others and others[0] in said)
        good = good and "HorovodInternalError" not in said and took < LONGEST_S
        seen = hvd.allgather_object((good, said, took), name="seen")
        assert all(ok for ok, *_ in seen), (name, seen)
        if hvd.rank() == 0:
            print(f"OK {number} {name} ({max(s for *_, s in seen):.1f} s)", flush=True)
    hvd.shutdown()


if __name__ == "__main__":
    sys.exit(main())
