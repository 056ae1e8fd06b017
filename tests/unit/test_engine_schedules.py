"""Random histories of two engines: without this, an unlucky order of events costs memory or gives a user wrong tokens.

Requests are added, aborted, preempted, finished, forked and handed over; embeddings come late, transfers take their
time, fail or never come, leases end early. After each event the books balance, decodes got their token, and no step
was larger than allowed; in the end every request that was not aborted has exactly the tokens of an undisturbed run, and
nothing is held. That the checks see what they are for is itself tested: engines with one fault each do not pass.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

import epd.cache.prefix_cache
import epd.engine.scheduler
from epd.cache.block_pool import BlockPool
from epd.cache.prefix_cache import PrefixCache, block_key
from epd.engine.engine import Engine, PrefillDone, StepOutput
from epd.engine.model_runner import ModelRunner
from epd.engine.reservations import Reservation, Reservations
from epd.engine.scheduler import Scheduler
from epd.engine.sequence import EngineSequence, SequenceStatus
from epd.errors import PromptTooLongError
from epd.types import Embedding, FinishReason, Request, TokenChunk
from tests.fake_engine import GREEDY, image_request, make_engine, rows_of
from tests.fake_language_model import FakeLanguageModel, text_positions

EOS = 7
MAX_SEQS = 4


@dataclass
class Transfer:
    """A finished prefill whose blocks wait for a place on the target, or are on their way to it."""

    request: Request
    done: PrefillDone
    has_lease: bool = True
    reservation: Reservation | None = None


@dataclass
class History:
    """Two engines, the second of which only decodes, what was asked of them, and what came out."""

    source: Engine
    target: Engine
    requests: dict[str, Request] = field(default_factory=dict)
    got: dict[str, dict[int, list[int]]] = field(default_factory=dict)
    ended: dict[str, set[int]] = field(default_factory=dict)
    missing_embeddings: list[str] = field(default_factory=list)
    transfers: dict[str, Transfer] = field(default_factory=dict)
    aborted: set[str] = field(default_factory=set)

    # -- events ------------------------------------------------------------------------------------------------------

    def add(self, request: Request, *, is_split: bool) -> None:
        self.source.add(request, text_positions(request.num_prompt_tokens), keep_kv=is_split)
        choices = range(request.first_choice, request.first_choice + request.sampling.n)
        self.requests[request.request_id] = request
        self.got[request.request_id] = {choice: list(request.output_token_ids) for choice in choices}
        self.ended[request.request_id] = set()
        if request.items:
            self.missing_embeddings.append(request.request_id)

    def deliver_embedding(self, request_id: str) -> None:
        self.missing_embeddings.remove(request_id)
        self.source.set_embedding(request_id, 0, Embedding(rows_of(self.requests[request_id].items[0].mm_hash)))

    def step(self, engine: Engine) -> None:
        engine.serve_reservations()
        decoding = [sequence for sequence in engine.scheduler.running if sequence.is_decoding]
        output = engine.step()
        assert output.num_tokens <= engine.scheduler.max_num_batched_tokens
        assert len(engine.scheduler.running) <= engine.scheduler.max_num_seqs
        assert_decodes_did_not_wait(decoding, output)
        for request_id, chunks in output.chunks.items():
            self._take(request_id, chunks)
        for done in output.prefilled:
            self._take(done.request_id, done.first_tokens)
            if done.hold_id is not None:
                self.transfers[done.request_id] = Transfer(self.requests[done.request_id], done)
                self._reserve(done.request_id)
        for request_id in output.returned:
            self._resume(request_id)

    def _reserve(self, request_id: str) -> None:
        transfer = self.transfers[request_id]

        def on_ready(reservation: Reservation) -> None:
            transfer.reservation = reservation

        self.target.reserve(transfer.request, transfer.done.num_tokens, on_ready)

    def end_lease(self, request_id: str) -> None:
        """The owner of the blocks waited for too long."""
        self.transfers[request_id].has_lease = False
        self.source.release_hold(self.transfers[request_id].done.hold_id)

    def arrive(self, request_id: str, *, is_lost: bool) -> None:
        """The transfer into a granted reservation ends, one way or the other."""
        transfer = self.transfers.pop(request_id)
        reservation, done = transfer.reservation, transfer.done
        has_kv = transfer.has_lease and not is_lost
        positions = text_positions(transfer.request.num_prompt_tokens)
        if has_kv:
            wanted = list(done.block_ids[reservation.num_cached_blocks :])
            self.target.kv_cache.blocks[reservation.missing_blocks] = self.source.kv_cache.blocks[wanted]
        else:
            self.target.kv_cache.blocks[reservation.missing_blocks] = 1e6  # half-written
        if has_kv or not transfer.request.items:
            self.target.activate(reservation, done.first_tokens, positions, has_kv=has_kv)
        else:
            self.target.cancel_reservation(reservation)
            self._resume(request_id)
        self.source.release_hold(done.hold_id)

    def abort(self, request_id: str, *, is_thorough: bool) -> None:
        self.source.abort(request_id)
        self.target.abort(request_id)
        if (transfer := self.transfers.pop(request_id, None)) is not None:
            self.source.release_hold(transfer.done.hold_id)
            if transfer.reservation is not None and is_thorough:
                self.target.cancel_reservation(transfer.reservation)  # a second time, as a driver's clean-up may
        if request_id in self.missing_embeddings:
            self.deliver_embedding(request_id)  # too late: must be ignored
        self.aborted.add(request_id)

    def _take(self, request_id: str, chunks: Iterable[TokenChunk]) -> None:
        for chunk in chunks:
            assert chunk.choice not in self.ended[request_id], "a choice went on after its end"
            self.got[request_id][chunk.choice].extend(chunk.token_ids)
            if chunk.finish_reason is not None:
                self.ended[request_id].add(chunk.choice)
                is_eos = chunk.token_ids[-1] == EOS and not self.requests[request_id].sampling.ignore_eos
                assert (chunk.finish_reason is FinishReason.STOP) == is_eos

    def _resume(self, request_id: str) -> None:
        """Compute a returned request again where its embeddings can be, choice by choice."""
        request = self.requests[request_id]
        for choice, tokens in self.got[request_id].items():
            if choice not in self.ended[request_id]:
                part = replace(request.resume_choice(choice, tokens), request_id=f"{request_id}/{choice}")
                self.add(part, is_split=False)
                self.got[request_id][choice] = self.got[part.request_id][choice]

    # -- what can happen next, and the end ---------------------------------------------------------------------------

    @property
    def arriving(self) -> list[str]:
        return [name for name, transfer in self.transfers.items() if transfer.reservation is not None]

    @property
    def leased(self) -> list[str]:
        return [name for name, transfer in self.transfers.items() if transfer.has_lease]

    def check(self) -> None:
        for engine in (self.source, self.target):
            engine.check_integrity()
            assert engine.scheduler.num_free_slots >= 0, "more sequences than slots"

    def finish(self) -> None:
        for _ in range(2000):
            for request_id in [*self.missing_embeddings]:
                self.deliver_embedding(request_id)
            for request_id in self.arriving:
                self.arrive(request_id, is_lost=False)
            if not (self.source.num_live_requests or self.target.num_live_requests):
                return
            self.step(self.source)
            self.step(self.target)
            self.check()
        raise AssertionError("the engines made no progress")

    def assert_all_is_well(self) -> None:
        self.check()
        for engine in (self.source, self.target):
            assert engine.pool.num_free == engine.pool.num_blocks
            assert engine.scheduler.num_free_slots == MAX_SEQS
        for request_id, request in self.requests.items():
            if "/" not in request_id and not self._is_aborted(request_id):
                for choice, tokens in self.got[request_id].items():
                    assert tokens == expected(request, choice), f"{request_id}, choice {choice}"

    def _is_aborted(self, request_id: str) -> bool:
        return any(name.split("/")[0] == request_id for name in self.aborted)


def assert_decodes_did_not_wait(decoding: Sequence[EngineSequence], output: StepOutput) -> None:
    """Each sequence that was decoding got a token, unless it lost its blocks."""
    for sequence in decoding:
        request = sequence.request
        if sequence.status is not SequenceStatus.WAITING and request.request_id not in output.returned:
            made = {chunk.choice for chunk in output.chunks.get(request.request_id, [])}
            assert sequence.choice + request.first_choice in made, "a decode waited"


_EXPECTED: dict[tuple[object, ...], list[int]] = {}


def expected(request: Request, choice: int) -> list[int]:
    """The tokens of an undisturbed run, computed densely."""
    key = (request.prompt_token_ids, request.items, replace(request.sampling, n=1), choice)
    if key not in _EXPECTED:
        rows = [rows_of(item.mm_hash) for item in request.items]
        model = FakeLanguageModel(eos_token_ids=[EOS])
        _EXPECTED[key] = model.reference(request, text_positions(request.num_prompt_tokens), rows, choice)
    return _EXPECTED[key]


@st.composite
def requests(draw, index: int) -> Request:
    sampling = replace(
        GREEDY,
        max_tokens=draw(st.integers(1, 9)),
        n=draw(st.sampled_from([1, 1, 1, 2, 3])),
        ignore_eos=draw(st.booleans()),
    )
    if draw(st.booleans()):
        # Two candidates: the draw has one boundary, and rounding does not reach it.
        sampling = replace(sampling, temperature=1.0, top_k=2, seed=draw(st.integers(0, 2)))
    if draw(st.booleans()):
        return image_request(f"r{index}", draw(st.sampled_from(["red", "blue"])), sampling=sampling)
    # Few different blocks: prompts share their start, and the same block follows upon different ones.
    blocks = draw(st.lists(st.sampled_from([(1, 2, 3, 4), (5, 6, 8, 9)]), max_size=4))
    tail = range(10, 10 + draw(st.integers(0 if blocks else 1, 3)))
    return Request(f"r{index}", (*(token for block in blocks for token in block), *tail), sampling)


def events(history: History) -> dict[str, list[str]]:
    """What can happen now, and to whom. ``""`` where it happens to nobody in particular."""
    return {
        "step source": [""],
        "step target": [""],
        "step both": [""],
        "add": [""] if len(history.requests) < 9 else [],
        "deliver": history.missing_embeddings,
        "arrive": history.arriving,
        "lose": history.arriving,
        "end lease": history.leased,
        "abort": sorted(history.requests.keys() - history.aborted),
        "abort and clean up": sorted(history.requests.keys() - history.aborted),
    }


def happen(history: History, event: str, subject: str, data) -> None:
    if event.startswith("step"):
        if event != "step target":
            history.step(history.source)
        if event != "step source":
            history.step(history.target)
    elif event == "add":
        request, is_split = data.draw(requests(len(history.requests))), data.draw(st.booleans(), "is_split")
        with contextlib.suppress(PromptTooLongError):
            history.target.check_fits(request)
            history.add(request, is_split=is_split)
    elif event == "deliver":
        history.deliver_embedding(subject)
    elif event in ("arrive", "lose"):
        history.arrive(subject, is_lost=event == "lose")
    elif event == "end lease":
        history.end_lease(subject)
    else:
        history.abort(subject, is_thorough=event == "abort and clean up")


WEIGHTS = {"step source": 6, "step target": 6, "step both": 8, "add": 8, "deliver": 5, "arrive": 6}
"""How much more often something happens than what has a weight of one."""


def check_random_schedule(data) -> History:
    fields = {"max_tokens": data.draw(st.integers(4, 20), "max_num_batched_tokens"), "max_seqs": MAX_SEQS}
    source, target = (
        make_engine(
            num_blocks=data.draw(st.integers(6, 13), "num_blocks"),
            enable_prefix_cache=data.draw(st.integers(0, 7), "has_prefix_cache") > 0,
            model=FakeLanguageModel(eos_token_ids=[EOS]),
            **fields,
        )[0]
        for _ in range(2)
    )
    history = History(source, target)
    for _ in range(data.draw(st.integers(5, 40), "num_events")):
        possible = {event: subjects for event, subjects in events(history).items() if subjects}
        weighted = [event for event in possible for _ in range(WEIGHTS.get(event, 1))]
        event = data.draw(st.sampled_from(weighted), "event")
        happen(history, event, data.draw(st.sampled_from(possible[event]), "subject"), data)
        history.check()
    history.finish()
    history.assert_all_is_well()
    return history


@settings(max_examples=1000, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_random_schedules_keep_the_books_and_the_tokens(data):
    check_random_schedule(data)


@pytest.mark.slow
@settings(max_examples=10_000, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_ten_thousand_random_schedules_keep_the_books_and_the_tokens(data):
    check_random_schedule(data)


# -- engines with one fault each ---------------------------------------------------------------------------------------


def nothing(*args: object, **kwargs: object) -> None:
    pass


def freed_twice(scheduler: Scheduler, sequence: EngineSequence, free_blocks=Scheduler.free_blocks) -> None:
    scheduler.pool.release(sequence.block_table)
    free_blocks(scheduler, sequence)


def kept(scheduler: Scheduler, sequence: EngineSequence) -> None:
    sequence.block_table = []
    sequence.num_computed_tokens = sequence.num_listed_blocks = 0


def without_media(parent, token_ids, start, items):
    return block_key(parent, token_ids, start, ())


def without_what_stands_before(parent, token_ids, start, items):
    return block_key(None, token_ids, start, items)


def listed_too_early(
    scheduler: Scheduler, sequence: EngineSequence, num_tokens: int, mark_computed=Scheduler.mark_computed
) -> None:
    mark_computed(scheduler, sequence, num_tokens + 1)
    sequence.num_computed_tokens -= 1


def prompts_first(items, *, key):
    items = list(items)
    return sorted(items, key=key, reverse=bool(items) and isinstance(items[0], EngineSequence))


def ignoring_siblings(scheduler: Scheduler) -> int:
    return scheduler.max_num_seqs - len(scheduler.running) - scheduler.num_reserved_seqs


def ignoring_promises(scheduler: Scheduler) -> int:
    siblings = sum(sequence.state.num_unforked for sequence in scheduler.running)
    return scheduler.max_num_seqs - len(scheduler.running) - siblings


def uninterrupted(scheduler: Scheduler, step: object, victim: EngineSequence) -> None:
    step.num_preempted += 1
    step.give_back(victim)
    scheduler.queue_again(victim)


FAULTS = {
    "finished sequences keep their blocks": (Scheduler, "free_blocks", kept),
    "blocks are freed twice": (Scheduler, "free_blocks", freed_twice),
    "a preempted sequence stays in the step": (epd.engine.scheduler._Pass, "give_back", nothing),
    "a request that lacks its embeddings is computed again": (Scheduler, "_preempt", uninterrupted),
    "prompts go before decodes": (epd.engine.scheduler, "sorted", prompts_first),
    "choices to come have no slot": (Scheduler, "num_free_slots", property(ignoring_siblings)),
    "requests whose blocks are on their way have no slot": (Scheduler, "num_free_slots", property(ignoring_promises)),
    "blocks are listed before they are full": (Scheduler, "mark_computed", listed_too_early),
    "reused blocks stay listed": (PrefixCache, "forget", nothing),
    "keys leave the media out": (epd.cache.prefix_cache, "block_key", without_media),
    "keys leave out what stands before": (epd.cache.prefix_cache, "block_key", without_what_stands_before),
    "a hit takes no reference": (BlockPool, "acquire", nothing),
    "choices do not get a copy of the last block": (ModelRunner, "copy_block", nothing),
    "a cancelled reservation keeps its blocks": (Reservations, "cancel", nothing),
    "an abort leaves a reservation": (Reservations, "withdraw", nothing),
    "a hold is never released": (Engine, "release_hold", nothing),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_broken_engine_does_not_pass(fault, monkeypatch):
    owner, name, broken = FAULTS[fault]
    monkeypatch.setattr(owner, name, broken, raising=False)

    @settings(
        max_examples=1000,
        deadline=None,
        database=None,
        derandomize=True,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(st.data())
    def run(data):
        check_random_schedule(data)

    with pytest.raises(Exception):  # noqa: B017, PT011 - whatever it is that the fault leads to
        run()
