"""`hvd.LatencyAwareLR` on torch optimizers: under every scheduler, through broadcasts, errors, and real noise."""

import copy
import gc
import json
import weakref

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler as schedulers

pytest.importorskip("horovod.torch", reason="build it with hvd-hetero build-horovod")

import hvd_hetero.torch as hvd
from hvd_hetero.engine.local import SoloEngine, World
from hvd_hetero.policy.scaling import adascale

STEPS = 12


class Recording(torch.optim.SGD):
    """Notes the learning rates that its updates see."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.seen = []

    def step(self, closure=None):
        self.seen.append([float(group["lr"]) for group in self.param_groups])
        return super().step(closure)


def two_groups(lr=0.1):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1))
    groups = [{"params": model[0].parameters()}, {"params": model[1].parameters(), "lr": lr / 2}]
    return model, Recording(groups, lr=lr, momentum=0.9)


SCHEDULERS = {
    "LambdaLR": lambda o: schedulers.LambdaLR(o, lambda epoch: 1 / (1 + epoch)),
    "MultiplicativeLR": lambda o: schedulers.MultiplicativeLR(o, lambda epoch: 0.9),
    "StepLR": lambda o: schedulers.StepLR(o, 3),
    "ExponentialLR": lambda o: schedulers.ExponentialLR(o, 0.8),
    "CosineAnnealingLR": lambda o: schedulers.CosineAnnealingLR(o, 10),
    "CosineAnnealingWarmRestarts": lambda o: schedulers.CosineAnnealingWarmRestarts(o, 4),
    "OneCycleLR": lambda o: schedulers.OneCycleLR(o, max_lr=0.3, total_steps=STEPS + 1),
    "CyclicLR": lambda o: schedulers.CyclicLR(o, base_lr=0.01, max_lr=0.2, step_size_up=3),
    "ReduceLROnPlateau": lambda o: schedulers.ReduceLROnPlateau(o, patience=1),
    "ChainedScheduler": lambda o: schedulers.ChainedScheduler(
        [schedulers.ExponentialLR(o, 0.9), schedulers.LinearLR(o, total_iters=5)]
    ),
}


def run(model, optimizer, scheduler, begin=lambda: None):
    """Learning rates as a script sees them before each update."""
    shown = []
    for _ in range(STEPS):
        begin()
        optimizer.zero_grad()
        model(torch.ones(2, 3)).sum().backward()
        shown.append([float(group["lr"]) for group in optimizer.param_groups])
        optimizer.step()
        scheduler.step(1.0) if isinstance(scheduler, schedulers.ReduceLROnPlateau) else scheduler.step()
    return shown


@pytest.mark.parametrize("order", ["swl", "slw", "wsl", "wls", "lsw", "lws"])
@pytest.mark.parametrize("name", SCHEDULERS)
def test_an_update_sees_exactly_the_schedulers_learning_rate_times_the_factor(name, order):
    """s: scheduler, w: wrapping in DistributedOptimizer, l: LatencyAwareLR, made in this order."""
    model, optimizer = two_groups()
    expected = run(model, optimizer, SCHEDULERS[name](optimizer))

    model, inner = two_groups()
    balancer, factors = hvd.Balancer(2, engine=SoloEngine()), []
    optimizer, made = inner, {}
    for what in order:
        if what == "s":
            made["s"] = SCHEDULERS[name](optimizer)
        elif what == "l":
            made["l"] = hvd.LatencyAwareLR(optimizer, balancer, base_batch_size=1, warmup_steps=7)
            balancer.dialogue.subscribe(lambda: factors.append(made["l"].factor))
        else:
            optimizer = hvd.DistributedOptimizer(optimizer, balancer=balancer)
    shown = run(model, optimizer, made["s"], begin=lambda: balancer.begin(2))
    assert shown == expected, "a script and its schedulers see their own learning rates"
    assert factors == pytest.approx([1 + min(i, 7) / 7 for i in range(STEPS)])
    assert inner.seen == [[lr * factor for lr in lrs] for lrs, factor in zip(expected, factors, strict=True)]


def test_a_learning_rate_that_is_a_tensor_of_both_groups():
    model, _ = two_groups()
    lr = torch.tensor(0.1)
    inner = Recording([{"params": layer.parameters()} for layer in model], lr=lr)
    assert inner.param_groups[0]["lr"] is inner.param_groups[1]["lr"]
    balancer = hvd.Balancer(4, engine=SoloEngine())
    optimizer = hvd.DistributedOptimizer(inner, balancer=balancer)
    hvd.LatencyAwareLR(optimizer, balancer, base_batch_size=1)
    shown = run(model, optimizer, schedulers.StepLR(optimizer, 100), begin=lambda: balancer.begin(4))
    assert inner.seen == [[float(lr * 4.0)] * 2] * STEPS and shown == [[float(torch.tensor(0.1))] * 2] * STEPS
    assert inner.param_groups[0]["lr"] is lr


def test_the_learning_rate_is_restored_when_the_update_raises():
    class Broken(torch.optim.SGD):
        def step(self, closure=None):
            raise FloatingPointError("this optimizer")

    for lr in (0.1, torch.tensor(0.1)):
        model, _ = two_groups()
        balancer = hvd.Balancer(4, engine=SoloEngine())
        optimizer = hvd.DistributedOptimizer(Broken(model.parameters(), lr=lr), balancer=balancer)
        hvd.LatencyAwareLR(optimizer, balancer, base_batch_size=1)
        balancer.begin(4)
        model(torch.ones(4, 3)).sum().backward()
        with pytest.raises(FloatingPointError):
            optimizer.step()
        assert optimizer.param_groups[0]["lr"] is lr and float(lr) == pytest.approx(0.1, rel=1e-6)


@pytest.fixture
def broadcasting(monkeypatch):
    """Horovod's own broadcast_optimizer_state, among one rank."""
    import horovod.torch.functions as functions

    monkeypatch.setattr(functions, "broadcast_parameters", lambda params, root_rank: None)
    monkeypatch.setattr(functions, "broadcast_object", lambda value, root_rank, **options: value)
    return functions.broadcast_optimizer_state


