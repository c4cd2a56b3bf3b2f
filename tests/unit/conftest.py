"""Property tests judge results, never how long a busy machine takes for them.

Under ``CI=true`` they draw the same examples each time, so that a change is judged by what it changes; elsewhere they
search on.
"""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

settings.register_profile(
    "untimed",
    deadline=None,
    derandomize=os.environ.get("CI") == "true",
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("untimed")
