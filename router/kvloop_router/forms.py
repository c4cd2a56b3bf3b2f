"""Forms, such as an audio file with its settings. They are written anew, so that an engine reads in them what was
checked here, however the client wrote it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import aiohttp
from aiohttp import web

from kvloop_router.errors import RequestError
from kvloop_router.request import CONVERSATION_FIELD, parse_json, refuse_own_fields, require_model

_ARGUMENTS = "vllm_xargs"


async def checked(request: web.Request, models: frozenset[str]) -> tuple[bytes, str]:
    """The body and the content type to send on. Raises RequestError for what no client may send."""
    try:
        fields = await request.post()
    except (ValueError, LookupError, AssertionError) as error:
        raise RequestError("The body is not a valid form.") from error
    if not fields:
        raise RequestError("The body must be a form.")
    refuse_own_fields({name.strip(): value for name, value in fields.items()})
    for arguments in fields.getall(_ARGUMENTS, ()):
        if not isinstance(arguments, str):
            raise RequestError(f"'{_ARGUMENTS}' must be a JSON object.", param=_ARGUMENTS, code="invalid_type")
        refuse_own_fields({_ARGUMENTS: parse_json(arguments.encode("utf-8", "surrogatepass"))})
    for model in fields.getall("model", ()):
        require_model({"model": model}, models)
    return await _written(fields)


async def _written(fields: Mapping[str, Any]) -> tuple[bytes, str]:
    form = aiohttp.FormData(default_to_multipart=True)
    for name, value in fields.items():
        if isinstance(value, web.FileField):
            form.add_field(name, value.file.read(), filename=value.filename, content_type=value.content_type)
        elif name != CONVERSATION_FIELD:
            form.add_field(name, value if isinstance(value, str) else bytes(value))
    payload = form()
    return await payload.as_bytes(), payload.headers["Content-Type"]
