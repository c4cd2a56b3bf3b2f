"""How long the simulated engine takes, as pure functions of token counts.

The defaults follow the published multi-turn curves for Qwen3-32B on two p5en.48xlarge over EFA (prefill legs 153 ms at
2 k to 744 ms at 24 k tokens cold, 128 to 414 ms with reuse, transfers 30 to 130 ms). ``context`` has a term of its
own because a suffix of constant length was seen to cost more the longer the context before it.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class TimingModel:
    """Coefficients, in seconds, bytes and tokens.

    scale multiplies every duration; 0 means no waiting.
    """

    prefill_base: float = 0.051
    prefill_per_token: float = 16.3e-6
    prefill_per_context_token: float = 8.0e-6
    prefill_per_token_and_context_token: float = 0.2e-9
    decode_base: float = 0.010
    decode_per_sequence: float = 0.0002
    decode_per_context_token: float = 60e-9
    transfer_base: float = 0.005
    transfer_bytes_per_second: float = 54e9
    bytes_per_token: int = 262_144
    handshake: float = 0.5
    handshake_timeout: float = 5.0
    scale: float = 1.0

    def prefill_seconds(self, tokens: int, context: int) -> float:
        """To compute ``tokens`` upon ``context`` tokens whose KV is there. A single token is a decode step."""
        if tokens <= 1:
            return self.decode_seconds(1, context)
        # Token i of the suffix attends to context + i tokens.
        attended = context + tokens / 2
        seconds = (
            self.prefill_base
            + tokens * self.prefill_per_token
            + (context + tokens) * self.prefill_per_context_token
            + tokens * attended * self.prefill_per_token_and_context_token
        )
        return seconds * self.scale

    def decode_seconds(self, sequences: int, context: int) -> float:
        """One decode step with ``sequences`` running, for one of ``context`` tokens: the inter-token latency."""
        seconds = self.decode_base + sequences * self.decode_per_sequence + context * self.decode_per_context_token
        return seconds * self.scale

    def transfer_bytes(self, tokens: int) -> int:
        """The KV of ``tokens`` tokens."""
        return tokens * self.bytes_per_token

    def transfer_seconds(self, tokens: int) -> float:
        """To read the KV of ``tokens`` tokens from another engine."""
        seconds = self.transfer_base + self.transfer_bytes(tokens) / self.transfer_bytes_per_second
        return seconds * self.scale
