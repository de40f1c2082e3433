"""One real rank of tests/test_horovod.py: runs the named checks in turn and prints `OK name` for each that holds."""

from __future__ import annotations

import copy
import functools
import hashlib
import itertools
import sys
import threading
import time
from pathlib import Path

import horovod.torch as plain
import torch
from checks import expect, run_checks
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

import hvd_hetero.torch as hvd

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from contract import check_engine

from hvd_hetero.engine import environment, payload
from hvd_hetero.engine.build import installed_build
from hvd_hetero.engine.horovod import HorovodEngine

WHOLE = 24
UNEVEN = {1: (24,), 2: (19, 5), 3: (17, 7, 0), 4: (13, 8, 2, 1)}


def make_model(dtype):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 4)).to(dtype)


def make_data(dtype, steps=1):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(steps, WHOLE, 6, generator=generator, dtype=torch.float64).to(dtype)
    return x, torch.randint(0, 4, (steps, WHOLE), generator=generator)


def block(shares, rank):
    start = sum(shares[:rank])
    return slice(start, start + shares[rank])


def spread(tensors):
    """0.0 when all ranks hold the same bits."""
    flat = torch.cat([t.detach().double().reshape(-1) for t in tensors])
    high, low = flat.clone(), flat.clone()
    hvd.allreduce_(high, op=hvd.Max, name="spread.max")
    hvd.allreduce_(low, op=hvd.Min, name="spread.min")
    return (high - low).abs().max().item()


def law_contract():
    check_engine(HorovodEngine(), lambda values: torch.tensor(values, dtype=torch.float64))


def record_tells_the_truth():
    """What launches read instead of loading a framework."""
    for name, said in (installed_build() or {}).get("built", {}).items():
        assert bool(getattr(hvd, name)()) == bool(said), name


def law_2_gradient():
    for dtype, bound in ((torch.float64, 1e-12), (torch.float32, 1e-6)):
        x, y = (each[0] for each in make_data(dtype))
        one = make_model(dtype)
        nn.functional.cross_entropy(one(x), y).backward()
        model, shares = make_model(dtype), UNEVEN[hvd.size()]
        balancer = hvd.Balancer(WHOLE, min_share=0, shares=shares)
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), balancer=balancer)
        mine = block(shares, hvd.rank())
        balancer.begin(shares[hvd.rank()])
        nn.functional.cross_entropy(model(x[mine]), y[mine]).backward()
        optimizer.synchronize()
        for p, q in zip(model.parameters(), one.parameters(), strict=True):
            error = (p.grad - q.grad).abs().max() / q.grad.abs().max()
            assert error <= bound, (dtype, error)
        assert spread([p.grad for p in model.parameters()]) == 0.0


def law_2_sparse_gradients():
    """From the second step on rows alone travel; in the third there are none, and one of three ranks has no sample."""
    torch.manual_seed(0)
    one = nn.EmbeddingBag(1000, 3, sparse=True, mode="sum", dtype=torch.float64)
    shares, words = UNEVEN[hvd.size()], torch.randint(0, 15, (WHOLE, 2))
    hvd.broadcast_(words, root_rank=0, name="words")
    hvd.broadcast_parameters(one.state_dict(), root_rank=0)
    model, mine = copy.deepcopy(one), block(shares, hvd.rank())
    balancer = hvd.Balancer(WHOLE, min_share=0, shares=shares)
    alone, optimizer = (torch.optim.SGD(each.parameters(), lr=0.1) for each in (one, model))
    optimizer = hvd.DistributedOptimizer(optimizer, balancer=balancer)
    sent = []
    for step in range(5):
        if step != 2:
            alone.zero_grad()
            one(words + step).square().sum(1).mean().backward()
            alone.step()
        balancer.begin(shares[hvd.rank()])
        optimizer.zero_grad()
        if step != 2 and shares[hvd.rank()]:
            model(words[mine] + step).square().sum(1).mean().backward()
        optimizer.synchronize()
        sent.append(optimizer._reducer.bytes_sent)
        optimizer.step()
        assert (one.weight - model.weight).abs().max() <= 1e-12 and model.weight.grad.is_sparse, step
        assert spread([model.weight]) == 0.0, step
    assert sent[0] >= 24_000 and max(sent[1:]) <= 15 * 32 and sent[2] == 0, sent


