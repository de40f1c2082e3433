"""One rank of `ci/bench straggler`: trains for a time, and keeps what the model was along the way, as a line of JSON.

Validation costs nobody time: rank 0 keeps copies of the model and looks at them when the time is over.
"""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

import bench_worker
import torch
from emulation.worker.emulation_hold import hold, release
from torch.utils.data import Subset

CHECK_EVERY = 5  # steps after which ranks that step together agree on the time
POST_LOCAL = {"warmup_steps": 8, "period": 4}  # of torch's post-local SGD


class Straggling(bench_worker.Contender):
    """The contenders of `ci/bench`, post-local SGD of torch, and ours."""

    def data(self) -> Any:
        windows, samples = super().data(), self.arguments.epoch_samples
        return Subset(windows, range(samples)) if samples else windows

    def set_up_post_local(self) -> None:
        from torch.distributed.algorithms.ddp_comm_hooks import post_localSGD_hook as hook
        from torch.distributed.algorithms.model_averaging import averagers
        from torch.distributed.optim import PostLocalSGDOptimizer

        self.set_up_ddp()
        alone, _ = torch.distributed.new_subgroups(group_size=1)
        warmup = POST_LOCAL["warmup_steps"]
        state = hook.PostLocalSGDState(process_group=None, subgroup=alone, start_localSGD_iter=warmup)
        self.loss_model.register_comm_hook(state, hook.post_localSGD_hook)
        averager = averagers.PeriodicModelAverager(**POST_LOCAL)
        self.optimizer = PostLocalSGDOptimizer(optim=self.optimizer, averager=averager)

    def set_up_local(self) -> None:
        import hvd_hetero.torch as hvd

        told = {name: getattr(self.arguments, name) for name in ("round_steps", "bound_rounds", "most_missed")}
        told = {name: value for name, value in told.items() if value is not None}
        # strategy="local", but that ranks end by their own clocks: an end of an epoch may be beyond some ranks' time.
        self.strategy = hvd.LocalSGD(merge_each_epoch=self.arguments.epoch_samples > 0, **told)
        self.set_up_hetero()

    def agree(self, over: bool) -> bool:
        """Whether any rank's time is over, for those that step together."""
        value = torch.tensor([float(over)])
        if self.arguments.contender in ("ddp", "post-local"):
            torch.distributed.all_reduce(value, op=torch.distributed.ReduceOp.MAX)
            return bool(value.item())
        import horovod.torch as hvd

        return bool(hvd.allreduce(value, op=hvd.Max, name="over").item())

    def snapshot(self) -> dict[str, torch.Tensor]:
        """The model that all ranks share."""
        kept = {name: value.detach().clone() for name, value in self.model.state_dict().items()}
        local = getattr(getattr(self.optimizer, "_reducer", None), "local", None)
        if local is not None and local.steps.begun:
            own = [p.detach().clone() for p in self.model.parameters()]
            for fragment in local.steps.rounds.fragments:
                fragment.store.write(fragment.index, fragment.z)
            kept = {name: value.detach().clone() for name, value in self.model.state_dict().items()}
            with torch.no_grad():
                for parameter, value in zip(self.model.parameters(), own, strict=True):
                    parameter.copy_(value)
        return kept


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.set_defaults(**vars(bench_worker.parser().parse_args(["alone"])))  # of what is no option here
    parser.add_argument("contender", choices=["alone", "horovod", "ddp", "post-local", "hetero", "local"])
    parser.add_argument("--shares", default="32:16:8:8")
    parser.add_argument("--rank", type=int, help="of `alone`: which share")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--settle-s", type=float, default=15.0, help="of them not counted in the throughput")
    parser.add_argument("--round-steps", type=int, help='of LocalSGD; default: what strategy="local" takes')
    parser.add_argument("--bound-rounds", type=float, help="the same")
    parser.add_argument("--most-missed", type=int, help="the same")
    parser.add_argument("--fixed", action="store_true", help="ours: the given shares, never re-planned")
    parser.add_argument("--snapshot-s", type=float, default=2.5)
    parser.add_argument("--epoch-samples", type=int, default=0, help="so many make an epoch, at whose end ranks with a "
                        "local strategy merge, and that they end with; 0: all there are, and no end to wait at")
    arguments = parser.parse_args()
    contender = Straggling(arguments)
    is_local = arguments.contender in ("alone", "local")
    hold()
    begin = time.perf_counter()
    steps = 0
    samples: list[int] = []  # of this rank, in each step once it has settled
    ends: list[float] = []  # when such steps ended, and first when the one before them had
    # Who steps apart ends by its own clock, or with an epoch.
    epoch_steps = arguments.epoch_samples // contender.global_batch if arguments.contender == "local" else 0
    agree_every = epoch_steps if is_local else CHECK_EVERY
    snapshots: list[tuple[float, Any]] = [(0.0, contender.snapshot())]
    while True:
        contender.step()
        steps += 1
        now = time.perf_counter() - begin
        if ends:
            samples.append(contender.samples)
        if ends or now >= arguments.settle_s:
            ends.append(begin + now)
        if contender.rank == 0 and now - snapshots[-1][0] >= arguments.snapshot_s:
            snapshots.append((now, contender.snapshot()))
        over = now >= arguments.seconds
        if agree_every and steps % agree_every == 0:
            if is_local:
                contender.optimizer.merge()
                ends[-1:] = [time.perf_counter()] if ends else []
            if contender.agree(over):
                break
        elif over and not agree_every:
            break
    release()
    ended = time.perf_counter() - begin
    record: dict[str, Any] = {
        "rank": contender.rank if arguments.rank is None else arguments.rank,
        "samples": samples,
        "ends_s": ends,
        "steps": steps,
        "shares": contender.balancer.plan.shares if contender.balancer else None,
    }
    if arguments.contender == "local":
        contender.optimizer.merge()
        rounds = contender.optimizer._reducer.local.steps.rounds
        record.update(waits=rounds.waits, merges=rounds.merges)
        snapshots.append((ended, contender.snapshot()))
    if contender.rank == 0 and arguments.contender != "alone":
        lm = contender.lm
        text = lm.read_text(2.5)
        windows = lm.Windows(text[2_000_000:], 64)
        losses = []
        for at, state in snapshots:
            contender.model.load_state_dict(state)
            losses.append((round(at, 2), round(bench_worker.validation_loss(contender, windows, batches=4), 4)))
        record["losses"] = losses
    print("BENCH " + json.dumps(record), flush=True)


if __name__ == "__main__":
    main()
