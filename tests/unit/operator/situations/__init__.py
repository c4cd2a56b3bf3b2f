"""Situations of a resource, and what is said of each."""

from __future__ import annotations

from tests.unit.operator.situations import pods, resource, traffic

ROWS = (*resource.ROWS, *pods.ROWS, *traffic.ROWS)
