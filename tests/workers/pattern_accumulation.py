"""A script as Horovod's users write it: gradients accumulated over micro-batches, fp16 compression."""

import horovod.torch as hvd
import torch
from torch import nn

hvd.init()
torch.manual_seed(42)
torch.set_num_threads(1)
PASSES = 4

model = nn.Linear(8, 1)
# Adam would count the step that Horovod's broadcast of its state makes, and ours does not.
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
optimizer = hvd.DistributedOptimizer(
    optimizer,
    named_parameters=model.named_parameters(),
    compression=hvd.Compression.fp16,
    backward_passes_per_step=PASSES,
)
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
hvd.broadcast_optimizer_state(optimizer, root_rank=0)

generator = torch.Generator().manual_seed(hvd.rank())
for _ in range(5):
    optimizer.zero_grad()
    for _ in range(PASSES):
        x = torch.randn(4, 8, generator=generator)
        loss = nn.functional.mse_loss(model(x), x.sum(1, keepdim=True)) / PASSES
        loss.backward()
    optimizer.step()

if hvd.rank() == 0:
    print("RESULT", float(sum(p.double().sum() for p in model.parameters())))
