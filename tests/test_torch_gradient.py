"""Law 2 through the torch face, on ranks that are threads: uneven shares give the gradient of the global batch."""

import copy

import pytest
import torch
from torch import nn

pytest.importorskip("horovod.torch", reason="build it with hvd-hetero build-horovod")

import hvd_hetero.torch as hvd
from hvd_hetero.engine.local import World

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-6, torch.bfloat16: 3e-2}
WHOLE = 12


def make_model(dtype=torch.float64):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3)).to(dtype)


def make_data(dtype=torch.float64):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(WHOLE, 5, generator=generator, dtype=torch.float64)
    return x.to(dtype), torch.randint(0, 3, (WHOLE,), generator=generator)


def reference(dtype=torch.float64, rows=WHOLE, factor=1.0):
    model, (x, y) = make_model(dtype), make_data(dtype)
    (factor * nn.functional.cross_entropy(model(x[:rows]), y[:rows])).backward()
    return [p.grad.clone() for p in model.parameters()]


def relative_error(found, expected):
    worst = max((a.double() - b.double()).abs().max().item() for a, b in zip(found, expected, strict=True))
    return worst / max(b.abs().max().item() for b in expected)


def block(shares, rank):
    start = sum(shares[:rank])
    return slice(start, start + shares[rank])


def run(shares, program, *, dtype=torch.float64, whole=WHOLE, balancer_options=None, **options):
    """The gradients that `program(model, optimizer, balancer, x, y)` leaves on each rank, over `len(shares)` ranks."""
    torch.set_num_threads(1)
    prototype, (x, y) = make_model(dtype), make_data(dtype)

    def rank_program(engine):
        model = copy.deepcopy(prototype)
        first = None if 0 in shares or sum(shares) != whole else shares
        balancer = hvd.Balancer(whole, engine=engine, min_share=0, shares=first, **(balancer_options or {}))
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.0), model.named_parameters(), balancer=balancer, **options
        )
        mine = block(shares, engine.rank)
        program(model, optimizer, balancer, x[mine], y[mine])
        return [p.grad.clone() for p in model.parameters()]

    gradients = World(len(shares)).run(rank_program, timeout_s=30)
    for other in gradients[1:]:
        assert all(torch.equal(a, b) for a, b in zip(gradients[0], other, strict=True)), "ranks differ (law 5)"
    return gradients[0]


def one_pass(model, optimizer, balancer, x, y):
    balancer.begin(len(x))
    nn.functional.cross_entropy(model(x), y).backward()
    optimizer.synchronize()


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("shares", [(6, 6), (9, 3), (11, 1), (12, 0), (5, 4, 3), (10, 0, 2), (1, 1, 1, 9)])
def test_uneven_shares_give_the_gradient_of_the_global_batch(shares, dtype):
    found = run(shares, one_pass, dtype=dtype)
    assert relative_error(found, reference(dtype)) <= TOLERANCE[dtype]


@pytest.mark.parametrize("shares", [(5, 3), (7, 0, 1)])
def test_a_short_last_batch(shares):
    rows = sum(shares)
    assert relative_error(run(shares, one_pass), reference(rows=rows)) <= 1e-12


def test_every_bucket_layout_gives_the_same():
    for options in ({"bucket_bytes": 1}, {"bucket_bytes": 300}, {"groups": 2}, {"num_groups": 3}):
        assert relative_error(run((9, 3), one_pass, **options), reference()) <= 1e-12


def test_masked_terms_are_counted_not_rows():
    x, y = make_data()
    mask = torch.arange(WHOLE) % 3 > 0
    model = make_model()
    nn.functional.cross_entropy(model(x)[mask], y[mask]).backward()
    expected = [p.grad for p in model.parameters()]

    def masked(model, optimizer, balancer, x, y):
        balancer.begin(len(x))
        mine = mask[:8] if len(x) == 8 else mask[8:]
        balancer.count(int(mine.sum()))
        nn.functional.cross_entropy(model(x)[mine], y[mine]).backward()

    assert relative_error(run((8, 4), masked), expected) <= 1e-12
    assert relative_error(run((8, 4), one_pass), expected) > 1e-3  # rows would be wrong: the test can fail


