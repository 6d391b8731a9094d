"""Tuning inside the training loops of other libraries, each of which is an extra."""

from typing import TYPE_CHECKING, Any

from .tuning import Tuning

if TYPE_CHECKING:
    from .lightning import LightningTuning, ManualTuning
    from .transformers import TrainerTuning

__all__ = ["LightningTuning", "ManualTuning", "TrainerTuning", "Tuning"]


def __getattr__(name: str) -> Any:
    """Import a library when a name that needs it is first used."""
    if name in ("LightningTuning", "ManualTuning"):
        from . import lightning

        return getattr(lightning, name)
    if name == "TrainerTuning":
        from . import transformers

        return transformers.TrainerTuning
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
