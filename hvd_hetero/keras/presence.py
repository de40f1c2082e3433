"""Lets ranks agree on which variables have a gradient, if that depends on the batch, as with LayerDrop.

All ranks exchange the gradients of all variables, zeros if there is none, and with them a vector of marks, which is
weighted and summed like one more gradient. A gradient that no rank had is None afterwards, as in one process: weight
decay does not move its variable, and if there is no gradient at all, Keras warns of it. The last mark is set on each
rank, so that its sum says whether any rank had samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras

MARK = 1e-15  # too little to count in the gradients' norm


def marked(gradients: Sequence[Any], variables: Sequence[Any], form: Any) -> list[Any]:
    """The gradients, with zeros for those that are None, and after them the vector of marks. None stays for what can
    have no gradient, such as an integer that a tape is asked for."""
    every = [form.none_of(v) if g is None else g for g, v in zip(gradients, variables, strict=True)]
    marks = [*(MARK * (g is not None) for g in gradients), MARK]
    like = next((g for g in every if g is not None), None)
    return [*every, None if like is None else form.constant(marks, like)]


def unmarked(reduced: Sequence[Any], *, last: bool, is_local: bool, keeps: bool) -> list[Any]:
    """The gradients from the exchange of what `marked` returned, with None for those that no rank had.

    Zeros stay if further passes follow before the exchange (not `last`), if no rank had samples, and in a local step
    (`is_local`) without any gradient, as other ranks may have some. If codecs keep something back (`keeps`), what was
    kept of earlier gradients may come for a variable without a gradient now; it is returned.
    """
    *gradients, marks = reduced
    if not last or marks is None:
        return gradients
    *there, samples = keras.ops.convert_to_numpy(marks).tolist()
    if not any(there) and (is_local or not samples):
        return gradients
    return [
        gradient if mark or (keeps and gradient is not None and keras.ops.any(gradient)) else None
        for gradient, mark in zip(gradients, there, strict=True)
    ]
