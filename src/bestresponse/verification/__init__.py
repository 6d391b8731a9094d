"""Verification: the first hypergradient of a problem compares its derivatives with differences."""
