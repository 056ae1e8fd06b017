"""The CUDA runner's parts that are plain arithmetic: batch sizes, packed arrays, and how graphs are fed.

If these fail, a GPU replica writes padding over live blocks, reads inputs of another step, or captures no size at all.
"""

from __future__ import annotations

import inspect

import numpy as np
import pytest
import torch

from epd.cache.kv_cache import allocate_kv_cache
from epd.engine.cuda.attention import VarlenBatch, VarlenLayers, torch_kernel, why_unsuited
from epd.engine.cuda.buckets import bucket_for, decode_buckets
from epd.engine.cuda.graphs import DecodeGraphs
from epd.engine.cuda.inputs import decode_arrays, empty_decode_arrays, step_arrays
from epd.engine.cuda.staging import Downloads, HostBuffer, Uploads, packed_bytes
from epd.engine.sequence import EngineSequence, RequestState
from epd.types import KVSpec, Request, SamplingParams
from tests.fake_language_model import text_positions
from tests.varlen_reference import RerunRecorder

SCRATCH = 99


def sequence(num_prompt: int, num_output: int, num_computed: int, block_table: list[int]) -> EngineSequence:
    request = Request("r", tuple(range(num_prompt)), SamplingParams())
    state = RequestState(request, text_positions(num_prompt), arrival=0)
    return EngineSequence(state, 0, list(range(num_prompt + num_output)), num_computed, block_table)


# -- buckets


@pytest.mark.parametrize(
    ("max_num_seqs", "buckets"),
    [
        (1, (1,)),
        (3, (1, 2, 3)),
        (8, (1, 2, 4, 8)),
        (16, (1, 2, 4, 8, 16)),
        (40, (1, 2, 4, 8, 16, 32, 40)),
        (64, (1, 2, 4, 8, 16, 32, 48, 64)),
    ],
)
def test_batch_sizes_grow_up_to_the_largest_that_can_run(max_num_seqs, buckets):
    assert decode_buckets(max_num_seqs) == buckets


@pytest.mark.parametrize("max_num_seqs", [1, 2, 5, 17, 64, 256])
def test_every_batch_has_a_bucket_that_is_less_than_twice_as_large(max_num_seqs):
    buckets = decode_buckets(max_num_seqs)
    for num_seqs in range(1, max_num_seqs + 1):
        bucket = bucket_for(num_seqs, buckets)
        assert bucket is not None
        assert num_seqs <= bucket < 2 * num_seqs or bucket == num_seqs
    assert bucket_for(max_num_seqs + 1, buckets) is None


# -- arrays


def test_a_mixed_step_says_where_each_token_goes_and_how_far_it_sees():
    decode = sequence(5, 2, 6, [7, 3])
    chunk = sequence(9, 0, 2, [4, 8, 5])
    arrays = step_arrays({decode: 1, chunk: 5}, [decode], block_size=4)
    assert arrays["ids"].tolist() == [6, 2, 3, 4, 5, 6]
    assert arrays["positions"].tolist() == [[6, 2, 3, 4, 5, 6]] * 3
    assert arrays["slot_blocks"].tolist() == [3, 4, 4, 8, 8, 8]
    assert arrays["slot_offsets"].tolist() == [2, 2, 3, 0, 1, 2]
    assert arrays["cu_seq_q"].tolist() == [0, 1, 6]
    assert arrays["cu_seq_k"].tolist() == [0, 7, 14]
    assert arrays["context_lens"].tolist() == [7, 7]
    assert arrays["tables"].tolist() == [[7, 3], [4, 8]]
    assert arrays["logit_rows"].tolist() == [0]
    types = {name: array.dtype.name for name, array in arrays.items()}
    assert {name for name, kind in types.items() if kind == "int32"} == {
        "cu_seq_q",
        "cu_seq_k",
        "context_lens",
        "tables",
    }


