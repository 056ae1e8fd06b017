"""The vocabulary of the system: requests, media, placements, handles, and the small protocols that others implement.

Plain frozen data that is cheap to pickle, plus protocols. Knows nothing of HTTP, Ray, schedulers or files. Torch
appears in annotations only, so importing this module does not load it.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import numpy as np
    import torch
    from PIL import Image

# --------------------------------------------------------------------------------------------------------------------
# Stages and placements
# --------------------------------------------------------------------------------------------------------------------


class Stage(StrEnum):
    """One of the three parts of a request's work."""

    ENCODE = "encode"
    PREFILL = "prefill"
    DECODE = "decode"


class Mode(StrEnum):
    """The shape of a placement. ``AUTO`` asks the router to choose; a placement never carries it."""

    AUTO = "auto"
    AGGREGATED = "aggregated"
    E_PD = "e_pd"
    EP_D = "ep_d"
    EPD = "epd"

    @property
    def splits_encode(self) -> bool:
        """Whether encode runs in another replica than prefill."""
        return self in (Mode.E_PD, Mode.EPD)

    @property
    def splits_decode(self) -> bool:
        """Whether decode runs in another replica than prefill."""
        return self in (Mode.EP_D, Mode.EPD)


@dataclass(frozen=True, slots=True)
class Placement:
    """Which replica runs each stage of one request, and why.

    ``encode`` names one replica per media item, in prompt order; an item encoded where it is prefilled names the
    prefill replica. It is empty for a text-only request.
    """

    mode: Mode
    prefill: str
    decode: str
    encode: tuple[str, ...] = ()
    reason: str = ""


@dataclass(frozen=True, slots=True)
class SLO:
    """What a request wants: seconds to the first token, and seconds between consecutive tokens (its own p99 gap)."""

    ttft_s: float
    itl_s: float


# --------------------------------------------------------------------------------------------------------------------
# Requests
# --------------------------------------------------------------------------------------------------------------------


class Modality(StrEnum):
    IMAGE = "image"
    VIDEO = "video"


class FinishReason(StrEnum):
    """Why a choice ended. An aborted or failed request ends in an exception, never in a finish reason."""

    STOP = "stop"
    LENGTH = "length"


@dataclass(frozen=True, slots=True)
class PlaceholderRange:
    """Where a media item's embeddings stand in the prompt: tokens ``[offset, offset + num_tokens)``."""

    offset: int
    num_tokens: int

    @property
    def end(self) -> int:
        return self.offset + self.num_tokens


@dataclass(frozen=True, slots=True)
class MediaItem:
    """One image or clip of a prompt, described without its pixels.

    ``mm_hash`` keys everything that changes the embedding: the encoded bytes, the processor's settings, ``detail``,
    the timestamps taken, and the model's revision. ``grid_thw`` counts patches (time, height, width) before merging.
    ``timestamps_s`` are those of a clip's sampled frames, empty for an image. ``param`` names the part of the request
    body, for error messages.
    """

    index: int
    modality: Modality
    mm_hash: str
    placeholder: PlaceholderRange
    grid_thw: tuple[int, int, int]
    timestamps_s: tuple[float, ...] = ()
    param: str = ""

    @property
    def num_tokens(self) -> int:
        return self.placeholder.num_tokens

    @property
    def num_patches(self) -> int:
        return self.grid_thw[0] * self.grid_thw[1] * self.grid_thw[2]


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to choose output tokens. Stop strings are absent: the ingress applies them to the text.

    ``temperature`` 0 is greedy. ``seed`` is always set for a sampled request (the ingress draws one when the client
    gave none), because noise is a hash of (seed, choice, output position) and must not depend on where a token is made.
    ``logit_bias`` maps a token id to an addend. ``num_logprobs`` is ``None`` for no logprobs, else how many
    alternatives to report beside the chosen token.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int = 0
    n: int = 1
    max_tokens: int = 16
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    num_logprobs: int | None = None

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0


