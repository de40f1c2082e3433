"""Tracks in which phase a step is, from its backward passes to its update, and decides when gradients are sent.

In the last backward pass before an exchange, gradients are sent as they become ready, and the rest at its end. The
gradients of a local step are not sent.
"""

from __future__ import annotations

import contextlib
import enum
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

from hvd_hetero.optimizers.departure import PeerError
from hvd_hetero.optimizers.gradient_exchange import GradientExchange
from hvd_hetero.optimizers.progress import BatchProgress
from hvd_hetero.optimizers.unused_balancer import dealt_by_stranger

from .accumulation import GradientAccumulation
from .backward import backward_pass
from .layouts import Layouts
from .step import BROKEN_OFF, WITHIN, ReducedStep
from .unchanged import Unchanged


class Phase(enum.Enum):
    """The phase of a step, from one update to the next."""

    BETWEEN = "no backward pass is under way; what `p.grad` holds is of this rank alone"
    PASS = "a backward pass is under way, and others follow before the exchange"
    LAST_PASS = "the last backward pass before the exchange is under way"
    BROKEN_OFF = "an exception ended the last pass when part of its gradients were sent"
    READY = "what `p.grad` holds is what the update takes"


_IN_PASS = (Phase.PASS, Phase.LAST_PASS)


class StepPhases:
    """Takes the steps of one optimizer through their phases.

    Args:
        parameters: those that are trained; the list may grow.
        accumulated: the gradients of the step under way.
        layouts: returns what sends and delivers the gradients.
        is_local: returns whether the present step is a local one, whose gradients are not exchanged.
        ended: is called at the end of a step's passes.
        follow: is called at the first gradient of a backward pass, before the pass is counted.

    Attributes:
        terms: loss terms of the last step on this rank.
        wait_s: seconds that the last step waited for communication.
        bytes_sent: bytes that the last step has sent.
    """

    def __init__(
        self,
        parameters: Sequence[torch.nn.Parameter],
        *,
        gradient_exchange: GradientExchange,
        accumulated: GradientAccumulation,
        layouts: Callable[[], Layouts],
        is_local: Callable[[], bool],
        ended: Callable[[], None],
        follow: Callable[[], None],
    ) -> None:
        self._parameters, self._gradient_exchange, self._accumulated = parameters, gradient_exchange, accumulated
        self._count = gradient_exchange.count
        self._balancer = gradient_exchange.balancer
        self._layouts, self._is_local, self._ended, self._follow = layouts, is_local, ended, follow
        self._phase = Phase.BETWEEN
        self._turn = threading.RLock()  # a backward pass has a thread for each device
        self._taker: Callable[[torch.nn.Parameter], None] | None = None  # is called with each parameter that is ready
        self._earlier = 0.0, 0  # terms of this step's batches before the present one, and how many batches have any
        self._last_part = -1  # the part of a batch that the last backward pass was over: see `BatchProgress`
        self._last = False  # whether the exchange follows the backward pass that has ended
        self._unchanged = Unchanged(parameters)  # from the end of a local step's passes to its update
        self.terms = 0.0
        self.wait_s = 0.0
        self.bytes_sent = 0

    def check_unchanged(self) -> None:
        """Raises RuntimeError if parameters have changed since the passes of a local step ended, though no step() was
        made. From then on they may change."""
        self._unchanged.check()

    @property
    def number(self) -> int:
        """The optimizer's place in the order in which they are made."""
        return self._gradient_exchange.number

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
        """Begins a global batch."""
        self.break_off()
        self.check_unchanged()
        if self._untouched and self._count.batches_per_exchange > 1:
            self._accumulated.count_untouched(self._progress.part_terms)
        counts = self._count.begun > 0 and self._count.batches_per_exchange > 1
        self._earlier = self._by_now() if counts else (0.0, 0)
        self._accumulated.end_batch(counts=self._count.batches_per_exchange > 1, loop=self._progress.loop)
        self._phase = Phase.BETWEEN  # also if the script skipped the last step()

    def begin_part(self) -> None:
        """Begins a batch, or a part of one."""
        self.break_off()
        if not self._progress.in_parts:  # another loss of the same batch follows, as that of a GAN's other model
            self._accumulated.end_loss()
        elif self._untouched:
            self._accumulated.count_untouched(self._progress.part_terms)

    def begin_anew(self) -> None:
        """Returns to the phase between passes after the update, or to compute further gradients of the same batch."""
        self._unchanged.release()
        if self.ready:
            self._phase = Phase.BETWEEN

    def forget(self) -> None:
        """Forgets the gradients so far, as zero_grad() does. A collective call after a pass that did not end."""
        self.break_off()  # otherwise what that pass has left would count for the next one
        self._accumulated.clear()
        self._earlier = 0.0, 0
        # Decided by passes with any parameters, which all ranks make alike: passes with these may depend on samples.
        passed = self._progress.passed == self._progress.part
        self._count.forget(present=passed or self._balancer.batch_order.over)
        self._last_part = -1

    def break_off(self) -> None:
        """Clears up after a backward pass that an exception ended: drops the gradients since the last exchange.

        If part of them was sent, the exchange that they belong to is completed, and its result is dropped. That is a
        collective call, for which all ranks must have had the exception. If one rank alone had it, that one has missed
        a step.
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
            self._gradient_exchange.noise.forget()
        self._step.drop()
        self._accumulated.clear()
        self._earlier = 0.0, 0
        for parameter in self._parameters:
            parameter.grad = None

    @property
    def _untouched(self) -> bool:
        """Whether the present batch or part, whose exchange is yet to come, had backward passes on this rank, but none
        with a gradient of these parameters. Then it counts as a gradient of zero over its loss terms."""
        return self._progress.passed == self._progress.part != self._last_part and self._count.begun > 0

    def _by_now(self) -> tuple[float, int]:
        """This rank's loss terms in the step's batches so far, and how many of the batches have any on this rank."""
        (terms, batches), now = self._earlier, self._progress.batch_terms
        return terms + now, batches + (now > 0)

    def _set_by_hand(self) -> bool:
        """Whether a script has written gradients of this step's samples to `p.grad` itself, without a backward pass.
        Gradients of zero count as well, as of a hinge loss that is 0 for all samples of this rank."""
        if not self._by_now()[0]:
            return False
        return any(parameter.grad is not None for parameter in self._parameters if parameter.requires_grad)

    # During backward ------------------------------------------------------------------------------------------------

    @property
    def _in_pass(self) -> bool:
        return self._phase in _IN_PASS

    def _begin_pass(self) -> None:
        """Begins a backward pass, at its first gradient."""
        self._follow()
        self._balancer.begin_if_unannounced()
        self._progress.backward_passes += 1
        terms = self._progress.terms
        if terms is None:
            raise RuntimeError(
                "Expected the number of samples of this batch before backward(). Received: none. Iterate over "
                "hvd.BalancedDataLoader, or call balancer.begin(samples) for each batch."
            )
        self._balancer.batch_order.passes(stranger=dealt_by_stranger(self._balancer))
        self._balancer.count_warnings.passes(self._balancer.samples)
        backward_pass().add(self)
        last = self._progress.last_pass and self._count.complete
        self._phase = Phase.LAST_PASS if last else Phase.PASS
        self._accumulated.begin(terms, earlier=self._progress.batch_terms - terms, loop=self._progress.loop)
        self._last_part = self._progress.passed = self._progress.part
        self._taker = None
        if last and not self._is_local():
            # A rank with no loss term in this pass or an earlier one sends zeros as its gradients come, like the other
            # ranks: so it has sent what they have if all break off the pass. If earlier passes had terms, only the end
            # of this one may send what they have added up.
            self._taker = self._step.take if terms or not self._accumulated.terms else self._step.watch

    def before_gradient(self, gradients: Any) -> None:
        """Is called before a gradient is added to `p.grad`, if what `p.grad` holds may have to be kept."""
        if gradients[0] is None:
            return
        with self._turn:
            if not self._in_pass:
                self._begin_pass()
            self._accumulated.keep(last=self._phase is Phase.LAST_PASS, gain=self._gradient_exchange.gain)

    def gradient_added(self, parameter: torch.nn.Parameter) -> None:
        """Is called after a gradient was added to `parameter.grad`."""
        with self._turn:
            if not self._in_pass:
                self._begin_pass()
            if self._taker is not None:
                self._taker(parameter)

    @torch.compiler.disable  # as `after_pass`: runs within backward(), which may be in code that a script compiles
    def end_pass(self, *, sends: bool) -> None:
        """Ends a backward pass, as all its gradients are there: see `Reducer.end_pass`."""
        self._last, self._phase = self._phase is Phase.LAST_PASS, Phase.BETWEEN
        if sends and self._last:
            self._send_rest()
        elif sends:
            self._accumulated.end()

    @torch.compiler.disable
    def after_pass(self) -> None:
        """Waits for the exchange after the last pass, once all reducers of the pass have sent their gradients."""
        if self._last:
            self._finish()
        else:
            self._balancer.step_timer.pause()
            self._balancer.step_timer.run()  # another pass over this batch; what comes before another batch is not kept

    # The exchange ---------------------------------------------------------------------------------------------------

    def flush(self) -> None:
        """Completes the step's exchange if backward() has not: a rank without a sample, or one that stops, takes part
        in it as well."""
        if self._phase is Phase.READY:
            return
        self.break_off()
        if self._phase is Phase.BROKEN_OFF:
            raise RuntimeError(BROKEN_OFF)
        self._accumulated.warn_of_changes()
        if self._untouched:
            self._accumulated.count_untouched(self._progress.part_terms)
        elif not self._accumulated.begun and (self._balancer.begin_if_unannounced() or self._set_by_hand()):
            self._balancer.batch_order.passes(stranger=dealt_by_stranger(self._balancer))
            terms, batches = self._by_now()
            self._accumulated.put(terms, batches=max(1, batches))
        self._accumulated.end_batch(counts=True, loop=self._progress.loop)
        self._send_rest()
        self._finish()

    def _send_rest(self) -> None:
        """Sends the gradients that are not sent yet, unless the step is a local one."""
        self._accumulated.complete(self._gradient_exchange.gain)
        if not self._is_local():
            self._step.take_rest()

    def _finish(self) -> None:
        self.terms, self._earlier = self._accumulated.terms, (0.0, 0)
        self._balancer.batch_order.steps()
        self._ended()
        if self._is_local():
            self._finish_local()
            return
        waited_s, bytes_sent, hear = self._step.finish()
        self.wait_s += waited_s
        self.bytes_sent += bytes_sent
        self._phase = Phase.READY
        try:
            self._layouts().take_in(hear)
        except Exception:
            departure, usual_s = self._balancer.departure, self._balancer.step_timer.usual_step_s or 0.0
            if departure.left_out == self._balancer.step:
                self._leave_out()
                departure.final = not self._balancer.exchanges.complete(usual_s)
            raise

    def _leave_out(self) -> None:
        """Leaves a batch out: clears its gradients, as a script that clears them after its update makes no update now.
        """
        self._phase = Phase.BETWEEN
        for parameter in self._parameters:
            parameter.grad = None

    def leave(self, over: Callable[[], bool]) -> Callable[[], bool]:
        """A function that ends the exchange in which this rank tells the others that it cannot go on, once `over()` is
        true. It returns whether the exchange has ended: see `Attached.withdraw`."""

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

    def _finish_local(self) -> None:
        """Ends the passes of a local step, whose gradient is not exchanged."""
        self._layouts().see()
        self._accumulated.average(self._gradient_exchange.gain)
        self._accumulated.clear()
        self._count.end()
        self._phase = Phase.READY
        self._unchanged.keep()
