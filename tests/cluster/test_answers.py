"""Right answers, through the running server and the real ``openai`` client, in every mode.

If this fails, a user's first impression is a server that is up and wrong. The scenes are held out from training by
their seeds.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from demo_scenes import Example, Task, make_example

from tests.cluster.conftest import Server, configured, running
from tests.cluster.scenes import asking, data_url

MODES = ["aggregated", "e_pd", "ep_d", "epd", "auto"]
NUM_PER_TASK = 4
STILL_TASKS = [task for task in Task if task is not Task.CLIP]


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with running(configured("quickstart.yaml", router={"admission": False})) as server:
        yield server
        server.assert_nothing_is_held()


def examples() -> list[Example]:
    rng = random.Random("answers over the wire")
    return [make_example(task, rng) for task in STILL_TASKS for _ in range(NUM_PER_TASK)]


def ask(server: Server, example: Example, mode: str, *, stream: bool) -> str:
    options: dict[str, Any] = {
        "model": "demo",
        "messages": asking(example.question, *(data_url(image) for image in example.images)),
        "temperature": 0,
        "max_tokens": 64,
        "extra_body": {"epd": {"mode": mode}},
    }
    completions = server.client().chat.completions
    if not stream:
        return completions.create(**options).choices[0].message.content or ""
    chunks = completions.create(stream=True, **options)
    return "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)


@pytest.fixture(scope="module")
def answers(server: Server) -> dict[str, list[str]]:
    """All examples in all modes, eight requests at a time."""
    with ThreadPoolExecutor(8) as pool:
        return {mode: list(pool.map(lambda e, m=mode: ask(server, e, m, stream=False), examples())) for mode in MODES}


def test_drawn_scenes_are_answered_rightly(answers):
    expected = [example.answer for example in examples()]
    right = sum(answer == wanted for answer, wanted in zip(answers["aggregated"], expected, strict=True))
    assert right >= 0.9 * len(expected), list(zip(answers["aggregated"], expected, strict=True))


@pytest.mark.parametrize("mode", MODES)
def test_every_mode_gives_the_same_answers(answers, mode):
    assert answers[mode] == answers["aggregated"]


@pytest.mark.parametrize("mode", MODES)
def test_streamed_answers_are_the_same(server, answers, mode):
    some = examples()[::5]
    assert [ask(server, example, mode, stream=True) for example in some] == answers[mode][::5]


def test_sixty_four_requests_at_once_get_the_answers_that_they_get_alone(server, answers):
    """Disaggregation that only works one request at a time is worse than none."""
    jobs = [(index, mode) for index in range(len(examples())) for mode in ("epd", "ep_d")][:64]
    all_examples = examples()
    with ThreadPoolExecutor(64) as pool:
        got = list(pool.map(lambda job: ask(server, all_examples[job[0]], job[1], stream=True), jobs))
    assert got == [answers["aggregated"][index] for index, _ in jobs]
    server.assert_nothing_is_held()