@dataclass(frozen=True, slots=True)
class Request:
    """A validated request as every stage sees it: token ids and descriptions, no text and no pixels.

    ``prompt_token_ids`` has placeholders expanded. ``output_token_ids`` is non-empty for a request that resumes after
    its decode replica was lost or gave it back: those tokens were already streamed, count against ``max_tokens``, and
    are prefilled as if they were prompt. ``first_choice`` offsets choice indexes when one of several is resumed alone.
    ``deadline_s`` is a wall-clock time (``time.time``), since it is compared in several processes.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    items: tuple[MediaItem, ...] = ()
    output_token_ids: tuple[int, ...] = ()
    first_choice: int = 0
    deadline_s: float | None = None
    priority: int = 0

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)

    @property
    def num_prefill_tokens(self) -> int:
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    def resume_choice(self, choice: int, output_token_ids: Sequence[int]) -> Request:
        """Return the request that goes on with one choice after the tokens already streamed for it."""
        return replace(
            self,
            sampling=replace(self.sampling, n=1),
            output_token_ids=tuple(output_token_ids),
            first_choice=choice,
        )


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """The log probability of one output token, with the most likely alternatives as (token id, logprob)."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class StageReport:
    """What a leg of a request took: seconds by name, bytes by kind, cache hits by kind. Reports add up.

    Names of ``timings_s``: fetch, preprocess, encode_queue, encode, embedding_transfer, prefill_queue, prefill,
    kv_transfer, decode. Of ``transferred_bytes``: embedding, kv. Of ``cached``: prefix_tokens, embedding_items.
    """

    timings_s: Mapping[str, float] = field(default_factory=dict)
    transferred_bytes: Mapping[str, int] = field(default_factory=dict)
    cached: Mapping[str, int] = field(default_factory=dict)

    def __add__(self, other: StageReport) -> StageReport:
        def add(a: Mapping[str, Any], b: Mapping[str, Any]) -> dict[str, Any]:
            return {name: a.get(name, 0) + b.get(name, 0) for name in [*a, *(key for key in b if key not in a)]}

        return StageReport(
            add(self.timings_s, other.timings_s),
            add(self.transferred_bytes, other.transferred_bytes),
            add(self.cached, other.cached),
        )


@dataclass(frozen=True, slots=True)
class TokenChunk:
    """Consecutive new tokens of one choice. ``report`` comes on the first chunk and on the last one of a leg.

    The token that ended a choice with ``STOP`` is included: it counts as output and is no part of the text.
    """

    choice: int
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None
    logprobs: tuple[TokenLogprob, ...] = ()
    report: StageReport | None = None


# --------------------------------------------------------------------------------------------------------------------
# Hand-over between stages
# --------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class EmbeddingHandle:
    """A claim on one media item's embedding in its owner's memory.

    The owner (a replica id) keeps the memory until release or until ``lease_s`` seconds of its own clock have passed
    without a renewal. ``layout`` fingerprints model, revision and dtype, compared before the first byte moves.
    ``transport`` is opaque to all but the connector named by ``backend``.
    """

    handle_id: str
    owner: str
    backend: str
    nbytes: int
    lease_s: float
    layout: str
    transport: bytes
    mm_hash: str
    num_tokens: int


@dataclass(frozen=True, slots=True)
class KVHandle:
    """A claim on the KV blocks of one prefilled request in its owner's memory; see ``EmbeddingHandle``.

    The blocks cover tokens ``[0, num_tokens)`` of the request, in order, ``block_size`` tokens each, the last one
    partly filled. ``rotary_delta`` is what a decode position adds to a token's index (M-RoPE).
    """

    handle_id: str
    owner: str
    backend: str
    nbytes: int
    lease_s: float
    layout: str
    transport: bytes
    num_tokens: int
    num_blocks: int
    rotary_delta: int


Handle = EmbeddingHandle | KVHandle


@dataclass(frozen=True, slots=True)
class KVTarget:
    """Reserved blocks of a decode replica that one prefill replica may write to, until the owner closes the target.

    They are positions ``[first_block, first_block + num_blocks)`` of the request's block table; those before are
    cached at the owner. ``target_id`` cannot be guessed. ``backend``, ``layout`` and ``transport`` as in ``KVHandle``.
    """

    target_id: str
    owner: str
    backend: str
    layout: str
    first_block: int
    num_blocks: int
    transport: bytes


@dataclass(frozen=True, slots=True)
class Prompt:
    """Start a leg from the prompt: an embedding handle for each media item, or ``None`` to encode that item here.

    The handles of items in ``awaited`` follow by ``StageClient.provide``, under ``leg_id``. With ``is_pushed``, the
    replica that is to decode may say, under the same id, where it wants the KV blocks.
    """

    embeddings: tuple[EmbeddingHandle | None, ...] = ()
    awaited: frozenset[int] = frozenset()
    leg_id: str = ""
    is_pushed: bool = False


