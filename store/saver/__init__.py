"""Asynchronous saves: the trainer copies its state, and a worker compresses and writes the copy."""
