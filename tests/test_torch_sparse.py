"""Sparse gradients: those of one process's training, though what travels are the rows that a batch has touched."""

import copy
import threading

import numpy as np
import pytest
import torch
from torch import nn

pytest.importorskip("horovod.torch", reason="build it with hvd-hetero build-horovod")

import hvd_hetero.torch as hvd
from hvd_hetero.engine.local import LocalEngine, World

WHOLE, STEPS, WORDS, WIDTH = 8, 6, 400, 4
SHARES = [(5, 2, 1), (5, 0, 3)]


class Model(nn.Module):
    """Words to the mean of their vectors, to a class."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(WORDS, WIDTH, sparse=True).double()
        self.head = nn.Linear(WIDTH, 3).double()

    def forward(self, words):
        return self.head(self.table(words).mean(1))


def make_batch(step, repeat=True):
    """Words and classes; some words come up in samples of several ranks, and several times in one."""
    generator = torch.Generator().manual_seed(step)
    words = torch.randint(0, 20 if repeat else WORDS, (WHOLE, 3), generator=generator)
    return words, torch.randint(0, 3, (WHOLE,), generator=generator)


def loss_of(model, words, classes):
    return nn.functional.cross_entropy(model(words), classes)


def sgd(model):
    return [torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)]


def adagrad(model):
    return [torch.optim.Adagrad(model.parameters(), lr=0.1)]


def adagrads(model):
    """A rank without a sample comes to the table's first, where the gradients of the head are ready first."""
    return [torch.optim.Adagrad(part.parameters(), lr=0.1) for part in (model.table, model.head)]


def sparse_adam(model):
    return [
        torch.optim.SparseAdam(model.table.parameters(), lr=0.1),
        torch.optim.Adam(model.head.parameters(), lr=0.1),
    ]


def train(engine, make, shares=None, *, steps=STEPS, before=lambda step, model: None, **options):
    """The model, and the balancer, of one rank; of one process where there is no engine."""
    torch.set_num_threads(1)
    model = copy.deepcopy(PROTOTYPE).to(options.pop("dtype", torch.float64))
    optimizers, balancer, mine = make(model), None, slice(None)
    if engine is not None:
        balancer = hvd.Balancer(WHOLE, engine=engine, min_share=0, shares=shares, adaptive=False)
        optimizers = [hvd.DistributedOptimizer(each, balancer=balancer, **options) for each in optimizers]
        begin = sum(shares[: engine.rank])
        mine = slice(begin, begin + shares[engine.rank])
    for step in range(steps):
        before(step, model)
        words, classes = make_batch(step)
        words, classes = words[mine], classes[mine]
        if balancer is not None:
            balancer.begin(len(words))
        for optimizer in optimizers:
            optimizer.zero_grad()
        if len(words):
            loss_of(model, words, classes).backward()
        for optimizer in optimizers:
            optimizer.step()
    return model, balancer, optimizers


PROTOTYPE = Model()


def worst(found, expected):
    pairs = zip(found.parameters(), expected.parameters(), strict=True)
    return max((a.double() - b.double()).abs().max().item() for a, b in pairs)


@pytest.mark.parametrize("make", [sgd, adagrad, adagrads, sparse_adam])
@pytest.mark.parametrize("shares", SHARES)
@pytest.mark.parametrize("options", [{}, {"sparse_as_dense": True}, {"bucket_bytes": 1}])
def test_training_equals_one_process(make, shares, options):
    expected, _, _ = train(None, make)
    found = World(len(shares)).run(lambda engine: train(engine, make, shares, **options)[0], timeout_s=30)
    assert max(worst(model, expected) for model in found) <= 1e-12
    assert all(worst(model, found[0]) == 0.0 for model in found), "law 5"


@pytest.mark.parametrize("options", [{}, {"sparse_as_dense": True}])
def test_a_rank_without_a_sample_leaves_its_first_backward_out(options):
    """And its gradient is sparse all the same, or `SparseAdam` would refuse it."""

    def program(engine):
        table = copy.deepcopy(PROTOTYPE.table)
        balancer = hvd.Balancer(4, engine=engine, min_share=0, shares=(4, 0), adaptive=False)
        optimizer = torch.optim.SparseAdam(table.parameters(), lr=0.1)
        optimizer = hvd.DistributedOptimizer(optimizer, balancer=balancer, **options)
        for step in range(3):
            optimizer.zero_grad()
            balancer.begin((4, 0)[engine.rank])
            if engine.rank == 0:
                table(torch.arange(4) + step).square().sum().backward()
            optimizer.step()
        return table.weight.detach()

    first, second = World(2).run(program, timeout_s=30)
    assert torch.equal(first, second) and not torch.equal(first, PROTOTYPE.table.weight)


