"""What scripts do besides the ordinary: memory formats, a second optimizer, skipped steps, batches of odd things."""

import copy
import dataclasses
import functools
import inspect
import math
import typing
from collections import OrderedDict, UserDict
from types import MappingProxyType

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_sequence, pad_packed_sequence
from torch.utils.checkpoint import checkpoint

pytest.importorskip("horovod.torch", reason="build it with hvd-hetero build-horovod")

import hvd_hetero.torch as hvd
from hvd_hetero.engine.local import SoloEngine, World
from hvd_hetero.torch.methods import methods_of
from hvd_hetero.torch.row import cut, has_samples, none_of

WHOLE, SHARES = 8, (5, 2, 1)


def make_data(channels=3):
    generator = torch.Generator().manual_seed(3)
    return torch.randn(WHOLE, channels, 6, 6, generator=generator), torch.randint(0, 3, (WHOLE,), generator=generator)


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 2), nn.Flatten(), nn.Linear(36, 3))


PROTOTYPE, WIDE = make_model(), nn.Sequential(nn.Linear(40, 64), nn.Linear(64, 40))
HEAD = nn.Linear(6, 3)


def part_of(rank, shares=SHARES):
    begin = sum(shares[:rank])
    return slice(begin, begin + shares[rank])


def losses(model, rank, shares=SHARES):
    x, y = make_data()
    return nn.functional.cross_entropy(model(x[part_of(rank, shares)]), y[part_of(rank, shares)])


def alone(make_optimizer, steps):
    model = copy.deepcopy(PROTOTYPE)
    optimizer = make_optimizer(model)
    x, y = make_data()
    for _ in range(steps):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    return [p.detach() for p in model.parameters()]


def same(found, expected, most=1e-5):
    for rank in found:
        for a, b in zip(rank, expected, strict=True):
            assert (a - b).abs().max() <= most


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fused_optimizers_see_gradients_in_the_memory_format_of_their_parameters(dtype):
    """They go through memory, and would take one element's gradient for another's."""

    def adam(model):
        return torch.optim.AdamW(model.parameters(), lr=1e-2, fused=dtype == torch.float32)

    def program(engine):
        model = copy.deepcopy(PROTOTYPE).to(dtype).to(memory_format=torch.channels_last)
        balancer = hvd.Balancer(WHOLE, engine=engine, shares=SHARES)
        optimizer = hvd.DistributedOptimizer(adam(model), balancer=balancer)
        for _ in range(4):
            balancer.begin(SHARES[engine.rank])
            optimizer.zero_grad()
            x, y = make_data()
            part = part_of(engine.rank)
            nn.functional.cross_entropy(model(x[part].to(dtype)).float(), y[part]).backward()
            assert all(p.grad.stride() == p.stride() for p in model.parameters())
            optimizer.step()
        return [p.detach().float() for p in model.parameters()]

    found = World(3).run(program)
    if dtype == torch.float32:
        same(found, alone(adam, 4), most=1e-4)
    same(found, found[0], most=0.0)


def test_a_second_optimizer_takes_over():
    """As one makes when layers are thawed: the first one's hooks must be gone, and plans go on."""

    def sgd(model):
        return torch.optim.SGD(model.parameters(), lr=0.1)

    sums = []

    def program(engine):
        model = copy.deepcopy(PROTOTYPE)
        balancer = hvd.Balancer(WHOLE, engine=engine, shares=SHARES)
        first = hvd.DistributedOptimizer(sgd(model), balancer=balancer)
        seen = []
        submitted = engine.allreduce_async

        def count(array, **options):
            seen.append(options["name"])
            return submitted(array, **options)

        optimizer = first
        for step in range(6):
            if step == 3:
                optimizer = hvd.DistributedOptimizer(sgd(model), balancer=balancer)
                engine.allreduce_async = count
            balancer.begin(SHARES[engine.rank])
            optimizer.zero_grad()
            losses(model, engine.rank).backward()
            optimizer.step()
        with pytest.raises(RuntimeError, match="made last for these parameters"):
            first.step()
        sums.append(len(seen))
        assert balancer.step_timer.reported[0] == SHARES[engine.rank], "what is measured still goes out"
        assert len(balancer.step_timer._meter._segments) <= 2
        return [p.detach() for p in model.parameters()]

    same(World(3).run(program), alone(sgd, 6))
    assert sums == [3, 3, 3], "one bucket in each of three steps"


