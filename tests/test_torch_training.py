"""The torch face in the ways that scripts use it, on ranks that are threads: training equals one process's (law 2)."""

import copy
import time

import pytest
import torch
from torch import nn

pytest.importorskip("horovod.torch", reason="build it with hvd-hetero build-horovod")

from torch_task import SHARES, WHOLE, Data, GlobalBatches, adamw, make_model, sgd, train

import hvd_hetero.torch as hvd
from hvd_hetero.engine.local import World
from hvd_hetero.trace.reader import read


def compare(make_optimizer, *, epochs=3, extras=lambda model, optimizer: {}, wrap=lambda model: model, shares=SHARES):
    """Trains on one process and on three ranks; the worst difference between any rank's parameters and the former."""
    torch.set_num_threads(1)
    model = make_model()
    optimizer = make_optimizer(model)
    expected = train(wrap(model), optimizer, GlobalBatches(Data()), epochs, **extras(model, optimizer))
    prototype = make_model()

    def program(engine):
        model = copy.deepcopy(prototype)
        balancer = hvd.Balancer(WHOLE, engine=engine, shares=shares)
        loader = hvd.BalancedDataLoader(Data(), balancer=balancer)
        optimizer = hvd.DistributedOptimizer(make_optimizer(model), model.named_parameters(), balancer=balancer)
        return train(wrap(model), optimizer, loader, epochs, **extras(model, optimizer))

    found = World(len(shares)).run(program, timeout_s=60)
    return max((a - b).abs().max().item() for rank in found for a, b in zip(rank, expected, strict=True))


@pytest.mark.parametrize("make_optimizer", [sgd, adamw])
def test_training_equals_one_process(make_optimizer):
    assert compare(make_optimizer) <= 1e-12


def test_clipping_sees_the_global_gradient():
    def clip(model, optimizer):
        return {"after_backward": lambda: nn.utils.clip_grad_norm_(model.parameters(), 0.05)}

    assert compare(sgd, extras=clip) <= 1e-12


def test_horovods_own_clipping_pattern():
    """synchronize(), clip, step() within skip_synchronize(): as Horovod's documentation has it."""

    def pattern(model, optimizer):
        if not hasattr(optimizer, "synchronize"):
            return {"after_backward": lambda: nn.utils.clip_grad_norm_(model.parameters(), 0.05)}

        def after():
            optimizer.synchronize()
            nn.utils.clip_grad_norm_(model.parameters(), 0.05)

        return {"after_backward": after}

    assert compare(sgd, extras=pattern) <= 1e-12


def test_learning_rate_schedulers_made_before_and_after_wrapping():
    def schedule(model, optimizer):
        return {"scheduler": torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)}

    assert compare(sgd, extras=schedule) <= 1e-12

    def made_before(model):
        optimizer = sgd(model)
        optimizer.scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        return optimizer

    assert compare(made_before, extras=lambda model, optimizer: {"scheduler": optimizer.scheduler}) <= 1e-12


def test_grad_scaler_unscales_the_global_gradient():
    assert compare(sgd, extras=lambda m, o: {"scaler": torch.amp.GradScaler("cpu", init_scale=2.0**10)}) <= 1e-12


def test_an_overflow_on_one_rank_skips_the_step_on_all():
    torch.set_num_threads(1)

    prototype = make_model()  # threads share torch's generator

    def program(engine):
        model = copy.deepcopy(prototype)
        balancer = hvd.Balancer(4, engine=engine, shares=(3, 1))
        optimizer = hvd.DistributedOptimizer(sgd(model), model.named_parameters(), balancer=balancer)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        before = [p.detach().clone() for p in model.parameters()]
        balancer.begin(3 if engine.rank == 0 else 1)
        loss = model(torch.ones(1, 4, dtype=torch.float64)).sum()
        scaler.scale(loss * float("inf") if engine.rank == 1 else loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return scaler.get_scale(), all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))

    assert World(2).run(program) == [(2.0, True)] * 2


def test_grad_scaler_takes_the_loss_of_a_batch_without_samples():
    """As docs/pytorch.md says: its mean is NaN, which is no overflow and counts for nothing."""
    torch.set_num_threads(1)
    prototype = make_model()

    def program(engine):
        model = copy.deepcopy(prototype)
        balancer = hvd.Balancer(4, engine=engine, shares=(4, 0), min_share=0)
        optimizer = hvd.DistributedOptimizer(sgd(model), balancer=balancer)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        balancer.begin(balancer.share)
        loss = model(torch.ones(balancer.share, 4, dtype=torch.float64)).mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return scaler.get_scale(), bool(loss.isnan()), [p.detach().clone() for p in model.parameters()]

    (scale, _, parameters), (other_scale, nothing, others) = World(2).run(program)
    assert nothing and scale == other_scale == 4.0
    assert all(torch.equal(p, other) for p, other in zip(parameters, others, strict=True))
    assert not any(torch.equal(p, before) for p, before in zip(parameters, prototype.parameters(), strict=True))


