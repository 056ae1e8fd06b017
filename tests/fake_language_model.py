"""A language model small enough to check by hand, which still goes through the real paged attention.

The value vector of a token is a fixed pseudo-random function of its embedding and its position; the query is zero, so
attention is the mean over the context. The next token is thus a function of exactly the set of (token, position) pairs
in the sequence's blocks: a lost, stale or foreign block changes it.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace

import numpy as np
import torch

from epd.engine.attention import PagedLayers, paged_attention
from epd.engine.sampler import SampleRow, sample
from epd.types import KVSpec, Request, RotaryPositions

HIDDEN = 8


class FakeLanguageModel:
    """Implements ``LanguageModel`` with one layer, two query heads and one KV head."""

    def __init__(self, vocab_size: int = 50, eos_token_ids: Sequence[int] = ()) -> None:
        generator = torch.Generator().manual_seed(7)
        self.kv_spec = KVSpec(1, 1, HIDDEN, "float32", 4)
        self.hidden_size = HIDDEN
        self.vocab_size = vocab_size
        self.weight_bytes = 0
        self.eos_token_ids = frozenset(eos_token_ids)
        self._table = torch.randn(vocab_size, HIDDEN, generator=generator)
        self._head = torch.randn(HIDDEN, vocab_size, generator=generator)
        self.steps: list[int] = []

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        return self._table[token_ids]

    def forward(
        self, hidden: torch.Tensor, positions: torch.Tensor, cache: PagedLayers, attention: PagedLayers
    ) -> torch.Tensor:
        self.steps.append(hidden.shape[0])
        value = self._value(hidden, positions)[None, None]
        cache.update(torch.zeros_like(value), value, 0)
        query = torch.zeros(1, 2, hidden.shape[0], HIDDEN)
        out, _ = paged_attention(SimpleNamespace(layer_idx=0), query, value, value, None, paged=attention)  # type: ignore[arg-type]
        return out[0, :, 0]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden @ self._head

    @staticmethod
    def _value(hidden: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        angle = positions.sum(0)[:, None] * torch.arange(1, HIDDEN + 1)
        return torch.sin(hidden * 3 + angle * 0.37) * 4

    def reference(
        self, request: Request, rotary: RotaryPositions, embeddings: Sequence[torch.Tensor] = (), choice: int = 0
    ) -> list[int]:
        """Output of one choice computed densely, one full pass a token."""
        params, num_prompt = request.sampling, request.num_prompt_tokens
        output = list(request.output_token_ids)
        while len(output) < params.max_tokens:
            tokens = [*request.prompt_token_ids, *output]
            hidden = self.embed(torch.tensor(tokens))
            for item, rows in zip(request.items, embeddings, strict=True):
                hidden[item.placeholder.offset : item.placeholder.end] = rows
            after = np.arange(num_prompt, len(tokens)) + rotary.delta
            positions = np.concatenate([rotary.positions, np.broadcast_to(after, (3, len(after)))], axis=1)
            mean = self._value(hidden, torch.from_numpy(positions)).mean(0, keepdim=True)
            row = SampleRow(0, params, choice, len(output), request.prompt_token_ids, output)
            output.append(sample(self.logits(mean), [row])[0].token_id)
            if output[-1] in self.eos_token_ids and not params.ignore_eos:
                break
        return output


def text_positions(num_tokens: int) -> RotaryPositions:
    """Positions of a prompt without media."""
    return RotaryPositions(np.broadcast_to(np.arange(num_tokens, dtype=np.int64), (3, num_tokens)), 0)
