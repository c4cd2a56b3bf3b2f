"""Makes a tiny random-weight Llama with its tokenizer, for engines that run where no model can be downloaded.

Run with the Python of the engine environment (it has ``numpy`` and ``tokenizers``)::

    python tiny_model.py DIRECTORY [--parameters 3M] [--template append-only|strips-reasoning] [--seed 0]

What it says is nonsense, but it behaves as far as KV reuse can tell:

* every token it can choose depends on the whole context, so that wrong KV gives a wrong text;
* it answers only with whole words that begin with a space, which tokenize to the same ids again when the answer comes
  back as history; as with a trained model, a conversation that grows extends the very tokens that decode retained;
* it never chooses a special token, so that an answer ends by length or by the caller's own stop conditions.

The same arguments give the same bytes.
"""

from __future__ import annotations

import argparse
import json
import random
import struct
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

VOCABULARY = 2048
CONTEXT = 32768
HEAD_SIZE = 64
"""One of the head sizes of vLLM's CPU attention (``vllm/v1/attention/backends/cpu_attn.py``)."""

END = "<|end|>"
SPECIAL_TOKENS = (
    END,
    "<|pad|>",
    "<|system|>",
    "<|user|>",
    "<|assistant|>",
    "<|tool|>",
    "<|tools|>",
    "<think>",
    "</think>",
)


def _template(*, history: str, generation: str) -> str:
    """A chat template; ``history`` may change ``content`` before a message is rendered."""
    return (
        "{% if tools %}{{ '<|tools|>' + (tools | tojson) + '<|end|>' }}{% endif %}"
        "{% for message in messages %}{% set content = message['content'] or '' %}"
        + history
        + "{{ '<|' + message['role'] + '|>' + content }}"
        "{% if message['tool_calls'] %}{{ message['tool_calls'] | tojson }}{% endif %}{{ '<|end|>' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '" + generation + "' }}{% endif %}"
    )


TEMPLATES: Mapping[str, str] = {
    # A later turn's prompt begins with an earlier turn's prompt and answer, token by token.
    "append-only": _template(history="", generation="<|assistant|>"),
    # As most reasoning models do: an answer is begun inside <think>, and history leaves the reasoning out.
    "strips-reasoning": _template(
        history="{% if message['role'] == 'assistant' %}{% set content = content.split('</think>')[-1] %}{% endif %}",
        generation="<|assistant|><think>",
    ),
}


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of a Llama; heads and MLP follow from the hidden size."""

    hidden: int
    layers: int

    @property
    def heads(self) -> int:
        return self.hidden // HEAD_SIZE

    @property
    def kv_heads(self) -> int:
        return self.heads // 2

    @property
    def parameters(self) -> int:
        return sum(rows * columns for rows, columns in self.matrices().values())

    def matrices(self) -> dict[str, tuple[int, int]]:
        """Name and (rows, columns) of each weight matrix, in the order in which they are drawn."""
        hidden, kv = self.hidden, self.kv_heads * HEAD_SIZE
        matrices = {"model.embed_tokens.weight": (VOCABULARY, hidden), "lm_head.weight": (VOCABULARY, hidden)}
        for layer in range(self.layers):
            prefix = f"model.layers.{layer}"
            matrices |= {
                f"{prefix}.self_attn.q_proj.weight": (hidden, hidden),
                f"{prefix}.self_attn.k_proj.weight": (kv, hidden),
                f"{prefix}.self_attn.v_proj.weight": (kv, hidden),
                f"{prefix}.self_attn.o_proj.weight": (hidden, hidden),
                f"{prefix}.mlp.gate_proj.weight": (2 * hidden, hidden),
                f"{prefix}.mlp.up_proj.weight": (2 * hidden, hidden),
                f"{prefix}.mlp.down_proj.weight": (hidden, 2 * hidden),
            }
        return matrices

    def norms(self) -> list[str]:
        """Names of the RMS-norm vectors."""
        return ["model.norm.weight"] + [
            f"model.layers.{layer}.{which}.weight"
            for layer in range(self.layers)
            for which in ("input_layernorm", "post_attention_layernorm")
        ]


def shape_for(parameters: int) -> Shape:
    """The shape whose number of parameters is nearest to the one asked for."""
    step = 2 * HEAD_SIZE  # an even number of heads, so that half as many KV heads is a whole number
    candidates = [Shape(hidden, max(2, hidden // HEAD_SIZE)) for hidden in range(step, 32 * step, step)]
    return min(candidates, key=lambda shape: abs(shape.parameters - parameters))


def write_model(directory: Path, *, parameters: int = 3_000_000, template: str = "append-only", seed: int = 0) -> Shape:
    """Write model and tokenizer into ``directory``, which is made if it is not there; returns the shape chosen."""
    directory.mkdir(parents=True, exist_ok=True)
    shape = shape_for(parameters)
    sayable = _write_tokenizer(directory, template, seed)
    _write_config(directory, shape)
    _write_weights(directory / "model.safetensors", shape, sayable, seed)
    return shape


def corpus(seed: int) -> list[str]:
    """Lines of made-up words, in a reproducible order."""
    chance = random.Random(seed)  # noqa: S311  # words, not secrets
    onsets = ("b", "c", "d", "f", "g", "h", "l", "m", "n", "p", "r", "s", "t", "v", "br", "cl", "pr", "st", "tr")
    vowels = ("a", "e", "i", "o", "u", "ea", "ou")
    codas = ("", "n", "r", "s", "t", "l", "nd")
    words = sorted(
        {
            "".join(chance.choice(onsets) + chance.choice(vowels) for _ in range(syllables)) + chance.choice(codas)
            for syllables in (1, 2)
            for _ in range(700)
        }
    )
    lines = [" " + " ".join(chance.choices(words, k=12)) for _ in range(2000)]
    common = "the of and to in is you that it for on are as with they be at this have from one had by word but not what"
    return [*lines, *[f" {common}"] * 200]


def _write_tokenizer(directory: Path, template: str, seed: int) -> list[int]:
    """Train and write the tokenizer; returns the ids that the model may answer with."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus(seed), trainer)
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END,
        "pad_token": "<|pad|>",
        "model_max_length": CONTEXT,
        "clean_up_tokenization_spaces": False,
        "chat_template": TEMPLATES[template],
    }
    _write_json(directory / "tokenizer_config.json", settings)
    words = {token: tokenizer.decode([token]) for token in range(len(SPECIAL_TOKENS), tokenizer.get_vocab_size())}
    return [
        token
        for token, word in words.items()
        if word[:1] == " " and word[1:].isalpha() and tokenizer.encode(word, add_special_tokens=False).ids == [token]
    ]


