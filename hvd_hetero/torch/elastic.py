"""Elastic training, as `hvd.elastic`: the state of a job whose ranks come and go, and what runs it.

Everything made with a balancer goes on with the ranks that there are after a change: the balancer itself (ranks whose
hardware it knows keep their speeds), loaders (each sample of an epoch once in the committed history), optimizers,
learning rates. `TorchState` finds them by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import horovod.torch as horovod
import torch
from horovod.torch.elastic import ElasticSampler, sampler  # noqa: F401  # the module, for who names it
from torch.utils.data import DataLoader, Dataset, Sampler

from hvd_hetero.engine import binding
from hvd_hetero.engine.job_state import JobState, has_state
from hvd_hetero.optimizers.departure import PeerError

from . import content
from .function import broadcast_object, broadcast_optimizer_state, broadcast_parameters, init, keep_types, shutdown

__all__ = ["ElasticSampler", "TorchState", "init", "run", "shutdown"]

T = TypeVar("T")


class TorchState(JobState):
    """The state of an elastic job: what it commits, goes back to after a failure, and sends to ranks that join.

    Args:
        model, optimizer: of this job.
        values: whatever else has `state_dict()` and `load_state_dict()` (more models and optimizers, schedulers,
            loaders), and plain values (`epoch=0`). They are attributes of this object. What was made with the
            optimizer's balancer is kept without being named, even if it is made after this state. Samplers, datasets
            and loaders that have no state are neither kept nor sent.

    Raises:
        TypeError: `model` or `optimizer` has no `state_dict()`.
    """

    model: torch.nn.Module | None = None
    optimizer: torch.optim.Optimizer | None = None

    def __init__(
        self, model: torch.nn.Module | None = None, optimizer: torch.optim.Optimizer | None = None, **values: Any
    ) -> None:
        given = {name: value for name, value in {"model": model, "optimizer": optimizer}.items() if value is not None}
        for name, kind in (("model", "torch.nn.Module"), ("optimizer", "torch.optim.Optimizer")):
            if name in given and not has_state(given[name]):
                raise TypeError(
                    f"{name}: expected a {kind}. Received: {given[name]!r}. Give plain values by their names: epoch=0."
                )
        super().__init__({**given, **values}, horovod=horovod, content=content)

    def _balancer_of(self, part: Any) -> Any:
        return vars(part).get("_balancer") if isinstance(part, torch.optim.Optimizer) else super()._balancer_of(part)

    def _merge(self, part: Any) -> None:
        if isinstance(part, torch.optim.Optimizer) and hasattr(part, "merge"):
            part.merge()

    def _stays(self, value: Any) -> bool:
        # A copy of a DistributedSampler would hold the whole dataset, be unknown to its loader, and fit one rank alone.
        return isinstance(value, (Sampler, Dataset, DataLoader))

    def _copy(self, state: Any) -> Any:
        try:
            return super()._copy(state)
        except NotImplementedError:  # a tensor that can be saved but not cloned, such as torchao's 8-bit ones
            return content.loaded(content.saved(state))

    def _sync_part(self, part: Any, root: int) -> None:
        if isinstance(part, torch.nn.Module):
            state = part.state_dict()
            tensors = {key: value for key, value in state.items() if isinstance(value, torch.Tensor)}
            broadcast_parameters(tensors, root_rank=root)
            if len(tensors) < len(state):  # the state holds what get_extra_state() returns as well
                beside = {key: value for key, value in state.items() if key not in tensors}
                part.load_state_dict({**tensors, **self._of_root(beside, root, name="hvd_hetero.elastic.extra_state")})
        elif isinstance(part, torch.optim.Optimizer):  # tensor by tensor, in their own types, onto this device
            broadcast_optimizer_state(part, root_rank=root)
        else:
            super()._sync_part(part, root)

    def _restore_part(self, part: Any, kept: Any) -> None:
        groups = [set(group) for group in part.param_groups] if isinstance(part, torch.optim.Optimizer) else []
        super()._restore_part(part, kept)
        if isinstance(part, torch.optim.Optimizer):
            # PyTorch loads what an optimizer of another class has saved as well, and the next step fails.
            lost = set().union(*(had - set(group) for had, group in zip(groups, part.param_groups, strict=False)))
            if lost := lost & set(getattr(part, "defaults", ())):
                raise ValueError(
                    f"Expected the state of an optimizer with {', '.join(sorted(lost))}, as {type(part).__name__}. "
                    f"Received: one with {', '.join(sorted(set(part.param_groups[0]) - {'params'}))}."
                )
            keep_types(part, kept)

    def _of_root(self, value: Any, root: int, *, name: str) -> Any:
        return broadcast_object(value, root, name=name)

    # Checkpoints ----------------------------------------------------------------------------------------------------

    def _own_state(self) -> dict[str, Any]:
        models = {name: part for name, part in self._parts.items() if isinstance(part, torch.nn.Module)}
        buffers = {name: dict(model.named_buffers()) for name, model in models.items()}
        return {"random": content.random_state(), "buffers": buffers}

    def _load_own_state(self, state: Mapping[str, Any]) -> None:
        content.load_random_state(state["random"])
        for name, buffers in state["buffers"].items():
            mine = dict(self._parts[name].named_buffers())
            for key, value in buffers.items():  # the model makes masks and tables again that it makes as it is used
                if key in mine and mine[key].shape == value.shape:
                    mine[key].copy_(value)


def run(train: Callable[..., T]) -> Callable[..., T]:
    """Decorates `train(state, ...)`: it is called anew, with the state of the last commit, whenever ranks have died,
    joined or left.

    Before it is called, every rank makes the same objects (balancer, loaders, optimizers) in the same order, keeps
    them, and makes no other collective call: a rank that joins makes its objects while the others rebuild theirs.
    """
    recoverable = (horovod.HorovodInternalError, PeerError)
    return binding.elastic_run("torch", train, gone=lambda error: isinstance(error, recoverable))
