"""A script as Horovod's users write it: the skeleton of elastic training."""

import horovod.torch as hvd
import torch
from torch import nn

hvd.init()
torch.manual_seed(42)
torch.set_num_threads(1)

model = nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())


def on_state_reset():
    for group in optimizer.param_groups:
        group["lr"] = 0.01 * hvd.size()


@hvd.elastic.run
def train(state):
    while state.batch < 10:
        x = torch.randn(4, 8)
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), x.sum(1, keepdim=True)).backward()
        optimizer.step()
        state.batch += 1
        if state.batch % 5 == 0:
            state.commit()
    return float(sum(p.double().sum() for p in model.parameters()))


state = hvd.elastic.TorchState(model=model, optimizer=optimizer, batch=0)
state.register_reset_callbacks([on_state_reset])
total = train(state)
every = hvd.allgather_object(total, name="totals")
if hvd.rank() == 0:
    print("RESULT", state.batch, len(set(every)))
hvd.barrier()
