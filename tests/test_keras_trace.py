"""A trace that a Keras callback begins, long after the optimizer was made."""

import copy
import json
import warnings

import keras
import numpy as np
import pytest

pytest.importorskip("horovod.torch", reason="build it with hvd-hetero build-horovod")

import hvd_hetero.keras as hvd
from hvd_hetero.engine.local import SoloEngine, World
from hvd_hetero.policy.topology import Topology


def test_what_is_no_single_number_is_left_out(tmp_path):
    balancer = hvd.Balancer(4, engine=SoloEngine())
    trace = hvd.callbacks.TraceCallback(run=str(tmp_path), balancer=balancer)
    others = {"f1_score": np.ones(3), "ended": "at 12:00", "worst": [[7], [7, 8]]}
    trace.on_epoch_end(0, {"loss": np.float32(0.5), **others})
    trace.on_train_end()
    said = [json.loads(line) for line in next(tmp_path.iterdir()).read_text().splitlines()]
    assert [line["fields"] for line in said if line.get("event") == "epoch ends"] == [{"epoch": 0, "loss": 0.5}]


def test_a_folder_that_is_not_that_of_the_balancers_trace_is_told(tmp_path):
    balancer = hvd.Balancer(4, engine=SoloEngine(), run=str(tmp_path / "one"))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        hvd.callbacks.TraceCallback(run=str(tmp_path / "one"), balancer=balancer)
        assert not caught
        trace = hvd.callbacks.TraceCallback(run=str(tmp_path / "two"), balancer=balancer)
    (said,) = (str(each.message) for each in caught)
    assert f"{tmp_path}/one, which is continued. Received: {tmp_path}/two." in said
    trace.on_train_end()
    assert [path.name for path in tmp_path.iterdir()] == ["one"]


def test_a_copy_as_a_search_makes_of_it_writes_the_same_trace(tmp_path):
    """KerasTuner makes a deep copy of each callback before each fit."""
    balancer = hvd.Balancer(4, engine=SoloEngine())
    trace = hvd.callbacks.TraceCallback(run=str(tmp_path), balancer=balancer)
    for epoch, each in enumerate([trace, copy.deepcopy(trace)]):
        each.on_epoch_end(epoch, {"loss": 0.5})
        each.on_train_end()
    said = [json.loads(line) for line in next(tmp_path.iterdir()).read_text().splitlines()]
    assert [line["fields"]["epoch"] for line in said if line.get("event") == "epoch ends"] == [0, 1]


def test_ways_chosen_after_it_began_are_in_it(tmp_path):
    def program(engine):
        balancer = hvd.Balancer(4, engine=engine, adaptive=False)
        weight = keras.Variable(np.zeros((64, 64)), dtype="float32")
        optimizer = hvd.DistributedOptimizer(
            keras.optimizers.SGD(1.0), balancer=balancer, topology=Topology(nodes=((0,), (1,)))
        )
        trace = hvd.callbacks.TraceCallback(run=str(tmp_path), balancer=balancer)
        trace.on_train_begin()
        balancer.begin(2)
        optimizer.apply([keras.ops.ones((64, 64))], [weight])
        trace.on_train_end()

    World(2).run(program)
    files = list(tmp_path.iterdir())
    assert len(files) == 2
    for file in files:
        events = [json.loads(line) for line in file.read_text().splitlines() if '"event"' in line]
        assert [event["fields"]["bucket"] for event in events if event["event"] == "route"], file
