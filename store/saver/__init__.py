"""Asynchronous saves: the trainer copies its state, a worker compresses and writes it."""
