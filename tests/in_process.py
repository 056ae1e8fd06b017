"""Several replicas in one process, without Ray: real encoders, engines and connectors, called directly."""

from __future__ import annotations

import asyncio
import contextlib
import io
import time
import uuid
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from PIL import Image

from encoders import resolve_family
from epd.config import DType, EngineConfig, MediaConfig, ModelConfig, TransferConfig
from epd.media.hashing import media_hash
from epd.stages.life import LifeOptions, generate
from epd.stages.worker import StageWorker
from epd.transfer.factory import Backend
from epd.transfer.in_process import InProcessPeers
from epd.types import MediaItem, Modality, Mode, ModelFamily, Placement, Request, SamplingParams, Stage, TokenChunk

E, P, D = Stage.ENCODE, Stage.PREFILL, Stage.DECODE
ROLES = {
    "e": frozenset({E}),
    "e2": frozenset({E}),
    "p": frozenset({E, P}),
    "d": frozenset({D}),
    "all": frozenset(Stage),
}


@dataclass
class InProcessCluster:
    """Replicas by name, as ``ROLES`` says, and the placements of each mode over them."""

    family: ModelFamily
    workers: dict[str, StageWorker]
    peers: InProcessPeers

    def client_of(self, replica_id: str) -> StageWorker:
        return self.workers[replica_id]

    def placement(self, mode: Mode, request: Request) -> Placement:
        prefill = "all" if mode in (Mode.AGGREGATED, Mode.E_PD) else "p"
        decode = "d" if mode.splits_decode else prefill
        encoders = [("e", "e2")[item.index % 2] if mode.splits_encode else prefill for item in request.items]
        return Placement(mode, prefill, decode, tuple(encoders))

    async def run(
        self, request: Request, payloads: Mapping[int, bytes], mode: Mode, *, overlap: bool = True, push: bool = True
    ) -> tuple[dict[int, list[int]], list[TokenChunk]]:
        """Generate in one mode; return the tokens by choice, and all chunks."""
        tokens: dict[int, list[int]] = {}
        all_chunks: list[TokenChunk] = []
        unique = replace(request, request_id=f"{request.request_id}-{uuid.uuid4().hex[:6]}")
        updates = generate(
            unique,
            payloads,
            lambda part, excluded: self.placement(mode, part),
            self.client_of,
            LifeOptions(overlap=overlap, push=push),
        )
        async with contextlib.aclosing(updates):
            async for update in updates:
                for chunk in update.chunks:
                    tokens.setdefault(chunk.choice, []).extend(chunk.token_ids)
                    all_chunks.append(chunk)
        return tokens, all_chunks

    async def check_integrity(self) -> None:
        """Wait until nothing is on its way, then assert that nothing is held."""
        for worker in self.workers.values():
            await worker.data.settle()
        for worker in self.workers.values():
            await until(lambda worker=worker: is_idle(worker), f"{worker.replica_id} never came to rest")
            await worker.check_integrity()


def is_idle(worker: StageWorker) -> bool:
    """Whether a replica holds nothing: no claims lent, no blocks used, no request in any stage."""
    load = worker.load()
    return (
        load.num_live_handles == 0
        and load.num_free_blocks == load.num_blocks
        and load.num_queued_encode_items == 0
        and not any(worker.stats().running_requests.values())
    )


async def until(condition: Callable[[], object], complaint: str = "it never happened") -> None:
    """Poll a condition that other threads bring about. Raises ``AssertionError`` after a minute."""
    deadline_s = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline_s, complaint
        await asyncio.sleep(0.005)


@contextlib.asynccontextmanager
async def in_process_cluster(
    model_dir: Path | str,
    *,
    backend: Backend = "by_reference",
    names: Sequence[str] = ("e", "e2", "p", "d", "all"),
    engine: EngineConfig | None = None,
    engines: Mapping[str, EngineConfig] | None = None,
    transfer: TransferConfig | None = None,
    dtype: DType = "float32",
) -> AsyncIterator[InProcessCluster]:
    model = ModelConfig(source=str(model_dir), dtype=dtype)
    family = resolve_family(model)
    peers = InProcessPeers()
    common = engine or EngineConfig(kv_cache_bytes=8 * 2**20, num_threads=1)
    workers = {
        name: StageWorker(
            replica_id=name,
            pool=name,
            roles=ROLES[name],
            family=family,
            model=model,
            engine=(engines or {}).get(name, common),
            transfer=transfer or TransferConfig(),
            media=MediaConfig(),
            peers=peers,
            backend=backend,
        )
        for name in names
    }
    for worker in workers.values():
        await worker.start()
        peers.add(worker.replica_id, worker.data.kv, worker.data.embedding, worker)
    try:
        yield InProcessCluster(family, workers, peers)
    finally:
        for worker in workers.values():
            await worker.close()


@dataclass(frozen=True)
class Prompt:
    """A prompt as a user would write it, and as ``transformers`` takes it."""

    request: Request
    payloads: dict[int, bytes]
    images: tuple[Image.Image, ...]


def png(image: Image.Image) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return buffer.getvalue()


def random_image(seed: int, width: int, height: int) -> Image.Image:
    generator = torch.Generator().manual_seed(seed)
    small = torch.randint(0, 256, (8, 8, 3), dtype=torch.uint8, generator=generator).numpy()
    return Image.fromarray(small).resize((width, height), Image.Resampling.BICUBIC)


def make_prompt(
    family: ModelFamily,
    tokenizer,
    parts: Sequence[str | Image.Image],
    *,
    sampling: SamplingParams,
    request_id: str = "request",
) -> Prompt:
    """Build the request for a user message of text and image parts."""
    content = [{"type": "text", "text": part} if isinstance(part, str) else {"type": "image"} for part in parts]
    token_ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": content}], add_generation_prompt=True, return_dict=False
    )
    images = [part for part in parts if not isinstance(part, str)]
    return prompt_of_tokens(family, token_ids, images, sampling=sampling, request_id=request_id)


def prompt_of_tokens(
    family: ModelFamily,
    token_ids: Sequence[int],
    images: Sequence[Image.Image],
    *,
    sampling: SamplingParams,
    request_id: str = "request",
) -> Prompt:
    """Build the request for token ids in which each image has one placeholder."""
    payloads = {index: png(image) for index, image in enumerate(images)}
    layouts = [family.image_layout(*image.size) for image in images]
    expanded, ranges = family.expand_placeholders(token_ids, [Modality.IMAGE] * len(images), layouts)
    items = tuple(
        MediaItem(
            index=index,
            modality=Modality.IMAGE,
            mm_hash=media_hash(
                payloads[index],
                fingerprint=family.fingerprint,
                detail="auto",
                timestamps_s=(),
                modality=Modality.IMAGE,
            ),
            placeholder=ranges[index],
            grid_thw=layout.grid_thw,
            param=f"messages[0].content[{index}]",
        )
        for index, layout in enumerate(layouts)
    )
    return Prompt(Request(request_id, tuple(expanded), sampling, items), payloads, tuple(images))
