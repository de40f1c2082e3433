"""What is made with a balancer and has a state: it lives as long as something needs it."""

import copy
import gc
import pickle

import numpy as np
import pytest
import torch
from horovod.common.exceptions import HostsUpdatedInterrupt
from torch import nn

pytest.importorskip("keras", reason="pip install keras with TensorFlow or torch")
pytest.importorskip("horovod.torch", reason="build it with hvd-hetero build-horovod")


import hvd_hetero.keras as hvd_keras
import hvd_hetero.torch as hvd
from hvd_hetero.engine.job_state import JobState
from hvd_hetero.engine.local import SoloEngine, World
from hvd_hetero.engine.payload import gather_bytes
from hvd_hetero.engine.termination import EXIT_STATUS_LEFT
from hvd_hetero.optimizers.balancer import Balancer
from hvd_hetero.optimizers.exchange_count import ExchangeCount

LENGTH, WHOLE = 12, 4
PROTOTYPE = nn.Linear(2, 1).double()


class Numbers(torch.utils.data.Dataset):
    def __len__(self):
        return LENGTH

    def __getitem__(self, index):
        return (torch.tensor(index),)


def keras_dataset(balancer, **options):
    return hvd_keras.BalancedDataset(np.arange(LENGTH), balancer=balancer, **options)


def torch_loader(balancer, **options):
    return hvd.BalancedDataLoader(Numbers(), balancer=balancer, **options)


FACES = pytest.mark.parametrize("face, made", [(hvd, torch_loader), (hvd_keras, keras_dataset)])


@FACES
def test_a_loader_for_each_epoch_is_gone_with_its_epoch(face, made):
    balancer = face.Balancer(WHOLE, engine=SoloEngine())
    for epoch in range(3):
        loader = made(balancer)
        loader.set_epoch(epoch)
        for _ in loader:
            balancer.step_timer.pause()
        assert list(balancer.stateful_parts.named.values()) == [getattr(loader, "batch_sampler", loader)]
        del loader
        gc.collect()
        assert not balancer.stateful_parts.named, "its order is as long as the data"
    assert balancer.stateful_parts.made == 3


def test_what_a_script_does_not_name_lives_as_long_as_it_is_needed():
    def program(engine):
        model = copy.deepcopy(PROTOTYPE)
        balancer = hvd.Balancer(WHOLE, engine=engine, adaptive=False)
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), balancer=balancer)
        hvd.LatencyAwareLR(optimizer, balancer, base_batch_size=1)  # a factor of 4
        seen = 0
        for (x,) in torch_loader(balancer):
            gc.collect()
            seen += len(x)
            if seen == len(x):
                engine.rebuild()
                balancer.begin(len(x))
            assert {"LatencyAwareLR.1", "BalancedBatchSampler.2"} == set(balancer.stateful_parts.named)
            before = model.bias.item()
            optimizer.zero_grad()
            model(torch.ones(len(x), 2, dtype=torch.float64)).mean().backward()
            optimizer.step()
            assert model.bias.item() == pytest.approx(before - 4.0)
        return seen

    assert sum(World(2).run(program)) == LENGTH




class Ranks:
    """Horovod's functions for objects, on an engine."""

    def __init__(self, engine):
        self.engine, self.rank, self.size = engine, lambda: engine.rank, lambda: engine.size

    def allgather_object(self, value, name):
        return [pickle.loads(one) for one in gather_bytes(self.engine, pickle.dumps(value), name=name)]

    def broadcast_object(self, value, root, name):
        return self.allgather_object(value, name)[root]


def taken(loader):
    """The samples of one batch after the other, trained on."""
    for batch in loader:
        loader.balancer.begin_if_unannounced()  # as an exchange asks
        yield np.ravel(batch[0] if isinstance(batch, (tuple, list)) else batch).tolist()


@FACES
@pytest.mark.parametrize("named", [True, False])
def test_a_loader_that_is_made_after_the_state_is_part_of_it(face, made, named, capfd):
    def program(engine):
        def job():
            balancer = face.Balancer(WHOLE, engine=engine, adaptive=False)
            loader = {"loader": made(balancer)} if named else {}
            state = JobState({"balancer": balancer, **loader}, horovod=Ranks(engine))
            return state, state.loader if named else made(balancer)

        state, loader = job()
        state.sync()
        source = taken(loader)
        next(source)
        state.save()
        second = next(source)
        state.restore()
        source = taken(loader)
        assert next(source) == second, "back where it was saved"
        content = state.shared_state()
        state, loader = job()
        state.load_shared_state(content)
        assert loader.state_dict()["position"] == 2
        next(taken(loader))
        state.restore()
        assert loader.state_dict()["position"] == 2, "what is restored is kept"
        if not named:
            balancer = face.Balancer(WHOLE, engine=engine, adaptive=False)
            JobState({"balancer": balancer}, horovod=Ranks(engine)).load_shared_state(content)

    World(2).run(program)
    assert capfd.readouterr().err.count("so begun anew: Balanced") == (0 if named else 1), "rank 0 says what is missing"


