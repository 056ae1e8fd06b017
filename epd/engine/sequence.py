"""The state of a request inside one engine: the only data of the scheduler that changes.

A request is one or more sequences (``n`` choices) that share the prompt. Who owns which token interval of a sequence:

    token_ids   |<------------- prompt ------------->|<-- output -->|
    computed    |<----- num_computed_tokens ---->|.................. |   K and V are in the blocks of block_table
    cached      |<- num_cached_tokens ->|                                 of which these were not computed by this run
    scheduled                                    |<- this step ->|

Knows nothing of clocks, tensors other than the embeddings that it keeps for recomputation, or other requests.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto

from epd.types import Embedding, Request, RotaryPositions


class SequenceStatus(Enum):
    WAITING = auto()
    RUNNING = auto()
    FINISHED = auto()


@dataclass(slots=True, eq=False)
class RequestState:
    """What the sequences of one request share. ``embeddings`` has a slot per media item, filled as they arrive.

    ``keep_kv`` asks for the blocks to be held for another replica when prefill is done; ``has_media`` says whether the
    embeddings are or will be here, so that the request can be recomputed here.
    """

    request: Request
    rotary: RotaryPositions
    arrival: int
    keep_kv: bool = False
    has_media: bool = True
    embeddings: list[Embedding | None] = field(default_factory=list)
    sequences: list[EngineSequence] = field(default_factory=list)
    num_cached_tokens: int | None = None
    """Prompt tokens found in the prefix cache when prefill first started; ``None`` until then."""
    is_forked: bool = False
    """Whether the sequences of all choices exist; before the end of prefill there is one for all of them."""
    added_s: float = 0.0
    first_scheduled_s: float | None = None

    def num_ready_tokens(self, num_computed: int) -> int | None:
        """How many leading tokens can be computed when ``num_computed`` already are: all before the first media item
        whose embedding is still needed and not here; ``None`` if nothing is missing."""
        for item, embedding in zip(self.request.items, self.embeddings, strict=True):
            if embedding is None and item.placeholder.end > num_computed:
                return max(item.placeholder.offset, num_computed)
        return None

    @property
    def can_recompute(self) -> bool:
        return self.has_media or not self.request.items

    @property
    def num_unforked(self) -> int:
        """Sequences that will still appear."""
        return 0 if self.is_forked else self.request.sampling.n - len(self.sequences)

    @property
    def is_finished(self) -> bool:
        return all(sequence.status is SequenceStatus.FINISHED for sequence in self.sequences)


@dataclass(slots=True, eq=False)
class EngineSequence:
    """One choice of a request."""

    state: RequestState
    choice: int
    token_ids: list[int]
    num_computed_tokens: int = 0
    block_table: list[int] = field(default_factory=list)
    block_keys: list[bytes] = field(default_factory=list)
    num_listed_blocks: int = 0
    """Leading blocks of ``block_table`` that are listed in the prefix cache, or were found there."""
    status: SequenceStatus = SequenceStatus.WAITING

    @property
    def request(self) -> Request:
        return self.state.request

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        """Output tokens so far, those of an earlier placement included."""
        return len(self.token_ids) - self.request.num_prompt_tokens

    @property
    def output_token_ids(self) -> list[int]:
        return self.token_ids[self.request.num_prompt_tokens :]

    @property
    def is_decoding(self) -> bool:
        """Whether exactly the newest token is left to compute."""
        return self.num_computed_tokens == self.num_tokens - 1 and self.num_output_tokens > 0

    def num_ready_tokens(self, num_computed: int) -> int:
        """How many leading tokens can be computed when ``num_computed`` already are."""
        ready = self.state.num_ready_tokens(num_computed)
        return self.num_tokens if ready is None else ready