def law_2_contrastive_losses():
    """Over the samples of all ranks: computed whole on each rank, or each for its own rows against those of all. The
    loss has a parameter of its own, which does not come out of a gather."""
    (x,), _ = make_data(torch.float64)
    shares = UNEVEN[hvd.size()]
    mine, rows = block(shares, hvd.rank()), torch.arange(WHOLE)

    def with_temperature():
        return nn.ModuleList([make_model(torch.float64), nn.Linear(1, 1, bias=False).double()])

    def likeness(queries, keys, temperature):
        return (queries @ keys.t()) * temperature.weight

    def gathered(embeddings):
        every = hvd.allgather(embeddings)
        every.register_hook(lambda gradient: gradient * hvd.size())
        return every

    torch.manual_seed(0)
    one = with_temperature()
    nn.functional.cross_entropy(likeness(one[0](x), one[0](-x), one[1]), rows).backward()
    for whole in (True, False):
        model = copy.deepcopy(one)
        model.zero_grad()
        balancer = hvd.Balancer(WHOLE, min_share=0, shares=shares)
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), balancer=balancer)
        balancer.begin(shares[hvd.rank()])
        queries, every = model[0](x[mine]), gathered(model[0](-x[mine]))
        balancer.count(1)
        if whole:
            loss = nn.functional.cross_entropy(likeness(gathered(queries), every, model[1]), rows)
        else:
            found = likeness(queries, every, model[1])
            loss = nn.functional.cross_entropy(found, rows[mine], reduction="sum") / WHOLE * hvd.size()
        loss.backward()
        optimizer.step()
        for p, q in zip(model.parameters(), one.parameters(), strict=True):
            assert (p.grad - q.grad).abs().max() <= 1e-12 * q.grad.abs().max(), whole


def law_1_identical_to_plain_horovod():
    """Equal shares, 50 steps: the same bits as horovod.torch alone."""
    for make in (
        lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9, weight_decay=1e-3),
        lambda ps: torch.optim.AdamW(ps, lr=1e-2),
    ):
        x, y = make_data(torch.float32, steps=50)
        shares = (WHOLE // hvd.size(),) * hvd.size()
        mine = block(shares, hvd.rank())
        ours, theirs = make_model(torch.float32), make_model(torch.float32)
        balancer = hvd.Balancer(WHOLE, shares=shares, adaptive=False)
        our = hvd.DistributedOptimizer(make(ours.parameters()), ours.named_parameters(), balancer=balancer)
        their = plain.DistributedOptimizer(make(theirs.parameters()), theirs.named_parameters())
        for step in range(50):
            balancer.begin(len(x[step, mine]))
            for model, optimizer in ((ours, our), (theirs, their)):
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(x[step, mine]), y[step, mine]).backward()
                optimizer.step()
        for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
            assert torch.equal(p, q), (p - q).abs().max()


class Numbers(torch.utils.data.Dataset):  # here, so that worker processes may be started in any way
    def __len__(self):
        return 500

    def __getitem__(self, index):
        return torch.tensor([float(index)]), index


class Shuffled(torch.utils.data.IterableDataset):
    """Those, as a stream which shuffles as it is read; half of them from each of two processes that load."""

    def __iter__(self):
        worker = torch.utils.data.get_worker_info()
        order = torch.randperm(len(Numbers())).tolist()
        return map(Numbers().__getitem__, order if worker is None else range(worker.id, len(order), 2))


