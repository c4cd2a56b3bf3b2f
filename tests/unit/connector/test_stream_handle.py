"""The pure part of the engine plug-in: which engines it touches, and what it does to the events of a stream."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import pytest
from hypothesis import given, strategies as st

from kvloop_connector.engine import stream_handle
from kvloop_connector.engine.stream_handle import FIELD, PATCHES, apply, carries_handles, fault, register, with_handle

HANDLE = {"remote_engine_id": "e", "remote_block_ids": [[1, 2]], "remote_num_tokens": 60, "do_remote_decode": True}
CHAT, COMPLETIONS = PATCHES


def event(chunk: dict[str, Any]) -> str:
    return f"data: {json.dumps(chunk, separators=(',', ':'))}\n\n"


def chunk_of(text: str) -> dict[str, Any]:
    return dict(json.loads(text.removeprefix("data: ")))


FINISH = event({"id": "c", "choices": [{"index": 0, "delta": {"content": "x"}, "finish_reason": "length"}]})


class TestSplicing:
    def test_finish_chunk_gets_the_handle_and_keeps_everything_else(self) -> None:
        spliced = with_handle(FINISH, HANDLE)

        assert spliced is not None
        assert spliced.endswith("}\n\n")
        assert chunk_of(spliced) == {**chunk_of(FINISH), FIELD: HANDLE}

    @pytest.mark.parametrize(
        "other",
        [
            "data: [DONE]\n\n",
            ": keep-alive\n\n",
            "data: {broken\n\n",
            "data: {broken}\n\n",
            event({"choices": [], "usage": {"total_tokens": 3}}),
            event(
                {"choices": [{"index": 0, "delta": {"content": 'say "finish_reason":"stop"'}, "finish_reason": None}]}
            ),
            event({"choices": [{"index": 0, "text": "no reason yet"}]}),
            event({"error": {"message": "Internal server error", "code": 500}}),
            event({"choices": None}),
        ],
    )
    def test_other_events_are_left_alone(self, other: str) -> None:
        assert with_handle(other, HANDLE) is None

    def test_chunk_that_has_a_handle_already_is_left_alone(self) -> None:
        chunk = {"choices": [{"finish_reason": "stop"}], FIELD: {"mine": 1}}

        assert with_handle(event(chunk), HANDLE) is None

    def test_handle_that_is_not_json_is_left_out_and_said(self, caplog: pytest.LogCaptureFixture) -> None:
        assert with_handle(FINISH, {"strange": object()}) is None
        assert "without its KV handle" in caplog.text

    @given(st.text(), st.dictionaries(st.text(), st.text() | st.integers() | st.none()))
    def test_splicing_equals_parsing_and_dumping(self, content: str, handle: dict[str, Any]) -> None:
        chunk = {"choices": [{"delta": {"content": content}, "finish_reason": "stop"}], "model": content}

        spliced = with_handle(event(chunk), handle)

        assert spliced is not None
        assert chunk_of(spliced) == {**chunk, FIELD: handle}


@dataclass
class Result:
    """As much of vLLM's RequestOutput as is read."""

    text: str
    finished: bool = False
    kv_transfer_params: dict[str, Any] | None = None


class Model:
    """As much of a pydantic model as is read."""

    model_fields: ClassVar[dict[str, Any]] = {"choices": None}


def serving_module() -> ModuleType:
    """A stand-in for vLLM's chat serving module of before 0.33."""

    class OpenAIServingChat:
        closed = False

        async def chat_completion_stream_generator(
            self, request: object, result_generator: AsyncIterator[Result], model_name: str
        ) -> AsyncIterator[str]:
            try:
                async for result in result_generator:
                    reason = "length" if result.finished else None
                    yield event({"model": model_name, "choices": [{"text": result.text, "finish_reason": reason}]})
                yield event({"choices": [], "usage": {}})
                yield "data: [DONE]\n\n"
            finally:
                type(self).closed = True

    module = ModuleType(CHAT.module)
    vars(module).update(OpenAIServingChat=OpenAIServingChat, ChatCompletionStreamResponse=Model)
    return module


async def results(*items: Result) -> AsyncIterator[Result]:
    for item in items:
        yield item


class TestWrapping:
    async def test_stream_carries_the_handle_on_its_finish_chunk_only(self) -> None:
        module = serving_module()
        assert apply(CHAT, module)
        answer = module.OpenAIServingChat().chat_completion_stream_generator(
            None, result_generator=results(Result("a"), Result("b", True, HANDLE)), model_name="m"
        )

        events = [item async for item in answer]

        assert [FIELD in item for item in events] == [False, True, False, False]
        assert chunk_of(events[1])[FIELD] == HANDLE

    async def test_stream_without_a_handle_is_unchanged(self) -> None:
        plain, patched = serving_module(), serving_module()
        apply(CHAT, patched)

        streams = [
            [item async for item in module.OpenAIServingChat().chat_completion_stream_generator(None, given, "m")]
            for module, given in (
                (plain, results(Result("a"), Result("b", True))),
                (patched, results(Result("a"), Result("b", True))),
            )
        ]

        assert streams[0] == streams[1]

    async def test_closing_the_stream_closes_the_wrapped_generator(self) -> None:
        module = serving_module()
        apply(CHAT, module)
        answer = module.OpenAIServingChat().chat_completion_stream_generator(
            None, results(Result("a"), Result("b", True, HANDLE)), "m"
        )

        await anext(answer)
        await answer.aclose()

        assert module.OpenAIServingChat.closed

    async def test_items_of_completions_name_the_prompt_first(self) -> None:
        async def completion_stream_generator(self: object, result_generator: AsyncIterator[Any]) -> AsyncIterator[str]:
            async for index, result in result_generator:
                yield event({"choices": [{"index": index, "finish_reason": "stop" if result.finished else None}]})

        async def numbered() -> AsyncIterator[tuple[int, Result]]:
            yield 0, Result("a", True, {"of": 0})
            yield 1, Result("b", True, {"of": 1})

        module = ModuleType(COMPLETIONS.module)
        owner = type("OpenAIServingCompletion", (), {"completion_stream_generator": completion_stream_generator})
        vars(module).update(OpenAIServingCompletion=owner, CompletionStreamResponse=Model)
        assert apply(COMPLETIONS, module)

        events = [item async for item in owner().completion_stream_generator(numbered())]

        assert [chunk_of(item)[FIELD] for item in events] == [{"of": 0}, {"of": 1}]


