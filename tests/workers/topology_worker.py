"""One real rank of tests/test_topology_horovod.py: runs the named checks and prints `OK name` for each that holds."""

from __future__ import annotations

import sys

import horovod.torch as plain
import numpy as np
import torch
from checks import AS_IN_USE, expect, run_checks
from torch import nn

import hvd_hetero.torch as hvd
from hvd_hetero.engine.hierarchy import ALGORITHMS, levels_of
from hvd_hetero.engine.horovod import HorovodEngine
from hvd_hetero.optimizers import router, timing
from hvd_hetero.optimizers.codec_spec import CodecSpec
from hvd_hetero.optimizers.route import Route
from hvd_hetero.policy.link import Link
from hvd_hetero.policy.topology import Topology

SHAPES = [(40, 64), (30, 50)]
LENGTH = sum(rows * columns for rows, columns in SHAPES)
CODECS = {
    "none": CodecSpec(name="none"),
    "fp16": CodecSpec(name="fp16"),
    "bf16": CodecSpec(name="bf16"),
    "int8": CodecSpec(name="int8"),
    "int4": CodecSpec(name="int4", block=128, warmup_steps=1),
    "topk": CodecSpec(name="topk", density=0.05, warmup_steps=1),
    "powersgd": CodecSpec(name="powersgd", rank=2, warmup_steps=1),
}
NODES = {2: ((0,), (1,)), 3: ((0, 1), (2,)), 4: ((0, 1), (2, 3))}
WHOLE = 24
UNEVEN = {2: (19, 5), 3: (17, 6, 1), 4: (13, 8, 2, 1)}


def gradients(step):
    return [np.random.RandomState(100 * step + rank).standard_normal(LENGTH) for rank in range(hvd.size())]


def alike(array):
    """Whether all ranks hold the same bits."""
    rows = hvd.allgather(torch.as_tensor(array).reshape(1, -1), name="alike")
    return all(torch.equal(rows[0], row) for row in rows)


def routes_keep_the_laws():
    engine, topology = HorovodEngine(), Topology(nodes=NODES[hvd.size()])
    levels = levels_of(engine, topology)
    for algorithm in ALGORITHMS:
        for codec, spec in CODECS.items():
            if spec.needs_matrices and algorithm in ("rails", "scatter"):
                continue
            route = Route(levels, algorithm, cross=spec.reduction(SHAPES))
            sent = torch.zeros(LENGTH, dtype=torch.float64)
            for step in range(3):
                mine = torch.from_numpy(gradients(step)[hvd.rank()])
                result = route.start(mine, name=f"{algorithm}.{codec}").wait()
                assert alike(result), f"law 5: {algorithm}, {codec}"
                if step == 0:
                    close = {"fp16": 2**-9, "bf16": 2**-6, "int8": 0.1, "int4": 0.3}.get(codec, 1e-12)
                    true = torch.from_numpy(sum(gradients(0)))
                    error = (result - true).abs().max() / true.abs().max()
                    assert error <= close, f"law 2: {algorithm}, {codec}: {error}"
                sent += result
                route.end_step(True)
            kept = torch.zeros(LENGTH, dtype=torch.float64)
            route.move_residual_to(kept)
            hvd.allreduce_(kept, op=hvd.Sum, name=f"kept.{algorithm}.{codec}")
            if codec not in ("fp16", "bf16"):
                true = torch.from_numpy(sum(sum(gradients(step)) for step in range(3)))
                assert (sent + kept - true).abs().max() < 1e-5, f"law 6: {algorithm}, {codec}"


def make_model(dtype=torch.float64):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 48), nn.GELU(), nn.Linear(48, 4)).to(dtype)


def make_data(steps, dtype=torch.float64):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(steps, WHOLE, 32, generator=generator, dtype=torch.float64).to(dtype)
    return x, torch.randint(0, 4, (steps, WHOLE), generator=generator)


