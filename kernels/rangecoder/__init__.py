"""Adaptive range coder of short tables; only the other coders use it."""
