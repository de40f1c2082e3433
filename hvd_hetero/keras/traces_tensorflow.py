"""Forgets TensorFlow's traces of functions that exchange gradients: they are traced anew after an elastic reset.

A graph names the operations of the ranks that it was traced for, so it is of no use to others. And a rank that joins
makes collective calls while it traces a function, in which the ranks that stay have to take part.
"""

from __future__ import annotations

import gc
from typing import Any

import tensorflow as tf

# Types of graph operations, by prefix, that an exchange consists of: Horovod's sums, and calls on the host.
EXCHANGES = ("Horovod", "PyFunc", "EagerPyFunc")


class Traces:
    """The graphs of all functions that there are."""

    def forget(self) -> None:
        """Drops the graphs that may contain an exchange, so that their functions are traced anew at their next call.

        That includes functions that only call such a function, as their graphs contain its graph.
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
    """Whether a graph, or a function that it calls, may contain an exchange."""
    nodes = [graph.node, *(function.node_def for function in graph.library.function)]
    return any(node.op.startswith(EXCHANGES) for part in nodes for node in part)


TRACES = Traces()
