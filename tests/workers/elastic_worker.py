"""One rank of tests/test_elastic_horovod.py: trains while ranks die and join, and says what became of the samples.

Arguments: a folder, `KILL` or `TERM`, and `NAME=VALUE` options of DistributedOptimizer, or `stream=yes`. One rank gets
that signal at step 12, once; later another one takes its place. `RESULT` is printed by rank 0 at the end. With
HVD_HETERO_TEST_DEVICE=cuda the model is on a GPU.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

import torch
from local_worker import make_model
from torch import nn

import hvd_hetero.torch as hvd

ON_GPU = os.environ.get("HVD_HETERO_TEST_DEVICE") == "cuda"
if ON_GPU:
    import cuda_device

    cuda_device.install()
DEVICE = torch.device("cuda", cuda_device.index()) if ON_GPU else torch.device("cpu")
SAMPLES, WHOLE, EPOCHS, DIES_AT, WAITS_AT = 250, 20, 3, 12, 26


class Numbered(torch.utils.data.Dataset):
    """Samples that know their number."""

    def __init__(self):
        generator = torch.Generator().manual_seed(1)
        self.x = torch.randn(SAMPLES, 6, generator=generator, dtype=torch.float64)
        self.y = (self.x @ torch.randn(6, 3, generator=generator, dtype=torch.float64)).argmax(1)

    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        return index, self.x[index], self.y[index]


class Streamed(torch.utils.data.IterableDataset):
    """Those, in the order that they would be dealt in; of two processes that load, each gives every other batch."""

    def __init__(self, data):
        self.data, self.dealer = data, dealer_of_all()

    def set_epoch(self, epoch):
        self.dealer.epoch = epoch

    def __iter__(self):
        for batch in list(self.dealer.batches())[torch.utils.data.get_worker_info().id :: 2]:
            yield from map(self.data.__getitem__, batch.tolist())


def dealer_of_all():
    from hvd_hetero.optimizers.dealer import Dealer

    return Dealer(SAMPLES, global_batch_size=WHOLE, shuffle=True, seed=5, drop_last=False)


def by_one_process():
    """The parameters of one process that takes the same global batches."""
    model, data = make_model(), Numbered()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    dealer = dealer_of_all()
    for epoch in range(EPOCHS):
        dealer.epoch = epoch
        for batch in dealer.batches():
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(data.x[batch]), data.y[batch]).backward()
            optimizer.step()
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def main(folder, kind, **options):
    hvd.init(**({"process_sets": "dynamic"} if "topology" in options else {}))
    torch.set_num_threads(1)
    model, data = make_model().to(DEVICE), Numbered()
    balancer = hvd.Balancer(WHOLE, rule=hvd.ReplanRule(minimum_observations=4, warmup_steps=2))
    streams = options.pop("stream", False)
    loader = hvd.BalancedDataLoader(
        Streamed(data) if streams else data, balancer=balancer, seed=5, num_workers=2 if streams else 0
    )
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), balancer=balancer, **options
    )
    schedule = hvd.LatencyAwareLR(optimizer, balancer)
    died = folder / "died"
    outliving = []  # what something still holds of a `train` that broke off

    @hvd.elastic.run
    def train(state):
        state.sizes = [*state.sizes, hvd.size()]
        outliving.append(hvd.BalancedDataLoader(data, balancer=balancer, seed=6, num_workers=0))
        mine = []
        for state.epoch in range(state.epoch, EPOCHS):  # noqa: B020
            loader.set_epoch(state.epoch)
            for index, x, y in loader:
                optimizer.zero_grad()
                mine += index.tolist()
                if len(x):
                    nn.functional.cross_entropy(model(x.to(DEVICE)), y.to(DEVICE)).backward()
                # Of three ranks the one that is alone on its host: the other host alone could not go on.
                chosen = {2: hvd.rank() == 0, 3: hvd.local_size() == 1, 4: hvd.rank() == 3}[hvd.size()]
                if state.batch == DIES_AT and chosen and not died.exists():
                    died.touch()
                    while hvd.local_size() > 1 and not (folder / "told").exists():
                        time.sleep(0.1)  # until the launcher has heard that there is room for one rank less
                    time.sleep(0.5)
                    os.kill(os.getpid(), getattr(signal, f"SIG{kind}"))
                optimizer.step()
                # Each rank by itself decides which of these travel together, of which it knows all from steps before.
                many = [
                    hvd.allreduce_async(torch.full((100_000,), i, device=DEVICE), op=hvd.Sum, name=f"many.{i}")
                    for i in range(6)
                ]
                for i, handle in enumerate(many):
                    assert (hvd.synchronize(handle) == i * hvd.size()).all(), "a sum of other tensors"
                time.sleep(0.02)
                state.batch += 1
                if state.batch % 5 == 0 or state.batch % (SAMPLES // WHOLE + 1) == 0:
                    state.used = [*state.used, *hvd.allgather_object((state.epoch, mine), name="mine")]
                    mine = []
                    state.commit()
                    if state.batch % 10 == 0:
                        checkpoint.save()
                    while state.batch > WAITS_AT and state.sizes[-1] < 3:
                        time.sleep(0.1)  # for the rank that is to join
                        state.commit()

    # Nothing but the model and the optimizer is named: what belongs to them is found.
    state = hvd.elastic.TorchState(model, optimizer, epoch=0, batch=0, sizes=[], used=[])
    checkpoint = hvd.Checkpoint(folder / "checkpoint", state)  # by a rank that joins while the others rebuild theirs
    train(state)
    flat = torch.cat([p.detach().reshape(-1).cpu() for p in model.parameters()])
    every = hvd.allgather(flat[None], name="all")
    if hvd.rank() == 0:
        epochs = [sorted(i for epoch, indices in state.used if epoch == e for i in indices) for e in range(EPOCHS)]
        print("RESULT " + json.dumps({
            "sizes": state.sizes,
            "once": [indices == list(range(SAMPLES)) for indices in epochs],
            "alike": all(torch.equal(row, every[0]) for row in every),
            "off": float((flat - by_one_process()).abs().max()),
            "factor": schedule.factor,
            "plans": [plan.reason for plan in balancer.plans],
            "batches": state.batch,
            "commits": state.commits,
        }), flush=True)  # fmt: skip
    hvd.barrier()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], **dict(word.split("=") for word in sys.argv[3:]))
