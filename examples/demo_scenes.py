"""Scenes, clips and questions with known answers: the world that the built-in model is trained and tested on.

This module owns the words and the pictures: the colours and shapes, how a scene is laid out and drawn, and for every
`Task` the question, its paraphrases and the one right answer. It needs only Pillow and a `random.Random`, draws the
same example for the same seed, and knows nothing about models, tokenizers or servers.

    >>> import random
    >>> scene = random_scene(random.Random(7), num_shapes=2)
    >>> image = draw(scene)
    >>> example = make_example(Task.COLOUR, random.Random(7))
    >>> example.question
    'What color is the triangle?'
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache

from PIL import Image, ImageDraw, ImageFont

MIN_SIDE_PIXELS = 56
MAX_SIDE_PIXELS = 448
MAX_SHAPES = 5
FRAMES_PER_SECOND = 2
"""Clips are lists of frames at this rate: with two frames in a temporal patch, a patch spans one second."""

Rgb = tuple[int, int, int]

# Two anchors for each name: a shape's colour lies between them, so that both "pure" and softer tones are known by name.
COLORS: dict[str, tuple[Rgb, Rgb]] = {
    "red": ((255, 0, 0), (214, 44, 44)),
    "green": ((0, 128, 0), (40, 190, 80)),
    "blue": ((0, 0, 255), (50, 90, 225)),
    "yellow": ((255, 255, 0), (240, 212, 45)),
    "purple": ((128, 0, 128), (150, 70, 190)),
    "orange": ((255, 165, 0), (240, 130, 30)),
}
SHAPES = ("circle", "square", "triangle")


class Task(StrEnum):
    """What a question asks for; the value is the name used in reports."""

    COLOUR = "colour"
    SHAPE = "shape"
    COUNT = "count"
    PLACE = "place"
    READ = "read"
    DESCRIBE = "describe"
    WHICH = "which"
    COUNT_FROM = "count from"
    REPEAT = "repeat"
    CLIP = "clip"


SCENE_TASKS = (Task.COLOUR, Task.SHAPE, Task.COUNT, Task.PLACE, Task.DESCRIBE)
"""The tasks that `ask` can pose about one scene of shapes."""

# The first wording of each task is the one that `make_example` uses unless it is asked for paraphrases.
WORDINGS: dict[Task, tuple[str, ...]] = {
    Task.COLOUR: (
        "What color is the {shape}?",
        "What is the color of the {shape}?",
        "Which color is the {shape}?",
        "What colour is the {shape}?",
        "what color is the {shape}",
    ),
    Task.SHAPE: (
        "What shape is {color}?",
        "Which shape is {color}?",
        "What is the {color} shape?",
        "What kind of shape is {color}?",
        "what shape is {color}",
    ),
    Task.COUNT: (
        "How many shapes are there?",
        "How many shapes are in the image?",
        "How many shapes do you see?",
        "Count the shapes.",
        "how many shapes are there",
    ),
    Task.PLACE: (
        "Is the {first} left or right of the {second}?",
        "Is the {first} to the left or to the right of the {second}?",
        "Is the {first} to the left or right of the {second}?",
    ),
    Task.READ: (
        "What number is written?",
        "What is the number?",
        "What number is in the image?",
        "Read the number.",
        "Which number is written?",
        "what number is written",
    ),
    Task.DESCRIBE: (
        "Describe the image.",
        "Describe this image.",
        "Describe the picture.",
        "What is in the image?",
        "What is in this image?",
        "describe the image",
    ),
    Task.WHICH: (
        "Which image shows {item}?",
        "Which picture shows {item}?",
        "Which image has {item}?",
        "In which image is {item}?",
        "which image shows {item}",
    ),
    Task.COUNT_FROM: (
        "Count from {first} to {last}.",
        "Count up from {first} to {last}.",
        "Write the numbers from {first} to {last}.",
        "Count from {first} to {last}",
    ),
    Task.REPEAT: (
        "Repeat: {text}",
        "Repeat after me: {text}",
        "Please repeat: {text}",
        "Say: {text}",
    ),
    Task.CLIP: (
        "In what order do the colors appear?",
        "In which order do the colors appear?",
        "What colors appear, in order?",
        "in what order do the colors appear",
    ),
}
_ABOVE_OR_BELOW = "Is the {first} above or below the {second}?"

WORDS: tuple[str, ...] = tuple(
    """
    red green blue yellow purple orange black white gray brown pink gold silver circle square triangle star line
    one two three four five six seven eight nine ten eleven twelve twenty thirty hundred
    fox dog cat bird fish horse cow sheep goat pig mouse rabbit bear wolf lion tiger zebra monkey snake frog
    turtle duck goose hen owl eagle crow bee ant spider whale shark crab
    apple pear plum peach lemon lime grape cherry melon berry banana bread butter cheese milk honey salt pepper
    rice soup tea coffee water sugar cake nut bean corn
    sun moon sky cloud rain snow wind storm river lake sea beach hill mountain forest tree leaf flower grass
    stone sand fire ice road bridge
    house door window roof wall floor table chair lamp bed clock book paper pen pencil letter word page cup plate
    spoon fork knife bottle box bag key lock rope wheel car bus train boat ship plane bike truck
    king queen child mother father sister brother friend teacher doctor farmer baker
    big small long short tall fast slow hot cold warm new old young happy sad quiet loud soft hard light dark
    run walk jump sing dance read write play sleep eat drink look listen open close
    north south east west left right up down day night morning evening spring summer autumn winter hello world
    """.split()  # noqa: SIM905 - two hundred quoted words would be hard to read
)


@dataclass(frozen=True, slots=True)
class Shape:
    """One shape; lengths are pixels of the scene, and `row` and `column` its cell in the scene's layout."""

    kind: str
    color: str
    rgb: Rgb
    row: int
    column: int
    center_x: float
    center_y: float
    diameter: float

    @property
    def name(self) -> str:
        """Colour and kind, as in "red circle"."""
        return f"{self.color} {self.kind}"