def test_a_step_that_all_skip_leaves_no_rank_behind():
    """The next batch has no sample for one rank, which does not even call backward()."""
    shares = [(5, 2, 1), (5, 3, 0), (5, 2, 1)]

    def program(engine):
        model = copy.deepcopy(PROTOTYPE)
        balancer = hvd.Balancer(WHOLE, engine=engine, shares=shares[0])
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), balancer=balancer)
        for step, now in enumerate(shares):
            balancer.begin(now[engine.rank])
            optimizer.zero_grad()
            if now[engine.rank]:
                losses(model, engine.rank, now).backward()
            if step > 0:
                optimizer.step()
        return [p.detach() for p in model.parameters()]

    same(World(3).run(program), alone(lambda model: torch.optim.SGD(model.parameters(), lr=0.1), 2))


def test_step_hooks_run_once_after_a_state_was_loaded():
    def program(engine):
        model = copy.deepcopy(PROTOTYPE)
        balancer = hvd.Balancer(WHOLE, engine=engine, shares=(5, 3))
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), balancer=balancer)
        optimizer.load_state_dict(optimizer.state_dict())
        ran = []
        optimizer.register_step_post_hook(lambda *arguments: ran.append(1))
        balancer.begin((5, 3)[engine.rank])
        losses(model, engine.rank, (5, 3)).backward()
        optimizer.step()
        return len(ran)

    assert World(2).run(program) == [1, 1]


class Numbered(torch.utils.data.Dataset):
    def __len__(self):
        return 9  # the second global batch has one sample

    def __getitem__(self, index):
        return torch.full((4,), float(index))


def with_a_number(samples):
    return {"x": torch.stack(samples), "how_many": torch.tensor(len(samples))}


def test_a_number_for_the_whole_batch_is_no_row():
    def program(engine):
        balancer = hvd.Balancer(WHOLE, engine=engine, shares=(6, 2), max_micro_batch=3)
        loader = hvd.BalancedDataLoader(Numbered(), balancer=balancer, collate_fn=with_a_number)
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD([weight := nn.Parameter(torch.ones(4))], lr=0.1), balancer=balancer
        )
        rows = []
        for batch in loader:
            for part in balancer.micro_batches(batch):
                rows.append(len(part["x"]))
                (part["x"] @ weight).sum().backward()
            optimizer.step()
        return rows

    assert World(2).run(program) == [[3, 3, 1], [2, 0]]


def test_parts_are_of_the_samples_that_were_begun():
    """Whatever else a batch holds, and where it has a list with an element for each, as for images of unlike sizes."""
    balancer = hvd.Balancer(4, engine=SoloEngine(), max_micro_batch=2)
    images = [torch.zeros(1, 5, width) for width in range(1, 5)]
    pair = [torch.arange(4), torch.arange(4)]
    batch = {"weights": torch.ones(10), "pair": pair, "images": images, "names": [*"abcd"]}
    balancer.begin(4)
    parts = list(balancer.micro_batches(batch))
    assert [part["weights"].shape for part in parts] == [(10,), (10,)]
    assert [[rows.tolist() for rows in part["pair"]] for part in parts] == [[[0, 1]] * 2, [[2, 3]] * 2]
    assert [part["names"] for part in parts] == [["a", "b"], ["c", "d"]]
    assert [[image.shape[2] for image in part["images"]] for part in parts] == [[1, 2], [3, 4]]
    balancer.begin(3)
    with pytest.raises(TypeError, match=r"3 as the batch that was begun. Received: \[\[4\], \[4\]"):
        next(balancer.micro_batches([torch.zeros(4), torch.zeros(4)]))


