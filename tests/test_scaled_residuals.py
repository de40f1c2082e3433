"""What codecs keep back of arrays that weigh unlike counts for what it is: on ranks of one process."""

import numpy as np
import pytest
import torch

import hvd_hetero.torch as hvd
from hvd_hetero.engine.hierarchy import levels_of, one_level
from hvd_hetero.engine.local import World
from hvd_hetero.optimizers.codec_spec import CodecSpec
from hvd_hetero.optimizers.route import Route
from hvd_hetero.optimizers.scaled_residuals import ScaledResiduals
from hvd_hetero.optimizers.weighted_exchange import WeightedExchange
from hvd_hetero.policy.topology import Topology

SIZE = 64
TOPK = CodecSpec(name="topk", density=0.1, warmup_steps=0)
FULL, SHORT = (4.0, 4.0), (1.0, 1.0)


class Nothing:
    """A route without a residual."""

    def add_residual_to(self, array): ...

    def move_residual_to(self, array): ...


class Job:
    """Merges of what one rank did, at a constant pace for each parameter."""

    def __init__(self, engine, spec=TOPK, topology=None):
        self.pace = 0.5 + np.random.RandomState(0).rand(SIZE * SIZE)
        self.array, self.weight = np.zeros(SIZE * SIZE), 0.0
        levels = one_level(engine) if topology is None else levels_of(engine, topology)
        route = Route(levels, "flat" if topology is None else "scatter", cross=spec.reduction([(SIZE, SIZE)]))
        self.exchange = WeightedExchange(
            engine, [self.array], np.zeros(1), routes=[route], rides_in=None, outgoing=lambda: [self.weight], name="x",
            keeps=True, weight=lambda: self.weight,
        )  # fmt: skip
        self.model, self.due = np.zeros(SIZE * SIZE), np.zeros(SIZE * SIZE)

    def merge(self, steps, everyone, *, spoilt=False):
        """`steps` of this rank, of those of `everyone`; each weighs one."""
        self.weight = steps
        self.array[:] = steps * steps * self.pace
        if spoilt:
            self.array[0] = np.nan
        self.exchange.submit(0)
        (merged,), _ = self.exchange.finish(lambda total: 1.0 / total[0] if total[0] else 0.0)
        if not spoilt:
            self.model += merged
            self.due += self.pace * sum(each**2 for each in everyone) / max(sum(everyone), 1.0)

    def kept(self):
        """What it has not sent, as a sum."""
        (kept,) = self.exchange.residuals()
        return 0.0 if kept is None else float(kept.sum())


def run(lengths, *, spec=TOPK, topology=None):
    """The largest part of its progress that any parameter ever had, and that of all of them at last."""

    def program(engine):
        job, most = Job(engine, spec, topology), 0.0
        for row in lengths:
            job.merge(row[engine.rank], row)
            most = max(most, float((job.model / job.due).max()))
        return most, float(job.model.sum() / job.due.sum())

    return World(len(lengths[0])).run(program)[0]


def test_short_contributions_take_no_more_with_them_than_they_are():
    """With topk every parameter gets what was done, and gets it late: never more."""
    most, _ = run([FULL] * 5 + [SHORT] * 6)
    assert most <= 1.0 + 1e-9
    most, sum_of_all = run(([FULL] * 5 + [SHORT] * 3) * 6)
    assert most <= 1.0 + 1e-9 and sum_of_all > 0.8, "and it does come"


def test_what_a_rank_takes_with_it_counts_as_its_contribution_does():
    """Where one rank's is short the other's weighs 0.8 in place of 0.5, whatever it holds; the short one's holds no
    more than was done since."""
    most, _ = run([FULL] * 5 + [(1.0, 4.0)] + [FULL] * 5)
    assert most <= 1.2


@pytest.mark.parametrize("spec", [TOPK, CodecSpec(name="int4", warmup_steps=0),
                                    CodecSpec(name="powersgd", rank=1, warmup_steps=0)], ids=lambda spec: spec.name)
