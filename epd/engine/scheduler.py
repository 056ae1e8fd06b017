"""Which sequences run in the next step, with how many tokens, and who gives up blocks when there are none left.

Continuous batching with chunked prefill (Orca, OSDI 2022; Sarathi-Serve, OSDI 2024): a step is
``{sequence: num_tokens}``. Running sequences that decode come first, so that they never wait for a whole prompt; the
rest of the token budget goes to prompts, oldest first. When blocks run out, the youngest sequence loses its own and is
computed again later (or given back, if this replica lacks its embeddings). Pure bookkeeping: no clock, no tensors, no
I/O.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from epd.cache.block_pool import BlockPool
from epd.cache.prefix_cache import PrefixCache, extend_block_keys
from epd.engine.sequence import EngineSequence, RequestState, SequenceStatus


@dataclass(frozen=True, slots=True)
class SchedulerOutput:
    """One step's decision. ``num_tokens`` maps each sequence to how many of its tokens to compute, decodes first."""

    num_tokens: dict[EngineSequence, int]
    num_preempted: int = 0
    num_cached_tokens: int = 0
    """Tokens that sequences admitted in this pass found in the prefix cache."""
    returned: tuple[RequestState, ...] = ()

    @property
    def total_tokens(self) -> int:
        return sum(self.num_tokens.values())


@dataclass(slots=True)
class _Pass:
    """The state of one scheduling pass."""

    budget: int
    num_tokens: dict[EngineSequence, int] = field(default_factory=dict)
    num_preempted: int = 0
    num_cached_tokens: int = 0
    returned: list[RequestState] = field(default_factory=list)

    def take(self, sequence: EngineSequence, num_tokens: int) -> None:
        self.num_tokens[sequence] = num_tokens
        self.budget -= num_tokens

    def give_back(self, sequence: EngineSequence) -> None:
        self.budget += self.num_tokens.pop(sequence, 0)


