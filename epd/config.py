"""The configuration of an application: pydantic models of the ``args`` section of a ``serve run`` file.

Validated once at start-up and never mutated; each part of the system receives its own section. Unknown keys are
refused, and a value that cannot work is named by its YAML path. Knows nothing of Ray: Serve's own words
(``ray_actor_options``, ``autoscaling_config``) pass through untouched.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from epd.errors import ConfigError
from epd.types import SLO, Mode, Stage

DType = Literal["float32", "bfloat16", "float16"]
CPU_BLOCK_SIZE = 16
CUDA_BLOCK_SIZE = 256
"""FlashAttention 2, which torch ships, reads KV pages of a multiple of this many tokens."""
CPU_ENCODE_PATCHES = 1024
CUDA_ENCODE_PATCHES = 16384

PositiveInt = Annotated[int, Field(gt=0)]
PositiveFloat = Annotated[float, Field(gt=0)]


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class ModelConfig(_Section):
    """Which checkpoint is served. ``source`` is ``demo``, a local directory or a hub id."""

    source: str = "demo"
    name: str | None = None
    revision: str | None = None
    dtype: DType = "float32"
    max_model_len: PositiveInt | None = None

    @property
    def served_name(self) -> str:
        """The name that clients send as ``model``."""
        return self.name or self.source.rstrip("/").rsplit("/", 1)[-1]


class EngineConfig(_Section):
    """Sizes of one engine. ``num_threads`` of ``None`` leaves torch's own choice.

    ``block_size`` of ``None`` is what suits the device, see ``kv_block_size``. ``compile``: build native kernels at
    start (``true``), if there is a compiler (``auto``), or never (``false``); they are kept in ``compile_cache_dir``.
    """

    block_size: PositiveInt | None = None
    kv_cache_bytes: PositiveInt = 256 * 2**20
    max_num_batched_tokens: PositiveInt = 1024
    max_num_seqs: PositiveInt = 64
    num_threads: PositiveInt | None = None
    enable_prefix_cache: bool = True
    device: str = "cpu"
    tensor_parallel_size: PositiveInt = 1
    cuda_graphs: bool = True
    compile: Literal["auto"] | bool = "auto"
    compile_cache_dir: str | None = None
    embedding_cache_bytes: PositiveInt = 64 * 2**20
    max_encode_batch_patches: PositiveInt | None = None
    num_preprocess_threads: PositiveInt = 2

    @property
    def is_cuda(self) -> bool:
        return self.device.startswith("cuda")

    @property
    def kv_block_size(self) -> int:
        """Tokens in a KV block: as configured, or the device's default."""
        return self.block_size or (CUDA_BLOCK_SIZE if self.is_cuda else CPU_BLOCK_SIZE)

    @property
    def encode_batch_patches(self) -> int:
        """Patches in one pass of the vision tower: as configured, or the device's default.

        An image is enough to keep a CPU busy. Several at once take as long as one after the other, and the first would
        be there only with the last.
        """
        return self.max_encode_batch_patches or (CUDA_ENCODE_PATCHES if self.is_cuda else CPU_ENCODE_PATCHES)

    @field_validator("device")
    @classmethod
    def _is_known_device(cls, value: str) -> str:
        if re.fullmatch(r"cpu|cuda(:\d+)?", value) is None:
            raise ValueError(f"{value!r} is not a device that is supported; say cpu, cuda or cuda:N")
        return value

    @field_validator("tensor_parallel_size")
    @classmethod
    def _is_one_device(cls, value: int) -> int:
        if value != 1:
            raise ValueError(
                f"splitting a model over {value} GPUs (tensor parallelism) is not supported yet, a replica computes on "
                "one device; leave it at 1, and for more throughput raise num_replicas of the pool"
            )
        return value

    @model_validator(mode="after")
    def _step_fits_the_batch(self) -> Self:
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) must be at least max_num_seqs "
                f"({self.max_num_seqs}): each running sequence takes one token of every step"
            )
        return self


class PoolConfig(_Section):
    """One Serve deployment of identical replicas. ``engine`` overrides single fields of the common section."""

    roles: Annotated[list[Stage], Field(min_length=1)]
    num_replicas: PositiveInt | None = None
    autoscaling_config: dict[str, Any] | None = None
    ray_actor_options: dict[str, Any] = Field(default_factory=dict)
    max_ongoing_requests: PositiveInt = 256
    graceful_shutdown_timeout_s: PositiveFloat = 20.0
    engine: dict[str, Any] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _sizes_are_given_once(self) -> Self:
        if len(set(self.roles)) != len(self.roles):
            raise ValueError("roles must not repeat")
        if self.num_replicas is not None and self.autoscaling_config is not None:
            raise ValueError("give num_replicas or autoscaling_config, not both")
        return self

    @property
    def role_set(self) -> frozenset[Stage]:
        return frozenset(self.roles)