def test_lengths_that_alternate_are_merged_as_equal_ones_are(spec):
    alternating, equal = [(4.0, 4.0), (3.0, 3.0)] * 10, [(4.0, 4.0)] * 20
    assert run(alternating, spec=spec)[0] <= 1.02 * run(equal, spec=spec)[0]


def test_levels_carry_alike():
    four = [(4.0,) * 4] * 5 + [(1.0,) * 4] * 6
    assert run(four, topology=Topology(nodes=((0, 1), (2, 3))))[0] <= 1.0 + 1e-9


def test_what_waits_is_not_lost_where_nothing_is_merged():
    def program(engine):
        job = Job(engine)
        for _ in range(5):
            job.merge(4.0, FULL)
        kept, model = job.kept(), job.model.copy()
        for _ in range(3):
            job.merge(0.0, (0.0, 0.0))
        assert job.kept() == pytest.approx(kept) and kept > 0 and np.array_equal(job.model, model)
        job.merge(4.0, FULL, spoilt=True)
        assert job.kept() == pytest.approx(kept), "a sum that is not finite takes nothing either"
        for _ in range(60):
            job.merge(4.0, FULL)
        assert (job.model <= job.due + 1e-9).all()
        assert job.model.sum() + job.kept() / 4.0 == pytest.approx(job.due.sum())

    World(2).run(program)


def test_a_checkpoint_has_what_waits(tmp_path):
    def program(engine):
        job, other = Job(engine), Job(engine)
        for row in [FULL] * 4 + [SHORT] * 2 + [(0.0, 0.0)]:
            job.merge(row[engine.rank], row)
        other.exchange.load_state_dict(job.exchange.state_dict())
        other.model = job.model.copy()
        for row in [SHORT, FULL, FULL]:
            for each in (job, other):
                each.merge(row[engine.rank], row)
        assert np.array_equal(job.model, other.model)

    World(2).run(program)


def test_what_others_kept_back_waits_for_a_contribution():
    def program(engine):
        job, other = Job(engine), Job(engine)
        for _ in range(3):
            job.merge(4.0, FULL)
        (kept,) = job.exchange.residuals()
        other.exchange.add_residuals([kept], 1.0)
        other.merge(0.0, (0.0, 0.0))
        assert other.kept() == pytest.approx(float(kept.sum())) and not other.model.any()
        other.merge(4.0, FULL)
        assert other.model.sum() + other.kept() / 4.0 == pytest.approx(float(kept.sum()) / 4.0 + other.due.sum())

    World(2).run(program)


def test_what_weighs_the_same_costs_nothing():
    class Silent:
        def move_residual_to(self, array):
            raise AssertionError("nothing is to be taken from the route")

    carry = ScaledResiduals([Silent()])
    carry._last = carry._usual = 8.0
    array = np.ones(4)
    for weight in (8.0, None):
        carry.add_to(0, array, weight)
        carry.end_step(True)
    assert np.array_equal(array, np.ones(4))


def test_what_a_rank_without_a_share_keeps_is_of_a_usual_weight():
    """As the errors of sums that it encodes for the others are. What it weighs it learns with its first share."""

    class Sums:
        kept = 5.0

        def move_residual_to(self, array):
            array += self.kept
            self.kept = 0.0

    route = Sums()
    carry = ScaledResiduals([route])
    for weight in (None, 24.0):
        array = np.zeros(1)
        carry.add_to(0, array, weight)
        carry.end_step(True)
        assert array[0] == 0.0 and route.kept == 5.0, "the route itself adds it"
    carry.add_to(0, array, 48.0)
    assert array[0] == 10.0 and route.kept == 0.0


class Keeps:
    """A route with a residual, which it adds to the next array by itself."""

    kept = 0.0

    def move_residual_to(self, array):
        array += self.kept
        self.kept = 0.0


