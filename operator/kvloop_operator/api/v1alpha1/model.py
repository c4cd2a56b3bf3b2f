"""Which model is served, and where its weights come from."""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import Field

from kvloop_operator.api.v1alpha1.base import AbsolutePath, ObjectName, Part, Quantity, Rule, ShortText, defaulted
from kvloop_operator.api.v1alpha1.kubernetes import LocalReference, SecretKeyRef
from kvloop_operator.api.v1alpha1.patterns import HTTP_URL, MODEL_ID, MODEL_PATH, REGION, S3_URI, SERVED_NAME


class PVCSource(Part):
    """Weights on a volume that both roles can mount."""

    claim_name: ObjectName
    """PersistentVolumeClaim in the resource's namespace; mounted read-only."""
    path: Annotated[str, Field(max_length=512, pattern=MODEL_PATH)] = ""
    """Directory of the model below the root of the volume; empty means the root."""


class S3Source(Part):
    """Weights in an S3 bucket, streamed to the accelerator by the run:ai streamer, which the image has to carry."""

    uri: Annotated[str, Field(min_length=6, max_length=1024, pattern=S3_URI)]
    """Directory of the model, as in ``s3://bucket/models/qwen3-32b``."""
    region: Annotated[str, Field(min_length=1, max_length=32, pattern=REGION)] | None = None
    endpoint_url: Annotated[str, Field(max_length=512, pattern=HTTP_URL)] | None = None
    """For S3-compatible stores."""
    credentials_secret_ref: LocalReference | None = None
    """Secret with the keys AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY. Leave it out where the service account has an
    IAM role."""


class ModelSource(Part):
    """Where the weights come from; exactly one."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            cel="has(self.pvc) != has(self.s3)",
            holds=lambda it: (it.pvc is None) != (it.s3 is None),
            field="",
            fault="exactly one of pvc and s3 is needed",
            remedy="keep one of them",
        ),
    )
    pvc: PVCSource | None = None
    s3: S3Source | None = None


class ModelCache(Part):
    """Where weights from Hugging Face are kept. Default: on the node's disk, for the life of a pod."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            cel="[has(self.claimName), has(self.hostPath), has(self.sizeLimit)].filter(set, set).size() <= 1",
            holds=lambda it: sum(x is not None for x in (it.claim_name, it.host_path, it.size_limit)) <= 1,
            field="",
            fault="more than one of claimName, hostPath and sizeLimit is set",
            remedy="keep one of them",
        ),
    )
    claim_name: ObjectName | None = None
    """PersistentVolumeClaim, ReadWriteMany where more than one pod uses it."""
    host_path: AbsolutePath | None = None
    """Directory of the node, for example on its local NVMe disk."""
    size_limit: Quantity | None = None
    """Limit of the pod's own directory."""


class Model(Part):
    """The model that both roles serve, under one string: vLLM compares it when two engines shake hands."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            cel="has(self.id) || has(self.source)",
            holds=lambda it: it.id is not None or it.source is not None,
            field="id",
            fault="neither id nor source is set",
            remedy="set id to a Hugging Face model, or source to where the weights are",
        ),
        Rule(
            cel="has(self.id) || has(self.servedName)",
            holds=lambda it: it.id is not None or it.served_name is not None,
            field="servedName",
            fault="a model without id needs a name that clients ask for",
            remedy="set servedName",
        ),
        Rule(
            cel="!has(self.revision) || !has(self.source)",
            holds=lambda it: it.revision is None or it.source is None,
            field="revision",
            fault="a revision is of a Hugging Face model, and source is set",
            remedy="remove revision or source",
        ),
    )
    id: Annotated[str, Field(min_length=1, max_length=253, pattern=MODEL_ID)] | None = None
    """Hugging Face model id, or a directory in the image. With source: only a name."""
    served_name: Annotated[str, Field(min_length=1, max_length=253, pattern=SERVED_NAME)] | None = None
    """The name that clients ask for. Default: id."""
    revision: ShortText | None = None
    """Branch, tag or commit of the Hugging Face model."""
    token_secret_ref: SecretKeyRef | None = None
    """Hugging Face token, for gated models."""
    source: ModelSource | None = None
    """Weights from elsewhere than Hugging Face."""
    cache: ModelCache = defaulted(ModelCache)
    """Where weights from Hugging Face are kept."""
    kv_heads: Annotated[int, Field(ge=1, le=1024)] | None = None
    """Number of KV heads of a model without multi-head latent attention. Where given, tensor-parallel sizes are checked
    against it."""