@pytest.mark.parametrize("order", ["wlb", "lwb", "lbw", "wbl"])
def test_broadcasting_the_optimizer_state_is_no_step_and_keeps_the_factor(broadcasting, order):
    """b: the broadcast, which makes a step of its own on a fresh optimizer."""
    model, inner = two_groups()
    balancer, optimizer = hvd.Balancer(4, engine=SoloEngine()), inner
    for what in order:
        if what == "w":
            optimizer = hvd.DistributedOptimizer(optimizer, balancer=balancer)
        elif what == "l":
            lr = hvd.LatencyAwareLR(optimizer, balancer, base_batch_size=1, warmup_steps=3)
        else:
            broadcasting(optimizer, 0)
            assert inner.seen == [[0.1, 0.05]], "the broadcast made no step: the test shows nothing"
            inner.seen.clear()
    run(model, optimizer, schedulers.ExponentialLR(optimizer, 1.0), begin=lambda: balancer.begin(4))
    assert [lrs[0] for lrs in inner.seen] == pytest.approx([0.1, 0.2, 0.3] + [0.4] * (STEPS - 3))
    assert optimizer.param_groups[0]["lr"] == 0.1 and lr.progress == 1 + 2 + 3 + 4 * (STEPS - 3)
    broadcasting(optimizer, 0)
    assert optimizer.param_groups[0]["lr"] == 0.1 and lr.progress == 1 + 2 + 3 + 4 * (STEPS - 3)


