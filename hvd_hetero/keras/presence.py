"""Which gradients there are, where a batch decides that and each rank has another one, as with LayerDrop.

All ranks exchange all gradients, zeros where there is none, and with them a vector of marks, which is weighted and
summed as one more gradient. What no rank has had is none afterwards, as in one process: no decay moves its variable,
and where there is no gradient at all, Keras says so. The last mark is there wherever there are samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras

MARK = 1e-15  # too little to count in the gradients' norm


def marked(gradients: Sequence[Any], variables: Sequence[Any], form: Any) -> list[Any]:
    """The gradients, zeros where there is none, and the marks of those that there are. None for what can have none, as
    an integer that a tape is asked for."""
    every = [form.none_of(v) if g is None else g for g, v in zip(gradients, variables, strict=True)]
    marks = [*(MARK * (g is not None) for g in gradients), MARK]
    like = next((g for g in every if g is not None), None)
    return [*every, None if like is None else form.constant(marks, like)]


def unmarked(reduced: Sequence[Any], *, last: bool, apart: bool, keeps: bool) -> list[Any]:
    """What became of `marked`: the gradients, and None where no rank has had one. Zeros where passes are to follow, or
    no rank has had samples; and of a step apart that has none at all, which others may have.

    With codecs that keep something back, what was kept of earlier gradients may come where there is none.
    """
    *gradients, marks = reduced
    if not last or marks is None:
        return gradients
    *there, samples = keras.ops.convert_to_numpy(marks).tolist()
    if not any(there) and (apart or not samples):
        return gradients
    return [
        gradient if mark or (keeps and gradient is not None and keras.ops.any(gradient)) else None
        for gradient, mark in zip(gradients, there, strict=True)
    ]
