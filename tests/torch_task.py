"""What tests of PyTorch's training share: a dataset, a model, and a loop over them."""

import torch
from torch import nn

LENGTH, WHOLE = 20, 8  # the third batch of an epoch is short
SHARES = (5, 2, 1)


class Data(torch.utils.data.Dataset):
    def __init__(self, length=LENGTH, fail_at=None):
        generator = torch.Generator().manual_seed(3)
        self.x = torch.randn(length, 4, generator=generator, dtype=torch.float64)
        self.y = torch.randint(0, 3, (length,), generator=generator)
        self.fail_at = fail_at

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        if index == self.fail_at:
            raise OSError("disk on fire")
        return self.x[index], self.y[index], index


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()


def train(
    model, optimizer, loader, epochs, *, after_backward=lambda: None, scheduler=None, scaler=None, clears="before"
):
    """An ordinary training loop; the parameters that come out of it."""
    for epoch in range(epochs):
        if hasattr(loader, "set_epoch"):
            loader.set_epoch(epoch)
        for x, y, _ in loader:
            if clears == "before":
                optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y)
            (scaler.scale(loss) if scaler else loss).backward()
            after_backward()
            if scaler:
                scaler.step(optimizer)
                scaler.update()
            else:
                optimizer.step()
            if clears == "after":
                optimizer.zero_grad()
        if scheduler:
            scheduler.step()
    return [p.detach().clone() for p in model.parameters()]


class GlobalBatches:
    """What one process would see: the same global batches, whole."""

    def __init__(self, dataset):
        from hvd_hetero.optimizers.dealer import Dealer

        self.dataset = dataset
        self.dealer = Dealer(len(dataset), global_batch_size=WHOLE, shuffle=True, seed=0, drop_last=False)

    def set_epoch(self, epoch):
        self.dealer.epoch = epoch

    def __iter__(self):
        for batch in self.dealer.batches():
            yield torch.utils.data.default_collate([self.dataset[int(i)] for i in batch])


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-3)


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-2)
