"""What conjugate gradient learns from one solve for the next, along a run: its damping and its number of steps."""

from typing import Any

from .system import System

# The damping as a share of the largest curvature: at first, and in addition where the last solution says nothing about
# the next system. Batches with fewer examples than weights have a null space, which a solve with less damping follows
# to its end.
FIRST_DAMPING, _UNSEEN_DAMPING = 1e-4, 1.5e-2
_UNSEEN_MEMORY = 0.7
_RAISE = 10.0
# Undisturbed solves after which the next ones may make one step more.
_UNDISTURBED = 20


def limit_of(system: System, most: int) -> int:
    """The number of steps for a solve that starts from the last solution."""
    return min(int(system.memory.get("limit", most)), most)  # the first solve of a run may make more steps


def after_failure(damping: float, lowest: float) -> dict[str, Any]:
    """More damping, above the negative curvature that was met, and single steps."""
    return {"damping": max(_RAISE * damping, -2.0 * lowest), "limit": 1, "undisturbed": 0}


def after_success(
    system: System, damping: float, highest: float, left: float, steps: int, cut: bool, most: int
) -> dict[str, Any]:
    """Less damping, but not below a share of the largest curvature; and the number of steps.

    On mini-batches with an indefinite Hessian, a solve of several steps follows the noise of its batch: its solution
    then meets negative curvature on the next batch, or has a residual so large that it is dropped. The next solves
    make fewer steps after negative curvature, and after a start that was dropped while they are fewer already. On
    singular mini-batches without negative curvature, starts are dropped too, but there the damping is enough.

    Args:
        system: the system that was solved.
        damping: its damping.
        highest: the largest curvature that was met.
        left: the residual that the solve left, in units of the right-hand side.
        steps: the number of steps.
        cut: whether negative curvature ended them.
        most: the largest number of steps.
    """
    memory: dict[str, Any] = {"left": left, **_unseen(system)}
    floor = FIRST_DAMPING + _UNSEEN_DAMPING * memory.get("unseen", 0.0)
    limit, undisturbed = limit_of(system, most), system.memory.get("undisturbed", 0) + 1
    if cut or (system.dropped is not None and limit < most):
        limit, undisturbed = max(1, min(limit, steps) - (not cut)), 0
    elif undisturbed == _UNDISTURBED:
        limit, undisturbed = min(limit + 1, most), 0
    return memory | {
        "damping": max(damping / 2.0, floor * highest),
        "limit": limit,
        "undisturbed": undisturbed,
    }


def _unseen(system: System) -> dict[str, float]:
    """A running mean, from 0 to 1, of the share of a start's squared residual that its own system had not left.

    Zero if systems do not change, however large the residual after a few steps; one if the last solution says nothing
    about the next system. Empty before the second solve.
    """
    memory = system.memory
    if "left" not in memory or not (system.offset or system.dropped is not None):
        return {n: memory[n] for n in ("unseen",) if n in memory}
    start = 1.0 / system.target if system.dropped is None else system.dropped
    share = max(1.0 - (memory["left"] / start) ** 2, 0.0) * min(start, 1.0) ** 2
    return {"unseen": _UNSEEN_MEMORY * memory.get("unseen", share) + (1.0 - _UNSEEN_MEMORY) * share}
