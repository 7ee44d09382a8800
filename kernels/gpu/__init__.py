"""Triton back end: imported on first use, so that the package works without Triton."""
