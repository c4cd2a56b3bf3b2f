"""The local node: runs rendered Kubernetes manifests as processes on one Linux machine.

Start reading at ``node.LocalNode``. The flow is: manifests -> ``workloads`` (what is wanted) -> ``converge`` (which
pods to create or delete) -> ``pod_plan`` (one pod, everything resolved) -> ``pod`` and ``container`` (the processes).
The first three are pure, as are ``health`` (what probe results mean) and ``restarts`` (when a container starts again).

A process is not a container. What differs, on purpose: no mount namespace (mount paths are rewritten to the pod's
directory in commands, arguments, environment values and ConfigMap texts), no network namespace (every pod has a
loopback address of its own), no cgroup (requests and limits are not enforced), no DNS. Fields that the node cannot
honour are refused, or reported as notices where a pod works without them.
"""