@dataclass(frozen=True, slots=True)
class WrittenNumber:
    """Digits printed in Pillow's own scalable font, centred on (`center_x`, `center_y`) pixels."""

    digits: str
    rgb: Rgb
    font_size_pixels: int
    center_x: float
    center_y: float

    @property
    def digit_centers_x(self) -> tuple[float, ...]:
        """Where each digit is printed, in pixels from the left edge."""
        font = _font(self.font_size_pixels)
        ends = [font.getlength(self.digits[: index + 1]) for index in range(len(self.digits))]
        starts = [0.0, *ends[:-1]]
        left = self.center_x - ends[-1] / 2
        return tuple(left + (start + end) / 2 for start, end in zip(starts, ends, strict=True))


@dataclass(frozen=True, slots=True)
class Scene:
    """Shapes in reading order (rows from the top, each from the left) or a number, on a plain background."""

    width: int
    height: int
    background: Rgb
    shapes: tuple[Shape, ...] = ()
    number: WrittenNumber | None = None

    @property
    def description(self) -> str:
        """The answer to "Describe the image."."""
        if self.number is not None:
            return f"The number {self.number.digits}."
        text = ", ".join(with_article(shape.name) for shape in self.shapes)
        return text[0].upper() + text[1:] + "."


@dataclass(frozen=True, slots=True)
class Example:
    """A question with its media in the order of the prompt, and the one right answer."""

    task: Task
    images: tuple[Image.Image, ...]
    clip: tuple[Image.Image, ...] | None
    question: str
    answer: str


def with_article(name: str) -> str:
    """Put "a" or "an" before a name."""
    return f"an {name}" if name[0] in "aeiou" else f"a {name}"


def random_size(rng: random.Random, *, max_aspect: float = 2.0) -> tuple[int, int]:
    """Draw (width, height): each side within the limits, small and large images equally often, half of them square."""
    side = MIN_SIDE_PIXELS * (MAX_SIDE_PIXELS / MIN_SIDE_PIXELS) ** rng.random()
    if rng.random() < 0.5:
        return round(side), round(side)
    stretch = max_aspect ** rng.uniform(-0.5, 0.5)
    width, height = (min(max(round(side * s), MIN_SIDE_PIXELS), MAX_SIDE_PIXELS) for s in (stretch, 1 / stretch))
    return width, height


def random_background(rng: random.Random) -> Rgb:
    """Draw a light or a dark background, nearly grey."""
    level = rng.randint(0, 40) if rng.random() < 0.35 else rng.randint(222, 255)
    red, green, blue = (min(max(level + rng.randint(-6, 6), 0), 255) for _ in range(3))
    return red, green, blue


