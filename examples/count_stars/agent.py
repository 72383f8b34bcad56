"""An agent that shows the model a picture and asks what is in it; it knows a base URL, a key, and nothing of Polar.

Draws a night sky with a few stars, sends it as a PNG with the question, and writes down what the model answers.
"""

import base64
import json
import os
import random
import struct
import zlib
from pathlib import Path

from openai import OpenAI

SIDE = 64


def png(pixels: list[bytearray]) -> bytes:
    """A grey picture as a PNG file."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", len(pixels[0]), len(pixels), 8, 0, 0, 0, 0)
    rows = b"".join(b"\0" + bytes(row) for row in pixels)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")


def sky(stars: int) -> bytes:
    """So many stars, none touching another."""
    pixels = [bytearray(SIDE) for _ in range(SIDE)]
    for place in random.sample(range((SIDE // 8) ** 2), stars):
        x, y = 8 * (place % (SIDE // 8)) + 3, 8 * (place // (SIDE // 8)) + 3
        for dx, dy in ((0, 0), (1, 0), (-1, 0), (0, 1), (0, -1)):
            pixels[y + dy][x + dx] = 255
    return png(pixels)


def main() -> None:
    stars = random.randint(1, 9)
    Path("truth.json").write_text(json.dumps({"stars": stars}))
    Path("sky.png").write_bytes(sky(stars))
    picture = "data:image/png;base64," + base64.b64encode(Path("sky.png").read_bytes()).decode()
    parts = [
        {"type": "text", "text": "How many stars are in this picture?"},
        {"type": "image_url", "image_url": {"url": picture}},
        {"type": "text", "text": "Answer with the number alone."},
    ]
    answer = OpenAI(max_retries=2).chat.completions.create(
        model=os.environ["OPENAI_MODEL"], messages=[{"role": "user", "content": parts}], max_tokens=16
    )
    text = answer.choices[0].message.content or ""
    Path("answer.json").write_text(json.dumps({"answer": text}))
    print(f"{stars} stars, answered {text!r}")


main()
