"""What merges with PyTorch make one of beside parameters: buffers, statistics and states of optimizers."""

import copy

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

pytest.importorskip("horovod.torch", reason="build it with hvd-hetero build-horovod")

from torch_local_task import PROTOTYPE, WHOLE, make_data

import hvd_hetero.torch as hvd
from hvd_hetero.engine import payload
from hvd_hetero.engine.local import World
from hvd_hetero.torch import state as merged_state
from hvd_hetero.torch.buffers import average_buffers
from hvd_hetero.torch.parameter_store import ParameterStore
from hvd_hetero.torch.state import all_finite, average_state


def test_merge_brings_running_statistics_together():
    torch.manual_seed(0)
    x = torch.randn(60, 5).double() * 3 + torch.arange(60).double()[:, None] / 10
    counts = (30, 20, 10)

    def program(engine):
        model = nn.BatchNorm1d(5, momentum=None).double()  # cumulative averages
        balancer = hvd.Balancer(60, engine=engine, adaptive=False, shares=counts)
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.0), balancer=balancer, strategy=hvd.LocalSGD(warmup_steps=0)
        )
        begin = sum(counts[: engine.rank])
        balancer.begin(counts[engine.rank])
        model(x[begin : begin + counts[engine.rank]]).sum().backward()
        optimizer.step()
        model.num_batches_tracked += engine.rank
        optimizer.merge(model)
        return model.running_mean, model.running_var, int(model.num_batches_tracked)

    found = World(3).run(program)
    starts = [0, 30, 50, 60]
    parts = [x[a:b] for a, b in zip(starts, starts[1:], strict=False)]
    mean = x.mean(0)
    square = sum(len(p) * (p.var(0) + p.mean(0) ** 2) for p in parts) / 60
    for running_mean, running_var, tracked in found:
        torch.testing.assert_close(running_mean, mean)
        torch.testing.assert_close(running_var, square - mean**2)
        assert tracked == 3


def test_a_history_begins_anew_where_ranks_come_together():
    """That of LBFGS is of each rank's own steps; synchronous ones with it would part the ranks."""

    def program(engine):
        model = copy.deepcopy(PROTOTYPE)
        balancer = hvd.Balancer(WHOLE, engine=engine, shares=(8, 4), adaptive=False)
        optimizer = hvd.DistributedOptimizer(
            torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3), balancer=balancer,
            strategy=hvd.LocalSGD(round_steps=2, warmup_steps=0),
        )  # fmt: skip
        optimizer._reducer.local.steps._phase = lambda step: step < 8
        x, y = make_data(16)
        for step in range(16):
            balancer.begin(balancer.share)
            mine = slice(12 * step, 12 * step + 8) if engine.rank == 0 else slice(12 * step + 8, 12 * step + 12)

            def closure(mine=mine):
                optimizer.zero_grad()
                loss = nn.functional.cross_entropy(model(x[mine]), y[mine])
                loss.backward()
                return loss

            optimizer.step(closure)
        return torch.cat([p.detach().reshape(-1) for p in model.parameters()])

    first, second = World(2).run(program)
    assert torch.equal(first, second)


def test_merge_makes_one_of_buffers_also_where_training_is_synchronous():
    def program(engine):
        model = nn.BatchNorm1d(4).double()
        balancer = hvd.Balancer(8, engine=engine, shares=(6, 2), adaptive=False)
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), balancer=balancer)
        model.running_mean.fill_(engine.rank)
        optimizer.merge(model)
        return model.running_mean.tolist()

    assert World(2).run(program) == [[0.25] * 4] * 2, "by their shares"


TABLE = nn.EmbeddingBag(20, 3, sparse=True, mode="sum").double()


