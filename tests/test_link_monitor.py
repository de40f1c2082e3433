"""Links that change in the middle of a job: when ranks choose anew how gradients travel, and that nothing is lost."""

import copy
import json

import numpy as np
import pytest
import torch
from torch import nn

pytest.importorskip("horovod.torch", reason="build it with hvd-hetero build-horovod")

import hvd_hetero.torch as hvd
from hvd_hetero.cli.report_table import _noteworthy
from hvd_hetero.engine.hierarchy import levels_of
from hvd_hetero.engine.local import World
from hvd_hetero.optimizers import router, routing
from hvd_hetero.optimizers.link_monitor import LinkMonitor
from hvd_hetero.policy.link import Link
from hvd_hetero.policy.link_watch import EVERY, SETTLING, WINDOW, LinkWatch
from hvd_hetero.trace import reader

LONG = SETTLING + 2 * WINDOW


def asked(watch, exchange_s, steps, busy_s=0.1, timing_s=0.0, noise=None):
    """After how many steps that take so long the watch asks for another choice; None: not at all."""
    for step in range(steps):
        exchange = exchange_s * (1.0 if noise is None else noise.gamma(4.0) / 4.0)
        if watch.observe_step(busy_s=busy_s, step_s=busy_s + exchange, timing_s=timing_s):
            return step + 1
    return None


@pytest.mark.parametrize("factor", [0.1, 5.0])
def test_a_link_that_changes_is_seen_within_a_window(factor):
    watch, noise = LinkWatch(), np.random.RandomState(0)
    assert asked(watch, 0.05, 2000, noise=noise) is None
    seen = asked(watch, 0.05 * factor, WINDOW, noise=noise)
    assert seen is not None and seen >= WINDOW // 2, "a few odd steps are no other link"


def test_what_takes_little_of_a_step_is_not_worth_a_choice():
    watch = LinkWatch()
    assert asked(watch, 0.002, LONG, busy_s=1.0) is None
    assert asked(watch, 0.2, LONG, busy_s=1.0) is None
    assert asked(watch, 0.5, LONG, busy_s=1.0)
    watch = LinkWatch()
    assert asked(watch, 0.1, LONG, busy_s=1.0) is None
    assert asked(watch, 0.22, LONG, busy_s=1.0) is None