class Scheduler:
    """Owns the queues of one engine and, with the pool and the prefix cache, who holds which block."""

    def __init__(
        self, pool: BlockPool, prefix_cache: PrefixCache | None, *, block_size: int, max_tokens: int, max_seqs: int
    ) -> None:
        self.pool = pool
        self.prefix_cache = prefix_cache
        self.block_size = block_size
        self.max_num_batched_tokens = max_tokens
        self.max_num_seqs = max_seqs
        self.waiting: deque[EngineSequence] = deque()
        self.running: list[EngineSequence] = []
        self.num_reserved_seqs = 0
        """Slots promised to requests whose blocks are being fetched."""

    # -- queues ------------------------------------------------------------------------------------------------------

    @property
    def num_free_slots(self) -> int:
        """Running slots that are neither taken nor promised (to siblings that appear when their prompt is done)."""
        siblings = sum(sequence.state.num_unforked for sequence in self.running)
        return self.max_num_seqs - len(self.running) - siblings - self.num_reserved_seqs

    def add(self, sequence: EngineSequence) -> None:
        """Queue a new sequence behind all others."""
        self.waiting.append(sequence)

    def add_running(self, sequence: EngineSequence) -> None:
        """Take in a sequence whose context is already in its blocks."""
        sequence.status = SequenceStatus.RUNNING
        self.running.append(sequence)

    def queue_again(self, sequence: EngineSequence) -> None:
        """Take all blocks from a sequence and put it in front of the queue, to be computed from its tokens."""
        if sequence in self.running:
            self.running.remove(sequence)
        self.free_blocks(sequence)
        sequence.status = SequenceStatus.WAITING
        self.waiting.appendleft(sequence)

    def remove(self, sequence: EngineSequence) -> None:
        """Finish a sequence, wherever it is, and free its blocks. Idempotent."""
        if sequence.status is SequenceStatus.RUNNING:
            self.running.remove(sequence)
        elif sequence.status is SequenceStatus.WAITING and sequence in self.waiting:
            self.waiting.remove(sequence)
        sequence.status = SequenceStatus.FINISHED
        self.free_blocks(sequence)

    def free_blocks(self, sequence: EngineSequence) -> None:
        self.pool.release(sequence.block_table)
        sequence.block_table = []
        sequence.num_computed_tokens = 0
        sequence.num_listed_blocks = 0

    # -- the pass ----------------------------------------------------------------------------------------------------

    def schedule(self) -> SchedulerOutput:
        """Decide the next step. Blocks for it are allocated when this returns."""
        step = _Pass(self.max_num_batched_tokens)
        for sequence in sorted(self.running, key=lambda sequence: not sequence.is_decoding):
            self._schedule_running(step, sequence)
        if not step.num_preempted:
            self._schedule_waiting(step)
        decodes_first = dict(sorted(step.num_tokens.items(), key=lambda entry: entry[1] > 1))
        return SchedulerOutput(decodes_first, step.num_preempted, step.num_cached_tokens, tuple(step.returned))

    def _schedule_running(self, step: _Pass, sequence: EngineSequence) -> None:
        if sequence.status is not SequenceStatus.RUNNING:
            return  # preempted earlier in this pass
        num_tokens = sequence.num_ready_tokens(sequence.num_computed_tokens) - sequence.num_computed_tokens
        num_tokens = min(num_tokens, step.budget)
        if num_tokens <= 0:
            return
        while not self._grow(sequence, num_tokens):
            victim = max(self.running, key=lambda candidate: (candidate.state.arrival, candidate.choice))
            self._preempt(step, victim)
            if victim is sequence or sequence.status is not SequenceStatus.RUNNING:
                return
        step.take(sequence, num_tokens)

    def _schedule_waiting(self, step: _Pass) -> None:
        for sequence in list(self.waiting):
            if step.budget <= 0 or self.num_free_slots < 1 + sequence.state.num_unforked:
                return
            cached = self._cached_prefix(sequence)
            num_cached_tokens = len(cached) * self.block_size
            num_ready_tokens = sequence.num_ready_tokens(num_cached_tokens)
            num_tokens = min(num_ready_tokens - num_cached_tokens, step.budget)
            if num_tokens <= 0:
                continue  # waits for an embedding; others may pass
            self.pool.acquire(cached)
            sequence.block_table = list(cached)
            sequence.num_computed_tokens = num_cached_tokens
            sequence.num_listed_blocks = len(cached)
            if not self._grow(sequence, num_tokens):
                self.free_blocks(sequence)
                return
            self.waiting.remove(sequence)
            self.add_running(sequence)
            if sequence.state.num_cached_tokens is None:
                # A request that resumes said what it found when it first started; now it may find its own blocks.
                is_resumed = bool(sequence.request.output_token_ids)
                sequence.state.num_cached_tokens = 0 if is_resumed else num_cached_tokens
            step.num_cached_tokens += num_cached_tokens
            step.take(sequence, num_tokens)

    def _cached_prefix(self, sequence: EngineSequence) -> list[int]:
        """Blocks of the longest cached prefix that leaves at least one token to compute, for its logits."""
        return self.cached_blocks(sequence, sequence.num_tokens - 1)

    def cached_blocks(self, sequence: EngineSequence, max_tokens: int) -> list[int]:
        """Blocks of the longest cached prefix of at most ``max_tokens`` tokens; without references."""
        if self.prefix_cache is None:
            return []
        extend_block_keys(
            sequence.block_keys, sequence.token_ids, sequence.num_tokens, self.block_size, sequence.request.items
        )
        return self.prefix_cache.match(sequence.block_keys[: max_tokens // self.block_size])

    def _grow(self, sequence: EngineSequence, num_tokens: int) -> bool:
        """Extend the block table to hold ``num_tokens`` more computed tokens, if there are enough free blocks."""
        num_blocks = -(-(sequence.num_computed_tokens + num_tokens) // self.block_size) - len(sequence.block_table)
        if num_blocks <= 0:
            return True
        if not self.pool.can_allocate(num_blocks):
            return False
        sequence.block_table.extend(self.pool.allocate(num_blocks))
        return True

    def _preempt(self, step: _Pass, victim: EngineSequence) -> None:
        step.num_preempted += 1
        if victim.state.can_recompute:
            step.give_back(victim)
            self.queue_again(victim)
            return
        for sequence in victim.state.sequences:
            step.give_back(sequence)
            self.remove(sequence)
        step.returned.append(victim.state)

    # -- after the pass ----------------------------------------------------------------------------------------------

    def mark_computed(self, sequence: EngineSequence, num_tokens: int) -> None:
        """Account for computed tokens, and list the blocks that became full in the prefix cache."""
        sequence.num_computed_tokens += num_tokens
        if self.prefix_cache is None:
            return
        extend_block_keys(
            sequence.block_keys,
            sequence.token_ids,
            sequence.num_computed_tokens,
            self.block_size,
            sequence.request.items,
        )
        num_full = sequence.num_computed_tokens // self.block_size
        for index in range(sequence.num_listed_blocks, num_full):
            self.prefix_cache.insert(sequence.block_keys[index], sequence.block_table[index])
        sequence.num_listed_blocks = max(sequence.num_listed_blocks, num_full)

    def sequences(self) -> Iterator[EngineSequence]:
        yield from self.running
        yield from self.waiting
