"""Which batch an exchange of gradients is of: announced ahead, begun by hand, in parts, or again."""

import time

import pytest

pytest.importorskip("keras", reason="pip install keras with TensorFlow or torch")
pytest.importorskip("horovod", reason="build it with hvd-hetero build-horovod")


from keras_samples import LENGTH, SHARES, WHOLE, Keras, arrays, make, numbers

from hvd_hetero.engine.local import SoloEngine, World
from hvd_hetero.keras.dataset import BalancedDataset


class Exchange:
    """What a balancer tells of batches."""

    def on_begin(self): ...

    def on_count(self): ...

    def on_epoch_end(self): ...

    def withdraw(self):
        return lambda: True


def test_a_batch_begins_with_the_exchange_that_comes_first_and_again():
    """Two optimizers in a training step; and then another one, as `compile` makes for thawed layers."""
    from hvd_hetero.keras.balancer import Balancer as OfKeras

    balancer = OfKeras(WHOLE, engine=SoloEngine())
    first, second, third = Exchange(), Exchange(), Exchange()
    for each in (first, second, third):
        balancer.exchanges.attach(each)
    for samples in (8, 7, 6):
        balancer.announce(samples)
    seen = []
    for each in (second, first, second, first):
        balancer.exchanges.arrivals.first(each)
        seen.append((balancer.step, balancer.progress.terms, balancer.exchanges.leads(second)))
    assert seen == [(0, 8.0, True), (0, 8.0, True), (1, 7.0, True), (1, 7.0, True)]
    balancer.forget()  # an epoch begins
    for samples in (5, 4):
        balancer.announce(samples)
    for at, samples in ((2, 5.0), (3, 4.0)):
        balancer.exchanges.arrivals.first(third)
        assert (balancer.step, balancer.progress.terms, balancer.exchanges.leads(third)) == (at, samples, True)
    balancer.begin(3)  # a loop without a dataset
    balancer.exchanges.arrivals.first(third)
    balancer.exchanges.arrivals.first(first)
    assert (balancer.step, balancer.progress.terms, balancer.exchanges.leads(third)) == (4, 3.0, True)


def test_gradients_of_a_batch_of_which_some_are_there_are_of_that_batch():
    """And not of the next one, which may be of another size, or without a sample: what a normalisation asks."""
    from hvd_hetero.keras.balancer import Balancer as OfKeras

    balancer = OfKeras(WHOLE, min_share=0, engine=SoloEngine())
    exchange = Exchange()
    balancer.exchanges.attach(exchange)
    balancer.forget(ahead=True)
    seen = []
    for samples in (8, 0, 3):
        balancer.announce(samples)
    for terms in (16.0, 0.0, 9.0):
        balancer.announce_terms(terms)
    for _ in range(3):
        seen.append((balancer.terms_due, balancer.idle))
        balancer.exchanges.arrivals.first(exchange)
        seen.append((balancer.terms_due, balancer.idle))
        balancer.exchanges.arrivals.complete(exchange)
    assert seen == [(16.0, False)] * 2 + [(0.0, True)] * 2 + [(9.0, False)] * 2
    balancer.announce(4)
    balancer.exchanges.arrivals.first(exchange)
    balancer.forget(ahead=True)  # it broke off
    balancer.announce(7)
    assert balancer.terms_due == 7


def test_it_is_known_how_many_samples_all_ranks_have_in_a_batch_that_a_dataset_announces():
    """In a short last one as well, for codecs that keep something back."""
    from hvd_hetero.keras.balancer import Balancer as OfKeras

    def program(engine):
        balancer, seen = OfKeras(WHOLE, shares=SHARES, engine=engine), []

        class Seen(Exchange):
            def on_begin(self):
                seen.append((balancer.progress.samples, balancer.progress.whole))

        exchange = Seen()
        balancer.exchanges.attach(exchange)
        dataset = BalancedDataset(*arrays(), balancer=balancer)
        dataset.on_epoch_begin()
        for index in range(len(dataset)):
            dataset[index]
            balancer.exchanges.arrivals.first(exchange)
        balancer.begin(1)
        return seen

    for batch, whole in zip(zip(*World(3).run(program), strict=True), (8, 8, 6, None), strict=True):
        assert {told for _, told in batch} == {whole} and sum(samples for samples, _ in batch) == (whole or 3)


def test_a_batch_that_the_script_begins_may_have_several_exchanges_although_others_are_announced():
    """As those of `as_tf_dataset()` are, which loads ahead."""
    from hvd_hetero.keras.balancer import Balancer as OfKeras

    balancer = OfKeras(WHOLE, engine=SoloEngine())
    tape = Exchange()
    balancer.exchanges.attach(tape)
    balancer.forget(ahead=True)
    for samples in (8, 7, 6):
        balancer.announce(samples)
    seen = []
    for samples in (8, 7):
        balancer.begin(samples)
        for _ in range(3):
            balancer.exchanges.arrivals.first(tape)
            seen.append((balancer.step, balancer.progress.terms))
    assert seen == [(0, 8.0)] * 3 + [(1, 7.0)] * 3


def test_what_a_script_begins_by_hand_uses_batches_of_its_loop_and_none_of_a_fit_that_was_stopped():
    from hvd_hetero.keras.balancer import Balancer as OfKeras

    def used(stopped):
        balancer = OfKeras(WHOLE, engine=SoloEngine(), adaptive=False)
        dataset = make(balancer)
        epoch = Keras(dataset, prefetch=2).epoch() if stopped else iter(dataset)
        next(epoch)
        if stopped:
            deadline = time.monotonic() + 20.0
            while dataset.sampler.pending < 3 and time.monotonic() < deadline:
                time.sleep(0.01)  # it is read ahead
            assert balancer.begin_if_unannounced()
        for _ in range(2):
            balancer.begin(3)
            if not stopped:
                next(epoch)
        return dataset.state_dict()["position"]

    assert used(stopped=True) == 1 and used(stopped=False) == 2


