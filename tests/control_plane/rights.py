"""What an identity may do, asked of the API server."""

from __future__ import annotations

import json

from tests.charts.rights import rights
from tests.cluster.cluster import Cluster
from tests.cluster.kubectl import Kubectl


def rights_of(control_plane: Cluster, account: tuple[str, str], namespace: str) -> dict[tuple[str, str], set[str]]:
    """What a service account may do in a namespace as the API server sees it, without what everybody may do."""
    review = {
        "apiVersion": "authorization.k8s.io/v1",
        "kind": "SelfSubjectRulesReview",
        "spec": {"namespace": namespace},
    }
    as_account = Kubectl(control_plane.service_account(*account))
    answer = json.loads(
        as_account("create", "--filename=-", "--validate=false", "--output=json", stdin=json.dumps(review))
    )
    rules = [
        {field: rule.get(field, []) for field in ("apiGroups", "resources", "verbs")}
        for rule in answer["status"]["resourceRules"]
    ]
    return {
        what: verbs
        for what, verbs in rights(rules).items()
        if what[0] not in ("authorization.k8s.io", "authentication.k8s.io")
    }
