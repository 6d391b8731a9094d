"""Steps of learning-rate schedulers."""

from typing import Any

from torch.optim.lr_scheduler import ReduceLROnPlateau


def step_scheduler(scheduler: Any, metric: float | None) -> None:
    """Step a scheduler, if there is one; one that needs a metric waits until there is one."""
    if isinstance(scheduler, ReduceLROnPlateau):
        if metric is not None:
            scheduler.step(metric)
    elif scheduler is not None:
        scheduler.step()
