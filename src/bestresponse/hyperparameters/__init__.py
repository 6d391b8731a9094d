"""Modules whose parameters are hyperparameters."""

from .augmentation import Augmenter
from .distilled_data import DistilledData
from .dropout import ConcreteDropout, DropConnect
from .example_weights import ExampleWeights
from .orthant import Kinked, orthant_wise
from .weight_decay import WeightDecay

__all__ = [
    "Augmenter",
    "ConcreteDropout",
    "DistilledData",
    "DropConnect",
    "ExampleWeights",
    "Kinked",
    "WeightDecay",
    "orthant_wise",
]
