"""A frame of `ShellQuest-v0`: what is to be done, the menu, and a terminal with the last command."""

from __future__ import annotations

import textwrap
from typing import Any

import gymnasium
import numpy as np

from sandbox_gym.envs.shell_quest_making import Quest

WIDTH, HEIGHT = 640, 480
_INK, _PAPER, _DARK, _LIGHT, _DONE = (
    (30, 34, 44),
    (250, 250, 247),
    (28, 32, 40),
    (214, 222, 214),
    (86, 160, 102),
)
_COLUMNS = 84
_ROWS = 14  # of the terminal
_LINE = 17


def draw_quest(quest: Quest, command: str, output: str, progress: float) -> Any:
    """uint8 [HEIGHT, WIDTH, 3]. Raises DependencyNotInstalled without Pillow."""
    try:
        from PIL import Image, ImageDraw, ImageFont
    except ModuleNotFoundError as error:
        raise gymnasium.error.DependencyNotInstalled(
            "a picture of a quest needs Pillow: pip install pillow"
        ) from error

    image = Image.new("RGB", (WIDTH, HEIGHT), _PAPER)
    pen = ImageDraw.Draw(image)
    font, small = ImageFont.load_default(14), ImageFont.load_default(12)
    y = 12
    for line in textwrap.wrap(quest.prompt, _COLUMNS)[:4]:
        pen.text((16, y), line, _INK, font=font)
        y += _LINE
    y += 6
    for number, entry in enumerate(quest.menu):
        left, top = 16 + WIDTH // 2 * (number % 2), y + _LINE * (number // 2)
        colour = _DONE if entry == command else (110, 114, 122)
        pen.text(
            (left, top), textwrap.shorten(f"{number}  {entry}", 50, placeholder=" ..."), colour, font=small
        )
    y += _LINE * ((len(quest.menu) + 1) // 2) + 10
    pen.rounded_rectangle((12, y, WIDTH - 12, HEIGHT - 34), 8, _DARK)
    rows = [f"$ {line}" for line in command.splitlines()[:2]]
    rows += output.splitlines()[-(_ROWS - len(rows)) :]
    for row in rows:
        printable = "".join(letter if letter.isprintable() else "?" for letter in row.expandtabs())
        pen.text((24, y + 10), printable[: _COLUMNS - 2], _LIGHT, font=small)
        y += _LINE
    pen.rectangle((16, HEIGHT - 22, WIDTH - 16, HEIGHT - 12), (228, 228, 224))
    if progress:
        pen.rectangle((16, HEIGHT - 22, 16 + int(progress * (WIDTH - 32)), HEIGHT - 12), _DONE)
    return np.asarray(image, np.uint8)