def test_an_exchange_that_comes_again_is_of_the_present_batch_until_another_is_announced():
    """It leads once. What is attached in the middle of a batch, as a tape is that is made there, is of it too."""
    from hvd_hetero.keras.balancer import Balancer as OfKeras

    balancer = OfKeras(WHOLE, min_share=0, engine=SoloEngine())
    tape, late = Exchange(), Exchange()
    balancer.exchanges.attach(tape)
    seen = []

    def run(*exchanges):
        for each in exchanges:
            balancer.exchanges.arrivals.first(each)
            balancer.exchanges.arrivals.complete(each)
            seen.append((balancer.step, balancer.progress.terms, balancer.exchanges.leads(each)))

    balancer.begin(8)
    run(tape)
    balancer.exchanges.attach(late)
    run(late, tape)
    balancer.announce(0)
    assert balancer.idle
    run(tape)
    assert balancer.idle, "until another batch is announced"
    run(late, tape)
    assert seen == [(0, 8.0, True), (0, 8.0, False), (0, 8.0, False), (1, 0.0, True), (1, 0.0, False), (1, 0.0, False)]
    del seen[:]
    for samples in (7, 6):  # a loop that begins what a dataset announces ahead
        balancer.announce(samples)
        balancer.announce(samples)
        balancer.begin(samples)
        run(tape, tape)
    assert seen == [(2, 7.0, True), (2, 7.0, False), (3, 6.0, True), (3, 6.0, False)]


def test_an_exchange_that_comes_again_where_batches_are_announced_ahead_is_refused_in_the_end():
    """Nobody can tell to which batch it belongs, and an epoch that is over leaves none that it could belong to."""
    from hvd_hetero.keras.balancer import Balancer as OfKeras

    balancer, exchange = OfKeras(WHOLE, engine=SoloEngine()), Exchange()
    balancer.exchanges.attach(exchange)
    for samples in (8, 7):
        balancer.announce(samples)
    balancer.exchanges.arrivals.first(exchange)
    balancer.exchanges.arrivals.first(exchange)
    with pytest.raises(RuntimeError, match="optimizer for each time"):
        balancer.exchanges.arrivals.first(exchange)
    balancer.forget()
    balancer.announce(6)
    balancer.exchanges.arrivals.first(exchange)
    balancer.exchanges.arrivals.first(exchange)
    balancer.end_epoch()
    with pytest.raises(RuntimeError, match="Received: none"):
        balancer.exchanges.arrivals.first(exchange)
    balancer.forget(ahead=True)
    balancer.announce(6)
    balancer.exchanges.arrivals.first(exchange)
    with pytest.raises(RuntimeError, match="optimizer for each time"):
        balancer.exchanges.arrivals.first(exchange)


def test_parts_of_an_exchange_are_of_one_batch_whatever_is_announced():
    """As those of an optimizer that a traced train_step applies twice; it leads with the first of them."""
    from hvd_hetero.keras.balancer import Balancer as OfKeras

    balancer, exchange, other = OfKeras(WHOLE, engine=SoloEngine()), Exchange(), Exchange()
    for each in (exchange, other):
        balancer.exchanges.attach(each)
    balancer.forget(ahead=True)
    for samples in (8, 7, 6):
        balancer.announce(samples)
    seen = []
    for each, part in [(exchange, 0), (exchange, 1), (other, 0)] * 3:
        balancer.exchanges.arrivals.first(each, part)
        seen.append((balancer.step, balancer.progress.terms, balancer.exchanges.leads(each)))
    assert seen == [
        (step, float(samples), leads) for step, samples in enumerate((8, 7, 6)) for leads in (True, False, False)
    ]


@pytest.mark.parametrize("prefetch", [None, 0, 1])
def test_an_evaluation_in_the_midst_of_an_epoch_of_another_dataset_takes_nothing_from_it(prefetch):
    from hvd_hetero.keras.balancer import Balancer as OfKeras

    balancer, exchange = OfKeras(WHOLE, engine=SoloEngine()), Exchange()
    balancer.exchanges.attach(exchange)
    trained, looked_at = Keras(make(balancer), prefetch=prefetch), Keras(make(balancer), prefetch=prefetch)
    seen = []
    for _ in range(2):
        for batch in trained.epoch():
            balancer.exchanges.arrivals.first(exchange)
            assert balancer.progress.terms == len(batch[0])
            seen += numbers(batch)
            list(looked_at.epoch())
    assert sorted(seen[:LENGTH]) == sorted(seen[LENGTH:]) == list(range(LENGTH)) and balancer.step == 5


@pytest.mark.parametrize(("prefetch", "workers"), [(None, 0), (None, 2), (0, 0), (1, 2)])
def test_training_on_another_dataset_between_two_epochs_takes_nothing_from_them(prefetch, workers):
    """As a callback does that fits another model, a probe, at the end of each epoch."""
    from hvd_hetero.keras.balancer import Balancer as OfKeras

    balancer, exchange = OfKeras(WHOLE, engine=SoloEngine()), Exchange()
    balancer.exchanges.attach(exchange)
    outer = Keras(make(balancer, workers=workers), prefetch=prefetch)
    for _ in range(3):
        inner = Keras(make(balancer, workers=workers), prefetch=prefetch)
        for reader in (outer, inner):
            seen = []
            for batch in reader.epoch():
                balancer.exchanges.arrivals.first(exchange)
                assert balancer.progress.terms == len(batch[0])
                seen += numbers(batch)
            assert sorted(seen) == list(range(LENGTH))
    assert balancer.step == 17
