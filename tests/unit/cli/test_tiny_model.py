"""The tiny model's files: reproducible, and with a tokenizer under which a conversation only grows."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from kvloop.tiny_model import SPECIAL_TOKENS, TEMPLATES, VOCABULARY, main, shape_for, write_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    write_model(directory)
    return directory


@pytest.fixture(scope="module")
def tokenizer(model: Path) -> Tokenizer:
    return Tokenizer.from_file(str(model / "tokenizer.json"))


def ids(tokenizer: Tokenizer, text: str) -> list[int]:
    return list(tokenizer.encode(text, add_special_tokens=False).ids)


def test_same_arguments_give_the_same_bytes(model: Path, tmp_path: Path) -> None:
    write_model(tmp_path)

    names = sorted(path.name for path in model.iterdir())
    assert names == ["config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"]
    assert all((model / name).read_bytes() == (tmp_path / name).read_bytes() for name in names)


def test_other_seed_gives_another_model(model: Path, tmp_path: Path) -> None:
    write_model(tmp_path, seed=1)

    assert (model / "model.safetensors").read_bytes() != (tmp_path / "model.safetensors").read_bytes()


@pytest.mark.parametrize(("asked", "least", "most"), [(3_000_000, 2e6, 5e6), (100_000_000, 7e7, 1.4e8)])
def test_size_is_about_the_one_asked_for(asked: int, least: float, most: float) -> None:
    shape = shape_for(asked)

    assert least < shape.parameters < most
    assert shape.heads % shape.kv_heads == 0


def test_weights_are_as_the_configuration_says(model: Path) -> None:
    raw = (model / "model.safetensors").read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    config = json.loads((model / "config.json").read_text())

    assert header["lm_head.weight"]["shape"] == [VOCABULARY, config["hidden_size"]]
    assert max(tensor["data_offsets"][1] for tensor in header.values()) == len(raw) - 8 - length
    assert f"model.layers.{config['num_hidden_layers'] - 1}.mlp.down_proj.weight" in header


@pytest.mark.parametrize("text", ["Grüße, 世界 🚀\n\tx = 1", "", " leading", "a\x00b"])
def test_any_text_survives_the_tokenizer(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(ids(tokenizer, text)) == text


def test_special_tokens_are_single_and_end_a_message(model: Path, tokenizer: Tokenizer) -> None:
    assert [ids(tokenizer, token) for token in SPECIAL_TOKENS] == [[number] for number in range(len(SPECIAL_TOKENS))]
    config = json.loads((model / "config.json").read_text())
    assert SPECIAL_TOKENS[config["eos_token_id"]] == "<|end|>"


def test_words_that_the_model_answers_with_tokenize_to_the_same_ids_again(model: Path, tokenizer: Tokenizer) -> None:
    answers = sayable(model)
    assert len(answers) > 500

    for start in range(0, len(answers) - 12, 12):
        spoken = answers[start : start + 12]
        history = f"<|assistant|>{tokenizer.decode(spoken)}<|end|>"
        assert ids(tokenizer, history)[1:-1] == spoken


def sayable(model: Path) -> list[int]:
    """Tokens whose row in the output matrix is not zero."""
    raw = (model / "model.safetensors").read_bytes()
    length = int.from_bytes(raw[:8], "little")
    tensor = json.loads(raw[8 : 8 + length])["lm_head.weight"]
    start, end = (8 + length + offset for offset in tensor["data_offsets"])
    rows = np.frombuffer(raw[start:end], dtype="<f4").reshape(tensor["shape"])
    return [int(row) for row in np.flatnonzero(np.abs(rows).sum(axis=1))]


def test_command_line_names_what_it_made(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path / "m"), "--parameters", "1M", "--template", "strips-reasoning", "--seed", "3"]) == 0

    assert "float32" in capsys.readouterr().out
    settings = json.loads((tmp_path / "m" / "tokenizer_config.json").read_text())
    assert settings["chat_template"] == TEMPLATES["strips-reasoning"]
