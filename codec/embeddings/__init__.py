"""Embedding tables row by row (Check-N-Run)."""
