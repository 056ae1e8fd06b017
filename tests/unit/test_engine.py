"""The engine's promises: without them users get other tokens under load than alone, or a server that fills up.

Everything runs on a model whose next token depends on every token in its blocks, so that a wrong block shows.
"""

from __future__ import annotations

import contextlib
import random
from dataclasses import replace

import pytest
import torch

from epd.engine.engine import Engine, PrefillDone
from epd.engine.reservations import Reservation
from epd.errors import InvalidRequestError, PromptTooLongError
from epd.types import Embedding, FinishReason, Request, SamplingParams, TokenChunk
from tests.fake_engine import GREEDY, image_request, make_engine, prompt, rows_of
from tests.fake_language_model import FakeLanguageModel, text_positions


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


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("num_prompt_tokens", [11, 12, 13])
def test_the_largest_request_that_is_not_refused_finishes_alone(num_prompt_tokens, n):
    engine, model = make_engine(num_blocks=9)
    largest = None
    for max_tokens in range(1, 40):
        request = prompt("a", num_prompt_tokens, sampling=replace(GREEDY, n=n, max_tokens=max_tokens))
        with contextlib.suppress(PromptTooLongError):
            engine.check_fits(request)
            largest = request
    assert largest is not None
    add(engine, largest)
    output = run(engine)
    assert [tokens_of(output["a"][choice]) for choice in range(n)] == [expected(model, largest)] * n
    assert engine.stats.preemptions == 0
    engine.check_integrity()


@pytest.mark.parametrize("num_prompt_tokens", [100, 1000])
def test_every_running_decode_gets_a_token_in_each_step_of_a_long_prompt(num_prompt_tokens):
    engine, _ = make_engine(num_blocks=1000, max_tokens=12, max_seqs=8)
    short = [prompt(f"s{index}", 5, seed=index, sampling=replace(GREEDY, max_tokens=200)) for index in range(5)]
    for request in short:
        add(engine, request)
    while len(engine.step().chunks) < len(short):
        pass
    add(engine, prompt("long", num_prompt_tokens))
    num_steps = 0
    while "long" not in (output := engine.step()).chunks:
        num_steps += 1
        assert all(len(output.chunks[request.request_id]) == 1 for request in short)
        assert output.num_tokens == 12
    assert num_steps == (num_prompt_tokens - 1) // 7


def test_of_two_cached_prompts_the_one_used_last_stays():
    """Twelve blocks: two prompts of four are kept, a third one takes the place of the one not used for longest."""
    engine, _ = make_engine(num_blocks=12, max_tokens=64)
    brief = replace(GREEDY, max_tokens=1)

    def cached_tokens(seed: int, request_id: str) -> int:
        add(engine, replace(prompt(request_id, 17, seed=seed, sampling=brief)))
        return run(engine)[request_id][0][0].report.cached["prefix_tokens"]

    assert [cached_tokens(1, "a"), cached_tokens(2, "b"), cached_tokens(1, "c")] == [0, 0, 16]
    assert cached_tokens(3, "d") == 0
    assert cached_tokens(1, "e") == 16
    assert cached_tokens(2, "f") < 16
    engine.check_integrity()


def test_a_full_cache_gives_up_the_end_of_a_prompt_before_its_start():
    """More prompts share a start than an end."""
    engine, _ = make_engine(num_blocks=6, max_tokens=64)
    brief = replace(GREEDY, max_tokens=1)
    add(engine, prompt("a", 17, sampling=brief))
    run(engine)
    add(engine, prompt("b", 9, seed=1, sampling=brief))
    run(engine)
    add(engine, replace(prompt("a", 17, sampling=brief), request_id="c"))
    assert run(engine)["c"][0][0].report.cached["prefix_tokens"] == 12
    engine.check_integrity()


def test_blocks_that_are_in_use_are_never_given_up():
    engine, model = make_engine(num_blocks=8, max_tokens=64)
    holding = prompt("a", 16, sampling=replace(GREEDY, max_tokens=4))
    add(engine, holding)
    engine.step()
    for index in range(4):
        add(engine, prompt(f"b{index}", 9, seed=1 + index, sampling=replace(GREEDY, max_tokens=1)))
    output = run(engine)
    assert tokens_of(output["a"][0]) == expected(model, holding)[1:]
    assert engine.stats.preemptions == 0


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
