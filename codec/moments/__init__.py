"""Optimizer moments with a stated error: log buckets, grid, rank one, clusters."""
