"""`hvd.SyncBatchNorm` on ranks that are threads: the same as BatchNorm of one process on the global batch."""

import copy

import pytest
import torch
from torch import nn

pytest.importorskip("horovod.torch", reason="build it with hvd-hetero build-horovod")

import hvd_hetero.torch as hvd
from hvd_hetero.engine.local import SoloEngine, World
from hvd_hetero.torch import sync_batch_norm

STEPS = 3


class Net(nn.Module):
    """Two normalisations, in 4 and 2 dimensions, the first one of two calls."""

    def __init__(self, make):
        super().__init__()
        torch.manual_seed(1)
        self.convolution, self.first = nn.Conv2d(2, 3, 3), make(3)
        self.dense, self.second, self.out = nn.Linear(3 * 16, 5), make(5), nn.Linear(5, 2)

    def forward(self, x):
        x = torch.relu(self.first(self.first(self.convolution(x)))).flatten(1)
        return self.out(torch.relu(self.second(self.dense(x))))


def data(dtype, rows, shift=0.0):
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(STEPS, rows, 2, 6, 6, generator=generator, dtype=torch.float64) + shift
    return x.to(dtype), torch.randint(0, 2, (STEPS, rows), generator=generator)


def train(model, x, y, mine=slice(None), begin=lambda: None, make=None):
    optimizer = (make or (lambda o: o))(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    for step in range(STEPS):
        begin()
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x[step, mine]), y[step, mine]).backward()
        optimizer.step()
    return list(model.state_dict().values())


def error_of(shares, dtype, shift=0.0, make=nn.BatchNorm2d, **options):
    torch.set_num_threads(1)
    x, y = data(dtype, sum(shares), shift)

    def plain(features):
        return (make if features == 3 else nn.BatchNorm1d)(features, **options)

    prototype = Net(plain).to(dtype)
    expected = train(copy.deepcopy(prototype), x, y)

    def program(engine):
        model = Net(lambda features: hvd.SyncBatchNorm(features, engine=engine, **options)).to(dtype)
        model.load_state_dict(prototype.state_dict())
        balancer = hvd.Balancer(sum(shares), engine=engine, shares=shares, min_share=0)
        start = sum(shares[: engine.rank])
        mine = slice(start, start + shares[engine.rank])
        return train(
            model, x, y, mine, lambda: balancer.begin(shares[engine.rank]),
            lambda optimizer: hvd.DistributedOptimizer(optimizer, model.named_parameters(), balancer=balancer),
        )  # fmt: skip

    found = World(len(shares)).run(program)
    assert all(torch.equal(a, b) for rank in found[1:] for a, b in zip(found[0], rank, strict=True))
    return max(((a - b).abs().max() / (1 + b.abs().max())).item() for a, b in zip(found[0], expected, strict=True))


@pytest.mark.parametrize("shares", [(6,), (3, 3), (7, 2, 1), (6, 0, 2)])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-12), (torch.float32, 1e-6)])
def test_training_equals_one_process_on_the_global_batch(shares, dtype, bound):
    assert error_of(shares, dtype) <= bound


@pytest.mark.parametrize("options", [{"momentum": None}, {"affine": False}, {"track_running_stats": False}])
def test_with_the_arguments_of_batch_norm(options):
    assert error_of((5, 1), torch.float64, **options) <= 1e-12


