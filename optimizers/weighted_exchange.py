"""Synchronous training with exactly weighted gradients.

The global loss is the mean over all loss terms of a global batch. Rank i has the gradient g_i of the mean over its own
n_i loss terms. Then the gradient of the global loss is

    g = sum_i c_i g_i / sum_i c_i,     c_i = n_i / n_ref

which is exact for uneven shares, a short last batch, masked tokens, and a rank without any term (c_i = 0). The n_i are
summed with the gradients, in the control vector.

n_ref is any number that all ranks agree on. With the mean share, c_i is near 1, which suits the range of float16, and
for equal shares every product is exact. With the whole batch, the divisor is 1, so no pass over the sum is needed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from hvd_hetero.codecs.verbs import arrays_like, verbs_of
from hvd_hetero.engine.port import Chain, Engine, Handle

from .scaled_residuals import ScaledResiduals


class BucketRoute(Protocol):
    """Sums one bucket over the ranks, in every step: a `Route`, or a `RouteTrial` of several routes."""

    @property
    def is_plain(self) -> bool:
        """Whether the sum is a single all-reduce of the array, without a codec."""

    def start(self, array: Any, *, name: str) -> Handle:
        """Begins to sum `array`. The result of the handle is `array` itself, overwritten, or a new array."""

    def end_step(self, counts: bool) -> None:
        """Ends a step. If it does not count, codecs keep no residual of it."""

    def move_residual_to(self, array: Any) -> None:
        """Adds this rank's residuals to `array`, and clears them."""

    def add_residual_to(self, array: Any) -> None:
        """Adds this rank's residuals to `array`, and keeps them."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


class WeightedExchange:
    """Sums flat buckets of weighted gradients over the ranks, and with them a *control* vector.

    Merges of a local strategy go through it as well, with the progress of local steps in place of gradients. In a step,
    `submit` is called for each bucket, then `finish`.

    Args:
        engine: the port to Horovod; sums the control vector.
        buckets: flat arrays. Each holds c_i g_i when it is submitted, and may be overwritten by the sum.
        routes: the route of each bucket.
        control: a short array. What `outgoing()` returns is written into it, and `finish` returns its sum over the
            ranks. It is a view of the tail of the bucket whose index is `rides_in`, or an array of its own.
        rides_in: index of the bucket that ends in the control vector; None: the vector is sent in an operation of its
            own.
        outgoing: returns this rank's control vector; called right before it is sent.
        name: prefix of the operations' names, the same on all ranks and different from any other exchange's.
        keeps: whether a route may keep a residual, which a step that is not finite must not change.
        weight: returns the weight by which residuals are scaled from one step to another, in any unit: see
            `ScaledResiduals`. Called for each bucket that is sent. None: as in the step before.
        part: returns the part of whole batches that the step is over: see `ScaledResiduals`.
        fails: returns whether the summed control vector says that the step counts on no rank, as one has failed.
        choose: returns the routes that buckets should take from now on, given a name and the present routes.

    Attributes:
        name: the present prefix of the operations' names; another one after `choose_anew`.
        counted: whether the last step counted for the codecs: it was to count, was finite and not without any weight,
            and no rank failed.
    """

    def __init__(
        self,
        engine: Engine,
        buckets: Sequence[Any],
        control: Any,
        *,
        routes: Sequence[BucketRoute],
        rides_in: int | None,
        outgoing: Callable[[], Sequence[float]],
        name: str,
        keeps: bool = False,
        weight: Callable[[], float | None] = lambda: None,
        part: Callable[[], float] = lambda: 1.0,
        fails: Callable[[Sequence[float]], bool] = lambda sums: False,
        choose: Callable[[str, Sequence[BucketRoute]], Sequence[BucketRoute]] = lambda name, routes: routes,
    ) -> None:
        self._engine, self._buckets, self._control = engine, list(buckets), control
        self._rides_in, self._outgoing, self.name = rides_in, outgoing, name
        self._keeps, self._weight, self._part, self._fails = keeps, weight, part, fails
        self._choose, self._first_name, self._choices = choose, name, 0
        self._handles: dict[int, Handle] = {}
        self._control_handle: Handle | None = None
        self.counted = True
        self._take(routes)

    def _take(self, routes: Sequence[BucketRoute]) -> None:
        self._routes = list(routes)
        self._residuals = ScaledResiduals(self._routes)
        self._new = self.state_dict()

    def choose_anew(self) -> bool:
        """Chooses the routes of all buckets again, between two steps. Returns whether any has changed. Then residuals
        of the former routes are added to the next sums."""
        self._choices += 1
        name = f"{self._first_name}.{self._choices}"  # Horovod caches operations by name, so other ones need a new name
        routes = self._choose(name, self._routes)
        if all(one is other for one, other in zip(routes, self._routes, strict=True)):
            return False
        kept, before, self.name = self.take_residuals(), self._residuals, name
        self._take(routes)
        self._residuals.take_weights_from(before)
        self.add_residuals(kept, 1.0)
        return True

    def take_weights_from(self, before: WeightedExchange) -> None:
        """Takes over the weights of past steps from `before`, the exchange that this one replaces. Its residuals are
        passed on separately, from `before.residuals` to `add_residuals`."""
        self._residuals.take_weights_from(before._residuals)

    @property
    def submitted(self) -> frozenset[int]:
        """The indices of the buckets that were submitted in this step."""
        return frozenset(self._handles)

    @property
    def operation(self) -> str:
        """The name of an operation that is under way: that of the first bucket submitted, by index."""
        return self.name_of(min(self._handles))

    def name_of(self, index: int) -> str:
        """The name of the operation that sums bucket `index`."""
        return f"{self.name}.bucket.{index}"

    def outgoing(self) -> Sequence[float]:
        """Returns this rank's control vector, for a caller that does not use `submit` (Keras in a TensorFlow graph)."""
        return self._outgoing()

    def submit(self, index: int) -> None:
        """Begins to sum bucket `index`; is called once per step and bucket. Ranks may submit in different orders, as
        Horovod pairs operations by name."""
        if self._rides_in == index:
            verbs_of(self._control).write(self._control, self._outgoing())
        elif self._rides_in is None:
            self._send_control()
        if self._keeps:
            self._residuals.add_to(index, self._buckets[index], self._weight(), part=self._part())
        self._handles[index] = self._routes[index].start(self._buckets[index], name=self.name_of(index))
        for handle in self._handles.values():
            if isinstance(handle, Chain):
                handle.done()  # starts the next collective of a chain whose present one is done

    def submit_nothing(self) -> None:
        """Sends the control vector if there are no buckets, as when all parameters are frozen for now."""
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

    def residuals(self) -> list[Any]:
        """Returns for each bucket this rank's residual, which is not sent yet; None where there is none."""
        return self._residuals.residuals(self._buckets)

    def take_residuals(self) -> list[Any]:
        """Returns what `residuals` does, and clears these residuals. The rest of the codecs' state is the same on all
        ranks, and stays."""
        return self._residuals.take_residuals(self._buckets)

    def add_residuals(self, kept: Sequence[Any], factor: float) -> bool:
        """Adds the residuals `kept`, from `residuals`, times `factor` to the next sums. Returns False, without adding
        them, if they are of buckets of other lengths."""
        lengths = self._lengths
        fits = len(kept) == len(lengths) and all(
            array is None or len(array) == length for array, length in zip(kept, lengths, strict=True)
        )
        if fits:
            self._residuals.add([None if array is None else array * factor for array in kept])
        return fits

    def state_dict(self) -> dict[str, Any]:
        """The state of this rank's codecs (residuals and what else they keep), and the lengths of the buckets."""
        return {
            "lengths": self._lengths,
            "routes": [route.state_dict() for route in self._routes],
            "carry": self._residuals.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Loads `state` if it is of buckets of these lengths; otherwise codecs start afresh. All ranks call it or none,
        since part of the state has to be the same on all ranks."""
        if list(state["lengths"]) != self._lengths:
            state = self._new
        for bucket, route, one in zip(self._buckets, self._routes, state["routes"], strict=True):
            route.load_state_dict(arrays_like(bucket, one))
        self._residuals.load_state_dict(state["carry"], self._buckets)

    # ----------------------------------------------------------------------------------------------------------------

    def done(self) -> bool:
        """Whether all operations of this step are over; does not wait for them."""
        control_done = self._control_handle is None or self._control_handle.done()
        return control_done and all([handle.done() for handle in self._handles.values()])

    def finish(self, scale: Callable[[list[float]], float], *, counts: bool = True) -> tuple[list[Any], list[float]]:
        """Waits for the sums of all buckets and of the control vector, and ends the step.

        Args:
            scale: returns the factor by which the summed buckets are multiplied, from the summed control vector. It is
                inverse to the sum of the weights; 0: nothing has any weight.
            counts: whether the step counts. If not, or if a sum is not finite, a rank failed or the factor is 0, codecs
                keep no residual of it.

        Returns:
            The summed and scaled buckets, and the summed control vector.

        Raises:
            RuntimeError: a bucket was not submitted.
            one of `engine.failure`: a collective failed. The step is over then as well.
        """
        missing = set(range(len(self._buckets))) - set(self._handles)
        if missing:
            raise RuntimeError(f"Expected every bucket submitted before finish(). Received: {sorted(missing)} missing.")
        if not self._buckets and self._control_handle is None:
            raise RuntimeError("Expected submit_nothing() before finish(), as there are no buckets. Received: no call.")
        handles, self._handles = self._handles, {}
        control_handle, self._control_handle = self._control_handle, None
        try:
            said: Any = None if control_handle is None else control_handle.wait()
            results = [handle.wait() for _, handle in sorted(handles.items())]
            if self._rides_in is not None:
                said = results[self._rides_in][-len(self._control) :]
            sums = [float(value) for value in said.tolist()]
            factor = scale(sums)
        except BaseException:
            self._end_step(False)  # or a residual that was added to this step would count as sent
            raise
        if self._keeps:
            finite = not results or verbs_of(results[0]).all_finite(results)
            counts = counts and finite and factor != 0.0 and not self._fails(sums)
        self._end_step(counts, 1.0 / factor if factor else None)
        self.counted = counts
        if factor != 1.0:
            for result in results:
                result *= factor
        return results, sums

    def _end_step(self, counts: bool, total: float | None = None) -> None:
        """Tells the codecs that the step is over, whether it counts, and the weights' sum: see `ScaledResiduals`."""
        if self._keeps:
            for route in self._routes:
                route.end_step(counts)
            self._residuals.end_step(counts, total)