@pytest.mark.parametrize("weight", [0.0, None])
def test_what_a_rank_without_loss_terms_keeps_is_of_the_weight_that_the_sum_tells(weight):
    """Of sums over 100, 50 and 100 loss terms of all ranks, of which this one estimates the first and the last."""
    route, array = Keeps(), np.zeros(1)
    carry = ScaledResiduals([route])
    carry.add_to(0, array, 8.0)
    carry.end_step(True, 100.0)
    carry.add_to(0, array, weight)
    route.kept = 3.0  # of the second sum
    carry.end_step(True, 50.0)
    carry.add_to(0, array, 8.0)
    assert array[0] == 6.0 and route.kept == 0.0


def test_a_rank_without_loss_terms_takes_for_a_part_of_a_batch_a_part_of_what_it_keeps():
    route = Keeps()
    carry = ScaledResiduals([route])
    for weight, part, kept, taken in (
        (None, 1.0, 0.0, 0.0), (None, 0.75, 12.0, 9.0), (8.0, 1.0, 9.0, 12.0), (None, 0.25, 12.0, 0.0),
        (None, 1.0, 0.0, 12.0),
    ):  # fmt: skip
        route.kept, array = kept, np.zeros(1)  # of the sum before, or 0: it waits
        carry.add_to(0, array, weight, part=part)
        assert array[0] + route.kept == pytest.approx(taken), "taken here, or by the route"
        carry.end_step(True)


def test_a_step_without_any_weight_takes_nothing_from_what_is_kept():
    """As one that no rank has a loss term in: its sum is multiplied by 0, whatever was added to it."""

    def program(engine):
        job = Job(engine)
        for _ in range(5):
            job.merge(4.0, FULL)
        kept, model = job.kept(), job.model.copy()
        job.exchange._weight = lambda: None  # as a rank without a share, which takes with it what it keeps
        job.merge(0.0, (0.0, 0.0))
        assert job.kept() == pytest.approx(kept) and kept > 0 and np.array_equal(job.model, model)

    World(2).run(program)


