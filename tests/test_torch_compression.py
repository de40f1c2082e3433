"""Codecs and levels through the torch face, on ranks that are threads; real ranks are in test_topology_horovod.py."""

import copy
import json

import pytest
import torch
from torch import nn

pytest.importorskip("horovod.torch", reason="build it with hvd-hetero build-horovod")

import horovod.torch as horovod

import hvd_hetero.torch as hvd
from hvd_hetero.engine.local import SoloEngine, World
from hvd_hetero.optimizers.router import Router
from hvd_hetero.policy.link import Link
from hvd_hetero.policy.replan import Plan

WHOLE = 12
CODECS = {
    "fp16": (hvd.Compression.fp16, 2e-3),
    "bf16": (hvd.Compression.bf16, 2e-2),
    "int8": (hvd.Compression.int8, 3e-2),
    "int4": (hvd.Compression.int4(warmup_steps=0), 0.3),
    "topk of all": (hvd.Compression.topk(1.0, warmup_steps=0), 1e-12),
    "powersgd, warming up": (hvd.Compression.powersgd(1, warmup_steps=9), 1e-12),
    "none": (hvd.Compression.none, 1e-12),
}


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(30, 64), nn.LayerNorm(64), nn.Tanh(), nn.Linear(64, 40), nn.Linear(40, 3)).double()


def make_data():
    generator = torch.Generator().manual_seed(1)
    return torch.randn(WHOLE, 30, generator=generator).double(), torch.randint(0, 3, (WHOLE,), generator=generator)


def gradients(shares, *, run=None, **options):
    """Each rank's gradients of the global batch, [rank][parameter]."""
    torch.set_num_threads(1)
    prototype, (x, y) = make_model(), make_data()

    def program(engine):
        model = copy.deepcopy(prototype)
        balancer = hvd.Balancer(WHOLE, engine=engine, min_share=0, shares=shares, adaptive=False, run=run)
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.0), model.named_parameters(), balancer=balancer, **options
        )
        begin = sum(shares[: engine.rank])
        mine = slice(begin, begin + shares[engine.rank])
        for _ in range(2):  # fp16 is exact in its first step
            optimizer.zero_grad()
            balancer.begin(shares[engine.rank])
            nn.functional.cross_entropy(model(x[mine]), y[mine]).backward()
            optimizer.step()
        if balancer.trace is not None:
            balancer.trace.close()
        return [p.grad.clone() for p in model.parameters()]

    found = World(len(shares)).run(program)
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True)), "law 5"
    return found


def reference():
    model, (x, y) = make_model(), make_data()
    nn.functional.cross_entropy(model(x), y).backward()
    return [p.grad for p in model.parameters()]


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("shares", [(9, 3), (7, 0, 5), (6, 3, 2, 1)])
@pytest.mark.parametrize("levels", [False, True])
def test_uneven_shares_codecs_and_levels_compose(shares, codec, levels):
    compression, close = CODECS[codec]
    nodes = {2: ((0,), (1,)), 3: ((0, 1), (2,)), 4: ((0, 1), (2, 3))}[len(shares)]
    topology = hvd.Topology(nodes=nodes) if levels else None
    found, expected = gradients(shares, compression=compression, topology=topology)[0], reference()
    largest = max(grad.abs().max() for grad in expected)
    for one, other in zip(found, expected, strict=True):
        if other.dim() < 2 or other.numel() < 1024:
            assert (one - other).abs().max() <= 1e-12, "biases, norms and small tensors travel as they are"
        else:
            assert (one - other).abs().max() <= close * largest


def test_a_lossy_codec_does_lose():
    """Or the test above would say nothing."""
    found, expected = gradients((9, 3), compression=hvd.Compression.int8)[0], reference()
    assert (found[0] - expected[0]).abs().max() > 1e-9


def test_what_was_chosen_and_why_is_in_the_trace(tmp_path):
    gradients((6, 3, 2, 1), topology=hvd.Topology(nodes=((0, 1), (2, 3))), run=str(tmp_path))
    for file in tmp_path.iterdir():
        events = [json.loads(line) for line in file.read_text().splitlines() if '"event"' in line]
        routes = [event["fields"] for event in events if event["event"] == "route"]
        assert routes and "predicted" in routes[0]["reason"] and routes[0]["predicted_s"] > 0, file
        assert routes[0]["route"].split(",")[0] in ("flat", "rails", "scatter", "leader")


