"""Weights with a stated error: partition, codebooks, levels and deltas, rates, targets."""