def test_the_optimizers_state_loaded_and_ours_leave_each_other_alone():
    model, inner = two_groups()
    balancer = hvd.Balancer(4, engine=SoloEngine())
    optimizer = hvd.DistributedOptimizer(inner, balancer=balancer)
    lr = hvd.LatencyAwareLR(optimizer, balancer, base_batch_size=1)
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    run(model, optimizer, schedulers.ExponentialLR(optimizer, 1.0), begin=lambda: balancer.begin(4))
    assert inner.seen == [[0.4, 0.2]] * STEPS
    assert [group["lr"] for group in optimizer.state_dict()["param_groups"]] == [0.1, 0.05]
    other = hvd.LatencyAwareLR(inner, balancer, base_batch_size=1)
    other.load_state_dict(lr.state_dict())
    assert other.state_dict() == lr.state_dict() and other.progress == 4 * STEPS


@pytest.mark.parametrize("given", ["inner", "wrapped"])
def test_the_last_one_made_is_the_one_in_effect(given):
    """Also where a script hands in the optimizer that it has wrapped already."""
    model, inner = two_groups()
    balancer = hvd.Balancer(4, engine=SoloEngine())
    first = weakref.ref(hvd.LatencyAwareLR(inner, balancer, base_batch_size=1))
    optimizer = hvd.DistributedOptimizer(inner, balancer=balancer)
    last = hvd.LatencyAwareLR(inner if given == "inner" else optimizer, balancer, base_batch_size=2)
    gc.collect()
    assert first() is None and len(balancer.stateful_parts.named) == 1
    run(model, optimizer, schedulers.ExponentialLR(optimizer, 1.0), begin=lambda: balancer.begin(4))
    assert inner.seen == [[0.2, 0.1]] * STEPS
    last.detach()
    inner.seen.clear()
    run(model, optimizer, schedulers.ExponentialLR(optimizer, 1.0), begin=lambda: balancer.begin(4))
    assert inner.seen == [[0.1, 0.05]] * STEPS


@pytest.mark.parametrize(
    "make, expected",
    [
        (lambda p: torch.optim.SGD(p, lr=1.0), 4.0),
        (lambda p: torch.optim.AdamW(p, lr=1.0), 2.0),
        (lambda p: torch.optim.RMSprop(p, lr=1.0), 2.0),
        (lambda p: getattr(torch.optim, "Adafactor", torch.optim.Adadelta)(p, lr=1.0), 2.0),
    ],
)
def test_auto_takes_the_rule_of_the_optimizer(make, expected):
    balancer = hvd.Balancer(4, engine=SoloEngine())
    lr = hvd.LatencyAwareLR(make(two_groups()[0].parameters()), balancer, base_batch_size=1)
    assert lr.factor == expected


def test_an_optimizer_that_never_asks_for_the_factor_is_an_error():
    model, optimizer = two_groups()
    hvd.LatencyAwareLR(optimizer, hvd.Balancer(4, engine=SoloEngine()), base_batch_size=1)
    with pytest.raises(RuntimeError, match=r"expected steps of hvd.DistributedOptimizer.* Received: 10 steps of Reco"):
        run(model, optimizer, schedulers.ExponentialLR(optimizer, 1.0))
    with pytest.raises(ValueError, match=r"balancer: expected the one that hvd.LatencyAwareLR was given. Received: No"):
        hvd.DistributedOptimizer(optimizer)
    wrapped = hvd.DistributedOptimizer(optimizer, balancer=hvd.Balancer(4, engine=SoloEngine()))
    with pytest.raises(RuntimeError, match=r"expected the balancer that the DistributedOptimizer has. Received: anoth"):
        wrapped.step()
    with pytest.raises(ValueError, match=r"optimizer: expected .* Received: Recording with another"):
        hvd.LatencyAwareLR(wrapped, hvd.Balancer(4, engine=SoloEngine()))


