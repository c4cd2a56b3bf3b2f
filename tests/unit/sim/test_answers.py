"""Steps become text: stop strings are found, and nothing of them is sent."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hypothesis import given, strategies as st

from kvloop_sim import tokenizer
from kvloop_sim.answers import AnswerWriter, Choice, Delta, Detokenizer
from kvloop_sim.options import parse
from kvloop_sim.protocol import GenerationRequest, parse_generation
from kvloop_sim.records import Step

OPTIONS = parse(["serve", "m", "--max-model-len", "4096"], {})


def request(**fields: Any) -> GenerationRequest:
    return parse_generation({"messages": [{"role": "user", "content": "hi"}], **fields}, OPTIONS, chat=True)


def deltas(asked: GenerationRequest, tokens: Sequence[int], finish: str = "length") -> list[Delta]:
    """What is sent for ``tokens``, until it ends."""
    detokenizer, sent = Detokenizer(asked), []
    for index, token in enumerate(tokens):
        last = index == len(tokens) - 1
        sent.append(detokenizer.feed(Step(token, finish if last else None)))
        if sent[-1].finish:
            break
    return sent


def writer(asked: GenerationRequest, *, handles: bool = True, nulls: bool = True) -> AnswerWriter:
    return AnswerWriter(
        request=asked, answer_id="chatcmpl-1", created=1, handles_in_streams=handles, null_handles=nulls
    )


@given(st.integers(1, 30), st.integers(0, 29), st.integers(1, 3), st.booleans())
def test_stop_string_is_cut_wherever_it_is(count: int, at: int, words: int, include: bool) -> None:
    texts = [f" w{number:02d}" for number in range(count)]
    stop = "".join(texts[at : at + words])[1:-1] or "never"
    whole = "".join(texts)
    asked = request(stop=[stop], include_stop_str_in_output=include)

    sent = deltas(asked, [token for text in texts for token in tokenizer.encode(text)])

    found = whole.find(stop)
    text = "".join(delta.text for delta in sent)
    if found < 0:
        assert (text, sent[-1].finish, sent[-1].stop_reason) == (whole, "length", None)
    else:
        assert text == whole[: found + len(stop) if include else found]
        assert (sent[-1].finish, sent[-1].stop_reason) == ("stop", stop)


def test_stop_string_before_min_tokens_is_not_looked_for() -> None:
    tokens = tokenizer.encode(" one two six")

    assert "".join(delta.text for delta in deltas(request(stop=["one"], min_tokens=1), tokens)) == " one two six"


def test_end_token_has_no_text() -> None:
    sent = deltas(request(), [*tokenizer.encode("yes"), tokenizer.MESSAGE_END], finish="stop")

    assert [delta.text for delta in sent] == ["yes", ""]
    assert sent[-1].token_ids == (tokenizer.MESSAGE_END,)


def test_handle_is_on_the_finish_chunk_only_where_the_version_gives_it() -> None:
    asked = request(stream=True)
    last = Delta("x", (5,), "stop", None, {"do_remote_decode": True})
    middle = Delta("x", (5,))

    assert writer(asked).delta_chunk(0, last, (1,), 2)["kv_transfer_params"] == {"do_remote_decode": True}
    assert writer(asked).delta_chunk(0, middle, (1,), 1)["kv_transfer_params"] is None
    before_033 = writer(asked, handles=False, nulls=False)
    assert "kv_transfer_params" not in before_033.delta_chunk(0, last, (1,), 2)
    assert "token_ids" in before_033.delta_chunk(0, middle, (1,), 1)["choices"][0]


def test_token_ids_are_given_where_they_were_asked_for() -> None:
    asked = request(stream=True, return_token_ids=True)

    assert writer(asked).role_chunk(0, (1, 2))["prompt_token_ids"] == [1, 2]
    assert writer(asked).delta_chunk(0, Delta("x", (5,)), (1, 2), 1)["choices"][0]["token_ids"] == [5]


def test_several_samples_give_one_handle() -> None:
    prompt = (1, 2)
    first, second = Choice(prompt, handle={"a": 1}, finish="stop"), Choice(prompt, handle={"b": 1}, finish="stop")
    body = writer(request(n=2)).whole([first, second])

    assert body["kv_transfer_params"] == {"b": 1}
    assert body["usage"]["prompt_tokens"] == 2
    assert [choice["index"] for choice in body["choices"]] == [0, 1]


LIKELY = tuple((tokenizer.encode(f" w{number:02d}")[0], -1.0 - number) for number in range(25))


def answered(asked: GenerationRequest) -> Any:
    """The choice of a whole answer whose only token was the fourth likeliest."""
    step = Step(LIKELY[3][0], "length", likely=LIKELY)
    choice = Choice((1,))
    choice.add(Detokenizer(asked).feed(step))
    (whole,) = writer(asked).whole([choice])["choices"]
    return whole


def test_chat_tells_the_likeliest_tokens_and_the_one_it_chose() -> None:
    (told,) = answered(request(logprobs=True, top_logprobs=2))["logprobs"]["content"]

    assert (told["token"], told["logprob"], told["bytes"]) == (" w03", -4.0, list(b" w03"))
    # The chosen one comes first, as from vLLM, and counts.
    assert [each["token"] for each in told["top_logprobs"]] == [" w03", " w00"]


def test_completion_tells_one_token_more_where_an_unlikely_one_was_chosen() -> None:
    asked = parse_generation({"prompt": "hi", "logprobs": 2}, OPTIONS, chat=False)

    told = answered(asked)["logprobs"]

    assert told["top_logprobs"] == [{" w03": -4.0, " w00": -1.0, " w01": -2.0}]
    assert told["token_logprobs"] == [-4.0]


def test_tokens_are_told_as_ids_where_that_is_asked_for() -> None:
    (told,) = answered(request(logprobs=True, top_logprobs=1, return_tokens_as_token_ids=True))["logprobs"]["content"]

    assert told["top_logprobs"][0]["token"] == f"token_id:{LIKELY[3][0]}"


def test_no_logprobs_are_told_unasked() -> None:
    assert answered(request())["logprobs"] is None
