"""Modules whose parameters are hyperparameters."""

from .augmentation import Augmenter
from .distilled_data import DistilledData
from .dropout import ConcreteDropout, DropConnect
from .example_weights import ExampleWeights, LossWeights
from .export import load, save
from .orthant import orthant_wise
from .protocol import (
    Bounded,
    Constrained,
    Kinked,
    KnownCurvature,
    KnownMixedTerm,
    Readable,
    Searchable,
    Shrinking,
)
from .shrinkage import Shrinkage, Shrunk
from .table import Indexed, Weights
from .weight_decay import WeightDecay

__all__ = [
    "Augmenter",
    "Bounded",
    "ConcreteDropout",
    "Constrained",
    "DistilledData",
    "DropConnect",
    "ExampleWeights",
    "Indexed",
    "Kinked",
    "KnownCurvature",
    "KnownMixedTerm",
    "LossWeights",
    "Readable",
    "Searchable",
    "Shrinkage",
    "Shrinking",
    "Shrunk",
    "WeightDecay",
    "Weights",
    "load",
    "orthant_wise",
    "save",
]