@pytest.mark.parametrize("part", [slice(0, 2), slice(2, 4), slice(0)])
def test_one_of_the_samples_in_a_list_may_have_as_many_rows_as_there_are_samples(part):
    """By chance: a sequence as long as the batch, an image with as many boxes. It is a sample still."""
    sequences = [torch.full((length, 2), float(length)) for length in (3, 4, 1, 4)]
    boxes = [{"boxes": torch.zeros(length, 4), "classes": torch.arange(length)} for length in (4, 0, 7, 2)]
    found, targets, rows = cut((sequences, boxes, torch.arange(4)), part, 4)
    assert [len(each) for each in found] == [3, 4, 1, 4][part] and rows.tolist() == [0, 1, 2, 3][part]
    assert [len(each["boxes"]) for each in targets] == [4, 0, 7, 2][part]


def test_fields_are_none_of_samples_where_there_are_as_many():
    """One of them may be of the whole batch, as the weights of classes."""
    x, y, weights = torch.zeros(3, 2), torch.arange(3), torch.ones(5)
    assert [len(each) for each in cut([x, y, weights], slice(1), 3)] == [1, 1, 5]
    assert [each.shape for each in cut([x, x + 1, x + 2], slice(1), 3)] == [(1, 2)] * 3


@pytest.mark.parametrize("in_order", [False, True])
@pytest.mark.parametrize("lengths", [(4, 4, 4, 4), (4, 2, 2, 1), (1, 1, 1, 1), (6, 3, 3, 1)])
def test_parts_of_packed_sequences_are_those_of_their_samples(lengths, in_order):
    """Also where the longest is as long as there are sequences, and a tensor in there has as many rows by chance."""
    torch.manual_seed(0)
    model = nn.LSTM(2, 3)
    sequences = [torch.randn(length, 2) for length in lengths]
    packed = pack_sequence(sequences, enforce_sorted=in_order)
    whole = model(packed)[1][0][0]
    for part in (slice(0, 3), slice(3, 4), slice(0)):
        found, rows = cut((packed, torch.arange(4)), part, 4)
        output, (last, _) = model(found)
        assert rows.tolist() == list(range(4))[part]
        torch.testing.assert_close(last[0], whole[part])
        assert len(pad_packed_sequence(output, batch_first=True)[1]) == len(rows)


@pytest.mark.parametrize("make", [nn.LSTM, nn.GRU, nn.RNN, functools.partial(nn.LSTM, bidirectional=True)])
def test_packed_sequences_of_no_sample_have_no_elements(make):
    """A script that counts elements, as of a loss over tokens, would count those of another rank's sample."""
    model = make(2, 3, num_layers=2)
    none = cut(pack_sequence([torch.randn(3, 2), torch.randn(4, 2)], enforce_sorted=False), slice(0), 2)
    output, _ = model(none)
    assert len(none.data) == len(output.data) == 0
    output.data.sum().backward()
    assert all(not parameter.grad.any() for parameter in model.parameters())
    assert has_samples(none, 0) and len(cut(none, slice(0), 0).data) == 0, "as in micro-batches"


def test_a_rank_without_samples_has_a_batch_of_none_whatever_it_is_made_of():
    def collate(samples):
        return {"x": torch.stack(samples), "names": ["?"] * len(samples), "weights": torch.ones(10)}

    def program(engine):
        balancer = hvd.Balancer(WHOLE, engine=engine, shares=(8, 0), min_share=0)
        loader = hvd.BalancedDataLoader(Numbered(), balancer=balancer, collate_fn=collate)
        return [[len(part) for part in batch.values()] for batch in loader][0]

    assert World(2).run(program) == [[8, 8, 10], [0, 0, 10]]


@dataclasses.dataclass(frozen=True)
class Fields:
    x: torch.Tensor
    names: list


def test_texts_are_cut_with_their_samples():
    """PyTorch makes tuples of those that come with other things, as names of files do."""
    samples = [(torch.ones(2), f"name {number}") for number in range(3)]
    batch = torch.utils.data.default_collate(samples)
    assert cut(batch, slice(1, 3), 3)[1] == ("name 1", "name 2")
    assert none_of(torch.utils.data.default_collate(samples[:1]))[1] == ()
    assert cut(("a", "b", "c"), slice(1), 3) == ("a",), "as collate_fn=tuple makes a batch of texts"


def boxes_of(length):
    return {"boxes": torch.zeros(length, 4), "classes": torch.arange(length)}


