"""Time placement decisions over made-up loads: `python examples/benchmarks/decision.py`."""

from __future__ import annotations

import statistics
import time

from rich.console import Console
from rich.table import Table

from epd.routing import ProfileKey, decide, guess_device, priors_from_shapes, shapes_from_config
from epd.types import SLO, MediaItem, Modality, Mode, PlaceholderRange, ReplicaLoad, Request, SamplingParams, Stage

TEXT = {
    "vocab_size": 151936,
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
}
VISION = {
    "depth": 32,
    "hidden_size": 1280,
    "intermediate_size": 3420,
    "num_heads": 16,
    "fullatt_block_indexes": [7, 15, 23, 31],
}
POOLS = {
    "encode": {Stage.ENCODE},
    "prefill": {Stage.ENCODE, Stage.PREFILL},
    "decode": {Stage.DECODE},
    "all": set(Stage),
}


def made_up_loads(num_replicas: int) -> list[ReplicaLoad]:
    """Replicas of four pools, each with another amount of work."""
    pools = list(POOLS.items())
    return [
        ReplicaLoad(
            f"{pools[index % 4][0]}#{index}",
            pools[index % 4][0],
            frozenset(pools[index % 4][1]),
            num_waiting=index % 3,
            num_running=index % 5,
            num_queued_prefill_tokens=(index % 3) * 300,
            num_context_tokens=(index % 5) * 500,
            num_blocks=1000,
            num_free_blocks=500,
            block_size=16,
        )
        for index in range(num_replicas)
    ]


def made_up_request(num_images: int) -> Request:
    items = tuple(
        MediaItem(index, Modality.IMAGE, f"h{index}", PlaceholderRange(10 + index * 256, 256), (1, 32, 32))
        for index in range(num_images)
    )
    return Request("r", tuple(range(300 + 256 * num_images)), SamplingParams(max_tokens=64), items)


def main() -> None:
    shapes = shapes_from_config({"text_config": TEXT, "vision_config": VISION}, "bfloat16")
    cost_model = priors_from_shapes(ProfileKey("7B", "cuda", "bfloat16", "0"), shapes, guess_device("cuda", "bfloat16"))
    table = Table("replicas", "images", "considered", "min us", "median us")
    for num_replicas in (4, 16, 1000):
        loads = made_up_loads(num_replicas)
        for num_images in (0, 1, 4):
            request, times = made_up_request(num_images), []
            for _ in range(200):
                started_s = time.perf_counter()
                decision = decide(request, loads, mode=Mode.AUTO, slo=SLO(1.0, 0.05), cost_model=cost_model)
                times.append(time.perf_counter() - started_s)
            figures = (f"{value * 1e6:.0f}" for value in (min(times), statistics.median(times)))
            table.add_row(str(num_replicas), str(num_images), str(decision.num_considered), *figures)
    Console().print(table)


if __name__ == "__main__":
    main()