def trained(steps, dtype=torch.float64, on_step=lambda *what: None, **options):
    """The parameters after training on uneven shares, as one vector."""
    model, (x, y), shares = make_model(dtype), make_data(steps, dtype), UNEVEN[hvd.size()]
    balancer = hvd.Balancer(WHOLE, shares=shares, adaptive=False)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9), model.named_parameters(), balancer=balancer,
        **options,
    )
    begin = sum(shares[: hvd.rank()])
    mine = slice(begin, begin + shares[hvd.rank()])
    for step in range(steps):
        optimizer.zero_grad()
        balancer.begin(shares[hvd.rank()])
        nn.functional.cross_entropy(model(x[step, mine]), y[step, mine]).backward()
        optimizer.step()
        on_step(step, balancer, optimizer)
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def alone(steps, dtype=torch.float64):
    model, (x, y) = make_model(dtype), make_data(steps, dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for step in range(steps):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x[step]), y[step]).backward()
        optimizer.step()
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def training_composes():
    """Weights, levels and codecs together: law 2 where nothing is lost, near it where little is."""
    topology, expected = hvd.Topology(nodes=NODES[hvd.size()]), alone(10)
    quick = timing.SIZES_BYTES
    for how in ("rails", "scatter", "leader", "auto", topology):
        timing.SIZES_BYTES = AS_IN_USE if how == "auto" else quick
        found = trained(10, topology=how)
        assert alike(found) and (found - expected).abs().max() <= 1e-12, f"law 2: {how}"
    timing.SIZES_BYTES = quick
    codecs = {
        "fp16": hvd.Compression.fp16,
        "bf16": hvd.Compression.bf16,
        "int8": hvd.Compression.int8,
        "auto": hvd.Compression.auto,
        "per link": hvd.Compression.per_link(cross=hvd.Compression.int8, local=hvd.Compression.fp16),
        "topk": hvd.Compression.topk(0.2, warmup_steps=2),
        "powersgd": hvd.Compression.powersgd(2, warmup_steps=2),
    }
    moved = (expected - alone(0)).abs().max()
    for name, compression in codecs.items():
        # Each topology that is to be chosen for is timed first: one codec, and the choice of codecs, are enough of it.
        for how in ("flat", topology if name in ("int8", "auto") else "leader"):
            if name == "per link" and how == "flat":
                continue  # it says that there is nothing within
            found = trained(10, compression=compression, topology=how)
            error = (found - expected).abs().max() / moved
            assert alike(found), f"law 5: {name}, {how}"
            assert error < {"topk": 0.7, "powersgd": 0.7}.get(name, 0.05), f"{name}, {how}: {error}"


def links_that_change():
    """What was chosen for other links goes: nothing that its codec kept back is lost."""
    timed = router.timed_curve
    router.timed_curve = lambda levels, candidate, like, name, clock: Link(
        latency_s=1e-6 if candidate.title.startswith("leader, int8") else 1.0, bandwidth_bytes_per_s=1e9
    )
    titles = []

    def change(step, balancer, optimizer):
        titles.append([way.title or "on trial" for way in optimizer._reducer._step._exchange._routes])
        if step == 3:
            router.timed_curve = timed
            balancer.dialogue.links.asked += hvd.rank() == 0

    found, expected = trained(30, on_step=change, topology="auto", compression=hvd.Compression.auto), alone(30)
    assert alike(found) and (found - expected).abs().max() <= 0.05 * (expected - alone(0)).abs().max()
    first, last = (sum("leader, int8" in title for title in titles[step]) for step in (3, -1))
    assert first and not last, titles


def law_1_without_a_balancer():
    """A topology alone, equal weights: what plain Horovod's average gives, within the order of its sums."""
    x, y = make_data(6)
    share = WHOLE // hvd.size()
    mine = slice(hvd.rank() * share, (hvd.rank() + 1) * share)
    results = []
    for wrap in (
        lambda model, inner: plain.DistributedOptimizer(inner, model.named_parameters(), backward_passes_per_step=2),
        lambda model, inner: hvd.DistributedOptimizer(
            inner, model.named_parameters(), backward_passes_per_step=2, topology="leader"
        ),
    ):
        model = make_model()
        optimizer = wrap(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
        for step in range(0, 6, 2):
            optimizer.zero_grad()
            for part in (step, step + 1):
                nn.functional.cross_entropy(model(x[part, mine]), y[part, mine]).backward()
            optimizer.step()
        optimizer.zero_grad()
        optimizer.step()  # no backward pass: zeros from all, in both
        results.append(torch.cat([p.detach().reshape(-1) for p in model.parameters()]))
    assert alike(results[1]) and (results[0] - results[1]).abs().max() <= 1e-12


def errors_on_every_rank():
    first = hvd.rank() == 0
    model = make_model()

    def wrap(**options):
        balancer = hvd.Balancer(WHOLE)
        hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), balancer=balancer, **options)

    expect("DistributedOptimizer: expected the same on every rank",
           lambda: wrap(compression=hvd.Compression.int8 if first else hvd.Compression.bf16))
    expect("powersgd(rank=2",
           lambda: wrap(compression=hvd.Compression.powersgd(2 if first else 3)))
    expect("expected the same on every rank", lambda: wrap(topology="rails" if first else None))
    expect("strategy=synchronous", lambda: wrap(strategy="synchronous" if first else "local"))
    expect("backward_passes_per_step=2", lambda: wrap(backward_passes_per_step=1 + first))
    own = torch.nn.Parameter(torch.zeros(3 if first else 4))
    expect("1 tensors of 3 elements",
           lambda: hvd.DistributedOptimizer(torch.optim.SGD([own], lr=0.1), balancer=hvd.Balancer(WHOLE)))
    wrong = hvd.Topology(nodes=((0, 1, 2, 3, 4),))
    expect("topology: expected one of", lambda: wrap(topology=wrong))
    expect("wrong arguments" if not first else "topology: expected a Topology or one of auto, flat",
           lambda: wrap(topology="ring" if first else "rails"))
    # a codec that one rank lacks, as of another version
    lacking = CodecSpec(name="int8")
    if first:
        object.__setattr__(lacking, "name", "int4")
    from hvd_hetero.optimizers.codec_spec import LinkCodecs

    expect("int4", lambda: wrap(compression=LinkCodecs(cross=lacking)))


