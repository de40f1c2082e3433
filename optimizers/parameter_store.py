"""What local steps and comparisons of parameters ask of a framework: a rank's parameters as flat fragments."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol


class Store(Protocol):
    """Reads and writes the parameters of a rank, as one flat array for each fragment."""

    def shapes(self, index: int) -> list[tuple[int, ...]]:
        """The shapes of the parameters in fragment `index`, in the order in which they lie in it."""

    def read(self, index: int, into: Any = None) -> Any:
        """Returns a flat copy of fragment `index`, in `into` if given: an array that an earlier call returned."""

    def write(self, index: int, flat: Any) -> None:
        """Overwrites the parameters of fragment `index`."""

    def shift(self, index: int, by: Any) -> None:
        """Adds to the parameters of fragment `index`; may overwrite `by`."""

    def blend(self, index: int, flat: Any, part: float) -> None:
        """Sets the parameters x of fragment `index` to part x + (1 - part) `flat`; may overwrite `flat`."""


class ParameterStore(Store, Protocol):
    """Reads and writes a rank's parameters as flat fragments; `hvd_hetero.torch` and `.keras` each implement it.

    All parameters of a fragment have one type and device, and go through a lossy codec all or none.
    """

    @property
    def lossy(self) -> Sequence[bool]:
        """For each fragment, whether its progress goes through a lossy codec. Its length is the number of fragments."""

    @property
    def narrow(self) -> bool:
        """Whether a parameter has a type (float16, bfloat16) in which a part of an update may round to nothing."""

    def empty(self, index: int, tail: int) -> Any:
        """Returns a flat array of zeros, `tail` elements longer than fragment `index`, of its type and device."""

    def control(self, length: int) -> Any:
        """Returns `length` zeros in double precision, for a control vector that travels by itself."""

    def checksum(self, index: int) -> int:
        """A hash of the bits of fragment `index`, below 2**63."""