@pytest.mark.parametrize("options", [{}, {"sparse_as_dense": True}, {"bucket_bytes": 1}])
@pytest.mark.parametrize("begins", [0, 2])
def test_a_rank_whose_batch_uses_one_table_of_two(options, begins):
    """`SparseAdam` would refuse a dense gradient of the other, also in the first batch where another rank has one."""

    def train(engine):
        tables = [copy.deepcopy(PROTOTYPE.table) for _ in range(2)]
        optimizer = torch.optim.SparseAdam([table.weight for table in tables], lr=0.1)
        if engine is not None:
            balancer = hvd.Balancer(4, engine=engine, adaptive=False)
            optimizer = hvd.DistributedOptimizer(optimizer, balancer=balancer, **options)
        for step in range(5):
            words, second = torch.arange(4) + step, step >= begins  # of the second half of the samples alone
            if engine is not None:
                balancer.begin(2)
                words, second = words[2 * engine.rank : 2 * engine.rank + 2], second and engine.rank == 1
            optimizer.zero_grad()
            loss = tables[0](words).square().sum()
            if second:
                loss = loss + tables[1](words[-2:]).square().sum()
            (loss / len(words)).backward()
            optimizer.step()
        return [table.weight.detach() for table in tables]

    expected = train(None)
    for found in World(2).run(train, timeout_s=30):
        # No rank had a gradient of the second before it was used, but there was a step: see docs/pytorch.md.
        for a, b in zip(found[: 1 if begins else 2], expected, strict=False):
            assert (a - b).abs().max() <= 1e-12


def test_gradients_with_other_sparse_dimensions_than_those_known():
    """Rows are what is known of; one rank has elements, for once."""

    def train(engine):
        table = nn.Parameter(PROTOTYPE.table.weight.detach()[:6].clone())
        optimizer = torch.optim.SGD([table], lr=0.1)
        if engine is not None:
            balancer = hvd.Balancer(4, engine=engine, adaptive=False)
            optimizer = hvd.DistributedOptimizer(optimizer, balancer=balancer)
        for step in range(5):
            optimizer.zero_grad()
            sparse = engine is not None  # one process cannot add them
            halves = [nn.functional.embedding(torch.arange(2), table, sparse=sparse)]
            index = torch.full((2, WIDTH), 3)
            halves += [torch.gather(table, 0, index, sparse_grad=sparse) if step == 3 else halves[0] * step]
            if engine is None:
                sum(half.square().sum() / 2 for half in halves).mul(0.5).backward()
            else:
                balancer.begin(2)
                (halves[engine.rank].square().sum() / 2).backward()
            optimizer.step()
        return table.detach()

    expected = train(None)
    for found in World(2).run(train, timeout_s=30):
        assert (found - expected).abs().max() <= 1e-12


@pytest.mark.parametrize(("dtype", "close"), [(torch.float32, 1e-6), (torch.bfloat16, 2e-2)])
def test_narrow_types_travel_as_the_dense_do(dtype, close):
    expected, _, _ = train(None, sgd)
    found = World(3).run(lambda engine: train(engine, sgd, (5, 2, 1), dtype=dtype)[0], timeout_s=30)
    assert found[0].table.weight.dtype == found[0].table.weight.grad.dtype == dtype
    assert max(worst(model, expected) for model in found) <= close


def test_what_travels_are_rows(monkeypatch):
    """From the second step on; the first tells all ranks, also those without a sample, that gradients are sparse."""
    sent, lock = [], threading.Lock()

    def counted(original):
        def start(self, array, **options):
            with lock:
                sent.append((options["name"], np.asarray(array).size))
            return original(self, array, **options)

        return start

    for name in ("allreduce_async", "allgather_async"):
        monkeypatch.setattr(LocalEngine, name, counted(getattr(LocalEngine, name)))
    marks = []

    def before(step, model):
        marks.append(len(sent))

    World(1).run(lambda engine: train(engine, sgd, (WHOLE,), before=before))
    steps = [sum(size for _, size in sent[a:b]) for a, b in zip(marks, [*marks[1:], len(sent)], strict=True)]
    assert steps[0] > WORDS * WIDTH > 4 * max(steps[1:]), steps