def a_script_may_have_the_same_process_sets():
    engine, nodes = HorovodEngine(), NODES[hvd.size()]
    levels_of(engine, Topology(nodes=nodes))  # makes a process set of each node
    mine = next(node for node in nodes if hvd.rank() in node)
    sets = [hvd.add_process_set(list(node)) for node in nodes if len(node) > 1]
    again = [hvd.add_process_set(list(node)) for node in nodes if len(node) > 1]
    for process_set in sets:
        if process_set.included():
            total = hvd.allreduce(torch.ones(1), op=hvd.Sum, name="own", process_set=process_set)
            assert total == len(mine)
    assert all(hvd.remove_process_set(process_set) for process_set in sets)
    assert all(process_set.process_set_id is None for process_set in sets)
    for process_set in again:  # what one part of a script gives back, another still has
        if process_set.included():
            hvd.barrier(process_set=process_set)
    spare = hvd.add_process_set([0, hvd.size() - 1])
    on_it = HorovodEngine(spare) if spare.included() else None
    assert hvd.remove_process_set(spare), "one of the script's alone is removed"
    expect("has been removed", lambda: HorovodEngine(spare))
    if on_it is not None:
        expect("has been removed", lambda: on_it.size)
        expect("has been removed", lambda: on_it.allreduce_async(np.ones(1), name="gone"))
    if hvd.size() > 3 and (some := hvd.add_process_set([0, 1, 2])).included():
        expect("topology: expected None", lambda: levels_of(HorovodEngine(some), Topology(nodes=((0, 1), (2,)))))


def operations_without_a_name():
    """They are paired by how many of them came before, whatever else a rank has started."""
    for extra in range(3 * hvd.rank()):
        plain.allreduce(torch.ones(1), name=f"own.{extra}", process_set=OWN)
    ones = torch.ones(2 * hvd.size())
    assert (hvd.allreduce(ones, op=hvd.Sum) == hvd.size()).all()
    assert all((one == hvd.size()).all() for one in hvd.grouped_allreduce([ones, ones], op=hvd.Sum))
    assert len(hvd.allgather(ones)) == 2 * hvd.size() ** 2
    assert len(hvd.grouped_allgather([ones])[0]) == 2 * hvd.size() ** 2
    assert (hvd.broadcast(ones * hvd.rank(), 1) == 1).all()
    assert len(hvd.alltoall(ones)) == 2 * hvd.size()
    assert (hvd.reducescatter(ones, op=hvd.Sum) == hvd.size()).all()
    assert (hvd.grouped_reducescatter([ones], op=hvd.Sum)[0] == hvd.size()).all()
    variable = torch.ones(1, requires_grad=True)
    hvd.allreduce(variable * hvd.rank(), op=hvd.Sum).backward()  # whose gradient is summed as well
    assert variable.grad == hvd.rank() * hvd.size()


def process_sets_off():
    engine = HorovodEngine()
    expect("HOROVOD_DYNAMIC_PROCESS_SETS=1", lambda: levels_of(engine, Topology(nodes=NODES[hvd.size()])))
    hvd.allreduce(torch.ones(1), name="still here")


def main() -> None:
    checks = sys.argv[1:]
    hvd.init(process_sets=None if checks == ["process_sets_off"] else "dynamic")
    if "operations_without_a_name" in checks:
        global OWN
        OWN = [hvd.add_process_set([rank]) for rank in range(hvd.size())][hvd.rank()]
    torch.set_num_threads(1)
    run_checks(hvd, checks, globals())


if __name__ == "__main__":
    main()
