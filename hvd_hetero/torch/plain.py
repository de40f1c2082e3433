"""Horovod's own `DistributedOptimizer`, with repairs, for scripts that use no balancer, topology or codec of ours."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable
from typing import Any

import horovod.torch as horovod
import torch

from hvd_hetero.engine.horovod import HorovodEngine
from hvd_hetero.optimizers.unused_balancer import UnusedBalancerCheck

from .loss import mean_over_ranks

# Horovod's optimizer around each optimizer that a script made.
_MADE_OF: weakref.WeakKeyDictionary[torch.optim.Optimizer, weakref.ref[Any]] = weakref.WeakKeyDictionary()


class _Widened:
    """A Horovod compressor that sends bfloat16, which Horovod cannot sum, as float32, and others by `compression`."""

    def __init__(self, compression: Any) -> None:
        self._compression = compression

    def compress(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        if tensor.dtype == torch.bfloat16:
            return tensor.float(), torch.bfloat16
        wire, context = self._compression.compress(tensor)
        return wire, (context,)

    def decompress(self, tensor: torch.Tensor, context: Any) -> torch.Tensor:
        if context is torch.bfloat16:
            return tensor.to(torch.bfloat16)
        return self._compression.decompress(tensor, context[0])  # type: ignore[no-any-return]


def load_in_place(optimizer: torch.optim.Optimizer, load: Callable[[], None]) -> None:
    """Calls `load`, which gives an optimizer a new state and new groups, and moves them into its former dicts, which it
    shares with the optimizer that it wraps and with schedulers."""
    if not {"state", "param_groups"} <= vars(optimizer).keys():
        load()  # both dicts belong to another optimizer that this one wraps
        return
    state, groups = optimizer.state, optimizer.param_groups
    load()
    if optimizer.state is not state:
        loaded, optimizer.state = optimizer.state, state
        state.clear()
        state.update(loaded)
    for group, new in zip(groups, optimizer.param_groups, strict=True):
        if new is not group:
            options = dict(new)
            group.clear()
            group.update(options)
    optimizer.param_groups = groups


def release_plain(optimizer: torch.optim.Optimizer) -> None:
    """Removes the hooks of Horovod's own `DistributedOptimizer` around this one, if there was one. They would stay on
    the parameters, and exchange gradients, as long as it holds their autograd nodes, also once the script has no use
    for it any more."""
    made = _MADE_OF.pop(optimizer, None)
    if made is not None and (distributed := made()) is not None:
        distributed._grad_accs.clear()
        # A graph that the script keeps still has the hooks: with this count they never start an exchange.
        distributed._allreduce_delay = dict.fromkeys(distributed._allreduce_delay, math.inf)


def _take_in_new(distributed: Any) -> None:
    """Lets Horovod's optimizer reduce parameters that it has not hooked, as they were added or thawed since. Those with
    gradients already are reduced when it waits for them next."""
    new = [p for group in distributed.param_groups for p in group["params"] if p.requires_grad]
    for parameter in (p for p in new if p not in distributed._requires_update):
        names = distributed._parameter_names
        names.setdefault(parameter, f"{min(names.values())}.and.{len(names)}")
        distributed._allreduce_delay[parameter] = distributed.backward_passes_per_step
        distributed._requires_update.add(parameter)
        if distributed._groups is not None:
            distributed._p_to_group[parameter] = (parameter,)
            distributed._group_counts[parameter,] = 0
        node = torch.autograd.graph.get_gradient_edge(parameter).node
        node.register_hook(distributed._make_hook(parameter))
        distributed._grad_accs.append(node)


def plain_optimizer(optimizer: torch.optim.Optimizer, *, compression: Any, **arguments: Any) -> Any:
    """Horovod's own `DistributedOptimizer`, with seven repairs: it takes bfloat16; it takes zero_grad(set_to_none);
    the optimizer's state survives wrapping; schedulers go on changing the learning rates after a state was loaded; the
    gradients of a closure are reduced before the update; hooks of the step run once, when gradients are reduced;
    parameters that are added or thawed later are reduced as well, and added ones have the optimizer's defaults."""
    release_plain(optimizer)
    if any(p.dtype == torch.bfloat16 for group in optimizer.param_groups for p in group["params"]):
        compression = _Widened(compression)
    distributed = horovod.DistributedOptimizer(optimizer, compression=compression, **arguments)
    distributed.state = optimizer.state  # Horovod starts with none, which loses a loaded state
    if hasattr(optimizer, "defaults"):
        distributed.defaults = optimizer.defaults  # Horovod has those of the class
    cls: Any = type(distributed)  # made by Horovod for this optimizer alone
    original_zero_grad, original_load_state_dict = cls.zero_grad, cls.load_state_dict
    original_synchronize, forgotten = cls.synchronize, UnusedBalancerCheck()
    by_adasum = hasattr(distributed, "_starting_models")  # a class of its own, which makes updates within backward()

    def zero_grad(self: Any, *args: Any, **kwargs: Any) -> None:
        if self._handles:
            original_zero_grad(self)  # raises: gradients are under way
        super(cls, self).zero_grad(*args, **kwargs)

    def load_state_dict(self: Any, state_dict: dict[str, Any]) -> None:
        load_in_place(self, lambda: original_load_state_dict(self, state_dict))

    def synchronize(self: Any) -> None:
        forgotten.check()
        if self._grad_accs and not by_adasum:  # without any there is one rank, or another optimizer has taken over
            _take_in_new(self)
        original_synchronize(self)

    original_step = getattr(cls.step, "__wrapped__", cls.step)  # without hooks, which the base class runs as well

    def step(self: Any, closure: Callable[[], Any] | None = None) -> Any:
        if closure is None:
            return original_step(self)

        def evaluated() -> Any:
            self._synchronized = False
            loss = closure()
            if self._should_synchronize and not self._synchronized:
                self.synchronize()
            if not self.process_set.included():
                return loss
            # As with a balancer: an optimizer that decides by the loss, as LBFGS does, must decide alike on all ranks.
            engine, kind = HorovodEngine(self.process_set), self.param_groups[0]["params"][0].dtype
            return mean_over_ranks(loss, terms=1.0, engine=engine, name="hvd_hetero.closure", kind=kind)

        if self._handles:
            self.synchronize()  # of a backward pass before the step; zero_grad() in the closure would raise
        result = super(cls, self).step(evaluated)
        self._synchronized = False
        return result

    step.hooked = True  # type: ignore[attr-defined]  # or PyTorch would run the hooks of the step here, too
    cls.zero_grad, cls.load_state_dict, cls.synchronize = zero_grad, load_state_dict, synchronize
    if not by_adasum:
        cls.step = step
    _MADE_OF[optimizer] = weakref.ref(distributed)
    return distributed
