"""Estimates how fast the loaders of one rank (worker processes, or a thread) load its samples while it computes.

- While the rank waits for batches, its loaders work all the time. The seconds from one batch to the next are then what
  loading a batch takes. (This needs a wait that is at least as long as what the rank does beside computing and waiting.
  Otherwise loaders could have loaded meanwhile, and the wait is for the hand-over of a batch that is ready.)
- While the rank does not wait, the seconds from one batch to the next are only an upper bound. By how much the loaders
  are faster shows once the rank has more samples. Therefore the estimate is lowered a little now and then, so that the
  planner may give the rank more samples. If the rank waits afterwards, the next try comes later; otherwise, sooner.
"""

from __future__ import annotations

import statistics
from collections import deque

# An estimate is made over the last WINDOW batches, or over as many as there are loaders: parallel loaders finish at
# about the same time, and then none does for a while. FEW batches suffice for the first estimate, so that one of the
# first plans has it.
WINDOW, FEW = 16, 8
WAITS = 0.05  # fraction of the time; a rank that waits less than this for its batches could take more samples
LEAST, MOST = 40, 5120  # bounds of the number of batches from one try to the next
MORE = 4  # factor on the number of batches until the next try, after a try that made the rank wait
LONG = 2.0  # a batch counts for at most so many times the usual time beside waiting: the rest is compiling, or the like
TRIED = 0.9  # a try multiplies the estimate by this


class LoaderSpeed:
    """Estimates, from the batches of one rank, how many seconds its loaders need for a sample.

    `LoadingMeter` owns it; ranks send the estimate to the planner, which takes it for `SpeedModel.loading_s`.

    Attributes:
        seconds_per_sample: the estimate, with all loaders at work; None if the rank has not waited for them so far.
        is_pending: whether the rank waits for its loaders, but has seen too few batches for a first estimate.
    """

    def __init__(self) -> None:
        self.seconds_per_sample: float | None = None
        self.is_pending = False
        self._seen: deque[tuple[int, float, float, float]] = deque(maxlen=WINDOW)
        self._least = LEAST  # lower bound of `_pause`
        # Batches from one try to the next; batches since the last one; whether the rank has not waited since a try.
        self._pause, self._since, self._trying = LEAST, 0, False

    def resume(self, seconds_per_sample: float) -> None:
        """Starts from an earlier estimate, for example that of the process from which training is resumed.

        It has no effect if there is an estimate already. There may be more loaders now, so tries come sooner until the
        rank has waited for them.

        Args:
            seconds_per_sample: the earlier estimate.
        """
        if self.seconds_per_sample is None:
            self.seconds_per_sample, self.is_pending = seconds_per_sample, False
            self._least = self._pause = FEW

    def look_back(self, loaders: int) -> None:
        """Makes the window at least as long as the number of loaders that work in parallel."""
        if (most := max(WINDOW, loaders)) != self._seen.maxlen:
            self._seen = deque(self._seen, maxlen=most)

    def observe(self, samples: int, *, step_s: float | None, waited_s: float, computed_s: float) -> None:
        """Takes in the times of a batch that is done, and updates the estimate.

        Args:
            samples: the rank's samples in the batch.
            step_s: seconds from the end of the batch before it; None for the first batch of an iteration over the data.
                That one is ignored, as loaders begin with it.
            waited_s: the part of `step_s` in which the rank waited for data.
            computed_s: the part of `step_s` in which the rank computed.
        """
        if step_s is None:
            return
        self._seen.append((samples, step_s, waited_s, computed_s))
        number, steps_s, waited_s, computed_s = (sum(each) for each in zip(*self._seen, strict=True))
        others_s = steps_s - computed_s - waited_s
        usual_s = statistics.median(step_s - wait_s for _, step_s, wait_s, _ in self._seen)
        if usual_s > 0.0:
            steps_s = sum(min(step_s, wait_s + LONG * usual_s) for _, step_s, wait_s, _ in self._seen)
        waits = waited_s >= max(WAITS * steps_s, others_s)
        self.is_pending = waits and self.seconds_per_sample is None
        if len(self._seen) < FEW or not number:
            return
        if waits:
            self._least, self._pause = LEAST, max(self._pause, LEAST)
            if self._trying:
                self._pause = min(MORE * self._pause, MOST)
            self.seconds_per_sample, self.is_pending = steps_s / number, False
            self._since, self._trying = 0, False
        elif self.seconds_per_sample is not None:
            self.seconds_per_sample = min(self.seconds_per_sample, steps_s / number)
            self._since += 1
            if self._since >= self._pause:
                if self._trying:
                    self._pause = max(self._pause // MORE, self._least)
                self.seconds_per_sample *= TRIED
                self._since, self._trying = 0, True
