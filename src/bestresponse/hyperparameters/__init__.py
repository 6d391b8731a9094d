"""Modules whose parameters are hyperparameters."""

from .distilled_data import DistilledData
from .weight_decay import WeightDecay

__all__ = ["DistilledData", "WeightDecay"]
