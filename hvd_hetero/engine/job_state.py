"""The state of an elastic job, for any framework: what is committed, restored after a failure, and broadcast.

`JobState` extends Horovod's `ObjectState`, which is notified of added and removed hosts. The subclasses for PyTorch and
Keras (`hvd.elastic.TorchState`, `KerasState`) tell it how to handle models and optimizers.
"""

from __future__ import annotations

import copy
import importlib
import queue
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from . import elastic
from .environment import is_elastic, is_first_worker
from .stderr import tell

_exceptions: Any = importlib.import_module("horovod.common.exceptions")
_horovod_elastic: Any = importlib.import_module("horovod.common.elastic")


def has_state(value: Any) -> bool:
    """Whether an object has the methods `state_dict` and `load_state_dict`."""
    return callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))


def _copied(value: Any) -> Any:
    """Returns a deep copy of a plain value; the value itself if it cannot be copied."""
    try:
        return copy.deepcopy(value)
    except Exception:
        return value


@dataclass(frozen=True)
class SavedBalancer:
    """A copy of what one rank alone keeps at a balancer.

    Attributes:
        balancer: the balancer itself.
        state: see `JobState.balancer_states`.
        residuals: those of codecs, by optimizer, which any set of ranks can take over.
    """

    balancer: Any
    state: dict[str, Any]
    residuals: dict[str, Any]


@dataclass
class Saved:
    """Copies of the state of one rank, to which it goes back after a failure.

    Attributes:
        parts: the states of the parts, by name.
        values: the plain values, by name.
        balancers: what this rank alone keeps at each balancer.
    """

    parts: dict[str, Any]
    values: dict[str, Any]
    balancers: list[SavedBalancer]


