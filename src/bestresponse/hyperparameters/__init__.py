"""Modules whose parameters are hyperparameters."""

from .distilled_data import DistilledData
from .dropout import ConcreteDropout, DropConnect
from .weight_decay import WeightDecay

__all__ = ["ConcreteDropout", "DistilledData", "DropConnect", "WeightDecay"]
