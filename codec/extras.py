"""Commands that install the packages of optional features.

The commands name the packages: for `shrinkpoint[...]` pip would look for this project on an index, where it is not.
"""

from __future__ import annotations

EXTRAS = {
    "s3": ("s3fs>=2024.10",),
    "obstore": ("obstore>=0.8",),
    "lightning": ("lightning>=2.4",),
    "transformers": ("transformers>=4.50", "accelerate>=1.0"),
    "accelerate": ("accelerate>=1.0",),
    "jax": ("jax>=0.5",),
    "orbax": ("orbax-checkpoint>=0.11.20",),
    "zarr": ("zarr>=3.1",),
    "numcodecs": ("numcodecs>=0.15",),
    "report": ("matplotlib>=3.8",),
    "sign": ("cryptography>=42",),
}
"""The optional dependencies of pyproject.toml, except those for tests, benchmarks and the site."""


def install(extra: str) -> str:
    """Return the command that installs one extra.

    Example:
        >>> install("lightning")
        "pip install 'lightning>=2.4'"
    """
    return f"pip install {' '.join(repr(package) for package in EXTRAS[extra])}"
