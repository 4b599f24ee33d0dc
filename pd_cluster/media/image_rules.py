"""The rules by which a model reads pictures: pixels, tokens and rotary positions.

Pure arithmetic; knows nothing of files, pixels' values or tensors. Each kind of model has its own rules (media/kinds).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec

from pd_cluster.errors import RequestError
from pd_cluster.media.video_rules import TimestampStyle, Video, VideoRules
from pd_cluster.types import Image, RopePositions, Span

NUM_CHANNELS = 3
NEAREST, LANCZOS, BILINEAR, BICUBIC = range(4)  # Pillow's filter numbers, which preprocessors' files also use


class ImageView(NamedTuple):
    """A copy of a picture: resized, then cropped or padded around its middle to `canvas`, then cut into tiles.

    Each size is (height, width); None: that operation is skipped. `via`: an intermediate size.
    """

    size: tuple[int, int]
    canvas: tuple[int, int] | None = None
    tile: tuple[int, int] | None = None
    via: tuple[int, int] | None = None


class ImageRules(msgspec.Struct, frozen=True, kw_only=True):
    """A picture's size is counted in rows and columns of patches or tiles."""

    # A picture's placeholder in a prompt. The picture's tokens, between the tokens `before` and `after`, replace it.
    token_id: int = 0
    before: tuple[int, ...] = ()
    after: tuple[int, ...] = ()
    resample: int = BICUBIC
    text: str = ""  # the control token that is the placeholder in a prompt's text; "": texts have none
    text_becomes: tuple[str, ...] = ()  # replaces `text` before tokenization: alternately plain texts, control tokens
    sees_whole: bool = False  # whether each token of a picture attends to the whole picture
    marks: tuple[int, ...] = ()  # the two tokens around a placeholder, if they belong to the picture and so to its span
    video: VideoRules | None = None  # None: the model takes no videos here
    no_videos: str = ""  # why it takes no videos, if something in the model's folder is the reason

    def sized(self, height: int, width: int) -> tuple[Image, tuple[ImageView, ...]]:
        """Returns a picture of the model's size, without pixels, and the copies to make of it.

        Raises RequestError.
        """
        raise NotImplementedError

    def shape(self, image: Image) -> tuple[int, int, int]:
        """Returns the number of copies or tiles, and the height and width of each in pixels."""
        raise NotImplementedError

    def num_tokens(self, image: Image) -> int:
        raise NotImplementedError

    def most(self) -> Image:
        """Returns the picture size that takes the most memory."""
        raise NotImplementedError

    def size_problem(self, image: Image) -> str:
        """Returns why this size is invalid; "" if it is valid."""
        raise NotImplementedError

    def tokens(self, image: Image) -> list[int]:
        """Returns a picture's tokens. Features replace the embeddings of those that equal `token_id`."""
        return [self.token_id] * self.num_tokens(image)

    def places(self, image: Image) -> list[int]:
        """Returns the indices, in ascending order, of the picture's tokens that have features."""
        return [at for at, token_id in enumerate(self.tokens(image)) if token_id == self.token_id]

    def positions(
        self, num_tokens: int, spans: Sequence[Span], images: Sequence[Image], steps: Sequence[int]
    ) -> RopePositions | None:
        """Returns the rotary positions of a prompt with pictures; None: plain text positions.

        `steps`: each picture's distance in time from the first picture of its video, in positions; 0 outside of videos.
        """
        return None

    def num_bytes(self, image: Image) -> int:
        """Returns the number of bytes of a picture's pixels."""
        return math.prod(self.shape(image)) * NUM_CHANNELS

    def largest(self) -> Image:
        """Returns a black picture that takes the most memory."""
        black = self.most()
        return msgspec.structs.replace(black, pixels=bytes(self.num_bytes(black)))

    def problem(self, image: Image) -> str:
        """Returns why an image cannot be computed; "" if it can."""
        if problem := self.size_problem(image):
            return f"{image.num_rows} x {image.num_columns}: {problem}"
        if len(image.pixels) not in (0, self.num_bytes(image)):
            grid = f"{image.num_rows} x {image.num_columns}"
            return f"{grid}: {len(image.pixels)} bytes of pixels, but this size has {self.num_bytes(image)}"
        return ""


class PromptWithImages(msgspec.Struct, frozen=True):
    """A prompt with its pictures, each expanded to its tokens."""

    token_ids: list[int]
    spans: tuple[Span, ...] = ()
    images: tuple[Image, ...] = ()
    rope_positions: RopePositions | None = None