def test_padding_rows_of_a_decode_touch_the_scratch_block_only():
    decodes = [sequence(5, 2, 6, [7, 3]), sequence(1, 1, 1, [2])]
    arrays = decode_arrays(decodes, 4, block_size=4, max_blocks=3, scratch_block=SCRATCH)
    assert arrays["slot_blocks"].tolist() == [3, 2, SCRATCH, SCRATCH]
    assert arrays["context_lens"].tolist() == [7, 2, 1, 1]
    assert arrays["tables"].tolist() == [[7, 3, 0], [2, 0, 0], [SCRATCH] * 3, [SCRATCH] * 3]
    assert arrays["cu_seq_q"].tolist() == [0, 1, 2, 3, 4]
    assert arrays["cu_seq_k"].tolist() == [0, 7, 9, 10, 11]


def test_a_graph_is_captured_over_the_shapes_that_it_will_be_fed():
    fed = decode_arrays([sequence(5, 2, 6, [7, 3])], 4, block_size=4, max_blocks=3, scratch_block=SCRATCH)
    captured = empty_decode_arrays(4, max_blocks=3, scratch_block=SCRATCH)
    assert list(fed) == list(captured)
    for name, array in fed.items():
        assert (array.shape, array.dtype) == (captured[name].shape, captured[name].dtype), name
    assert set(captured["slot_blocks"].tolist()) == {SCRATCH}


# -- staging


def arrays_of(seed: int, size: int = 5) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {
        "a": rng.integers(0, 1000, size),
        "empty": np.zeros(0, dtype=np.int64),
        "b": rng.integers(0, 1000, (3, size + 1)).astype(np.int32),
        "broadcast": np.broadcast_to(rng.integers(0, 1000, size), (3, size)),
    }


def test_arrays_arrive_with_their_types_and_shapes():
    arrays = arrays_of(1)
    tensors = Uploads("cpu").send(arrays)
    for name, array in arrays.items():
        assert tensors[name].dtype == torch.from_numpy(array.copy()).dtype
        assert np.array_equal(tensors[name].numpy(), array), name


def test_what_was_sent_stays_when_more_is_sent():
    uploads = Uploads("cpu")
    sent = [(arrays_of(seed, size), seed) for seed, size in enumerate((5, 500, 7, 3, 9000, 5))]
    received = [uploads.send(arrays) for arrays, _ in sent]
    for (arrays, _), tensors in zip(sent, received, strict=True):
        assert all(np.array_equal(tensors[name].numpy(), arrays[name]) for name in arrays)


def test_arrays_go_into_memory_that_a_graph_reads():
    first, second, uploads = arrays_of(1), arrays_of(2), Uploads("cpu")
    memory = torch.empty(packed_bytes(first), dtype=torch.uint8)
    views = uploads.send(first, memory)
    uploads.send(second, memory)
    assert all(np.array_equal(views[name].numpy(), second[name]) for name in second)


def test_host_memory_is_used_again_until_more_is_needed():
    buffer = HostBuffer("cpu")
    small = buffer.take(100)
    assert buffer.take(3000).data_ptr() == small.data_ptr()
    large = buffer.take(100_000)
    assert large.nbytes == 100_000
    assert buffer.take(131_072).data_ptr() == large.data_ptr()


def test_results_of_different_kinds_do_not_share_memory():
    downloads = Downloads("cpu")
    logits = downloads.fetch("logits", torch.arange(12.0).view(3, 4))
    ids = downloads.fetch("greedy_ids", torch.arange(3))
    downloads.mark()
    downloads.wait()
    assert torch.equal(logits, torch.arange(12.0).view(3, 4))
    assert ids.tolist() == [0, 1, 2]


# -- graphs


def test_a_replay_computes_over_the_new_inputs_in_the_memory_that_was_recorded():
    def step(tensors):
        return torch.stack([tensors["ids"].float(), tensors["context_lens"].float()], dim=1)

    recorder = RerunRecorder()
    graphs = DecodeGraphs(step, recorder, vocab_size=2, max_blocks=3, device="cpu")
    graphs.capture((1, 2, 4), SCRATCH)
    assert graphs.buckets == (1, 2, 4)
    uploads = Uploads("cpu")
    decodes = [sequence(5, 2, 6, [7, 3]), sequence(7, 4, 10, [2, 5, 6]), sequence(2, 1, 2, [1])]
    for chosen, bucket in ((decodes, 4), (decodes[:1], 1), (decodes[1:], 2)):
        arrays = decode_arrays(chosen, bucket, block_size=4, max_blocks=3, scratch_block=SCRATCH)
        logits, ids = graphs.replay(bucket, arrays, uploads)
        expected = [[s.token_ids[s.num_computed_tokens], s.num_computed_tokens + 1] for s in chosen]
        assert logits[: len(chosen)].tolist() == expected
        assert ids.tolist() == logits.argmax(dim=-1).tolist()
    assert recorder.num_replays == 3


