"""Ask about one picture.

    python examples/image_question.py

draws a red circle beside a blue square, and prints

    What color is the circle?                            red
    What shape is blue?                                  square
    How many shapes are there?                           2
    Is the red circle left or right of the blue square?  left
    Describe the image.                                  A red circle, a blue square.

Exits with 1 if an answer is wrong. With a model other than the built-in one, the wording may differ.
"""

from __future__ import annotations

import random
import sys

from asking import connect, user_message
from demo_scenes import draw, random_scene

# In one row, so that left and right are plain to see: two cells of a picture that is twice as wide as high.
SCENE = random_scene(random.Random(3), names=[("red", "circle"), ("blue", "square")], size=(224, 112))

ANSWERS = {
    "What color is the circle?": "red",
    "What shape is blue?": "square",
    "How many shapes are there?": "2",
    "Is the red circle left or right of the blue square?": "left",
    "Describe the image.": SCENE.description,
}


def main() -> int:
    client, model = connect(__doc__)
    image = draw(SCENE)
    num_wrong = 0
    for question, right in ANSWERS.items():
        reply = client.chat.completions.create(model=model, messages=[user_message(question, image)], temperature=0)
        answer = reply.choices[0].message.content
        num_wrong += answer != right
        print(f"{question:<53}{answer}" + ("" if answer == right else f"   (should be: {right})"))
    return 1 if num_wrong else 0


if __name__ == "__main__":
    sys.exit(main())
