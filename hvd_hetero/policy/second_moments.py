"""Adam's second moments on a rank that steps apart: those that the global batch's gradient would make.

A rank that trains on b of a global batch's B samples has a noisier gradient. With the gradient's mean mu and its
variance s^2 per sample, of any one parameter, Adam's second moment v tends to

    mu^2 + s^2 / b  on the rank alone,        mu^2 + s^2 / B  in synchronous training

and a step is divided by its root: ranks apart would make steps that are too short, by up to the root of B / b. What a
rank knows besides is its first moment m, a mean over several steps: over (1 + beta1) / (1 - beta1) of them, as far as
noise goes, when enough were made. So

    m^2  tends to  mu^2 + s^2 / (W b),        W = (1 + beta1) (1 - beta1^t) / ((1 - beta1) (1 + beta1^t))

(the sum of squares of t weights that fall by beta1 each, over the square of their sum, is 1 / W), and the mixture

    a m^2 + (1 - a) g^2,        a = (1 - b / B) / (1 - 1 / W)

has the expectation of synchronous training, if a is at most 1: if the rank's share is at least 1 / W, 5 % for
beta1 = 0.9. Below that m^2 alone is nearest. As v is linear in the squares that it is made of, what n steps have added
to it can be exchanged for what they should have added afterwards, see `Mixture`. No rank has to hear of the others.

m has to be what v is: a mean over the gradients since the same beginning. And v's memory has to be long, as that of
beta2 = 0.999 is: a step is divided by a v that holds its own gradient's square as it is, and those that have come since
the last exchange. With beta2 = 0.95, a sixteenth of the batch, and exchanges at every second step, v is twice too large
when it is used (16 times without).

A part of mu that turns its sign from step to step is noise here, and makes longer steps than it would in synchronous
training.
"""

from __future__ import annotations

from typing import NamedTuple


class Mixture(NamedTuple):
    """What a second moment becomes: `after` * v + `before` * v_before + `first` * m^2, of numbers that are 0 or more.

    v_before: n steps ago; v, m: now, as the optimizer keeps them (not corrected for their beginning at 0).
    """

    after: float
    before: float
    first: float


def window(beta1: float, steps: float) -> float:
    """W: of how many gradients alike the first moment after so many steps is a mean, as far as noise goes."""
    old = beta1**steps
    return (1.0 + beta1) * (1.0 - old) / ((1.0 - beta1) * (1.0 + old))


def mixture(part: float, *, betas: tuple[float, float], steps: float, new: float) -> Mixture:
    """The mixture for a rank whose batches were this part of the global ones.

    Args:
        part: b / B.
        betas: beta1 and beta2, each 0 or more and below 1.
        steps: t, all that the optimizer has made.
        new: n, how many of them were made since v_before.
    """
    beta1, beta2 = betas
    alike = window(beta1, steps)
    exchanged = min((1.0 - part) / (1.0 - 1.0 / alike), 1.0) if alike > 1.0 and part < 1.0 else 0.0
    old = beta2**new
    return Mixture(1.0 - exchanged, exchanged * old, exchanged * (1.0 - old) / (1.0 - beta1**steps) ** 2)
