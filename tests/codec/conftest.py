"""Weights of these tests' states are trained, unless a test asks for states without evidence of that."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _weights_are_trained(request: pytest.FixtureRequest) -> None:
    if request.node.get_closest_marker("no_evidence") is None:
        request.getfixturevalue("trained")