class TransferConfig(_Section):
    """How embeddings and KV blocks move between replicas."""

    backend: Literal["auto", "nixl", "object_store"] = "auto"
    kv_mode: Literal["auto", "push", "pull"] = "auto"
    """``push``: prefill writes KV blocks to the decode replica chunk by chunk; ``pull``: decode reads them at the end;
    ``auto``: push where the backend can."""
    overlap: bool = True
    """Start prefill on text and the first items while others are still being encoded elsewhere."""
    lease_s: PositiveFloat = 30.0
    on_failure: Literal["recompute", "fail"] = "recompute"


class SLOConfig(_Section):
    """The service level objective that placement aims at; a request may override it."""

    ttft_s: PositiveFloat = 1.0
    itl_s: PositiveFloat = 0.05

    def to_slo(self) -> SLO:
        return SLO(self.ttft_s, self.itl_s)


class RouterConfig(_Section):
    """Placement. ``mode`` is what ``auto`` requests get: ``auto`` itself, or one fixed mode."""

    mode: Mode = Mode.AUTO
    slo: SLOConfig = SLOConfig()
    admission: bool = True
    max_queued_requests: PositiveInt = 1024
    deadline_s: PositiveFloat = 600.0
    max_attempts: PositiveInt = 3
    profile: str | None = None


class MediaConfig(_Section):
    """Limits on what a client may upload or have fetched.

    ``max_pixels`` holds for an image and for each frame of a clip; ``max_video_frames`` and ``max_video_pixels`` for
    the frames that the model sees of one clip, together. A domain stands for itself and all names below it.
    ``allow_private_ips`` opens loopback and private networks, never link-local and cloud metadata addresses.
    """

    max_bytes: PositiveInt = 64 * 2**20
    max_pixels: PositiveInt = 178_956_970
    max_items: PositiveInt = 16
    max_video_frames: PositiveInt = 768
    max_video_duration_s: PositiveFloat = 600.0
    max_video_pixels: PositiveInt = 2**29
    max_concurrent_fetches: PositiveInt = 32
    decode_timeout_s: PositiveFloat = 20.0
    fetch_timeout_s: PositiveFloat = 20.0
    connect_timeout_s: PositiveFloat = 5.0
    max_redirects: Annotated[int, Field(ge=0)] = 3
    allowed_domains: list[str] | None = None
    denied_domains: list[str] = Field(default_factory=list)
    allow_private_ips: bool = False


class IngressConfig(_Section):
    """The HTTP front: limits, keys, and the replicas that run it."""

    num_replicas: PositiveInt = 1
    max_ongoing_requests: PositiveInt = 1024
    ray_actor_options: dict[str, Any] = Field(default_factory=dict)
    max_body_bytes: PositiveInt = 128 * 2**20
    api_keys_env: str | None = None
    api_keys_file: str | None = None
    allow_anonymous: bool = False
    load_poll_interval_s: PositiveFloat = 0.5