@pytest.mark.parametrize("part", [slice(0, 3), slice(3, 4), slice(0)])
@pytest.mark.parametrize("samples", [
    [boxes_of(length) for length in (4, 0, 7, 2)],
    [torch.tensor(number) for number in range(4)],
    [torch.zeros(3, height, 5) for height in (2, 4, 6, 7)],
    [torch.zeros(3, 4, 4) for _ in range(4)],
    [*range(4)], [object() for _ in range(4)], [np.float64(number) for number in range(4)], [[0], [0, 1], [], [5]],
], ids=["mappings", "numbers", "images", "as high", "labels", "objects", "numpy", "lists"])  # fmt: skip
def test_tuples_of_samples_are_cut_as_lists_are(samples, part):
    """As zip(*samples) makes them, beside a stacked tensor: whole, each part would have the first samples' targets."""
    rows, found, numbers = cut((torch.arange(4), tuple(samples), np.arange(4)), part, 4)
    assert rows.tolist() == numbers.tolist() == [0, 1, 2, 3][part]
    assert type(found) is tuple and [*map(id, found)] == [*map(id, samples[part])]
    assert cut(tuple(zip(*enumerate(samples), strict=True)), part, 4) == ((0, 1, 2, 3)[part], tuple(samples[part]))


@pytest.mark.parametrize("samples", [1, 2, 3])
def test_a_few_targets_are_cut_as_many_are(samples):
    targets = tuple({"boxes": torch.zeros(5, 4), "name": "x"} for _ in range(samples))
    rows, found, labels = cut((torch.zeros(samples, 7), targets, (8,) * samples), slice(1), samples)
    assert len(rows) == len(found) == len(labels) == 1


def test_tuples_of_fields_are_none_of_samples():
    x, y = torch.zeros(2, 3), torch.zeros(5, 2)  # of two samples, which are rows of one and columns of the other
    for fields in ((x, x), (y, y), (x, torch.arange(2)), ((x, x), (y, y)), (boxes_of(2), boxes_of(2)), (1, "a")):
        batch = {"fields": fields, "x": x}
        assert len(cut(batch, slice(1), 2)["fields"]) == len(cut(fields, slice(1), 2)) == 2
    nodes, graph = torch.zeros(7, 3), object()
    for batch in ((nodes, nodes), (graph, graph)):
        assert cut(batch, slice(1), 2) == batch, "a whole batch, of which nothing has a row for each sample"
    assert none_of((graph, torch.ones(1)))[0] is graph
    tokens = {"tokens": torch.zeros(1, 5), "scale": torch.tensor(2.0)}
    assert none_of(((tokens,), torch.ones(1)))[0][0]["tokens"].shape == (0, 5)


@pytest.mark.parametrize("kind", [UserDict, MappingProxyType, OrderedDict, lambda batch: Fields(**batch)])
def test_mappings_and_dataclasses_are_cut_as_dictionaries_are(kind):
    """A tokenizer gives the first; whole, they would have a sample of another rank's, and it would be counted."""
    batch = kind({"x": torch.arange(3), "names": [*"abc"]})
    part = cut((batch, 1), slice(1, 3), 3)[0]
    found = vars(part) if isinstance(part, Fields) else dict(part)
    assert type(part) is type(batch) and found["x"].tolist() == [1, 2] and found["names"] == [*"bc"]
    assert len((batch if isinstance(batch, Fields) else Fields(**batch)).x) == 3, "the batch itself stays"
    assert has_samples(batch, 3) and not has_samples(batch, 2)
    assert len(cut([batch] * 3, slice(1), 3)) == 3, "a list of batches is none of samples"


def test_a_batch_that_cannot_be_cut_is_warned_of():
    class Own:
        def __init__(self, samples):
            self.samples = samples

    def program(engine):
        balancer = hvd.Balancer(WHOLE, engine=engine, shares=(8, 0), min_share=0)
        return len(list(hvd.BalancedDataLoader(Numbered(), balancer=balancer, collate_fn=Own)))

    with pytest.warns(RuntimeWarning, match="Received: Own, which keeps one of another rank"):
        assert World(2).run(program) == [2, 2]


