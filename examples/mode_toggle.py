"""Run the same question in every mode: placement is chosen request by request.

    python examples/mode_toggle.py

prints where each stage ran (replica ids and times vary, and so does what `auto` chooses):

    asked       ran         encode            prefill           decode             ttft  answer
    aggregated  aggregated  decode#qugwua5d   decode#qugwua5d   decode#qugwua5d   22 ms  A red circle, a blue square.
    e_pd        e_pd        encode#g5ww7eak   decode#qugwua5d   decode#qugwua5d   52 ms  A red circle, a blue square.
    ep_d        ep_d        prefill#l8o1tt92  prefill#l8o1tt92  decode#qugwua5d   17 ms  A red circle, a blue square.
    epd         epd         encode#g5ww7eak   prefill#l8o1tt92  decode#qugwua5d   63 ms  A red circle, a blue square.
    auto        aggregated  decode#qugwua5d   decode#qugwua5d   decode#qugwua5d   13 ms  A red circle, a blue square.

The times do not say which mode is best: the picture is the same each time, so later rows find embeddings and prefixes
in caches. `epd bench` compares modes under load. Exits with 1 if an answer is wrong or a mode ran that was not asked.
"""

from __future__ import annotations

import random
import sys

from asking import connect, user_message
from demo_scenes import draw, random_scene

SCENE = random_scene(random.Random(3), names=[("red", "circle"), ("blue", "square")], size=(224, 112))
ROW = "{:<10}  {:<10}  {:<16}  {:<16}  {:<15}  {:>6}  {}"


def main() -> int:
    client, model = connect(__doc__)
    messages = [user_message("Describe the image.", draw(SCENE))]
    is_right = True
    print(ROW.format("asked", "ran", "encode", "prefill", "decode", "ttft", "answer"))
    for mode in ("aggregated", "e_pd", "ep_d", "epd", "auto"):
        reply = client.chat.completions.create(
            model=model, messages=messages, temperature=0, extra_body={"epd": {"mode": mode, "trace": True}}
        )
        answer, trace = reply.choices[0].message.content, reply.model_extra["epd"]
        where, ttft = trace["placement"], f"{trace['timings_ms']['ttft']:.0f} ms"
        print(ROW.format(mode, trace["mode"], *where["encode"], where["prefill"], where["decode"], ttft, answer))
        is_right &= answer == SCENE.description and mode in ("auto", trace["mode"])
    return 0 if is_right else 1


if __name__ == "__main__":
    sys.exit(main())
