"""How long each stage takes, as a function of sizes: the forms, their parameters, and the file that holds them.

Owns the cost forms (those of DistServe and Vidur), their scaling by a correction, and the versioned JSON text that
``router.profile`` names. Knows nothing of replicas, queues, placements or files: who reads the text from where is the
caller's business. How parameters come about is in ``priors`` (from shapes) and ``fit`` (measured).

All times are seconds. Sizes are patches (before merging) for media and tokens for text and KV.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, is_dataclass, replace
from enum import StrEnum
from typing import Any, TypeVar, get_type_hints

from epd.errors import ConfigError

SCHEMA_VERSION = 1


class CostStage(StrEnum):
    """A part of a request with a cost form of its own. Values are the names of ``StageReport.timings_s``."""

    PREPROCESS = "preprocess"
    ENCODE = "encode"
    EMBEDDING_TRANSFER = "embedding_transfer"
    PREFILL = "prefill"
    KV_TRANSFER = "kv_transfer"
    DECODE = "decode"


class CostSource(StrEnum):
    """Where parameters come from. Only guesses (``PRIORS``) are not to be held against a request."""

    PRIORS = "priors"
    PROFILE = "profile"
    OBSERVED = "observed"


@dataclass(frozen=True, slots=True)
class ProfileKey:
    """What a set of parameters was measured on; parameters do not carry over from one key to another."""

    model: str
    device: str
    dtype: str
    engine_version: str


@dataclass(frozen=True, slots=True)
class PreprocessCost:
    """Decode, resize and normalize one item: ``fixed + per_patch * n``, over ``num_workers`` threads.

    The literature counts megapixels; patches are megapixels after resizing, and known from the header alone.
    """

    fixed_s: float
    per_patch_s: float
    num_workers: int = 1


@dataclass(frozen=True, slots=True)
class EncodeCost:
    """One batch through the vision tower: ``fixed + per_patch * sum(n) + per_patch_squared * sum(n^2)``."""

    fixed_s: float
    per_patch_s: float
    per_patch_squared_s: float


@dataclass(frozen=True, slots=True)
class PrefillCost:
    """A prompt of N tokens, q of them cached: ``fixed + per_token * (N - q) + per_token_squared * (N^2 - q^2)``."""

    fixed_s: float
    per_token_s: float
    per_token_squared_s: float


@dataclass(frozen=True, slots=True)
class DecodeRegime:
    """One decode step of B sequences over K context tokens: ``fixed + per_context_token * K + per_sequence * B``."""

    fixed_s: float
    per_context_token_s: float
    per_sequence_s: float


@dataclass(frozen=True, slots=True)
class DecodeCost:
    """A decode step in two regimes: memory-bound small batches, and batches of at least ``large_from_sequences``."""

    small: DecodeRegime
    large: DecodeRegime
    large_from_sequences: int


@dataclass(frozen=True, slots=True)
class TransferCost:
    """Move bytes between two replicas: ``fixed + per_byte * bytes``. ``per_byte_s`` is one over the bandwidth."""

    fixed_s: float
    per_byte_s: float


@dataclass(frozen=True, slots=True)
class CostModel:
    """The parameters of every stage for one ``ProfileKey``, and predictions from them. Immutable and cheap to call."""

    key: ProfileKey
    source: CostSource
    preprocess: PreprocessCost
    encode: EncodeCost
    prefill: PrefillCost
    decode: DecodeCost
    embedding_transfer: TransferCost
    kv_transfer: TransferCost
    embedding_bytes_per_token: float
    kv_bytes_per_token: float
    hold_out_error: Mapping[str, float] = field(default_factory=dict)
    """By stage: median relative error on samples that the fit did not see; empty for priors."""

    @property
    def is_calibrated(self) -> bool:
        """Whether measurements stand behind the predictions."""
        return self.source is not CostSource.PRIORS

    def preprocess_s(self, patch_counts: Sequence[int]) -> float:
        """Predict preparing items on the CPU; they share the workers, and one item uses one worker."""
        if not patch_counts:
            return 0.0
        cost = self.preprocess
        total_s = cost.fixed_s * len(patch_counts) + cost.per_patch_s * sum(patch_counts)
        return total_s / min(cost.num_workers, len(patch_counts))

    def encode_s(self, patch_counts: Sequence[int]) -> float:
        """Predict one encode batch; no items cost nothing."""
        if not patch_counts:
            return 0.0
        cost = self.encode
        squares = sum(n * n for n in patch_counts)
        return cost.fixed_s + cost.per_patch_s * sum(patch_counts) + cost.per_patch_squared_s * squares

    def prefill_s(self, num_tokens: int, num_cached_tokens: int = 0) -> float:
        """Predict the prefill of ``num_tokens``, of which the first ``num_cached_tokens`` are already in the cache."""
        num_new = num_tokens - num_cached_tokens
        if num_new <= 0:
            return 0.0
        cost = self.prefill
        # N^2 - q^2 = (N - q) (N + q)
        return cost.fixed_s + num_new * (cost.per_token_s + cost.per_token_squared_s * (num_tokens + num_cached_tokens))

    def decode_step_s(self, num_sequences: int, num_context_tokens: int) -> float:
        """Predict one decode step of a batch whose sequences hold ``num_context_tokens`` together."""
        cost = self.decode
        regime = cost.large if num_sequences >= cost.large_from_sequences else cost.small
        return regime.fixed_s + regime.per_context_token_s * num_context_tokens + regime.per_sequence_s * num_sequences

    def embedding_transfer_s(self, num_tokens: int) -> float:
        """Predict moving the embeddings of ``num_tokens`` media tokens from one encoder."""
        cost = self.embedding_transfer
        return cost.fixed_s + cost.per_byte_s * self.embedding_bytes_per_token * num_tokens

    def kv_transfer_s(self, num_tokens: int) -> float:
        """Predict moving the KV blocks of ``num_tokens``."""
        cost = self.kv_transfer
        return cost.fixed_s + cost.per_byte_s * self.kv_bytes_per_token * num_tokens

    def scaled(self, ratios: Mapping[CostStage, float], *, source: CostSource | None = None) -> CostModel:
        """Return the model with every time of a stage multiplied by that stage's ratio (1 where absent)."""
        changes: dict[str, Any] = {}
        for stage, ratio in ratios.items():
            if ratio != 1.0:
                changes[stage.value] = _scale_times(getattr(self, stage.value), ratio)
        return replace(self, source=source or self.source, **changes)

    def to_json(self) -> str:
        """Return the text of a profile file."""
        return json.dumps({"schema_version": SCHEMA_VERSION, **asdict(self)}, indent=2) + "\n"

    @staticmethod
    def from_json(text: str, *, where: str = "args.router.profile") -> CostModel:
        """Read the text of a profile file. Raises ``ConfigError`` naming ``where`` and the field that is wrong."""
        try:
            data = json.loads(text)
        except ValueError as error:
            raise ConfigError(where, f"not JSON: {error}") from error
        if not isinstance(data, dict):
            raise ConfigError(where, "not a JSON object")
        version = data.pop("schema_version", None)
        if version != SCHEMA_VERSION:
            raise ConfigError(
                where, f"schema_version is {version!r}, this version reads {SCHEMA_VERSION}; run `epd profile` again"
            )
        return _build(CostModel, data, where)


