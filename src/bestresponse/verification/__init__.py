"""Derivatives against differences: what the first hypergradient of a problem verifies of itself."""
