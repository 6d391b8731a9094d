"""What is dL_V/dλ? Ways to compute the hypergradient."""

from .base import Method, backward, hypergradient
from .direct import Direct
from .forward import Forward
from .halves import Halves
from .hypergradient import Hypergradient
from .implicit import Implicit
from .penalty import Penalty
from .sama import SAMA
from .unrolled import Unrolled

__all__ = [
    "SAMA",
    "Direct",
    "Forward",
    "Halves",
    "Hypergradient",
    "Implicit",
    "Method",
    "Penalty",
    "Unrolled",
    "backward",
    "hypergradient",
]
