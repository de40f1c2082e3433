"""What tests of local steps with PyTorch share: a model, its data, and a loop over them."""

import copy

import torch
from torch import nn

import hvd_hetero.torch as hvd

WHOLE = 12


def make_model(dtype=torch.float64):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3)).to(dtype)


def make_data(steps, seed=1):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(steps * WHOLE, 6, generator=generator).double()
    return x, (x @ torch.randn(6, 3, generator=generator).double()).argmax(1)


def trained(engine, steps, strategy, *, shares, optimizer=torch.optim.SGD, micro=False, run=None, dtype=torch.float64,
            merge=True, model=None, lr=0.1, **options):
    """A rank's parameters after `steps` global batches of the same samples, however they are shared."""
    torch.set_num_threads(1)
    model = copy.deepcopy(model if model is not None else PROTOTYPE).to(dtype)
    x, y = make_data(steps)
    caps = {"max_micro_batch": 2} if micro else {}
    balancer = hvd.Balancer(WHOLE, engine=engine, min_share=0, shares=shares, adaptive=False, run=run, **caps)
    settings = {"lr": lr, "momentum": 0.9} if optimizer is torch.optim.SGD else {"lr": lr}
    wrapped = hvd.DistributedOptimizer(
        optimizer(model.parameters(), **settings), model.named_parameters(), balancer=balancer, strategy=strategy,
        **options,
    )
    begin = sum(shares[: engine.rank])
    for step in range(steps):
        mine = slice(step * WHOLE + begin, step * WHOLE + begin + shares[engine.rank])
        wrapped.zero_grad()
        balancer.begin(shares[engine.rank])
        if micro:
            for part_x, part_y in balancer.micro_batches((x[mine].to(dtype), y[mine])):
                nn.functional.cross_entropy(model(part_x), part_y).backward()
        elif shares[engine.rank]:
            nn.functional.cross_entropy(model(x[mine].to(dtype)), y[mine]).backward()
        wrapped.step()
    if merge:
        wrapped.merge()
    if balancer.trace is not None:
        balancer.trace.close()
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


PROTOTYPE, SMALL = make_model(), nn.Linear(2, 1)
