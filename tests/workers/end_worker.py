"""One real rank of tests/test_topology_horovod.py: it ends as soon as it is through, while those of the other node are
still at the last stage of the last sum."""

from __future__ import annotations

import time

import torch

import hvd_hetero.torch as hvd
from hvd_hetero.engine.hierarchy import levels_of
from hvd_hetero.engine.horovod import HorovodEngine
from hvd_hetero.optimizers.route import Route
from hvd_hetero.policy.topology import Topology

hvd.init(process_sets="dynamic")
broadcast = HorovodEngine.broadcast_async


def late(self, array, *, root, name):
    time.sleep(0.7)
    return broadcast(self, array, root=root, name=name)


HorovodEngine.broadcast_async = late
route = Route(levels_of(HorovodEngine(), Topology(nodes=((0, 1), (2,)))), "leader")
for _ in range(2):
    assert route.start(torch.ones(8), name="sum").wait().tolist() == [3.0] * 8
print("OK through", flush=True)