class AppConfig(_Section):
    """The whole ``args`` section."""

    model: ModelConfig = ModelConfig()
    pools: Annotated[dict[str, PoolConfig], Field(min_length=1)]
    engine: EngineConfig = EngineConfig()
    transfer: TransferConfig = TransferConfig()
    router: RouterConfig = RouterConfig()
    media: MediaConfig = MediaConfig()
    ingress: IngressConfig = IngressConfig()

    @model_validator(mode="after")
    def _pools_can_serve(self) -> Self:
        for name, pool in self.pools.items():
            unknown = set(pool.engine) - set(EngineConfig.model_fields)
            if unknown:
                raise ValueError(f"pools.{name}.engine: unknown fields {sorted(unknown)}")
            try:
                EngineConfig.model_validate({**self.engine.model_dump(), **pool.engine})
            except ValidationError as error:
                raise ValueError(f"pools.{name}.engine.{_describe(error)}") from error
        roles = frozenset(role for pool in self.pools.values() for role in pool.roles)
        missing = frozenset(Stage) - roles
        if missing:
            raise ValueError(f"pools: no pool has the role {', '.join(sorted(missing))}")
        if not self.modes:
            raise ValueError("pools: no mode can be formed from these roles; see the modes table in the README")
        if self.router.mode is not Mode.AUTO and self.router.mode not in self.modes:
            raise ValueError(
                f"router.mode: the pools cannot form {self.router.mode.value}; they can form "
                f"{', '.join(mode.value for mode in self.modes)}"
            )
        self._check_blocks()
        return self

    def _check_blocks(self) -> None:
        engines = [self.engine_of(name) for name in self.pools]
        block_sizes = {engine.kv_block_size for engine in engines}
        if len(block_sizes) > 1:
            raise ValueError(f"engine.block_size must be the same in all pools, got {sorted(block_sizes)}")
        (block_size,) = block_sizes
        # In float32, which FlashAttention lacks, torch's own kernels do the work, with any block size.
        if self._has_cuda_blocks and self.model.dtype != "float32" and block_size % CUDA_BLOCK_SIZE:
            raise ValueError(
                f"engine.block_size is {block_size}, but on CUDA attention in {self.model.dtype} reads KV blocks of a "
                f"multiple of {CUDA_BLOCK_SIZE} tokens: leave it out, or say {CUDA_BLOCK_SIZE}"
            )

    @property
    def _has_cuda_blocks(self) -> bool:
        """Whether some pool keeps KV blocks on a GPU."""
        holders = [name for name, pool in self.pools.items() if pool.role_set & {Stage.PREFILL, Stage.DECODE}]
        return any(self._raw_engine_of(name).is_cuda for name in holders)

    def engine_of(self, pool: str) -> EngineConfig:
        """Return the engine section that applies to a pool, with the block size that all pools agree on."""
        engine = self._raw_engine_of(pool)
        if engine.block_size is not None:
            return engine
        default = CUDA_BLOCK_SIZE if self._has_cuda_blocks else CPU_BLOCK_SIZE
        return engine.model_copy(update={"block_size": default})

    def _raw_engine_of(self, pool: str) -> EngineConfig:
        return EngineConfig.model_validate({**self.engine.model_dump(), **self.pools[pool].engine})

    @property
    def modes(self) -> tuple[Mode, ...]:
        """The modes that the roles of the configured pools can form, in the order of ``Mode``."""
        return formable_modes({name: pool.role_set for name, pool in self.pools.items()})


def formable_modes(pools: Mapping[str, frozenset[Stage]]) -> tuple[Mode, ...]:
    """Return the modes that pools with these roles can form.

    A stage counts as split when two *different* pools can run the two sides. Two replicas of one pool with all roles
    could also split a request, but the placement would then depend on how many replicas happen to be up.
    """
    encode, prefill, decode = Stage.ENCODE, Stage.PREFILL, Stage.DECODE

    def has(*wanted: frozenset[Stage]) -> bool:
        """Whether distinct pools can be assigned to the wanted role sets."""

        def assign(remaining: tuple[frozenset[Stage], ...], used: frozenset[str]) -> bool:
            if not remaining:
                return True
            return any(
                remaining[0] <= roles and assign(remaining[1:], used | {name})
                for name, roles in pools.items()
                if name not in used
            )

        return assign(wanted, frozenset())

    shapes = {
        Mode.AGGREGATED: (frozenset({encode, prefill, decode}),),
        Mode.E_PD: (frozenset({encode}), frozenset({prefill, decode})),
        Mode.EP_D: (frozenset({encode, prefill}), frozenset({decode})),
        Mode.EPD: (frozenset({encode}), frozenset({prefill}), frozenset({decode})),
    }
    return tuple(mode for mode, shape in shapes.items() if has(*shape))


def _describe(error: ValidationError) -> str:
    first = error.errors()[0]
    path = ".".join(str(part) for part in first["loc"])
    message = first["msg"].removeprefix("Value error, ")
    return f"{path}: {message}" if path else message


def parse_config(args: Mapping[str, Any]) -> AppConfig:
    """Validate the ``args`` section. Raises ``ConfigError`` with the YAML path of the first fault."""
    try:
        return AppConfig.model_validate(dict(args))
    except ValidationError as error:
        first = error.errors()[0]
        path = ".".join(["args", *(str(part) for part in first["loc"])])
        message = first["msg"].removeprefix("Value error, ")
        if first["type"] == "extra_forbidden":
            message = "unknown key"
        raise ConfigError(path, message) from error
