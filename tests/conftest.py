"""Fixtures for every folder of tests."""

from __future__ import annotations

pytest_plugins = ["tests.cluster.fixtures", "tests.harness.fixtures"]