def random_rgb(color: str, rng: random.Random) -> Rgb:
    """Draw a tone of the named colour."""
    weight = rng.random()
    red, green, blue = (
        min(max(round(a + weight * (b - a)) + rng.randint(-8, 8), 0), 255) for a, b in zip(*COLORS[color], strict=True)
    )
    return red, green, blue


def random_scene(
    rng: random.Random,
    *,
    num_shapes: int | None = None,
    size: tuple[int, int] | None = None,
    names: Sequence[tuple[str, str]] | None = None,
) -> Scene:
    """Lay out shapes on a grid, so that left, right, above, below and the reading order have one meaning.

    Args:
        rng: Source of every choice.
        num_shapes: 1 to `MAX_SHAPES`; drawn when absent.
        size: (width, height) in pixels; drawn when absent.
        names: (colour, kind) of each shape, instead of random ones; sets `num_shapes`.
    """
    width, height = size or random_size(rng)
    if names is None:
        names = [
            (rng.choice(tuple(COLORS)), rng.choice(SHAPES)) for _ in range(num_shapes or rng.randint(1, MAX_SHAPES))
        ]
    rows, columns = _random_layout(len(names), width, height, rng)
    cells = sorted(rng.sample([(row, column) for row in range(rows) for column in range(columns)], len(names)))
    cell_width, cell_height = width / columns, height / rows
    cell = min(cell_width, cell_height)
    shapes = []
    for (row, column), (color, kind) in zip(cells, names, strict=True):
        diameter = cell * rng.uniform(0.5, 0.85)
        # Shapes stay inside their cell, and within a tenth of it from the middle line of their row.
        slack_x = min((cell_width - diameter) / 2, 0.25 * cell_width)
        slack_y = min((cell_height - diameter) / 2, 0.1 * cell_height)
        shapes.append(
            Shape(
                kind=kind,
                color=color,
                rgb=random_rgb(color, rng),
                row=row,
                column=column,
                center_x=(column + 0.5) * cell_width + rng.uniform(-slack_x, slack_x),
                center_y=(row + 0.5) * cell_height + rng.uniform(-slack_y, slack_y),
                diameter=diameter,
            )
        )
    return Scene(width, height, random_background(rng), tuple(shapes))


def _random_layout(num_shapes: int, width: int, height: int, rng: random.Random) -> tuple[int, int]:
    """Choose rows and columns: cells enough for the shapes, none much longer than wide, none too small to see into."""
    layouts = []
    for rows in (1, 2, 3):
        for columns in (1, 2, 3):
            cell_width, cell_height = width / columns, height / rows
            is_fair = max(cell_width, cell_height) <= 2.1 * min(cell_width, cell_height)
            # A third of the smallest image is 18 pixels; what is left of a shape in that is still told apart.
            if rows * columns >= num_shapes and is_fair and min(cell_width, cell_height) >= 18:
                layouts.append((rows, columns))
    return rng.choice(layouts)


def random_number_scene(
    rng: random.Random, *, num_digits: int | None = None, size: tuple[int, int] | None = None
) -> Scene:
    """Print a number of one to four digits, in proportion to the image, in a colour that stands out."""
    width, height = size or random_size(rng)
    num_digits = num_digits or rng.choices((1, 2, 3, 4), weights=(1, 2, 3, 4))[0]
    digits = str(rng.randint(10 ** (num_digits - 1) if num_digits > 1 else 0, 10**num_digits - 1))
    text_width = width * rng.uniform(*((0.6, 0.92) if num_digits > 2 else (0.2 * num_digits, 0.45 * num_digits)))
    # A digit of the default font is 0.58 of the font size wide and 0.73 of it high.
    font_size = min(text_width / (0.58 * num_digits), 0.9 * height / 0.73)
    half_width, half_height = 0.29 * font_size * num_digits, 0.365 * font_size
    slack_x, slack_y = max(0.46 * width - half_width, 0.0), max(0.46 * height - half_height, 0.0)
    background = random_background(rng)
    is_dark = sum(background) < 384
    if rng.random() < 0.5:
        level = rng.randint(215, 255) if is_dark else rng.randint(0, 40)
        rgb: Rgb = (level, level, level)
    else:
        legible = ("yellow", "orange", "red") if is_dark else ("red", "green", "blue", "purple")
        rgb = random_rgb(rng.choice(legible), rng)
    number = WrittenNumber(
        digits=digits,
        rgb=rgb,
        font_size_pixels=max(round(font_size), 8),
        center_x=width / 2 + rng.uniform(-slack_x, slack_x),
        center_y=height / 2 + rng.uniform(-slack_y, slack_y),
    )
    return Scene(width, height, background, number=number)


