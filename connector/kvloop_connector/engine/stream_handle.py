"""vLLM plug-in: the KV handle on the finish chunk of streamed answers, where the API server leaves it out.

vLLM before 0.33 returns ``kv_transfer_params`` only in whole answers. This entry point of the group
``vllm.general_plugins`` wraps the two generators that make the events of a stream. It is loaded in every process of an
engine; the wrapping happens when the serving modules are imported, which only API servers do.

On 0.33 and later it does nothing; on a version with which it was not tried it does nothing either and says so.
"""

from __future__ import annotations

import functools
import inspect
import json
import logging
import sys
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

# vLLM configures handlers for its own loggers only.
logger = logging.getLogger("vllm.kvloop.stream_handle")

TRIED_VERSIONS = frozenset({"0.32.0"})
"""vLLM versions on which the tests of this plug-in ran."""

FIRST_WITH_HANDLES = (0, 33)
"""The vLLM release from which on streams carry the handle by themselves (``chat_completion/serving.py:821``)."""

FIELD = "kv_transfer_params"
_EVENT = "data: "


@dataclass(frozen=True, slots=True)
class Patch:
    """One generator method to wrap.

    result_of: the request output in an item of the generator's ``result_generator``.
    """

    module: str
    class_name: str
    method: str
    chunk_model: str
    result_of: Callable[[Any], Any]


PATCHES = (
    Patch(
        module="vllm.entrypoints.openai.chat_completion.serving",
        class_name="OpenAIServingChat",
        method="chat_completion_stream_generator",
        chunk_model="ChatCompletionStreamResponse",
        result_of=lambda item: item,
    ),
    Patch(
        module="vllm.entrypoints.openai.completion.serving",
        class_name="OpenAIServingCompletion",
        method="completion_stream_generator",
        chunk_model="CompletionStreamResponse",
        # One stream may answer several prompts; an item names the prompt's index first.
        result_of=lambda item: item[1],
    ),
)


def register() -> None:
    """The entry point. May be called more than once in a process."""
    from vllm.version import __version__ as version

    if carries_handles(version):
        logger.debug("vLLM %s puts KV handles on streamed answers itself", version)
        return
    if version.partition("+")[0] not in TRIED_VERSIONS:
        logger.warning("Streamed answers carry no KV handle: kvloop's plug-in was not tried with vLLM %s", version)
        return
    awaited = {patch.module: patch for patch in PATCHES if patch.module not in sys.modules}
    for patch in PATCHES:
        if patch.module not in awaited:
            apply(patch, sys.modules[patch.module])
    if awaited and not any(isinstance(finder, _PatchAfterImport) for finder in sys.meta_path):
        sys.meta_path.insert(0, _PatchAfterImport(awaited))


def carries_handles(version: str) -> bool:
    """Whether this vLLM version puts the handle on streamed answers by itself. False where it cannot be read."""
    parts = version.split(".")[:2]
    if len(parts) < 2 or not all(part.isdecimal() for part in parts):
        return False
    return tuple(int(part) for part in parts) >= FIRST_WITH_HANDLES


def fault(patch: Patch, module: ModuleType) -> str | None:
    """Why the method in ``module`` cannot be wrapped, or None where it can."""
    method = getattr(getattr(module, patch.class_name, None), patch.method, None)
    if method is None:
        return "the method is not there"
    if hasattr(method, "__wrapped__"):
        return "it is wrapped already"
    if not inspect.isasyncgenfunction(method):
        return "it is not an asynchronous generator"
    if "result_generator" not in inspect.signature(method).parameters:
        return "it takes no result_generator"
    fields = getattr(getattr(module, patch.chunk_model, None), "model_fields", None)
    if fields is None:
        return f"{patch.chunk_model} is not there"
    if FIELD in fields:
        return f"{patch.chunk_model} has {FIELD} already"
    return None


def apply(patch: Patch, module: ModuleType) -> bool:
    """Wrap the method in ``module``; returns whether it was wrapped, and logs why where it was not."""
    reason = fault(patch, module)
    if reason is not None:
        logger.warning("%s.%s is left as it is: %s", patch.class_name, patch.method, reason)
        return False
    owner = getattr(module, patch.class_name)
    setattr(owner, patch.method, wrapped(getattr(owner, patch.method), patch.result_of))
    logger.info("Streamed answers of %s carry the KV handle", patch.class_name)
    return True


def wrapped(generator: Callable[..., Any], result_of: Callable[[Any], Any]) -> Callable[..., Any]:
    """``generator``, with the handle of its ``result_generator`` added to the finish chunk of what it yields."""
    signature = inspect.signature(generator)

    @functools.wraps(generator)
    async def with_handles(*args: Any, **kwargs: Any) -> AsyncIterator[Any]:
        bound = signature.bind(*args, **kwargs)
        tap = _Tap(bound.arguments["result_generator"], result_of)
        bound.arguments["result_generator"] = tap
        async with aclosing(generator(*bound.args, **bound.kwargs)) as events:
            async for event in events:
                if tap.params is not None:
                    spliced = with_handle(event, tap.params)
                    if spliced is not None:
                        tap.params = None
                        yield spliced
                        continue
                yield event

    return with_handles


def with_handle(event: str, params: Mapping[str, Any]) -> str | None:
    """The event of a finish chunk with ``params`` added; None for any other event, and where it cannot be added."""
    body = event.removeprefix(_EVENT).strip()
    if not event.startswith(_EVENT) or not body.endswith("}"):
        return None
    try:
        chunk = json.loads(body)
        encoded = json.dumps(params, separators=(",", ":"))
    except (TypeError, ValueError) as error:
        logger.warning("A streamed answer goes without its KV handle: %s", error)
        return None
    if FIELD in chunk or not _finishes(chunk.get("choices")):
        return None
    return f'{_EVENT}{body[:-1]},"{FIELD}":{encoded}}}\n\n'


def _finishes(choices: object) -> bool:
    if not isinstance(choices, Sequence):
        return False
    return any(isinstance(choice, Mapping) and choice.get("finish_reason") is not None for choice in choices)


class _Tap:
    """Passes results on and remembers the handle of the latest one that has any.

    An iterator and not a generator: what closes or forgets it acts on the engine's own generator as if it were not
    there, so that a client that leaves aborts its request as before.
    """

    __slots__ = ("_result_of", "_results", "params")

    def __init__(self, results: AsyncIterator[Any], result_of: Callable[[Any], Any]) -> None:
        self._results = results
        self._result_of = result_of
        self.params: Mapping[str, Any] | None = None

    def __aiter__(self) -> _Tap:
        return self

    async def __anext__(self) -> Any:
        item = await anext(self._results)
        params = getattr(self._result_of(item), FIELD, None)
        if params:
            self.params = params
        return item


class _PatchAfterImport(MetaPathFinder):
    """Applies a patch right after its module is imported."""

    def __init__(self, awaited: Mapping[str, Patch]) -> None:
        self._awaited = dict(awaited)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        patch = self._awaited.get(fullname)
        if patch is None:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def execute_and_patch(module: ModuleType) -> None:
            execute(module)
            if self._awaited.pop(fullname, None):
                apply(patch, module)

        spec.loader.exec_module = execute_and_patch  # type: ignore[method-assign]
        return spec
