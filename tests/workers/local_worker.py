"""One real rank of tests/test_local_horovod.py: runs the named checks and prints `OK name` for each that holds."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from checks import run_checks
from torch import nn

import hvd_hetero.torch as hvd

WHOLE = 12
UNEVEN = {2: (9, 3), 3: (7, 0, 5), 4: (6, 3, 2, 1)}


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3)).double()


def make_data(steps):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(steps * WHOLE, 6, generator=generator).double()
    return x, (x @ torch.randn(6, 3, generator=generator).double()).argmax(1)


def parameters(model):
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def same_everywhere(model):
    gathered = hvd.allgather(parameters(model)[None], name="same")
    return all(torch.equal(row, gathered[0]) for row in gathered)


def trained(steps, strategy, *, during=lambda step: None, run=None, optimizer=None, **options):
    """A rank's model, optimizer and balancer after so many global batches."""
    model, (x, y) = make_model(), make_data(steps)
    shares = UNEVEN[hvd.size()]
    balancer = hvd.Balancer(WHOLE, min_share=0, shares=shares, adaptive=False, run=run)
    wrapped = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9), model.named_parameters(), balancer=balancer,
        strategy=strategy, **options,
    )
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    begin = sum(shares[: hvd.rank()])
    for step in range(steps):
        mine = slice(step * WHOLE + begin, step * WHOLE + begin + shares[hvd.rank()])
        wrapped.zero_grad()
        balancer.begin(shares[hvd.rank()])
        during(step)
        if shares[hvd.rank()]:
            nn.functional.cross_entropy(model(x[mine]), y[mine]).backward()
        wrapped.step()
    return model, wrapped, balancer


def law_1():
    """Merging every step is synchronous training."""
    is_local, optimizer, _ = trained(50, hvd.LocalSGD(round_steps=1, bound_rounds=0, warmup_steps=0))
    optimizer.merge()
    together, _, _ = trained(50, "synchronous")
    assert same_everywhere(is_local)
    assert (parameters(is_local) - parameters(together)).abs().max() <= 1e-12


def ranks_meet_elsewhere():
    """A slow rank at its bound goes on where the others wait for it in an operation of the script's."""
    met = []

    def during(step):
        time.sleep(0.08 if hvd.rank() == hvd.size() - 1 else 0.004)
        if step % 5 == 0:
            met.append(hvd.allreduce(torch.tensor([float(step)])).item())

    model, optimizer, _ = trained(31, hvd.LocalSGD(warmup_steps=2), during=during)
    optimizer.merge()
    assert met == [0.0, 5.0, 10.0, 15.0, 20.0, 25.0, 30.0]
    assert same_everywhere(model)


def composes():
    """Fragments, a codec and levels: all hold one model in the end."""
    for options in ({"compression": hvd.Compression.int8}, {"topology": "leader"}):
        model, optimizer, _ = trained(40, hvd.LocalSGD(round_steps=4, warmup_steps=4, fragments=2), **options)
        optimizer.merge()
        assert same_everywhere(model), options


def a_stopped_rank(stopped_s=2.0, at=20):
    """One rank is stopped in step `at`: the others go on to the bound, wait there, and all meet again. The trace."""
    last, moments = hvd.size() - 1, []

    def during(step):
        if at - 12 <= step <= at:
            hvd.barrier()  # or a rank may be at the bound already, of one that the machine has held up
        moments.append(time.monotonic())
        time.sleep(0.02)  # all alike
        if hvd.rank() == last and step == at:
            subprocess.Popen(["sh", "-c", f"sleep {stopped_s}; kill -CONT {os.getpid()}"])
            os.kill(os.getpid(), signal.SIGSTOP)

    with tempfile.TemporaryDirectory() as folder:
        strategy = hvd.LocalSGD(round_steps=4, bound_rounds=3, warmup_steps=2)
        model, optimizer, balancer = trained(at + 40, strategy, during=during, run=folder)
        optimizer.merge()
        balancer.trace.close()
        lines = [json.loads(line) for line in next(Path(folder).iterdir()).read_text().splitlines()]
    merges = [line["fields"] for line in lines if isinstance(line, dict) and line.get("event") == "merge"]
    gaps = [after - before for before, after in zip(moments, moments[1:], strict=False)]
    assert same_everywhere(model)
    assert sum(fields["samples"] for fields in merges) == (at + 38) * WHOLE, "every sample counts once"
    if hvd.rank() != last:
        waited = max(range(at, len(gaps)), key=lambda index: gaps[index])
        assert gaps[waited] > 0.5, "it waited at the bound"
        assert waited >= at + 4, f"it should go on first: waited in step {waited}"
        assert merges[-1]["waits"] >= 1 and any(fields["carried_steps"] >= 8 for fields in merges), merges
    return lines


def a_rank_stopped_for_long():
    """For 20 s, and after enough merges for the watchdog to know what is long: its words are in who waited's trace."""
    lines = a_stopped_rank(20.0, at=60)
    waits = [line["fields"] for line in lines if isinstance(line, dict) and line.get("event") == "wait"]
    if hvd.rank() == hvd.size() - 1:
        assert not waits, waits
    else:
        assert waits and all(wait["missing"] == [hvd.size() - 1] for wait in waits), waits
        assert "fragment" in waits[0]["operation"], waits


