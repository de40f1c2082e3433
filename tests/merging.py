"""What tests of local SGD share: rounds of `World(n)` over arrays of numpy, and a task with a known optimum."""

import functools
import threading

import numpy as np

from hvd_hetero.engine.hierarchy import levels_of, one_level
from hvd_hetero.optimizers import merge_control
from hvd_hetero.optimizers.balancer import Balancer
from hvd_hetero.optimizers.codec_spec import CodecSpec, LinkCodecs
from hvd_hetero.optimizers.fragment import Lane
from hvd_hetero.optimizers.rounds import Rounds
from hvd_hetero.optimizers.router import Router
from hvd_hetero.optimizers.weighted_exchange import WeightedExchange
from hvd_hetero.policy.topology import Topology

LENGTH = 12


class Arrays:
    """Parameters of a rank: one numpy array, cut into fragments."""

    def __init__(self, values, count):
        self.values = np.array(values, dtype=np.float64)
        self.cuts = np.array_split(np.arange(len(values)), count)

    def read(self, index, into=None):
        return np.concatenate([self.values[self.cuts[index]]], out=into)

    def write(self, index, flat):
        self.values[self.cuts[index]] = flat

    def shift(self, index, by):
        self.values[self.cuts[index]] += by


def rounds_of(engine, rule, values, *, whole=None, codec="none", nodes=None, on_merge=None, **options):
    """A rank's rounds and parameters; `whole` is the global batch."""
    store = Arrays(values, rule.fragments)
    balancer = Balancer(engine, global_batch_size=whole or engine.size, adaptive=False, **options)
    codecs = LinkCodecs(cross=CodecSpec(name=codec, **({"block": 64} if codec == "int8" else {})))
    levels = levels_of(engine, Topology(nodes=nodes)) if nodes else one_level(engine)
    router = Router(levels, algorithm="leader" if nodes else "flat", codecs=codecs)

    rides = codec == "none"

    def lanes_of(index, cut, outgoing):
        tail = merge_control.length(engine.size)
        empty = functools.partial(np.zeros, len(cut) + (tail if rides else 0))
        shared = empty()
        route = router.route_for(f"f{index}", shared, [(len(cut),)], lossy=not rides)

        def lane(number, buffer):
            return Lane(WeightedExchange(
                engine, [buffer], buffer[len(cut) :] if rides else np.zeros(tail), routes=[route],
                rides_in=0 if rides else None, keeps=codecs.keeps, outgoing=lambda: outgoing(index),
                name=f"f{index}.{number}"), buffer)

        count = 1 + rule.most_missed if route.is_plain else 1
        return [lane(number, shared) for number in range(count)], lambda number: lane(number, empty())

    def lanes(outgoing):
        return [lanes_of(index, cut, outgoing) for index, cut in enumerate(store.cuts)]

    rounds = Rounds(rule, balancer=balancer, store=store, lanes=lanes, on_merge=on_merge or (lambda fields: None))
    rounds.begin()
    return rounds, store, balancer


def quadratic(rank, size=LENGTH):
    """Curvatures and optimum of a rank's loss 1/2 sum h (x - a)^2."""
    random = np.random.RandomState(rank)
    return random.uniform(0.5, 2.0, size), random.standard_normal(size)


START = np.linspace(-1.0, 1.0, LENGTH)


class Turns:
    """Lets ranks go one at a time in a given order, so that a run of threads is the same every time."""

    def __init__(self, order):
        self.order, self.at, self.moved = list(order), 0, threading.Condition()

    def take(self, rank):
        with self.moved:
            assert self.moved.wait_for(lambda: self.at >= len(self.order) or self.order[self.at] == rank, timeout=20)

    def give(self):
        with self.moved:
            self.at += 1
            self.moved.notify_all()
