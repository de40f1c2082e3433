"""From backward passes to gradients that an update takes: where a step is, and what is sent when.

Gradients are sent as they come in the last backward pass before the exchange, and the rest at its end. All gradients
of a step that ranks make apart stay where they are.
"""

from __future__ import annotations

import contextlib
import enum
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

from hvd_hetero.optimizers.attachment import PeerError
from hvd_hetero.optimizers.progress import BatchProgress
from hvd_hetero.optimizers.weighing import Weighing

from .accumulation import GradientAccumulation, is_zero
from .backward import backward_pass
from .layouts import Layouts
from .step import BROKEN_OFF, WITHIN, ReducedStep
from .unchanged import Unchanged


class Phase(enum.Enum):
    """Where a step is, from one update to the next."""

    BETWEEN = "no backward pass is under way; what `p.grad` holds is of this rank alone"
    PASS = "a backward pass is under way, and others follow before the exchange"
    LAST_PASS = "the last backward pass before the exchange is under way"
    BROKEN_OFF = "an exception ended the last pass when part of its gradients were sent"
    READY = "what `p.grad` holds is what the update takes"


_IN_PASS = (Phase.PASS, Phase.LAST_PASS)


class StepPhases:
    """Where the steps of one optimizer are.

    Args:
        parameters: those that are trained; there may come more.
        accumulated: the gradients of the step under way.
        layouts: what sends and delivers the gradients.
        apart: whether the present step's gradients stay this rank's own.
        ended: is called at the end of a step's passes.
        follow: is called at the first gradient of a backward pass, before the pass is counted.

    Attributes:
        terms: of the last step, on this rank.
        wait_s: for communication, in the last step.
        bytes_sent: in the last step.
    """

    def __init__(
        self,
        parameters: Sequence[torch.nn.Parameter],
        *,
        weighing: Weighing,
        accumulated: GradientAccumulation,
        layouts: Callable[[], Layouts],
        apart: Callable[[], bool],
        ended: Callable[[], None],
        follow: Callable[[], None],
    ) -> None:
        self._parameters, self._weighing, self._accumulated = parameters, weighing, accumulated
        self._balancer = weighing.balancer
        self._layouts, self._apart, self._ended, self._follow = layouts, apart, ended, follow
        self._phase = Phase.BETWEEN
        self._turn = threading.RLock()  # a backward pass has a thread for each device
        self._taker: Callable[[torch.nn.Parameter], None] | None = None  # of the backward pass's gradients
        self._earlier = 0.0, 0  # terms of this step's batches before the present one, and how many have some
        self._last_part = -1  # the part of a batch that the last backward pass was over: see `BatchProgress`
        self._last = False  # whether the exchange follows the backward pass that has ended
        self._unchanged = Unchanged(parameters)  # since the passes of a step apart ended
        self.terms = 0.0
        self.wait_s = 0.0
        self.bytes_sent = 0

    def check_unchanged(self) -> None:
        """Raises RuntimeError where parameters are not what they were as the passes of a step apart ended, and no
        step() was made. What follows may change them."""
        self._unchanged.check()

    @property
    def number(self) -> int:
        """The optimizer's place in the order in which they are made."""
        return self._weighing.number

    @property
    def ready(self) -> bool:
        """Whether what `p.grad` holds is what the update takes."""
        return self._phase is Phase.READY

    @property
    def _step(self) -> ReducedStep:
        return self._layouts().step

    @property
    def _progress(self) -> BatchProgress:
        return self._balancer.progress

    # Between backward passes ----------------------------------------------------------------------------------------

    def begin_batch(self) -> None:
        """A global batch begins."""
        self.break_off()
        self.check_unchanged()
        if self._untouched and self._weighing.batches_per_exchange > 1:
            self._accumulated.count_untouched(self._progress.part_terms)
        counts = self._weighing.begun > 0 and self._weighing.batches_per_exchange > 1
        self._earlier = self._by_now() if counts else (0.0, 0)
        self._accumulated.end_batch(counts=self._weighing.batches_per_exchange > 1, loop=self._progress.loop)
        self._phase = Phase.BETWEEN  # also where a script skipped the last step

    def begin_part(self) -> None:
        """A batch, or a part of one, begins."""
        self.break_off()
        if not self._progress.in_parts:  # what follows is another loss, as that of a GAN's other model
            self._accumulated.end_loss()
        elif self._untouched:
            self._accumulated.count_untouched(self._progress.part_terms)

    def begin_anew(self) -> None:
        """The update is made, or others may be made for the same batch."""
        self._unchanged.release()
        if self.ready:
            self._phase = Phase.BETWEEN

    def forget(self) -> None:
        """The gradients so far are to be zero. After a pass that did not end, a collective call."""
        self.break_off()  # or what it has left would be of the next one
        self._accumulated.clear()
        self._earlier = 0.0, 0
        # By any parameters' passes, which all ranks make alike: whether there was one with these depends on samples.
        passed = self._progress.passed == self._progress.part
        self._weighing.forget(present=passed or self._balancer.batch_order.over)
        self._last_part = -1

    def break_off(self) -> None:
        """Clears up after a backward pass that an exception ended: the gradients since the last exchange do not count.

        What was sent of them is a part of an exchange, which is brought to its end and left. That is a collective call,
        for ranks that have had the exception alike. Of ranks where one alone had it, that one has missed a step.
        """
        if not self._in_pass:
            return
        if torch._C._current_autograd_node() is not None:
            raise RuntimeError(WITHIN)
        self._phase = Phase.BROKEN_OFF if self._step.sent else Phase.BETWEEN
        if self._phase is Phase.BROKEN_OFF:
            self._step.take_rest()
            _, _, hear = self._step.finish(counts=False)
            self._layouts().take_in(hear)
            self._weighing.noise.forget()
        self._step.drop()
        self._accumulated.clear()
        self._earlier = 0.0, 0
        for parameter in self._parameters:
            parameter.grad = None

    @property
    def _untouched(self) -> bool:
        """Whether the present batch, or part of one, whose exchange is yet to come, had backward passes on this rank,
        but none with a gradient of these parameters. It is zero then, over as many terms."""
        return self._progress.passed == self._progress.part != self._last_part and self._weighing.begun > 0

    def _by_now(self) -> tuple[float, int]:
        """The terms of this step's batches, and how many of these have some on this rank."""
        (terms, batches), now = self._earlier, self._progress.batch_terms
        return terms + now, batches + (now > 0)

    def _set_by_hand(self) -> bool:
        """Whether a script has put gradients of this step's samples where no backward pass did."""
        if not self._by_now()[0]:
            return False
        found = [parameter.grad for parameter in self._parameters if parameter.grad is not None]
        return not all(is_zero(gradient) for gradient in found)

    # During backward ------------------------------------------------------------------------------------------------

    @property
    def _in_pass(self) -> bool:
        return self._phase in _IN_PASS

    def _begin_pass(self) -> None:
        """At the first gradient of a backward pass."""
        self._follow()
        self._balancer.begin_unseen()
        self._progress.backward_passes += 1
        terms = self._progress.terms
        if terms is None:
            raise RuntimeError(
                "Expected the number of samples of this batch before backward(). Received: none. Iterate over "
                "hvd.BalancedDataLoader, or call balancer.begin(samples) for each batch."
            )
        self._balancer.batch_order.passes()
        self._balancer.count_warnings.passes(self._balancer.samples)
        backward_pass().add(self)
        last = self._progress.last_pass and self._weighing.complete
        self._phase = Phase.LAST_PASS if last else Phase.PASS
        self._accumulated.begin(terms, earlier=self._progress.batch_terms - terms, loop=self._progress.loop)
        self._last_part = self._progress.passed = self._progress.part
        self._taker = None
        if last and not self._apart():
            # Without a term in an earlier pass either, zeros are sent: like the others, also of a pass that all break
            # off. With some, what was added up has to wait for the end.
            self._taker = self._step.take if terms or not self._accumulated.terms else self._step.watch

    def before_gradient(self, gradients: Any) -> None:
        """Before a gradient is added to `p.grad`; called where that may have to keep what it holds."""
        if gradients[0] is None:
            return
        with self._turn:
            if not self._in_pass:
                self._begin_pass()
            self._accumulated.keep(last=self._phase is Phase.LAST_PASS, gain=self._weighing.gain)

    def gradient_added(self, parameter: torch.nn.Parameter) -> None:
        """After a gradient was added to `parameter.grad`."""
        with self._turn:
            if not self._in_pass:
                self._begin_pass()
            if self._taker is not None:
                self._taker(parameter)

    @torch.compiler.disable  # these two, too, run within backward(), which may be within what a script compiles
    def end_pass(self, *, sends: bool) -> None:
        """All gradients of a backward pass are there."""
        self._last, self._phase = self._phase is Phase.LAST_PASS, Phase.BETWEEN
        if sends and self._last:
            self._send_rest()
        elif sends:
            self._accumulated.end()

    @torch.compiler.disable
    def after_pass(self) -> None:
        """Others' gradients of the same backward pass are sent as well."""
        if self._last:
            self._finish()
        else:
            self._balancer.pause()

    # The exchange ---------------------------------------------------------------------------------------------------

    def flush(self) -> None:
        """Reduces what has not been: a rank without a sample, or one that stops, still takes part."""
        if self._phase is Phase.READY:
            return
        self.break_off()
        if self._phase is Phase.BROKEN_OFF:
            raise RuntimeError(BROKEN_OFF)
        self._accumulated.warn_of_changes()
        if self._untouched:
            self._accumulated.count_untouched(self._progress.part_terms)
        elif not self._accumulated.begun and (self._balancer.begin_unseen() or self._set_by_hand()):
            self._balancer.batch_order.passes()
            terms, batches = self._by_now()
            self._accumulated.put(terms, batches=max(1, batches))
        self._accumulated.end_batch(counts=True, loop=self._progress.loop)
        self._send_rest()
        self._finish()

    def _send_rest(self) -> None:
        """Sends what has not been, but for a step whose gradient stays this rank's own."""
        self._accumulated.complete(self._weighing.gain)
        if not self._apart():
            self._step.take_rest()

    def _finish(self) -> None:
        self.terms, self._earlier = self._accumulated.terms, (0.0, 0)
        self._balancer.batch_order.steps()
        self._ended()
        if self._apart():
            self._finish_apart()
            return
        waited_s, bytes_sent, hear = self._step.finish()
        self.wait_s += waited_s
        self.bytes_sent += bytes_sent
        self._phase = Phase.READY
        try:
            self._layouts().take_in(hear)
        except Exception:
            departure, usual_s = self._balancer.departure, self._balancer.timesheet.usual_step_s or 0.0
            if departure.left_out == self._balancer.step:
                self._leave_out()
                departure.final = not self._balancer.exchanges.complete(usual_s)
            raise

    def _leave_out(self) -> None:
        """Leaves a batch out, whose gradients a script may clear only after an update that it does not make."""
        self._phase = Phase.BETWEEN
        for parameter in self._parameters:
            parameter.grad = None

    def leave(self, over: Callable[[], bool]) -> Callable[[], bool]:
        """Ends an exchange in which this rank says that it cannot go on, once it is `over`: see `withdraw`."""

        left = False

        def ended() -> bool:
            nonlocal left
            if not left and over():
                left = True
                _, _, hear = self._step.finish()
                self._leave_out()
                with contextlib.suppress(PeerError):
                    hear()
            return left

        return ended

    def _finish_apart(self) -> None:
        """Ends the passes of a step whose gradient stays this rank's own."""
        self._layouts().see()
        self._accumulated.average(self._weighing.gain)
        self._accumulated.clear()
        self._weighing.end()
        self._phase = Phase.READY
        self._unchanged.keep()