def test_a_few_odd_steps_right_after_the_first_ones_are_no_other_link():
    watch = LinkWatch()
    for exchange_s, steps in ((0.1, SETTLING + WINDOW), (0.5, WINDOW // 3), (0.1, LONG)):
        assert asked(watch, exchange_s, steps) is None


def test_first_steps_that_lose_less_say_nothing_of_links():
    """And with codecs that have none, they do: else this would show nothing."""
    for warm_up, expected in ((100, False), (0, True)):
        watch = LinkWatch(codec_warmup_steps=warm_up)
        assert asked(watch, 1.0, 100) is None
        assert bool(asked(watch, 0.1, 200)) == expected


@pytest.mark.parametrize(("choices", "times"), [((), 1), ((True,), 1), ((False,), 2), ((False,) * 9, 16)])
@pytest.mark.parametrize(("exchange_s", "saved_s"), [(0.5, 0.4), (0.01, 0.01)])
def test_links_are_timed_once_that_could_have_saved_as_much_and_more_where_it_changed_nothing(
    choices, times, exchange_s, saved_s
):
    watch = LinkWatch()
    for changed in choices:
        watch.routes_chosen(changed=changed)
    assert asked(watch, 0.1, LONG) is None
    lost_s = saved_s * asked(watch, exchange_s, 10**5, timing_s=20.0)
    assert 20.0 * times <= lost_s <= 20.0 * times + (WINDOW + EVERY) * saved_s


def test_what_has_changed_for_a_while_and_is_as_before_is_forgotten():
    watch = LinkWatch()
    for _ in range(20):
        assert asked(watch, 0.1, LONG, timing_s=50.0) is None
        assert asked(watch, 0.5, 2 * WINDOW, timing_s=50.0) is None
    assert asked(watch, 0.5, 10**4, timing_s=50.0)


def test_unknown_times_say_nothing():
    watch = LinkWatch()
    assert asked(watch, 0.1, LONG, busy_s=0.0) is None
    assert asked(watch, 0.9, LONG, busy_s=0.0) is None


@pytest.mark.parametrize("passes", [1, 4])
def test_an_exchange_is_what_all_its_batches_took_beyond_computing(passes):
    """Also where several batches go into one."""
    now = 0.0
    links = LinkMonitor(clock=lambda: now)
    links.matter(0, timing_s=0.0, codec_warmup_steps=0)
    step = 0
    for exchange_s, expected in ((0.1, 0), (0.4, 1)):
        for _ in range(LONG):
            step, now = step + passes, now + 0.2 * passes + exchange_s
            links.hear(step, busy_s=(0.1, 0.2), together=True)
        assert links.asked == expected
    assert "400 ms, where they took 100 ms" in links.reason
    links.chosen(0, 5.0, changed=True)
    now += 5.0
    for _ in range(LONG):
        step, now = step + passes, now + 0.2 * passes + 0.4
        links.hear(step, busy_s=(0.1, 0.2), together=True)
    assert links.asked == 1


def heard(links, exchange_s, steps, begun=0):
    """Hears of so many steps that take so long."""
    for step in range(begun, begun + steps):
        links._clock.now += 0.2 + exchange_s
        links.hear(step, busy_s=(0.2,), together=True)


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


def test_other_buckets_are_no_other_links():
    """Layers that are thawed make exchanges longer."""
    links = LinkMonitor(clock=Clock())
    for number, exchange_s in enumerate((0.1, 0.5)):
        links.matter(0, timing_s=1.0, codec_warmup_steps=0)
        heard(links, exchange_s, LONG, begun=number * LONG)
    assert links.asked == 0


def test_an_exchange_that_is_made_anew_once_ranks_were_asked_does_not_end_the_watch():
    links = LinkMonitor(clock=Clock())
    links.matter(0, timing_s=0.0, codec_warmup_steps=0)
    for number, exchange_s in enumerate((0.1, 0.5, 0.5, 0.1)):
        if number == 2:
            assert links.asked == 1
            links.matter(0, timing_s=0.0, codec_warmup_steps=0)
        heard(links, exchange_s, LONG, begun=number * LONG)
    assert links.asked == 2


def test_what_timing_takes_and_finds_is_that_of_all_optimizers():
    """Each chooses for itself, one after another."""
    lost = []
    for found in [(True, False), (False, True)], [(False, False)], [(False, False), (False, False)]:
        links = LinkMonitor(clock=Clock())
        for owner in range(2):
            links.matter(owner, timing_s=10.0, codec_warmup_steps=0)
        begun = 0
        for changed in found:
            for owner, one in enumerate(changed):
                links.chosen(owner, 10.0, changed=one)
            heard(links, 0.1, LONG, begun=begun)
            links.asked = 0
            steps = next(n for n in range(10**4) if heard(links, 0.5, 1, begun=begun + LONG + n) or links.asked)
            begun += LONG + steps + 1
        lost.append(0.4 * steps)
    assert all(least <= each <= least + 0.4 * (WINDOW + EVERY) for least, each in zip((20, 40, 80), lost, strict=True))
    links.gone(1)
    links.chosen(0, 10.0, changed=True)
    heard(links, 0.1, LONG, begun=begun)
    alone = 0.4 * next(n for n in range(100) if heard(links, 0.5, 1, begun=begun + LONG + n) or links.asked > 1)
    assert 10.0 <= alone <= 10.0 + 0.4 * (WINDOW + EVERY)


def test_what_timing_takes_counts_from_the_first_choice_on():
    links = LinkMonitor(clock=Clock())
    links.matter(0, timing_s=10.0, codec_warmup_steps=0)
    heard(links, 0.1, LONG)
    assert 0.4 * next(n for n in range(100) if heard(links, 0.5, 1, begun=LONG + n) or links.asked) >= 10.0


def timing_prefers(monkeypatch, title_of):
    """`title_of(rank)`: the beginning of the title of what is fastest when that rank times next."""

    def timed(levels, candidate, like, name, clock):
        quick = candidate.title.startswith(title_of(levels.everyone.rank))
        return Link(latency_s=1e-6 if quick else 1.0, bandwidth_bytes_per_s=1e9)

    monkeypatch.setattr(router, "timed_curve", timed)


def exchange_of(engine, prototype, *, steps, asks_at, **options):
    """The exchange of an optimizer that trains for so many steps, in one of which rank 0 asks all to choose anew; the
    ways and the name that it began with; and how often this rank has asked."""
    model = copy.deepcopy(prototype)
    balancer = hvd.Balancer(8, engine=engine, adaptive=False)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(), balancer=balancer, **options
    )
    exchange = optimizer._reducer._step._exchange
    before = list(exchange._routes), exchange.name
    for step in range(steps):
        balancer.dialogue.links.asked += engine.rank == 0 and step == asks_at
        balancer.begin(2)
        optimizer.zero_grad()
        model(torch.ones(2, 64)).square().mean().backward()
        optimizer.step()
    return exchange, before, balancer.dialogue.links.asked


@pytest.mark.parametrize("passes", [1, 2])
def test_all_ranks_choose_anew_and_lose_nothing(tmp_path, monkeypatch, passes):
    """From exact sums to int8 and back: the gradient is the same in each step, so what int8 kept back shows."""
    best = {}  # by rank
    timing_prefers(monkeypatch, best.__getitem__)
    prototype = nn.Linear(64, 40).double()
    data = torch.randn(8, 64, generator=torch.Generator().manual_seed(0)).double()
    shares, steps = (5, 3), 24

    def program(engine):
        rank = engine.rank
        best[rank] = "flat, none"
        model = copy.deepcopy(prototype)
        balancer = hvd.Balancer(8, engine=engine, shares=shares, adaptive=False, run=str(tmp_path))
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=1.0), model.named_parameters(), balancer=balancer,
            compression=hvd.Compression.auto, topology=hvd.Topology(nodes=((0,), (1,))),
            backward_passes_per_step=passes,
        )  # fmt: skip
        mine = data[sum(shares[:rank]) :][: shares[rank]]
        taken = []
        for step in range(steps):
            if step in (6, 15):
                best[rank] = {6: "flat, int8", 15: "flat, none"}[step]
                links = balancer.dialogue.links
                links.asked += rank == 0
                links.reason = "exchanges take 9 ms, where they took 3 ms" if rank == 0 else ""
            optimizer.zero_grad()
            for _ in range(passes):
                balancer.begin(len(mine))
                model(mine).mean().backward()
            optimizer.step()
            taken.append([way.title for way in optimizer._reducer._step._exchange._routes])
        balancer.trace.close()
        return [p.detach().clone() for p in model.parameters()], taken

    (first, taken), (second, others) = World(2).run(program)
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True)), "law 5"
    assert taken == others
    assert taken[5] == taken[-1] != taken[10] and any("int8" in title for title in taken[10])
    reference = copy.deepcopy(prototype)
    reference(data).mean().backward()
    for parameter, weight in zip(reference.parameters(), first, strict=True):
        expected = parameter.detach() - steps * passes * parameter.grad
        assert (weight - expected).abs().max() < 1e-9, "law 6"
    for file in tmp_path.iterdir():
        events = [json.loads(line) for line in file.read_text().splitlines() if '"links"' in line]
        assert [event["fields"]["changed"] for event in events] == [True, True]
    told = _noteworthy(reader.read(tmp_path))
    assert len(told) == 2 and "exchanges take 9 ms, where they took 3 ms. Ways to sum" in told[0], "rank 0 tells it"


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_optimizers_may_step_in_any_order_where_a_rank_has_no_samples(monkeypatch, order):
    """Their exchanges end in another order there than on ranks with a backward pass, whose hooks end them."""

    def timed(levels, candidate, like, name, clock):
        engine = levels.everyone
        engine.allreduce_async(np.zeros(1), name=engine.unique("timing.")).wait()
        return Link(latency_s=1e-6, bandwidth_bytes_per_s=1e9)

    monkeypatch.setattr(router, "timed_curve", timed)
    prototypes = nn.Linear(64, 40), nn.Linear(40, 64)

    def program(engine):
        models = copy.deepcopy(prototypes)
        balancer = hvd.Balancer(8, engine=engine, shares=(4, 4), adaptive=False)
        optimizers = [
            hvd.DistributedOptimizer(
                torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(prefix=str(number)),
                balancer=balancer, compression=hvd.Compression.auto,
            )
            for number, model in enumerate(models)
        ]  # fmt: skip
        for step in range(5):
            balancer.dialogue.links.asked += step == 2 and engine.rank == 0
            samples = 0 if step == 2 and engine.rank == 1 else 4
            balancer.begin(samples)
            for optimizer in optimizers:
                optimizer.zero_grad()
            if samples:
                models[1](models[0](torch.ones(samples, 64))).square().mean().backward()
            for number in order:
                optimizers[number].step()
        return [each._reducer._step._exchange._choices for each in optimizers]

    assert World(2).run(program) == [[1, 1]] * 2