@pytest.mark.parametrize(("latency_s", "options", "buckets"), [
    (4e-3, {}, 6), (0.5, {}, 2), (4e-3, {"bucket_bytes": 12 * 2**20}, 2), (4e-3, {"topology": None}, 2),
])
def test_buckets_are_small_behind_slow_links_unless_told_otherwise(monkeypatch, latency_s, options, buckets):
    line = Link(latency_s=latency_s, bandwidth_bytes_per_s=12.5e6)
    monkeypatch.setattr(Router, "line", lambda self, like, lossy: line)

    def program(engine):
        model = nn.Sequential(*[nn.Linear(512, 512, bias=False) for _ in range(6)])  # 1 MiB each
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.0), model.named_parameters(),
            balancer=hvd.Balancer(4, engine=engine, adaptive=False),
            **{"topology": hvd.Topology(nodes=((0,), (1,))), **options},
        )
        return len(optimizer._reducer._step.layout.buckets)

    assert World(2).run(program) == [buckets] * 2


def test_horovods_own_names_mean_what_they_mean_there():
    assert hvd.Compression.none is horovod.Compression.none
    assert hvd.Compression.fp16 is horovod.Compression.fp16


def test_a_codec_within_nodes_needs_a_topology():
    wire = hvd.Compression.per_link(cross=hvd.Compression.int8, local=hvd.Compression.fp16)
    for topology in (None, "flat"):
        with pytest.raises(ValueError, match="compression: expected no codec within nodes"):
            gradients((9, 3), compression=wire, topology=topology)


def test_per_link_says_what_it_takes():
    wire = hvd.Compression.per_link(cross=hvd.Compression.int8, local=hvd.Compression.fp16)
    assert str(wire) == "per_link(cross=int8(block=512), local=fp16)"
    assert hvd.Compression.per_link(cross=hvd.Compression.auto).auto
    with pytest.raises(ValueError, match="local: expected none, fp16 or bf16"):
        hvd.Compression.per_link(local=hvd.Compression.int8)
    with pytest.raises(ValueError, match="local: expected none, fp16 or bf16. Received: auto"):
        hvd.Compression.per_link(local=hvd.Compression.auto)
    with pytest.raises(TypeError, match="cross: expected one of hvd.Compression.none"):
        hvd.Compression.per_link(cross=wire)
    with pytest.raises(TypeError, match="cross: expected one of hvd.Compression.none"):
        hvd.Compression.per_link(cross="int8")


def test_a_compressor_of_ones_own_has_one_level_only():
    class Doubling:
        @staticmethod
        def compress(tensor):
            return tensor.double(), None

        @staticmethod
        def decompress(tensor, context):
            return tensor

    found = gradients((9, 3), compression=Doubling)[0]
    assert all((a - b).abs().max() <= 1e-12 for a, b in zip(found, reference(), strict=True))
    with pytest.raises(ValueError, match="compression: expected one of hvd.Compression with a topology"):
        gradients((9, 3), compression=Doubling, topology="rails")


def test_user_groups_stay_together_as_far_as_the_codec_allows():
    model = make_model()
    weights = [p for p in model.parameters()]
    from hvd_hetero.torch.layout import BucketLayout

    layout = BucketLayout(weights, bucket_bytes=1 << 20, groups=[weights[:4]], tail=3,
                          lossy=lambda p: p.dim() == 2 and p.numel() >= 1024)
    assert sum(map(len, layout.members)) == len(weights), "law 7"
    assert len({id(p) for members in layout.members for p in members}) == len(weights)
    for members, lossy in zip(layout.members, layout.lossy, strict=True):
        assert {p.dim() == 2 and p.numel() >= 1024 for p in members} == {lossy}
    assert layout.tail is not None and not layout.lossy[layout.tail_in]


def _optimizer(**options):
    model = nn.Linear(3, 2)
    return hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), model.named_parameters(), **options)


