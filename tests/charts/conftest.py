from __future__ import annotations

import pytest

from tests.charts.helm import Helm, require
from tests.cluster.fixtures import skip_where_unavailable


@pytest.fixture(scope="session")
def helm(tmp_path_factory: pytest.TempPathFactory) -> Helm:
    """helm without a cluster."""
    with skip_where_unavailable():
        require()
    return Helm(tmp_path_factory.mktemp("helm"))
