"""What is made with a balancer and has a state: it lives as long as something needs it."""

import copy
import gc

import numpy as np
import pytest
import torch
from torch import nn

pytest.importorskip("keras", reason="pip install keras with TensorFlow or torch")
pytest.importorskip("horovod.torch", reason="build it with hvd-hetero build-horovod")


import hvd_hetero.keras as hvd_keras
import hvd_hetero.torch as hvd
from hvd_hetero.engine.local import SoloEngine, World

LENGTH, WHOLE = 12, 4
PROTOTYPE = nn.Linear(2, 1).double()


def samples():
    return torch.utils.data.TensorDataset(torch.ones(LENGTH, 2, dtype=torch.float64))


def keras_dataset(balancer):
    return hvd_keras.BalancedDataset(np.ones((LENGTH, 2)), balancer=balancer)


@pytest.mark.parametrize("face, made", [
    (hvd, lambda balancer: hvd.BalancedDataLoader(samples(), balancer=balancer)), (hvd_keras, keras_dataset),
])  # fmt: skip
def test_a_loader_for_each_epoch_is_gone_with_its_epoch(face, made):
    balancer = face.Balancer(WHOLE, engine=SoloEngine())
    for epoch in range(3):
        loader = made(balancer)
        loader.set_epoch(epoch)
        for _ in loader:
            balancer.pause()
        assert list(balancer.dependents.named.values()) == [getattr(loader, "batch_sampler", loader)]
        del loader
        gc.collect()
        assert not balancer.dependents.named, "its order is as long as the data"
    assert balancer.dependents.made == 3


def test_what_a_script_does_not_name_lives_as_long_as_it_is_needed():
    def program(engine):
        model = copy.deepcopy(PROTOTYPE)
        balancer = hvd.Balancer(WHOLE, engine=engine, adaptive=False)
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), balancer=balancer)
        hvd.LatencyAwareLR(optimizer, balancer, base_batch_size=1)  # a factor of 4
        seen = 0
        for (x,) in hvd.BalancedDataLoader(samples(), balancer=balancer):
            gc.collect()
            seen += len(x)
            if seen == len(x):
                engine.rebuild()
                balancer.begin(len(x))
            assert {"LatencyAwareLR.1", "BalancedBatchSampler.2"} == set(balancer.dependents.named)
            before = model.bias.item()
            optimizer.zero_grad()
            model(x).mean().backward()
            optimizer.step()
            assert model.bias.item() == pytest.approx(before - 4.0)
        return seen

    assert sum(World(2).run(program)) == LENGTH


