"""What engines load, under which name they serve it, how engines and the router speak, and where routers share
handles."""

from __future__ import annotations

from kvloop_operator import names
from kvloop_operator.api.v1alpha1 import DisaggregatedInferenceSpec
from kvloop_operator.api.v1alpha1.spec import EngineTLS, RouterTLS


def served_name(spec: DisaggregatedInferenceSpec) -> str:
    """The name that clients ask for."""
    return spec.model.served_name or spec.model.id or ""


def model_argument(spec: DisaggregatedInferenceSpec) -> str:
    """What ``vllm serve`` is given to load; the same string on both roles, since vLLM compares it."""
    source = spec.model.source
    if source is None:
        return spec.model.id or ""
    if source.pvc is not None:
        return f"{names.MODELS_DIRECTORY}/{source.pvc.path}".rstrip("/")
    return source.s3.uri if source.s3 is not None else ""


def has_own_store(spec: DisaggregatedInferenceSpec) -> bool:
    """Whether a server is made in which several routers, or workers of one, share their handles."""
    several = spec.router.replicas > 1 or spec.router.workers > 1
    return several and spec.router.handle_store.url is None


def router_tls(spec: DisaggregatedInferenceSpec) -> RouterTLS | None:
    """How the router speaks TLS to its clients; None where it does not."""
    return spec.security.tls.router if spec.security.tls is not None else None


def trusted_engines(spec: DisaggregatedInferenceSpec) -> EngineTLS | None:
    """Which engines with TLS the router trusts; None where it meets none."""
    return spec.security.tls.engines if spec.security.tls is not None else None


def engine_tls(spec: DisaggregatedInferenceSpec) -> EngineTLS | None:
    """How engines speak TLS to the router; None where they do not."""
    engines = trusted_engines(spec)
    return engines if engines is not None and engines.serve else None
