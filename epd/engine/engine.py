"""One engine: requests in, tokens out, a step at a time.

Composes the scheduler (who runs), the runner (tensors), and the sampler (tokens), and owns what spans steps: the state
of each request, blocks held for other replicas, and blocks reserved for arriving KV. Single-threaded: whoever owns the
thread calls the methods between steps (``epd.engine.engine_thread``). Knows nothing of handles, transports or text.

A request comes in one of three ways:

* ``add``: prefill here and go on decoding here;
* ``add(keep_kv=True)``: prefill here, then hold the blocks for another replica until ``release_hold``;
* ``reserve`` then ``activate``: its KV arrives from elsewhere into reserved blocks, and it decodes here.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from epd.cache.block_pool import BlockPool
from epd.cache.kv_cache import KVCache
from epd.cache.prefix_cache import PrefixCache
from epd.config import EngineConfig
from epd.engine.model_runner import Runner
from epd.engine.reservations import Reservation, Reservations
from epd.engine.runners import build_runner
from epd.engine.sampler import SampledToken, SampleRow, is_plain_greedy, sample
from epd.engine.scheduler import Scheduler, SchedulerOutput
from epd.engine.sequence import EngineSequence, RequestState, SequenceStatus
from epd.errors import InvalidRequestError, PromptTooLongError
from epd.types import Embedding, FinishReason, LanguageModel, Request, RotaryPositions, StageReport, TokenChunk


@dataclass(frozen=True, slots=True)
class PrefillDone:
    """A ``keep_kv`` request has its first tokens. ``hold_id`` names the held blocks; ``None`` if nothing is left to
    decode. ``block_ids`` cover ``num_tokens`` computed tokens."""

    request_id: str
    first_tokens: tuple[TokenChunk, ...]
    hold_id: int | None
    block_ids: tuple[int, ...]
    num_tokens: int
    num_cached_tokens: int


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What a step produced. ``chunks`` holds new tokens by request; ``returned`` names requests given back,
    ``progressed`` those with ``keep_kv`` of which a part was computed."""

    chunks: dict[str, list[TokenChunk]] = field(default_factory=dict)
    prefilled: tuple[PrefillDone, ...] = ()
    finished: tuple[str, ...] = ()
    returned: tuple[str, ...] = ()
    progressed: tuple[str, ...] = ()
    num_tokens: int = 0


@dataclass(slots=True)
class EngineStats:
    """Counters of one engine; they only grow."""

    prefill_tokens: int = 0
    decode_tokens: int = 0
    preemptions: int = 0
    prefix_hit_tokens: int = 0
    num_steps: int = 0
    step_s: float = 0.0


