"""Laws of `ShareSampler` on ranks that are threads: law 4, however far and fast loaders deal ahead."""

import queue
import threading

import numpy as np
import pytest
from simulated import Speed

from hvd_hetero.engine.local import SoloEngine, World
from hvd_hetero.optimizers.balancer import Balancer
from hvd_hetero.optimizers.control import ORIGINS, unpack
from hvd_hetero.optimizers.dealer import Dealer, proportional
from hvd_hetero.optimizers.sampler import ShareSampler
from hvd_hetero.policy.partition import equal_shares

WHOLE = 32
SECONDS_PER_SAMPLE = (0.1, 0.2, 0.4)  # simulated: so much that what exchanges really take here is little


def step(balancer, samples, watch):
    """One batch and its exchange, as a training loop makes them."""
    balancer.begin(samples)
    watch.samples = samples
    balancer.step_timer.pause()
    vector = np.array(balancer.dialogue.outgoing(leads=True, count=samples))
    total = balancer.engine.allreduce_async(vector, name="control").wait()
    balancer.step_timer.run()
    balancer.dialogue.incoming(unpack(total.tolist(), ranks=balancer.size), leads=True)
    balancer.exchanged(wait_s=0.0, bytes_sent=0, leads=True)


def make(engine, length, **options):
    watch = Speed(SECONDS_PER_SAMPLE[engine.rank])
    balancer = Balancer(engine, global_batch_size=WHOLE, stopwatch=watch)
    options = {"shuffle": True, "seed": 5, "drop_last": False, **options}
    return balancer, ShareSampler(length, balancer=balancer, **options), watch