def law_4_every_sample_once():
    """Ranks of unequal speed, plans that change, workers that load ahead: each sample exactly once an epoch."""

    class Counted:
        """A stopwatch of counted samples: rank 0 is four times slower, however busy this machine is.

        So long, that what loading takes here, by the clock on the wall, is nothing beside it.
        """

        now_s = 0.0

        def mark(self):
            return self.now_s

        def passed(self, mark):
            return True

        def seconds(self, start, end):
            return end - start

    for data, workers in ((Numbers(), 0), (Numbers(), 2), (Shuffled(), 0), (Shuffled(), 2)):
        torch.manual_seed(0)
        model = nn.Linear(1, 1)
        balancer, clock = hvd.Balancer(WHOLE), Counted()
        loader = hvd.BalancedDataLoader(data, balancer=balancer, num_workers=workers)
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1e-9), balancer=balancer)
        balancer.step_timer.measure_with(clock)
        seen = torch.zeros(3, len(Numbers()))
        for epoch in range(3):
            loader.set_epoch(epoch)
            for x, index in loader:
                seen[epoch, index] += 1
                torch.rand(1 + hvd.rank())  # ranks draw unlike numbers
                optimizer.zero_grad()
                clock.now_s += len(index) * (0.5 if hvd.rank() else 2.0)
                model(x).sum().backward()
                optimizer.step()
        case = f"{type(data).__name__}.{workers}"
        hvd.allreduce_(seen, op=hvd.Sum, name=f"seen.{case}")
        assert torch.equal(seen, torch.ones_like(seen)), seen.unique()
        assert len(balancer.plans) > 1, "no plan was made: the test shows nothing"
        first = balancer.plans[-1].shares
        assert first[0] < min(first[1:]), f"the slow rank 0 should have least: {first}"
        plans = [(plan.version, plan.step, *plan.shares) for plan in balancer.plans]
        assert len(set(hvd.allgather_object(str(plans), name=f"plans.{case}"))) == 1


def objects_of_any_type():
    """Horovod's own wait for ever where ranks pass unlike ones without a name."""
    mine = {"rank": 0} if hvd.rank() == 0 else None
    assert hvd.broadcast_object(mine) == {"rank": 0}
    assert hvd.allgather_object(mine) == [{"rank": 0}] + [None] * (hvd.size() - 1)


def objects_in_pieces():
    """What is longer than one operation should be."""
    whole, payload.PIECE_BYTES = payload.PIECE_BYTES, 1000
    try:
        for number in (0, 1, 1000):
            mine = {"rank": hvd.rank(), "values": list(range(number))}
            assert hvd.broadcast_object(mine, root_rank=1) == {**mine, "rank": 1}
            every = [{"rank": rank, "values": list(range(number * rank))} for rank in range(hvd.size())]
            assert hvd.allgather_object(every[hvd.rank()]) == every
        for lengths in ((1001, 1500, 1001), (10, 1001, 10), (2001, 1000, 2001)):
            array = torch.zeros(lengths[hvd.rank()], dtype=torch.uint8).numpy()
            engine = HorovodEngine()
            expect(
                "Mismatched",
                lambda array=array, engine=engine: payload.broadcast_in_pieces(engine, array, root=0, name="unlike"),
                kind=engine.failure,
            )
    finally:
        payload.PIECE_BYTES = whole
    expect("root_rank: expected one of", lambda: hvd.broadcast_object(None, root_rank=hvd.size()))