@pytest.mark.parametrize(
    "arguments, message",
    [
        (lambda rank: {"rule": "linear" if rank else "sqrt"}, r"LatencyAwareLR: expected the same.*rank 0: rule=sqrt"),
        (lambda rank: {"base_batch_size": 4 + rank}, r"rank 0: rule=linear, base_batch_size=4.*rank 1: .*=5"),
        (lambda rank: {"warmup_steps": rank}, r"warmup_steps=0.*warmup_steps=1"),
        (lambda rank: {"ramp_steps": 5 + rank}, r"ramp_steps=5.*ramp_steps=6"),
        (lambda rank: {"rule": (lambda s: s * s) if rank else (lambda s: s)}, r"rank 1: rule=\[0.0625, 0.25, 1.0"),
        (lambda rank: {"rule": "cube"} if rank else {}, "expected one of linear, .*Received: 'cube'"),
        (lambda rank: {"rule": (lambda s: s[0]) if rank else "linear"}, "rule: expected a function"),
        (lambda rank: {"optimizer": None} if rank else {}, "expected a torch.optim.Optimizer. Received: None"),
        (lambda rank: {"optimizer": torch.optim.LBFGS([torch.zeros(1)])} if rank else {}, "Received: \"auto\" for LBF"),
    ],
)
def test_wrong_arguments_raise_on_every_rank(arguments, message):
    def program(engine):
        balancer = hvd.Balancer(8, engine=engine)
        options = {"optimizer": torch.optim.SGD([torch.zeros(1)], lr=0.1), **arguments(engine.rank)}
        with pytest.raises((ValueError, TypeError), match=message):
            hvd.LatencyAwareLR(options.pop("optimizer"), balancer, **options)
        return True

    assert World(2).run(program, timeout_s=10) == [True, True]
    with pytest.raises(TypeError, match="balancer: expected an hvd.Balancer. Received: 64"):
        hvd.LatencyAwareLR(torch.optim.SGD([torch.zeros(1)], lr=0.1), 64)


