"""Draws the pictures and clips that the tiny vision model learns to describe. Knows nothing of tokens or tensors.

A scene is drawn from a `random.Random`. Held-out scenes use other seeds, so their numbers, colors and shapes occur in
training, but their drawings do not.
"""

import math
import random
from dataclasses import dataclass

from PIL import Image, ImageDraw

COLORS = {
    "red": (220, 40, 40),
    "green": (40, 160, 60),
    "blue": (45, 75, 215),
    "yellow": (235, 200, 30),
    "purple": (140, 50, 170),
    "black": (25, 25, 25),
}
SHAPES = ("circle", "square", "triangle")
NUMBERS = ("one", "two", "three", "four")
SIZES = ((96, 96), (128, 96), (96, 128), (160, 160), (64, 64))  # (width, height)
CLIP_SIZE = (96, 96)
MAX_SCENES = 3  # in a clip


@dataclass(frozen=True)
class Scene:
    number: str
    color: str
    shape: str

    @classmethod
    def of(cls, rng: random.Random) -> "Scene":
        return cls(rng.choice(NUMBERS), rng.choice(list(COLORS)), rng.choice(SHAPES))

    @property
    def words(self) -> str:
        return f"{self.number} {self.color} {self.shape}{'' if self.number == NUMBERS[0] else 's'}"

    @property
    def count(self) -> int:
        return NUMBERS.index(self.number) + 1

    def draw(self, rng: random.Random, size: tuple[int, int]) -> Image.Image:
        """Draws the scene's things at random places in random sizes, without overlaps."""
        picture = Image.new("RGB", size, _paper(rng))
        pen = ImageDraw.Draw(picture)
        for x, y, radius in _places(rng, self.count, size):
            _draw_shape(pen, rng, self.shape, _near(rng, COLORS[self.color]), x, y, radius)
        return picture


def draw_clip(rng: random.Random, num_frames: int) -> tuple[list[Image.Image], list[str]]:
    """Returns frames of a thing that drifts and changes its color, and its colors in order."""
    colors = rng.sample(list(COLORS), rng.randint(2, min(MAX_SCENES, num_frames // 2)))
    shape, paper, width = rng.choice(SHAPES), _paper(rng), CLIP_SIZE[0]
    radius = rng.uniform(0.15, 0.32) * width
    x, y = (rng.uniform(radius, width - radius) for _ in range(2))
    shades = [_near(rng, COLORS[color]) for color in colors]
    frames = []
    for color in _cut(rng, num_frames, shades):
        picture = Image.new("RGB", CLIP_SIZE, paper)
        _draw_shape(ImageDraw.Draw(picture), rng, shape, color, x, y, radius)
        x, y = (min(max(each + rng.uniform(-3, 3), radius), width - radius) for each in (x, y))
        frames.append(picture)
    return frames, colors


def _cut(rng: random.Random, num_frames: int, shades: list[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """Gives each shade a share of the frames, at least two frames."""
    spare = num_frames - 2 * len(shades)
    cuts = sorted(rng.randint(0, spare) for _ in shades[1:])
    lengths = [2 + stop - start for start, stop in zip([0, *cuts], [*cuts, spare], strict=True)]
    return [shade for shade, length in zip(shades, lengths, strict=True) for _ in range(length)]


def _paper(rng: random.Random) -> tuple[int, ...]:
    light = rng.randint(215, 255)
    return tuple(min(255, light + rng.randint(-10, 10)) for _ in range(3))


def _near(rng: random.Random, color: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(min(255, max(0, each + rng.randint(-20, 20))) for each in color)


def _places(rng: random.Random, count: int, size: tuple[int, int]) -> list[tuple[float, float, float]]:
    """Returns (x, y, radius) of things that do not touch."""
    width, height = size
    short = min(size)
    most = 0.34 if count == 1 else 0.2
    while True:
        found: list[tuple[float, float, float]] = []
        for _ in range(60):
            radius = rng.uniform(0.12, most) * short
            x, y = rng.uniform(radius, width - radius), rng.uniform(radius, height - radius)
            if all(math.hypot(x - a, y - b) > 1.2 * (radius + r) + 0.04 * short for a, b, r in found):
                found.append((x, y, radius))
                if len(found) == count:
                    return found


def _draw_shape(
    pen: ImageDraw.ImageDraw,
    rng: random.Random,
    shape: str,
    color: tuple[int, ...],
    x: float,
    y: float,
    radius: float,
) -> None:
    if shape == "circle":
        pen.ellipse((x - radius, y - radius, x + radius, y + radius), fill=color)
    elif shape == "square":
        half = 0.85 * radius
        pen.rectangle((x - half, y - half, x + half, y + half), fill=color)
    else:
        lean = rng.uniform(-0.15, 0.15)
        corners = [(lean + math.pi * (2 * each / 3 - 0.5)) for each in range(3)]
        pen.polygon([(x + radius * math.cos(at), y + radius * math.sin(at)) for at in corners], fill=color)
