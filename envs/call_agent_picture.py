"""A frame of `CallAgent-v0`: the call as speech bubbles, mood and turns as bars."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np

from sandbox_gym.envs.call_agent_caller import MAX_TURNS, Call

WIDTH, HEIGHT = 480, 400
_LINES = 7  # of the transcript, the last ones
_ASSISTANT, _CALLER, _INK, _PAPER = (208, 228, 255), (236, 236, 230), (30, 34, 44), (250, 250, 247)


def draw_call(call: Call) -> Any:
    """uint8 [HEIGHT, WIDTH, 3]. Raises DependencyNotInstalled without Pillow."""
    try:
        from PIL import Image, ImageDraw, ImageFont
    except ModuleNotFoundError as error:
        raise gymnasium.error.DependencyNotInstalled(
            "a picture of a call needs Pillow: pip install pillow"
        ) from error

    image = Image.new("RGB", (WIDTH, HEIGHT), _PAPER)
    pen = ImageDraw.Draw(image)
    font = ImageFont.load_default(14)
    small = ImageFont.load_default(12)
    title = call.outcome.replace("_", " ") if call.outcome else f"turn {call.turns}"
    pen.text((16, 12), title, _INK, font=font)
    pen.text((WIDTH - 16, 12), f"return {call.earned:+.1f}", _INK, font=font, anchor="ra")
    y = 40
    for who, text in call.transcript[-_LINES:]:
        width = int(pen.textlength(text, font=font)) + 20
        left = 16 if who == "caller" else WIDTH - 16 - width
        colour = _CALLER if who == "caller" else _ASSISTANT
        pen.rounded_rectangle((left, y, left + width, y + 28), 8, colour)
        pen.text((left + 10, y + 6), text, _INK, font=font)
        y += 38
    bars = (
        ("mood", call.mood, (86, 160, 102) if call.mood > 0.3 else (204, 90, 80)),
        ("interest", call.interest, (92, 128, 200)),
        ("turns", call.turns / MAX_TURNS, (150, 150, 150)),
    )
    for i, (name, share, colour) in enumerate(bars):
        top = HEIGHT - 72 + 22 * i
        pen.text((16, top), name, _INK, font=small)
        pen.rectangle((80, top + 2, WIDTH - 16, top + 14), (228, 228, 224))
        pen.rectangle((80, top + 2, 80 + int(share * (WIDTH - 96)), top + 14), colour)
    return np.asarray(image, np.uint8)