def trained_sparse(engine, strategy, *, shares, optimizer=torch.optim.SGD, sparse=True, steps=12, as_dense=False):
    """A rank's parameters, and how many sparse dimensions each step's gradient had."""
    model, seen = copy.deepcopy(TABLE), []
    model.sparse = sparse
    balancer = hvd.Balancer(WHOLE, engine=engine, min_share=0, shares=shares, adaptive=False)
    settings = {"momentum": 0.9} if optimizer is torch.optim.SGD else {}
    wrapped = hvd.DistributedOptimizer(
        optimizer(model.parameters(), lr=0.1, **settings), model.named_parameters(), balancer=balancer,
        sparse_as_dense=as_dense, strategy=strategy,
    )  # fmt: skip
    begin = sum(shares[: engine.rank])
    for step in range(steps):
        rows = (torch.arange(step * WHOLE, (step + 1) * WHOLE) % 20)[begin : begin + shares[engine.rank], None]
        wrapped.zero_grad()
        balancer.begin(len(rows))
        if len(rows):
            model(rows).pow(2).mean().backward()
        wrapped.step()
        seen.append(model.weight.grad.sparse_dim() if model.weight.grad is not None else None)
    wrapped.merge()
    return model.weight.detach().clone(), seen


@pytest.mark.parametrize("as_dense", [False, True])
@pytest.mark.parametrize("shares", [(6, 6), (7, 0, 5)])
@pytest.mark.parametrize("strategy", ["synchronous", hvd.LocalSGD(round_steps=1, bound_rounds=0, warmup_steps=3)])
def test_sparse_gradients_stay_as_autograd_makes_them(strategy, shares, as_dense):
    """Steps together deliver what steps apart go on with: momentum is sparse as well."""
    found = World(len(shares)).run(lambda engine: trained_sparse(engine, strategy, shares=shares, as_dense=as_dense))
    dense = World(len(shares)).run(lambda engine: trained_sparse(engine, strategy, shares=shares, sparse=False))
    for (weight, seen), (expected, _), share in zip(found, dense, shares, strict=True):
        torch.testing.assert_close(weight, expected, rtol=1e-10, atol=1e-12)
        assert {1} == set(seen) - {None} or not share


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.SparseAdam])
def test_states_of_sparse_gradients_become_one(optimizer):
    """Also that of a rank which has not been given any yet."""

    def program(engine):
        table = copy.deepcopy(TABLE)
        inner = optimizer(table.parameters(), lr=0.1, **({"momentum": 0.9} if optimizer is torch.optim.SGD else {}))
        for step in range(2 if engine.rank else 0):
            inner.zero_grad()
            table(torch.tensor([[engine.rank], [engine.rank + step]])).pow(2).sum().backward()
            inner.step()
        held = copy.deepcopy(inner.state[table.weight]) if engine.rank else {}
        average_state(inner, weight=float(engine.rank), engine=engine, name="state")
        return held, inner.state[table.weight]

    ranks = World(3).run(program)
    key = "momentum_buffer" if optimizer is torch.optim.SGD else "exp_avg"
    expected = (ranks[1][0][key].to_dense() + 2.0 * ranks[2][0][key].to_dense()) / 3.0
    for held, state in ranks:
        torch.testing.assert_close(state[key].to_dense(), expected, rtol=1e-12, atol=0.0)
        assert not held or held[key].is_sparse == state[key].is_sparse
        assert state.get("step") == ranks[1][0].get("step")
    assert expected.any()


def test_buffers_of_any_type_become_one():
    def program(engine):
        model = copy.deepcopy(PROTOTYPE)
        model.register_buffer("phase", torch.full((3,), 1 + 4j * engine.rank, dtype=torch.complex64))
        model.register_buffer("mask", torch.tensor([False, engine.rank == 1, True]), persistent=False)
        model.register_buffer("seen", torch.tensor(5 + engine.rank, dtype=torch.int32))
        average_buffers(model, weight=1.0 + 2 * engine.rank, engine=engine, name="buffers")
        assert model.phase.tolist() == [1 + 3j] * 3 and model.phase.dtype == torch.complex64
        assert model.mask.tolist() == [False, True, True] and model.mask.dtype == torch.bool
        assert model.seen.item() == 6 and model.seen.dtype == torch.int32

    World(2).run(program)