@pytest.mark.parametrize("critic", [1, 2])
def test_parts_of_another_models_loss_do_not_count(critic):
    """As in a GAN: one loop over the parts of a batch for each model, or, with n_critic, for one of them alone."""

    def train(engine):
        weights = [nn.Parameter(torch.full((1,), number, dtype=torch.float64)) for number in (1.0, 2.0)]
        optimizers = [torch.optim.SGD([weight], lr=0.1, momentum=0.9) for weight in weights]
        if engine is not None:
            balancer = hvd.Balancer(8, engine=engine, shares=(5, 3), max_micro_batch=2, adaptive=False)
            optimizers = [hvd.DistributedOptimizer(each, balancer=balancer) for each in optimizers]
        for step in range(4):
            x, y = torch.arange(8.0, dtype=torch.float64) / 8 + step, torch.arange(8.0, dtype=torch.float64).flip(0)
            if engine is not None:
                mine = slice(0, 5) if engine.rank == 0 else slice(5, 8)
                x, y = x[mine], y[mine]
                balancer.begin(len(x))
            turn = 2 if step % critic == critic - 1 else 1
            for weight, optimizer in list(zip(weights, optimizers, strict=True))[:turn]:
                optimizer.zero_grad()
                for a, b in [(x, y)] if engine is None else balancer.micro_batches((x, y)):
                    (weight * a - b).square().mean().backward()
                optimizer.step()
        return torch.cat([weight.detach() for weight in weights])

    expected = train(None)
    for found in World(2).run(train, timeout_s=20):
        assert (found - expected).abs().max() <= 1e-12


def test_a_mean_is_over_all_parts_of_a_batch():
    def program(engine):
        balancer = hvd.Balancer(8, engine=engine, shares=(5, 3), max_micro_batch=2)
        weight = nn.Parameter(torch.zeros(1))
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=0.0), balancer=balancer)
        x = torch.arange(8.0)[:5] if engine.rank == 0 else torch.arange(8.0)[5:]
        balancer.begin(len(x))

        def closure():
            optimizer.zero_grad()
            for part in balancer.micro_batches(x):
                ((part + weight).mean()).backward()
            return x.mean()

        seen = [optimizer.step(closure).item() for _ in range(2)]
        return [*seen, balancer.mean(x.mean()).item(), weight.grad.item()]

    assert World(2).run(program) == [[3.5, 3.5, 3.5, 1.0]] * 2


@pytest.mark.parametrize("of_none", [torch.tensor(0.0), None], ids=["zero", "none"])
@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.LBFGS])
def test_a_closure_that_a_rank_without_samples_leaves_early(make, of_none):
    def program(engine):
        balancer = hvd.Balancer(2, engine=engine, min_share=0)
        weight = nn.Parameter(torch.ones(1, dtype=torch.float64))
        optimizer = hvd.DistributedOptimizer(make([weight], lr=0.25), balancer=balancer)
        x = torch.tensor([1.0, 3.0][: 2 - 2 * engine.rank])
        balancer.begin(len(x))

        def closure():
            optimizer.zero_grad()
            if not len(x):
                return of_none
            loss = (x * weight.square()).mean()
            loss.backward()
            return loss

        return optimizer.step(closure).item(), weight.item()

    one = nn.Parameter(torch.ones(1, dtype=torch.float64))
    plain = make([one], lr=0.25)

    def closure():
        plain.zero_grad()
        (loss := 2 * one.square().sum()).backward()
        return loss

    expected = plain.step(closure).item(), one.item()
    assert World(2).run(program, timeout_s=10) == [expected] * 2


def test_a_copy_of_a_distributed_optimizer_is_told():
    model = nn.Linear(2, 1)
    made = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), balancer=hvd.Balancer(1, engine=SoloEngine())
    )
    with pytest.warns(RuntimeWarning, match="plain SGD and reduces nothing"):
        other, copied = copy.deepcopy((model, made))
    assert type(copied) is torch.optim.SGD and copied.param_groups[0]["params"][0] is other.weight