def test_gradients_that_become_sparse_later():
    def before(step, model):
        model.table.sparse = step >= 2

    expected, _, _ = train(None, sgd, before=before)
    found = World(3).run(lambda engine: train(engine, sgd, (5, 2, 1), before=before)[0], timeout_s=30)
    assert all(model.table.weight.grad.is_sparse for model in found)
    assert max(worst(model, expected) for model in found) <= 1e-12


def test_a_rank_whose_gradient_is_dense_for_once():
    """As of a table that is also the last layer's weight in some steps."""

    def before(step, model):
        model.table.sparse = step != 3

    expected, _, _ = train(None, adagrad, before=before)
    found = World(3).run(lambda engine: train(engine, adagrad, (5, 2, 1), before=before)[0], timeout_s=30)
    assert max(worst(model, expected) for model in found) <= 1e-12


def test_a_table_that_nobody_has_used():
    """In a step its gradient has no row, on any rank."""
    def program(engine):
        model = copy.deepcopy(PROTOTYPE)
        balancer = hvd.Balancer(4, engine=engine, adaptive=False)
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), balancer=balancer)
        for used in (True, False, True):
            balancer.begin(2)
            optimizer.zero_grad()
            (loss_of(model, *(part[:2] for part in make_batch(0))) if used else model.head.weight.sum()).backward()
            optimizer.step()
        return model

    first, second = World(2).run(program, timeout_s=30)
    assert worst(first, second) == 0.0
    assert worst(first, PROTOTYPE) > 0


@pytest.mark.parametrize(("options", "factor"), [({}, 2.0), ({"op": hvd.Sum}, 6.0)])
def test_passes_and_sums(options, factor):
    """Two batches in a step, of unlike ones, on three ranks."""
    shares = (5, 2, 1)

    def program(engine):
        model = copy.deepcopy(PROTOTYPE)
        balancer = hvd.Balancer(WHOLE, engine=engine, shares=shares, adaptive=False)
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.0), balancer=balancer, backward_passes_per_step=2, **options
        )
        begin = sum(shares[: engine.rank])
        for step in range(3):  # dense, and twice as rows
            optimizer.zero_grad()
            for part in (2 * step, 2 * step + 1):
                words, classes = (each[begin : begin + shares[engine.rank]] for each in make_batch(part))
                balancer.begin(len(words))
                loss_of(model, words, classes).backward()
            optimizer.step()
        return model.table.weight.grad.to_dense(), model.head.weight.grad

    model = copy.deepcopy(PROTOTYPE)
    for part in (4, 5):
        (factor / 2 * loss_of(model, *make_batch(part))).backward()
    expected = model.table.weight.grad.to_dense(), model.head.weight.grad
    for found in World(3).run(program, timeout_s=30):
        assert all((a - b).abs().max() <= 1e-12 for a, b in zip(found, expected, strict=True))


def test_two_losses_of_one_batch_are_added():
    """Each `backward()` is exchanged by itself, and adds to what is there."""
    shares = (5, 2, 1)

    def program(engine):
        model = copy.deepcopy(PROTOTYPE)
        balancer = hvd.Balancer(WHOLE, engine=engine, shares=shares, adaptive=False)
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.0), balancer=balancer)
        begin = sum(shares[: engine.rank])
        for step in range(3):
            words, classes = (each[begin : begin + shares[engine.rank]] for each in make_batch(step))
            optimizer.zero_grad()
            balancer.begin(len(words))
            loss_of(model, words, classes).backward()
            model(words).square().mean().backward()
            optimizer.step()
        return model.table.weight.grad.to_dense()

    model = copy.deepcopy(PROTOTYPE)
    words, classes = make_batch(2)
    (loss_of(model, words, classes) + model(words).square().mean()).backward()
    for found in World(3).run(program, timeout_s=30):
        assert (found - model.table.weight.grad.to_dense()).abs().max() <= 1e-12


def test_a_second_exchange_of_the_batch_that_shows_a_sparse_gradient():
    def program(engine):
        model = copy.deepcopy(PROTOTYPE)
        balancer = hvd.Balancer(WHOLE, engine=engine, adaptive=False)
        hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), balancer=balancer)
        balancer.begin(4)
        for _ in range(2):
            loss_of(model, *(part[:4] for part in make_batch(0))).backward()
        return model.table.weight.grad.is_sparse

    assert World(2).run(program, timeout_s=20) == [True, True]


