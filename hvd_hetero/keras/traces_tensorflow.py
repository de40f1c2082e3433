"""Functions of TensorFlow that were traced for the ranks that there are, and have to be traced anew for others.

A graph names the operations of its ranks, so it is of no use to others; and a rank that joins makes what a function
needs while it traces it, which those that stay have to do as well.
"""

from __future__ import annotations

import gc
from typing import Any

import tensorflow as tf

# What an exchange is in a graph: sums, and calls on the host.
EXCHANGES = ("Horovod", "PyFunc", "EagerPyFunc")


class Traces:
    """The graphs of all functions that there are."""

    def forget(self) -> None:
        """Functions whose graphs may exchange something are traced anew when they are called next.

        Those that call one are among them, which hold its graph in theirs and need not have traced it.
        """
        for function in _functions():
            cache = function._function_cache  # there is no public way
            for (context, kind), concrete in list(cache._primary.items()):
                if _exchanges(concrete.graph.as_graph_def()):
                    cache.delete(kind, context)


def _functions() -> list[Any]:
    known: dict[type, bool] = {}  # to ask each object costs more
    kind = tf.types.experimental.PolymorphicFunction
    return [
        one
        for one in gc.get_objects()
        if (known[type(one)] if type(one) in known else known.setdefault(type(one), issubclass(type(one), kind)))
    ]


def _exchanges(graph: Any) -> bool:
    """Whether it may, or a function that it calls."""
    nodes = [graph.node, *(function.node_def for function in graph.library.function)]
    return any(node.op.startswith(EXCHANGES) for part in nodes for node in part)


TRACES = Traces()