def test_an_outer_momentum_goes_with_who_takes_over_with_checkpoints_and_over_changes_of_the_ranks():
    """Of two models of unlike sizes, the first is given another optimizer, as for layers that were thawed."""
    prototypes = nn.Linear(3, 2, bias=False), nn.Linear(5, 4, bias=False)
    rule = hvd.LocalSGD(warmup_steps=0, round_steps=1, outer=hvd.Outer(momentum=0.9))

    def momenta(optimizers):
        outer = [each._reducer.local.steps.rounds.fragments[0].outer_state for each in optimizers]
        return [{name: kept.tolist() for name, kept in state.items()} for state in outer]

    def made(engine, models):
        balancer = hvd.Balancer(4, engine=engine)
        plain = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
        return balancer, [hvd.DistributedOptimizer(each, balancer=balancer, strategy=rule) for each in plain]

    def program(engine):
        models = copy.deepcopy(prototypes)
        balancer, (a, b) = made(engine, models)
        for _ in range(3):
            balancer.begin(2)
            sum(model(torch.ones(2, model.in_features)).mean() for model in models).backward()
            for optimizer in (a, b):
                optimizer.step()
                optimizer.zero_grad()
        for optimizer in (a, b):
            optimizer.merge()
        before = momenta((a, b))
        a = hvd.DistributedOptimizer(a, balancer=balancer, strategy=rule)
        assert momenta((a, b)) == before
        balancer.rebuild()
        for optimizer in (b, a):  # in the order in which they were made
            optimizer._rebuild()
        assert momenta((a, b)) == before and before[0]["momentum"]
        state = balancer.state_dict()
        resumed, later = made(engine, models)
        resumed.load_state_dict(state)
        assert momenta(later) == before

    World(2).run(program)


def test_a_rank_that_never_had_a_sample_gets_a_state_in_the_memory_format_of_its_parameters():
    shares = (5, 3, 0)
    prototype = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(), nn.Linear(128, 3)).to(memory_format=torch.channels_last)

    def program(engine):
        balancer = hvd.Balancer(8, engine=engine, shares=shares, min_share=0, adaptive=False)
        model = copy.deepcopy(prototype)
        adam = torch.optim.Adam(model.parameters(), lr=0.01, fused=True)
        rule = hvd.LocalSGD(warmup_steps=0, round_steps=2)
        optimizer = hvd.DistributedOptimizer(adam, balancer=balancer, strategy=rule)
        for _ in range(3):
            balancer.begin(shares[engine.rank])
            optimizer.zero_grad()
            if shares[engine.rank]:
                model(torch.randn(shares[engine.rank], 3, 6, 6)).square().mean().backward()
            optimizer.step()
        optimizer._reducer.local.come_together()
        weight = model[0].weight
        return weight.stride(), optimizer.state[weight]["exp_avg"].stride()

    for parameters, state in World(3).run(program):
        assert state == parameters


def test_merging_within_inference_mode_leaves_memory_that_later_steps_write_to():
    prototype = nn.Linear(6, 3)

    def program(engine):
        balancer, model = hvd.Balancer(8, engine=engine, adaptive=False), copy.deepcopy(prototype)
        rule = hvd.LocalSGD(warmup_steps=2, round_steps=4)
        optimizer = hvd.DistributedOptimizer(
            torch.optim.Adam(model.parameters()), balancer=balancer, strategy=rule
        )
        for step in range(20):
            balancer.begin(balancer.share)
            optimizer.zero_grad()
            model(torch.randn(balancer.samples, 6)).square().mean().backward()
            optimizer.step()
            if step % 5 == 4:
                with torch.inference_mode():
                    optimizer.merge(model)
        optimizer.merge()

    World(2).run(program)


def test_sparse_buffers_are_left_as_they_are_by_a_merge():
    prototype = nn.Linear(6, 3)
    prototype.register_buffer("adjacency", torch.eye(4).to_sparse())

    def program(engine):
        balancer, model = hvd.Balancer(8, engine=engine), copy.deepcopy(prototype)
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), balancer=balancer)
        optimizer.merge(model)
        return model.adjacency.to_dense()

    for found in World(2).run(program):
        assert found.equal(torch.eye(4))


