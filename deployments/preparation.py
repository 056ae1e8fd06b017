"""From a validated body to a request that the stages understand: bytes once, token ids, placeholders, hashes, limits.

Runs in the ingress with the model's configuration alone: no weights. CPU-heavy work (base64, hashing, headers,
templates) runs in threads. Knows nothing of placement, replies or Ray.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from functools import partial
from uuid import uuid4

from deployments.generation import Prepared
from deployments.protocol import ChatBody, CompletionBody, GenerationBody
from encoders import checkpoint_dir
from encoders.checkpoint import read_json
from epd.config import AppConfig
from epd.errors import EpdError, InvalidRequestError, MediaError, PromptTooLongError
from epd.media.fetch import Fetcher
from epd.media.hashing import media_hash
from epd.media.probe import check_sampling, probe
from epd.media.source import MediaSource, resolve_all
from epd.prompt.detokenizer import IncrementalDetokenizer
from epd.prompt.messages import MediaPart
from epd.prompt.template import ChatPrompt, RenderedPrompt
from epd.types import (
    MediaItem,
    MediaLayout,
    Modality,
    ModelFamily,
    PlaceholderRange,
    Request,
    SamplingParams,
    StageReport,
)

DEFAULT_COMPLETION_TOKENS = 16
"""What ``/v1/completions`` produces when the client does not say; chat goes on to the end of the context."""


class SamplingDefaults:
    """What a request gets that does not say how to sample.

    OpenAI's temperature of 1.0, unless the checkpoint's ``generation_config.json`` says otherwise: ``do_sample: false``
    means greedy, and its ``temperature``, ``top_p`` and ``top_k`` hold for requests that sample.
    """

    def __init__(self, generation_config: dict[str, object]) -> None:
        def number(name: str, default: float) -> float:
            value = generation_config.get(name)
            return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else default

        is_greedy = generation_config.get("do_sample") is False
        self.temperature = 0.0 if is_greedy else number("temperature", 1.0)
        self.top_p = 1.0 if is_greedy else number("top_p", 1.0)
        self.top_k = 0 if is_greedy else int(number("top_k", 0))


class Preparer:
    """Prepares the requests of one ingress replica."""

    def __init__(self, config: AppConfig, family: ModelFamily, fetcher: Fetcher) -> None:
        directory = checkpoint_dir(config.model)
        self._config = config
        self._family = family
        self._fetcher = fetcher
        self._prompt = ChatPrompt.from_pretrained(directory, max_prompt_tokens=family.max_model_len)
        self._defaults = SamplingDefaults(read_json(directory / "generation_config.json", required=False))

    def token_bytes(self, token_id: int) -> bytes:
        """Return what one token adds to the text."""
        return self._prompt.tokenizer.token_bytes(token_id)

    async def chat(self, body: ChatBody, *, deadline_s: float) -> Prepared:
        """Prepare a chat request. Raises ``InvalidRequestError`` naming the part, or ``MediaFetchError``."""
        rendered = await asyncio.to_thread(self._prompt.render, body.messages)
        sources = [MediaSource(part.url, part.param) for part in rendered.media]
        started_s = time.perf_counter()
        payloads = await resolve_all(sources, config=self._config.media, fetcher=self._fetcher)
        fetched_s = time.perf_counter()
        described = await asyncio.gather(
            *(asyncio.to_thread(self._describe, *each) for each in zip(rendered.media, payloads, strict=True))
        )
        report = StageReport({"fetch": fetched_s - started_s, "preprocess": time.perf_counter() - fetched_s})
        token_ids, ranges = self._family.expand_placeholders(
            rendered.token_ids, rendered.modalities, [layout for layout, _, _ in described]
        )
        items = tuple(
            _item(index, *each) for index, each in enumerate(zip(rendered.media, ranges, described, strict=True))
        )
        request = self._request(body, token_ids, items, body.output_limit, deadline_s, "messages")
        return self._prepared(body, request, dict(enumerate(payloads)), report)

    async def completion(self, body: CompletionBody, prompt: str | list[int], *, deadline_s: float) -> Prepared:
        """Prepare one prompt of a completion request."""
        rendered: RenderedPrompt = await asyncio.to_thread(self._prompt.render_raw, prompt)
        max_tokens = body.max_tokens if body.max_tokens is not None else DEFAULT_COMPLETION_TOKENS
        request = self._request(body, rendered.token_ids, (), max_tokens, deadline_s, "prompt")
        return self._prepared(body, request, {}, StageReport())

    def _prepared(
        self, body: GenerationBody, request: Request, payloads: dict[int, bytes], report: StageReport
    ) -> Prepared:
        make_text = partial(IncrementalDetokenizer, self._prompt.tokenizer, body.stop_strings)
        return Prepared(request, payloads, report, make_text)

    def _describe(self, part: MediaPart, data: bytes) -> tuple[MediaLayout, str, tuple[float, ...]]:
        """Read one part's header: its layout, its hash, and the timestamps of a clip. Blocking."""
        limits, family = self._config.media, self._family
        info = probe(data, modality=part.modality, param=part.param, config=limits)
        timestamps_s: tuple[float, ...] = ()
        try:
            if part.modality is Modality.VIDEO:
                # As sampled, not as the frames found there are timed: models place frames by the sampling rate.
                timestamps_s = family.video_timestamps(info.duration_s, info.fps, info.num_frames)
                check_sampling(info, timestamps_s, param=part.param, config=limits)
                layout = family.video_layout(info.width, info.height, timestamps_s)
            else:
                layout = family.image_layout(info.width, info.height, detail=part.detail)
        except InvalidRequestError as error:
            raise MediaError(error.message, error.param or part.param) from error
        digest = media_hash(
            data,
            fingerprint=family.fingerprint,
            detail=part.detail,
            timestamps_s=timestamps_s,
            modality=part.modality,
        )
        return layout, digest, timestamps_s

    def _request(
        self,
        body: GenerationBody,
        token_ids: Sequence[int],
        items: tuple[MediaItem, ...],
        max_tokens: int | None,
        deadline_s: float,
        param: str,
    ) -> Request:
        limit, num_tokens = self._family.max_model_len, len(token_ids)
        if num_tokens >= limit:
            raise PromptTooLongError(
                f"the prompt has {num_tokens} tokens; the model's context is {limit}, prompt and output together",
                param,
            )
        if max_tokens is not None and num_tokens + max_tokens > limit:
            raise PromptTooLongError(
                f"the prompt has {num_tokens} tokens and up to {max_tokens} are asked for; the model's context is "
                f"{limit} tokens, prompt and output together",
                "max_tokens",
            )
        return Request(
            request_id=uuid4().hex,
            prompt_token_ids=tuple(token_ids),
            sampling=self._sampling(body, max_tokens if max_tokens is not None else limit - num_tokens),
            items=items,
            deadline_s=deadline_s,
        )

    def _sampling(self, body: GenerationBody, max_tokens: int) -> SamplingParams:
        defaults, vocab_size = self._defaults, self._prompt.tokenizer.vocab_size
        for name, token_ids in (("logit_bias", body.logit_bias or {}), ("stop_token_ids", body.stop_token_ids or [])):
            for token_id in token_ids:
                if not 0 <= token_id < vocab_size:
                    raise InvalidRequestError(f"{name}: {token_id} is not a token id of this model", name)
        top_k = body.top_k if body.top_k is not None else defaults.top_k
        return SamplingParams(
            temperature=body.temperature if body.temperature is not None else defaults.temperature,
            top_p=body.top_p if body.top_p is not None else defaults.top_p,
            top_k=max(0, top_k),
            min_p=body.min_p or 0.0,
            seed=body.seed_or_random,
            n=body.n,
            max_tokens=max_tokens,
            min_tokens=min(body.min_tokens, max_tokens),
            stop_token_ids=tuple(body.stop_token_ids or ()),
            ignore_eos=body.ignore_eos,
            presence_penalty=body.presence_penalty,
            frequency_penalty=body.frequency_penalty,
            repetition_penalty=body.repetition_penalty,
            logit_bias=tuple((body.logit_bias or {}).items()),
            num_logprobs=body.num_logprobs,
        )


def _item(
    index: int,
    part: MediaPart,
    placeholder: PlaceholderRange,
    described: tuple[MediaLayout, str, tuple[float, ...]],
) -> MediaItem:
    layout, digest, timestamps_s = described
    if layout.num_tokens != placeholder.num_tokens:
        raise EpdError(f"{part.param}: {placeholder.num_tokens} placeholders for {layout.num_tokens} embeddings")
    return MediaItem(index, part.modality, digest, placeholder, layout.grid_thw, timestamps_s, part.param)