class TestWhatIsNotTouched:
    def test_module_as_vllm_has_it_before_0_33_is_wrapped(self) -> None:
        assert fault(CHAT, serving_module()) is None

    def test_module_that_is_wrapped_already(self, caplog: pytest.LogCaptureFixture) -> None:
        module = serving_module()
        apply(CHAT, module)
        method = module.OpenAIServingChat.chat_completion_stream_generator

        assert not apply(CHAT, module)
        assert module.OpenAIServingChat.chat_completion_stream_generator is method
        assert "wrapped already" in caplog.text

    def test_method_that_is_gone(self) -> None:
        module = serving_module()
        del module.OpenAIServingChat.chat_completion_stream_generator

        assert fault(CHAT, module) == "the method is not there"

    def test_method_of_another_shape(self) -> None:
        module = serving_module()

        async def no_generator(self: object, result_generator: object) -> None: ...

        async def no_results(self: object) -> AsyncIterator[str]:
            yield ""

        module.OpenAIServingChat.chat_completion_stream_generator = no_generator
        assert fault(CHAT, module) == "it is not an asynchronous generator"
        module.OpenAIServingChat.chat_completion_stream_generator = no_results
        assert fault(CHAT, module) == "it takes no result_generator"

    def test_chunks_that_carry_the_handle_by_themselves(self) -> None:
        module = serving_module()
        vars(module)["ChatCompletionStreamResponse"] = SimpleNamespace(model_fields={FIELD: None})

        assert fault(CHAT, module) == f"ChatCompletionStreamResponse has {FIELD} already"


class TestVersions:
    @pytest.mark.parametrize("version", ["0.33.0", "0.33.0rc1", "0.40.2+cu130", "1.0.0"])
    def test_versions_that_need_no_plugin(self, version: str) -> None:
        assert carries_handles(version)

    @pytest.mark.parametrize("version", ["0.32.0", "0.32.0+cpu", "0.9.1", "dev", "", "v0.33.0"])
    def test_versions_that_do_not_carry_handles_or_cannot_be_read(self, version: str) -> None:
        assert not carries_handles(version)


@pytest.fixture
def vllm_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A package ``vllm`` with a version and serving modules of the shape of 0.32, as files to import."""
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    for name in [name for name in sys.modules if name.partition(".")[0] == "vllm"]:
        monkeypatch.delitem(sys.modules, name)
    for patch in PATCHES:
        path = tmp_path.joinpath(*patch.module.split(".")).with_suffix(".py")
        path.parent.mkdir(parents=True)
        path.write_text(
            f"class {patch.chunk_model}:\n    model_fields = {{}}\n"
            f"class {patch.class_name}:\n"
            f"    async def {patch.method}(self, result_generator):\n"
            "        async for _ in result_generator:\n            yield ''\n"
        )
    yield tmp_path
    for name in [name for name in sys.modules if name.partition(".")[0] == "vllm"]:
        del sys.modules[name]
    importlib.invalidate_caches()


def wrapped_after_import(package: Path, version: str) -> list[bool]:
    (package / "vllm" / "version.py").write_text(f"__version__ = {version!r}\n")
    importlib.invalidate_caches()
    register()
    register()
    found = []
    for patch in PATCHES:
        module = importlib.import_module(patch.module)
        found.append(hasattr(getattr(getattr(module, patch.class_name), patch.method), "__wrapped__"))
    return found


class TestRegistering:
    def test_serving_modules_are_wrapped_when_they_are_imported(self, vllm_package: Path) -> None:
        assert wrapped_after_import(vllm_package, "0.32.0") == [True, True]

    def test_serving_module_that_is_imported_already_is_wrapped_at_once(self, vllm_package: Path) -> None:
        module = importlib.import_module(CHAT.module)

        assert wrapped_after_import(vllm_package, "0.32.0+cpu") == [True, True]
        assert hasattr(module.OpenAIServingChat.chat_completion_stream_generator, "__wrapped__")

    def test_newer_vllm_is_left_alone(self, vllm_package: Path) -> None:
        assert wrapped_after_import(vllm_package, "0.33.0") == [False, False]

    @pytest.mark.parametrize("version", ["0.31.0", "0.32.1", "0.32.0rc2", "dev"])
    def test_version_it_was_not_tried_with_is_left_alone_and_said(
        self, vllm_package: Path, caplog: pytest.LogCaptureFixture, version: str
    ) -> None:
        assert wrapped_after_import(vllm_package, version) == [False, False]
        assert f"not tried with vLLM {version}" in caplog.text

    def test_it_speaks_below_the_loggers_that_vllm_shows(self) -> None:
        assert stream_handle.logger.name.startswith("vllm.")
