"""Fixtures for every folder of tests."""

from __future__ import annotations

from collections.abc import Generator

import pytest

from tests.harness import engines

pytest_plugins = ["tests.cluster.fixtures", "tests.harness.fixtures"]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Show what the engines wrote last beside a test that failed."""
    report = yield
    if report.failed:
        report.sections += [(f"end of {engine.name}'s log", engine.log_tail()) for engine in engines.RUNNING]
    return report