class Constant(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weights = torch.nn.Parameter(torch.zeros(SIZE, SIZE, dtype=torch.float64))
        pace = np.random.RandomState(0).rand(SIZE, SIZE)
        self.pace = torch.from_numpy(0.5 + pace)


@pytest.mark.parametrize("shares", [(8, 8), (14, 2)])
def test_a_short_last_batch_of_synchronous_steps(shares):
    """Each epoch ends with a batch of a quarter, shared out as the others are."""

    def program(engine):
        model = Constant()
        balancer = hvd.Balancer(16, shares=shares, adaptive=False, engine=engine)
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=1.0), model.named_parameters(), balancer=balancer,
            compression=hvd.Compression.topk(0.1, warmup_steps=0),
        )  # fmt: skip
        most = 0.0
        for step in range(1, 31):
            balancer.begin(shares[engine.rank] // (1 if step % 6 else 4))
            optimizer.zero_grad()
            (-(model.weights * model.pace).sum()).backward()
            optimizer.step()
            most = max(most, float((model.weights.detach() / (step * model.pace)).max()))
        return most

    assert max(World(2).run(program)) <= 1.0 + 1e-6


class Linear(torch.utils.data.Dataset):
    """Samples whose gradients are what they are, whatever the parameters."""

    def __init__(self, length):
        self.gradients = torch.randn(length, SIZE, SIZE, generator=torch.Generator().manual_seed(0)).double() + 0.5

    def __len__(self):
        return len(self.gradients)

    def __getitem__(self, index):
        return self.gradients[index]


def optimizer_of(weights, balancer, passes, *, compression=None, topology=None):
    return hvd.DistributedOptimizer(
        torch.optim.SGD([weights], lr=1.0), balancer=balancer, backward_passes_per_step=passes, topology=topology,
        compression=compression or hvd.Compression.topk(0.1, warmup_steps=0),
    )  # fmt: skip


@pytest.mark.parametrize("anew", [False, True])
@pytest.mark.parametrize("passes", [1, 2, 3])
@pytest.mark.parametrize(("shares", "rest"), [((14, 2), 1), ((14, 2), 9), ((13, 3), 13), ((20, 11, 1), 23)])
def test_what_a_short_last_batch_leaves_and_takes_is_of_its_own_weight(shares, rest, passes, anew):
    """A loader knows how many samples all ranks have in it. By this rank's share of them, rounded, it would be off by
    half a sample's part; of two samples, by a quarter. An optimizer that is made anew after it sends all that was left.
    """
    whole, data = sum(shares), Linear(3 * sum(shares) + rest)
    batches: dict[int, list[torch.Tensor]] = {}
    updates = [range(at, min(at + passes, 4)) for at in range(0, 4, passes)]  # of an epoch's four batches

    def program(engine):
        weights = torch.nn.Parameter(torch.zeros(SIZE, SIZE, dtype=torch.float64))
        balancer = hvd.Balancer(whole, shares=shares, min_share=0, adaptive=False, engine=engine)
        optimizer = optimizer_of(weights, balancer, passes)
        loader = hvd.BalancedDataLoader(data, balancer=balancer)
        for _ in range(4):
            for index, gradients in enumerate(loader):
                batches.setdefault(balancer.step, []).extend(gradients)
                (weights * gradients).sum((1, 2)).mean().backward()
                if any(index == update[-1] for update in updates):
                    optimizer.step()
                    optimizer.zero_grad()
            if anew:
                optimizer = optimizer_of(weights, balancer, passes)
        return weights.detach(), optimizer._reducer._step.residuals()[weights].reshape(SIZE, SIZE)

    ended = World(len(shares)).run(program)
    due = torch.zeros(SIZE, SIZE, dtype=torch.float64)
    for epoch in range(4):
        for update in updates:
            samples = [sample for index in update for sample in batches[4 * epoch + index]]
            due += len(update) * sum(samples) / len(samples)
    left = sum(each for _, each in ended) / len(shares)  # a weight of 1 is that of a mean share of a whole batch
    torch.testing.assert_close(left - ended[0][0], due, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize(("compression", "nodes"), [
    (hvd.Compression.int8, None),
    (hvd.Compression.int4(warmup_steps=0), None),
    (hvd.Compression.int8, ((0, 1), (2,), (3,))),
    (hvd.Compression.topk(0.1, warmup_steps=0), ((0, 1), (2, 3))),
], ids=["int8", "int4", "int8 of nodes", "topk of nodes"])  # fmt: skip
@pytest.mark.parametrize(("shares", "rest"), [((20, 11, 1, 0), 9), ((20, 11, 1, 0), 23), ((16, 0, 15, 1), 17)])
def test_what_a_rank_without_a_sample_keeps_of_sums_is_of_their_weight(shares, rest, compression, nodes, passes):
    """It encodes a part of the sum of the others' gradients, whatever it has itself: in a short last batch, or always
    where it has no share. What was delivered and what is left are the exact sum."""
    whole, data = sum(shares), Linear(3 * sum(shares) + rest)
    batches: dict[int, list[torch.Tensor]] = {}
    topology = None if nodes is None else Topology(nodes=nodes)

    def program(engine):
        weights = torch.nn.Parameter(torch.zeros(SIZE, SIZE, dtype=torch.float64))
        balancer = hvd.Balancer(whole, shares=shares, min_share=0, adaptive=False, engine=engine)
        optimizer = optimizer_of(weights, balancer, passes, compression=compression, topology=topology)
        loader = hvd.BalancedDataLoader(data, balancer=balancer)
        for _ in range(3):
            for gradients in loader:
                batches.setdefault(balancer.step, []).extend(gradients)
                (weights * gradients).sum((1, 2)).mean().backward()
                if balancer.step % passes == passes - 1:
                    optimizer.step()
                    optimizer.zero_grad()
        return weights.detach(), optimizer._reducer._step.residuals().get(weights, torch.zeros(SIZE * SIZE))

    ended = World(len(shares)).run(program)
    due = torch.zeros(SIZE, SIZE, dtype=torch.float64)
    for first in range(0, 12, passes):
        samples = [sample for step in range(first, first + passes) for sample in batches[step]]
        due += passes * sum(samples) / len(samples)
    left = sum(each for _, each in ended).reshape(SIZE, SIZE) / len(shares)
    torch.testing.assert_close(left - ended[0][0], due, rtol=1e-9, atol=1e-9)


def test_what_was_given_back_twice_is_kept_as_a_whole():
    """As where ranks change once more before the next exchange."""

    carry = ScaledResiduals([Nothing()])
    for value in (1.0, 2.0):
        carry.add([np.full(3, value)])
    (kept,) = carry.take_residuals([np.zeros(3)])
    assert kept.tolist() == [3.0] * 3 and carry.residuals([np.zeros(3)]) == [None]


@pytest.mark.parametrize(("weight", "taken"), [(8.0, 6.0), (4.0, 3.0), (16.0, 12.0), (2.0, 0.0)])
def test_what_is_given_back_is_of_the_last_weight_as_what_was_kept_here_is(weight, taken):
    carry, array = ScaledResiduals([Nothing()]), np.zeros(3)
    carry.add_to(0, array, 8.0)
    carry.end_step(True)
    carry.add([np.full(3, 6.0)])
    carry.add_to(0, array, weight)
    assert array.tolist() == [taken] * 3


def test_a_second_short_one_takes_nothing_with_it_either():
    carry, taken = ScaledResiduals([Nothing()]), []
    for weight in (8.0, 1.0, 1.0, 8.0):
        array = np.zeros(1)
        carry.add_to(0, array, weight)
        carry.end_step(True)
        taken.append(float(array[0]))
        if len(taken) == 1:
            carry.add([np.full(1, 6.0)])
    assert taken == [0.0, 0.0, 0.0, 6.0]


@pytest.mark.parametrize("part", [0.5, 0.75, 1.0])
def test_residuals_pass_on_in_the_unit_of_whole_batches(part):
    """What a short batch has left is of a whole one for who takes it; a short one takes a part of that."""

    class Kept(Nothing):
        def add_residual_to(self, array):
            array += 3.0 * part  # of a sum of the weight 8 * part

    before, after = ScaledResiduals([Kept()]), ScaledResiduals([Nothing()])
    before.add_to(0, np.zeros(2), 8.0 * part, part=part)
    before.end_step(True)
    (kept,) = before.residuals([np.zeros(2)])
    assert kept.tolist() == [3.0] * 2
    after.add([kept])
    array = np.zeros(2)
    after.add_to(0, array, 40.0 * part, part=part)
    assert array.tolist() == [3.0 * part] * 2
    after.end_step(False)
    (kept,) = after.residuals([np.zeros(2)])
    assert kept.tolist() == [3.0] * 2


class Codec:
    """A route that keeps back a part of each array."""

    def __init__(self):
        self.kept = np.zeros(1)

    def add_residual_to(self, array):
        array += self.kept

    def move_residual_to(self, array):
        array += self.kept
        self.kept = np.zeros(1)

    def sent(self, array, part):
        """Of an array with what is kept of those before."""
        array = array + self.kept
        self.kept = part * array
        return array - self.kept


@pytest.mark.parametrize("seed", range(20))
def test_what_is_kept_back_goes_into_later_sums_as_what_it_is_once(seed):
    """Whatever arrays weigh, other ranks give, and does not count; a whole batch weighs 8."""
    dice = np.random.RandomState(seed)
    route, due = Codec(), 0.0  # `due`: what is not sent yet, divided by its weight
    carry = ScaledResiduals([route])
    for step in range(40):
        weight, counts = (float(dice.choice([0.0, 1.0, 1.0, 3.0, 8.0])), dice.rand() < 0.8) if step else (8.0, True)
        if dice.rand() < 0.3:
            carry.add([np.full(1, 5.0)])
            due += 5.0 / 8.0
        array = np.full(1, weight)
        carry.add_to(0, array, weight, part=weight / 8.0)
        before, sent = route.kept, float(route.sent(array, dice.rand())[0])
        if not counts:
            route.kept = before
        elif weight:
            due += 1.0 - sent / weight
        else:
            assert sent == 0.0
        carry.end_step(counts)
        (kept,) = carry.residuals([np.zeros(1)])
        assert (0.0 if kept is None else kept[0]) == pytest.approx(8.0 * due, rel=1e-9, abs=1e-9), step
    for _ in range(9):  # all of one weight, of which the last ones are the usual
        array = np.zeros(1)
        carry.add_to(0, array, 1.0, part=1.0 / 8.0)
        due -= float(route.sent(array, 0.0)[0])
        carry.end_step(True)
    assert due == pytest.approx(0.0, abs=1e-9) and carry.residuals([np.zeros(1)]) == [None]


def test_what_is_given_back_counts_in_the_unit_of_who_takes_it():
    def program(engine):
        job = Job(engine)
        assert job.exchange.add_residuals([np.ones(SIZE * SIZE)], 0.5)
        assert job.kept() == pytest.approx(SIZE * SIZE / 2)
        assert not job.exchange.add_residuals([np.ones(3)], 0.5), "of other buckets"

    World(2).run(program)


def test_what_is_given_to_a_rank_of_no_known_weight_is_in_its_unit_after_a_step_that_did_not_count_as_well():
    residuals, like = ScaledResiduals([Nothing()]), np.zeros(2)
    residuals.add([np.array([3.0, 5.0])])
    for counts in (False, True):
        array = np.zeros(2)
        residuals.add_to(0, array, 8.0 if counts else None)
        assert array.tolist() == [3.0, 5.0]
        residuals.end_step(counts)
    assert residuals.residuals([like]) == [None]


def test_a_step_that_counts_for_nobody_leaves_what_is_kept_alone():
    """As one in which a rank could not deliver its batch: all who catch that train on."""

    def program(engine):
        job = Job(engine)
        for _ in range(5):
            job.merge(4.0, FULL)
        kept = job.kept()
        job.exchange._fails = lambda total: True
        job.merge(4.0, FULL)
        assert job.kept() == pytest.approx(kept) and kept > 0

    World(2).run(program)


def test_what_a_step_that_did_not_count_has_taken_up_comes_back_whole():
    """A residual of other ranks, given before anything was summed here, in a first step that was not finite."""

    carry = ScaledResiduals([Nothing()])
    carry.add([np.full(3, 6.0)])
    carry.add_to(0, np.zeros(3), 512.0)
    carry.end_step(False)
    (kept,) = carry.residuals([np.zeros(3)])
    assert kept.tolist() == [6.0] * 3


class Broken:
    """A sum that has failed."""

    def __init__(self, handle):
        self._handle = handle

    def wait(self):
        self._handle.wait()
        raise RuntimeError("the sum has failed")


def test_nothing_is_lost_by_a_sum_that_fails():
    """The next one is short and takes nothing along; what the failed one took along waits still."""

    def program(engine):
        job = Job(engine)
        for _ in range(5):
            job.merge(4.0, FULL)
        kept = job.kept()
        job.weight = 3.0  # another weight than the last, so that the residual is added to the array
        job.array[:] = 0.0
        job.exchange.submit(0)
        assert job.exchange._residuals._taken, "or this test shows nothing"
        job.exchange._handles[0] = Broken(job.exchange._handles[0])
        with pytest.raises(RuntimeError, match="has failed"):
            job.exchange.finish(lambda total: 1.0)
        job.weight = 0.25
        job.array[:] = 0.0
        job.exchange.submit(0)
        job.exchange.finish(lambda total: 1.0)
        assert job.kept() >= 0.05 * kept > 0

    World(2).run(program)


def test_a_state_may_be_loaded_within_a_step():
    carry = ScaledResiduals([Nothing()])
    fresh = carry.state_dict()
    carry.add([np.full(3, 6.0)])
    carry.add_to(0, np.zeros(3), 4.0)
    carry.load_state_dict(fresh, [np.zeros(3)])
    carry.end_step(True)
    assert carry.residuals([np.zeros(3)]) == [None]