# --------------------------------------------------------------------------------------------------------------------

_Data = TypeVar("_Data")


def _scale_times(cost: _Data, ratio: float) -> _Data:
    changes: dict[str, Any] = {}
    for item in fields(cost):  # type: ignore[arg-type]
        value = getattr(cost, item.name)
        if is_dataclass(value):
            changes[item.name] = _scale_times(value, ratio)
        elif item.name.endswith("_s"):
            changes[item.name] = value * ratio
    return replace(cost, **changes)  # type: ignore[type-var]


def _build(cls: type[_Data], data: object, where: str) -> _Data:
    """Build a dataclass from parsed JSON, strictly: no unknown, missing or impossible values."""
    if not isinstance(data, dict):
        raise ConfigError(where, "must be an object")
    hints = get_type_hints(cls)
    names = {item.name for item in fields(cls)}  # type: ignore[arg-type]
    for name in [*data, *names]:
        if name not in names:
            raise ConfigError(f"{where}.{name}", "unknown key")
        if name not in data:
            raise ConfigError(f"{where}.{name}", "missing")
    return cls(**{name: _value(hints[name], value, f"{where}.{name}") for name, value in data.items()})


def _value(kind: Any, value: object, where: str) -> Any:
    if is_dataclass(kind):
        return _build(kind, value, where)  # type: ignore[arg-type]
    if kind in (int, float):
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value) or value < 0:
            raise ConfigError(where, f"must be a number of at least 0, got {value!r}")
        if kind is int and (value < 1 or value != int(value)):
            raise ConfigError(where, f"must be a whole number of at least 1, got {value!r}")
        return kind(value)
    if kind is CostSource:
        try:
            return CostSource(str(value))
        except ValueError:
            raise ConfigError(where, f"must be one of {', '.join(CostSource)}, got {value!r}") from None
    if kind is str:
        if not isinstance(value, str):
            raise ConfigError(where, f"must be a string, got {value!r}")
        return value
    if not isinstance(value, dict):
        raise ConfigError(where, "must be an object")
    return {str(name): _value(float, number, f"{where}.{name}") for name, number in value.items()}
