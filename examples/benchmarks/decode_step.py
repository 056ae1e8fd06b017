"""Measure a decode step of the engine against what the machine allows: reading weights and KV once, and computing.

    python examples/benchmarks/decode_step.py MODEL_DIR --dtype bfloat16 --threads 1

What a step is held against, all measured in the same process and run:

* the time to stream the language model's weights through ``F.linear`` at the same batch size, and through oneDNN's
  packed layout, plus the KV bytes at the bandwidth of a plain read;
* the machine's own floor: all bytes at the bandwidth of a plain read, or all arithmetic at the speed of a large matrix
  product, whichever takes longer.

One more sequence in a batch costs at least its KV bytes at that bandwidth plus its arithmetic at that speed.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table

from encoders import resolve_family
from epd.cache.kv_cache import allocate_kv_cache
from epd.config import EngineConfig, ModelConfig
from epd.engine.engine import Engine
from epd.engine.packing import PackedLinear, can_pack
from epd.types import LanguageModel, Request, SamplingParams


def median_s(function: Callable[[], object], repeats: int = 9) -> float:
    function()
    times = []
    for _ in range(repeats):
        started_s = time.perf_counter()
        function()
        times.append(time.perf_counter() - started_s)
    return statistics.median(times)


def linear_bandwidth(model: LanguageModel, batch: int, dtype: torch.dtype, *, packed: bool) -> float:
    """Bytes a second at which a stack of matrices as large as the model streams through linear layers."""
    width, height = model.hidden_size, 2048
    layers = [torch.nn.Linear(width, height, bias=False, dtype=dtype) for _ in range(48)]
    inputs = torch.randn(batch, width).to(dtype)
    run = [PackedLinear(layer) for layer in layers] if packed else layers
    with torch.inference_mode():
        seconds = median_s(lambda: [layer(inputs) for layer in run])
    return len(layers) * width * height * dtype.itemsize / seconds


def read_bandwidth() -> float:
    """Bytes a second of a plain read of 256 MiB."""
    data = torch.ones(32 * 2**20, dtype=torch.int64)
    return data.nbytes / median_s(data.sum)


def peak_flops(dtype: torch.dtype) -> float:
    """Floating-point operations a second of a large matrix product: of float32, where the CPU multiplies no halves."""
    dtype = dtype if can_pack(dtype, "cpu") else torch.float32
    rows, width = 1024, 2048
    inputs, weight = torch.randn(rows, width).to(dtype), torch.randn(width, width).to(dtype)
    with torch.inference_mode():
        return 2 * rows * width * width / median_s(lambda: torch.nn.functional.linear(inputs, weight))


def flops_per_token(model: LanguageModel, context: int) -> float:
    """Operations of one decoded token: two for each weight, and for each context token a dot product with K and V.

    Query heads are counted as filling the hidden size.
    """
    num_weights = model.weight_bytes / model.kv_spec.itemsize_bytes
    return 2 * num_weights + 4 * context * model.hidden_size * model.kv_spec.num_layers


def step_times(engine: Engine, family, batch: int, context: int, steps: int) -> tuple[float, float]:
    """Median seconds of a decode step, and of its part outside of the model's forward pass."""
    for index in range(batch):
        tokens = tuple((7 * index + 13 * position) % 1000 + 300 for position in range(context))
        request = Request(f"{batch}-{index}", tokens, SamplingParams(0.0, max_tokens=4 * steps, ignore_eos=True))
        engine.add(request, family.rotary_positions(request))
    while any(not sequence.is_decoding for sequence in engine.scheduler.sequences()):
        engine.step()
    runner, inside = engine._runner, []
    run = runner.run

    def timed(*args: object) -> torch.Tensor:
        started_s = time.perf_counter()
        result = run(*args)
        inside.append(time.perf_counter() - started_s)
        return result

    runner.run = timed
    whole = []
    for _ in range(steps):
        started_s = time.perf_counter()
        engine.step()
        whole.append(time.perf_counter() - started_s)
    runner.run = run
    for request_id in engine.live_request_ids:
        engine.abort(request_id)
    return statistics.median(whole), statistics.median(w - i for w, i in zip(whole, inside, strict=True))