def test_compiled_models():
    # aot_eager runs the whole of torch.compile but for generating C++, which would take a minute.
    assert compare(sgd, epochs=1, wrap=lambda model: torch.compile(model, backend="aot_eager")) <= 1e-12


def test_step_with_a_closure_and_step_hooks_run_once():
    torch.set_num_threads(1)

    prototype = make_model()

    def program(engine):
        model, calls = copy.deepcopy(prototype), []
        balancer = hvd.Balancer(2, engine=engine)
        optimizer = hvd.DistributedOptimizer(sgd(model), balancer=balancer)
        optimizer.register_step_pre_hook(lambda *_: calls.append("pre"))
        balancer.begin(1)

        def closure():
            optimizer.zero_grad(set_to_none=False)
            loss = model(torch.ones(1, 4, dtype=torch.float64)).sum()
            loss.backward()
            return loss

        assert optimizer.step(closure) is not None
        return calls, isinstance(optimizer, torch.optim.SGD)

    assert World(2).run(program) == [(["pre"], True)] * 2


def test_a_run_is_traced_on_every_rank(tmp_path):
    from hvd_hetero.trace.reader import read

    torch.set_num_threads(1)
    prototype = make_model()

    def program(engine):
        model = copy.deepcopy(prototype)
        balancer = hvd.Balancer(WHOLE, engine=engine, shares=(5, 3), run=str(tmp_path))
        optimizer = hvd.DistributedOptimizer(sgd(model), balancer=balancer)
        train(model, optimizer, hvd.BalancedDataLoader(Data(), balancer=balancer), 2)
        balancer.trace.close()

    World(2).run(program)
    run = read(tmp_path)
    for rank, share in enumerate((5, 3)):
        steps = run.ranks[rank].steps
        assert [step.step for step in steps] == list(range(6))
        assert [step.samples for step in steps][:2] == [share, share]
        assert all(step.compute_s > 0 and step.bytes > 0 for step in steps)


def test_lbfgs_decides_alike_on_all_ranks():
    torch.set_num_threads(1)
    data = Data(WHOLE)

    def minimise(model, optimizer, x, y, begin):
        def closure():
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            return loss

        begin()
        optimizer.step(closure)
        return [p.detach().clone() for p in model.parameters()]

    def lbfgs(model):
        return torch.optim.LBFGS(model.parameters(), line_search_fn="strong_wolfe", max_iter=15)

    one = make_model()
    expected = minimise(one, lbfgs(one), data.x, data.y, lambda: None)
    prototype = make_model()

    def program(engine):
        model = copy.deepcopy(prototype)
        balancer = hvd.Balancer(WHOLE, engine=engine, shares=SHARES)
        optimizer = hvd.DistributedOptimizer(lbfgs(model), balancer=balancer)
        start = sum(SHARES[: engine.rank])
        mine = slice(start, start + SHARES[engine.rank])
        return minimise(model, optimizer, data.x[mine], data.y[mine], lambda: balancer.begin(SHARES[engine.rank]))

    for found in World(3).run(program, timeout_s=30):
        assert max((a - b).abs().max().item() for a, b in zip(found, expected, strict=True)) <= 1e-8


def test_the_trace_of_several_optimizers_has_what_each_waited_for_and_sent(tmp_path):
    def program(engine):
        small, large = nn.Linear(2, 1), nn.Linear(2, 1000)
        for model in (small, large):
            for parameter in model.parameters():
                nn.init.ones_(parameter)
        balancer = hvd.Balancer(2, engine=engine, adaptive=False, run=str(tmp_path))
        optimizers = [hvd.DistributedOptimizer(torch.optim.SGD(each.parameters(), lr=0.0), balancer=balancer)
                      for each in (small, large)]  # fmt: skip
        for _ in range(6):
            balancer.begin(1)
            for model, optimizer in zip((small, large), optimizers, strict=True):
                if model is large and engine.rank:
                    time.sleep(0.1)
                optimizer.zero_grad()
                model(torch.ones(1, 2)).sum().backward()
                optimizer.step()
        balancer.trace.close()

    World(2).run(program)
    steps = read(tmp_path).ranks[0].steps[1:]
    assert min(step.bytes for step in steps) > 4 * 3000
    assert min(step.wait_s for step in steps) > 0.05, "rank 0 waits in the second optimizer's exchange"


def test_modules_of_horovods_are_there_by_their_names():
    assert issubclass(hvd.compression.FP16Compressor, hvd.compression.Compressor)
    assert hvd.mpi_ops.allreduce is hvd.allreduce and hvd.elastic.sampler.ElasticSampler is hvd.elastic.ElasticSampler
    assert callable(hvd.functions.broadcast_object)