@lru_cache(maxsize=512)
def _font(size_pixels: int) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    return ImageFont.load_default(size=size_pixels)


def draw(scene: Scene) -> Image.Image:
    """Draw a scene as an RGB image."""
    image = Image.new("RGB", (scene.width, scene.height), scene.background)
    canvas = ImageDraw.Draw(image)
    for shape in scene.shapes:
        radius = shape.diameter / 2
        left, top = shape.center_x - radius, shape.center_y - radius
        right, bottom = shape.center_x + radius, shape.center_y + radius
        if shape.kind == "circle":
            canvas.ellipse((left, top, right, bottom), fill=shape.rgb)
        elif shape.kind == "square":
            canvas.rectangle((left, top, right, bottom), fill=shape.rgb)
        else:
            canvas.polygon(((left, bottom), (right, bottom), (shape.center_x, top)), fill=shape.rgb)
    if scene.number is not None:
        number = scene.number
        canvas.text(
            (number.center_x, number.center_y),
            number.digits,
            fill=number.rgb,
            font=_font(number.font_size_pixels),
            anchor="mm",
        )
    return image


def ask(task: Task, scene: Scene, rng: random.Random, *, paraphrase: bool = False) -> tuple[str, str] | None:
    """Pose a question of one of the `SCENE_TASKS` or `Task.READ`, with its answer.

    None where the scene has no single answer.
    """
    values: dict[str, str]
    shapes = scene.shapes
    template = _wording(task, rng, paraphrase)
    if task is Task.COLOUR:
        single = [shape for shape in shapes if [other.kind for other in shapes].count(shape.kind) == 1]
        if not single:
            return None
        shape = rng.choice(single)
        values, answer = {"shape": shape.kind}, shape.color
    elif task is Task.SHAPE:
        single = [shape for shape in shapes if [other.color for other in shapes].count(shape.color) == 1]
        if not single:
            return None
        shape = rng.choice(single)
        values, answer = {"color": shape.color}, shape.kind
    elif task is Task.PLACE:
        names = [shape.name for shape in shapes]
        single = [shape for shape in shapes if names.count(shape.name) == 1]
        is_vertical = paraphrase and rng.random() < 0.25
        pairs = [
            (first, second)
            for first in single
            for second in single
            if (first.row != second.row if is_vertical else first.column != second.column)
        ]
        if not pairs:
            return None
        first, second = rng.choice(pairs)
        values = {"first": first.name, "second": second.name}
        if is_vertical:
            template, answer = _ABOVE_OR_BELOW, "above" if first.row < second.row else "below"
        else:
            answer = "left" if first.column < second.column else "right"
    elif task is Task.COUNT:
        values, answer = {}, str(len(shapes))
    elif task is Task.DESCRIBE:
        values, answer = {}, scene.description
    elif task is Task.READ:
        if scene.number is None:
            return None
        values, answer = {}, scene.number.digits
    else:
        raise ValueError(f"{task} is not a question about one scene")
    return template.format(**values), answer


def random_which_scenes(rng: random.Random, *, num_images: int | None = None) -> tuple[Scene, ...]:
    """Draw two to four scenes of one or two shapes that are easily confused: several share a colour or a kind."""
    num_images = num_images or rng.randint(2, 4)
    colors = rng.sample(tuple(COLORS), rng.choice((2, 3, 6)))
    kinds = rng.sample(SHAPES, rng.choice((2, 3)))
    while True:
        names = [
            [(rng.choice(colors), rng.choice(kinds)) for _ in range(rng.choice((1, 1, 2)))] for _ in range(num_images)
        ]
        if _found_once(names):
            return tuple(random_scene(rng, names=scene_names) for scene_names in names)


def _found_once(names: Sequence[Sequence[tuple[str, str]]]) -> list[tuple[tuple[str, str], int]]:
    """Names that occur in exactly one of the scenes, with that scene's number from one."""
    found: dict[tuple[str, str], set[int]] = {}
    for index, scene_names in enumerate(names, start=1):
        for name in scene_names:
            found.setdefault(name, set()).add(index)
    return [(name, next(iter(indexes))) for name, indexes in found.items() if len(indexes) == 1]


