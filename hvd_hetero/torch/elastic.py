"""Elastic training, as `hvd.elastic`: the state of a job whose ranks come and go, and what runs it.

Everything made with a balancer goes on with the ranks that there are after a change: the balancer itself (ranks whose
hardware it knows keep their speeds), loaders (each sample of an epoch once in the committed history), optimizers,
learning rates. `TorchState` finds them by itself.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import horovod.torch as horovod
import torch
from horovod.common.elastic import ObjectState
from horovod.torch.elastic import ElasticSampler

from hvd_hetero.engine import elastic
from hvd_hetero.engine.horovod import HorovodEngine
from hvd_hetero.optimizers.attachment import PeerError

from .content import load_random_state, loaded, random_state, saved
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
        self._balancers: list[Any] = []
        self._kept: dict[str, Any] = {}
        self._checked = False
        self.commits = 0
        for name, value in self._parts.items():
            object.__setattr__(self, name, value)
        self._find_parts()
        plain = {name: value for name, value in given.items() if name not in self._parts}
        super().__init__(bcast_object=horovod.broadcast_object, get_rank=horovod.rank, **plain)
        self._plain = list(plain)
        self._keep()

    def _find_parts(self) -> None:
        """Adds the balancers of the optimizers, and what was made with those."""
        parts = self._parts
        for name, value in list(parts.items()):
            balancer = vars(value).get("_balancer", None) if isinstance(value, torch.optim.Optimizer) else None
            if balancer is None:
                continue
            if balancer not in self._balancers:
                self._balancers.append(balancer)
            for index, found in enumerate([balancer, *balancer.dependents]):
                known = [getattr(part, "batch_sampler", part) for part in parts.values()]
                if not any(found is part for part in known):
                    parts[f"{name}.{type(found).__name__}.{index}"] = found

    def _keep(self) -> None:
        self._kept = {name: copy.deepcopy(part.state_dict()) for name, part in self._parts.items()}

    def commit(self) -> None:
        """Keeps what there is, to go back to it, and lets changes of the ranks happen here. All ranks commit at the
        same steps; with a local strategy, they come to one model first. A rank that was told to end (SIGTERM) ends
        here, with exit status 75, and the others go on without it."""
        self.settle()
        self.commits += 1
        self.save()
        elastic.let_leave(self.leaving or (), rank=horovod.rank())
        self.check_host_updates()

    def settle(self) -> None:
        """Comes to one model, with a local strategy. A collective call."""
        for part in self._parts.values():
            if isinstance(part, torch.optim.Optimizer) and hasattr(part, "merge"):
                part.merge()

    @property
    def leaving(self) -> Sequence[int] | None:
        """Ranks that were told to end, the same on all ranks; None without a balancer that would carry it."""
        return self._balancers[0].leaving if self._balancers else None

    def leave(self) -> None:
        """Tells all ranks that this one was told to end."""
        for balancer in self._balancers:
            balancer.leave()

    def shared_content(self) -> bytes:
        """What is the same on all ranks, for a checkpoint."""
        parts = {name: part.state_dict() for name, part in self._parts.items()}
        check, self._checked = not self._checked, True  # once: it takes as long as to restore
        return saved({"parts": parts, "values": {name: getattr(self, name) for name in self._plain}}, check=check)

    def own_content(self) -> bytes:
        """What is this rank's own, for a checkpoint: statistics of its samples, and its random numbers."""
        models = {name: part for name, part in self._parts.items() if isinstance(part, torch.nn.Module)}
        buffers = {name: dict(model.named_buffers()) for name, model in models.items()}
        return saved({"random": random_state(), "buffers": buffers})

    def load_shared_content(self, content: bytes) -> None:
        """Goes on from what `shared_content` returned. Raises ValueError where it is of another job."""
        state = loaded(content)
        for kind, mine in (("parts", list(self._parts)), ("values", self._plain)):
            if set(state[kind]) != set(mine):
                raise ValueError(f"Expected the state of a job with {kind} {mine}. Received: {list(state[kind])}.")
        for name, part in self._parts.items():
            part.load_state_dict(state["parts"][name])
        for name, value in state["values"].items():
            setattr(self, name, value)
        self.save()

    def load_own_content(self, content: bytes) -> None:
        """Goes on from what `own_content` returned."""
        state = loaded(content)
        load_random_state(state["random"])
        for name, buffers in state["buffers"].items():
            mine = dict(self._parts[name].named_buffers())
            for key, value in buffers.items():
                mine[key].copy_(value)
        self.save()

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