def stored(kinds):
    """Parameters of these types, of which the last one is not laid out in order, and what holds them."""
    torch.manual_seed(0)
    parameters = [nn.Parameter(torch.randn(3, 4).to(kind)) for kind in kinds]
    parameters.append(nn.Parameter(torch.randn(5, 2).to(kinds[0]).t()))
    return parameters, ParameterStore(parameters)


@pytest.mark.parametrize("kinds", [[torch.float64], [torch.float32], [torch.bfloat16], [torch.float32, torch.bfloat16]])
def test_parameters_are_read_written_and_moved_as_one_array(kinds):
    parameters, store = stored(kinds)
    before = [p.detach().clone() for p in parameters]
    flat = store.read(0)
    assert (flat == torch.cat([p.reshape(-1).to(flat.dtype) for p in before])).all()
    assert (store.read(0, torch.zeros_like(flat)) == flat).all()
    by = torch.randn_like(flat)
    parts = by.clone().split([p.numel() for p in parameters])
    store.shift(0, by)
    for p, old, part in zip(parameters, before, parts, strict=True):
        assert (p == (old.to(flat.dtype) + part.view(p.shape)).to(p.dtype)).all()
    store.write(0, flat)
    assert all((p == old).all() for p, old in zip(parameters, before, strict=True))


def test_arrays_that_come_after_others_are_not_taken_for_them():
    """Views of arrays are kept, also in a copy of what keeps them; each array is read and written as it is."""
    parameters, store = stored([torch.float32])
    for number in range(20):
        flat = torch.full_like(store.read(0), float(number))
        store.write(0, flat)
        assert all((p == number).all() for p in parameters)
        del flat  # whose memory the next one would have
    memory = bytearray(4 * len(store.read(0)))
    store.write(0, torch.frombuffer(memory, dtype=torch.float32))
    another = copy.deepcopy(store)
    del store
    another.write(0, torch.frombuffer(memory, dtype=torch.float32).fill_(3.0))
    assert (another.read(0) == 3.0).all() and all((p == 0.0).all() for p in parameters)


class Coded(torch.optim.Optimizer):
    """A momentum of 8 bits, with a scale, and a count of its own: as bitsandbytes and torchao keep theirs."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure=None):
        for p in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            state = self.state[p]
            if not state:
                state.update(codes=torch.zeros(p.shape, dtype=torch.int8), scale=torch.zeros(()), times=0)
            state["times"] += 1
            momentum = 0.9 * state["codes"] * state["scale"] + p.grad
            state["scale"] = momentum.abs().max().float() / 127
            state["codes"] = (momentum / state["scale"].clamp_min(1e-20)).round().to(torch.int8)
            p.sub_(momentum, alpha=0.1 / state["times"] ** 0.5)


def after_local_steps(kind, shares):
    """Trains on two ranks, at last in synchronous steps. Returns the parameters, the optimizer and its first group's
    "norm" as it was made, of each rank."""
    generator = torch.Generator().manual_seed(0)
    x, prototype = torch.randn(8, 6, generator=generator), nn.Linear(6, 2)

    def program(engine):
        model = copy.deepcopy(prototype)
        balancer = hvd.Balancer(8, engine=engine, shares=shares, adaptive=False, min_share=0)
        optimizer = hvd.DistributedOptimizer(
            kind(model.parameters()), balancer=balancer, strategy=hvd.LocalSGD(round_steps=2, warmup_steps=0)
        )
        optimizer._reducer.local.steps._phase = lambda step: step < 8
        norm = optimizer.param_groups[0].get("norm")
        mine = slice(0, shares[0]) if engine.rank == 0 else slice(shares[0], 8)
        for _ in range(12):
            balancer.begin(shares[engine.rank])
            optimizer.zero_grad()
            if shares[engine.rank]:
                model(x[mine]).square().mean().backward()
            optimizer.step()
        return torch.cat([p.detach().reshape(-1) for p in model.parameters()]), optimizer, norm

    return World(2).run(program)


@pytest.mark.parametrize("shares", [(5, 3), (8, 0)])
def test_codes_of_8_bits_are_alike_where_ranks_come_together(shares):
    """Nobody can take means of them; synchronous steps with those of each rank would part the ranks."""
    (first, *_), (second, *_) = after_local_steps(Coded, shares)
    assert torch.equal(first, second)


class Estimating(torch.optim.Optimizer):
    """Keeps in its group what it estimates from gradients, as Prodigy and D-Adaptation keep their rates."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.1, "d": 0.0, "norm": torch.zeros(()), "betas": (0.9, 0.9), "rule": max})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            found = [p for p in group["params"] if p.grad is not None]
            group["norm"].add_(sum(p.grad.square().sum() for p in found))
            group["d"] = group["rule"](group["d"], float(group["norm"]) ** 0.5)
            group["betas"] = (group["d"], 0.9)
            for p in found:
                p.sub_(p.grad, alpha=group["lr"] * group["d"] / (1 + group["norm"].item()))


