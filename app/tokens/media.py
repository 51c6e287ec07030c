"""Tokens that images and the like take in a prompt: by the rule of the model's processor where its
files say it, else as its engines counted others; never by bytes."""

from __future__ import annotations

import math
from base64 import b64decode
from binascii import Error as NoBase64
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from io import BytesIO
from typing import Any

import imagesize

Size = tuple[int, int]
Rule = Callable[[Size], int]
"""Size -> tokens of an image."""

USUAL_TOKENS = 576.0
"""Tokens of a medium while nothing is known: an image of 336 pixels a side, in patches of 14."""
AGEING = 0.98
"""Factor per request by which what was learned before fades."""
MAX_MEDIA = 1000
MAX_DEPTH = 8
"""Levels: messages, contents, results of tools, parts, sources."""
_HEAD_CHARACTERS = 4 * 16 * 1024
"""Characters of an image in base64 that are read: its size stands within, behind a thumbnail at
most."""
_IMAGES = (b"\x89PNG", b"\xff\xd8\xff", b"GIF8", b"RIFF")
_KINDS = frozenset(
    (
        *("image", "image_url", "input_image", "image_pil", "image_embeds"),
        *("audio", "audio_url", "input_audio", "video", "video_url"),
        *("file", "input_file", "document"),
    )
)
CHARACTERS_PER_TOKEN = 4


@dataclass(frozen=True, slots=True)
class Media:
    """Parts of a prompt that are no text. sizes: of each; None: it cannot be seen here.
    text_tokens: estimate for the text beside them."""

    sizes: tuple[Size | None, ...]
    text_tokens: int


def media_in(values: Iterable[object], length: int) -> Media:
    """Returns the media in members of a request, of any dialect. length: of these members, in
    bytes."""
    sizes: list[Size | None] = []
    for value in values:
        for part in _parts(value, MAX_DEPTH):
            if len(sizes) < MAX_MEDIA:
                sizes.append(_size(part))
            length -= sum(map(len, _strings(part, MAX_DEPTH)))
    return Media(tuple(sizes), max(1, length // CHARACTERS_PER_TOKEN))


def _parts(value: object, depth: int) -> Iterator[Mapping[str, Any]]:
    if isinstance(value, dict):
        kind = value.get("type")
        if isinstance(kind, str) and kind in _KINDS:
            yield value
            return
        value = list(value.values())
    if isinstance(value, list) and depth:
        for item in value:
            yield from _parts(item, depth - 1)


def _strings(value: object, depth: int) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif depth and isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _strings(item, depth - 1)


def _size(part: Mapping[str, Any]) -> Size | None:
    longest = max(_strings(part, MAX_DEPTH), key=len, default="")
    head = longest[:_HEAD_CHARACTERS]
    if head.startswith("data:"):
        head = longest[: _HEAD_CHARACTERS + 128].partition(",")[2][:_HEAD_CHARACTERS]
    try:
        image = b64decode(head[: len(head) // 4 * 4], validate=True)
    except (NoBase64, ValueError):
        return None
    if not image.startswith(_IMAGES):
        return None
    width, height = imagesize.get(BytesIO(image))
    return (width, height) if min(width, height) > 0 else None


def rule_of(preprocessor: Mapping[str, Any], config: Mapping[str, Any]) -> Rule | None:
    """Returns the rule in a model's preprocessor_config.json and config.json; None if no known
    rule."""
    per_image = config.get("mm_tokens_per_image")  # Gemma 3
    if isinstance(per_image, int) and _is_count(per_image):
        return lambda _: per_image
    kind = preprocessor.get("image_processor_type")
    if not isinstance(kind, str) or not kind.startswith("Qwen2VLImageProcessor"):
        return None
    bounds = preprocessor.get("size")
    size = bounds if isinstance(bounds, dict) else {}
    factor = preprocessor.get("patch_size", 14), preprocessor.get("merge_size", 2)
    least = preprocessor.get("min_pixels") or size.get("shortest_edge", 56 * 56)
    most = preprocessor.get("max_pixels") or size.get("longest_edge", 28 * 28 * 1280)
    if not all(map(_is_count, (*factor, least, most))):
        return None
    return _ResizeRule(factor[0] * factor[1], least, most)


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


@dataclass(frozen=True, slots=True)
class _ResizeRule:
    """Rule of Qwen2-VL and its successors: an image is scaled to whole squares of `factor` pixels a
    side, between `least` and `most` pixels in all, and each square is a token."""

    factor: int
    least: int
    most: int

    def __call__(self, size: Size) -> int:
        width, height = size
        across, down = round(width / self.factor), round(height / self.factor)
        pixels = across * down * self.factor**2
        if pixels > self.most:
            shrinks = math.sqrt(width * height / self.most) * self.factor
            across, down = (max(1, math.floor(side / shrinks)) for side in size)
        elif pixels < self.least:
            grows = math.sqrt(self.least / (width * height)) / self.factor
            across, down = (math.ceil(side * grows) for side in size)
        return across * down


class MediaTokens:
    """Learned tokens per medium, of one model."""

    def __init__(self) -> None:
        self._tokens = 0.0
        self._number = 0.0

    def of(self, media: Media, rule: Rule | None) -> int:
        mean = self._tokens / self._number if self._number else USUAL_TOKENS
        return round(sum(mean if size is None or not rule else rule(size) for size in media.sizes))

    def learn(self, media: Media, prompt_tokens: int) -> None:
        """Learns from a whole prompt's tokens, as its engine counted them."""
        if media.sizes:
            tokens = max(0, prompt_tokens - media.text_tokens)
            self._tokens = AGEING * self._tokens + tokens
            self._number = AGEING * self._number + len(media.sizes)
