"""Exact storage: an array alone, against its parent, or as a copy of another array."""