@pytest.mark.parametrize("wide", [0, 1])
def test_counts_are_not_rounded_where_a_part_of_a_model_is_in_single_precision(wide):
    """Gradients in double precision are divided by their sum."""
    x, y = make_data()
    weights = torch.tensor([0.1, 0.77, 1.31], dtype=torch.float64)
    prototype = [nn.Linear(5, 3).to(torch.float64 if index == wide else torch.float32) for index in range(2)]

    def program(engine, shares):
        layers = copy.deepcopy(prototype)
        optimizer = torch.optim.SGD([p for layer in layers for p in layer.parameters()], lr=0.1)
        mine = slice(None)
        if engine is not None:
            mine = block(shares, engine.rank)
            balancer = hvd.Balancer(WHOLE, engine=engine, shares=shares, adaptive=False)
            optimizer = hvd.DistributedOptimizer(optimizer, balancer=balancer)
            balancer.begin(shares[engine.rank])
            balancer.count(float(weights[y[mine]].sum()))
        outputs = [layer(x[mine].to(layer.weight)) for layer in layers]
        sum(nn.functional.cross_entropy(each.double(), y[mine], weight=weights) for each in outputs).backward()
        return layers[wide].weight.grad

    expected = program(None, ())
    for found in World(2).run(lambda engine: program(engine, (8, 4))):
        assert (found - expected).abs().max() <= 1e-14


def test_no_term_on_any_rank_is_a_zero_gradient():
    def nothing(model, optimizer, balancer, x, y):
        balancer.begin(len(x))
        balancer.count(0)
        nn.functional.cross_entropy(model(x), y).backward()

    assert all(grad.abs().max() == 0 for grad in run((6, 6), nothing))


@pytest.mark.parametrize("shares", [(9, 3), (4, 8)])
def test_accumulation_over_uneven_passes_sums_over_passes_as_horovod_does(shares):
    """Pass 1 over the first part of each rank's block, pass 2 over the rest; parts differ in size within a rank."""

    def two_passes(model, optimizer, balancer, x, y):
        cut = 1 if len(x) > 4 else len(x) - 1
        for part in (slice(0, cut), slice(cut, None)):
            balancer.begin(len(x[part]))
            nn.functional.cross_entropy(model(x[part]), y[part]).backward()
        optimizer.synchronize()

    found = run(shares, two_passes, backward_passes_per_step=2)
    assert relative_error(found, reference(factor=2.0)) <= 1e-12


@pytest.mark.parametrize("shares", [(6, 6), (9, 3), (12, 0)])
@pytest.mark.parametrize("op", [hvd.Average, hvd.Sum])
def test_several_backward_passes_over_one_batch_add_up(shares, op):
    """Two losses of one batch; and its parts, each rank's of sizes of its own, as Horovod's example for ImageNet has
    them, whose means it divides by their number."""
    ranks = len(shares) if op == hvd.Sum else 1

    def two_losses(model, optimizer, balancer, x, y):
        balancer.begin(len(x))
        found = model(x)
        nn.functional.cross_entropy(found, y).backward(retain_graph=True)
        (0.5 * nn.functional.cross_entropy(found, y)).backward()
        optimizer.synchronize()

    def parts(model, optimizer, balancer, x, y):
        balancer.begin(len(x))
        for part in range(3):
            loss = nn.functional.cross_entropy(model(x[part::3]), y[part::3])
            (loss / 3).backward()
        optimizer.synchronize()

    found = run(shares, two_losses, backward_passes_per_step=2, op=op)
    assert relative_error(found, reference(factor=1.5 * ranks)) <= 1e-12
    found = run(shares, parts, backward_passes_per_step=3, op=op)
    assert relative_error(found, reference(factor=1.0 * ranks)) <= 1e-12


def test_accumulation_with_a_pass_without_samples():
    def passes(model, optimizer, balancer, x, y):
        for part in ((slice(0, 0), slice(0, None)) if len(x) == 9 else (slice(0, None), slice(0, 0))):
            balancer.begin(len(x[part]))
            nn.functional.cross_entropy(model(x[part]), y[part]).backward()
        optimizer.synchronize()

    assert relative_error(run((9, 3), passes, backward_passes_per_step=2), reference(factor=2.0)) <= 1e-12