def show(rows: list[dict[str, float]], title: str, read: float, peak: float, kv_bytes: int, flops: float) -> None:
    table = Table(title=title)
    for name in (
        "batch",
        "step ms",
        "F.linear ms",
        "packed ms",
        "machine's floor ms",
        "floor / step",
        "outside forward",
    ):
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(
            f"{row['batch']:.0f}",
            f"{row['step_ms']:.1f}",
            f"{row['floor_plain_ms']:.1f}",
            f"{row['floor_packed_ms']:.1f}",
            f"{row['floor_machine_ms']:.1f}",
            f"{row['floor_machine_ms'] / row['step_ms']:.0%}",
            f"{row['outside_forward']:.1%}",
        )
    console = Console()
    console.print(table)
    console.print(f"plain read {read / 1e9:.1f} GB/s, matrix product {peak / 1e9:.0f} GFLOP/s")
    by_batch = {row["batch"]: row["step_ms"] for row in rows}
    if {8, 32} <= by_batch.keys():
        marginal_ms, bound_ms = (by_batch[32] - by_batch[8]) / 24, (kv_bytes / read + flops / peak) * 1000
        console.print(
            f"one more sequence, batch 8 to 32: {marginal_ms:.2f} ms, {marginal_ms / bound_ms:.2f} of its bytes and "
            f"arithmetic ({bound_ms:.2f} ms)"
        )


def main(
    model: Annotated[str, typer.Argument(help="Checkpoint directory.")],
    dtype: str = "bfloat16",
    threads: int = 1,
    context: int = 400,
    batch: Annotated[list[int], typer.Option(help="Batch sizes; repeat.")] = [1, 8, 16, 32],  # noqa: B006
    steps: int = 20,
    compile: Annotated[bool, typer.Option(help="Use the native decode kernel.")] = True,
    output: Path | None = None,
) -> None:
    """Measure decode steps."""
    torch.set_num_threads(threads)
    torch_dtype: torch.dtype = getattr(torch, dtype)
    family = resolve_family(ModelConfig(source=model, dtype=dtype))
    language_model = family.load_language_model(dtype=dtype)
    spec = language_model.kv_spec
    config = EngineConfig(max_num_batched_tokens=2048, enable_prefix_cache=False, compile=compile)
    num_blocks = max(batch) * (context + 4 * steps + 32) // config.kv_block_size + 64
    cache = allocate_kv_cache(spec, block_size=config.kv_block_size, num_blocks=num_blocks, model_fingerprint="bench")
    engine = Engine(language_model, cache, config)
    read, peak = read_bandwidth(), peak_flops(torch_dtype)
    flops = flops_per_token(language_model, context)
    kv_bytes = context * spec.bytes_per_token
    rows = []
    for size in batch:
        step_s, outside_s = step_times(engine, family, size, context, steps)
        plain = linear_bandwidth(language_model, size, torch_dtype, packed=False)
        packed = (
            linear_bandwidth(language_model, size, torch_dtype, packed=True) if can_pack(torch_dtype, "cpu") else plain
        )
        kv_s = size * kv_bytes / read
        machine_s = max((language_model.weight_bytes + size * kv_bytes) / read, size * flops / peak)
        rows.append(
            {
                "batch": size,
                "step_ms": step_s * 1000,
                "outside_forward": outside_s / step_s,
                "floor_plain_ms": (language_model.weight_bytes / plain + kv_s) * 1000,
                "floor_packed_ms": (language_model.weight_bytes / packed + kv_s) * 1000,
                "floor_machine_ms": machine_s * 1000,
                "linear_gb_s": plain / 1e9,
                "packed_gb_s": packed / 1e9,
                "read_gb_s": read / 1e9,
                "peak_gflop_s": peak / 1e9,
            }
        )
    show(rows, f"{dtype}, {threads} thread(s), context {context}", read, peak, kv_bytes, flops)
    if output is not None:
        output.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    typer.run(main)
