"""Patterns of the resource's texts, each with what it asks for in words.

They mean the same in RE2 (the API server), in Rust's regular expressions (pydantic) and in Python's.
"""

from __future__ import annotations

from collections.abc import Mapping

from kvloop_operator.engine_versions import VERSION_PATTERN

ABSOLUTE_PATH = r"^/"
DNS_LABEL = r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$"
DNS_SUBDOMAIN = r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$"
ENV_NAME = r"^[A-Za-z_][A-Za-z0-9_.-]*$"
HEADER_NAME = r"^[A-Za-z0-9!#$%&'*+.^_`|~-]+$"
HTTP_URL = r"^https?://"
IMAGE = r"^[^\s]+$"
INSTANCE_TYPE = r"^[a-z0-9][a-z0-9.-]*$"
KEY = r"^[-._a-zA-Z0-9]+$"
KV_CACHE_DTYPE = r"^[a-z0-9_]+$"
MODEL_ID = r"^[A-Za-z0-9/][A-Za-z0-9._/-]*$"
MODEL_PATH = r"^([A-Za-z0-9_-][A-Za-z0-9._-]*(/[A-Za-z0-9_-][A-Za-z0-9._-]*)*)?$"
REGION = r"^[a-z0-9-]+$"
S3_URI = r"^s3://[a-z0-9][a-z0-9.-]+(/[^/].*)?$"
SERVED_NAME = r"^[A-Za-z0-9._:/-]+$"
STORE_URL = r"^(redis|rediss|valkey|valkeys)://[^\s/?#]+(/[0-9]*)?$"
TEMPLATE_VERSION = r"^[0-9]+$"

FORMS: Mapping[str, str] = {
    ABSOLUTE_PATH: "a path that starts with /",
    DNS_LABEL: "lower-case letters, digits and dashes",
    DNS_SUBDOMAIN: "lower-case letters, digits, dashes and dots",
    ENV_NAME: "letters, digits, underscores, dots and dashes",
    HEADER_NAME: "a header's name, without space or colon",
    HTTP_URL: "an http or https URL",
    IMAGE: "an image reference without spaces",
    INSTANCE_TYPE: "an instance type, as p5en.48xlarge",
    KEY: "letters, digits, underscores, dots and dashes",
    KV_CACHE_DTYPE: "a type, as fp8_e4m3",
    MODEL_ID: "a model id, as Qwen/Qwen3-32B",
    MODEL_PATH: "a relative path in which no name starts with a dot",
    REGION: "a region, as us-west-2",
    S3_URI: "s3://BUCKET/DIRECTORY",
    SERVED_NAME: "letters, digits, dots, dashes, underscores, colons and slashes",
    STORE_URL: "valkey://HOST:PORT or redis://HOST:PORT",
    TEMPLATE_VERSION: "a whole number, in quotes",
    VERSION_PATTERN: "a version, as 0.33.0",
}