@pytest.mark.parametrize("shares", [(4, 4), (3, 3, 2)])
def test_what_a_codec_kept_back_of_dense_gradients_is_not_lost(shares):
    """The first goes through a codec, and what that leaves out with the rows of the second."""

    def gradients(engine):
        seen = []

        def before(step, model):
            if step:
                seen.append(model.table.weight.grad.to_dense())

        train(engine, lambda model: [torch.optim.SGD(model.parameters(), lr=0.0)], shares, steps=3, before=before,
              compression=hvd.Compression.topk(0.01, warmup_steps=0))  # fmt: skip
        return seen

    model, expected = copy.deepcopy(PROTOTYPE), []
    for step in range(2):
        model.zero_grad()
        loss_of(model, *make_batch(step)).backward()
        expected.append(model.table.weight.grad.to_dense())
    for found in World(len(shares)).run(gradients, timeout_s=30):
        assert all((found[step] - expected[step]).abs().max() > 1e-6 for step in range(2)), "it did leave some out"
        assert (sum(found) - sum(expected)).abs().max() <= 1e-12


@pytest.mark.parametrize("bad", [None, 1, 2])
def test_what_a_codec_kept_back_is_sent_again_where_a_step_was_not_finite(bad):
    """As GradScaler leaves one out. With the rows of the second step goes what the first had kept back."""

    def program(engine):
        table = torch.nn.Embedding(160, 8, sparse=True, dtype=torch.float64)
        torch.nn.init.zeros_(table.weight)
        balancer = hvd.Balancer(4, engine=engine, adaptive=False)
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(table.parameters(), lr=1.0), balancer=balancer,
            compression=hvd.Compression.topk(0.02, warmup_steps=0),
        )  # fmt: skip
        expected = torch.zeros(160, 8, dtype=torch.float64)
        for step in range(5):
            draw = torch.Generator().manual_seed(step)
            rows = torch.randint(0, 160, (2, 30), generator=draw)
            factors = torch.randn(2, 30, 8, generator=draw, dtype=torch.float64)
            balancer.begin(2)
            optimizer.zero_grad()
            loss = (table(rows[engine.rank]) * factors[engine.rank]).sum()
            (loss * float("nan") if step == bad else loss).backward()
            optimizer.synchronize()
            if step != bad:
                for rank in range(2):
                    expected.index_add_(0, rows[rank], factors[rank] / 2)
                optimizer.step()
        return (table.weight + expected).detach().abs().max()

    assert all(found <= 1e-12 for found in World(2).run(program))


@pytest.mark.parametrize("fails", [(0,), (3,)])
def test_a_pass_that_an_exception_ends_when_rows_are_sent(fails):
    class Failing(torch.autograd.Function):
        @staticmethod
        def forward(ctx, values):
            return values.clone()

        @staticmethod
        def backward(ctx, gradient):
            raise ValueError("it does not fit")

    def program(engine, steps):
        model = copy.deepcopy(PROTOTYPE)
        balancer = hvd.Balancer(WHOLE, engine=engine, adaptive=False)
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1), balancer=balancer, bucket_bytes=1
        )
        for step in steps:
            words, classes = (part[4 * engine.rank : 4 * engine.rank + 4] for part in make_batch(step))
            balancer.begin(4)
            optimizer.zero_grad()
            before = Failing.apply(torch.zeros((), requires_grad=True)) if step in fails else 0.0
            try:
                (loss_of(model, words, classes) + before).backward()
            except ValueError:
                continue
            optimizer.step()
        return model

    broken = World(2).run(lambda engine: program(engine, range(5)), timeout_s=30)
    whole = World(2).run(lambda engine: program(engine, [s for s in range(5) if s not in fails]), timeout_s=30)
    assert worst(broken[0], broken[1]) == 0.0
    assert worst(broken[0], whole[0]) <= 1e-12


def test_the_noise_of_the_gradient_is_that_of_dense_ones():
    def sums(engine, **options):
        model, balancer, (optimizer,) = train(engine, sgd, (5, 3), steps=2, **options)
        meter = optimizer._reducer.noise
        meter.measuring = True
        for step in range(2, 5):
            words, classes = (part[:5] if engine.rank == 0 else part[5:] for part in make_batch(step))
            balancer.begin(len(words))
            optimizer.zero_grad()
            loss_of(model, words, classes).backward()
            optimizer.step()
        return meter.take()

    sparse = World(2).run(sums, timeout_s=30)[0]
    dense = World(2).run(lambda engine: sums(engine, sparse_as_dense=True), timeout_s=30)[0]
    assert sparse.squared_norms == pytest.approx(dense.squared_norms, rel=1e-9) and sparse.squared_norms > 0
    assert sparse.merged == pytest.approx(dense.merged, rel=1e-9) and sparse.merged > 0


