"""Numba back end: compiled on first call, cached on disk, the GIL released."""