def law_5_bfloat16_and_broadcast():
    model = make_model(torch.bfloat16)
    if hvd.rank():
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(0.0)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    assert spread(model.parameters()) == 0.0 and model[0].weight.abs().max() > 0
    x, y = (each[0] for each in make_data(torch.bfloat16))
    for balancer in (hvd.Balancer(WHOLE), None):
        optimizer = hvd.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-3), balancer=balancer)
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)
        for _ in range(3):
            mine = block((WHOLE // hvd.size(),) * hvd.size(), hvd.rank())
            optimizer.zero_grad(set_to_none=False)
            if balancer:
                balancer.begin(WHOLE // hvd.size())
            nn.functional.cross_entropy(model(x[mine]).float(), y[mine]).backward()
            optimizer.step()
        assert spread(model.parameters()) == 0.0
        model = make_model(torch.bfloat16)
    kinds = (torch.bool, torch.complex64, torch.uint16, torch.bfloat16)
    own = [torch.full((2, 3), hvd.rank(), dtype=kind) for kind in kinds]
    own += [torch.arange(6.0).view(2, 3).t() + hvd.rank(), torch.tensor(hvd.rank() == 1)]
    own += [torch.full((2,), 1j * hvd.rank()).conj(), torch.full((2,), 1j * hvd.rank()).conj().imag]  # views, negated
    hvd.broadcast_parameters(own, root_rank=1)
    for received, kind in zip(own, kinds, strict=False):
        assert received.dtype == kind and (received.to(torch.complex64) == 1).all()
    assert torch.equal(own[4], torch.arange(6.0).view(2, 3).t() + 1) and own[5].item() is True
    sparse = torch.eye(3) * (hvd.rank() + 1)
    made_of_several = {"edges": sparse.to_sparse(), "rows": sparse.to_sparse_csr(), "codes": TwoTensor(sparse, -sparse)}
    hvd.broadcast_parameters({name: tensor.detach() for name, tensor in made_of_several.items()}, root_rank=1)
    edges, rows, codes = made_of_several.values()
    for received in (edges.to_dense(), rows.to_dense(), codes.a, -codes.b):
        assert torch.equal(received, 2 * torch.eye(3)), "as state_dict() gives them, the same memory"
    assert own[6].tolist() == [-1j, -1j] and own[7].tolist() == [-1.0, -1.0]
    linear = nn.Linear(2, 2)
    nn.init.constant_(linear.weight, hvd.rank())
    hvd.broadcast_parameters(linear.parameters(), root_rank=1)
    assert (linear.weight == 1).all()
    table = nn.Embedding(4, 2, sparse=True)
    optimizer = torch.optim.SparseAdam(table.parameters(), lr=0.1)
    if hvd.rank() == 0:
        table(torch.tensor([1])).sum().backward()
        optimizer.step()
    hvd.broadcast_optimizer_state(optimizer, root_rank=0, model=table)
    assert optimizer.state[table.weight]["exp_avg"].shape == (4, 2)
    assert optimizer.state[table.weight]["exp_avg"][1, 0] > 0 and optimizer.state[table.weight]["step"] == 1
    table = nn.Embedding(30, 2, sparse=True)
    optimizer = torch.optim.SGD(table.parameters(), lr=0.1, momentum=0.9)
    if hvd.rank() == 0:
        table(torch.tensor([1])).sum().backward()
        optimizer.step()
    hvd.elastic.TorchState(table, optimizer).sync()
    momentum = optimizer.state[table.weight]["momentum_buffer"]
    assert momentum.is_sparse and momentum.to_dense().sum() == 2.0


def law_5_a_state_that_is_no_tensor():
    """What `get_extra_state()` returns goes to all ranks with the rest of a job's state."""

    class Counting(nn.Linear):
        seen: object = None

        def get_extra_state(self):
            return {"seen": self.seen}

        def set_extra_state(self, state):
            self.seen = state["seen"]

    model = Counting(2, 1)
    nn.init.constant_(model.weight, float(hvd.rank()))
    model.seen = f"rank {hvd.rank()}"
    hvd.elastic.TorchState(model).sync()
    assert model.seen == "rank 0" and not model.weight.any()


def law_5_what_rank_0_alone_has_loaded():
    """The state of an optimizer with weight decay travels, and moves no parameter: Horovod's own makes a step."""
    kinds = (
        lambda ps: torch.optim.AdamW(ps, lr=0.01, weight_decay=0.1),
        lambda ps: torch.optim.SGD([{"params": ps}], lr=0.01, momentum=0.9, weight_decay=0.1),
    )
    for kind, loads_first, balancer in itertools.product(kinds, (True, False), (None, hvd.Balancer(WHOLE))):
        model = make_model(torch.float32)
        earlier = kind(list(model.parameters()))
        model(torch.ones(2, 6)).sum().backward()
        earlier.step()
        optimizer = inner = kind(list(model.parameters()))
        if not loads_first:
            optimizer = hvd.DistributedOptimizer(inner, balancer=balancer)
        if hvd.rank() == 0:
            inner.param_groups[0]["initial_lr"] = 0.02  # as a scheduler leaves it, and no other rank has it
            optimizer.load_state_dict(earlier.state_dict())
            optimizer.param_groups[0]["lr"] = 0.005
        if loads_first:
            optimizer = hvd.DistributedOptimizer(inner, balancer=balancer)
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        before, groups = [p.detach().clone() for p in model.parameters()], [*optimizer.param_groups]
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)
        assert all(torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))
        assert all(mine is old for mine, old in zip(optimizer.param_groups, groups, strict=True)), "others share them"
        assert optimizer.param_groups[0]["lr"] == 0.005
        for _ in range(3):
            optimizer.zero_grad()
            if balancer:
                balancer.begin(WHOLE // hvd.size())
            model(torch.full((2, 6), 1.0 + hvd.rank())).sum().backward()
            optimizer.step()
        moments = [value for p in model.parameters() for key, value in optimizer.state[p].items() if key != "step"]
        assert len(moments) >= 4 and spread([*model.parameters(), *moments]) == 0.0


def law_5_a_state_of_other_types_than_the_parameters():
    """PyTorch's load_state_dict would round it."""
    model = make_model(torch.bfloat16)
    optimizer = torch.optim.NAdam(model.parameters(), lr=1e-3)
    for _ in range(3 if hvd.rank() == 0 else 0):
        model(torch.ones(2, 6, dtype=torch.bfloat16)).sum().backward()
        optimizer.step()

    def held():
        return [{key: (value.dtype, value.tolist()) for key, value in optimizer.state[p].items()}
                for p in model.parameters()]

    mine, state = held(), hvd.elastic.TorchState(model, optimizer)
    broadcast = functools.partial(hvd.broadcast_optimizer_state, optimizer, root_rank=0)
    for how in (state.sync, state.restore, broadcast):
        how()
        every = hvd.allgather_object((mine, held()))
        assert all(got == every[0][0] for _, got in every) and held()[0]["mu_product"][0] == torch.float32


def law_5_memory_formats():
    """What is broadcast need not be contiguous, and keeps its format."""
    torch.manual_seed(hvd.rank())
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(4, 2)).to(memory_format=torch.channels_last)
    assert not model[0].weight.is_contiguous()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(1, 3, 3, 3)).sum().backward()
    optimizer.step()
    expected = hvd.broadcast(model[0].weight.detach().contiguous(), 0, name="first")
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    assert torch.equal(model[0].weight, expected)
    assert model[0].weight.is_contiguous(memory_format=torch.channels_last)
    state = hvd.elastic.TorchState(model, optimizer, epoch=hvd.rank())
    state.sync()
    assert state.epoch == 0 and spread(model.parameters()) == 0.0
    assert spread(optimizer.state[p]["momentum_buffer"] for p in model.parameters()) == 0.0


