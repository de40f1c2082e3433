"""Estimates how fast the loaders of one rank (worker processes, or a thread) load its samples while it computes.

- While the rank waits for batches, its loaders work all the time. The seconds from one batch to the next are then what
  loading a batch takes. (This needs a wait that is at least as long as what the rank does beside computing and waiting.
  Otherwise loaders could have loaded meanwhile, and the wait is for the hand-over of a batch that is ready.)
- While the rank does not wait, the seconds from one batch to the next are only an upper bound, and less than that after
  a while in which more came than was loaded, as batches were ready. How fast the loaders are they may tell themselves:
  the seconds that one is busy with a batch, by their number. That leaves out what it takes to hand the batch over, and
  that loaders hold each other up once all of them work. So it is the first estimate, and later the estimate changes in
  proportion to it.
- By how much the loaders are faster than the estimate shows once the rank has more samples. Therefore the estimate is
  lowered a little now and then, so that the planner may give the rank more samples. If the rank waits afterwards, the
  next try comes later; otherwise, sooner.
"""

from __future__ import annotations

import statistics
from collections import deque

# An estimate is made over the last WINDOW batches, or over as many as there are loaders: parallel loaders finish at
# about the same time, and then none does for a while. FEW batches suffice for the first estimate, so that one of the
# first plans has it, and FEW_TOLD of those that loaders tell of.
WINDOW, FEW, FEW_TOLD = 16, 8, 3
WAITS = 0.05  # fraction of the time; a rank that waits less than this for its batches could take more samples
# Waits are for the hand-over of batches, if loaders are busy for less than a part BUSY of the time; unless they are as
# long as LONG_WAITS: handing over may be what takes long.
BUSY, LONG_WAITS = 0.8, 0.2
LEAST, MOST = 40, 5120  # bounds of the number of batches from one try to the next
MORE = 4  # factor on the number of batches until the next try, after a try that made the rank wait
LONG = 2.0  # a batch counts for at most so many times the second longest beside waiting: the rest is compiling, or so
TRIED = 0.9  # a try multiplies the estimate by this


class LoaderSpeed:
    """Estimates, from the batches of one rank, how many seconds its loaders need for a sample.

    `LoadingMeter` owns it; ranks send the estimate to the planner, which takes it for `SpeedModel.loading_s`.

    Attributes:
        seconds_per_sample: the estimate, with all loaders at work; None if the rank has not waited for them so far, and
            they have not told either.
        is_pending: whether the rank waits for its loaders, but has seen too few batches for a first estimate.
    """

    def __init__(self) -> None:
        self.seconds_per_sample: float | None = None
        self.is_pending = False
        self._seen: deque[tuple[int, float, float, float]] = deque(maxlen=WINDOW)
        self._loaders, self._ahead = 1, 0  # how many there are, and how many batches they load ahead
        # What one of them needed for a sample, by batch; batches to be ignored; the median when the estimate was made.
        self._told: deque[float] = deque(maxlen=WINDOW)
        self._cold, self._told_then = 0, 0.0
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

    def begin(self, loaders: int, ahead: int = 0) -> None:
        """Says that so many `loaders` begin to load, in parallel, and at most so many batches `ahead`."""
        self._loaders = self._cold = max(1, loaders)
        self._ahead = ahead
        if (most := max(WINDOW, loaders)) != self._seen.maxlen:
            self._seen = deque(self._seen, maxlen=most)

    def tell(self, samples: int, seconds: float) -> None:
        """Takes in how many seconds one loader was busy with a batch. The first batch of each is ignored, for which it
        may open files."""
        self._cold -= 1
        if self._cold < 0 and samples > 0:
            self._told.append(seconds / samples)

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
        # No median: where the loaders of another rank end together, it makes some steps long and others short.
        usual_s = sorted(step_s - wait_s for _, step_s, wait_s, _ in self._seen)[-2:][0]
        if usual_s > 0.0:
            steps_s = sum(min(step_s, wait_s + LONG * usual_s) for _, step_s, wait_s, _ in self._seen)
        told = self._follow()
        is_slack = told is not None and told * number < BUSY * steps_s
        waits = waited_s >= max((LONG_WAITS if is_slack else WAITS) * steps_s, others_s)
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
            loaded = number * (1.0 - self._ahead / len(self._seen))  # at least; the rest may have been ready before
            if loaded > 0.0:
                self.seconds_per_sample = min(self.seconds_per_sample, steps_s / loaded)
            if told is not None and told * number > TRIED * steps_s:
                return  # they are busy all the time
            self._since += 1
            if self._since >= self._pause:
                if self._trying:
                    self._pause = max(self._pause // MORE, self._least)
                self.seconds_per_sample *= TRIED
                self._since, self._trying = 0, True

    def _follow(self) -> float | None:
        """Makes a first estimate of what the loaders tell, or changes the estimate in proportion to that. Returns the
        seconds that a sample takes by what they tell, with all at work; None if too few batches were told of."""
        if len(self._told) < FEW_TOLD:
            return None
        told = statistics.median(self._told) / self._loaders
        if self.seconds_per_sample is None:
            self.seconds_per_sample = told
        elif self._told_then:
            self.seconds_per_sample *= told / self._told_then
        self._told_then = told
        return told