def _write_config(directory: Path, shape: Shape) -> None:
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "float32",
        "vocab_size": VOCABULARY,
        "hidden_size": shape.hidden,
        "intermediate_size": 2 * shape.hidden,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": HEAD_SIZE,
        "hidden_act": "silu",
        "max_position_embeddings": CONTEXT,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "bos_token_id": None,
        "eos_token_id": SPECIAL_TOKENS.index(END),
        "pad_token_id": SPECIAL_TOKENS.index("<|pad|>"),
    }
    _write_json(directory / "config.json", config)


def _write_weights(path: Path, shape: Shape, sayable: Sequence[int], seed: int) -> None:
    """Write the weights in float32, in the safetensors format (a length, a JSON header, the raw tensors)."""
    import numpy as np

    sizes = {name: [rows, columns] for name, (rows, columns) in shape.matrices().items()}
    sizes |= {name: [shape.hidden] for name in shape.norms()}
    header: dict[str, Any] = {}
    offset = 0
    for name, size in sizes.items():
        length = 4 * int(np.prod(size))
        header[name] = {"dtype": "F32", "shape": size, "data_offsets": [offset, offset + length]}
        offset += length
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)

    chance = np.random.Generator(np.random.PCG64(seed))
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(encoded)) + encoded)
        for name, size in sizes.items():
            if len(size) == 1:
                file.write(np.ones(size, dtype="<f4").tobytes())
                continue
            matrix = chance.standard_normal(size, dtype=np.float32) * np.float32(_scale(name, size[1]))
            if name == "lm_head.weight":
                silent = np.setdiff1d(np.arange(VOCABULARY), np.asarray(sayable))
                matrix[silent] = 0.0  # a logit of 0 is never the greatest of a thousand
            file.write(matrix.astype("<f4").tobytes())


def _scale(name: str, columns: int) -> float:
    """Standard deviation of a matrix's entries.

    Sharp attention and strong values make what stands far back in the context decide the next word; with the usual
    small start values a random Llama repeats its last token, whatever came before.
    """
    if name == "model.embed_tokens.weight":
        return 1.0
    gain = 2.0 if "q_proj" in name or "k_proj" in name or "v_proj" in name or "o_proj" in name else 1.0
    return float(gain / columns**0.5)


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n")


def _number(text: str) -> int:
    """A number of parameters such as ``3M``, ``1.5B`` or ``3000000``."""
    factors = {"K": 10**3, "M": 10**6, "B": 10**9}
    factor = factors.get(text[-1:].upper(), 1)
    return int(float(text[:-1] if factor > 1 else text) * factor)


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; see the module's docstring."""
    parser = argparse.ArgumentParser(description="Make a tiny random-weight Llama with its tokenizer.")
    parser.add_argument("directory", type=Path)
    parser.add_argument("--parameters", type=_number, default=_number("3M"), help="about how many (3M, 100M)")
    parser.add_argument("--template", choices=sorted(TEMPLATES), default="append-only")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args(arguments)
    shape = write_model(given.directory, parameters=given.parameters, template=given.template, seed=given.seed)
    sys.stdout.write(
        f"{given.directory}: {shape.parameters:,} parameters, {shape.layers} layers of {shape.hidden}, float32\n"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
