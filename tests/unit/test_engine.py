"""The engine's promises: without them users get other tokens under load than alone, or a server that fills up.

Everything runs on a model whose next token depends on every token in its blocks, so that a wrong block shows.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from epd.cache.kv_cache import allocate_kv_cache
from epd.config import EngineConfig
from epd.engine.engine import Engine, PrefillDone
from epd.engine.reservations import Reservation
from epd.errors import InvalidRequestError, PromptTooLongError
from epd.types import (
    Embedding,
    FinishReason,
    MediaItem,
    Modality,
    PlaceholderRange,
    Request,
    SamplingParams,
    TokenChunk,
)
from tests.fake_language_model import HIDDEN, FakeLanguageModel, text_positions

GREEDY = SamplingParams(temperature=0.0, max_tokens=8)


def make_engine(*, num_blocks: int = 64, block_size: int = 4, max_tokens: int = 16, max_seqs: int = 8, **fields):
    model = fields.pop("model", None) or FakeLanguageModel()
    config = EngineConfig(
        block_size=block_size, max_num_batched_tokens=max_tokens, max_num_seqs=max_seqs, kv_cache_bytes=1, **fields
    )
    cache = allocate_kv_cache(model.kv_spec, block_size=block_size, num_blocks=num_blocks, model_fingerprint="fake")
    return Engine(model, cache, config), model


def prompt(request_id: str, num_tokens: int, *, seed: int = 0, sampling: SamplingParams = GREEDY) -> Request:
    rng = random.Random(f"{seed}-{num_tokens}")
    return Request(request_id, tuple(rng.randrange(50) for _ in range(num_tokens)), sampling)


def image_request(request_id: str, mm_hash: str, *, num_rows: int = 6, sampling: SamplingParams = GREEDY) -> Request:
    item = MediaItem(0, Modality.IMAGE, mm_hash, PlaceholderRange(3, num_rows), (1, 2, 2 * num_rows))
    return Request(request_id, (1, 2, 3, *[9] * num_rows, 4, 5, 6), sampling, items=(item,))


def rows_of(mm_hash: str, num_rows: int = 6) -> torch.Tensor:
    return torch.randn(num_rows, HIDDEN, generator=torch.Generator().manual_seed(sum(mm_hash.encode())))


def run(engine: Engine, max_steps: int = 500) -> dict[str, dict[int, list[TokenChunk]]]:
    """Step until nothing is left; return the chunks by request and choice."""
    chunks: dict[str, dict[int, list[TokenChunk]]] = {}
    for _ in range(max_steps):
        engine.serve_reservations()
        if not engine.has_work:
            break
        output = engine.step()
        for request_id, new in output.chunks.items():
            for chunk in new:
                chunks.setdefault(request_id, {}).setdefault(chunk.choice, []).append(chunk)
    return chunks


def tokens_of(chunks: list[TokenChunk]) -> list[int]:
    return [token for chunk in chunks for token in chunk.token_ids]


def add(engine: Engine, request: Request, **kwargs: bool) -> None:
    engine.add(request, text_positions(request.num_prompt_tokens), **kwargs)


def expected(model: FakeLanguageModel, request: Request, *embeddings: torch.Tensor) -> list[int]:
    return model.reference(request, text_positions(request.num_prompt_tokens), embeddings)


def test_one_prompt_gives_the_tokens_of_a_dense_pass():
    engine, model = make_engine()
    request = prompt("a", 11)
    add(engine, request)
    output = run(engine)
    assert tokens_of(output["a"][0]) == expected(model, request)
    assert output["a"][0][-1].finish_reason is FinishReason.LENGTH
    engine.check_integrity()


def test_a_mixed_batch_gives_each_request_its_own_tokens():
    engine, model = make_engine(max_tokens=10)
    requests = [prompt(f"r{i}", 3 + 5 * i, seed=i) for i in range(6)]
    for request in requests:
        add(engine, request)
    output = run(engine)
    for request in requests:
        assert tokens_of(output[request.request_id][0]) == expected(model, request)
    engine.check_integrity()


def test_decodes_never_wait_for_a_whole_prompt():
    engine, _ = make_engine(max_tokens=8)
    add(engine, prompt("short", 3))
    engine.step()
    add(engine, prompt("long", 60))
    for _ in range(5):
        output = engine.step()
        assert "short" in output.chunks
        assert output.num_tokens <= 8


def test_no_step_exceeds_the_token_budget():
    engine, model = make_engine(max_tokens=9)
    for index in range(8):
        add(engine, prompt(f"r{index}", 20, seed=index))
    run(engine)
    assert max(model.steps) <= 9


def test_a_preempted_request_gives_the_same_tokens():
    engine, model = make_engine(num_blocks=9, max_tokens=32)
    requests = [prompt(f"r{i}", 9, seed=i, sampling=replace(GREEDY, max_tokens=12)) for i in range(3)]
    for request in requests:
        add(engine, request)
    output = run(engine)
    assert engine.stats.preemptions > 0
    for request in requests:
        assert tokens_of(output[request.request_id][0]) == expected(model, request)
    engine.check_integrity()


def test_the_second_identical_prompt_hits_the_prefix_cache_and_the_first_does_not():
    engine, model = make_engine()
    first, second = prompt("a", 14), replace(prompt("a", 14), request_id="b")
    add(engine, first)
    output = run(engine)
    assert output["a"][0][0].report.cached["prefix_tokens"] == 0
    add(engine, second)
    output = run(engine)
    assert output["b"][0][0].report.cached["prefix_tokens"] == 12
    assert tokens_of(output["b"][0]) == expected(model, first)


def test_a_whole_cached_prompt_still_computes_its_last_token():
    engine, model = make_engine()
    for request_id in ("a", "b"):
        request = replace(prompt("x", 16), request_id=request_id)
        add(engine, request)
        assert tokens_of(run(engine)[request_id][0]) == expected(model, request)


def test_the_same_text_with_another_image_shares_no_block_past_the_image():
    engine, model = make_engine()
    for name in ("red", "blue", "red"):
        request = image_request(f"{name}-{random.random()}", name)
        add(engine, request)
        engine.set_embedding(request.request_id, 0, Embedding(rows_of(name)))
        chunks = run(engine)[request.request_id][0]
        assert tokens_of(chunks) == expected(model, request, rows_of(name))
        if name == "blue":
            assert chunks[0].report.cached["prefix_tokens"] == 0


def test_prefill_proceeds_up_to_the_first_missing_embedding():
    engine, model = make_engine()
    request = image_request("a", "red")
    add(engine, request)
    assert engine.step().num_tokens == 3
    assert engine.step().num_tokens == 0
    engine.set_embedding("a", 0, Embedding(rows_of("red")))
    assert tokens_of(run(engine)["a"][0]) == expected(model, request, rows_of("red"))


def test_a_request_that_waits_for_its_image_lets_others_pass():
    engine, _ = make_engine()
    request = image_request("image", "red")
    add(engine, replace(request, prompt_token_ids=request.prompt_token_ids))
    add(engine, prompt("text", 5))
    assert tokens_of(run(engine, max_steps=20)["text"][0])
    engine.abort("image")
    engine.check_integrity()


def test_an_embedding_with_the_wrong_number_of_rows_is_refused():
    engine, _ = make_engine()
    add(engine, image_request("a", "red"))
    with pytest.raises(InvalidRequestError, match="5 rows for 6 placeholders"):
        engine.set_embedding("a", 0, Embedding(rows_of("red", 5)))
    engine.abort("a")
    engine.check_integrity()


@pytest.mark.parametrize("num_steps", range(8))
def test_aborting_at_any_step_frees_all_blocks(num_steps):
    engine, _ = make_engine(max_tokens=8)
    add(engine, prompt("a", 17))
    for _ in range(num_steps):
        engine.step()
    engine.abort("a")
    engine.abort("a")
    engine.check_integrity()
    assert engine.pool.num_free == engine.pool.num_blocks


def test_n_choices_share_one_prefill_and_differ():
    engine, _ = make_engine()
    sampled = SamplingParams(temperature=1.0, seed=3, n=4, max_tokens=8)
    request = prompt("a", 13, sampling=sampled)
    add(engine, request)
    output = run(engine)
    assert engine.stats.prefill_tokens == 13
    choices = [tuple(tokens_of(output["a"][choice])) for choice in range(4)]
    assert len(set(choices)) == 4
    engine.check_integrity()
    alone = replace(request, request_id="b", sampling=replace(sampled, n=1), first_choice=2)
    add(engine, alone)
    assert tuple(tokens_of(run(engine)["b"][2])) == choices[2]


def test_a_request_that_can_never_fit_is_refused_at_once():
    engine, _ = make_engine(num_blocks=4)
    with pytest.raises(PromptTooLongError, match="cache has 4"):
        add(engine, prompt("a", 12))
    with pytest.raises(InvalidRequestError, match="at most 8 choices"):
        add(engine, prompt("b", 2, sampling=replace(GREEDY, n=9)))
    engine.check_integrity()


def test_eos_ends_a_choice_and_ignore_eos_does_not():
    reference = FakeLanguageModel()
    request = prompt("a", 7)
    eos = expected(reference, request)[2]
    engine, _ = make_engine(model=FakeLanguageModel(eos_token_ids=[eos]))
    add(engine, request)
    chunks = run(engine)["a"][0]
    assert tokens_of(chunks)[-1] == eos
    assert chunks[-1].finish_reason is FinishReason.STOP
    add(engine, replace(request, request_id="b", sampling=replace(GREEDY, ignore_eos=True)))
    assert len(tokens_of(run(engine)["b"][0])) == 8


# -- prefill here, decode there ----------------------------------------------------------------------------------------


def prefill(engine: Engine, request: Request) -> PrefillDone:
    add(engine, request, keep_kv=True)
    for _ in range(100):
        output = engine.step()
        if output.prefilled:
            return output.prefilled[0]
    raise AssertionError("prefill did not finish")


def reserve(engine: Engine, request: Request, num_tokens: int) -> Reservation:
    granted: list[Reservation] = []
    engine.reserve(request, num_tokens, granted.append)
    return granted[0]


def hand_over(source: Engine, target: Engine, request: Request) -> Reservation:
    """Prefill on one engine and copy its blocks into the other, as a connector would."""
    done = prefill(source, request)
    reservation = reserve(target, request, done.num_tokens)
    wanted = list(done.block_ids[reservation.num_cached_blocks :])
    target.kv_cache.blocks[reservation.missing_blocks] = source.kv_cache.blocks[wanted]
    source.release_hold(done.hold_id)
    positions = text_positions(request.num_prompt_tokens)
    target.activate(reservation, done.first_tokens, positions, has_kv=True)
    return reservation


@pytest.mark.parametrize("num_tokens", [11, 12])
@pytest.mark.parametrize("n", [1, 3])
def test_a_split_request_gives_the_tokens_of_an_aggregated_one(num_tokens, n):
    sampling = SamplingParams(temperature=0.8, seed=11, n=n, max_tokens=9)
    request = prompt("a", num_tokens, sampling=sampling)
    whole, _ = make_engine()
    add(whole, request)
    aggregated = run(whole)["a"]
    source, target = make_engine()[0], make_engine()[0]
    first = prefill(source, replace(request, request_id="probe")).first_tokens
    source.release_hold(0)
    hand_over(source, target, request)
    split = run(target)["a"]
    for choice in range(n):
        assert list(first[choice].token_ids) + tokens_of(split[choice]) == tokens_of(aggregated[choice])
    source.check_integrity()
    target.check_integrity()


def test_a_decode_replica_fetches_only_blocks_that_it_lacks():
    source, target = make_engine()[0], make_engine()[0]
    hand_over(source, target, prompt("a", 16))
    run(target)
    reservation = hand_over(source, target, replace(prompt("a", 16), request_id="b"))
    assert reservation.num_cached_blocks == 4
    assert reservation.missing_blocks == []
    run(target)
    target.check_integrity()


def test_a_prompt_that_ends_with_its_first_token_holds_nothing():
    engine, _ = make_engine()
    done = prefill(engine, prompt("a", 9, sampling=replace(GREEDY, max_tokens=1)))
    assert done.hold_id is None
    assert done.first_tokens[0].finish_reason is FinishReason.LENGTH
    engine.check_integrity()
    assert engine.pool.num_free == engine.pool.num_blocks


def test_reservations_wait_for_blocks_in_order_and_abort_withdraws_them():
    engine, _ = make_engine(num_blocks=6)
    granted: list[str] = []
    for name in ("a", "b", "c"):
        engine.reserve(prompt(name, 8), 16, lambda r: granted.append(r.request.request_id))
    assert granted == ["a"]
    engine.abort("b")
    engine.abort("a")
    engine.serve_reservations()
    assert granted == ["a", "c"]
    engine.abort("c")
    engine.check_integrity()


def test_a_failed_transfer_of_a_text_prompt_is_computed_here_with_the_same_tokens():
    source, target = make_engine()[0], make_engine()[0]
    request = prompt("a", 11)
    model = FakeLanguageModel()
    done = prefill(source, request)
    reservation = reserve(target, request, done.num_tokens)
    target.activate(reservation, done.first_tokens, text_positions(11), has_kv=False)
    tokens = [*done.first_tokens[0].token_ids, *tokens_of(run(target)["a"][0])]
    assert tokens == expected(model, request)
    target.check_integrity()


def test_a_decode_replica_without_the_embeddings_gives_a_preempted_request_back_and_it_resumes_elsewhere():
    source, model = make_engine()
    target, _ = make_engine(num_blocks=7)
    sampling = replace(GREEDY, max_tokens=14)
    request = image_request("image", "red", sampling=sampling)
    source.add(request, text_positions(request.num_prompt_tokens), keep_kv=True)
    source.set_embedding("image", 0, Embedding(rows_of("red")))
    done = next(output.prefilled[0] for output in iter(source.step, None) if output.prefilled)
    add(target, prompt("older", 6, sampling=replace(GREEDY, max_tokens=18)))
    target.step()
    reservation = reserve(target, request, done.num_tokens)
    target.kv_cache.blocks[reservation.missing_blocks] = source.kv_cache.blocks[list(done.block_ids)]
    source.release_hold(done.hold_id)
    target.activate(reservation, done.first_tokens, text_positions(request.num_prompt_tokens), has_kv=True)
    streamed, returned = list(done.first_tokens[0].token_ids), False
    while target.has_work:
        output = target.step()
        streamed += tokens_of(output.chunks.get("image", []))
        returned = returned or "image" in output.returned
    assert returned
    target.check_integrity()
    resumed = replace(request.resume_choice(0, streamed), request_id="again")
    source.add(resumed, text_positions(request.num_prompt_tokens))
    source.set_embedding("again", 0, Embedding(rows_of("red")))
    streamed += tokens_of(run(source)["again"][0])
    assert streamed == expected(model, request, rows_of("red"))
    source.check_integrity()


@dataclass
class Schedule:
    """A random history of two engines, one of which hands some of its requests to the other, and what came out."""

    source: Engine
    target: Engine
    requests: dict[str, Request] = field(default_factory=dict)
    got: dict[str, dict[int, list[int]]] = field(default_factory=dict)
    holds: dict[str, int] = field(default_factory=dict)
    aborted: set[str] = field(default_factory=set)

    def add(self, request: Request, *, is_split: bool) -> None:
        self.requests[request.request_id] = request
        self.got[request.request_id] = {choice: [] for choice in range(request.sampling.n)}
        add(self.source, request, keep_kv=is_split)
        if request.items:
            self.source.set_embedding(request.request_id, 0, Embedding(rows_of(request.items[0].mm_hash)))

    def step(self, engine: Engine) -> None:
        engine.serve_reservations()
        output = engine.step()
        for request_id, chunks in output.chunks.items():
            self._take(request_id, chunks)
        for done in output.prefilled:
            self._take(done.request_id, done.first_tokens)
            if done.hold_id is not None:
                self._hand_over(done)
        for request_id in output.returned:
            self._resume(request_id)
        engine.check_integrity()

    def _take(self, request_id: str, chunks: Iterable[TokenChunk]) -> None:
        for chunk in chunks:
            self.got[request_id][chunk.choice].extend(chunk.token_ids)

    def _hand_over(self, done: PrefillDone) -> None:
        request = self.requests[done.request_id]
        self.holds[done.request_id] = done.hold_id

        def on_ready(reservation: Reservation) -> None:
            wanted = list(done.block_ids[reservation.num_cached_blocks :])
            self.target.kv_cache.blocks[reservation.missing_blocks] = self.source.kv_cache.blocks[wanted]
            self.source.release_hold(done.hold_id)
            positions = text_positions(request.num_prompt_tokens)
            self.target.activate(reservation, done.first_tokens, positions, has_kv=True)

        self.target.reserve(request, done.num_tokens, on_ready)

    def _resume(self, request_id: str) -> None:
        """Compute a returned request again where its embeddings are, choice by choice."""
        request = self.requests[request_id]
        for choice, tokens in self.got[request_id].items():
            if len(tokens) < request.sampling.max_tokens:
                part = replace(request.resume_choice(choice, tokens), request_id=f"{request_id}/{choice}")
                self.requests[part.request_id] = part
                self.got[part.request_id] = {choice: tokens}
                add(self.source, part)
                self.source.set_embedding(part.request_id, 0, Embedding(rows_of(request.items[0].mm_hash)))

    def abort(self, request_id: str) -> None:
        self.source.abort(request_id)
        self.target.abort(request_id)
        if request_id in self.holds:
            self.source.release_hold(self.holds[request_id])  # as the driver of a request releases its handle
        self.aborted.add(request_id)

    def finish(self) -> None:
        for _ in range(2000):
            if not (self.source.num_live_requests or self.target.num_live_requests):
                return
            self.step(self.source)
            self.step(self.target)
        raise AssertionError("the engines made no progress")


@st.composite
def requests(draw, index: int) -> Request:
    sampling = replace(GREEDY, max_tokens=draw(st.integers(1, 8)), n=draw(st.sampled_from([1, 1, 1, 2, 3])))
    if draw(st.booleans()):
        return image_request(f"r{index}", draw(st.sampled_from(["red", "blue"])), sampling=sampling)
    return prompt(f"r{index}", draw(st.integers(1, 14)), seed=draw(st.integers(0, 1)), sampling=sampling)


@settings(max_examples=1000, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_random_schedules_keep_the_books_and_the_tokens(data):
    """Add, abort, preempt, finish, share prefixes, fork, hand over, give back: the rest get exactly their tokens."""
    check_random_schedule(data)


@pytest.mark.slow
@settings(max_examples=10_000, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_ten_thousand_random_schedules_keep_the_books_and_the_tokens(data):
    check_random_schedule(data)


def check_random_schedule(data) -> None:
    max_tokens = data.draw(st.integers(4, 20), "max_num_batched_tokens")
    source, model = make_engine(num_blocks=data.draw(st.integers(14, 24), "blocks"), max_tokens=max_tokens, max_seqs=4)
    target, _ = make_engine(num_blocks=data.draw(st.integers(14, 24), "blocks"), max_tokens=max_tokens, max_seqs=4)
    schedule = Schedule(source, target)
    for index in range(data.draw(st.integers(2, 7), "num_requests")):
        schedule.add(data.draw(requests(index)), is_split=data.draw(st.booleans(), "split?"))
        for _ in range(data.draw(st.integers(0, 4), "num_steps")):
            schedule.step(source)
            schedule.step(target)
        if data.draw(st.integers(0, 4), "abort?") == 0:
            schedule.abort(data.draw(st.sampled_from(sorted(schedule.requests)), "victim"))
    schedule.finish()
    for request_id, request in schedule.requests.items():
        if request_id.split("/")[0] not in schedule.aborted:
            rows = [rows_of(item.mm_hash) for item in request.items]
            for tokens in schedule.got[request_id].values():
                assert tokens == expected(model, request, *rows)
    for engine in (source, target):
        engine.check_integrity()
        assert engine.pool.num_free == engine.pool.num_blocks
