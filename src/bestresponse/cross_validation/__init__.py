"""Cross-validation as the outer loss: a problem over folds, its batches, and one function for a complete run."""

from .bfgs import BFGS
from .call import CrossValidation, cross_validate
from .data import FoldBatches, fold_batches, whole_batches
from .folds import Folds
from .minimise import Minimise

__all__ = [
    "BFGS",
    "CrossValidation",
    "FoldBatches",
    "Folds",
    "Minimise",
    "cross_validate",
    "fold_batches",
    "whole_batches",
]