class JobState(_horovod_elastic.ObjectState):  # type: ignore[misc]
    """The state that an elastic job commits, restores after a failure, and sends to ranks that join.

    Its "parts" are the objects with a state (models, optimizers, and the balancers that they were made with); the other
    values are "plain" ones.

    Args:
        given: parts and plain values by name. They become attributes.
        horovod: Horovod's module for the framework.
        content: the face's module that serialises checkpoints, with `saved` and `loaded`; None: there will be none.

    Attributes:
        commits: the number of commits of the job so far.
        at_end, at_end_alone, read_late: set by a checkpoint: see `checkpoint.State`.
    """

    def __init__(self, given: Mapping[str, Any], *, horovod: Any, content: Any = None) -> None:
        self._horovod, self._content = horovod, content
        self._parts: dict[str, Any] = {}
        self._balancers: list[Any] = []
        self.commits = 0
        self._synced = False
        self._rebuilt = False  # whether an elastic reset has happened since the last `sync`
        self._broken_off = False  # whether ranks were lost since the last `sync`
        self._told = False  # whether this rank was told to end
        self.at_end: Callable[[], object] | None = None  # see `checkpoint.State`
        self.at_end_alone: Callable[[], object] | None = None
        self.read_late: Callable[[], object] | None = None
        for name, value in given.items():
            if (part := self._part(value)) is not None:
                self._parts[name] = part
                object.__setattr__(self, name, value)
        self._find_parts()
        plain = {name: value for name, value in given.items() if name not in self._parts}
        super().__init__(bcast_object=horovod.broadcast_object, get_rank=horovod.rank, **plain)
        self._plain = list(plain)
        self._saved = self._copies()

    # What a face says -----------------------------------------------------------------------------------------------

    def _part(self, value: Any) -> Any:
        """Returns the object that holds the state of `value`: by default `value` itself; None for a plain value."""
        return value if has_state(value) else None

    def _balancer_of(self, part: Any) -> Any:
        """Returns the balancer that `part` is, or was made with; None if there is none."""
        found = (part, getattr(part, "balancer", None))
        return next((one for one in found if hasattr(one, "stateful_parts")), None)

    def _merge(self, part: Any) -> None:
        """Merges the models of all ranks, if `part` is an optimizer with a local strategy. A collective call then."""

    def _stays(self, value: Any) -> bool:
        """Whether a plain value belongs to this rank alone, such as its data loader: it is neither kept nor sent."""
        return False

    def _copy(self, state: Any) -> Any:
        """Returns a copy of the `state_dict()` of a part, or of what a rank keeps at a balancer."""
        return copy.deepcopy(state)

    def _sync_part(self, part: Any, root: int) -> None:
        """Loads the state that a part has on rank `root`, on all ranks. A collective call."""
        mine = part.state_dict() if self._horovod.rank() == root else None
        part.load_state_dict(self._of_root(mine, root, name="hvd_hetero.elastic.part"))

    def _restore_part(self, part: Any, kept: Any) -> None:
        part.load_state_dict(kept)

    def _of_root(self, value: Any, root: int, *, name: str) -> Any:
        """Returns the `value` of rank `root`, on all ranks. A collective call."""
        return self._horovod.broadcast_object(value, root, name=name)

    def _of_all(self, value: Any, *, name: str) -> list[Any]:
        """The values of all ranks. A collective call."""
        return self._horovod.allgather_object(value, name=name)  # type: ignore[no-any-return]

    def _own_state(self) -> dict[str, Any]:
        """What a checkpoint holds of this rank alone, beside what its balancers keep."""
        return {}

    def _load_own_state(self, state: Mapping[str, Any]) -> None:
        """Loads what `_own_state` returned on the rank of this number in a job of as many ranks."""

    # What it is made of ---------------------------------------------------------------------------------------------

    def _find_parts(self) -> None:
        """Adds as further parts the balancers of the parts, and each balancer's `stateful_parts`: what was made with
        it, such as samplers, also if that is made later. They replace those of a part that was there before."""
        parts = self._parts
        for name in list(parts):
            if (balancer := self._balancer_of(parts[name])) is None:
                continue
            for found in (balancer, balancer.stateful_parts):
                if not any(found is part for part in parts.values()):
                    parts[f"{name}.{type(found).__name__}"] = found
        self._balancers = [part for part in parts.values() if part is self._balancer_of(part)]

    def _copies(self) -> Saved:
        """Copies of the present state."""
        return Saved(
            parts={name: self._copy(part.state_dict()) for name, part in self._parts.items()},
            values={name: _copied(value) for name, value in self._values().items()},
            balancers=self._saved_balancers(),
        )

    def _saved_balancers(self, known: Sequence[SavedBalancer] = ()) -> list[SavedBalancer]:
        """Copies of what this rank keeps at each balancer now; of those that are among `known`, what was copied then.
        """
        earlier = {id(kept.balancer): kept for kept in known}
        states = zip(self._balancers, self.balancer_states(), strict=True)
        return [
            earlier.get(id(balancer)) or SavedBalancer(
                balancer=balancer,
                state=self._copy(state),
                residuals={name: keeper.residuals() for name, keeper in balancer.keepers.named.items()},
            )
            for balancer, state in states
        ]  # fmt: skip

    def _values(self) -> dict[str, Any]:
        """The plain values of the job by name, without those that belong to this rank alone (`_stays`)."""
        values = {name: getattr(self, name) for name in self._plain}
        return {name: value for name, value in values.items() if not self._stays(value)}

    def __setattr__(self, name: str, value: Any) -> None:
        before = vars(self).get(name)
        super().__setattr__(name, value)
        if name in vars(self).get("_parts", {}) and value is not before:
            self._replace(name, value)

    def _replace(self, name: str, value: Any) -> None:
        """Handles the assignment of a new value to a part's name: saves the new value's present state, because the
        saved state of the old one would not fit it."""
        part, before = self._part(value), dict(self._parts)
        if part is None:
            del self._parts[name], self._saved.parts[name]
            self._plain.append(name)
            self._saved.values[name] = _copied(value)
            return
        self._parts[name] = part
        self._find_parts()
        for each, found in self._parts.items():
            if found is not before.get(each):
                self._saved.parts[each] = self._copy(found.state_dict())
        self._saved.balancers = self._saved_balancers(self._saved.balancers)

    # What a job does with it ----------------------------------------------------------------------------------------

    def commit(self) -> None:
        """Saves the state for `restore`, and handles ranks that leave or join. All ranks commit at the same steps.

        With a local strategy the models are merged first. A rank that was told to end (SIGTERM) ends here, with exit
        status 75, and the others go on without it; if its host still has a slot, a new process takes its place. If all
        ranks leave, a checkpoint is saved, if the job has one; so all do in a job that is not elastic, if one does.

        Raises:
            SystemExit: on a rank that leaves.
            HostsUpdatedInterrupt: on the other ranks, if ranks leave, or hosts were added or removed.
        """
        self.merge_models()
        self.commits += 1
        self.save()
        leaving = self._all_leaving()
        if leaving and not is_elastic():
            leaving = list(range(self._horovod.size()))
        if self.at_end is not None and len(leaving) == self._horovod.size():
            self.at_end()
        elastic.let_leave(leaving, rank=self._horovod.rank())
        self.check_host_updates()

    def check_host_updates(self) -> None:
        """Raises HostsUpdatedInterrupt on all ranks if hosts were added or removed. Nothing is restored after that, so
        the present state is saved first, to be the one from which the job goes on."""
        try:
            super().check_host_updates()
        except _exceptions.HostsUpdatedInterrupt:
            self.merge_models()  # the exception comes on all ranks at once, so a collective call is possible
            self.save()
            raise

    def save(self) -> None:
        """Copies the present state, for `restore`; also plain values, as a script may change them in place."""
        self._saved = self._copies()

    def begin_reset(self) -> None:
        """Forgets what was heard of added and removed hosts, as ranks are about to come together on the present ones.
        """
        self._host_messages: queue.Queue[Any] = queue.Queue()

    def on_reset(self) -> None:
        """Notes that an elastic reset has rebuilt balancers, optimizers and loaders for the new ranks.

        What was heard of added hosts meanwhile stays: that may take seconds. Hosts that were removed are those that
        ranks have come together without.
        """
        heard = self._host_messages
        super().on_reset()
        while not heard.empty():
            timestamp, update = heard.get()
            if update & _horovod_elastic.HostUpdateResult.added:
                self._host_messages.put((timestamp, update))
        self._rebuilt = True

    def break_off(self) -> None:
        """Notes that ranks were lost, so that collectives under way will not complete. Is called before `restore`."""
        self._broken_off = True

    def restore(self) -> None:
        """Goes back to the state of the last `commit` or `save`.

        With a local strategy, merges under way are completed first, or they would change the restored model later. That
        is a collective call. After `break_off` they are not completed.
        """
        if not self._broken_off:
            self.merge_models()
        for name, part in self._parts.items():
            self._restore_part(part, self._copy(self._saved.parts[name]))
        for name, value in self._saved.values.items():
            setattr(self, name, _copied(value))
        self.load_balancer_states([self._copy(kept.state) for kept in self._saved.balancers])

    def sync(self) -> None:
        """Gives all ranks the state of one rank: that with the most commits among those that have been synchronised; of
        several such, the first. A collective call, at the beginning of `train` and after each elastic reset.

        If no rank is left that had the job's state, it is read from the checkpoint, if `read_late` is set. Each rank
        keeps the residuals of its own codecs. It also keeps the gradients that it has accumulated and not exchanged,
        but only if it is at the same commit as the chosen rank.
        """
        horovod, late = self._horovod, self.read_late
        numbers = [balancer.stateful_parts.made for balancer in self._balancers]
        standing = (self._synced, late is None, self.commits)  # late is None: no checkpoint is left to be read here
        said = self._of_all((standing, numbers), name="hvd_hetero.elastic.held")
        held, made = zip(*said, strict=True)
        root = held.index(max(held))
        found = late is not None and not any(held[root][:2]) and late()  # then on all ranks
        if not found and horovod.rank() == root and not self._synced and not is_first_worker():
            tell("hvd_hetero: no process has the state of this job: it begins anew, as the script does.")
        for part in self._parts.values():
            self._sync_part(part, root)
        # A rank that joins has not made the objects that `train` has made before. From here on all ranks give the same
        # numbers to the objects that they make.
        for balancer, counts in zip(self._balancers, zip(*made, strict=True), strict=True):
            balancer.stateful_parts.made = max(counts)
        # Gradients that a rank has accumulated up to another commit than the root's may have been exchanged since.
        self._sync_values(root, keeps_sums=held[horovod.rank()][2] == held[root][2])
        for one in self._saved.balancers if self._rebuilt else ():
            for name, keeper in one.balancer.keepers.expect(one.residuals).items():
                keeper.add_residuals(one.residuals.get(name, {}))
        self._rebuilt = self._broken_off = False
        self.read_late = None
        self._synced, self.commits = True, held[root][2]
        self.save()

    def _sync_values(self, root: int, *, keeps_sums: bool) -> None:
        """Gives all ranks the plain values of rank `root`, and takes up accumulated gradients. A collective call.

        Args:
            keeps_sums: whether this rank keeps the gradients that it has accumulated; else they begin at zero, after as
                many batches as on rank `root`.
        """
        accumulated = (
            [kept.state["sums"] for kept in self._saved.balancers] if self._rebuilt
            else [balancer.sums.state_dict() for balancer in self._balancers]
        )  # fmt: skip
        begun = [{name: kept["begun"] for name, kept in sums.items()} for sums in accumulated]
        values, begun = self._of_root((self._values(), begun), root, name="hvd_hetero.elastic.values")
        for name, value in values.items():
            setattr(self, name, value)
        for balancer, kept, batches in zip(self._balancers, accumulated, begun, strict=False):
            for name, sums in balancer.sums.expect(batches).items():
                sums.restore(kept.get(name, {}) if keeps_sums else {}, begun=batches.get(name, 0))

    def merge_models(self) -> None:
        """Merges the models of all ranks, with a local strategy. A collective call then; otherwise it does nothing."""
        for part in self._parts.values():
            self._merge(part)

    # Leaving --------------------------------------------------------------------------------------------------------

    @property
    def synced(self) -> bool:
        """Whether `sync` has completed in this process, so that it holds the job's state."""
        return self._synced

    @property
    def leaving(self) -> Sequence[int] | None:
        """The ranks that were told to end (SIGTERM), in order, the same on all ranks; `None` (not known) without a
        balancer of all ranks, since between commits only balancers tell ranks of each other's signals."""
        # All balancers are asked, because some may have finished their part of the job.
        whole = [balancer for balancer in self._balancers if balancer.size == self._horovod.size()]
        return sorted({rank for balancer in whole for rank in balancer.leaving}) if whole else None

    def _all_leaving(self) -> list[int]:
        """The ranks that were told to end by now. A collective call."""
        mine = self._told or any(balancer.departure.leaving.said for balancer in self._balancers)
        said = self._of_all(mine, name="hvd_hetero.elastic.leaving")
        return [rank for rank, leaves in enumerate(said) if leaves]

    def leave(self) -> None:
        """Notes that this rank was told to end: it does so at the next commit. The balancers tell the others with their
        next exchange."""
        self._told = True
        for balancer in self._balancers:
            balancer.leave()

    def leave_alone(self) -> None:
        """Saves this rank's restored state to the checkpoint, if there is one, without the other ranks.

        Is called on a rank that was told to end after the others were lost, so that it cannot know whether any of them
        goes on. The process ends after it.
        """
        try:
            if self.at_end_alone is not None and self._synced:
                self.at_end_alone()
        finally:
            for balancer in self._balancers:
                balancer.record.flush()

    # Checkpoints ----------------------------------------------------------------------------------------------------

    def shared_content(self) -> bytes:
        """The part of a checkpoint that is the same on all ranks."""
        return self._content.saved(self.shared_state())  # type: ignore[no-any-return]

    def own_content(self) -> bytes:
        """This rank's own part of a checkpoint: statistics of its samples, random states, and `balancer_states`."""
        state = {**self._own_state(), "balancers": self.balancer_states()}
        return self._content.saved(state)  # type: ignore[no-any-return]

    def load_shared_content(self, content: bytes) -> None:
        """Goes on from what `shared_content` returned. Raises ValueError if it is of another job."""
        self.load_shared_state(self._content.loaded(content))

    def load_own_content(self, content: bytes) -> None:
        """Goes on from what `own_content` returned."""
        state = self._content.loaded(content)
        self._load_own_state(state)
        self.load_balancer_states(state["balancers"])
        self.save()

    def shared_state(self) -> dict[str, dict[str, Any]]:
        """Returns the state that is the same on all ranks: {"parts": state of each part, "values": plain values}."""
        parts = {name: part.state_dict() for name, part in self._parts.items()}
        return {"parts": parts, "values": self._values()}

    def balancer_states(self) -> list[dict[str, Any]]:
        """Returns what this rank alone keeps at each balancer: the state of its codecs ("codecs"), the gradients that
        it has accumulated and not exchanged yet ("sums"), and its places in streams that are its own ("streams")."""
        return [
            {
                "codecs": balancer.keepers.state_dict(),
                "sums": balancer.sums.state_dict(),
                "streams": balancer.stateful_parts.own_state_dict(),
            }
            for balancer in self._balancers
        ]

    def load_balancer_states(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Loads what `balancer_states` returned on the rank of this number in a job of as many ranks."""
        for balancer, state in zip(self._balancers, states, strict=True):
            balancer.keepers.load_state_dict(state["codecs"])
            balancer.sums.load_state_dict(state["sums"])
            balancer.stateful_parts.load_own_state_dict(state["streams"])

    def load_shared_state(self, state: Mapping[str, Mapping[str, Any]]) -> None:
        """Loads what `shared_state` returned, and saves it for `restore`. With a local strategy a collective call.

        Raises:
            ValueError: the state has parts or plain values of other names: it is of another job.
        """
        for kind, mine in (("parts", list(self._parts)), ("values", list(self._values()))):
            if set(state[kind]) != set(mine):
                raise ValueError(f"Expected the state of a job with {kind} {mine}. Received: {list(state[kind])}.")
        self.merge_models()
        for name, part in self._parts.items():
            self._restore_part(part, state["parts"][name])
            late = part.unknown(state["parts"][name]) if hasattr(part, "unknown") else ()
            if late and self._horovod.rank() == 0:
                tell(f"hvd_hetero: not made before the checkpoint was restored, so begun anew: {', '.join(late)}.")
        for name, value in state["values"].items():
            setattr(self, name, value)
        for balancer in self._balancers:
            balancer.sums.load_state_dict({})
        self.save()