@pytest.mark.parametrize("cap", [1, 2, 5, 100])
def test_micro_batches_add_up_to_the_global_batch(cap):
    def micro(model, optimizer, balancer, x, y):
        balancer.begin(len(x))
        for part_x, part_y in balancer.micro_batches((x, y)):
            assert len(part_x) <= cap
            nn.functional.cross_entropy(model(part_x), part_y).backward()
        optimizer.step()

    found = run((8, 3, 1), micro, balancer_options={"max_micro_batch": cap})
    assert relative_error(found, reference()) <= 1e-12


def test_sum_is_the_mean_times_the_ranks_and_predivide_changes_nothing():
    assert relative_error(run((9, 3), one_pass, op=hvd.Sum), reference(factor=2.0)) <= 1e-12
    assert relative_error(run((9, 3), one_pass, gradient_predivide_factor=8.0), reference()) <= 1e-12


def test_fp16_compression_is_close():
    found = run((9, 3), one_pass, dtype=torch.float32, compression=hvd.Compression.fp16)
    assert relative_error(found, reference(torch.float32)) <= 2e-3


def test_a_second_backward_adds_to_the_reduced_gradient():
    def twice(model, optimizer, balancer, x, y):
        balancer.begin(len(x))
        for _ in range(2):
            nn.functional.cross_entropy(model(x), y).backward()

    assert relative_error(run((9, 3), twice), reference(factor=2.0)) <= 1e-12
    assert relative_error(run((9, 3), twice, op=hvd.Sum), reference(factor=4.0)) <= 1e-12


def test_a_gradient_from_before_stays_as_it_is():
    def later(model, optimizer, balancer, x, y):
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        torch.autograd.grad(model(x).sum(), list(model.parameters()))  # adds nothing to p.grad
        one_pass(model, optimizer, balancer, x, y)

    for op, factor in ((hvd.Average, 1.0), (hvd.Sum, 2.0)):
        expected = [gradient + 1.0 for gradient in reference(factor=factor)]
        assert relative_error(run((9, 3), later, op=op), expected) <= 1e-12


def test_a_nan_on_one_rank_is_a_nan_on_all_and_the_counts_stand():
    def poisoned(model, optimizer, balancer, x, y):
        balancer.begin(len(x))
        x = x * float("nan") if len(x) == 3 else x
        nn.functional.cross_entropy(model(x), y).backward()
        assert balancer.plan.version == 0

    torch.set_num_threads(1)
    prototype, (x, y) = make_model(), make_data()

    def rank_program(engine):
        model = copy.deepcopy(prototype)
        balancer = hvd.Balancer(WHOLE, engine=engine, shares=(9, 3))
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), balancer=balancer)
        mine = block((9, 3), engine.rank)
        poisoned(model, optimizer, balancer, x[mine], y[mine])
        return all(p.grad.isnan().any().item() for p in model.parameters())

    assert World(2).run(rank_program) == [True, True]


def test_parameters_without_a_gradient_on_some_or_all_ranks():
    """As in Horovod: a parameter that no rank used gets a zero gradient; one that some used, the weighted mean."""
    torch.set_num_threads(1)
    prototype = nn.ModuleDict({name: nn.Linear(2, 1) for name in ("used", "some", "never")}).double()

    def rank_program(engine):
        model = copy.deepcopy(prototype)  # threads share torch's generator
        balancer = hvd.Balancer(4, engine=engine, shares=(3, 1))
        hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), balancer=balancer, bucket_bytes=20)
        balancer.begin(3 if engine.rank == 0 else 1)
        x = torch.ones(1, 2, dtype=torch.float64)
        loss = model["used"](x).sum() + (model["some"](x).sum() if engine.rank == 0 else 0.0)
        loss.backward()
        return [model[name].weight.grad.tolist() for name in ("used", "some", "never")]

    expected = [[[1.0, 1.0]], [[0.75, 0.75]], [[0.0, 0.0]]]
    assert World(2).run(rank_program) == [expected, expected]


def test_backward_without_a_count_says_what_to_do():
    def rank_program(engine):
        model = make_model()
        balancer = hvd.Balancer(4, engine=engine)
        hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), balancer=balancer)
        model(torch.ones(2, 5, dtype=torch.float64)).sum().backward()

    with pytest.raises(RuntimeError, match="BalancedDataLoader"):
        World(2).run(rank_program)