def test_what_is_chosen_again_stays_as_it_is(monkeypatch):
    """PowerSGD's factors, and steps that a codec takes more gently at first, are not begun anew."""
    timing_prefers(monkeypatch, lambda rank: "leader")
    prototype = nn.Linear(64, 40)
    options = {"compression": hvd.Compression.powersgd(2, warmup_steps=3)}
    options["topology"] = hvd.Topology(nodes=((0, 1), (2, 3)))

    def program(engine):
        exchange, before, times = exchange_of(engine, prototype, steps=3, asks_at=0, **options)
        return times, exchange._choices, before == (exchange._routes, exchange.name)

    assert World(4).run(program) == [(1, 1, True), *[(0, 1, True)] * 3]


@pytest.mark.parametrize(
    ("compression", "topology", "times"),
    [(hvd.Compression.auto, None, 1), (hvd.Compression.powersgd(2, warmup_steps=3), "leader", 0)],
)
def test_a_way_without_another_one_is_not_begun_anew(monkeypatch, compression, topology, times):
    """Nor is anything timed, where no bucket has a choice."""
    timing_prefers(monkeypatch, lambda rank: "flat, none")
    nodes = ((0, 1), (2, 3)) if topology else ((0, 1, 2, 3),)
    monkeypatch.setattr(routing, "levels_for", lambda engine, topology: levels_of(engine, hvd.Topology(nodes=nodes)))
    prototype = nn.Linear(64, 40)

    def program(engine):
        exchange, (before, _), _ = exchange_of(
            engine, prototype, steps=8, asks_at=5, compression=compression, topology=topology
        )
        return exchange._choices, before == exchange._routes

    assert World(4).run(program) == [(times, True)] * 4


