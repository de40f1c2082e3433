"""How fast a rank gets its samples where others load them beside its computing: processes, or a thread.

While a rank waits for its batches, and has hardly anything else to wait for, those who load are at work all the time,
and the seconds from one batch to the next are what they need for it. (Where it has, they could have loaded meanwhile:
then it takes so long to hand over what is there.) While it does not wait, that is the most they need: how much less
shows once the rank has more samples. So it is then said to be a little faster now and then; where that was too much,
more and more rarely, and else more often.
"""

from __future__ import annotations

import statistics
from collections import deque

# Batches that are looked at together, or as many as there are who load: these end at about the same time, and then none
# does. At first fewer do, for the first plan not to be made without.
WINDOW, FEW = 16, 8
WAITS = 0.05  # of the time: who waits less for its batches could have more of them
LEAST, MOST = 40, 5120  # batches from one try to the next
MORE = 4  # times as many after a try that failed
LONG = 2.0  # times as long as usual, beside waiting: what a batch takes beyond that is no loading, as compiling
TRIED = 0.9  # of the seconds that a sample is taken to need, in a try


class LoadingPace:
    """What loading allows one rank, over its batches.

    Attributes:
        seconds_per_sample: that a sample needs at least; None: less than the rank has noticed.
        pends: whether the rank waits, and it is not known yet for how fast a loader.
    """

    def __init__(self) -> None:
        self.seconds_per_sample: float | None = None
        self.pends = False
        self._seen: deque[tuple[int, float, float, float]] = deque(maxlen=WINDOW)
        self._least = LEAST  # batches from one try to the next
        self._pause, self._since, self._tries = LEAST, 0, False

    def resume(self, seconds_per_sample: float) -> None:
        """Goes on from what was known of this rank's loaders, as in an earlier process. There may be more of them now:
        until the rank has waited for these, tries come sooner."""
        if self.seconds_per_sample is None:
            self.seconds_per_sample, self.pends = seconds_per_sample, False
            self._least = self._pause = FEW

    def look_back(self, loaders: int) -> None:
        """Says how many load side by side."""
        if (most := max(WINDOW, loaders)) != self._seen.maxlen:
            self._seen = deque(self._seen, maxlen=most)

    def hear(self, samples: int, *, step_s: float | None, waited_s: float, computed_s: float) -> None:
        """Takes in a batch that is done.

        Args:
            step_s: seconds since the batch before it was; None for the first one, for which a rank waits once.
            waited_s: for how many of these the rank waited for it.
            computed_s: for how many of these it computed.
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
        self.pends = waits and self.seconds_per_sample is None
        if len(self._seen) < FEW or not number:
            return
        if waits:
            self._least, self._pause = LEAST, max(self._pause, LEAST)
            if self._tries:
                self._pause = min(MORE * self._pause, MOST)
            self.seconds_per_sample, self.pends = steps_s / number, False
            self._since, self._tries = 0, False
        elif self.seconds_per_sample is not None:
            self.seconds_per_sample = min(self.seconds_per_sample, steps_s / number)
            self._since += 1
            if self._since >= self._pause:
                if self._tries:
                    self._pause = max(self._pause // MORE, self._least)
                self.seconds_per_sample *= TRIED
                self._since, self._tries = 0, True