# -- the scratch block


def test_the_scratch_block_is_behind_all_blocks_and_in_none_of_them():
    cache = allocate_kv_cache(KVSpec(2, 1, 4, "float32", 4), block_size=4, num_blocks=3, model_fingerprint="x")
    assert cache.num_blocks == 3
    assert cache.pages.shape[0] == 4
    cache.pages[cache.num_blocks].fill_(1.0)
    assert not cache.blocks.any()
    assert cache.blocks.is_contiguous()
    assert cache.blocks.data_ptr() == cache.pages.data_ptr()


# -- the calls that only a GPU can run


@pytest.mark.parametrize("max_q", [1, 8])
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(8, 2), (4, 4)])
def test_torch_takes_the_attention_call_as_it_is_made(max_q, num_heads, num_kv_heads):
    """Over tensors without data: names, types and shapes are checked, nothing is computed."""
    spec = KVSpec(3, num_kv_heads, 64, "bfloat16", 2)
    cache = allocate_kv_cache(spec, block_size=256, num_blocks=6, model_fingerprint="x", device="meta")
    arrays = empty_decode_arrays(8, max_blocks=3, scratch_block=6)
    tensors = {name: torch.from_numpy(array).to("meta") for name, array in arrays.items()}
    layers = VarlenLayers(cache.pages, VarlenBatch.of(tensors, max_q=max_q, max_k=768), torch_kernel())
    key = torch.empty(1, num_kv_heads, 8, 64, dtype=torch.bfloat16, device="meta")
    assert layers.update(key, key, 2)[0] is key
    out = layers.attend(2, torch.empty(num_heads, 8, 64, dtype=torch.bfloat16, device="meta"), 0.1)
    assert out.shape == (8, num_heads, 64)
    assert out.dtype is torch.bfloat16


def test_pages_of_one_layer_are_views_with_the_strides_that_the_kernel_takes():
    cache = allocate_kv_cache(KVSpec(3, 2, 64, "float32", 4), block_size=256, num_blocks=4, model_fingerprint="x")
    seen = []

    def kernel(query, key, value, *args, **kwargs):
        seen.extend([key, value])
        return query

    arrays = empty_decode_arrays(1, max_blocks=1, scratch_block=4)
    tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
    VarlenLayers(cache.pages, VarlenBatch.of(tensors, max_q=1, max_k=256), kernel).attend(1, torch.zeros(4, 1, 64), 1.0)
    for side, pages in enumerate(seen):
        assert pages.shape == (5, 256, 2, 64)
        assert pages.stride() == (3 * 2 * 256 * 2 * 64, 2 * 64, 64, 1)
        assert pages.data_ptr() == cache.pages[0, 1, side].data_ptr()


def test_torch_has_the_graph_api_that_is_called():
    inspect.signature(torch.cuda.graph).bind(object(), pool=None, stream=None, capture_error_mode="thread_local")
    inspect.signature(torch.cuda.Event.record).bind(object(), object())
    inspect.signature(torch.cuda.Stream.wait_stream).bind(object(), object())


@pytest.mark.parametrize(
    ("spec", "block_size", "words"),
    [
        (KVSpec(1, 1, 64, "float32", 4), 256, "no float32"),
        (KVSpec(1, 1, 64, "bfloat16", 2), 16, "multiple of 256"),
        (KVSpec(1, 1, 20, "bfloat16", 2), 256, "heads of 20"),
        (KVSpec(1, 1, 320, "float16", 2), 512, "heads of 320"),
    ],
)
def test_what_flash_attention_cannot_serve_is_known_before_it_is_asked(spec, block_size, words):
    reason = why_unsuited(spec, block_size, "cuda")
    assert reason is not None
    assert words in reason