def test_a_mean_over_ranks_is_one_over_samples():
    def program(engine):
        balancer = hvd.Balancer(WHOLE, engine=engine, shares=SHARES)
        balancer.begin((6, 2, 0)[engine.rank])
        value = (1.0, 5.0, float("nan"))[engine.rank]
        means = [balancer.mean(torch.tensor(value).reshape(shape)) for shape in ((), (1,), (1, 1))]
        return balancer.mean(value), [mean.tolist() for mean in means]

    assert World(3).run(program) == [(2.0, [2.0, [2.0], [[2.0]]])] * 3
    assert math.isnan(hvd.Balancer(WHOLE, engine=SoloEngine()).mean(1.0)), "no batch has begun"


@pytest.mark.parametrize("kind", [torch.int64, torch.uint8, torch.bool, torch.float16, torch.float64])
def test_a_mean_over_ranks_of_whole_numbers_has_a_fraction(kind):
    def program(engine):
        balancer = hvd.Balancer(WHOLE, engine=engine, shares=SHARES)
        balancer.begin((6, 2, 0)[engine.rank])
        mean = balancer.mean(torch.tensor([engine.rank]).to(kind))
        return mean.tolist(), mean.dtype

    expected = kind if kind.is_floating_point else torch.float32
    assert World(3).run(program) == [([0.25], expected)] * 3


def test_backward_within_autocast_leaves_codecs_alone():
    def program(engine):
        model, generator = copy.deepcopy(WIDE), torch.Generator().manual_seed(engine.rank)
        balancer = hvd.Balancer(WHOLE, engine=engine, shares=(5, 3))
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1), balancer=balancer,
            compression=hvd.Compression.powersgd(2, warmup_steps=0),
        )  # fmt: skip
        for _ in range(3):
            balancer.begin((5, 3)[engine.rank])
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16):
                model(torch.randn((5, 3)[engine.rank], 40, generator=generator)).square().mean().backward()
            optimizer.step()
        return [p.detach() for p in model.parameters()]

    found = World(2).run(program)
    same(found, found[0], most=0.0)


@pytest.mark.parametrize("shared", [False, True])
def test_reentrant_checkpoints_are_refused(shared):
    """Also where all that is trained is within them: each segment would be taken for a backward pass of its own."""

    def program(engine):
        model = copy.deepcopy(WIDE)
        balancer = hvd.Balancer(WHOLE, engine=engine, shares=(5, 3))
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1), balancer=balancer, backward_passes_per_step=2
        )
        balancer.begin((5, 3)[engine.rank])
        x = torch.randn((5, 3)[engine.rank], 40, requires_grad=True)
        for layer in (model[0], model[1], *([model[0]] if shared else [])):
            x = checkpoint(layer, x, use_reentrant=True)
        with pytest.raises(RuntimeError, match="use_reentrant=False"):
            x.sum().backward()
        del optimizer

    World(2).run(program)


@pytest.mark.parametrize("balanced", [False, True])
def test_a_model_on_a_gpu_needs_a_horovod_for_gpus(balanced, monkeypatch):
    class OnGpu(nn.Parameter):
        @property
        def device(self):
            return torch.device("cuda")

    monkeypatch.setattr("horovod.torch.cuda_built", lambda: False)
    optimizer = torch.optim.SGD([OnGpu(torch.zeros(3))], lr=0.1)

    def body(engine):
        with pytest.raises(ValueError, match="built for CPUs alone. Received: some on a GPU"):
            hvd.DistributedOptimizer(optimizer, balancer=hvd.Balancer(4, engine=engine) if balanced else None)

    World(1).run(body)


@pytest.mark.parametrize("strategy", ["synchronous", hvd.LocalSGD(warmup_steps=0, round_steps=1)])
def test_a_balancer_serves_one_model_after_another(strategy):
    """What ranks say to each other comes with the gradients of the model that is trained."""

    def program(engine):
        balancer = hvd.Balancer(WHOLE, engine=engine, adaptive=False)
        optimizers, spoken = [], []
        for _ in range(2):
            model = nn.Linear(6, 3)
            model.load_state_dict(HEAD.state_dict())
            optimizer = torch.optim.SGD(model.parameters())
            optimizers.append(hvd.DistributedOptimizer(optimizer, balancer=balancer, strategy=strategy))
            for _ in range(8):
                balancer.begin(4)
                model(torch.ones(4, 6)).sum().backward()
                optimizers[-1].step()
                spoken.append(balancer.step_timer.reported[0])
            optimizers[-1].merge()
        if engine.rank == 1:
            balancer.ask_to_stop()
        while not balancer.stopping and len(spoken) < 32:
            balancer.begin(4)
            model(torch.ones(4, 6)).sum().backward()
            optimizers[-1].step()
            spoken.append(4.0)
        optimizers[-1].merge()
        assert balancer.stopping == (1,) and all(samples == 4.0 for samples in spoken[10:])

    World(2).run(program)


