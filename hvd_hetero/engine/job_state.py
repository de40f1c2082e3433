"""The state of a job whose ranks come and go, for any framework: its parts, commits, and going back to them.

On Horovod's `ObjectState`, which hears of hosts that come and go. A face says what its models and optimizers are.
"""

from __future__ import annotations

import copy
import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from . import elastic
from .environment import came_later
from .stderr import tell

_exceptions: Any = importlib.import_module("horovod.common.exceptions")
_horovod_elastic: Any = importlib.import_module("horovod.common.elastic")


def has_state(value: Any) -> bool:
    """Whether something says what it is by `state_dict()`, and takes it back by `load_state_dict()`."""
    return callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))


def _copied(value: Any) -> Any:
    """A copy of a plain value; itself where it cannot be copied."""
    try:
        return copy.deepcopy(value)
    except Exception:
        return value


class JobState(_horovod_elastic.ObjectState):  # type: ignore[misc]
    """What a job commits, goes back to, and hands to ranks that join.

    Args:
        given: by name: what has a state, and plain values. They become attributes.
        horovod: Horovod's module for the framework.
    """

    def __init__(self, given: Mapping[str, Any], *, horovod: Any) -> None:
        self._horovod = horovod
        self._parts: dict[str, Any] = {}
        self._balancers: list[Any] = []
        self._kept: dict[str, Any] = {}
        self._kept_values: dict[str, Any] = {}
        self._kept_back: list[Any] = []  # by codecs, which have not sent it yet
        self._kept_codecs: list[Any] = []  # what they go on from, that included
        self._kept_sums: list[Any] = []  # of batches whose exchange is yet to come
        self.commits = 0
        self._synced = False
        self._rebuilt = False  # on other ranks, since the last sync
        self._broken_off = False  # ranks are gone, until the next sync
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
        self._keep()

    # What a face says -----------------------------------------------------------------------------------------------

    def _part(self, value: Any) -> Any:
        """The object with the state of a value, which is itself if it has a `state_dict`; None for a plain one."""
        return value if has_state(value) else None

    def _balancer_of(self, part: Any) -> Any:
        """The balancer of what was made with one, and of itself; None for whatever else."""
        found = (part, getattr(part, "balancer", None))
        return next((one for one in found if hasattr(one, "dependents")), None)

    def _merge(self, part: Any) -> None:
        """Makes one model of those of all ranks, where `part` is an optimizer with a local strategy."""

    def _stays(self, value: Any) -> bool:
        """Whether a plain value is each rank's own, and is neither kept nor sent: what it reads its data with."""
        return False

    def _copy(self, state: Any) -> Any:
        """A copy of what a part keeps."""
        return copy.deepcopy(state)

    def _sync_part(self, part: Any, root: int) -> None:
        """Broadcasts the state of a part from rank `root`. A collective call."""
        mine = part.state_dict() if self._horovod.rank() == root else None
        part.load_state_dict(self._of_root(mine, root, name="hvd_hetero.elastic.part"))

    def _restore_part(self, part: Any, kept: Any) -> None:
        part.load_state_dict(kept)

    def _of_root(self, value: Any, root: int, *, name: str) -> Any:
        """`value` as it is on rank `root`. A collective call."""
        return self._horovod.broadcast_object(value, root, name=name)

    # What it is made of ---------------------------------------------------------------------------------------------

    def _find_parts(self) -> None:
        """Adds the balancers of the parts, and what is made with those, whenever that is."""
        parts = self._parts
        for name, part in list(parts.items()):
            balancer = self._balancer_of(part)
            if balancer is None or balancer in self._balancers:
                continue
            self._balancers.append(balancer)
            for found in (balancer, balancer.dependents):
                if not any(found is part for part in parts.values()):
                    parts[f"{name}.{type(found).__name__}"] = found

    def _keep(self) -> None:
        self._kept_sums = self.sum_states()
        self._kept_codecs = copy.deepcopy(self.codec_states())
        keepers = [balancer.keepers.named for balancer in self._balancers]
        self._kept_back = [{name: keeper.kept_back() for name, keeper in named.items()} for named in keepers]
        self._kept = {name: self._copy(part.state_dict()) for name, part in self._parts.items()}
        self._kept_values = {name: _copied(value) for name, value in self._values().items()}

    def _values(self) -> dict[str, Any]:
        """The plain values that are the job's."""
        values = {name: getattr(self, name) for name in self._plain}
        return {name: value for name, value in values.items() if not self._stays(value)}

    def __setattr__(self, name: str, value: Any) -> None:
        before = vars(self).get(name)
        super().__setattr__(name, value)
        if name in vars(self).get("_parts", {}) and value is not before:
            self._replace(name, value)

    def _replace(self, name: str, value: Any) -> None:
        """Keeps another value in the place of one with a state, as it is now: what was kept of that would not fit."""
        part, known = self._part(value), set(self._parts)
        if part is None:
            del self._parts[name], self._kept[name]
            self._plain.append(name)
            self._kept_values[name] = _copied(value)
            return
        self._parts[name] = part
        self._find_parts()
        for each in (name, *(set(self._parts) - known)):
            self._kept[each] = self._copy(self._parts[each].state_dict())

    # What a job does with it ----------------------------------------------------------------------------------------

    def commit(self) -> None:
        """Keeps what there is, to go back to it, and lets changes of the ranks happen here. All ranks commit at the
        same steps; with a local strategy, they come to one model first. A rank that was told to end (SIGTERM) ends
        here, with exit status 75, and the others go on without it; where its host still offers the place, another
        process takes it. Where all leave, a checkpoint is saved, if there is one."""
        self.merge_models()
        self.commits += 1
        self.save()
        leaving = self._all_leaving() if self.leaving else ()
        if self.at_end is not None and len(leaving) == self._horovod.size():
            self.at_end()
        elastic.let_leave(leaving, rank=self._horovod.rank())
        self.check_host_updates()

    def check_host_updates(self) -> None:
        """Lets changes of the ranks happen here. Nobody goes back then, so this is what there is to go on from."""
        try:
            super().check_host_updates()
        except _exceptions.HostsUpdatedInterrupt:
            self.merge_models()  # all ranks are here, also where this is not called by `commit`
            self.save()
            raise

    def save(self) -> None:
        """Keeps what there is: of plain values copies, as a script may change them in place."""
        self._keep()

    def on_reset(self) -> None:
        """Notes that balancers, optimizers and loaders have been rebuilt on other ranks."""
        super().on_reset()
        self._rebuilt = True

    def break_off(self) -> None:
        """Says that ranks are gone: what is under way with them comes to no end."""
        self._broken_off = True

    def restore(self) -> None:
        """Goes back to what was kept. With a local strategy a collective call, unless ranks are gone: merges that are
        under way end, so that none moves the model that is gone back to."""
        if not self._broken_off:
            self.merge_models()
        for name, part in self._parts.items():
            self._restore_part(part, self._copy(self._kept[name]))
        for name, value in self._kept_values.items():
            setattr(self, name, _copied(value))
        self.load_sum_states(self._kept_sums)
        self.load_codec_states(copy.deepcopy(self._kept_codecs))

    def sync(self) -> None:
        """Broadcasts the state of the rank with the most commits; of several such, the first. If no rank is left that
        had the state of this job, it is read from the checkpoint. A collective call."""
        horovod, late = self._horovod, self.read_late
        numbers = [balancer.dependents.made for balancer in self._balancers]
        standing = (self._synced, late is None, self.commits)  # who has read a checkpoint comes before who has not
        said = horovod.allgather_object((standing, numbers), name="hvd_hetero.elastic.held")
        held, made = zip(*said, strict=True)
        root = held.index(max(held))
        found = late is not None and not any(held[root][:2]) and late()  # then on all ranks
        if not found and horovod.rank() == root and not self._synced and came_later():
            text = "hvd_hetero: no process has the state of this job: it begins anew, as the script does."
            tell(text)
        for part in self._parts.values():
            self._sync_part(part, root)
        # Who joins has made nothing of what `train` has made; from here on all ranks number alike.
        for balancer, counts in zip(self._balancers, zip(*made, strict=True), strict=True):
            balancer.dependents.made = max(counts)
        kept_sums = self._kept_sums if self._rebuilt else self.sum_states()
        begun = [{name: kept["begun"] for name, kept in sums.items()} for sums in kept_sums]
        values, begun = self._of_root((self._values(), begun), root, name="hvd_hetero.elastic.values")
        for name, value in values.items():
            setattr(self, name, value)
        # What a rank added up up to another commit than the root's may have been sent since.
        alike = held[horovod.rank()][2] == held[root][2]
        for balancer, kept, batches in zip(self._balancers, kept_sums, begun, strict=False):
            for name, sums in balancer.sums.expect(batches).items():
                sums.give_back(kept.get(name, {}) if alike else {}, begun=batches.get(name, 0))
        for balancer, kept in zip(self._balancers, self._kept_back if self._rebuilt else (), strict=False):
            for name, keeper in balancer.keepers.expect(kept).items():
                keeper.give_back(kept.get(name, {}))
        self._rebuilt = self._broken_off = False
        self.read_late = None
        self._synced, self.commits = True, held[root][2]
        self.save()

    def merge_models(self) -> None:
        """Comes to one model, with a local strategy. A collective call."""
        for part in self._parts.values():
            self._merge(part)

    # Leaving --------------------------------------------------------------------------------------------------------

    @property
    def synced(self) -> bool:
        """Whether `sync` was called in this process."""
        return self._synced

    @property
    def leaving(self) -> Sequence[int] | None:
        """Ranks that were told to end, the same on all ranks; None without a balancer that would carry it."""
        # Of several balancers some may be through with their part of the job.
        return sorted({rank for each in self._balancers for rank in each.leaving}) if self._balancers else None

    def _all_leaving(self) -> list[int]:
        """`leaving`, with those that were told to end since that was heard: all that are told at once end at one
        commit, wherever the signal has met them. A collective call."""
        mine = self._horovod.rank() in (self.leaving or ()) or any(b.departure.leaving.said for b in self._balancers)
        said = self._horovod.allgather_object(mine, name="hvd_hetero.elastic.leaving")
        return [rank for rank, leaves in enumerate(said) if leaves]

    def leave(self) -> None:
        """Tells all ranks that this one was told to end."""
        for balancer in self._balancers:
            balancer.leave()

    def leave_alone(self) -> None:
        """Saves what this rank has gone back to, if there is a checkpoint: it was told to end, and cannot tell whether
        another goes on. Not a collective call, and perhaps the last one of this process."""
        try:
            if self.at_end_alone is not None and self._synced:
                self.at_end_alone()
        finally:
            for balancer in self._balancers:
                balancer.record.flush()

    # Checkpoints ----------------------------------------------------------------------------------------------------

    def shared_state(self) -> dict[str, dict[str, Any]]:
        """What is the same on all ranks: the states of the parts, and the plain values."""
        parts = {name: part.state_dict() for name, part in self._parts.items()}
        return {"parts": parts, "values": self._values()}

    def codec_states(self) -> list[Any]:
        """What this rank's codecs keep from step to step, for each balancer."""
        return [balancer.keepers.state_dict() for balancer in self._balancers]

    def load_codec_states(self, states: Sequence[Any]) -> None:
        """Goes on from `codec_states()` of this rank of as many."""
        for balancer, state in zip(self._balancers, states, strict=False):
            balancer.keepers.load_state_dict(state)

    def sum_states(self) -> list[Any]:
        """What this rank has added up of batches whose exchange is yet to come."""
        return [balancer.sums.state_dict() for balancer in self._balancers]

    def load_sum_states(self, states: Sequence[Any]) -> None:
        """Goes on from `sum_states()` of this rank of as many; from nothing where there are none."""
        for index, balancer in enumerate(self._balancers):
            balancer.sums.load_state_dict(states[index] if index < len(states) else {})

    def load_shared_state(self, state: Mapping[str, Mapping[str, Any]]) -> None:
        """Goes on from `shared_state()`. Raises ValueError where it is of another job."""
        for kind, mine in (("parts", list(self._parts)), ("values", list(self._values()))):
            if set(state[kind]) != set(mine):
                raise ValueError(f"Expected the state of a job with {kind} {mine}. Received: {list(state[kind])}.")
        self.merge_models()
        for name, part in self._parts.items():
            self._restore_part(part, state["parts"][name])
            late = part.unknown(state["parts"][name]) if hasattr(part, "unknown") else ()
            if late and self._horovod.rank() == 0:
                text = f"hvd_hetero: not made before the checkpoint was restored, so begun anew: {', '.join(late)}."
                tell(text)
        for name, value in state["values"].items():
            setattr(self, name, value)
        self.load_sum_states(())
        self.save()
