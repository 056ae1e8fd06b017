"""The model runner for CUDA in half precision. See ``epd.engine.model_runner`` for what a runner promises.

A step of decodes alone replays a graph of the next larger batch size; any other runs kernel by kernel. Inputs reach the
device in one copy through pinned memory, and results leave the same way while the engine goes on with its books.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from epd.cache.kv_cache import KVCache
from epd.engine.cuda.attention import VarlenBatch, VarlenKernel, VarlenLayers
from epd.engine.cuda.buckets import bucket_for, decode_buckets
from epd.engine.cuda.graphs import DecodeGraphs, Recorder
from epd.engine.cuda.inputs import decode_arrays, step_arrays
from epd.engine.cuda.staging import Downloads, Uploads
from epd.engine.model_runner import PendingLogits, StepLogits, put_all_embeddings
from epd.engine.sequence import EngineSequence
from epd.types import LanguageModel


@dataclass(frozen=True, slots=True)
class _OnItsWay:
    """Results that are being copied to the host."""

    downloads: Downloads
    values: torch.Tensor
    greedy_ids: torch.Tensor | None

    def wait(self) -> StepLogits:
        """See ``PendingLogits``: also a step without logits is waited for.

        What follows may free the step's blocks, and a transfer may write to freed blocks at once, on no stream.
        """
        self.downloads.wait()
        ids = None if self.greedy_ids is None else tuple(self.greedy_ids.tolist())
        return StepLogits(self.values, ids)


class CudaModelRunner:
    """Implements ``Runner``. Without a recorder no step is recorded, and all run kernel by kernel."""

    def __init__(
        self,
        model: LanguageModel,
        kv_cache: KVCache,
        kernel: VarlenKernel,
        recorder: Recorder | None,
        *,
        device: str,
        max_num_seqs: int,
        max_context_tokens: int,
    ) -> None:
        self.model = model
        self.kv_cache = kv_cache
        self._kernel = kernel
        self._uploads = Uploads(device)
        self._downloads = Downloads(device)
        self._no_rows = torch.empty(0, model.vocab_size)
        self._max_num_seqs = max_num_seqs
        self._max_blocks = min(kv_cache.num_blocks, -(-max_context_tokens // kv_cache.block_size))
        self._graphs: DecodeGraphs | None = None
        if recorder is not None:
            self._graphs = DecodeGraphs(
                self._decode, recorder, vocab_size=model.vocab_size, max_blocks=self._max_blocks, device=device
            )

    @torch.inference_mode()
    def start(
        self, num_tokens: Mapping[EngineSequence, int], logit_sequences: Sequence[EngineSequence], is_greedy: bool
    ) -> PendingLogits:
        """See ``Runner``."""
        graph = self._graph_for(num_tokens)
        if graph is not None:
            logits, greedy_ids = self._replay(*graph, list(num_tokens))
        else:
            logits = self._run_eagerly(num_tokens, logit_sequences)
            greedy_ids = logits.argmax(dim=-1)
        return self._leave(logits, greedy_ids, is_greedy)

    @torch.inference_mode()
    def copy_block(self, source: int, target: int) -> None:
        """See ``Runner``."""
        self.kv_cache.blocks[target].copy_(self.kv_cache.blocks[source])

    @torch.inference_mode()
    def capture_graphs(self) -> int:
        """See ``Runner``."""
        if self._graphs is None:
            return 0
        self._graphs.capture(decode_buckets(self._max_num_seqs), scratch_block=self.kv_cache.num_blocks)
        return len(self._graphs.buckets)

    def _graph_for(self, num_tokens: Mapping[EngineSequence, int]) -> tuple[DecodeGraphs, int] | None:
        """The graphs and the bucket that a step fits, if it is one of decodes alone.

        A chunk of one token is no decode: it may be a placeholder, whose embedding the graph knows nothing of.
        """
        if self._graphs is None or not all(sequence.is_decoding for sequence in num_tokens):
            return None
        block_size = self.kv_cache.block_size
        if any(sequence.num_computed_tokens >= self._max_blocks * block_size for sequence in num_tokens):
            return None
        bucket = bucket_for(len(num_tokens), self._graphs.buckets)
        return None if bucket is None else (self._graphs, bucket)

    def _replay(
        self, graphs: DecodeGraphs, bucket: int, sequences: Sequence[EngineSequence]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        arrays = decode_arrays(
            sequences,
            bucket,
            block_size=self.kv_cache.block_size,
            max_blocks=self._max_blocks,
            scratch_block=self.kv_cache.num_blocks,
        )
        logits, greedy_ids = graphs.replay(bucket, arrays, self._uploads)
        return logits[: len(sequences)], greedy_ids[: len(sequences)]

    def _run_eagerly(
        self, num_tokens: Mapping[EngineSequence, int], logit_sequences: Sequence[EngineSequence]
    ) -> torch.Tensor:
        arrays = step_arrays(num_tokens, logit_sequences, self.kv_cache.block_size)
        tensors = self._uploads.send(arrays)
        max_q, max_k = max(num_tokens.values()), int(arrays["context_lens"].max())
        layers = VarlenLayers(self.kv_cache.pages, VarlenBatch.of(tensors, max_q=max_q, max_k=max_k), self._kernel)
        hidden = self.model.embed(tensors["ids"])
        put_all_embeddings(hidden, num_tokens)
        hidden = self.model.forward(hidden, tensors["positions"], layers, layers)
        if not logit_sequences:
            return self._no_rows
        return self.model.logits(hidden[tensors["logit_rows"]])

    def _decode(self, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """One token a sequence, all of whose sizes are known without looking at the device."""
        batch = VarlenBatch.of(tensors, max_q=1, max_k=self._max_blocks * self.kv_cache.block_size)
        layers = VarlenLayers(self.kv_cache.pages, batch, self._kernel)
        hidden = self.model.forward(self.model.embed(tensors["ids"]), tensors["positions"], layers, layers)
        return self.model.logits(hidden)

    def _leave(self, logits: torch.Tensor, greedy_ids: torch.Tensor, is_greedy: bool) -> PendingLogits:
        """Start bringing to the host what will be looked at. A row of logits is as long as the vocabulary."""
        values, ids = self._no_rows, None
        if logits.shape[0] and is_greedy:
            ids = self._downloads.fetch("greedy_ids", greedy_ids)
        elif logits.shape[0]:
            values = self._downloads.fetch("logits", logits)
        self._downloads.mark()
        return _OnItsWay(self._downloads, values, ids)
