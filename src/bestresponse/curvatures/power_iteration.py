"""Spectral normalisation in training mode, whose second derivative leaves a part out."""

from ..problem import Problem


def warn_of_power_iterations(problem: Problem) -> None:
    """Warn once of spectral normalisation in training mode, whose second derivative leaves a part out."""
    if (name := power_iteration(problem)) is not None:
        problem.warn_once(
            "spectral norm",
            f"spectral_norm at {name!r} takes its singular vectors as constants, so that second derivatives "
            "in training mode are off by some percent. FiniteDifference(), SAMA and Penalty include that part.",
        )


def power_iteration(problem: Problem) -> str | None:
    """The name of a module with spectral normalisation in training mode."""
    for name, module in problem.model.named_modules():
        hooks = [type(hook).__name__ for hook in module._forward_pre_hooks.values()]
        if module.training and ("SpectralNorm" in hooks or type(module).__name__ == "_SpectralNorm"):
            return str(name)
    return None
