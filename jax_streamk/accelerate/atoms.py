"""Which dimensions of arrays are the same, through reshapes, transposes and broadcasts."""

from collections.abc import Sequence
from typing import Any

import numpy as np


class Atoms:
    """Factors of sizes: a dimension is a run of them, and reshapes move them from run to run or divide them."""

    def __init__(self) -> None:
        self._sizes: list[int] = []
        self._divided: dict[int, tuple[int, ...]] = {}

    def run(self, size: int) -> tuple[int, ...]:
        """A new dimension's."""
        self._sizes.append(size)
        return (len(self._sizes) - 1,) if size > 1 else ()

    def flat(self, *runs: Sequence[int]) -> list[int]:
        """The atoms of runs as they are divided now."""
        return [x for run in runs for at in run for x in (self.flat(self._divided.get(at, ())) or [at])]

    def sizes(self, atoms: Sequence[int]) -> list[int]:
        return [self._sizes[at] for at in atoms]

    def reshaped(self, runs: Sequence[Sequence[int]], shape: Sequence[int]) -> list[tuple[int, ...]] | None:
        """The runs of the same atoms for another shape; None if a dimension begins within an atom's factors."""
        left, out = self.flat(*runs), []
        for size in shape:
            run: list[int] = []
            while size > 1 and left:
                at = left.pop(0)
                if self._sizes[at] > size and self._sizes[at] % size == 0:
                    self._divided[at] = (*self.run(size), *self.run(self._sizes[at] // size))
                    at, rest = self._divided[at]
                    left.insert(0, rest)
                if size % self._sizes[at]:
                    return None
                run.append(at)
                size //= self._sizes[at]
            out.append(tuple(run))
        return out

    def before(self, eqn: Any, runs: Sequence[tuple[int, ...]]) -> list[tuple[int, ...]] | None:
        """The runs of the operand of an equation that moves or spreads it, given those of its result."""
        name, shape = eqn.primitive.name, eqn.invars[0].aval.shape
        if name == "transpose":
            return [runs[i] for i in np.argsort(eqn.params["permutation"])]
        if name == "broadcast_in_dim":
            given = zip(shape, eqn.params["broadcast_dimensions"])
            return [runs[i] if size > 1 else () for size, i in given]
        return self.reshaped(runs, shape)