@dataclass(frozen=True, slots=True)
class PushedKV:
    """KV blocks that are where they are wanted already: in the decode replica's target. No claim on anything."""

    target_id: str
    num_tokens: int
    rotary_delta: int


@dataclass(frozen=True, slots=True)
class AwaitedPrefill:
    """Start a decode leg ahead of its prefill, which runs as ``leg_id`` on ``replica_id``: its result follows by
    ``StageClient.resume``, and its KV blocks may be pushed to where this leg reserves them."""

    leg_id: str
    replica_id: str


@dataclass(frozen=True, slots=True)
class Prefilled:
    """Start a leg from a finished prefill: the KV blocks and the first token of each choice.

    ``kv`` is ``None`` when every choice finished with its first token, so that nothing is left to decode.
    """

    kv: KVHandle | PushedKV | None
    first_tokens: tuple[TokenChunk, ...]
    num_cached_tokens: int
    report: StageReport


DecodeSource = Prompt | Prefilled | AwaitedPrefill
"""What a decode leg starts from."""


@dataclass(frozen=True, slots=True)
class Encoded:
    """Answer of an encode leg: one handle per requested item, in the order asked."""

    handles: tuple[EmbeddingHandle, ...]
    report: StageReport


class StageClient(Protocol):
    """A replica, as whoever drives a request sees it. Methods raise ``EpdError``; any other exception is a bug.

    ``payloads`` maps an item index to the item's encoded bytes, for those items that the callee must encode.
    Cancelling a call, or closing its iterator, frees everything that the callee held for it.
    """

    async def encode(self, request: Request, payloads: Mapping[int, bytes]) -> Encoded:
        """Encode the items named in ``payloads`` and publish their embeddings; the callee owns them until release."""
        ...

    async def prefill(self, request: Request, prompt: Prompt, payloads: Mapping[int, bytes]) -> Prefilled:
        """Run the prompt, sample the first token of each choice, and publish the KV blocks."""
        ...

    def decode(
        self, request: Request, source: DecodeSource, payloads: Mapping[int, bytes]
    ) -> AsyncGenerator[tuple[TokenChunk, ...]]:
        """Stream the output tokens: from a ``Prompt`` prefill and decode here, else decode only.

        First tokens that came with ``Prefilled`` are not repeated. The callee releases the handles that it fetched from
        their owners; handles of a call that fails before its first chunk are the caller's to release.
        """
        ...

    async def provide(self, leg_id: str, index: int, handle: EmbeddingHandle) -> bool:
        """Hand over the embedding of an awaited item; may come before the leg's own call.

        Returns whether the callee takes the handle over, to fetch and release it; it does not if it has the embedding
        already, or if the leg is over.
        """
        ...

    async def resume(self, leg_id: str, prefilled: Prefilled) -> bool:
        """Give a leg that started from ``AwaitedPrefill`` its prefill; may come before the leg's own call.

        Returns whether the callee takes the KV over; it does not if the leg is over.
        """
        ...

    async def release(self, handle_ids: Sequence[str]) -> None:
        """Give up claims on this replica's memory. Unknown or released ids are ignored."""
        ...


# --------------------------------------------------------------------------------------------------------------------
# Models
# --------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class MediaLayout:
    """What a media part becomes in the prompt, known from its header alone."""

    grid_thw: tuple[int, int, int]
    num_tokens: int


@dataclass(frozen=True, slots=True)
class RotaryPositions:
    """Rotary positions of a prompt: int64 ``[3, num_prompt_tokens]`` on the CPU, and the delta of later tokens."""

    positions: np.ndarray[Any, np.dtype[np.int64]]
    delta: int


@dataclass(frozen=True, slots=True)
class Embedding:
    """One media item's embedding: ``[num_tokens, width]``, model dtype.

    ``width`` is the language model's hidden size times (1 + extra levels): what travels beside the embedding, such as
    per-layer deepstack features, is laid out in further columns, which only the model family interprets.
    """

    values: torch.Tensor


