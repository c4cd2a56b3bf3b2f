"""Having the API server refuse what it would let in, by a policy of its own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from tests.cluster.errors import CommandFailedError
from tests.cluster.kubectl import Kubectl
from tests.cluster.waiting import wait_until


@contextmanager
def refused(kubectl: Kubectl, verb: str, resource: str, *, unless: str, message: str) -> Iterator[None]:
    """Have requests in the namespace refused meanwhile, with status 422, unless a CEL expression holds.

    verb, resource: as admission names them: ``CREATE`` ``services``.
    """
    name, namespace = f"{kubectl.namespace}-{resource}", {"kubernetes.io/metadata.name": kubectl.namespace}
    kind = {"apiVersion": "admissionregistration.k8s.io/v1", "metadata": {"name": name}}
    probe = f"policy-probe-{resource}"
    probed = f"request.resource.resource != 'configmaps' || object.metadata.name != '{probe}'"
    policy = {
        **kind,
        "kind": "ValidatingAdmissionPolicy",
        "spec": {
            "matchConstraints": {
                "namespaceSelector": {"matchLabels": namespace},
                "resourceRules": [_rule(verb, resource), _rule("CREATE", "configmaps")],
            },
            "validations": [
                {"expression": f"request.resource.resource != '{resource}' || ({unless})", "message": message},
                {"expression": probed, "message": "the policy is in force"},
            ],
        },
    }
    spec = {"policyName": name, "validationActions": ["Deny"]}
    binding = {**kind, "kind": "ValidatingAdmissionPolicyBinding", "spec": spec}
    kubectl.apply(policy, binding)
    try:
        wait_until(lambda: _is_in_force(kubectl, probe), what="the policy in force")
        yield
    finally:
        for each in (binding, policy):
            kubectl("delete", str(each["kind"]), name)


def _rule(verb: str, resource: str) -> dict[str, list[str]]:
    return {"apiGroups": [""], "apiVersions": ["v1"], "operations": [verb], "resources": [resource]}


def _is_in_force(kubectl: Kubectl, probe: str) -> bool:
    try:
        kubectl("create", "configmap", probe, "--dry-run=server")
    except CommandFailedError:
        return True
    return False