def _balanced(**options):
    return _optimizer(balancer=hvd.Balancer(4, engine=SoloEngine()), **options)


@pytest.mark.parametrize(("call", "message"), [
    (lambda: hvd.Compression.int8(), "Leave the parentheses out"),
    (lambda: hvd.Compression.powersgd(1.5), "rank: expected an integer of at least 1. Received: 1.5"),
    (lambda: hvd.Compression.powersgd(True), "rank: expected an integer"),
    (lambda: hvd.Compression.topk("a"), "density: expected a number"),
    (lambda: hvd.Compression.topk(True), "density: expected a number"),
    (lambda: hvd.Compression.topk(0.1, warmup_steps=1.5), "warmup_steps: expected an integer"),
    (lambda: hvd.Topology(nodes=(0, 1)), "nodes: expected the ranks of each node"),
    (lambda: hvd.Topology(nodes=None), "nodes: expected the ranks of each node"),
    (lambda: hvd.Topology(nodes=((0.0,), (1,))), "nodes: expected the ranks of each node"),
    (lambda: _optimizer(compression="int8"), "compression: expected an object with compress"),
    (lambda: _optimizer(compression=hvd.Compression.int4), "int4.*Call it: what it returns is one"),
    (lambda: _optimizer(compression=None), "compression: expected an object with compress"),
    (lambda: _balanced(bucket_bytes=1.5), "bucket_bytes: expected an integer of at least 1"),
    (lambda: _balanced(op=hvd.Adasum), "Received: hvd.Adasum"),
    (lambda: _balanced(num_groups=-3), "num_groups: expected an integer of at least 0"),
    (lambda: _balanced(groups=-1), "groups: expected an integer of at least 0"),
    (lambda: _balanced(groups="x"), "groups: expected a whole number or lists of parameters"),
    (lambda: _balanced(groups=[nn.Parameter(torch.ones(1))]), "groups: expected a whole number or"),
    (lambda: _balanced(groups=[[p := nn.Parameter(torch.ones(1))], [p]]), "each parameter in one"),
    (lambda: gradients((6, 6), topology="rails", compression=hvd.Compression.powersgd(1)), "takes whole matrices"),
    (lambda: gradients((6, 6), topology="scatter", compression=hvd.Compression.powersgd(1)), "takes whole matrices"),
    (lambda: hvd.allreduce(torch.ones(3), compression=hvd.Compression.int8), "in Horovod's functions. Received: int8"),
])  # fmt: skip
def test_wrong_arguments_say_what_was_expected(call, message):
    with pytest.raises((TypeError, ValueError), match=message):
        call()


@pytest.mark.parametrize("how", ["added", "an optimizer anew", "one around itself", "two in one", "one's to another"])
def test_what_a_codec_kept_back_outlives_parameters_that_are_added(how):
    """Steps without a gradient of their own bring it."""
    prototype, (x, y) = make_model(), make_data()
    expected = [grad.clone() for grad in reference()]

    def program(engine):
        model, added = copy.deepcopy(prototype), nn.Parameter(torch.zeros(3, dtype=torch.float64))
        balancer = hvd.Balancer(WHOLE, engine=engine, adaptive=False)
        added.requires_grad_(how in ("added", "one's to another"))  # or it is thawed

        def distributed(optimizer):
            codec = hvd.Compression.topk(0.4, warmup_steps=0)
            return hvd.DistributedOptimizer(optimizer, balancer=balancer, compression=codec)

        parameters, rest = list(model.parameters()), []
        if how in ("two in one", "one's to another"):
            parameters, rest = parameters[:2], parameters[2:]
        base = torch.optim.SGD([*parameters, *([] if how == "added" else [added])], lr=0.0)
        optimizer = distributed(base)
        others = [distributed(torch.optim.SGD(rest, lr=0.0))] if rest else []
        mine, total = slice(6 * engine.rank, 6 * engine.rank + 6), [torch.zeros_like(p) for p in model.parameters()]
        for step in range(8):
            optimizer.zero_grad()
            balancer.begin(6)
            (nn.functional.cross_entropy(model(x[mine]), y[mine]) * float(step == 0)).backward()
            for sum_, parameter in zip(total, model.parameters(), strict=True):
                sum_ += parameter.grad
            for one in (optimizer, *others):
                one.step()
            if step == 0:
                assert any((a - b).abs().max() > 1e-6 for a, b in zip(total, expected, strict=True)), "some is left"
                added.requires_grad_(True)
                if how == "added":
                    optimizer.add_param_group({"params": [added]})
                elif how == "one's to another":
                    optimizer.add_param_group({"params": rest})
                    others = []
                elif how == "two in one":
                    base.add_param_group({"params": rest})
                    optimizer, others = distributed(base), []
                else:
                    optimizer = distributed(base if how == "an optimizer anew" else optimizer)
                assert len(balancer.keepers.named) == 1
        return total

    for found in World(2).run(program):
        for one, other in zip(found, expected, strict=True):
            assert (one - other).abs().max() <= 1e-12