class Count:
    """Something with a state, which no other rank need have."""

    def __init__(self, balancer, value=0):
        self.value = value
        balancer.stateful_parts.add(self)

    def state_dict(self):
        return self.value

    def load_state_dict(self, state):
        self.value = state


def test_who_joins_gets_what_others_have_made_before_they_trained():
    """Number by number, although others have made more, which one of them still has."""

    def program(engine):
        joins = engine.rank == 2
        balancer = Balancer(engine, global_batch_size=WHOLE)
        state = JobState({"balancer": balancer}, horovod=Ranks(engine))
        before = Count(balancer, value=0 if joins else 2)
        if not joins:
            state.commits, state._synced = 1, True
            within = [Count(balancer, value=9) for _ in range(2)]
            del within[engine.rank :]
            state.save()
        state.sync()
        within = Count(balancer, value=3 * engine.rank)
        state.commits += engine.rank == 1
        state.sync()
        return before.value, within.value, balancer.stateful_parts.made

    assert World(3).run(program) == [(2, 3, 4)] * 3


class Own(Count):
    """Something of which a part is each rank's own, as the place in its stream."""

    def __init__(self, balancer, value, own):
        self.own = own
        super().__init__(balancer, value)

    def own_state_dict(self):
        return {"own": self.own}

    def load_own_state_dict(self, state):
        self.own = state["own"]


def test_what_is_a_ranks_own_goes_back_to_a_commit_and_is_sent_to_no_other():
    def program(engine):
        balancer = Balancer(engine, global_batch_size=WHOLE)
        state = JobState({"balancer": balancer}, horovod=Ranks(engine))
        Count(balancer)  # has none
        part = Own(balancer, engine.rank, f"of rank {engine.rank}")
        state.sync()
        state.save()
        part.value, part.own = 7, "later"
        state.restore()
        return part.value, part.own

    assert World(2).run(program) == [(0, "of rank 0"), (0, "of rank 1")]


class Sum:
    """Of the gradients of some batches."""

    def __init__(self, value):
        self.value = value

    def sums(self):
        return {"sum": self.value}

    def load_sums(self, sums):
        self.value = sums["sum"] if sums else 0.0


def test_what_was_added_up_of_batches_goes_back_with_the_rest():
    balancer = Balancer(SoloEngine(), global_batch_size=WHOLE)
    sums, adder = balancer.sums.take("optimizer"), Sum(0.0)
    sums.put("gradients", adder)
    state = JobState({"balancer": balancer}, horovod=Ranks(SoloEngine()))
    adder.value = 1.0
    state.save()
    adder.value = 3.0  # of a batch that is done again
    state.restore()
    assert adder.value == 1.0


def test_what_was_added_up_since_another_commit_is_dropped_after_as_many_batches():
    """It may have been exchanged since."""

    def program(engine):
        balancer, found = Balancer(engine, global_batch_size=WHOLE), []
        sums, adder = balancer.sums.take("optimizer"), Sum(0.0)
        sums.follow(count := ExchangeCount(lambda: 0, 4))
        sums.put("gradients", adder)
        state = JobState({"balancer": balancer}, horovod=Ranks(engine))
        state.check_host_updates, state._all_leaving = lambda: None, list

        def syncs(value, begun):
            adder.value, count.begun = value, begun
            state.sync()
            found.append((adder.value, count.begun))

        syncs(1.0, 3)
        if engine.rank == 1:  # the others broke off right before
            state.commit()
        syncs(2.0, engine.rank)
        adder.value = 3.0
        state.save()
        state.on_reset()
        syncs(0.0, 0)  # made anew
        syncs(4.0, 1)
        return found

    others, leads = [[(1.0, 3), (value, 1), (3.0, 1), (4.0, 1)] for value in (0.0, 2.0)]
    assert World(3).run(program) == [others, leads, others]