@pytest.mark.parametrize("loads", ["before", "after"])
@pytest.mark.parametrize("stops", [1, 3])
@pytest.mark.parametrize("compression", [hvd.Compression.none, hvd.Compression.topk(0.01, warmup_steps=0)])
def test_a_resumed_job_goes_on_as_bits(loads, stops, compression):
    """It knows from the state which gradients are sparse: a dense sum would round otherwise. After the first step that
    is what ranks have told each other, and the next batch begins with."""
    shares = (4, 3, 1)

    def program(engine):
        whole, _, _ = train(engine, sgd, shares, compression=compression)
        model, balancer, (optimizer,) = train(engine, sgd, shares, steps=stops, compression=compression)
        state = {name: each.state_dict() for name, each in
                 {"model": model, "optimizer": optimizer, "balancer": balancer, "kept": balancer.keepers}.items()}
        state = copy.deepcopy(state)
        again = copy.deepcopy(PROTOTYPE)
        balancer = hvd.Balancer(WHOLE, engine=engine, min_share=0, shares=shares, adaptive=False)
        if loads == "before":
            balancer.keepers.load_state_dict(state["kept"])
        optimizer = hvd.DistributedOptimizer(sgd(again)[0], balancer=balancer, compression=compression)
        again.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        balancer.load_state_dict(state["balancer"])
        if loads == "after":
            balancer.keepers.load_state_dict(state["kept"])
        begin = sum(shares[: engine.rank])
        for step in range(stops, STEPS):
            words, classes = (part[begin : begin + shares[engine.rank]] for part in make_batch(step))
            balancer.begin(len(words))
            optimizer.zero_grad()
            loss_of(again, words, classes).backward()
            optimizer.step()
        return worst(again, whole), optimizer._reducer._layouts._sparse.asks

    for difference, asks in World(3).run(program, timeout_s=30):
        assert difference == 0.0 and not asks


def test_a_gradient_is_sparse_on_all_ranks_where_it_is_on_one():
    """Also where a rank has samples, but none that uses the table: optimizers round sparse gradients otherwise."""

    def program(engine):
        model = copy.deepcopy(PROTOTYPE)
        balancer = hvd.Balancer(4, engine=engine, adaptive=False)
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), balancer=balancer)
        balancer.begin(2)
        found = model.table(torch.arange(2)) if engine.rank == 0 else torch.ones(2, WIDTH, dtype=torch.float64)
        model.head(found).sum().backward()
        optimizer.step()
        return model.table.weight.grad.is_sparse

    assert World(2).run(program, timeout_s=20) == [True, True]


@pytest.mark.parametrize("how", ["loads", "rebuilds", "apart"])
def test_a_sparse_momentum_meets_no_dense_gradient(how):
    """Though nobody uses the table in the first batch after it: not all ranks know what its gradients are then."""

    def program(engine):
        model = copy.deepcopy(PROTOTYPE)
        balancer = hvd.Balancer(4, engine=engine, adaptive=False)
        strategy = hvd.LocalSGD(round_steps=1, bound_rounds=0, warmup_steps=0) if how == "apart" else "synchronous"
        optimizer = hvd.DistributedOptimizer(sgd(model)[0], balancer=balancer, strategy=strategy)
        if how == "apart":
            optimizer._reducer.local.steps._phase = lambda step: step < 1
        for used in (True, False, True):
            balancer.begin(2)
            optimizer.zero_grad()
            if used and (engine.rank == 1 or how != "apart"):
                loss_of(model, *(part[:2] for part in make_batch(0))).backward()
            else:
                model.head.weight.sum().backward()
            optimizer.step()
            if how == "loads":
                kept, optimizer = optimizer.state_dict(), hvd.DistributedOptimizer(sgd(model)[0], balancer=balancer)
                optimizer.load_state_dict(kept)
            elif how == "rebuilds":
                optimizer._rebuild()
        return model

    first, second = World(2).run(program, timeout_s=30)
    assert worst(first, second) == 0.0