def test_statistics_far_from_zero_keep_their_digits():
    """In float32 and far from zero one process is itself no better than its digits, so float64 is the measure."""
    x = 1e4 + torch.randn(9, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    expected = nn.BatchNorm1d(4, dtype=torch.float64)(x.float().double())
    parts = {0: slice(0, 6), 1: slice(6, 9)}
    found = World(2).run(lambda engine: hvd.SyncBatchNorm(4, engine=engine)(x[parts[engine.rank]].float()))
    assert (torch.cat(found).double() - expected).abs().max() <= 2e-3  # a float32 at 1e4 has a step of 1e-3


def test_half_precision_in_and_out_with_statistics_in_float32():
    x = 300 + torch.randn(8, 4, generator=torch.Generator().manual_seed(0))
    found = World(2).run(lambda engine: hvd.SyncBatchNorm(4, engine=engine)(x[4 * engine.rank :][:4].half()))
    expected = nn.BatchNorm1d(4)(x.half().float())
    assert found[0].dtype == torch.float16 and (torch.cat(found).float() - expected).abs().max() <= 1e-3


def test_a_gradient_of_the_gradient_is_refused():
    def program(engine):
        x = torch.randn(4, 3, requires_grad=True)
        (gradient,) = torch.autograd.grad(hvd.SyncBatchNorm(3, engine=engine)(x).pow(3).sum(), x, create_graph=True)
        with pytest.raises(RuntimeError, match="once_differentiable"):
            gradient.pow(2).sum().backward()

    World(2).run(program)


def test_evaluation_needs_nobody_else():
    layer = hvd.SyncBatchNorm(3).eval()
    x = torch.randn(4, 3)
    assert torch.equal(layer(x), nn.BatchNorm1d(3).eval()(x))


def test_evaluation_by_the_batchs_own_statistics_needs_nobody_else():
    """Ranks may have different numbers of batches in a validation."""
    x = torch.randn(4, 3)

    def program(engine):
        layer = hvd.SyncBatchNorm(3, track_running_stats=False, engine=engine).eval()
        return [layer(x) for _ in range(1 + engine.rank)][-1]

    for found in World(2).run(program, timeout_s=10):
        assert torch.equal(found, nn.BatchNorm1d(3, track_running_stats=False).eval()(x))


def test_the_ranks_are_those_of_a_process_set_also_with_a_balancer(monkeypatch):
    monkeypatch.setattr(sync_batch_norm, "HorovodEngine", lambda process_set: process_set)
    x = torch.randn(4, 3)
    expected = nn.BatchNorm1d(3)(x)

    def program(engine):
        balancer = hvd.Balancer(8, engine=engine)
        alone = hvd.SyncBatchNorm(3, process_set=SoloEngine(), balancer=balancer)
        return alone(x * (1 + engine.rank))

    for found in World(2).run(program):
        assert (found - expected).abs().max() < 1e-4


def test_conversion_keeps_parameters_buffers_and_mode():
    inner = nn.Sequential(nn.BatchNorm1d(3, eps=0.1, momentum=None), nn.Dropout())
    model = nn.Sequential(nn.Linear(2, 3), inner).eval()
    before, parameters = model.state_dict(), list(model.parameters())
    converted = hvd.SyncBatchNorm.convert_sync_batchnorm(model)
    layer = converted[1][0]
    assert isinstance(layer, hvd.SyncBatchNorm) and (layer.eps, layer.momentum, layer.training) == (0.1, None, False)
    assert all(a is b for a, b in zip(converted.parameters(), parameters, strict=True))
    assert before.keys() == converted.state_dict().keys()
    assert isinstance(copy.deepcopy(converted)[1][0], hvd.SyncBatchNorm)
    assert type(hvd.SyncBatchNorm.convert_sync_batchnorm(nn.BatchNorm2d(3))) is hvd.SyncBatchNorm


def test_a_normalisation_that_is_in_several_places_is_one_still():
    """One that stayed plain in one of them would take statistics of its rank alone, and put them with the others'."""
    norm = nn.BatchNorm1d(3)
    model = nn.ModuleDict({"first": norm, "second": norm, "within": nn.Sequential(norm, nn.ReLU())})
    converted = hvd.SyncBatchNorm.convert_sync_batchnorm(model)
    assert type(converted["first"]) is hvd.SyncBatchNorm
    assert converted["first"] is converted["second"] is converted["within"][0]
    assert converted["first"].weight is norm.weight


@pytest.mark.parametrize("passes", [1, 2])
def test_gradients_through_it_are_weighted_by_loss_terms(passes):
    """Of masked samples, in unlike numbers on the ranks, and in several passes over a batch."""
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(passes, 8, 3, generator=generator, dtype=torch.float64)
    y = torch.randn(passes, 8, 2, generator=generator, dtype=torch.float64)
    mask = torch.tensor([[1, 1, 1, 0, 0, 0, 0, 1], [0, 1, 0, 0, 1, 1, 1, 1]]).bool()[:passes]

    def make(norm):
        torch.manual_seed(1)
        return nn.Sequential(nn.Linear(3, 4), norm, nn.Tanh(), nn.Linear(4, 2)).double()

    def loss(model, i, rows):
        return (model(x[i, rows]) - y[i, rows])[mask[i, rows]].square().mean()

    expected = make(nn.BatchNorm1d(4))
    total = sum(loss(expected, i, slice(None)) * mask[i].sum() for i in range(passes)) / mask.sum()
    (total * passes).backward()  # as Horovod's, which add up
    begun = make(hvd.SyncBatchNorm(4))

    def program(engine):
        balancer = hvd.Balancer(8, engine=engine, shares=(5, 3))
        model = copy.deepcopy(begun)
        model[1] = hvd.SyncBatchNorm(4, balancer=balancer).double()
        model = copy.deepcopy(model)  # which keeps its balancer
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.0), model.named_parameters(), balancer=balancer,
            backward_passes_per_step=passes,
        )  # fmt: skip
        rows = slice(0, 5) if engine.rank == 0 else slice(5, 8)
        for i in range(passes):
            balancer.begin((5, 3)[engine.rank])
            balancer.count(int(mask[i, rows].sum()))
            loss(model, i, rows).backward()
        optimizer.synchronize()
        return [p.grad.clone() for p in model.parameters()]

    for found in World(2).run(program):
        for grad, parameter in zip(found, expected.parameters(), strict=True):
            assert (grad - parameter.grad).abs().max() <= 1e-12