@pytest.mark.parametrize("shares", [(5, 3), (8, 0)])
def test_what_an_optimizer_keeps_in_its_groups_is_alike_where_ranks_come_together(shares):
    held = []
    for parameters, optimizer, norm in after_local_steps(Estimating, shares):
        group = optimizer.param_groups[0]
        assert group["norm"] is norm
        held.append((parameters.tolist(), group["d"], float(norm), group["betas"]))
    assert held[0] == held[1]


@pytest.mark.parametrize("strategy", [hvd.LocalSGD(warmup_steps=0), hvd.LocalSGD(), "auto", "synchronous"])
def test_statistics_of_a_second_model_and_after_synchronous_steps_are_of_as_many_rows(strategy):
    """As of averaged weights (`update_bn`), after merge(model) has used up the samples that were counted."""
    x = torch.randn(64, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    x[:, 0] += torch.arange(64) % 8  # the second rank's rows are others
    prototype = nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 1)).double()

    def program(engine):
        model = copy.deepcopy(prototype)
        balancer = hvd.Balancer(8, engine=engine, shares=(6, 2), adaptive=False)
        data = torch.utils.data.TensorDataset(x)
        loader = hvd.BalancedDataLoader(data, balancer=balancer, shuffle=False)
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.01), balancer=balancer, strategy=strategy
        )
        for (rows,) in loader:
            optimizer.zero_grad()
            model(rows).square().mean().backward()
            optimizer.step()
        averaged = torch.optim.swa_utils.AveragedModel(model)
        optimizer.merge(model)
        torch.optim.swa_utils.update_bn(loader, averaged)
        optimizer.merge(averaged)
        return averaged.module[0].running_mean

    for found in World(2).run(program):
        torch.testing.assert_close(found, x.mean(0))


class Thing:
    """What nothing can save."""


@pytest.mark.parametrize(("kept", "expected"), [
    ({"scale": 1.0, "ready": True}, 0.5), ({"thing": Thing()}, 0.5), ({"scale": "unlike"}, 1.0),
])
def test_moments_are_means_unless_what_is_kept_beside_them_differs(kept, expected):
    def program(engine):
        parameter = nn.Parameter(torch.zeros(2))
        optimizer = torch.optim.SGD([parameter], lr=0.1)
        beside = {key: float(engine.rank) if value == "unlike" else value for key, value in kept.items()}
        moment = nn.Parameter(torch.full((2,), float(engine.rank)), requires_grad=False)
        optimizer.state[parameter] = {"momentum_buffer": moment, **beside}
        average_state(optimizer, weight=1.0 + 1e-9 * engine.rank, engine=engine, name="state")
        state = optimizer.state[parameter]
        return state["momentum_buffer"].tolist(), state.get("scale")

    for moment, scale in World(2).run(program):
        assert moment == pytest.approx([expected] * 2) and scale in (kept.get("scale"), 1.0)


