"""Triton back end: imported on first use, so the package works where Triton does not exist."""