def ask_which(scenes: Sequence[Scene], rng: random.Random, *, paraphrase: bool = False) -> tuple[str, str]:
    """Ask which of the images shows a shape that only one of them shows.

    Raises:
        ValueError: no shape is in exactly one of the scenes.
    """
    found = _found_once([[(shape.color, shape.kind) for shape in scene.shapes] for scene in scenes])
    if not found:
        raise ValueError("every shape is in several of the scenes")
    # First the image, then the shape: otherwise images with two shapes would be the answer more often.
    answer = rng.choice(sorted({index for _, index in found}))
    color, kind = rng.choice([name for name, index in found if index == answer])
    question = _wording(Task.WHICH, rng, paraphrase).format(item=with_article(f"{color} {kind}"))
    return question, str(answer)


def random_clip(rng: random.Random, *, size: tuple[int, int] | None = None) -> tuple[tuple[Image.Image, ...], str]:
    """Draw frames at `FRAMES_PER_SECOND` in which two or three colours follow each other, and name them in order.

    Each colour stays for one or two whole seconds, as the whole frame or as a shape on a plain background.
    """
    width, height = size or random_size(rng)
    colors = rng.sample(tuple(COLORS), rng.choice((2, 3)))
    is_field = rng.random() < 0.5
    scene = random_scene(rng, size=(width, height), num_shapes=1)
    frames: list[Image.Image] = []
    for color in colors:
        rgb = random_rgb(color, rng)
        if is_field:
            frame = Image.new("RGB", (width, height), rgb)
        else:
            shape = scene.shapes[0]
            recolored = Shape(
                shape.kind, color, rgb, shape.row, shape.column, shape.center_x, shape.center_y, shape.diameter
            )
            frame = draw(Scene(width, height, scene.background, (recolored,)))
        frames += [frame] * (FRAMES_PER_SECOND * rng.choice((1, 1, 2)))
    return tuple(frames), ", ".join(colors)


def ask_count_from(rng: random.Random, *, paraphrase: bool = False) -> tuple[str, str]:
    """Ask to count between two numbers below 120, over two to twenty of them (rarely up to forty)."""
    first = rng.randint(0, 12) if rng.random() < 0.5 else rng.randint(0, 80)
    last = first + (rng.randint(1, 19) if rng.random() < 0.9 else rng.randint(20, 39))
    question = _wording(Task.COUNT_FROM, rng, paraphrase).format(first=first, last=last)
    return question, " ".join(str(value) for value in range(first, last + 1))


def ask_repeat(
    rng: random.Random, *, paraphrase: bool = False, random_word: Callable[[random.Random], str] | None = None
) -> tuple[str, str]:
    """Ask to repeat one to eight words, from `WORDS` unless `random_word` makes others."""
    words = [random_word(rng) if random_word else rng.choice(WORDS) for _ in range(rng.randint(1, 8))]
    text = " ".join(words)
    return _wording(Task.REPEAT, rng, paraphrase).format(text=text), text


def ask_clip(rng: random.Random, *, paraphrase: bool = False) -> str:
    """Ask for the order of the colours of a clip."""
    return _wording(Task.CLIP, rng, paraphrase)


def _wording(task: Task, rng: random.Random, paraphrase: bool) -> str:
    wordings = WORDINGS[task]
    # Half of the paraphrased questions keep the first wording, which is the one that documentation shows.
    return rng.choice(wordings) if paraphrase and rng.random() < 0.5 else wordings[0]


def make_example(task: Task, rng: random.Random, *, paraphrase: bool = False) -> Example:
    """Draw one example of a task; the same state of `rng` gives the same example."""
    if task is Task.COUNT_FROM:
        question, answer = ask_count_from(rng, paraphrase=paraphrase)
        return Example(task, (), None, question, answer)
    if task is Task.REPEAT:
        question, answer = ask_repeat(rng, paraphrase=paraphrase)
        return Example(task, (), None, question, answer)
    if task is Task.CLIP:
        clip, answer = random_clip(rng)
        return Example(task, (), clip, ask_clip(rng, paraphrase=paraphrase), answer)
    if task is Task.WHICH:
        scenes = random_which_scenes(rng)
        question, answer = ask_which(scenes, rng, paraphrase=paraphrase)
        return Example(task, tuple(draw(scene) for scene in scenes), None, question, answer)
    while True:
        scene = random_number_scene(rng) if task is Task.READ else random_scene(rng)
        asked = ask(task, scene, rng, paraphrase=paraphrase)
        if asked is not None:
            return Example(task, (draw(scene),), None, *asked)