def _check_marks(token_ids: list[int], places: list[int], rules: ImageRules, param: str) -> None:
    """Raises RequestError unless placeholders and marks match."""
    kinds = [("an image", rules.token_id, rules.marks)]
    if rules.video is not None:
        kinds.append(("a video", rules.video.token_id, (rules.video.start_id, rules.video.end_id)))
    for kind, placeholder, (first, last) in kinds:
        found = [at for at, token_id in enumerate(token_ids) if token_id in (first, last)]
        own = [at for at in places if token_ids[at] == placeholder]
        wanted = [at for place in own for at in (place - 1, place + 1)]
        if found != wanted or any(token_ids[at - 1] != first or token_ids[at + 1] != last for at in own):
            raise RequestError(
                f"{param}: tokens {first} and {last} must enclose the placeholder of {kind}, and nothing else",
                param=param,
            )


def place(
    token_ids: list[int],
    images: Sequence[tuple[Image, bytes]],
    rules: ImageRules,
    param: str,
    videos: Sequence[Video] = (),
    encode: Callable[[str], list[int]] = lambda text: [],
) -> PromptWithImages:
    """Expands the placeholders of a prompt, of which there must be one for each image and video, in order.

    `images`: with their digests. `encode`: returns a text's tokens. Raises RequestError for a wrong number of
    placeholders.
    """
    marks = {rules.token_id: ("images", len(images))}
    if rules.video is not None:
        marks[rules.video.token_id] = ("videos", len(videos))
    places = [at for at, token_id in enumerate(token_ids) if token_id in marks]
    for mark, (kind, wanted) in marks.items():
        if (num_found := sum(token_ids[at] == mark for at in places)) != wanted:
            raise RequestError(
                f"{param}: {num_found} placeholders of {kind} for {wanted} {kind}; give one for each", param=param
            )
    if rules.marks:
        _check_marks(token_ids, places, rules, param)
    if not places:
        return PromptWithImages(token_ids)
    laying, each_image, each_video = _Laying(rules, encode), iter(images), iter(videos)
    done = 0
    for at in places:
        laying.token_ids += token_ids[done:at]
        if token_ids[at] == rules.token_id:
            laying.image(*next(each_image))
            done = at + 1 + len(rules.marks) // 2
        else:
            done = at + 1 + laying.video(next(each_video), token_ids[at + 1 : at + 2])
    laying.token_ids += token_ids[done:]
    found, spans, pictures = laying.token_ids, laying.spans, tuple(laying.images)
    return PromptWithImages(found, tuple(spans), pictures, rules.positions(len(found), spans, pictures, laying.steps))


class _Laying:
    """A prompt under construction."""

    def __init__(self, rules: ImageRules, encode: Callable[[str], list[int]]) -> None:
        self.token_ids: list[int] = []
        self.spans: list[Span] = []
        self.images: list[Image] = []
        self.steps: list[int] = []
        self._rules, self._encode = rules, encode

    def image(self, image: Image, digest: bytes) -> None:
        if self._rules.marks:  # removes the first mark, which becomes part of the picture
            self.token_ids.pop()
        self.token_ids += self._rules.before
        self._add(image, digest, 0)
        self.token_ids += self._rules.after

    def video(self, video: Video, following: list[int]) -> int:
        """Adds a video; returns how many of the tokens after its placeholder it also replaces.

        With stamps, each picture of the video has its own start and end token, next to its time. Marks around
        the placeholder become part of the first and the last picture.
        """
        rules = self._rules.video
        assert rules is not None
        is_framed = self.token_ids[-1:] == [rules.start_id] and following == [rules.end_id]
        replaced = int(bool(rules.has_stamps or self._rules.marks) and is_framed)
        if replaced:
            self.token_ids.pop()
        last = len(video.images) - 1
        for at, (image, step) in enumerate(zip(video.images, rules.steps(video), strict=True)):
            stamp = self._encode(rules.stamp(video.times_s[at])) if rules.has_stamps else []
            if rules.has_stamps:
                self.token_ids += [*(stamp if rules.stamps is TimestampStyle.BEFORE else ()), rules.start_id]
            self._add(msgspec.structs.replace(image, opens=at == 0, closes=at == last), video.digests[at], step)
            if rules.has_stamps:
                self.token_ids += [rules.end_id, *(stamp if rules.stamps is TimestampStyle.BEHIND else ())]
        return replaced

    def _add(self, image: Image, digest: bytes, step: int) -> None:
        start = len(self.token_ids)
        self.token_ids += self._rules.tokens(image)
        self.spans.append(Span(start, len(self.token_ids), digest))
        self.images.append(image)
        self.steps.append(step)