def test_a_compiled_function_that_calls_backward_compiles_nothing_of_ours():
    """PyTorch would compile hooks anew in each step, for a second and more."""
    graphs = []

    def count(graph, inputs):
        graphs.append(graph)
        return graph.forward

    def program(engine):
        model = copy.deepcopy(HEAD)
        balancer = hvd.Balancer(4, engine=engine, adaptive=False)
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), balancer=balancer, op=hvd.Sum)

        @torch.compile(backend=count)
        def forth_and_back(x):
            loss = model(x).square().mean()
            loss.backward()

        for _ in range(3):
            balancer.begin(4)
            optimizer.zero_grad()
            forth_and_back(torch.ones(4, 6))
            optimizer.step()

    World(1).run(program, timeout_s=60)
    assert len(graphs) == 1, "that of the loss"


def test_a_rank_without_samples_waits_for_optimizers_in_an_order_of_its_own():
    """It sends zeros for one after the other, in the order of `step()`; others' hooks see the last layer first, and of
    the first optimizer not all parameters have a gradient."""
    first = nn.Module()
    first.layer, first.unused = nn.Linear(6, 6), nn.Parameter(torch.ones(6))

    def program(engine):
        modules = [copy.deepcopy(first), copy.deepcopy(HEAD)]
        balancer = hvd.Balancer(4, engine=engine, min_share=0, shares=(4, 0), adaptive=False)
        optimizers = [
            hvd.DistributedOptimizer(torch.optim.SGD(each.parameters(), lr=0.1), balancer=balancer) for each in modules
        ]
        for _ in range(2):
            balancer.begin((4, 0)[engine.rank])
            if engine.rank == 0:
                modules[1](modules[0].layer(torch.ones(4, 6))).sum().backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        return [p.detach() for each in modules for p in each.parameters()]

    one, other = World(2).run(program, timeout_s=20)
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
    assert not torch.equal(one[-1], HEAD.bias)


class Sometimes(nn.Module):
    """A table for those of the samples that have a word, and a layer for all."""

    def __init__(self, sparse):
        super().__init__()
        self.table, self.head = nn.Embedding(9, 6, sparse=sparse), nn.Linear(6, 3)

    def forward(self, words):
        known = words >= 0
        found = torch.ones(len(words), 6, dtype=torch.float64)
        return self.head(found + self.table(words.clamp(min=0)) * known[:, None] if known.any() else found)


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("passes", [1, 2])
def test_of_several_optimizers_one_whose_parameters_a_ranks_batch_did_not_use(sparse, passes):
    """Its gradient is zero there, over as many samples as the rank has."""
    torch.manual_seed(0)
    prototype = Sometimes(sparse).double()
    batches = [[1, 2, -1, -1], [-1, -1, -1, -1], [-1, -1, -1, 3], [4, 1, -1, -1]]

    def train(engine):
        model = copy.deepcopy(prototype)
        optimizers = [torch.optim.SGD(part.parameters(), lr=0.1) for part in (model.table, model.head)]
        if engine is not None:
            balancer = hvd.Balancer(4, engine=engine, adaptive=False)
            optimizers = [
                hvd.DistributedOptimizer(each, balancer=balancer, backward_passes_per_step=passes)
                for each in optimizers
            ]
        for index, words in enumerate(torch.tensor(batches)):
            if engine is not None:
                words = words[2 * engine.rank : 2 * engine.rank + 2]
                balancer.begin(2)
            model(words).square().mean().backward()
            if index % passes == passes - 1:
                for optimizer in optimizers:
                    optimizer.step()
                    optimizer.zero_grad()
        return [p.detach() for p in model.parameters()]

    same(World(2).run(train, timeout_s=20), train(None), most=1e-12)


