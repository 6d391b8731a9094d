"""Grid, random and Bayesian search: the baselines, which need no gradient."""

from .search import MissingPackageError, SearchResult, search

__all__ = ["MissingPackageError", "SearchResult", "search"]
