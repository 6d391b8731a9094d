"""Whether a small difference is more than rounding: for methods that subtract gradients at two sets of weights."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from .. import _tree
from ..errors import ArgumentError
from .arithmetic import Arithmetic

# Two steps with a larger relative difference are not reliable.
APART = 0.1


@dataclass(frozen=True)
class Circumstances:
    """The circumstances of a verification: the arithmetic, and the size of each tensor of weights."""

    arithmetic: Arithmetic
    sizes: Mapping[str, float]

    def data(self, **more: Any) -> dict[str, Any]:
        """The circumstances as plain data, for the state on a problem."""
        return {"precision": self.arithmetic.name, "sizes": dict(self.sizes), **more}

    def same(self, data: Mapping[str, Any] | None) -> bool:
        """Whether the circumstances are the same: the same arithmetic, and no tensor twice or half as large."""
        if data is None or data["precision"] != self.arithmetic.name:
            return False
        before = data["sizes"]
        return before.keys() == self.sizes.keys() and all(
            0.5 * before[n] <= size <= 2.0 * before[n] for n, size in self.sizes.items()
        )


def sizes(weights: Mapping[str, Tensor]) -> dict[str, float]:
    """The root mean square of each tensor, and for smaller ones that of all, as a geometric mean over entries."""
    found = _tree.root_mean_squares(_tree.detached(weights))
    live = {n: x for n, x in found.items() if x > 0.0 and math.isfinite(x)}
    entries = sum(weights[n].numel() for n in live)
    least = (
        math.exp(sum(weights[n].numel() * math.log(x) for n, x in live.items()) / entries) if live else 1.0
    )
    return {n: max(x, least) for n, x in found.items()}


def relative_distance(a: Mapping[str, Tensor | None], b: Mapping[str, Tensor | None]) -> float:
    """‖a − b‖ over the larger norm; infinite where one is not finite."""
    one, other = ({n: x for n, x in y.items() if x is not None} for y in (a, b))
    size = max(_tree.norm(one), _tree.norm(other))
    apart = _tree.norm({n: x - other[n] if n in other else x for n, x in one.items()})
    if not math.isfinite(size) or not math.isfinite(apart):
        return math.inf
    return apart / size if size > 0.0 else 0.0


def refuse_half_precision(who: str, weights: Mapping[str, Tensor]) -> None:
    """Raise if weights would round small changes away."""
    coarse = [n for n, w in weights.items() if w.is_floating_point() and w.element_size() < 4]
    if coarse:
        raise ArgumentError(
            f"{who} needs weights in float32 or float64, since half precision rounds small changes of them away; got "
            f"{str(weights[coarse[0]].dtype).removeprefix('torch.')} in {coarse[:5]}. Keep float32 weights, and run "
            "the loss under torch.autocast."
        )