@pytest.mark.parametrize("most", [1, 2])
def test_of_several_optimizers_one_whose_parameters_a_part_of_a_batch_did_not_use(most):
    """Parts are of `most` samples; rank 0 has three, of which each has a part without a word."""
    torch.manual_seed(0)
    prototype, shares = Sometimes(False).double(), (3, 1)
    batches = torch.tensor([[1, 2, -1, -1], [-1, -1, 3, 3], [-1, 4, -1, 1]])

    def train(engine):
        model, balancer = copy.deepcopy(prototype), None
        optimizers = [torch.optim.SGD(part.parameters(), lr=0.1) for part in (model.table, model.head)]
        if engine is not None:
            balancer = hvd.Balancer(4, engine=engine, shares=shares, adaptive=False, max_micro_batch=most)
            optimizers = [hvd.DistributedOptimizer(each, balancer=balancer) for each in optimizers]
        for words in batches:
            if balancer is not None:
                words = words[:3] if engine.rank == 0 else words[3:]
                balancer.begin(len(words))
            for part in [words] if balancer is None else balancer.micro_batches(words):
                model(part).square().mean().backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        return [p.detach() for p in model.parameters()]

    same(World(2).run(train, timeout_s=20), train(None), most=1e-12)


def test_compiled_autograd_is_refused():
    """It drops the callback by which we learn that a backward pass has ended: the model would stay as it is."""
    compiled_autograd = pytest.importorskip("torch._dynamo.compiled_autograd")
    model, balancer = nn.Linear(6, 3), hvd.Balancer(8, engine=SoloEngine())
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), balancer=balancer)
    balancer.begin(8)
    enable = getattr(compiled_autograd, "_enable", None) or compiled_autograd.enable  # PyTorch 2.4's name
    with pytest.raises(RuntimeError, match="compiled autograd"), enable(lambda graph: graph):
        model(torch.randn(8, 6)).square().mean().backward()
    balancer.begin(8)
    optimizer.zero_grad()
    model(torch.randn(8, 6)).square().mean().backward()
    optimizer.step()


class Lengths(torch.utils.data.Dataset):
    def __len__(self):
        return 9  # the last global batch has one sample

    def __getitem__(self, index):
        return torch.full((index % 3 + 1, 4), index)


def numbers_in(part):
    """The number of each sample."""
    rows = part.unbind() if part.is_nested else part.to_dense()
    return [int(row.reshape(-1)[0]) for row in rows]


@pytest.mark.parametrize("collate", [
    lambda rows: torch.nested.nested_tensor(rows, layout=torch.jagged),
    lambda rows: torch.nested.nested_tensor(rows, layout=torch.strided),
    lambda rows: torch.stack([row[0] for row in rows]).to_sparse(),
    lambda rows: torch.stack([row[0] for row in rows]).to_sparse_csr(),
], ids=["jagged", "nested", "coordinates", "rows"])  # fmt: skip
def test_batches_of_nested_and_sparse_tensors_are_cut(collate):
    def program(engine):
        balancer = hvd.Balancer(4, engine=engine, shares=(3, 1), adaptive=False, min_share=0, max_micro_batch=2)
        loader = hvd.BalancedDataLoader(Lengths(), balancer=balancer, collate_fn=collate, shuffle=False)
        parts = [list(balancer.micro_batches(batch)) for batch in loader]
        assert {part.dtype for batch in parts for part in batch} == {torch.int64}
        return [[numbers_in(part) for part in batch] for batch in parts]

    assert World(2).run(program) == [[[[0, 1], [2]], [[4, 5], [6]], [[8]]], [[[3]], [[7]], [[]]]]


def test_type_checkers_know_the_methods_that_a_plain_optimizer_lacks():
    told = typing.get_type_hints(hvd.DistributedOptimizer)["return"]
    assert issubclass(told, torch.optim.Optimizer)  # so that schedulers and scalers take it
    for name, method in methods_of(torch.optim.SGD).items():
        if not name.startswith("_") and not hasattr(torch.optim.Optimizer, name):
            assert list(inspect.signature(getattr(told, name)).parameters) == list(inspect.signature(method).parameters)
