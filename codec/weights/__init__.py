"""Weights with a stated error: partition, codebooks, levels and their deltas, rates and targets; exponents."""