@pytest.mark.parametrize("change", ["links", "layout"])
def test_what_was_kept_back_counts_for_what_it_is_in_a_short_batch_after_a_change(monkeypatch, change):
    """Of gradients that are the same in each step, updates and what is kept back are the sum."""
    best = {}  # by rank
    timing_prefers(monkeypatch, best.__getitem__)
    prototype = nn.Linear(64, 40, bias=False).double()
    gradient = torch.randn(40, 64, generator=torch.Generator().manual_seed(0)).double()

    def program(engine):
        best[engine.rank] = "flat"
        model = copy.deepcopy(prototype)
        balancer = hvd.Balancer(8, engine=engine, shares=(4, 4), adaptive=False)
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=1.0), model.named_parameters(), balancer=balancer,
            compression=hvd.Compression.topk(0.01, warmup_steps=0), topology=hvd.Topology(nodes=((0,), (1,))),
        )  # fmt: skip
        for step, samples in enumerate((4, 4, 4, 4, 1, 4, 4, 4)):
            if step == 3 and change == "links":  # which is heard of before the short one begins
                best[engine.rank] = "leader"
                balancer.dialogue.links.asked += engine.rank == 0
            if step == 4 and change == "layout":
                optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(3).double())]})
            balancer.begin(samples)
            optimizer.zero_grad()
            (model.weight * gradient).sum().backward()
            optimizer.step()
        exchange = optimizer._reducer._step._exchange
        kept = optimizer._reducer._step.residuals()[model.weight]
        return (prototype.weight - model.weight).detach().reshape(-1), kept, exchange._choices

    (moved, kept, choices), (_, others, _) = World(2).run(program)
    assert choices == (change == "links") and kept.abs().max() > 1.0
    assert (moved + (kept + others) / 2 - 8 * gradient.reshape(-1)).abs().max() < 1e-9