def law_5_the_memory_format_of_states():
    """By which fused optimizers go: a rank that receives a state gets it in that of the parameter."""
    torch.manual_seed(0)
    layers = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3, groups=8)  # and one of which an axis has length 1
    model = nn.Sequential(*layers).to(memory_format=torch.channels_last)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1, fused=True)
    x = torch.randn(2, 3, 6, 6)
    if hvd.rank() == 0:
        model(x).mean().backward()
        optimizer.step()
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    for layer in model:
        assert optimizer.state[layer.weight]["exp_avg"].stride() == layer.weight.stride()
    for _ in range(2):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    assert spread(model.parameters()) == 0.0


def a_compiled_model_with_sync_batch_norm_is_one_without_compiling():
    torch.manual_seed(0)
    eager, other = (nn.Sequential(nn.Linear(3, 4), hvd.SyncBatchNorm(4)).double() for _ in range(2))
    other.load_state_dict(eager.state_dict())
    x = torch.randn(3 + hvd.rank(), 3, dtype=torch.float64)
    for model in (eager, torch.compile(other, backend="aot_eager")):
        for _ in range(3):  # the first call finds the ranks, and others are compiled otherwise
            model(x).pow(3).sum().backward()
    for p, q in zip(eager.parameters(), other.parameters(), strict=True):
        assert torch.allclose(p.grad, q.grad, rtol=0, atol=1e-12)
    assert torch.equal(eager[1].running_var, other[1].running_var)


class OfApex(torch.optim.SGD):
    """Its `zero_grad` has no argument, as that of others' optimizers."""

    def zero_grad(self):
        super().zero_grad(set_to_none=False)


def optimizers_as_others_write_them():
    """Horovod's own calls `zero_grad()` as it is called; and one that was Horovod's own can get a balancer."""
    model = make_model(torch.float32)
    inner = OfApex(model.parameters(), lr=0.1)
    balancer = hvd.Balancer(WHOLE)
    for options in ({}, {}, {"balancer": balancer}):
        optimizer = hvd.DistributedOptimizer(inner, model.named_parameters(), **options)
        for _ in range(3):
            if options:
                balancer.begin(balancer.share)
            optimizer.zero_grad()
            assert not any(p.grad is not None and p.grad.any() for p in model.parameters())
            loss = model(torch.ones(3, 6)).square().mean()  # whose graph is still there when the next optimizer is made
            loss.backward(retain_graph=True)
            optimizer.step()
    assert spread(model.parameters()) == 0.0


