"""A job that is started from Python, by `horovod.run`; prints what its ranks returned, as a line of JSON.

    run_worker.py FOLDER          two ranks
    run_worker.py FOLDER RANK     three ranks of an elastic job, of which one is killed
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

import horovod


def job_in(folder: str, dies: int | None):
    """What each rank does."""

    def job() -> dict:
        import torch

        import hvd_hetero.torch as hvd

        hvd.init()
        torch.set_num_threads(1)
        torch.manual_seed(1)
        model = torch.nn.Linear(6, 1).double()
        x = torch.randn(96, 6, dtype=torch.float64)
        data = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))
        balancer = hvd.Balancer(global_batch_size=24, run=f"{folder}/trace")
        loader = hvd.BalancedDataLoader(data, balancer=balancer, shuffle=False)
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(), balancer=balancer
        )

        @hvd.elastic.run
        def train(state):
            for state.epoch in range(state.epoch, 3):  # noqa: B020
                loader.set_epoch(state.epoch)
                for inputs, targets in loader:
                    if hvd.rank() == dies and state.epoch == 1 and not Path(folder, "died").exists():
                        Path(folder, "died").touch()
                        while not Path(folder, "told").exists():  # or its place is given to another before that
                            time.sleep(0.1)
                        time.sleep(1.0)  # the driver reads what it was told
                        os.kill(os.getpid(), signal.SIGKILL)
                    optimizer.zero_grad()
                    torch.nn.functional.mse_loss(model(inputs), targets).backward()
                    optimizer.step()
                    state.commit()

        train(hvd.elastic.TorchState(model=model, optimizer=optimizer, epoch=0))
        cycle_ms = os.environ.get("HOROVOD_CYCLE_TIME")
        lines = Path(folder, "trace", f"rank-{hvd.rank():05d}.jsonl").read_text().count("\n[")
        weights = [float(w) for p in model.parameters() for w in p.detach().ravel()]
        return {"rank": hvd.rank(), "size": hvd.size(), "cycle_ms": cycle_ms, "steps_traced": lines, "weights": weights}

    return job


def main() -> None:
    folder, *dies = sys.argv[1:]
    more: dict = {"np": 2}
    if dies:
        script = Path(folder, "hosts.sh")
        second = f"if [ -e {folder}/died ]; then touch {folder}/told; else echo 127.0.0.1:1; fi"
        script.write_text(f"#!/bin/sh\necho localhost:2\n{second}\n")
        script.chmod(0o755)
        more = {"np": 3, "min_np": 2, "max_np": 3, "host_discovery_script": str(script)}
    job = job_in(folder, int(dies[0]) if dies else None)
    results = horovod.run(job, use_gloo=True, network_interfaces=["lo"], **more)
    print("RESULTS " + json.dumps(results))


if __name__ == "__main__":
    main()
