"""`SyncBatchNorm`: batch normalisation over the rows of all ranks, however many each has, on any device."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm

from hvd_hetero.engine.horovod import HorovodEngine
from hvd_hetero.engine.port import Engine
from hvd_hetero.optimizers.balancer import Balancer, check_balancer
from hvd_hetero.optimizers.row_sum import RowSum


def _check_whole(balancer: Balancer) -> None:
    """Raises RuntimeError, on all ranks, if a rank may have several micro-batches, and so call a layer more often for a
    batch than another rank."""
    if divided := balancer.arguments.divided:
        caps, ranks = balancer.arguments.micro_caps, balancer.engine.ranks
        found = ", ".join(f"{caps[rank]} on rank {ranks[rank]}" for rank in divided)
        raise RuntimeError(
            "Expected each rank's batch in one piece, because SyncBatchNorm's statistics are over all ranks' rows at "
            f"once. Received: max_micro_batch={found}, where a share may be larger. Give max_share instead, or use a "
            "normalisation within samples (GroupNorm, LayerNorm)."
        )


def _check_no_balancer(**arguments: Any) -> None:
    """Raises TypeError, naming the argument, for a balancer in the place of another argument."""
    for name, value in arguments.items():
        if isinstance(value, Balancer):
            raise TypeError(f"{name}: expected no balancer. Received: one. Pass it by its name: balancer=balancer.")


_FORWARDS = {_BatchNorm.forward, torch.nn.SyncBatchNorm.forward}


class SyncBatchNorm(_BatchNorm):
    """Batch normalisation over the rows of all ranks: what BatchNorm of one process does on the global batch.

    Statistics and their gradients are weighted by rows, so ranks may have unequal batches, and none at all. All ranks
    call it together in training; in evaluation nobody needs the others. It has first derivatives only. Arguments are
    those of `torch.nn.BatchNorm2d`.

    Args:
        process_set: the ranks (default: the balancer's, or all).
        balancer: knows over how many terms each rank's loss is a mean, as `balancer.count()` says for masked samples;
            without it, gradients are weighted by rows. A rank with rows but without a loss term takes part in the
            statistics, but gets no gradients through them.

    Raises:
        TypeError: `balancer` is not a balancer, or `eps` or `process_set` is one.
        RuntimeError: in training, on all ranks, where a rank of `balancer` may have several micro-batches.
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        process_set: Any = None,
        *,
        balancer: Balancer | None = None,
        engine: Engine | None = None,
    ) -> None:
        _check_no_balancer(eps=eps, process_set=process_set)
        super().__init__(num_features, eps, momentum, affine, track_running_stats)
        if balancer is not None:
            check_balancer(balancer)
        self._process_set, self._balancer, self._engine = process_set, balancer, engine
        self._rows: RowSum | None = None

    def _check_input_dim(self, input: torch.Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"input: expected at least 2 dimensions. Received: {input.dim()}.")

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """The normalised input, of its shape and type."""
        self._check_input_dim(input)
        if not self.training:  # ranks may have different numbers of batches then
            own = self.running_mean is None
            return functional.batch_norm(
                input, self.running_mean, self.running_var, self.weight, self.bias, own, 0.0, self.eps
            )
        if self._rows is None:  # not before: a model may be made before hvd.init()
            balancer, engine = self._balancer, self._engine
            if balancer is not None:
                _check_whole(balancer)
            if engine is None and balancer is not None and self._process_set is None:
                engine = balancer.engine
            engine = engine or HorovodEngine(self._process_set)
            self._rows = RowSum(engine, terms=lambda: None if balancer is None else balancer.progress.terms)
            engine.on_reset_begin(self._forget_ranks)
        x = input if input.dtype == torch.float64 else input.float()
        from .normalised import normalised  # here, as it imports torch's compiler, which takes as long as torch itself

        y, *moments = normalised(x, self.eps, self._rows)
        if self.track_running_stats:
            self._track(*moments)
        if self.affine:
            shape = [1, -1] + [1] * (x.dim() - 2)
            y = y * self.weight.to(y.dtype).view(shape) + self.bias.to(y.dtype).view(shape)
        return y.to(input.dtype)

    def _forget_ranks(self) -> None:
        self._rows = None

    def _track(self, mean: torch.Tensor, variance: torch.Tensor, count: torch.Tensor) -> None:
        self.num_batches_tracked.add_(1)
        share = 1.0 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
        unbiased = variance * (count / (count - 1).clamp(min=1))
        for running, value in ((self.running_mean, mean), (self.running_var, unbiased)):
            running.lerp_(value.to(running), share)

    def __getstate__(self) -> dict[str, Any]:
        """The state without the engine's names and the balancer, which belong to this process. A copy is another layer
        to the other ranks, with sums of its own."""
        return {**self.__dict__, "_rows": None, "_balancer": None}

    def __deepcopy__(self, memo: dict[int, Any]) -> SyncBatchNorm:
        twin = memo[id(self)] = type(self).__new__(type(self))
        twin.__setstate__(copy.deepcopy(self.__getstate__(), memo))
        twin._balancer = self._balancer  # a copy within the process is of the same training loop
        return twin

    @classmethod
    def convert_sync_batchnorm(
        cls, module: torch.nn.Module, process_set: Any = None, *, balancer: Balancer | None = None
    ) -> torch.nn.Module:
        """`module` with a `SyncBatchNorm` in place of each batch normalisation, on the same parameters and buffers."""
        if not isinstance(module, torch.nn.Module):
            raise TypeError(f"module: expected a torch.nn.Module. Received: {module!r}.")
        _check_no_balancer(process_set=process_set)
        for each in module.modules():
            if isinstance(each, _BatchNorm) and not isinstance(each, cls) and type(each).forward not in _FORWARDS:
                raise TypeError(
                    "module: expected batch normalisations of torch.nn, or such as have their forward(). Received: "
                    f"{type(each).__qualname__}, whose own forward() a SyncBatchNorm would not call, as with an "
                    "activation in it. Put an hvd.SyncBatchNorm, and what else it does, in its place by hand."
                )
        return cls._converted(module, process_set, balancer, {})

    @classmethod
    def _converted(
        cls,
        module: torch.nn.Module,
        process_set: Any,
        balancer: Balancer | None,
        known: dict[torch.nn.Module, torch.nn.Module],
    ) -> torch.nn.Module:
        """`known`: what modules have become so far, as a module may be in several places of a model."""
        if module in known:
            return known[module]
        if isinstance(module, _BatchNorm) and not isinstance(module, cls):
            converted = cls(
                module.num_features,
                module.eps,
                module.momentum,
                module.affine,
                module.track_running_stats,
                process_set=process_set,
                balancer=balancer,
            )
            converted._parameters, converted._buffers = module._parameters, module._buffers
            known[module] = converted.train(module.training)
            return converted
        known[module] = module
        for name, child in module._modules.items():  # unlike `named_children`, with every place of each
            if child is not None:
                module.add_module(name, cls._converted(child, process_set, balancer, known))
        return module