@pytest.mark.parametrize(("options", "divided"), [
    ({"max_micro_batch": 4}, True),
    ({"max_micro_batch": 4, "max_share": 8}, True),
    ({"max_micro_batch": 8, "max_share": 8}, False),
    ({"max_micro_batch": 6, "shares": (6, 6), "adaptive": False}, False),
    ({"max_micro_batch": 5, "shares": (6, 6), "adaptive": False}, True),
])  # fmt: skip
def test_batches_in_parts_are_refused_on_all_ranks(options, divided):
    def program(engine):
        mine = {**options, **({} if engine.rank == 0 else {"max_micro_batch": None})}
        balancer = hvd.Balancer(12, engine=engine, **mine)
        layer = hvd.SyncBatchNorm(3, balancer=balancer)
        balancer.begin(6)
        try:
            layer(torch.ones(6, 3))
        except RuntimeError as error:
            return str(error)
        return None

    for said in World(2).run(program, timeout_s=20):
        assert (said is not None) == divided
        assert not divided or f"max_micro_batch={options['max_micro_batch']} on rank 0, where" in said


class WithActivation(nn.BatchNorm2d):
    def forward(self, x):
        return super().forward(x).relu()


def test_a_batch_normalisation_that_does_more_is_not_replaced_by_one_that_does_not():
    model = nn.Sequential(nn.BatchNorm2d(3), nn.Conv2d(3, 4, 3), WithActivation(4))
    with pytest.raises(TypeError, match="WithActivation"):
        hvd.SyncBatchNorm.convert_sync_batchnorm(model)
    with pytest.raises(TypeError, match="balancer: expected an hvd.Balancer. Received: 64"):
        hvd.SyncBatchNorm.convert_sync_batchnorm(nn.Sequential(nn.BatchNorm2d(3)), balancer=64)
    assert type(model[0]) is nn.BatchNorm2d, "the model is whole"
