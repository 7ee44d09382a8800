"""Weights of these tests' states are trained."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _weights_are_trained(trained: None) -> None:
    """Use `trained` in every test."""
