"""Handwritten digits in an elastic job: ranks may die, join and leave, and a job that is stopped goes on where it was.

    horovodrun -np 2 --min-np 1 --max-np 4 --host-discovery-script ./hosts.sh \
        python examples/torch_elastic.py --checkpoint run/digits

`hosts.sh` prints the hosts that there are now, a line for each, as "fast:2". With one host alone, add
`--network-interfaces lo`. Under a plain `horovodrun -np 2` it runs as well, and goes on from its checkpoint when it is
started again. It needs scikit-learn, which brings the data.
"""

import argparse

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset, random_split

import hvd_hetero.torch as hvd


def make_data() -> tuple[torch.utils.data.Dataset, torch.utils.data.Dataset]:
    """Samples to train on, and to validate with; the same on all ranks. x: float of shape [64]; y: int64, 0 to 9."""
    digits = load_digits()
    samples = TensorDataset(torch.tensor(digits.data, dtype=torch.float32) / 16.0, torch.tensor(digits.target))
    training, validation = random_split(samples, [0.8, 0.2], generator=torch.Generator().manual_seed(0))
    return training, validation


def accuracy(model: nn.Module, loader: hvd.EvaluationDataLoader) -> float:
    """The part of all samples that the model is right about. A collective call."""
    counts = torch.zeros(2, dtype=torch.float64)
    with torch.no_grad():
        for x, y in loader:
            counts += torch.tensor([(model(x).argmax(1) == y).sum(), len(y)])
    right, samples = hvd.allreduce(counts, op=hvd.Sum, name="accuracy").tolist()
    return right / samples


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--global-batch-size", type=int, default=64, help="a constant, however many ranks there are")
    parser.add_argument("--checkpoint", default="digits.checkpoint", help="is read at the start if it is there")
    arguments = parser.parse_args()
    hvd.init()
    torch.manual_seed(0)

    # All ranks make these in the same order, also one that joins: nothing collective happens outside of train().
    training, validation = make_data()
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    balancer = hvd.Balancer(arguments.global_batch_size)
    loader = hvd.BalancedDataLoader(training, balancer=balancer)
    evaluation = hvd.EvaluationDataLoader(validation, balancer=balancer)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), model.named_parameters(), balancer=balancer
    )
    state = hvd.elastic.TorchState(model, optimizer, epoch=0, batch=0)
    checkpoint = hvd.Checkpoint(arguments.checkpoint, state, every_steps=20)
    checkpoint.restore()

    @hvd.elastic.run
    def train(state: hvd.elastic.TorchState) -> None:
        for state.epoch in range(state.epoch, arguments.epochs):  # noqa: B020
            loader.set_epoch(state.epoch)
            for x, y in loader:
                optimizer.zero_grad()
                F.cross_entropy(model(x), y).backward()
                optimizer.step()
                state.batch += 1
                checkpoint.step()
                if state.batch % 10 == 0:
                    state.commit()  # what all go back to if a rank dies; ranks join and leave here
            state.commit()  # right after the loop: a job that goes on from here validates, and does not train it again
            result = accuracy(model, evaluation)
            if hvd.rank() == 0:
                shares = ":".join(map(str, balancer.plan.shares))
                print(
                    f"epoch {state.epoch}, {state.batch} batches: accuracy {result:.4f}, "
                    f"{hvd.size()} ranks, shares {shares}",
                    flush=True,
                )

    train(state)
    checkpoint.close()
    hvd.shutdown()


if __name__ == "__main__":
    main()