class Engine:
    """See the module. Methods are not thread-safe. ``runner`` is by default what suits the configured device."""

    def __init__(
        self,
        model: LanguageModel,
        kv_cache: KVCache,
        config: EngineConfig,
        *,
        runner: Runner | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.kv_cache = kv_cache
        self.stats = EngineStats()
        self._clock = clock
        prefix_cache = PrefixCache() if config.enable_prefix_cache else None
        on_reuse = prefix_cache.forget if prefix_cache is not None else lambda block_id: None
        self.pool = BlockPool(kv_cache.num_blocks, on_reuse)
        self.scheduler = Scheduler(
            self.pool,
            prefix_cache,
            block_size=kv_cache.block_size,
            max_tokens=config.max_num_batched_tokens,
            max_seqs=config.max_num_seqs,
        )
        self._runner = runner or build_runner(model, kv_cache, config)
        self._eos_token_ids = model.eos_token_ids
        self._states: dict[str, RequestState] = {}
        self._arrivals = 0
        self._holds: dict[int, list[int]] = {}
        self._next_hold = 0
        self._reservations = Reservations(self.pool, self.scheduler, kv_cache.block_size)

    # -- requests in -------------------------------------------------------------------------------------------------

    def check_fits(self, request: Request) -> None:
        """Raise ``PromptTooLongError`` or ``InvalidRequestError`` for a request that could never finish here."""
        params, block_size = request.sampling, self.kv_cache.block_size
        if params.n > self.scheduler.max_num_seqs:
            raise InvalidRequestError(
                f"n is {params.n}, but at most {self.scheduler.max_num_seqs} choices can run", "n"
            )
        longest = request.num_prompt_tokens + params.max_tokens
        shared = request.num_prompt_tokens // block_size
        own = -(-longest // block_size) - shared
        if shared + own * params.n > self.pool.num_blocks:
            raise PromptTooLongError(
                f"the prompt of {request.num_prompt_tokens} tokens with {params.n} x {params.max_tokens} output tokens "
                f"needs {shared + own * params.n} KV blocks of {block_size} tokens, and the cache has "
                f"{self.pool.num_blocks}"
            )

    def add(self, request: Request, rotary: RotaryPositions, *, keep_kv: bool = False) -> None:
        """Queue a request to be prefilled here. Its embeddings follow by ``set_embedding``."""
        self.check_fits(request)
        state = self._new_state(request, rotary, keep_kv=keep_kv, has_media=True)
        sequence = self._new_sequence(state, 0, [*request.prompt_token_ids, *request.output_token_ids])
        self.scheduler.add(sequence)

    def set_embedding(self, request_id: str, index: int, embedding: Embedding) -> None:
        """Provide the embedding of item ``index``; a no-op when the request has ended.

        Raises ``InvalidRequestError`` when it has not one row for each placeholder.
        """
        state = self._states.get(request_id)
        if state is None:
            return
        item = state.request.items[index]
        if embedding.values.shape[0] != item.num_tokens:
            raise InvalidRequestError(
                f"{item.param}: the encoder made {embedding.values.shape[0]} rows for {item.num_tokens} placeholders",
                item.param,
            )
        state.embeddings[index] = embedding

    def abort(self, request_id: str) -> None:
        """Drop a request in any state and free what it holds here. Unknown and finished ones are ignored."""
        self._reservations.withdraw(request_id)
        if (state := self._states.pop(request_id, None)) is not None:
            for sequence in state.sequences:
                self.scheduler.remove(sequence)

    # -- KV from elsewhere -------------------------------------------------------------------------------------------

    def reserve(self, request: Request, num_tokens: int, on_ready: Callable[[Reservation], None]) -> None:
        """Set blocks aside for ``num_tokens`` tokens of KV, now or when there are enough; then call ``on_ready``.

        First come, first served. ``abort`` withdraws it.
        """
        self.check_fits(request)
        self._reservations.request(request, num_tokens, on_ready)

    def serve_reservations(self) -> None:
        """Grant pending reservations while blocks and slots last; to be called between steps."""
        self._reservations.serve()

    def cancel_reservation(self, reservation: Reservation) -> None:
        """Free a reservation. Nothing may be writing to its blocks any more."""
        self._reservations.cancel(reservation)

    def hold_reservation(self, reservation: Reservation) -> int:
        """Keep a reservation's blocks out of use, whatever becomes of its request, until ``release_hold``: somebody may
        still be writing to them."""
        self._reservations.take(reservation)
        return self._new_hold(reservation.block_table + reservation.spare_blocks)

    def activate(
        self, reservation: Reservation, first_tokens: Sequence[TokenChunk], rotary: RotaryPositions, *, has_kv: bool
    ) -> None:
        """Start decoding a request whose KV has arrived in the reserved blocks (and is confirmed).

        With ``has_kv`` false the transfer failed: the blocks are given back and the request, which must have no media,
        is prefilled here, prompt and first tokens. Choices that ended with their first token are left out.
        """
        request = reservation.request
        self._reservations.take(reservation)
        state = self._new_state(request, rotary, keep_kv=False, has_media=False)
        assert has_kv or state.can_recompute, "a request without its embeddings cannot be prefilled here"
        open_choices = [chunk for chunk in first_tokens if chunk.finish_reason is None]
        tokens = [*request.prompt_token_ids, *request.output_token_ids]
        siblings = [
            self._new_sequence(state, chunk.choice - request.first_choice, [*tokens, *chunk.token_ids])
            for chunk in open_choices
        ]
        state.is_forked = True
        if has_kv:
            self._share_context(siblings, reservation)
        else:
            for sequence in siblings:
                self.scheduler.add(sequence)
            self.pool.release(reservation.block_table + reservation.spare_blocks)

    def _share_context(self, siblings: Sequence[EngineSequence], reservation: Reservation) -> None:
        spare = list(reservation.spare_blocks)
        for index, sequence in enumerate(siblings):
            sequence.block_keys = list(reservation.block_keys)
            sequence.num_listed_blocks = reservation.num_cached_blocks
            if index == 0:
                sequence.block_table = list(reservation.block_table)
            elif reservation.num_tokens % self.kv_cache.block_size:
                self._runner.copy_block(reservation.block_table[-1], spare[-1])
                self.pool.acquire(reservation.block_table[:-1])
                sequence.block_table = [*reservation.block_table[:-1], spare.pop()]
            else:
                self.pool.acquire(reservation.block_table)
                sequence.block_table = list(reservation.block_table)
            self.scheduler.mark_computed(sequence, reservation.num_tokens)
            self.scheduler.add_running(sequence)
        self.pool.release(spare)

    # -- KV for elsewhere --------------------------------------------------------------------------------------------

    def hold_computed(self, request_id: str, first_block: int) -> tuple[int, tuple[int, ...]] | None:
        """Hold those full blocks from ``first_block`` on that are computed, of a ``keep_kv`` request that is running.

        Returns the hold and the blocks, or ``None`` if there are none. They stay as they are until ``release_hold``,
        even if the request is preempted or aborted meanwhile.
        """
        state = self._states.get(request_id)
        if state is None:
            return None
        sequence = state.sequences[0]
        block_ids = sequence.block_table[first_block : sequence.num_computed_tokens // self.kv_cache.block_size]
        if not block_ids:
            return None
        self.pool.acquire(block_ids)
        return self._new_hold(block_ids), tuple(block_ids)

    def _new_hold(self, block_ids: list[int]) -> int:
        hold_id = self._next_hold
        self._next_hold += 1
        self._holds[hold_id] = block_ids
        return hold_id

    def release_hold(self, hold_id: int) -> None:
        """Free the blocks that were held for another replica. Idempotent."""
        self.pool.release(self._holds.pop(hold_id, []))

    # -- the step ----------------------------------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        return bool(self.scheduler.running or self.scheduler.waiting)

    def step(self) -> StepOutput:
        """Schedule, run, sample, post-process."""
        started_s = self._clock()
        decision = self.scheduler.schedule()
        self._account(decision, started_s)
        returned = self._drop_returned(decision.returned)
        if not decision.num_tokens:
            return StepOutput(returned=returned)
        complete = [
            sequence
            for sequence, count in decision.num_tokens.items()
            if sequence.num_computed_tokens + count == sequence.num_tokens
        ]
        rows = [row for index, sequence in enumerate(complete) for row in self._sample_rows(index, sequence)]
        pending = self._runner.start(decision.num_tokens, complete, all(map(is_plain_greedy, rows)))
        for sequence, count in decision.num_tokens.items():
            self.scheduler.mark_computed(sequence, count)
        logits = pending.wait()
        sampled = sample(logits.values, rows, logits.greedy_ids)
        output = self._post_process(complete, sampled, returned, decision)
        self.stats.num_steps += 1
        self.stats.step_s += self._clock() - started_s
        return output

    def _drop_returned(self, states: Sequence[RequestState]) -> tuple[str, ...]:
        for state in states:
            del self._states[state.request.request_id]
        return tuple(state.request.request_id for state in states)

    def _account(self, decision: SchedulerOutput, now_s: float) -> None:
        self.stats.preemptions += decision.num_preempted
        self.stats.prefix_hit_tokens += decision.num_cached_tokens
        for sequence, num_tokens in decision.num_tokens.items():
            if sequence.is_decoding:
                self.stats.decode_tokens += 1
            else:
                self.stats.prefill_tokens += num_tokens
            if sequence.state.first_scheduled_s is None:
                sequence.state.first_scheduled_s = now_s

    def _sample_rows(self, index: int, sequence: EngineSequence) -> list[SampleRow]:
        """One draw for a sequence that goes on, ``n`` draws when a prompt with ``n`` choices is done."""
        request, params = sequence.request, sequence.request.sampling
        choices = range(params.n) if sequence.state.num_unforked else [sequence.choice]
        output = sequence.output_token_ids
        # The end token too when it would be ignored: a client that asks for so many tokens wants tokens that show.
        ends = self._eos_token_ids | frozenset(params.stop_token_ids)
        forbidden = sorted(ends) if len(output) < params.min_tokens else ()
        return [
            SampleRow(
                row=index,
                params=params,
                choice=choice + request.first_choice,
                position=len(output),
                prompt_token_ids=request.prompt_token_ids,
                output_token_ids=output,
                forbidden_ids=forbidden,
            )
            for choice in choices
        ]

    def _end_token_ids(self, request: Request) -> frozenset[int]:
        eos = frozenset() if request.sampling.ignore_eos else self._eos_token_ids
        return eos | frozenset(request.sampling.stop_token_ids)

    def _post_process(
        self,
        complete: Sequence[EngineSequence],
        sampled: Sequence[SampledToken],
        returned: tuple[str, ...],
        decision: SchedulerOutput,
    ) -> StepOutput:
        chunks: dict[str, list[TokenChunk]] = {}
        prefilled: list[PrefillDone] = []
        finished: list[str] = []
        tokens = iter(sampled)
        for sequence in complete:
            state = sequence.state
            siblings = [sequence, *self._fork(sequence)]
            new = [self._append(sibling, next(tokens)) for sibling in siblings]
            if sequence.num_output_tokens == 1 + len(state.request.output_token_ids):
                new[0] = self._with_report(state, new[0])
            if state.keep_kv:
                prefilled.append(self._hold(state, sequence, new))
                continue
            chunks.setdefault(state.request.request_id, []).extend(new)
            for sibling, chunk in zip(siblings, new, strict=True):
                if chunk.finish_reason is not None:
                    self.scheduler.remove(sibling)
            if state.is_finished:
                finished.append(state.request.request_id)
                del self._states[state.request.request_id]
        progressed = tuple(
            sequence.request.request_id
            for sequence in decision.num_tokens
            if sequence.state.keep_kv and sequence.status is SequenceStatus.RUNNING
        )
        return StepOutput(chunks, tuple(prefilled), tuple(finished), returned, progressed, decision.total_tokens)

    def _with_report(self, state: RequestState, chunk: TokenChunk) -> TokenChunk:
        """Attach what prefill took to the first token made here."""
        first_scheduled_s = state.first_scheduled_s if state.first_scheduled_s is not None else state.added_s
        report = StageReport(
            timings_s={
                "prefill_queue": first_scheduled_s - state.added_s,
                "prefill": self._clock() - first_scheduled_s,
            },
            cached={"prefix_tokens": state.num_cached_tokens or 0},
        )
        return replace(chunk, report=report)

    def _append(self, sequence: EngineSequence, token: SampledToken) -> TokenChunk:
        sequence.token_ids.append(token.token_id)
        request = sequence.request
        reason = None
        if token.token_id in self._end_token_ids(request):
            reason = FinishReason.STOP
        elif sequence.num_output_tokens >= request.sampling.max_tokens:
            reason = FinishReason.LENGTH
        logprobs = () if token.logprob is None else (token.logprob,)
        return TokenChunk(sequence.choice + request.first_choice, (token.token_id,), reason, logprobs)

    def _fork(self, parent: EngineSequence) -> list[EngineSequence]:
        """Make the other choices, if a prompt is done: full blocks are shared, the last one is copied.

        A choice for which no block is free is computed from its tokens when there are blocks again.
        """
        state, block_size = parent.state, self.kv_cache.block_size
        children = []
        for choice in range(1, 1 + state.num_unforked):
            child = self._new_sequence(state, choice, list(parent.token_ids))
            children.append(child)
            if state.keep_kv:
                continue  # the receiving replica makes the copies
            num_full = parent.num_computed_tokens // block_size
            has_partial = parent.num_computed_tokens % block_size != 0
            if has_partial and not self.pool.can_allocate(1):
                self.scheduler.waiting.appendleft(child)
                continue
            self.pool.acquire(parent.block_table[:num_full])
            child.block_table = parent.block_table[:num_full]
            if has_partial:
                child.block_table.extend(self.pool.allocate(1))
                self._runner.copy_block(parent.block_table[num_full], child.block_table[num_full])
            child.block_keys = list(parent.block_keys)
            child.num_computed_tokens = parent.num_computed_tokens
            child.num_listed_blocks = parent.num_listed_blocks
            self.scheduler.add_running(child)
        state.is_forked = True
        return children

    def _hold(self, state: RequestState, sequence: EngineSequence, first_tokens: list[TokenChunk]) -> PrefillDone:
        """End a ``keep_kv`` request here; its blocks stay referenced under a hold if anything is left to decode."""
        hold_id: int | None = None
        block_ids: tuple[int, ...] = ()
        num_tokens = sequence.num_computed_tokens
        if any(chunk.finish_reason is None for chunk in first_tokens):
            block_ids = tuple(sequence.block_table)
            hold_id = self._new_hold(sequence.block_table)
            sequence.block_table = []
        for sibling in state.sequences:
            self.scheduler.remove(sibling)
        del self._states[state.request.request_id]
        return PrefillDone(
            state.request.request_id,
            tuple(first_tokens),
            hold_id,
            block_ids,
            num_tokens,
            state.num_cached_tokens or 0,
        )

    # -- state -------------------------------------------------------------------------------------------------------

    def _new_state(self, request: Request, rotary: RotaryPositions, *, keep_kv: bool, has_media: bool) -> RequestState:
        if request.request_id in self._states:
            raise InvalidRequestError(f"request {request.request_id} is already running here")
        embeddings: list[Embedding | None] = [None] * len(request.items)
        state = RequestState(request, rotary, self._arrivals, keep_kv, has_media, embeddings, added_s=self._clock())
        self._arrivals += 1
        self._states[request.request_id] = state
        return state

    def _new_sequence(self, state: RequestState, choice: int, token_ids: list[int]) -> EngineSequence:
        sequence = EngineSequence(state, choice, token_ids)
        state.sequences.append(sequence)
        return sequence

    def num_cached_tokens(self, request_id: str) -> int | None:
        """Prompt tokens that the prefix cache spared; ``None`` before prefill started or after the request ended."""
        state = self._states.get(request_id)
        return None if state is None else state.num_cached_tokens

    @property
    def num_pending_reservations(self) -> int:
        return self._reservations.num_pending

    @property
    def live_request_ids(self) -> tuple[str, ...]:
        return (*self._states, *self._reservations.request_ids)

    @property
    def num_live_requests(self) -> int:
        return len(self.live_request_ids)

    def check_integrity(self) -> None:
        """Assert that every block reference belongs to a sequence, a hold or a reservation, and none is lost."""
        sequences = [sequence for state in self._states.values() for sequence in state.sequences]
        holders = [sequence.block_table for sequence in sequences]
        holders += [*self._holds.values(), *self._reservations.block_lists]
        self.pool.check_integrity(holders)
        queued = set(self.scheduler.sequences())
        live = {sequence for sequence in sequences if sequence.status is not SequenceStatus.FINISHED}
        assert queued == live, "queues differ from the unfinished sequences"
        if not self.num_live_requests and not self._holds:
            assert self.pool.num_free == self.pool.num_blocks, "idle, but blocks are still referenced"
            assert self.scheduler.num_reserved_seqs == 0, "idle, but slots are still promised"
