"""Every object name, label, port and path that kvloop puts on its children.

The router and the local node read pods by these; a contract test holds them together.
"""

from __future__ import annotations

from kvloop_connector.settings import Role

GROUP = "kvloop.io"
VERSION = "v1alpha1"
API_VERSION = f"{GROUP}/{VERSION}"
KIND = "DisaggregatedInference"
PLURAL = "disaggregatedinferences"
SINGULAR = "disaggregatedinference"
SHORT_NAME = "dinf"
CATEGORY = "kvloop"

MAXIMUM_NAME_LENGTH = 40
"""A StatefulSet's revision label, ``<name>-prefill-<10 hex>``, and its pods' host names have to stay below 64."""

ROUTER = "router"
STORE = "store"
ENGINE_CONTAINER = "engine"
ROUTER_CONTAINER = "router"
CONNECTOR_CONTAINER = "kvloop-connector"
"""The init container that brings kvloop's package into an engine's pod."""

TLS_CONTAINER = "kvloop-tls"
"""The init container that looks at an engine's certificate as routers will."""

LABEL_NAME = "app.kubernetes.io/name"
LABEL_MANAGED_BY = "app.kubernetes.io/managed-by"
LABEL_DEPLOYMENT = f"{GROUP}/deployment"
LABEL_ROLE = f"{GROUP}/role"
LABEL_KV_REVISION = f"{GROUP}/kv-revision"
LABEL_DRAINING = f"{GROUP}/draining"
ANNOTATION_TEMPLATE_VERSION = f"{GROUP}/engine-template-version"
ANNOTATION_CONFIG_HASH = f"{GROUP}/config-hash"
OWN_PREFIX = f"{GROUP}/"
OWN_LABELS = frozenset({LABEL_NAME, LABEL_MANAGED_BY})

ENGINE_PORT = 8000
SIDE_CHANNEL_PORT = 5600
ROUTER_PORT = 8000
ADMIN_PORT = 8081
STORE_PORT = 6379

ROUTER_CONFIG_DIRECTORY = "/etc/kvloop"
ROUTER_CONFIG_KEY = "router.yaml"
SECRET_DIRECTORY = "/etc/kvloop/secret"  # noqa: S105 (a path)
ADMIN_TOKEN_KEY = "admin-token"  # noqa: S105 (the name of a key)
DIGEST_KEY_KEY = "digest-key"
SEAL_KEY_KEY = "seal-key"
STORE_PASSWORD_KEY = "store-password"  # noqa: S105 (the name of a key)
STORE_SETTINGS_KEY = "store.conf"
STORE_CA_KEY = "store-ca"
STORE_DIRECTORY = "/etc/kvloop/store"
SEAL_DIRECTORY = "/etc/kvloop/seal"
CONNECTOR_DIRECTORY = "/opt/kvloop-connector"
API_KEYS_DIRECTORY = "/etc/kvloop/api-keys"
ROUTER_TLS_DIRECTORY = "/etc/kvloop/tls"
CERTIFICATE_KEY = "tls.crt"
PRIVATE_KEY_KEY = "tls.key"
AUTHORITY_KEY = "ca.crt"
ENGINE_TLS_DIRECTORY = "/etc/kvloop/tls"
ENGINE_CA_DIRECTORY = "/etc/kvloop/engine-ca"
ENGINES_DIRECTORY = "/var/run/kvloop"
ENGINES_FILE = f"{ENGINES_DIRECTORY}/engines.json"
MODELS_DIRECTORY = "/models"
CACHE_DIRECTORY = "/cache"


def engine_name(deployment: str, role: Role) -> str:
    """Name of a role's StatefulSet and headless Service."""
    return f"{deployment}-{role.value}"


def engine_server_name(deployment: str, namespace: str) -> str:
    """The name that engines' certificates have, where the resource does not say. It is below a namespace, so that an
    authority of several namespaces can tell them apart."""
    return f"{deployment}-engines.{namespace}.svc"


def router_name(deployment: str) -> str:
    """Name of the router's Deployment and of everything that belongs to it."""
    return f"{deployment}-{ROUTER}"


def store_name(deployment: str) -> str:
    """Name of the Deployment and the Service of the server in which routers share handles."""
    return f"{deployment}-{STORE}"


def selector(deployment: str, role: str) -> dict[str, str]:
    """The labels that select a role's pods; they never change over an object's life."""
    return {LABEL_DEPLOYMENT: deployment, LABEL_ROLE: str(role)}


def labels(deployment: str, role: str) -> dict[str, str]:
    """The labels of a role's objects and pods. Nothing of the resource's own labels is copied: a GitOps tool would
    take the children for its own."""
    return {LABEL_NAME: "kvloop", LABEL_MANAGED_BY: "kvloop-operator", **selector(deployment, role)}
