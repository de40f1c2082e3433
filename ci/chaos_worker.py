"""One rank of the job that `ci/chaos` disturbs: an elastic one, on samples that know their number.

Its compute takes a time for each sample, longer on some hosts. What it commits says which samples were used, and with
which loss; each process writes what happened to it into a file of its own. `RESULT` is printed by rank 0 at the end.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from chaos_diary import COMMIT_EVERY, SAMPLES, WHOLE, Diary, pause, sample_seconds, wrong_use
from torch import nn

import hvd_hetero.torch as hvd


def make_data() -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and classes that a model can learn."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(SAMPLES, 8, generator=generator)
    return x, (x @ torch.randn(8, 4, generator=generator)).argmax(1)


def main(folder: Path, topology: str) -> None:
    hvd.init(**({"process_sets": "dynamic"} if topology != "flat" else {}))
    torch.set_num_threads(1)
    diary = Diary(folder, hvd)
    diary("began")
    torch.manual_seed(0)
    # Large enough for what Horovod does with several megabytes at a time, in several operations.
    layers = [nn.Linear(8, 512), nn.Tanh(), nn.Linear(512, 512), nn.Tanh(), nn.Linear(512, 512), nn.Tanh()]
    model = nn.Sequential(*layers, nn.Linear(512, 4))
    x, y = make_data()
    data = torch.utils.data.TensorDataset(torch.arange(SAMPLES), x, y)
    balancer = hvd.Balancer(WHOLE, run=str(folder / "trace"))
    loader = hvd.BalancedDataLoader(data, balancer=balancer, seed=5)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9),
        balancer=balancer,
        topology=topology,
        bucket_bytes=1 << 18,
    )

    class Committed(hvd.elastic.TorchState):
        """Notes each commit, also one at which the ranks change."""

        def check_host_updates(self) -> None:
            diary("commit", batch=self.batch)
            super().check_host_updates()

    @hvd.elastic.run
    def train(state: Any) -> None:
        diary("ranks", batch=state.batch)
        mine: list[int] = []
        loss_sum = torch.zeros(2, dtype=torch.float64)
        while not state.over:
            loader.set_epoch(state.epoch)
            for index, inputs, classes in loader:
                began_s, sample_s = time.monotonic(), sample_seconds(folder)
                optimizer.zero_grad()
                mine += index.tolist()
                if len(inputs):
                    loss = nn.functional.cross_entropy(model(inputs), classes)
                    loss.backward()
                    loss_sum += torch.tensor([loss.item() * len(inputs), len(inputs)])
                    pause(began_s, sample_s * len(inputs))
                optimizer.step()
                state.batch += 1
                diary("step", batch=state.batch, shares=balancer.plan.shares, sample_s=sample_s)
                last = state.batch % (SAMPLES // WHOLE) == 0
                if state.batch % COMMIT_EVERY == 0 or last:
                    state.used = [*state.used, *hvd.allgather_object((state.epoch, mine), name="used")]
                    whole = hvd.allreduce(loss_sum, op=hvd.Sum, name="loss")
                    state.losses = [*state.losses, float(whole[0] / whole[1])]
                    mine = []
                    loss_sum.zero_()
                    if last:
                        state.wrong = [*state.wrong, *wrong_use(state.epoch, state.used)]
                        state.used = []
                        state.epoch += 1
                        state.over = hvd.broadcast_object((folder / "enough").exists(), 0, name="over")
                    state.commit()

    state = Committed(model, optimizer, epoch=0, batch=0, used=[], wrong=[], losses=[], over=False)
    train(state)
    flat = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
    every = hvd.allgather(flat[None], name="all")
    if hvd.rank() == 0:
        alike = all(torch.equal(row, every[0]) for row in every)
        result = {"alike": alike, "wrong": state.wrong, "losses": state.losses, "epochs": state.epoch}
        (folder / "result.json").write_text(json.dumps(result))
        print("RESULT", flush=True)
    hvd.barrier()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
