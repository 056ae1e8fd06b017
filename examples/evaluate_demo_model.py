"""Measure the built-in model, or any checkpoint directory like it: exact answers by task, on scenes it never saw.

    python examples/evaluate_demo_model.py
    python examples/evaluate_demo_model.py --num-per-task 50 --json

Every question goes alone through the image processor, the tokenizer's chat template and greedy `generate` of
transformers, so the figures owe nothing to the serving engine. The scenes come from seeds that training does not use.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import demo_scenes as scenes
import numpy as np
import torch
from PIL import Image
from rich.console import Console
from rich.progress import track
from rich.table import Table
from transformers import AutoTokenizer, Qwen2_5_VLForConditionalGeneration
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

HELD_OUT_SEED = 7_000_000_000
"""Far from the seeds of training rows, which grow from the training seed times a million."""

DEMO_MODEL = Path(__file__).parents[1] / "encoders" / "demo_model"
MAX_NEW_TOKENS = 200


@dataclass(frozen=True, slots=True)
class Mistake:
    """A question answered wrongly."""

    question: str
    expected: str
    answer: str


@dataclass(frozen=True, slots=True)
class TaskResult:
    """The score of one task."""

    task: str
    num_examples: int
    num_exact: int
    mistakes: tuple[Mistake, ...]

    @property
    def accuracy(self) -> float:
        """Share of answers that are the right one to the letter."""
        return self.num_exact / self.num_examples


class Answerer:
    """Answers one question at a time with a checkpoint directory."""

    def __init__(self, model_dir: Path) -> None:
        self._model = Qwen2_5_VLForConditionalGeneration.from_pretrained(model_dir, dtype=torch.float32).eval()
        self._tokenizer = AutoTokenizer.from_pretrained(model_dir)
        self._image_processor = Qwen2VLImageProcessorPil.from_pretrained(model_dir)

    @property
    def num_parameters(self) -> int:
        """Parameters of the model, tied ones once."""
        return sum(parameter.numel() for parameter in self._model.parameters())

    def answer(self, example: scenes.Example) -> str:
        """Return the greedy answer."""
        config = self._model.config
        parts: list[dict[str, str]] = [{"type": "image"} for _ in example.images]
        if example.clip is not None:
            parts.append({"type": "video"})
        parts.append({"type": "text", "text": example.question})
        prompt = self._tokenizer.apply_chat_template(
            [{"role": "user", "content": parts}], tokenize=False, add_generation_prompt=True
        )
        inputs: dict[str, Any] = {}
        if example.images:
            inputs.update(self._image_processor(images=list(example.images), return_tensors="pt"))
            prompt = self._expand(prompt, "<|image_pad|>", inputs["image_grid_thw"])
        if example.clip is not None:
            patches, grid = self._clip_patches(example.clip)
            inputs |= {
                "pixel_values_videos": patches,
                "video_grid_thw": grid,
                "second_per_grid_ts": torch.tensor([1.0]),
            }
            prompt = self._expand(prompt, "<|video_pad|>", grid)
        token_ids = self._tokenizer(prompt, add_special_tokens=False, return_tensors="pt")["input_ids"]
        types = (token_ids == config.image_token_id).int() + 2 * (token_ids == config.video_token_id).int()
        with torch.inference_mode():
            output = self._model.generate(
                input_ids=token_ids,
                attention_mask=torch.ones_like(token_ids),
                mm_token_type_ids=types,
                max_new_tokens=MAX_NEW_TOKENS,
                do_sample=False,
                **inputs,
            )
        return str(self._tokenizer.decode(output[0, token_ids.shape[1] :], skip_special_tokens=True))

    def _expand(self, prompt: str, placeholder: str, grids: torch.Tensor) -> str:
        """Repeat each placeholder once for every merged patch."""
        head, *tails = prompt.split(placeholder)
        merged = self._image_processor.merge_size**2
        return head + "".join(
            placeholder * (int(grid.prod()) // merged) + tail for grid, tail in zip(grids, tails, strict=True)
        )

    def _clip_patches(self, frames: Sequence[Image.Image]) -> tuple[torch.Tensor, torch.Tensor]:
        """Prepare frames with the image processor; two frames make a temporal patch.

        The processor repeats an image to fill both halves of a temporal patch: here each half takes its own frame.
        """
        prepared = self._image_processor(images=list(frames), return_tensors="np")
        (_, rows, columns) = prepared["image_grid_thw"][0]
        pixels = prepared["pixel_values"].reshape(len(frames) // 2, 2, rows * columns, 3, 2, -1)
        # [seconds, frame, patch, channel, half, pixels] -> the first half of each of the two frames, side by side.
        paired = np.moveaxis(pixels[:, :, :, :, 0], 1, 3)
        grid = torch.tensor([[len(frames) // 2, int(rows), int(columns)]])
        return torch.from_numpy(np.ascontiguousarray(paired)).flatten(2).flatten(0, 1), grid


def evaluate(
    model_dir: Path, tasks: Sequence[scenes.Task], num_per_task: int, *, paraphrase: bool = False, seed: int = 0
) -> list[TaskResult]:
    """Score each task on `num_per_task` held-out examples."""
    answerer = Answerer(model_dir)
    results = []
    for task in tasks:
        # The scenes of a task are the same whichever other tasks are asked for.
        first_seed = HELD_OUT_SEED + seed * 10_000_019 + list(scenes.Task).index(task) * 1_000_003
        mistakes = []
        for number in track(range(num_per_task), task.value, console=Console(stderr=True), transient=True):
            rng = random.Random(first_seed + number)
            example = scenes.make_example(task, rng, paraphrase=paraphrase)
            answer = answerer.answer(example)
            if answer != example.answer:
                mistakes.append(Mistake(example.question, example.answer, answer))
        results.append(TaskResult(task.value, num_per_task, num_per_task - len(mistakes), tuple(mistakes)))
    return results


def main() -> None:
    """Parse the command line, evaluate and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, nargs="?", default=DEMO_MODEL, help="checkpoint directory")
    parser.add_argument("--num-per-task", type=int, default=200)
    parser.add_argument("--task", action="append", type=scenes.Task, choices=list(scenes.Task), help="only this task")
    parser.add_argument("--paraphrases", action="store_true", help="ask in other words, too")
    parser.add_argument("--seed", type=int, default=0, help="another set of held-out scenes")
    parser.add_argument("--json", action="store_true", help="write the report as JSON, with every mistake")
    options = parser.parse_args()
    started = time.monotonic()
    tasks = options.task or list(scenes.Task)
    results = evaluate(options.model, tasks, options.num_per_task, paraphrase=options.paraphrases, seed=options.seed)
    duration_s = time.monotonic() - started
    if options.json:
        report = [asdict(result) | {"accuracy": result.accuracy} for result in results]
        json.dump(
            {"model": str(options.model), "duration_s": round(duration_s, 1), "tasks": report}, sys.stdout, indent=2
        )
        print()
        return
    table = Table(title=f"{options.model}: exact answers")
    for name in ("task", "right", "asked", "accuracy", "a mistake"):
        table.add_column(name, justify="left" if name in ("task", "a mistake") else "right")
    for result in results:
        mistake = ""
        if result.mistakes:
            first = result.mistakes[0]
            mistake = f"{first.question} {first.expected!r} answered {first.answer!r}"
        table.add_row(
            result.task, str(result.num_exact), str(result.num_examples), f"{100 * result.accuracy:.1f} %", mistake
        )
    Console().print(table)


if __name__ == "__main__":
    main()
