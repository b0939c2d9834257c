"""A task to try models that see, without a file of data: questions about drawn shapes.

    jaxspeed train configs/vlm_tiny.yaml
    python -m jaxspeed.models.shapes runs/vlm_tiny

The second command counts the right answers to questions that were held out.
"""

from __future__ import annotations

import io
import random
import sys
from collections.abc import Iterator
from typing import Any

COLOURS = {
    "red": (220, 40, 40),
    "green": (40, 180, 60),
    "blue": (40, 70, 220),
    "gold": (230, 190, 30),
}
SHAPES = ("circle", "square", "triangle", "cross")
QUESTIONS = {
    "Which shape?": "{shape}",
    "Which colour?": "{colour}",
    "What is it?": "{colour} {shape}",
}
SIDE, TRAINED, HELD_OUT = 32, 8192, 512  # pixels, questions


def questions() -> Iterator[dict[str, Any]]:
    """Conversations with an image, to train on."""
    return _drawn(random.Random(0), TRAINED)


def held_out() -> Iterator[dict[str, Any]]:
    """Others."""
    return _drawn(random.Random(1), HELD_OUT)


def _drawn(draw: random.Random, count: int) -> Iterator[dict[str, Any]]:
    from PIL import Image, ImageDraw

    for _ in range(count):
        colour, shape = draw.choice([*COLOURS]), draw.choice(SHAPES)
        image = Image.new("RGB", (SIDE, SIDE), (draw.randrange(180, 256),) * 3)
        pen, fill = ImageDraw.Draw(image), COLOURS[colour]
        r = draw.randrange(6, 11)
        x, y = (draw.randrange(r, SIDE - r) for _ in range(2))
        if shape == "circle":
            pen.ellipse((x - r, y - r, x + r, y + r), fill)
        elif shape == "square":
            pen.rectangle((x - r, y - r, x + r, y + r), fill)
        elif shape == "triangle":
            pen.polygon([(x, y - r), (x - r, y + r), (x + r, y + r)], fill)
        else:
            pen.rectangle((x - r, y - 2, x + r, y + 2), fill)
            pen.rectangle((x - 2, y - r, x + 2, y + r), fill)
        png = io.BytesIO()
        image.save(png, "PNG")
        question, answer = draw.choice([*QUESTIONS.items()])
        content = [{"type": "image", "image": png.getvalue()}, {"type": "text", "text": question}]
        said = {"role": "assistant", "content": answer.format(colour=colour, shape=shape)}
        yield {"messages": [{"role": "user", "content": content}, said]}


def right_answers(run: str) -> tuple[int, int]:
    """(right answers, questions) of the model of a run."""
    import jaxspeed
    from jaxspeed.data import read_tokenizer

    engine = jaxspeed.initialize(config=f"{run}/run.yaml")
    engine.load_checkpoint(f"{run}/checkpoints")
    records = [record["messages"] for record in held_out()]
    prompts = [[question] for question, _ in records]
    tokenizer = read_tokenizer(run)
    answers = engine.generate(prompts, 16, temperature=0, tokenizer=tokenizer)
    right = sum(
        answer.text.strip() == said["content"]
        for answer, (_, said) in zip(answers, records, strict=True)
    )
    return right, len(records)


if __name__ == "__main__":
    right, count = right_answers(sys.argv[1])
    print(f"{right} of {count} answers are right ({right / count:.1%})")
