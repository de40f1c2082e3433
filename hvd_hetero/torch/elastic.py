"""Elastic training, as `hvd.elastic`: the state of a job whose ranks come and go, and what runs it.

Everything made with a balancer goes on with the ranks that there are after a change: the balancer itself (ranks whose
hardware it knows keep their speeds), loaders (each sample of an epoch once in the committed history), optimizers,
learning rates. `TorchState` finds them by itself.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, TypeVar

import horovod.torch as horovod
import torch
from horovod.common.elastic import ObjectState
from horovod.torch.elastic import ElasticSampler

from hvd_hetero.engine import elastic
from hvd_hetero.engine.horovod import HorovodEngine
from hvd_hetero.optimizers.attachment import PeerError

from .function import broadcast_parameters, init_again

__all__ = ["ElasticSampler", "TorchState", "run"]

T = TypeVar("T")


def _has_state(value: Any) -> bool:
    return callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))


class TorchState(ObjectState):  # type: ignore[misc]
    """What a job commits, goes back to, and hands to ranks that join.

    Args:
        model, optimizer: of this job.
        values: more of them, whatever has `state_dict()` and `load_state_dict()` (schedulers, loaders), and plain
            values (`epoch=0`). They are attributes of this object. What was made with the optimizer's balancer is kept
            without being named.
    """

    def __init__(
        self, model: torch.nn.Module | None = None, optimizer: torch.optim.Optimizer | None = None, **values: Any
    ) -> None:
        given = {name: value for name, value in {"model": model, "optimizer": optimizer}.items() if value is not None}
        given |= values
        self._parts: dict[str, Any] = {name: value for name, value in given.items() if _has_state(value)}
        self._kept: dict[str, Any] = {}
        self.commits = 0
        for name, value in self._parts.items():
            object.__setattr__(self, name, value)
        self._find_parts()
        plain = {name: value for name, value in given.items() if name not in self._parts}
        super().__init__(bcast_object=horovod.broadcast_object, get_rank=horovod.rank, **plain)
        self._keep()

    def _find_parts(self) -> None:
        """Adds the balancers of the optimizers, and what was made with those."""
        parts = self._parts
        for value in list(parts.values()):
            balancer = vars(value).get("_balancer", None) if isinstance(value, torch.optim.Optimizer) else None
            for index, found in enumerate([balancer, *getattr(balancer, "dependents", [])]):
                known = [getattr(part, "batch_sampler", part) for part in parts.values()]
                if found is not None and not any(found is part for part in known):
                    parts[f"{type(found).__name__}.{id(balancer)}.{index}"] = found

    def _keep(self) -> None:
        self._kept = {name: copy.deepcopy(part.state_dict()) for name, part in self._parts.items()}

    def commit(self) -> None:
        """Keeps what there is, to go back to it, and lets changes of the ranks happen here. All ranks commit at the
        same steps; with a local strategy, they come to one model first."""
        for part in self._parts.values():
            if isinstance(part, torch.optim.Optimizer) and hasattr(part, "merge"):
                part.merge()
        self.commits += 1
        super().commit()

    def save(self) -> None:
        """Keeps what there is."""
        self._keep()
        super().save()

    def restore(self) -> None:
        """Goes back to what was kept."""
        for name, part in self._parts.items():
            part.load_state_dict(copy.deepcopy(self._kept[name]))
        super().restore()

    def sync(self) -> None:
        """All ranks get rank 0's. A collective call."""
        for part in self._parts.values():
            if isinstance(part, torch.nn.Module):
                broadcast_parameters(part.state_dict(), root_rank=0)
            else:
                mine = part.state_dict() if horovod.rank() == 0 else None
                part.load_state_dict(horovod.broadcast_object(mine, 0, name="hvd_hetero.elastic.part"))
        super().sync()
        self.save()

    def __setattr__(self, name: str, value: Any) -> None:
        if name in vars(self).get("_parts", {}):
            self._parts[name] = value
        super().__setattr__(name, value)


def _restart() -> None:
    init_again()
    HorovodEngine.rebuild()


def run(train: Callable[..., T]) -> Callable[..., T]:
    """Decorates `train(state, ...)`: it is called anew, with the state of the last commit, whenever ranks have died,
    joined or left.

    Outside of it, ranks make the same objects in the same order – balancer, loaders, optimizers – and call nothing else
    that is collective: a rank that joins makes them while those that stay rebuild theirs.
    """
    recoverable = (horovod.HorovodInternalError, PeerError)
    return elastic.run(train, restart=_restart, size=horovod.size, recoverable=recoverable)
