"""A script as Horovod's users write it: DistributedSampler, scaled learning rate, broadcasts, metric averages."""

import horovod.torch as hvd
import torch
from torch import nn

hvd.init()
torch.manual_seed(42)
torch.set_num_threads(1)

x = torch.randn(64, 8)
data = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))
sampler = torch.utils.data.distributed.DistributedSampler(data, num_replicas=hvd.size(), rank=hvd.rank())
loader = torch.utils.data.DataLoader(data, batch_size=8, sampler=sampler)

model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01 * hvd.size(), momentum=0.9)
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
hvd.broadcast_optimizer_state(optimizer, root_rank=0)
optimizer = hvd.DistributedOptimizer(
    optimizer, named_parameters=model.named_parameters(), compression=hvd.Compression.none, op=hvd.Average
)

for epoch in range(3):
    sampler.set_epoch(epoch)
    for batch, target in loader:
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(batch), target)
        loss.backward()
        optimizer.synchronize()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        with optimizer.skip_synchronize():
            optimizer.step()
    average = hvd.allreduce(loss.detach(), name="avg_loss").item()

if hvd.rank() == 0:
    print("RESULT", average, float(sum(p.double().sum() for p in model.parameters())))
