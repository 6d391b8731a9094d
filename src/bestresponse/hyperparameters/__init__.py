"""Modules whose parameters are hyperparameters."""

from .weight_decay import WeightDecay

__all__ = ["WeightDecay"]
