"""Corrects Adam's second moments in local SGD: makes them what gradients of the whole global batch would make them.

A rank that takes local steps on b of a global batch's B samples has noisier gradients. With the gradient's mean mu and
its variance s^2 per sample, for any one parameter, Adam's second moment v tends to

    mu^2 + s^2 / b  in local steps,        mu^2 + s^2 / B  in synchronous training

An update is divided by the root of v, so local updates would be too short, by up to the root of B / b. The rank also
has its first moment m, a mean over several gradients: its noise is that of a mean over (1 + beta1) / (1 - beta1) of
them, after enough steps. So

    m^2  tends to  mu^2 + s^2 / (W b),        W = (1 + beta1) (1 - beta1^t) / ((1 - beta1) (1 + beta1^t))

(for t weights that fall by the factor beta1, the sum of their squares over the square of their sum is 1 / W). With the
gradient g, the mixture

    a m^2 + (1 - a) g^2,        a = (1 - b / B) / (1 - 1 / W)

has the same expectation as in synchronous training, if a is at most 1: if the rank's share is at least 1 / W, 5 % for
beta1 = 0.9. With a smaller share, m^2 alone is nearest. As v is linear in the squares that it is made of, what n steps
have added to v can be replaced afterwards by what they should have added: see `Mixture`. This needs no communication.

Limits:
- m and v have to be means over the same gradients, since the same beginning.
- v's memory has to be long, as with beta2 = 0.999: an update is divided by a v that still holds, uncorrected, the
  squares of its own gradient and of those since the last correction. With beta2 = 0.95, a sixteenth of the batch, and
  a correction at every second step, v is twice too large when it is used (16 times without corrections).
- A part of mu that changes its sign from step to step counts as noise here, and leads to longer updates than in
  synchronous training.
"""

from __future__ import annotations

from typing import NamedTuple


class Mixture(NamedTuple):
    """The factors of a corrected second moment: `after` * v + `before` * v_before + `first` * m^2. None is negative.

    v and m are the present moments and v_before is the second moment n steps ago, all as the optimizer keeps them
    (without Adam's correction for their beginning at 0).
    """

    after: float
    before: float
    first: float


def window(beta1: float, steps: float) -> float:
    """W: the number of equally weighted gradients whose mean is as noisy as the first moment after `steps` steps."""
    old = beta1**steps
    return (1.0 + beta1) * (1.0 - old) / ((1.0 - beta1) * (1.0 + old))


def mixture(part: float, *, betas: tuple[float, float], steps: float, new: float) -> Mixture:
    """The factors that correct a rank's second moment.

    Args:
        part: b / B, the rank's part of the samples of the global batches.
        betas: beta1 and beta2, each 0 or more and below 1.
        steps: t, the number of all steps of the optimizer.
        new: n, the number of steps since v_before.
    """
    beta1, beta2 = betas
    alike = window(beta1, steps)
    exchanged = min((1.0 - part) / (1.0 - 1.0 / alike), 1.0) if alike > 1.0 and part < 1.0 else 0.0
    old = beta2**new
    return Mixture(1.0 - exchanged, exchanged * old, exchanged * (1.0 - old) / (1.0 - beta1**steps) ** 2)