@pytest.mark.parametrize("kind", [torch.complex64, torch.complex128])
@pytest.mark.parametrize("sparse", [False, True])
def test_complex_moments_become_means_also_on_a_rank_that_has_none(kind, sparse):
    """As of an optimizer that keeps what it has of its gradients by their frequencies."""

    def program(engine):
        parameter = nn.Parameter(torch.zeros(2))
        optimizer = torch.optim.SGD([parameter], lr=0.1)
        spectrum = torch.tensor([0.0, 1 + 4j * engine.rank], dtype=kind)
        if engine.rank < 2:
            optimizer.state[parameter] = {"spectrum": spectrum.to_sparse() if sparse else spectrum}
        average_state(optimizer, weight=(1.0, 3.0, 0.0)[engine.rank], engine=engine, name="state")
        found = optimizer.state[parameter]["spectrum"]
        assert found.is_sparse == (sparse and engine.rank < 2)
        return found.to_dense().tolist(), found.dtype

    assert World(3).run(program) == [([0.0, 1 + 3j], kind)] * 3


def test_a_rank_that_has_none_gets_it_on_the_device_where_the_others_have_theirs(monkeypatch):
    """A fused optimizer takes no count of steps on the host for parameters on a GPU, another one does."""
    monkeypatch.setattr(merged_state, "merge_statistics", lambda *arguments, **options: None)

    def program(engine):
        with FakeTensorMode():
            parameter = nn.Parameter(torch.zeros(2, device="cuda"))
            optimizer = torch.optim.SGD([parameter], lr=0.1)
            if engine.rank == 0:
                there, here = torch.zeros((), device="cuda"), torch.zeros(())
                optimizer.state[parameter] = {"step": there, "scale": here, "moment": torch.zeros_like(parameter)}
            average_state(optimizer, weight=1.0, engine=engine, name="state")
            return {key: value.device.type for key, value in optimizer.state[parameter].items()}

    assert World(2).run(program) == [{"step": "cuda", "scale": "cpu", "moment": "cuda"}] * 2


@pytest.mark.parametrize("piece_bytes", [24, 1 << 24])
def test_moments_of_any_type_and_layout_become_means_in_pieces(monkeypatch, piece_bytes):
    monkeypatch.setattr(payload, "PIECE_BYTES", piece_bytes)
    kinds = (torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.complex64)

    def program(engine):
        parameters = [nn.Parameter(torch.zeros(2, 3, 2, 2)) for _ in kinds]
        optimizer = torch.optim.SGD(parameters, lr=0.1)
        for parameter, kind in zip(parameters, kinds, strict=True):
            moment = torch.arange(24.0).reshape(2, 3, 2, 2).to(kind).to(memory_format=torch.channels_last)
            rest = {"scale": torch.tensor(float(engine.rank)), "step": torch.tensor(2.0 + engine.rank)}
            optimizer.state[parameter] = {"momentum_buffer": moment * 4 * engine.rank, **rest}
        strides = [optimizer.state[p]["momentum_buffer"].stride() for p in parameters]
        average_state(optimizer, weight=3.0 - 2 * engine.rank, engine=engine, name="state")
        for parameter, kind, stride in zip(parameters, kinds, strides, strict=True):
            state = optimizer.state[parameter]
            moment = state["momentum_buffer"]
            assert moment.dtype == kind and moment.stride() == stride
            assert moment.flatten().tolist() == list(range(24)) and state["scale"] == 0.25 and state["step"] == 3

    World(2).run(program, timeout_s=10)


@pytest.mark.parametrize("value", [complex(1.0, float("nan")), complex(float("inf"), 1.0)])
def test_complex_moments_that_are_not_finite_are_found(value):
    dense = torch.tensor([0.0, 1j])
    assert all_finite([dense, [dense.to_sparse()]])
    bad = torch.tensor([0.0, value])
    assert not all_finite([dense, bad]) and not all_finite([dense, (bad.to_sparse(),)])
