"""Local SGD behind `DistributedOptimizer(strategy=…)`: parameters as fragments, and what a merge makes of a model."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence

import torch

from hvd_hetero.optimizers.fragment import fragments_by_kind
from hvd_hetero.optimizers.local_sgd import LocalSGD
from hvd_hetero.optimizers.local_step import LocalSteps
from hvd_hetero.optimizers.second_moments import SecondMoments
from hvd_hetero.optimizers.ways import Ways
from hvd_hetero.optimizers.weighing import Weighing

from .checksum import checksum
from .layout import WIRE
from .second_moments import mix, moments_of
from .state import all_finite, average_state

MOVED = (
    "Expected parameters of a local strategy on the device, and of the type, that they had when steps apart began. "
    "Received: others. Move the model before training, or, without synchronous steps first, before making "
    "hvd.DistributedOptimizer."
)
KNOWN = 4  # arrays of a fragment of which views are kept: the model, and what a rank was when it last sent, and before


class ParameterStore:
    """A rank's parameters, flat, by fragment; each fragment is of one type and device, and wholly lossy or not."""

    def __init__(
        self,
        parameters: Sequence[torch.nn.Parameter],
        count: int = 1,
        lossy: Callable[[torch.nn.Parameter], bool] = lambda parameter: False,
    ) -> None:
        kinds = [(WIRE[p.dtype], p.device, lossy(p)) for p in parameters]
        fragments = fragments_by_kind(kinds, [p.numel() for p in parameters], count)
        self._members = [[parameters[index] for index in chosen] for chosen in fragments]
        self.lossy: list[bool] = [kinds[chosen[0]][2] for chosen in fragments]
        self.narrow = any(p.dtype != WIRE[p.dtype] for p in parameters)
        # Looking at each costs Python time.
        ends = [(kinds[at][:2], parameters[at]) for chosen in fragments for at in (chosen[0], chosen[-1])]
        self._ends = [(device, wire, parameter) for (wire, device), parameter in ends]
        self._known: dict[tuple[int, int], list[torch.Tensor]] = {}  # the least recently used first

    @property
    def misplaced(self) -> bool:
        """Whether parameters are no longer where they were, or no longer of that type."""
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
        """What `flat` holds of each parameter, in its shape. Merges take the same few arrays over and over, so views of
        the last ones are kept. They are known by their memory, which they hold: no other array can have it."""
        key = index, flat.data_ptr()
        parts = self._known.pop(key, None)
        if parts is None or parts[0].data_ptr() != flat.data_ptr():  # of a copy of this object, that is elsewhere
            members = self._members[index]
            pieces = flat.split([p.numel() for p in members])
            parts = [piece.view(p.shape) for piece, p in zip(pieces, members, strict=True)]
            if len(self._known) == KNOWN * len(self._members):
                del self._known[next(iter(self._known))]
        self._known[key] = parts
        return parts


class LocalTraining:
    """The steps that ranks make apart, for one optimizer. Making one is a collective call.

    Args:
        parameters: those that are trained.
        weighing: of their gradients.
        before: whose place it takes.
    """

    def __init__(
        self,
        rule: LocalSGD,
        parameters: Sequence[torch.nn.Parameter],
        weighing: Weighing,
        *,
        ways: Ways,
        before: LocalTraining | None = None,
    ) -> None:
        self._weighing = weighing
        self._store = store = ParameterStore(parameters, rule.fragments, lambda p: ways.takes(tuple(p.shape)))
        self.steps = LocalSteps(rule, store, weighing=weighing, ways=ways, on_give_up=self._forget_what_is_not_finite)
        find = moments_of if rule.second_moments == "global" else lambda optimizer: ()
        self._moments = SecondMoments(find, copy=torch.clone, mix=mix, exchanges=True)
        self._optimizer: Callable[[], torch.optim.Optimizer | None] = before._optimizer if before else lambda: None

    @property
    def misplaced(self) -> bool:
        """Whether parameters have moved since this was made, as by `model.to(device)`."""
        return self._store.misplaced

    def take_over(self, before: LocalTraining) -> None:
        """Goes on with what codecs of merges have kept back, and the samples counted."""
        self.steps.take_over(before.steps)

    def follow(self, optimizer: torch.optim.Optimizer) -> None:
        """Says whose steps these are."""
        self._optimizer = weakref.ref(optimizer)

    @torch.compiler.disable  # a script may compile a whole step of training
    def before_step(self, *, by_rate: bool = False) -> float:
        """Before the update of a step apart, as `LocalSteps` has it. The first one is a collective call."""
        if self.misplaced:
            raise RuntimeError(MOVED)
        factor = self.steps.before_step(by_rate=by_rate)
        self._moments.before_step(self._optimizer())
        return factor

    def after_step(self, terms: float, *, lr: float) -> int:
        """After the update of a step apart over `terms` loss terms: the bytes that it sent."""
        sent = self.steps.after_step(terms, lr=lr)
        self._moments.after_step(self._optimizer(), self.steps.part(terms), sent=sent > 0)
        if self.steps.ends:
            self.come_together()
        return sent

    def _forget_what_is_not_finite(self) -> None:
        """Of a rank that has given up what it did, what the optimizer keeps of that: all that followed would be the
        same. What it keeps for a parameter begins anew."""
        if (optimizer := self._optimizer()) is None:
            return
        for parameter, kept in list(optimizer.state.items()):
            if not all_finite(kept.values()):
                del optimizer.state[parameter]

    def merge(self) -> None:
        """Returns when all ranks hold one model. A collective call."""
        self.steps.merge()
        self._moments.end(self._optimizer())

    def come_together(self) -> None:
        """Ends steps apart: one model on all ranks, and one state of the optimizer. A collective call."""
        self.merge()
        optimizer, name = self._optimizer(), f"{self._weighing.name}.state"
        assert optimizer is not None
        average_state(optimizer, weight=self.steps.samples, engine=self._weighing.engine, name=name)