def a_rank_that_misses_merges():
    """A rank whose step takes several rounds of the others goes down the ladder, and up again; nothing is lost."""
    last, steps = hvd.size() - 1, 60

    def during(step):
        time.sleep(0.24 if hvd.rank() == last and 4 <= step < 16 else 0.02)

    with tempfile.TemporaryDirectory() as folder:
        strategy = hvd.LocalSGD(round_steps=3, bound_rounds=20, warmup_steps=2, drift_limit=None)
        model, optimizer, balancer = trained(steps, strategy, during=during, run=folder)
        optimizer.merge()
        balancer.trace.close()
        lines = [json.loads(line) for line in next(Path(folder).iterdir()).read_text().splitlines()]
    merges = [line["fields"] for line in lines if isinstance(line, dict) and line.get("event") == "merge"]
    moves = [line["fields"] for line in lines if isinstance(line, dict) and line.get("event") == "rung"]
    assert same_everywhere(model)
    assert sum(fields["samples"] for fields in merges) == (steps - 2) * WHOLE, "every sample counts once"
    down, *back = [(move["rank"], hvd.Rung(move["after"]).title) for move in moves]
    assert down == (last, "fewer merges") and (last, "fewer merges") not in back and len(back) == 1, moves
    assert f"one merge of {', '.join(['1'] * last)}, " in moves[0]["reason"], moves
    assert balancer.ladder.rungs[last] != hvd.Rung.FEWER_MERGES
    return lines


def a_rank_that_fails():
    """A rank whose loader raises: the others hear of it at the next merge."""

    class Torn(torch.utils.data.Dataset):
        def __len__(self):
            return 240

        def __getitem__(self, index):
            if hvd.rank() == 1 and balancer.step >= 12:
                raise OSError("torn page")
            return torch.zeros(6).double()

    model = make_model()
    balancer = hvd.Balancer(WHOLE, adaptive=False)
    loader = hvd.BalancedDataLoader(Torn(), balancer=balancer)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.05), model.named_parameters(), balancer=balancer,
        strategy=hvd.LocalSGD(round_steps=2, warmup_steps=2),
    )
    try:
        for x in loader:
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
    except (OSError, hvd.PeerError) as error:
        assert ("torn page" if hvd.rank() == 1 else "rank 1 could not") in str(error), error
    else:
        raise AssertionError("nobody heard of the failure")


def going_back_ends_what_is_under_way():
    """What ranks have done apart since a commit moves no model that is gone back to."""
    shares, (x, y) = UNEVEN[hvd.size()], make_data(14)
    begin, mine = sum(shares[: hvd.rank()]), shares[hvd.rank()]
    for rule in (
        hvd.LocalSGD(round_steps=1, bound_rounds=0, warmup_steps=5, outer=hvd.Outer(learning_rate=0.7, momentum=0.5)),
        hvd.LocalSGD(round_steps=2, warmup_steps=0, outer=hvd.Outer(learning_rate=0.7, momentum=0.5)),
    ):
        ended = []
        for goes_back in (False, True):
            model = make_model()
            balancer = hvd.Balancer(WHOLE, min_share=0, shares=shares, adaptive=False)
            optimizer = hvd.DistributedOptimizer(
                torch.optim.AdamW(model.parameters(), lr=0.05), balancer=balancer, strategy=rule
            )
            state = hvd.elastic.TorchState(model, optimizer)

            def train(first, last, model=model, optimizer=optimizer, balancer=balancer):
                for step in range(first, last):
                    rows = slice(step * WHOLE + begin, step * WHOLE + begin + mine)
                    optimizer.zero_grad()
                    balancer.begin(mine)
                    if mine:
                        nn.functional.cross_entropy(model(x[rows]), y[rows]).backward()
                    optimizer.step()

            train(0, 3)
            state.commit()
            if goes_back:
                train(3, 9)
                state.restore()
            train(3, 14)
            optimizer.merge()
            assert same_everywhere(model)
            ended.append(parameters(model))
        # Longer rounds depend on timing.
        assert rule.round_steps > 1 or (ended[0] - ended[1]).abs().max() <= 1e-12, ended


def parameters_that_differ():
    model = make_model()
    balancer = hvd.Balancer(WHOLE, adaptive=False)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.05), balancer=balancer, strategy=hvd.LocalSGD(warmup_steps=0)
    )
    if hvd.rank() == 1:
        with torch.no_grad():
            model[0].weight[0, 0] += 1.0
    balancer.begin(WHOLE // hvd.size())
    model(torch.zeros(1, 6).double()).sum().backward()
    try:
        optimizer.step()
    except RuntimeError as error:
        assert "others than rank 0's on rank 1" in str(error), error
    else:
        raise AssertionError("ranks started from different models")


if __name__ == "__main__":
    # With dynamic process sets under MPI, Horovod holds a lock in each cycle until all ranks are there, and who sends
    # meanwhile waits for it: a stopped rank holds up the others then.
    hvd.init(**({"process_sets": "dynamic"} if "composes" in sys.argv else {}))
    torch.set_num_threads(1)
    run_checks(hvd, sys.argv[1:], globals())
    hvd.shutdown()
