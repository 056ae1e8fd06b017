"""Read an answer while it is made.

    python examples/streaming.py

prints the words as they come, then when they came (times vary; pieces are tokens, or several that were ready at once):

    A green square, a yellow circle, a purple triangle.
    12 pieces: the first after 0.05 s, the last after 0.14 s

Exits with 1 if the answer is wrong, or if the stream does not join to exactly the reply that is not streamed.
"""

from __future__ import annotations

import random
import sys
import time

from asking import connect, user_message
from demo_scenes import draw, random_scene

SCENE = random_scene(
    random.Random(2), names=[("green", "square"), ("yellow", "circle"), ("purple", "triangle")], size=(336, 112)
)


def main() -> int:
    client, model = connect(__doc__)
    request = {"model": model, "messages": [user_message("Describe the image.", draw(SCENE))], "temperature": 0}
    pieces, arrived_s = [], []
    started_s = time.perf_counter()
    for chunk in client.chat.completions.create(stream=True, **request):
        piece = chunk.choices[0].delta.content
        if piece:
            pieces.append(piece)
            arrived_s.append(time.perf_counter() - started_s)
            print(piece, end="", flush=True)
    print(f"\n{len(pieces)} pieces: the first after {arrived_s[0]:.2f} s, the last after {arrived_s[-1]:.2f} s")
    whole = client.chat.completions.create(**request).choices[0].message.content
    return 0 if "".join(pieces) == whole == SCENE.description else 1


if __name__ == "__main__":
    sys.exit(main())