def test_micro_batches_within_accumulation_and_a_step_that_comes_early():
    """Ranks have different numbers of micro-batches; the exchange comes after as many batches as on every rank."""

    def passes(batches):
        def program(model, optimizer, balancer, x, y):
            cut = len(x) // 2
            for part in (slice(0, cut), slice(cut, None))[:batches]:
                part = part if batches == 2 else slice(None)
                balancer.begin(len(x[part]))
                for part_x, part_y in balancer.micro_batches((x[part], y[part])):
                    nn.functional.cross_entropy(model(part_x), part_y).backward()
            optimizer.step()

        return program

    options = {"balancer_options": {"max_micro_batch": 2}, "backward_passes_per_step": 2}
    assert relative_error(run((10, 2), passes(2), **options), reference(factor=2.0)) <= 1e-12
    # One batch of the two: the sum over the passes done, not over those planned.
    assert relative_error(run((10, 2), passes(1), **options), reference()) <= 1e-12


def test_a_first_pass_over_nothing_leaves_nothing_behind():
    def program(model, optimizer, balancer, x, y):
        balancer.begin(len(x))
        balancer.count(0)
        (nn.functional.cross_entropy(model(x), y) * float("nan")).backward()
        balancer.begin(len(x))
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.synchronize()

    found = run((9, 3), program, backward_passes_per_step=2)
    assert relative_error(found, reference(factor=2.0)) <= 1e-12


def test_a_last_pass_that_a_rank_skips():
    def program(model, optimizer, balancer, x, y):
        balancer.begin(len(x))
        nn.functional.cross_entropy(model(x), y).backward()
        balancer.begin(0)  # no samples, and no backward either
        optimizer.synchronize()

    assert relative_error(run((9, 3), program, backward_passes_per_step=2), reference(factor=2.0)) <= 1e-12


@pytest.mark.parametrize("made", [torch.optim.SparseAdam, torch.optim.Adagrad])
def test_sparse_gradients_of_a_rank_that_has_no_sample_yet(made):
    """Rank 1's batch is empty in the first step, and its gradient is sparse all the same."""
    prototype = nn.Embedding(6, 3, sparse=True).double()

    def rank_program(engine):
        model = copy.deepcopy(prototype)
        balancer = hvd.Balancer(4, engine=engine, min_share=0, adaptive=False)
        optimizer = hvd.DistributedOptimizer(made(model.parameters(), lr=0.1), balancer=balancer, sparse_as_dense=True)
        for size in (2, 0), (3, 1):
            rows = torch.arange(4)[: size[engine.rank]] + engine.rank
            optimizer.zero_grad()
            balancer.begin(len(rows))
            model(rows).sum(1).square().sum().div(max(1, len(rows))).backward()
            assert model.weight.grad.is_sparse
            optimizer.step()
        return model.weight.detach()

    first, second = World(2).run(rank_program, timeout_s=30)
    assert torch.equal(first, second) and not torch.equal(first, prototype.weight)


@pytest.mark.skipif(not hasattr(torch.Tensor, "grad_dtype"), reason="this PyTorch gives gradients the parameters' type")
@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize(("own", "gradients"), [
    (torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16), (torch.float32, torch.float64),
])  # fmt: skip
def test_gradients_may_have_another_type_than_their_parameters(own, gradients, sparse):
    """Also those of a rank that has no sample, and computes none."""
    shares, words = (5, 3, 0), torch.tensor([0, 1, 2, 3, 1, 1, 0, 2])

    prototype = nn.Embedding(4, 2, sparse=sparse, dtype=own)

    def program(engine):
        table = copy.deepcopy(prototype)
        table.weight.grad_dtype = gradients
        balancer = hvd.Balancer(8, engine=engine, shares=shares, min_share=0)
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(table.parameters(), lr=0.0), balancer=balancer)
        found = []
        for _ in range(2):  # a sparse gradient travels by rows from the second step on
            optimizer.zero_grad()
            balancer.begin(shares[engine.rank])
            if shares[engine.rank]:
                table(words[block(shares, engine.rank)]).double().sum(1).mean().backward()
            optimizer.synchronize()
            assert table.weight.grad.dtype == gradients and table.weight.grad.is_sparse == sparse
            found.append(table.weight.grad.to_dense().double())
        return found

    expected = (words.bincount(minlength=4) / 8).double()[:, None].expand(4, 2)
    for each in sum(World(3).run(program), []):
        assert (each - expected).abs().max() <= 1e-2