@pytest.mark.parametrize("options", [{}, {"strategy": "local"}, {"bucket_bytes": 1 << 20}])
def test_a_compressor_of_ones_own_sees_each_gradient_in_its_shape(options):
    """As Horovod's do: one may leave vectors alone, or keep something for each layer."""
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))
    shapes = {tuple(parameter.shape) for parameter in model.parameters()}

    def program(engine):
        seen = set()

        class Halves:
            @staticmethod
            def compress(tensor):
                seen.add(tuple(tensor.shape))
                return (tensor.half(), tensor.dtype) if tensor.dim() > 1 else (tensor, None)

            @staticmethod
            def decompress(tensor, dtype):
                return tensor if dtype is None else tensor.to(dtype)

        ours = copy.deepcopy(model)
        balancer = hvd.Balancer(6, engine=engine, shares=(4, 2), adaptive=False)
        optimizer = torch.optim.SGD(ours.parameters(), lr=0.0)
        optimizer = hvd.DistributedOptimizer(optimizer, balancer=balancer, compression=Halves, **options)
        balancer.begin(balancer.share)
        x = torch.sin(torch.arange(24.0)).reshape(6, 4)
        ours(x[:4] if engine.rank == 0 else x[4:]).square().mean().backward()
        optimizer.step()
        return seen, [parameter.grad for parameter in ours.parameters()], x

    for seen, gradients, x in World(2).run(program):
        assert seen == ({(sum(p.numel() for p in model.parameters()),)} if "bucket_bytes" in options else shapes)
        whole = copy.deepcopy(model)
        whole(x).square().mean().backward()
        for found, parameter in zip(gradients, whole.parameters(), strict=True):
            assert torch.allclose(found, parameter.grad, rtol=2**-9, atol=1e-4)


def test_what_a_codec_kept_back_counts_as_much_where_a_plan_changes_within_a_step():
    """Of two batches, which a rank has unlike shares of: its samples tell how many all ranks have in both."""
    plans = [Plan(version=0, step=0, shares=(6, 2), reason=""), Plan(version=1, step=3, shares=(1, 7), reason="")]

    def program(engine):
        torch.set_num_threads(1)
        weight = nn.Parameter(torch.zeros(64, 64).double())
        balancer = hvd.Balancer(8, engine=engine, adaptive=False)
        balancer.planner.plans = plans
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD([weight], lr=1.0), balancer=balancer, backward_passes_per_step=2,
            compression=hvd.Compression.topk(0.1, warmup_steps=0),
        )  # fmt: skip
        direction = torch.randn(64, 64, generator=torch.Generator().manual_seed(0)).double()
        for _ in range(3):
            optimizer.zero_grad()
            for _ in range(2):
                balancer.begin(balancer.share)
                (weight * direction).sum().backward()
            optimizer.step()
        (kept,) = optimizer._reducer._step.residuals().values()
        exchange = optimizer._reducer._gradient_exchange
        return weight.detach(), kept.view(64, 64) * exchange.part_unit, 6 * direction

    (moved, kept, whole), (_, others, _) = World(2).run(program)
    assert kept.abs().max() > 0.1
    assert (whole + moved - kept - others).abs().max() < 1e-9