def training(engine, *, batches, optimizer_options=None, terms=1, dimension=1500, **options):
    """Bits of the factor at each step, and the last state, of ranks whose gradients have a known noise.

    A term's gradient is normal around ones * 0.2 with deviation 1.0 in each entry.
    """
    balancer = hvd.Balancer(sum(batches[0]), engine=engine, min_share=0, adaptive=False)
    weight = nn.Parameter(torch.zeros(dimension // 50, 50, dtype=torch.float64))
    bias = nn.Parameter(torch.zeros(3, dtype=torch.float64))
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD([weight, bias], lr=0.0), balancer=balancer, **(optimizer_options or {})
    )
    lr = hvd.LatencyAwareLR(optimizer, balancer, **options)
    generator, factors = torch.Generator().manual_seed(engine.rank), []
    for batch in batches:
        for _ in range((optimizer_options or {}).get("backward_passes_per_step", 1)):
            mine = batch[engine.rank]
            balancer.begin(mine)
            if terms != 1:
                balancer.count(mine * terms)
            noise = torch.randn(mine * terms, *weight.shape, generator=generator, dtype=torch.float64)
            ((noise + 0.2) * weight).sum().div(max(1, mine * terms)).add(bias.sum() * 0).backward()
        optimizer.step()
        factors.append(lr.factor.hex())
        optimizer.zero_grad()
    return factors, lr


@pytest.mark.parametrize(
    "shares, options",
    [
        ((12, 3, 1), {}),
        ((15, 1, 0), {}),
        ((6, 5, 5), {"op": hvd.Sum, "gradient_predivide_factor": 4.0}),
        ((12, 3, 1), {"backward_passes_per_step": 2}),
        ((12, 3, 1), {"compression": hvd.Compression.int8}),
        ((12, 3, 1), {"bucket_bytes": 4}),
    ],
)
@pytest.mark.parametrize("terms", [1, 3])
def test_adascale_finds_the_gain_of_a_known_noise(shares, options, terms):
    torch.set_num_threads(1)
    ended = World(3).run(
        lambda engine: training(
            engine, batches=[shares] * 60, optimizer_options=options, terms=terms, rule="adascale", base_batch_size=4,
            ramp_steps=1,
        ),
        timeout_s=60,
    )  # fmt: skip
    (factors, lr), *others = ended
    assert all(other == factors for other, _ in others), "ranks differ"
    noise_scale = 1.0 / terms / 0.2**2  # in samples of `terms` terms each
    assert lr.noise_scale == pytest.approx(noise_scale, rel=0.05)
    assert lr.factor == pytest.approx(adascale(4.0, noise_scale / 4), rel=0.02)
    assert 1.0 < lr.factor < 4.0


def test_the_factor_stays_1_through_training_with_short_batches_and_one_factor_on_all_ranks():
    torch.set_num_threads(1)
    batches = [(10, 4, 2), (3, 9, 4), (2, 1, 0)] * 10
    for rule in ("linear", "adascale"):
        ended = World(3).run(lambda engine, rule=rule: training(engine, batches=batches, dimension=50, rule=rule))
        assert [factors for factors, _ in ended] == [[(1.0).hex()] * 30] * 3


def test_a_rank_that_is_out_moves_all_ranks_alike():
    torch.set_num_threads(1)
    batches = [(10, 4, 2)] * 5 + [(10, 0, 2)] * 30
    ended = World(3).run(lambda engine: training(engine, batches=batches, dimension=50, rule="sqrt", ramp_steps=7))
    factors = ended[0][0]
    assert all(other == factors for other, _ in ended)
    assert factors[0] == (1.0).hex() and float.fromhex(factors[-1]) == 0.75**0.5 and len(set(factors)) == 8


def test_nothing_is_measured_unless_adascale_asks():
    def program(engine):
        _, lr = training(engine, batches=[(3, 1)] * 3, dimension=50, rule="linear")
        return lr.noise_scale

    assert World(2).run(program) == [None, None]


def test_a_step_with_a_closure_has_the_factor_and_gives_the_learning_rate_back():
    model, inner = two_groups()
    balancer = hvd.Balancer(4, engine=SoloEngine())
    optimizer = hvd.DistributedOptimizer(inner, balancer=balancer)
    hvd.LatencyAwareLR(optimizer, balancer, base_batch_size=1)

    def closure():
        optimizer.zero_grad()
        loss = model(torch.ones(4, 3)).sum()
        loss.backward()
        return loss

    for _ in range(3):
        balancer.begin(4)
        optimizer.step(closure)
    assert inner.seen == [[0.4, 0.2]] * 3 and optimizer.param_groups[0]["lr"] == 0.1


@pytest.mark.parametrize("again", [lambda optimizer: optimizer, lambda optimizer: optimizer._wrapped])
def test_an_optimizer_that_is_wrapped_again_has_the_factor_once(again):
    """As where layers were thawed, in whichever way a script has kept its optimizer."""
    model, inner = two_groups()
    balancer = hvd.Balancer(4, engine=SoloEngine())
    first = hvd.DistributedOptimizer(inner, balancer=balancer)
    optimizer = hvd.DistributedOptimizer(again(first), balancer=balancer)
    hvd.LatencyAwareLR(optimizer, balancer, base_batch_size=1)
    run(model, optimizer, schedulers.ConstantLR(optimizer, factor=1.0), begin=lambda: balancer.begin(4))
    assert inner.seen == [[0.4, 0.2]] * STEPS
    with pytest.raises(RuntimeError, match="that was made last for these parameters"):
        first.step()


def test_a_learning_rate_that_is_written_within_the_step_is_an_error():
    model, inner = two_groups()
    balancer = hvd.Balancer(4, engine=SoloEngine())
    optimizer = hvd.DistributedOptimizer(inner, balancer=balancer)
    scheduler = schedulers.ExponentialLR(optimizer, 0.5)
    hvd.LatencyAwareLR(optimizer, balancer, base_batch_size=1)
    optimizer.register_step_post_hook(lambda *_: scheduler.step())
    balancer.begin(4)
    model(torch.ones(4, 3)).sum().backward()
    with pytest.raises(RuntimeError, match="before optimizer.step\\(\\) or after it"):
        optimizer.step()
    assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.05]