@dataclass(frozen=True, slots=True)
class KVSpec:
    """Shape of one token's KV cache entry. ``dtype`` is torch's name, e.g. ``bfloat16``."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: str
    itemsize_bytes: int

    @property
    def bytes_per_token(self) -> int:
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * self.itemsize_bytes


class Encoder(Protocol):
    """A vision tower. Knows nothing of KV, prompts or Ray. Not thread-safe: one thread calls it."""

    weight_bytes: int

    def preprocess(self, item: MediaItem, frames: Sequence[Image.Image]) -> torch.Tensor:
        """Turn decoded RGB frames into patches ``[item.num_patches, patch_dim]``. Thread-safe, releases the GIL."""
        ...

    def encode(self, items: Sequence[MediaItem], patches: Sequence[torch.Tensor]) -> list[Embedding]:
        """Run the tower over several items, possibly of several requests, in one batch."""
        ...


class LanguageModel(Protocol):
    """A decoder-only model over a paged KV cache. One thread calls it."""

    kv_spec: KVSpec
    hidden_size: int
    vocab_size: int
    weight_bytes: int
    eos_token_ids: frozenset[int]

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Return ``[num_tokens, hidden_size]`` for int64 ``[num_tokens]``."""
        ...

    def forward(self, hidden: torch.Tensor, positions: torch.Tensor, cache: Any, attention: Any) -> torch.Tensor:
        """Run all layers over a packed batch: ``[num_tokens, hidden_size]`` in and out (after the final norm).

        ``positions`` is int64 ``[3, num_tokens]``. ``cache`` is handed to the layers as their KV cache and
        ``attention`` travels through them to the registered attention function; the model looks into neither.
        """
        ...

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return float32 ``[num_rows, vocab_size]`` for ``[num_rows, hidden_size]``."""
        ...


class ModelFamily(Protocol):
    """All that differs between model families, over one checkpoint. Cheap to build: reads configs, not weights."""

    name: str
    fingerprint: str
    """Identifies model, revision and everything that changes an embedding for the same bytes; part of ``mm_hash``."""
    embedding_width: int
    max_model_len: int

    def image_layout(self, width: int, height: int, *, detail: str = "auto") -> MediaLayout:
        """Return the layout of an image of EXIF-oriented size. Raises ``InvalidRequestError`` if it cannot be used."""
        ...

    def video_layout(self, width: int, height: int, timestamps_s: Sequence[float]) -> MediaLayout:
        """Return the layout of a clip whose frames are sampled at ``timestamps_s``."""
        ...

    def video_timestamps(self, duration_s: float, fps: float, num_frames: int) -> tuple[float, ...]:
        """Choose which frames of a clip the model sees, by time."""
        ...

    def expand_placeholders(
        self, token_ids: Sequence[int], modalities: Sequence[Modality], layouts: Sequence[MediaLayout]
    ) -> tuple[tuple[int, ...], tuple[PlaceholderRange, ...]]:
        """Replace the single placeholder of each item, in order, by as many as its layout has tokens.

        Raises ``InvalidRequestError`` if placeholders and items do not match one to one.
        """
        ...

    def rotary_positions(self, request: Request) -> RotaryPositions:
        """Return positions for ``request.prompt_token_ids``."""
        ...

    def load_encoder(self, *, dtype: str, device: str = "cpu", kernels: Any = None) -> Encoder:
        """Read the vision tower only. ``kernels``, if given, are ``epd.engine.native``'s, to be used where they fit."""
        ...

    def load_language_model(self, *, dtype: str, device: str = "cpu") -> LanguageModel:
        """Read the language model only."""
        ...


# --------------------------------------------------------------------------------------------------------------------
# Load
# --------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ReplicaLoad:
    """What a replica says of itself; piggy-backed on replies and polled from silent replicas.

    Work is in tokens and items here; the router's cost model turns it into seconds. ``reported_at_s`` is the
    reporter's monotonic clock replaced by the receiver's at arrival.
    """

    replica_id: str
    pool: str
    roles: frozenset[Stage]
    num_waiting: int = 0
    num_running: int = 0
    num_queued_prefill_tokens: int = 0
    num_queued_encode_items: int = 0
    num_queued_encode_patches: int = 0
    num_context_tokens: int = 0
    num_blocks: int = 0
    num_free_blocks: int = 0
    block_size: int = 0
    num_live_handles: int = 0
    reported_at_s: float = 0.0
