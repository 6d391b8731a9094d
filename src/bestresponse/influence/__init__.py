"""The effect of training examples on losses: influence functions."""

from .queries import Influence, influence
from .self_influence import SelfInfluence, self_influence

__all__ = ["Influence", "SelfInfluence", "influence", "self_influence"]
