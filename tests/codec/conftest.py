"""Weights of these tests' states are trained, unless a test is about the evidence of that."""

from __future__ import annotations

import pytest

EVIDENCE = ("test_evidence", "test_kinds", "test_rules")
"""Modules about what is known of an array."""


@pytest.fixture(autouse=True)
def _weights_are_trained(request: pytest.FixtureRequest) -> None:
    if not request.module.__name__.endswith(EVIDENCE):
        request.getfixturevalue("trained")
