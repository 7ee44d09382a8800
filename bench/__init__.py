"""Benchmarks: `python -m bench NAME`, or `shrinkpoint bench NAME` from an installed wheel."""