@pytest.mark.parametrize("length", [WHOLE * 20, WHOLE * 20 - 29, WHOLE * 19 + 2])
def test_every_sample_once_however_far_a_thread_deals_ahead(length):
    steps, epochs = 20, 4

    def program(engine):
        balancer, sampler, watch = make(engine, length)
        sampler.rewind()
        prefetched = queue.Queue(maxsize=(1, 9, 40)[engine.rank])  # ranks deal ahead differently, and nobody is told

        def load():
            for _ in range(steps * epochs):
                prefetched.put(sampler.deal())

        thread = threading.Thread(target=load, daemon=True)
        thread.start()
        seen = np.zeros((epochs, length), dtype=int)
        for number in range(steps * epochs):
            if number == 40:
                watch.seconds_per_sample = SECONDS_PER_SAMPLE[engine.rank - 1]
            mine = prefetched.get()
            assert sampler.used() == mine.used
            seen[number // steps][mine.indices[: mine.used]] += 1
            step(balancer, mine.used, watch)
        thread.join()
        return seen, balancer.plans

    ended = World(3).run(program)
    assert (sum(seen for seen, _ in ended) == 1).all()
    assert all(plans == ended[0][1] for _, plans in ended)
    assert len(ended[0][1]) >= 3, "the plan never changed: the test shows nothing"


@pytest.mark.parametrize("no_answer", [
    lambda balancer: balancer.dialogue.unheard(),  # the exchange failed
    lambda balancer: balancer.load_state_dict(balancer.state_dict()),  # the job goes back to a commit
    lambda balancer: balancer.engine.rebuild(),  # the ranks become others
])
def test_a_thread_that_deals_ahead_waits_for_the_answer_and_no_longer(no_answer):
    balancer = Balancer(SoloEngine(), global_batch_size=4)
    balancer.begin(4)
    balancer.deal(2)
    balancer.dialogue.outgoing(leads=True, count=4.0)  # says: dealt up to batch 2
    dealt = threading.Event()

    def beyond():
        balancer.deal(3)
        dealt.set()

    threading.Thread(target=beyond, daemon=True).start()
    assert not dealt.wait(0.1), "batch 3 was dealt although nobody was told"
    no_answer(balancer)
    assert dealt.wait(5.0)


def test_a_rank_that_says_answers_in_advance_deals_on_after_the_last():
    balancer = Balancer(SoloEngine(), global_batch_size=4)
    balancer.begin(4)
    said = balancer.dialogue.outgoing(leads=True, count=4.0, ahead=2, answers=3)
    again = balancer.dialogue.outgoing_in_advance()
    assert unpack(said, ranks=1).dealt_ahead == unpack(again, ranks=1).dealt_ahead == (0,)
    dealt = threading.Event()

    def beyond():
        balancer.deal(3)
        dealt.set()

    threading.Thread(target=beyond, daemon=True).start()
    for answer in range(3):
        assert not dealt.wait(0.05), f"dealt before answer {answer}"
        balancer.dialogue.incoming(unpack(said, ranks=1), leads=True, step=0, ahead=2)
    assert dealt.wait(5.0)


def test_the_thread_that_exchanges_never_waits_for_itself():
    balancer = Balancer(SoloEngine(), global_batch_size=4)
    balancer.begin(4)
    balancer.dialogue.outgoing(leads=True, count=4.0)
    assert balancer.deal(7).shares == (4,)


def test_what_was_dealt_and_not_used_is_dealt_again():
    _, sampler, _ = make(SoloEngine(), WHOLE * 3)
    sampler.rewind()
    first = [sampler.deal().indices.tolist() for _ in range(5)]  # into the next epoch
    sampler.used()
    sampler.rewind()
    assert [sampler.deal().indices.tolist() for _ in range(4)] == first[1:]
    assert sorted(sum(first[:3], [])) == list(range(WHOLE * 3)) and first[3] != first[0]


def test_a_batch_is_dealt_by_the_plan_of_the_step_that_will_use_it_also_when_dealt_again(monkeypatch):
    balancer, sampler, watch = make(SoloEngine(), WHOLE * 9)
    asked = []
    monkeypatch.setattr(balancer, "deal", lambda step: asked.append(step) or balancer.plan_at(step))
    for number in range(4):
        sampler.rewind()
        for _ in range(3):  # of which one is used
            sampler.deal()
        assert asked[-3:] == [number, number + 1, number + 2]
        step(balancer, sampler.used(), watch)


def test_a_state_saved_anywhere_goes_on_from_there():
    _, sampler, _ = make(SoloEngine(), WHOLE * 3)
    sampler.rewind()
    expected = [sampler.deal().indices.tolist() for _ in range(7)]
    for used in range(6):
        _, again, _ = make(SoloEngine(), WHOLE * 3)
        again.load_state_dict(sampler.state_dict())
        again.rewind()
        assert again.deal().indices.tolist() == expected[used]
        sampler.used()


def test_an_epoch_that_is_chosen_anew_starts_at_its_beginning_wherever_it_was_broken_off():
    balancer = Balancer(SoloEngine(), global_batch_size=4)
    sampler = ShareSampler(12, balancer=balancer, shuffle=True, seed=5, drop_last=False)
    order = sampler.dealer.order(0).tolist()
    for used in range(4):
        sampler.set_epoch(0)
        sampler.rewind()
        for _ in range(used):
            sampler.deal()
            sampler.used()
        sampler.set_epoch(0)
        sampler.rewind()
        assert sampler.deal().indices.tolist() == order[:4], used


def test_an_epoch_that_was_over_is_over_after_a_restore_and_may_be_repeated_on_purpose():
    _, sampler, _ = make(SoloEngine(), WHOLE * 3)
    sampler.set_epoch(4)
    sampler.rewind()
    for _ in range(3):
        sampler.deal()
        sampler.used()
    before_its_end = sampler.state_dict()
    sampler.end_epoch()
    after_its_end = sampler.state_dict()
    assert after_its_end["epoch"] == 5
    for state in (before_its_end, after_its_end):
        sampler.load_state_dict(state)
        sampler.set_epoch(4)
        assert (sampler.epoch, sampler.position) == (4, 3), "nothing of it is left"
        sampler.set_epoch(5)
        assert (sampler.epoch, sampler.position) == (5, 0)
        sampler.load_state_dict(state)
        sampler.set_epoch(4)
        sampler.end_epoch()
        sampler.set_epoch(4)
        assert (sampler.epoch, sampler.position) == (4, 0), "on purpose, not by a restore"
    sampler.load_state_dict(after_its_end)
    sampler.set_epoch(3)
    assert (sampler.epoch, sampler.position) == (3, 0)


def test_a_rank_without_a_sample_gets_one_of_another_to_look_at():
    def program(engine):
        _, sampler, _ = make(engine, WHOLE + 2)
        sampler.rewind()
        sampler.deal()
        return sampler.deal()

    last = World(3).run(program)
    assert sum(dealt.used for dealt in last) == 2
    assert [len(dealt.indices) for dealt in last] == [max(1, dealt.used) for dealt in last]


def test_ranks_that_disagree_all_hear_of_it():
    errors = World(2).run(lambda engine: make(engine, WHOLE + engine.rank), errors="return")
    assert all("dataset length: expected the same" in str(error) for error in errors)


@pytest.mark.parametrize("call, words", [
    (lambda sampler: sampler.set_epoch(-1), "epoch: expected an integer of at least 0. Received: -1"),
    (lambda sampler: sampler.set_epoch("1"), "epoch: expected an integer"),
    (lambda sampler: sampler.balancer.begin(2.5), "samples: expected an integer of at least 0. Received: 2.5"),
    (lambda sampler: sampler.balancer.begin(0, whole=0), "whole: expected an integer of at least 1 or None. Received"),
    (lambda sampler: sampler.balancer.begin(3, whole=2), "whole: expected an integer of at least 3 or None. Received"),
    (lambda sampler: ShareSampler(8, balancer=8, shuffle=True, seed=0, drop_last=False), "an hvd.Balancer"),
    (lambda sampler: ShareSampler(8.0, balancer=sampler.balancer, shuffle=True, seed=0, drop_last=False), "length"),
    (lambda sampler: ShareSampler(8, balancer=sampler.balancer, shuffle=True, seed=1.5, drop_last=False), "seed"),
])  # fmt: skip
def test_wrong_arguments(call, words):
    sampler = make(SoloEngine(), WHOLE)[1]
    with pytest.raises((TypeError, ValueError), match=words):
        call(sampler)


@pytest.mark.parametrize("seed", [-1, 2**32 + 7, 2**40])
def test_any_whole_number_is_a_seed(seed):
    dealer = Dealer(24, global_batch_size=8, shuffle=True, seed=seed, drop_last=False)
    assert sorted(dealer.order(0).tolist()) == list(range(24)) != dealer.order(0).tolist()


def test_of_ranks_alike_the_first_have_what_is_left_of_a_short_batch():
    """As in equal shares: the largest first."""
    assert proportional((4, 4, 4), 8) == (3, 3, 2) == equal_shares(8, 3)


def test_a_thread_that_still_deals_for_an_epoch_that_is_over_changes_nothing():
    balancer = Balancer(SoloEngine(), global_batch_size=4)
    sampler = ShareSampler(400, balancer=balancer, shuffle=False, seed=0, drop_last=False)
    balancer.dialogue.horizon.said(-1, lookahead=1, ahead=0)
    sampler.deal()
    waits, deal = threading.Event(), balancer.deal

    def dealing(step):
        waits.set()
        return deal(step)

    balancer.deal = dealing
    thread = threading.Thread(target=sampler.deal, daemon=True)
    thread.start()
    assert waits.wait(5)
    sampler.rewind()
    balancer.deal = deal
    dealt = [sampler.deal().indices[0]]
    with balancer.dialogue.horizon.heard():
        pass
    thread.join(5)
    dealt += [sampler.deal().indices[0] for _ in range(2)]
    assert dealt == [0, 4, 8]


def test_a_look_ahead_sees_what_will_be_dealt_and_deals_nothing():
    """Also into the next epoch, and past a short batch of which a rank has no sample."""

    def program(engine):
        _, sampler, _ = make(engine, 2 * WHOLE + 1)
        sampler.rewind()
        sampler.deal()
        sampler.used()
        seen = [sampler.peek(index) for index in range(5)]
        assert sampler.pending == 0 and sampler.position == 1
        dealt = [sampler.deal() for _ in range(5)]
        assert sampler.pending == 5
        return [(a.indices.tolist(), a.used) for a in seen], [(b.indices.tolist(), b.used) for b in dealt]

    found = World(3).run(program)
    assert all(seen == dealt for seen, dealt in found)
    assert sum(seen[1][1] for seen, _ in found) == 1 and all(len(seen[1][0]) == 1 for seen, _ in found)


@pytest.mark.parametrize("shuffle", [True, False])
def test_places_of_an_order_have_numbers_of_their_own(shuffle):
    """An epoch in the order of the data is the same batches once more, and has the same ones."""
    _, sampler, _ = make(SoloEngine(), 12 * WHOLE, shuffle=shuffle)
    found = []
    for _ in range(2):
        sampler.rewind()
        for _ in range(12):
            sampler.deal()
            sampler.used()
            found.append(sampler.origin)
        sampler.end_epoch()
    assert (found[:12] == found[12:]) is not shuffle and len(set(found[:12])) > 6
    assert all(0 <= number < ORIGINS for number in found)


@pytest.mark.parametrize("name", ["length", "seed", "global_batch_size"])
def test_a_state_of_another_order_is_refused_and_changes_nothing(name):
    _, sampler, _ = make(SoloEngine(), 3 * WHOLE)
    state = {**sampler.state_dict(), "epoch": 4, "position": 2}
    words = f"a sampler with {name} {state[name]}. Received: {state[name] + 1}. Its place is one in the same data"
    with pytest.raises(ValueError, match=words):
        sampler.load_state_dict({**state, name: state[name] + 1})
    assert (sampler.epoch, sampler.position) == (0, 0)
    sampler.rewind()
    sampler.deal()
    sampler.load_state_dict(state)
    assert (sampler.epoch, sampler.position, sampler.pending) == (4, 2, 0), "what was dealt before is not used after it"
