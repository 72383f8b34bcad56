"""What a message holds, put together block by block: text, pictures and documents in the order they came in.

Knows no dialect: where a block's fields stand is the dialect's affair, what a model is shown of it is decided here.
"""

from __future__ import annotations

import base64
import binascii
from dataclasses import dataclass, field

from polar.messages import Image

READABLE = ("text/", "application/json", "application/xml", "application/x-yaml")
"""Media types whose bytes are text."""


@dataclass(slots=True)
class Content:
    """One message's content as it grows."""

    images: list[Image] = field(default_factory=list)
    marks: list[str] = field(default_factory=list)
    """What of it the model does not see."""
    _blocks: list[str] = field(default_factory=list)
    _length: int = 0

    @property
    def text(self) -> str:
        """Everything in order, one block a line."""
        return "\n".join(self._blocks)

    def add(self, text: str) -> None:
        """A text block; an empty one is nothing."""
        if text:
            self._length += len(text) + bool(self._blocks)
            self._blocks.append(text)

    def picture(self, source: str) -> None:
        """An image by its URL, or by a data: URL with its bytes."""
        words = f"[image: {described(source)}]"
        self.add(words)
        self.images.append(Image(source, self._length - len(words), self._length))

    def document(self, title: str, media_type: str, data: str) -> None:
        """A file whose bytes came along in base64: read if it is text, else named and marked as unread."""
        raw = decoded(data)
        if raw is not None and media_type.startswith(READABLE):
            self.add(f"[document: {title}]\n{raw.decode(errors='replace')}")
            return
        self.unread(f"document: {title}, {media_type or 'of unknown type'}")

    def unread(self, what: str) -> None:
        """Something that cannot be shown: the model is told of it, and the completion marked."""
        self.add(f"[{what}; its content cannot be shown here]")
        self.marks.append("content_unread")


def data_url(media_type: str, data: str) -> str:
    """A data: URL of base64 text."""
    return f"data:{media_type};base64,{data}"


def split_data_url(url: str) -> tuple[str, str] | None:
    """Media type and base64 text of a data: URL; None for any other."""
    if not url.startswith("data:"):
        return None
    head, _, data = url.removeprefix("data:").partition(",")
    return head.partition(";")[0], data


def decoded(data: str) -> bytes | None:
    """The bytes of base64 text; None if it is none."""
    try:
        return base64.b64decode(data)
    except (binascii.Error, ValueError):
        return None


def described(source: str) -> str:
    """A picture in a few words, for models that see none."""
    inline = split_data_url(source)
    if inline is None:
        return source[:500]
    media_type, data = inline
    return f"{media_type or 'image'}, {len(data) * 3 // 4} bytes"
