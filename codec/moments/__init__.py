"""Optimizer moments with a stated error: log buckets, a grid of the update, rank one with a correction, clusters."""
