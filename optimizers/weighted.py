"""Synchronous training with exactly weighted gradients.

The global loss is the mean over all loss terms of a global batch. Rank i returns g_i, the mean over its own n_i terms.
Then the gradient of the global loss is (form (c) of the weighted mean: weights travel with what they weigh)

    g = sum_i c_i g_i / sum_i c_i,     c_i = n_i / n_ref

which is exact for uneven shares, a short last batch, masked tokens, and a rank without any term (c_i = 0). n_ref is any
number that all ranks agree on: the mean share keeps c_i near 1, so that narrow wires keep their range, and with equal
shares every product is exact; the whole batch makes the divisor 1, and saves going through all gradients once more.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from hvd_hetero.codecs.verbs import arrays_like, verbs_of
from hvd_hetero.engine.port import Chain, Engine, Handle

from .carry import Carry


class Way(Protocol):
    """The reduction of a bucket: a `Route`, or a `Trial` of several."""

    @property
    def is_plain(self) -> bool:
        """Whether a sum is one all-reduce of the array as it is."""

    def start(self, array: Any, *, name: str) -> Handle:
        """The sum is `array`, overwritten, or an array that nobody else holds."""

    def end_step(self, counts: bool) -> None: ...

    def release_into(self, array: Any) -> None: ...

    def kept_into(self, array: Any) -> None: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


class WeightedExchange:
    """Sums flat buckets of weighted gradients over the ranks, and with them a *control* vector.

    Args:
        engine: who communicates.
        buckets: flat arrays that hold c_i g_i when submitted, and perhaps g when finished.
        routes: the way of each bucket.
        control: a short array; the sum over ranks of what `outgoing()` returned comes back from `finish`. It is
            either the tail of one of the buckets, and then `rides_in` is that bucket's index, or an array of its own.
        outgoing: called right before the control vector is sent.
        name: prefix of the operations' names, the same on all ranks and different from any other exchange's.
        keeps: whether a route may keep something back, which a step that is not finite must leave alone.
        weight: what this rank's arrays weigh in the sums, in any unit: see `Carry`. Called as each is sent.
        fails: whether the summed control vector says that the step counts for nobody.
        choose: the ways that buckets should take, given the present ones, in operations of this name.
    """

    def __init__(
        self,
        engine: Engine,
        buckets: Sequence[Any],
        control: Any,
        *,
        routes: Sequence[Way],
        rides_in: int | None,
        outgoing: Callable[[], Sequence[float]],
        name: str,
        keeps: bool = False,
        weight: Callable[[], float | None] = lambda: None,
        fails: Callable[[Sequence[float]], bool] = lambda sums: False,
        choose: Callable[[str, Sequence[Way]], Sequence[Way]] = lambda name, ways: ways,
    ) -> None:
        self._engine, self._buckets, self._control = engine, list(buckets), control
        self._rides_in, self._outgoing, self.name = rides_in, outgoing, name
        self._keeps, self._weight, self._fails = keeps, weight, fails
        self._choose, self._first_name, self._choices = choose, name, 0
        self._handles: dict[int, Handle] = {}
        self._control_handle: Handle | None = None
        self.counted = True  # whether the last step did, as far as codecs are concerned
        self._take(routes)

    def _take(self, routes: Sequence[Way]) -> None:
        self._routes = list(routes)
        self._carry = Carry(self._routes)
        self._new = self.state_dict()

    def choose_anew(self) -> bool:
        """Takes other ways, between two steps, and says whether they are others. What codecs have kept back goes with
        the next sums."""
        self._choices += 1
        name = f"{self._first_name}.{self._choices}"  # what is known by one is of the kind that it was
        routes = self._choose(name, self._routes)
        if all(one is other for one, other in zip(routes, self._routes, strict=True)):
            return False
        kept, before, self.name = self.release(), self._carry, name
        self._take(routes)
        self._carry.weigh_as(before)
        self.give_back(kept, 1.0)
        return True

    def weigh_as(self, before: WeightedExchange) -> None:
        """Goes on from what arrays weighed in the exchange whose place this one takes; what that has kept back,
        `give_back` is told."""
        self._carry.weigh_as(before._carry)

    @property
    def submitted(self) -> frozenset[int]:
        """The buckets under way."""
        return frozenset(self._handles)

    @property
    def operation(self) -> str:
        """The name of an operation that is under way."""
        return self.name_of(min(self._handles))

    def name_of(self, index: int) -> str:
        """The name of the operation that sums bucket `index`."""
        return f"{self.name}.bucket.{index}"

    def outgoing(self) -> Sequence[float]:
        """The control vector, for who sends the buckets without `submit`."""
        return self._outgoing()

    def submit(self, index: int) -> None:
        """Sends bucket `index`; once per step. Buckets may be sent in any order: they are paired by name."""
        if self._rides_in == index:
            verbs_of(self._control).write(self._control, self._outgoing())
        elif self._rides_in is None:
            self._send_control()
        if self._keeps:
            self._carry.add_to(index, self._buckets[index], self._weight())
        self._handles[index] = self._routes[index].start(self._buckets[index], name=self.name_of(index))
        for handle in self._handles.values():
            if isinstance(handle, Chain):
                handle.done()  # starts what may follow on what is done

    def submit_nothing(self) -> None:
        """Sends the control vector alone, where there is no bucket: nothing is trained, for now."""
        if not self._buckets:
            self._send_control()

    def _send_control(self) -> None:
        """Sends the control vector in an operation of its own, once per step."""
        if self._control_handle is None:
            verbs_of(self._control).write(self._control, self._outgoing())
            self._control_handle = self._engine.allreduce_async(self._control, name=f"{self.name}.control")

    # What codecs keep back ------------------------------------------------------------------------------------------

    @property
    def _lengths(self) -> list[int]:
        return [len(bucket) for bucket in self._buckets]

    def kept_back(self) -> list[Any]:
        """For each bucket, what is not sent yet of this rank's; None where that is nothing."""
        return self._carry.kept_back(self._buckets)

    def release(self) -> list[Any]:
        """What `kept_back` returns, which is kept no longer. All else that codecs go on from, which is alike on all
        ranks, stays."""
        return self._carry.release(self._buckets)

    def give_back(self, kept: Sequence[Any], factor: float) -> bool:
        """Adds what `kept_back` returned, times `factor`, to the next sums; False, and nothing, where the buckets are
        others."""
        lengths = self._lengths
        fits = len(kept) == len(lengths) and all(
            array is None or len(array) == length for array, length in zip(kept, lengths, strict=True)
        )
        if fits:
            self._carry.give([None if array is None else array * factor for array in kept])
        return fits

    def state_dict(self) -> dict[str, Any]:
        """The residuals of this rank's routes, with their lengths and weights."""
        return {
            "lengths": self._lengths,
            "routes": [route.state_dict() for route in self._routes],
            "carry": self._carry.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from `state`, if its buckets are these; else it begins anew. All ranks do, or none: some of it has to
        be alike on all."""
        if list(state["lengths"]) != self._lengths:
            state = self._new
        for bucket, route, one in zip(self._buckets, self._routes, state["routes"], strict=True):
            route.load_state_dict(arrays_like(bucket, one))
        if "carry" in state:
            self._carry.load_state_dict(state["carry"], self._buckets)

    # ----------------------------------------------------------------------------------------------------------------

    def done(self) -> bool:
        """True when nothing is under way."""
        control_done = self._control_handle is None or self._control_handle.done()
        return control_done and all([handle.done() for handle in self._handles.values()])

    def finish(self, scale: Callable[[list[float]], float], *, counts: bool = True) -> tuple[list[Any], list[float]]:
        """The buckets, multiplied by `scale(control)`, and the control vector summed over the ranks. Of a step that
        does not count, as of one that is not finite, codecs keep nothing.

        Every bucket must have been submitted. Raises the engine's failure when a collective failed; what is
        left of the step is forgotten either way.
        """
        missing = set(range(len(self._buckets))) - set(self._handles)
        if missing:
            raise RuntimeError(f"Expected every bucket submitted before finish(). Received: {sorted(missing)} missing.")
        handles, self._handles = self._handles, {}
        control_handle, self._control_handle = self._control_handle, None
        said: Any = None if control_handle is None else control_handle.wait()
        results = [handle.wait() for _, handle in sorted(handles.items())]
        if self._rides_in is not None:
            said = results[self._rides_in][-len(self._control) :]
        sums = [float(value) for value in said.tolist()]
        if self._keeps:
            finite = not results or verbs_of(results[0]).all_finite(results)
            counts = counts and finite and not self._fails(sums)
            for route in self._routes:
                route.end_step(counts)
            self._carry.end_step(counts)
        self.counted = counts
        factor = scale(sums)
        if factor != 1.0:
            for result in results:
                result *= factor
        return results, sums