def closures_and_hooks_without_a_balancer_see_reduced_gradients():
    """Ranks with equal batches train as one process does: by closures, which a rank may leave without a loss, and with
    a hook of the step that clips, also where the script waits for gradients itself."""

    def train(make, parts, *, hook=False, waits=False, leaves=False):
        model, (x, y) = make_model(torch.float64), make_data(torch.float64, steps=4)
        optimizer, calls = make(model.parameters()), []
        if parts > 1:
            optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
        mine = block((WHOLE // parts,) * parts, hvd.rank() % parts)

        def clip(*_):
            calls.append(nn.utils.clip_grad_norm_(model.parameters(), 0.1))

        if hook:
            optimizer.register_step_pre_hook(clip)
        for step in range(4):

            def closure():
                optimizer.zero_grad()
                if leaves and hvd.rank() % parts:
                    return None
                loss = nn.functional.cross_entropy(model(x[step, mine]), y[step, mine])  # noqa: B023
                loss.backward()
                if waits and parts > 1:
                    optimizer.synchronize()
                if waits:
                    clip()
                return loss

            if hook:
                closure()
            optimizer.step(None if hook else closure)
        assert len(calls) == 4 * (hook or waits), len(calls)
        return model

    def by_sgd(parameters):
        return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)

    def by_lbfgs(parameters):
        return torch.optim.LBFGS(parameters, lr=0.5, max_iter=3, line_search_fn="strong_wolfe")

    for make, options in ((by_sgd, {}), (by_sgd, {"hook": True}), (by_sgd, {"waits": True}), (by_lbfgs, {})):
        found, expected = train(make, hvd.size(), **options), train(make, 1, **options)
        for p, q in zip(found.parameters(), expected.parameters(), strict=True):
            assert (p - q).abs().max() <= 1e-9, (options, (p - q).abs().max())
    assert spread(train(by_lbfgs, hvd.size(), leaves=True).parameters()) == 0.0


def parameters_that_come_later_without_a_balancer_are_reduced():
    """A frozen layer is thawed, and another one is added; with groups and accumulation as well."""

    def train(parts, passes=1, **options):
        model, (x, y) = make_model(torch.float64), make_data(torch.float64, steps=8)
        model[0].requires_grad_(False)
        optimizer = torch.optim.SGD([*model[0].parameters(), *model[2].parameters()], lr=0.1, momentum=0.9)
        if parts > 1:
            named = [*model[0].named_parameters("0"), *model[2].named_parameters("2")]
            optimizer = hvd.DistributedOptimizer(optimizer, named, backward_passes_per_step=passes, **options)
        mine = block((WHOLE // parts,) * parts, hvd.rank() % parts)
        for step in range(8):
            if step == 2:
                model[0].requires_grad_(True)
            if step == 4:
                optimizer.add_param_group({"params": model[4].parameters()})
            nn.functional.cross_entropy(model(x[step, mine]), y[step, mine]).backward()
            if step % passes == passes - 1:
                optimizer.step()
                model.zero_grad()
        return model

    for options in ({}, {"num_groups": 2}, {"passes": 2}):
        found, expected = train(hvd.size(), **options), train(1, passes=options.get("passes", 1))
        for p, q in zip(found.parameters(), expected.parameters(), strict=True):
            assert (p - q).abs().max() <= 1e-12, (options, (p - q).abs().max())


def nan_on_one_rank_is_seen_by_all():
    model = make_model(torch.float32)
    balancer = hvd.Balancer(WHOLE)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), balancer=balancer)
    balancer.begin(3)
    loss = model(torch.ones(3, 6)).sum()
    (loss * float("nan") if hvd.rank() == 1 else loss).backward()
    assert all(p.grad.isnan().all() for p in model.parameters())
    optimizer.zero_grad()
    balancer.begin(3)  # and the next step is clean
    model(torch.ones(3, 6)).sum().backward()
    assert not any(p.grad.isnan().any() for p in model.parameters())


def waiting_does_not_spin():
    """Not the thread that waits; and no other one, or the engine says so: MPI's does."""
    tensor = torch.zeros(1)
    hvd.barrier()
    if hvd.rank() == 0:
        time.sleep(1.0)
    before, before_all = time.thread_time(), time.process_time()
    handle = hvd.allreduce_async_(tensor, name="late")
    hvd.synchronize(handle)
    own_s, all_s = time.thread_time() - before, time.process_time() - before_all
    assert own_s < 0.25, own_s
    spins = HorovodEngine().spins
    assert spins == hvd.mpi_enabled() and (spins or all_s < 0.5), (spins, all_s)


def the_threads_that_serve_are_known():
    """Horovod's, and the one that made the engine; not those of a pool, which may spin."""
    engine, big, digest = HorovodEngine(), torch.ones(1 << 24), threading.Thread(target=hash_for_a_while)
    hvd.allreduce(big, name="connected")
    for work, serves in (
        (lambda: hvd.allreduce(big, name="served"), True), (hash_for_a_while, True), (digest.start, False)
    ):  # fmt: skip
        before_s, before_all_s = engine.serving_s(), time.process_time()
        work()
        if not serves:
            digest.join()
        served_s, all_s = engine.serving_s() - before_s, time.process_time() - before_all_s
        served = engine.spins or (served_s > all_s / 2) == serves  # a thread that spins may do so at any time
        assert all_s > 0.01 and served, (serves, served_s, all_s)


def hash_for_a_while():
    for _ in range(8):
        hashlib.sha256(bytes(1 << 24))


def errors_on_every_rank():
    expect("global_batch_size: expected the same", lambda: hvd.Balancer(WHOLE + hvd.rank()))
    expect("expected at least", lambda: hvd.Balancer(1))
    expect("memory", lambda: hvd.Balancer(WHOLE, shares=(WHOLE - 1, 1, 0)[: hvd.size()], max_share=4, min_share=0))
    expect("hold", lambda: hvd.Balancer(WHOLE, max_share=2))
    data = torch.utils.data.TensorDataset(torch.zeros(WHOLE - 1, 1))
    balancer = hvd.Balancer(WHOLE)
    expect("drop_last=False", lambda: hvd.BalancedDataLoader(data, balancer=balancer, drop_last=True))


def main() -> None:
    hvd.init()
    torch.set_num_threads(1)
    run_checks(hvd, sys.argv[1:], globals())
    hvd.shutdown()


def initialised_already() -> None:
    """Not for main(): the script has initialised Horovod itself, and waited with it."""
    plain.init()
    plain.allreduce(torch.zeros(1), name="own")
    hvd.init()
    if hvd.rank() == 0:
        time.sleep(1.0)
    before = time.thread_time()
    HorovodEngine().allreduce_async(torch.zeros(1), name="late").wait()
    assert time.thread_time() - before < 0.25, time.thread_time() - before
    if "blocking_wait" in environment.repairs():
        if hvd.rank() == 0:
            time.sleep(1.0)
        before = time.thread_time()
        plain.allreduce(torch.zeros(1), name="own and late")  # by Horovod's own wait
        assert time.thread_time() - before < 0.25, time.thread_time() - before
    print("OK initialised_already", flush=True)


def loader_raises() -> None:
    """Not for main(): rank 1's dataset raises in the third step, and every rank must end; rank 1 first, with the cause,
    though it takes a while, and comes to a collective of which the others know nothing."""
    hvd.init()

    class Bad(torch.utils.data.Dataset):
        def __len__(self):
            return 10 * WHOLE

        def __getitem__(self, index):
            if index >= 2 * WHOLE and hvd.rank() == 1:
                raise OSError("disk on fire")
            return torch.ones(1)

    model = nn.Linear(1, 1)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    balancer = hvd.Balancer(WHOLE)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), balancer=balancer)
    try:
        for x in hvd.BalancedDataLoader(Bad(), balancer=balancer, shuffle=False):
            optimizer.zero_grad()
            model(x).sum().backward()
            optimizer.step()
    finally:
        if hvd.rank() == 1:
            time.sleep(1.0)
            hvd.allreduce(torch.ones(1), name="in_the_end")


if __name__ == "__main__":
    alone = {"loader_raises": loader_raises, "initialised_already": initialised_already}
    alone.get(sys.argv[1], main)()
