"""Ask one question about several pictures.

    python examples/multi_image_question.py

sends three pictures in one message, and prints

    image 1: A green triangle.
    image 2: A red circle.
    image 3: A blue square, a red triangle.
    Which image shows a red circle?  2
    Which image shows a blue square?  3

Each picture is an item of its own: it is hashed, encoded (by another replica than its neighbours, if there are several
encoders) and cached by itself, so the second question encodes nothing. Exits with 1 if an answer is wrong.
"""

from __future__ import annotations

import random
import sys

from asking import connect, user_message
from demo_scenes import draw, random_scene

SHOWN = [
    [("green", "triangle")],
    [("red", "circle")],
    [("blue", "square"), ("red", "triangle")],
]
ANSWERS = {"Which image shows a red circle?": "2", "Which image shows a blue square?": "3"}


def main() -> int:
    client, model = connect(__doc__)
    rng = random.Random(1)
    scenes = [random_scene(rng, names=names, size=(168, 112)) for names in SHOWN]
    images = [draw(scene) for scene in scenes]
    for number, scene in enumerate(scenes, start=1):
        print(f"image {number}: {scene.description}")
    num_wrong = 0
    for question, right in ANSWERS.items():
        reply = client.chat.completions.create(model=model, messages=[user_message(question, *images)], temperature=0)
        answer = reply.choices[0].message.content
        num_wrong += answer != right
        print(f"{question}  {answer}" + ("" if answer == right else f"   (should be: {right})"))
    return 1 if num_wrong else 0


if __name__ == "__main__":
    sys.exit(main())