def test_beside_an_optimizer_whose_ranks_step_apart_a_synchronous_one_has_no_factor():
    """Its factor would move with the other's merges, which each rank takes in at another step."""

    def program(engine):
        balancer = hvd.Balancer(8, engine=engine, shares=(5, 3), adaptive=False)
        weights = [nn.Parameter(torch.zeros(3)) for _ in range(2)]
        together, is_local = (
            hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=0.1), balancer=balancer, strategy=strategy)
            for weight, strategy in zip(weights, ("synchronous", hvd.LocalSGD(warmup_steps=2)), strict=True)
        )
        hvd.LatencyAwareLR(together, balancer, base_batch_size=4)
        for step in range(3):
            balancer.begin(balancer.share)
            sum(weight.sum() for weight in weights).backward()
            is_local.step()
            if step == 2:
                with pytest.raises(RuntimeError, match="each a balancer of its own"):
                    together.step()
            else:
                together.step()
        is_local.merge()

    World(2).run(program)


def measured(engine, *, order, stop=None, rebuilds=None, steps=14):
    """Bits of AdaScale's factor in training a model, and of the model; `stop`: other objects go on from there with what
    a checkpoint has; `rebuilds`: the same ones on ranks that are others. `order`: as above, "g": with the inner one."""

    def make():
        model = nn.Linear(6, 2, dtype=torch.float64)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(0.5)
        balancer = hvd.Balancer(8, engine=engine, shares=(5, 3), adaptive=False)
        optimizer = inner = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for what in order:
            if what == "w":
                optimizer = hvd.DistributedOptimizer(optimizer, balancer=balancer, bucket_bytes=32)
            else:
                given = inner if what == "g" else optimizer
                latency = hvd.LatencyAwareLR(given, balancer, rule="adascale", base_batch_size=2, ramp_steps=3)
        return model, optimizer, balancer, latency

    objects, found = make(), []
    x = torch.randn(steps, 8, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    for step in range(steps):
        model, optimizer, balancer, latency = objects
        if step == stop:
            own = json.dumps(balancer.keepers.state_dict())
            kept = copy.deepcopy([part.state_dict() for part in objects])
            objects = make()
            for part, state in zip(objects, kept, strict=True):
                part.load_state_dict(state)
            model, optimizer, balancer, latency = objects
            balancer.keepers.load_state_dict(json.loads(own))
        if step == rebuilds:
            engine.rebuild()
        optimizer.zero_grad()
        mine = slice(0, 5) if engine.rank == 0 else slice(5, 6 if step % 5 == 0 else 8)  # some batches are short
        balancer.begin(mine.stop - mine.start)
        model(x[step, mine]).square().sum(1).mean().backward()
        optimizer.step()
        found.append((latency.factor.hex(), latency._core.noise.weight))
    return found, [p.tolist() for p in model.parameters()]


@pytest.mark.parametrize("order", ["wl", "lw", "wg"])
def test_noise_is_measured_from_the_first_exchange_on_and_a_job_that_goes_on_misses_none(order):
    whole = World(2).run(lambda engine: measured(engine, order=order))
    factors, weights = zip(*whole[0][0], strict=True)
    assert len(set(factors)) > 10 and whole[0] == whole[1]
    seen = [0.0]
    for _ in range(13):  # the norms of a step are heard with the next
        seen.append(0.99 * seen[-1] + 0.01)
    assert weights == pytest.approx(seen)
    for stop in (1, 6, 13):
        assert World(2).run(lambda engine, stop=stop: measured(engine, order=order, stop=stop)) == whole
    rebuilt = World(2).run(lambda engine: measured(engine, order=order, rebuilds=6))
    assert rebuilt[0] == rebuilt[1]
    assert [weight for _, weight in rebuilt[0][0]] == pytest.approx(seen[:6] + seen[5:-1]), "one step is not told of"
