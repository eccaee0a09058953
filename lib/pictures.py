"""Every picture of the package, drawn from a short text or read from a file."""

from collections.abc import Callable

import numpy as np
from PIL import Image, ImageDraw, UnidentifiedImageError

from lib.errors import LeakbookError, cut, shown

PLACEHOLDER = "placeholder"
SIZE = 56  # pixels: four visual tokens under Qwen2.5-VL's 14-pixel patches merged 2 x 2
PATTERN_CELLS = 7
COLORS = {"red": "#d62728", "blue": "#1f77b4", "green": "#2ca02c", "yellow": "#e6c229", "black": "#222222"}
SHAPES = ("circle", "square", "triangle")


class PictureError(LeakbookError, ValueError):
    """A picture's file is missing or unreadable, or its description is not understood."""


def picture(image: str, owner: str = "image") -> Image.Image:
    """The RGB picture behind ``image``.

    ``"placeholder"`` is one uniform grey; ``"pattern:<seed>"`` a grid of random colours; ``"screen:<seed>"`` the
    window of :func:`screen`; ``"shapes:<seed>"`` the drawing of :func:`shapes`; anything else the path of a file.

    Raises:
        PictureError: the file is missing or no image, or the seed is no whole number; ``owner`` names whose it is.
    """
    if image == PLACEHOLDER:
        return Image.new("RGB", (SIZE, SIZE), (128, 128, 128))
    kind, separator, seed = image.partition(":")
    if separator and kind in _DRAWN:
        if not (seed.isascii() and seed.isdigit()):
            raise PictureError(f"{owner}: got image {shown(image)}, expected {kind}:<seed>, a whole number >= 0")
        return _DRAWN[kind](int(seed))
    try:
        with Image.open(image) as opened:
            return opened.convert("RGB")
    except FileNotFoundError as error:
        raise PictureError(f"{owner}: image file {shown(image)} does not exist") from error
    except (UnidentifiedImageError, Image.DecompressionBombError, OSError, ValueError, SyntaxError) as error:
        raise PictureError(f"{owner}: {shown(image)} is not a readable image ({cut(str(error))})") from error


def is_file(image: str) -> bool:
    """Whether ``image`` names a file, and not something drawn."""
    return image != PLACEHOLDER and image.partition(":")[0] not in _DRAWN


def _pattern(seed: int) -> Image.Image:
    cells = np.random.default_rng(seed).integers(0, 256, (PATTERN_CELLS, PATTERN_CELLS, 3), dtype=np.uint8)
    scale = SIZE // PATTERN_CELLS
    return Image.fromarray(cells.repeat(scale, 0).repeat(scale, 1))


def screen(seed: int) -> list[tuple[str, int, int]]:
    """Buttons of a seeded window: label and centre (x, y) in pixels, top to bottom."""
    rng = np.random.default_rng(seed)
    labels = rng.choice(("Save", "Open", "Print", "Close", "Search", "Send", "Undo", "Help"), 3, replace=False)
    return [(str(label), int(rng.integers(14, 43)), 16 + 14 * row) for row, label in enumerate(labels)]


def _draw_screen(seed: int) -> Image.Image:
    window = Image.new("RGB", (SIZE, SIZE), "#f0f0f0")
    pen = ImageDraw.Draw(window)
    pen.rectangle((0, 0, SIZE - 1, 6), fill="#3b6ea5")
    for _, x, y in screen(seed):
        pen.rectangle((x - 11, y - 5, x + 11, y + 5), fill="#dddddd", outline="#555555")
    return window


def shapes(seed: int) -> list[tuple[str, str]]:
    """Two shapes of a seeded drawing, left to right: colour and shape."""
    rng = np.random.default_rng(seed)
    colors = rng.choice(tuple(COLORS), 2, replace=False)
    return [(str(color), str(rng.choice(SHAPES))) for color in colors]


def _draw_shapes(seed: int) -> Image.Image:
    ground = Image.new("RGB", (SIZE, SIZE), "white")
    pen = ImageDraw.Draw(ground)
    for place, (color, shape) in enumerate(shapes(seed)):
        left, top, right, bottom = 4 + 26 * place, 16, 26 + 26 * place, 38
        if shape == "circle":
            pen.ellipse((left, top, right, bottom), fill=COLORS[color])
        elif shape == "square":
            pen.rectangle((left, top, right, bottom), fill=COLORS[color])
        else:
            pen.polygon(((left, bottom), (right, bottom), ((left + right) // 2, top)), fill=COLORS[color])
    return ground


_DRAWN: dict[str, Callable[[int], Image.Image]] = {
    "pattern": _pattern,
    "screen": _draw_screen,
    "shapes": _draw_shapes,
}
