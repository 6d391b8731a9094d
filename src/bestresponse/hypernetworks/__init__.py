"""Alternatives to the implicit method that learn the best response: weights as a function of the hyperparameters."""

from .base import Hypernetwork
from .linear import LinearHypernetwork
from .self_tuning import SelfTuning

__all__ = ["Hypernetwork", "LinearHypernetwork", "SelfTuning"]