def test_all_go_on_from_who_has_committed_most_and_of_several_from_the_first():
    def program(engine):
        state = JobState(
            {"balancer": Balancer(engine, global_batch_size=WHOLE), "epoch": engine.rank}, horovod=Ranks(engine)
        )
        state.check_host_updates, state._all_leaving = lambda: None, list
        state.sync()
        first, state.epoch = state.epoch, 10 + engine.rank
        if engine.rank == 1:  # the others broke off right before
            state.commit()
        state.sync()
        return first, state.epoch, state.commits

    assert World(3).run(program) == [(0, 11, 1)] * 3


class Exchange:
    """Which keeps something back."""

    def __init__(self):
        self.given = 0

    def residuals(self):
        return [np.ones(2)]

    def add_residuals(self, kept, factor):
        self.given += len(kept)
        return True

    def state_dict(self):
        return {}

    def load_state_dict(self, state): ...


def test_what_was_kept_back_is_given_back_once_and_only_to_other_ranks():
    balancer, exchange = Balancer(SoloEngine(), global_batch_size=WHOLE), Exchange()
    balancer.keepers.take("optimizer").put("gradients", [exchange], lambda: 1.0)
    state, seen = JobState({"balancer": balancer}, horovod=Ranks(SoloEngine())), []
    for rebuilt in (False, True, False):
        if rebuilt:
            state.on_reset()
        state.sync()
        seen.append(exchange.given)
    assert seen == [0, 1, 1], "these exchanges have it, until ranks become others"


class Merging(JobState):
    """With a local strategy."""

    merges = 0

    def _merge(self, part):
        type(self).merges += 1
        part.value = "one model"


def test_a_commit_is_of_one_model_and_nobody_merges_with_ranks_that_are_gone():
    balancer = Balancer(SoloEngine(), global_batch_size=WHOLE)
    state = Merging({"model": (model := Count(balancer))}, horovod=Ranks(SoloEngine()))
    state.check_host_updates = lambda: None
    model.value = "of this rank"
    state.commit()
    before, Merging.merges = Merging.merges, 0
    state.break_off()
    model.value = "undone"
    state.restore()
    assert model.value == "one model" and before == 1 and Merging.merges == 0
    state.sync()
    state.restore()
    assert Merging.merges == 1, "with those that there are now"


def test_nothing_is_undone_where_hosts_come_or_go(monkeypatch):
    balancer = Balancer(SoloEngine(), global_batch_size=WHOLE)
    state = JobState({"balancer": balancer, "epoch": 0}, horovod=Ranks(SoloEngine()))

    def interrupt(self):
        raise HostsUpdatedInterrupt(False)

    monkeypatch.setattr(JobState.__base__, "check_host_updates", interrupt)
    state.epoch = 3
    with pytest.raises(HostsUpdatedInterrupt):
        state.check_host_updates()
    state.epoch = 4
    state.restore()
    assert state.epoch == 3


def test_who_was_told_to_end_does_so_at_a_commit():
    balancer = Balancer(SoloEngine(), global_batch_size=WHOLE)
    state = JobState({"balancer": balancer}, horovod=Ranks(SoloEngine()))
    balancer.leave()
    with pytest.raises(SystemExit):
        state.commit()


def test_what_was_added_up_before_a_checkpoint_is_restored_is_forgotten():
    balancer, adder = Balancer(SoloEngine(), global_batch_size=WHOLE), Sum(0.0)
    balancer.sums.take("optimizer").put("gradients", adder)
    state = JobState({"balancer": balancer}, horovod=Ranks(SoloEngine()))
    content, adder.value = state.shared_state(), 3.0
    state.load_shared_state(content)
    assert adder.value == 0.0


@pytest.mark.parametrize("told", [(0, 1), (0,)])
def test_ranks_that_were_told_to_end_in_different_steps_leave_at_one_commit(told, monkeypatch):
    """Whatever exchanges have said of it until then."""
    monkeypatch.setattr("hvd_hetero.engine.job_state.is_elastic", lambda: True)

    def program(engine):
        balancer, saved = Balancer(engine, global_batch_size=WHOLE), []
        state = JobState({"balancer": balancer}, horovod=Ranks(engine))
        state.at_end = lambda: saved.append(engine.rank)
        if engine.rank in told:
            state.leave()
        balancer.departure.leaving.hear((0,), 0)  # rank 1 has not said it yet
        try:
            state.commit()
        except (SystemExit, HostsUpdatedInterrupt) as end:
            return saved, getattr(end, "code", "goes on")
        return None

    both, one = [([0], EXIT_STATUS_LEFT), ([1], EXIT_STATUS_LEFT)], [([], EXIT_STATUS_LEFT), ([], "goes on")]
    assert World(2).run(program) == (both if told == (0, 1) else one)
