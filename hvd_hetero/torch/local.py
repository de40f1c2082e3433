"""Local SGD for `DistributedOptimizer(strategy=…)`: reads and writes parameters by fragments, and merges models."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence

import torch

from hvd_hetero.optimizers.fragment import fragments_by_kind
from hvd_hetero.optimizers.gradient_exchange import GradientExchange
from hvd_hetero.optimizers.local_sgd import LocalSGD
from hvd_hetero.optimizers.local_step import LocalSteps
from hvd_hetero.optimizers.routing import Routing
from hvd_hetero.optimizers.second_moments import SecondMoments

from .checksum import checksum
from .layout import WIRE
from .second_moments import mix, moments_of
from .state import all_finite, average_state

MOVED = (
    "Expected parameters of a local strategy on the device, and of the type, that they had when local steps began. "
    "Received: others. Move the model before training, or, without synchronous steps first, before making "
    "hvd.DistributedOptimizer."
)
KNOWN = 4  # arrays per fragment of which views are kept, such as the model, and the rank's own at its last two sends


class ParameterStore:
    """Reads and writes a rank's parameters as flat fragments. All parameters of a fragment have one type and device,
    and go through a codec all or none.

    Args:
        parameters: in the order of the model.
        count: fragments of each kind; None: many small ones.
        lossy: whether a parameter goes through a codec.
    """

    def __init__(
        self,
        parameters: Sequence[torch.nn.Parameter],
        count: int | None = None,
        lossy: Callable[[torch.nn.Parameter], bool] = lambda parameter: False,
    ) -> None:
        kinds = [(WIRE[p.dtype], p.device, lossy(p)) for p in parameters]
        fragments = fragments_by_kind(kinds, [p.numel() for p in parameters], count)
        self._members = [[parameters[index] for index in chosen] for chosen in fragments]
        self.lossy: list[bool] = [kinds[chosen[0]][2] for chosen in fragments]
        self.narrow = any(p.dtype != WIRE[p.dtype] for p in parameters)
        # The first and last parameter of each fragment stand for all of it: looking at each costs Python time.
        ends = [(kinds[at][:2], parameters[at]) for chosen in fragments for at in (chosen[0], chosen[-1])]
        self._ends = [(device, wire, parameter) for (wire, device), parameter in ends]
        self._known: dict[tuple[int, int], list[torch.Tensor]] = {}  # the least recently used first

    @property
    def misplaced(self) -> bool:
        """Whether parameters have moved to another device, or changed their type, since this was made."""
        return any(p.device != device or WIRE.get(p.dtype) != wire for device, wire, p in self._ends)

    def shapes(self, index: int) -> list[tuple[int, ...]]:
        return [tuple(p.shape) for p in self._members[index]]

    def empty(self, index: int, tail: int) -> torch.Tensor:
        first = self._members[index][0]
        length = sum(p.numel() for p in self._members[index])
        return torch.zeros(length + tail, dtype=WIRE[first.dtype], device=first.device)

    def control(self, length: int) -> torch.Tensor:
        return torch.zeros(length, dtype=torch.float64, device="cpu")

    def checksum(self, index: int) -> int:
        return checksum(self._members[index])

    @torch.no_grad()
    def read(self, index: int, into: torch.Tensor | None = None) -> torch.Tensor:
        members = self._members[index]
        if into is None:
            return torch.cat([p.detach().reshape(-1) for p in members]).to(WIRE[members[0].dtype])
        torch._foreach_copy_(self._parts(index, into), members)
        return into

    @torch.no_grad()
    def write(self, index: int, flat: torch.Tensor) -> None:
        torch._foreach_copy_(self._members[index], self._parts(index, flat))

    @torch.no_grad()
    def shift(self, index: int, by: torch.Tensor) -> None:
        members, parts = self._members[index], self._parts(index, by)
        if all(p.dtype == by.dtype for p in members):
            torch._foreach_add_(members, parts)
        else:
            torch._foreach_add_(parts, members)
            torch._foreach_copy_(members, parts)

    @torch.no_grad()
    def blend(self, index: int, flat: torch.Tensor, part: float) -> None:
        torch._foreach_lerp_(self._members[index], self._parts(index, flat), 1.0 - part)

    def _parts(self, index: int, flat: torch.Tensor) -> list[torch.Tensor]:
        """Views of `flat`, one for each parameter of fragment `index`, in its shape. Merges use the same few arrays
        again and again, so the views of the last ones are kept, by the address of their memory. No other array can have
        the same address, as the views keep the memory alive."""
        key = index, flat.data_ptr()
        parts = self._known.pop(key, None)
        if parts is None or parts[0].data_ptr() != flat.data_ptr():  # differs in a copy of this object
            members = self._members[index]
            pieces = flat.split([p.numel() for p in members])
            parts = [piece.view(p.shape) for piece, p in zip(pieces, members, strict=True)]
            if len(self._known) == KNOWN * len(self._members):
                del self._known[next(iter(self._known))]
        self._known[key] = parts
        return parts


class LocalTraining:
    """Local steps of one optimizer, and their merges. Constructing one is a collective call.

    Args:
        rule: the numbers of the local strategy.
        parameters: those that are trained.
        gradient_exchange: of their gradients.
        routing: how merges travel.
        before: the object that this one replaces, for another layout.
    """

    def __init__(
        self,
        rule: LocalSGD,
        parameters: Sequence[torch.nn.Parameter],
        gradient_exchange: GradientExchange,
        *,
        routing: Routing,
        before: LocalTraining | None = None,
    ) -> None:
        self._gradient_exchange = gradient_exchange
        self._store = store = ParameterStore(parameters, rule.fragments, lambda p: routing.takes(tuple(p.shape)))
        self.steps = LocalSteps(
            rule, store, gradient_exchange=gradient_exchange, routing=routing,
            on_give_up=self._forget_what_is_not_finite,
        )  # fmt: skip
        find = moments_of if rule.second_moments == "global" else lambda optimizer: ()
        self._moments = SecondMoments(find, copy=torch.clone, mix=mix, exchanges=True)
        self._optimizer: Callable[[], torch.optim.Optimizer | None] = before._optimizer if before else lambda: None

    @property
    def misplaced(self) -> bool:
        """Whether parameters have moved since this was made, as by `model.to(device)`."""
        return self._store.misplaced

    def take_over(self, before: LocalTraining) -> None:
        """Takes over from `before` what the codecs of merges have kept back, and the samples counted."""
        self.steps.take_over(before.steps)

    def follow(self, optimizer: torch.optim.Optimizer) -> None:
        """Sets the optimizer whose steps these are."""
        self._optimizer = weakref.ref(optimizer)

    @torch.compiler.disable  # a script may compile a whole step of training
    def before_step(self, *, by_rate: bool = False) -> float:
        """Prepares the update of a local step. Returns the factor for its learning rates: see `LocalSteps.before_step`.
        The first call is a collective one."""
        if self.misplaced:
            raise RuntimeError(MOVED)
        factor = self.steps.before_step(by_rate=by_rate)
        self._moments.before_step(self._optimizer())
        return factor

    def after_step(self, terms: float, *, lr: float) -> int:
        """Ends a local step over `terms` loss terms, after its update. Returns the bytes that it has sent."""
        sent = self.steps.after_step(terms, lr=lr)
        self._moments.after_step(self._optimizer(), self.steps.part(terms), sent=sent > 0)
        if self.steps.ends:
            self.come_together()
        return sent

    def _forget_what_is_not_finite(self) -> None:
        """Drops the optimizer's state of each parameter in which there is an infinity or a NaN; it begins anew.

        Is called on a rank that has given up its local steps since the last merge because of such values: with that
        state, all further steps would fail in the same way."""
        if (optimizer := self._optimizer()) is None:
            return
        for parameter, kept in list(optimizer.state.items()):
            if not all_finite(kept.values()):
                del optimizer.state[parameter]

    def merge(self) -> None:
        """Merges, and returns when all ranks hold one model. A collective call."""
        self.steps.merge()
        self._moments.end(self._optimizer())

    def come_together(self) -> None:
        """Ends the local steps: all ranks hold one model and one optimizer state afterwards. A collective call."""
        self.merge()
        optimizer, name = self._optimizer(), f"{self._gradient_exchange.name}.state"
        assert optimizer is not None
        average_state(optimizer, weight=self.steps.samples, engine=self._gradient_exchange.engine, name=name)
