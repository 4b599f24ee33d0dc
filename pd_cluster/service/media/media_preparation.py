"""Prepares images and videos of prompts in child processes, and replaces their placeholders.

Knows nothing of how a conversation names them, or of tensors.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import msgspec

from pd_cluster.checkpoints.vision_config import VisionPart
from pd_cluster.errors import ConfigError, RequestError
from pd_cluster.media.frame_sampling import FrameSampling
from pd_cluster.media.image_rules import PromptWithImages, place
from pd_cluster.media.kinds.image_kinds import WrittenRules
from pd_cluster.media.kinds.qwen import GridRules
from pd_cluster.media.media_fetch import Places
from pd_cluster.media.processor_options import ReadOptions
from pd_cluster.media.video_inputs import VideoFrames
from pd_cluster.media.video_rules import Video
from pd_cluster.service.concurrency.child_pool import ChildCrashed, ChildPool, ChildTimeout, SlowJobs
from pd_cluster.service.media.media_cache import Item, MediaCache, num_bytes_of
from pd_cluster.service.media.media_child import PictureJob, PictureSettings, ReadPicture
from pd_cluster.service.media.pixel_budget import PixelBudget, PixelHold
from pd_cluster.settings.media_settings import IMAGES, VIDEOS, MediaSettings
from pd_cluster.text.control_tokens import PromptText

MAX_NBYTES = 56 << 20  # the most bytes of a prompt's images in the model's form: one message carries them all
NUMBERS_NBYTES = 20  # the bytes of a token's id and its three positions in the same message
MAX_NUMBERS_NBYTES = 6 << 20
GIB = 1 << 30
MAX_UUID_NUM_CHARS = 256
TIMEOUTS_S = {IMAGES: 20.0, VIDEOS: 60.0}
FETCHES = SlowJobs(6, wait=True)
GIVEN = "given:"  # the URL scheme of images that a caller in this process passes as objects


class MediaCounts(Protocol):
    """Counts events of media."""

    def medium(self, kind: str, is_read: bool) -> None:
        """Counts an image or video of a prompt; a repeated item of the same prompt counts once."""

    def kept_medium(self, is_found: bool) -> None:
        """Counts a lookup in the cache."""

    def read_medium(self, fetch_s: float, decode_s: float) -> None:
        """Counts an item that a child has fetched and decoded."""


class _Uncounted:
    def medium(self, kind: str, is_read: bool) -> None: ...

    def kept_medium(self, is_found: bool) -> None: ...

    def read_medium(self, fetch_s: float, decode_s: float) -> None: ...


UNCOUNTED = _Uncounted()


class Source(NamedTuple):
    """An image or video, given by its URL. `where`: its place in the request, for errors. `max_frames`: a video's
    limit. `uuid`: the sender's name for the item. Without a URL, the source is the item that the tenant last sent under
    that name.
    """

    where: str
    url: str
    kind: str = IMAGES
    uuid: str = ""
    max_frames: int | None = None
    options: ReadOptions = ReadOptions()


class PromptWithMedia(NamedTuple):
    """A prompt's tokens and images. `hold`: the memory that its images hold; None: they hold none."""

    prompt: PromptWithImages
    hold: PixelHold | None = None


class MediaPreparation:
    """`vision` None: the model takes no images."""

    def __init__(
        self,
        vision: VisionPart | None,
        config: MediaSettings,
        addresses: Callable[[], Iterable[str]] = tuple,
        counts: MediaCounts = UNCOUNTED,
        encode: Callable[[str], list[int]] = lambda text: [],
    ) -> None:
        """`addresses`: the cluster's addresses, from which media are never fetched. `encode`: text -> tokens."""
        self._vision, self._config, self._addresses, self._counts = vision, config, addresses, counts
        self._encode = encode
        self._options = ReadOptions.of(config.processor, "mm_processor_kwargs")
        self.budget = PixelBudget(int(config.memory_gb * GIB), config.spill_path, int(config.spill_gb * GIB))
        self._kept = MediaCache(int(config.cache_gb * GIB))
        self.children: dict[tuple[str, str], ChildPool] = {}  # by (kind, origin)
        if vision is not None:
            try:
                self._options.rules(vision.rules, "--mm-processor-kwargs")
            except RequestError as error:
                raise ConfigError(str(error)) from None
            places = Places(config.local_root, config.domains)
            sampling = FrameSampling(config.num_frames, config.fps)
            settings = msgspec.json.encode(PictureSettings(WrittenRules.of(vision.rules), places, sampling))
            module = "pd_cluster.service.media.media_child"
            for kind, timeout_s in TIMEOUTS_S.items():
                name = "picture" if kind == IMAGES else kind
                self.children[kind, "given"] = ChildPool(module, settings, timeout_s, name)
                self.children[kind, "fetched"] = ChildPool(module, settings, timeout_s, name, slow=FETCHES)

    async def close(self) -> None:
        for children in self.children.values():
            await children.close()

    @property
    def is_able(self) -> bool:
        """Whether the model takes images."""
        return self._vision is not None

    def options(self, given: Mapping[str, Any], name: str) -> ReadOptions:
        """Returns the options for reading media, from a request and the server's settings. Raises RequestError."""
        found = ReadOptions.of(given, name)
        if self._vision is None:
            if given:
                raise RequestError(f"{name}: this model takes no images; leave it out", param=name)
            return found
        found = found.over(self._options)
        found.rules(self._vision.rules, name)
        return found

    def check(self, sources: Sequence[Source]) -> None:
        """Checks a prompt's images before any work. Raises RequestError."""
        if not sources:
            return
        if self._vision is None:
            what = "images" if sources[0].kind == IMAGES else "images or videos"
            raise RequestError(f"{sources[0].where}: this model takes no {what}; leave them out", param="messages")
        for source in sources:
            if len(source.uuid) > MAX_UUID_NUM_CHARS:
                raise RequestError(
                    f"{source.where}: a uuid has at most {MAX_UUID_NUM_CHARS} characters; give a shorter one",
                    param=_param(source),
                )
        for kind in (IMAGES, VIDEOS):
            found, most = [source for source in sources if source.kind == kind], self._config.most(kind)
            if found and kind == VIDEOS and self._vision.rules.video is None:
                why = (
                    self._vision.rules.no_videos or f"no videos are read for {self._vision.model_type}; leave them out"
                )
                raise RequestError(f"{found[0].where}: {why}", param=_param(found[0]))
            if len(found) > most:
                raise RequestError(
                    f"{found[most].where}: {len(found)} {kind}s; this server takes {most} in a prompt "
                    f"(--limit-mm-per-prompt)",
                    param=_param(found[0]),
                )

    def spelled(self, prompt: PromptText, sources: Sequence[Any]) -> PromptText:
        """Returns a prompt with its images' placeholders in the form that the model's tokenizer expects."""
        if self._vision is None or not sources or not (text := self._vision.rules.text):
            return prompt
        places = prompt.own
        if places is None:
            return PromptText(prompt.text.replace(text, "".join(self._vision.rules.text_becomes)))
        parts: list[str] = []
        own: list[tuple[int, int]] = []
        done = length = 0
        for start, stop in places:
            control = prompt.text[start:stop]
            becomes = self._vision.rules.text_becomes if control == text else ("", control)
            parts.append(prompt.text[done:start])
            length += len(parts[-1])
            for at, part in enumerate(becomes):
                if at % 2:
                    own.append((length, length + len(part)))
                parts.append(part)
                length += len(part)
            done = stop
        return PromptText("".join([*parts, prompt.text[done:]]), tuple(own))

    async def place(
        self, token_ids: list[int], sources: Sequence[Source], param: str, given: Sequence[Any] = (), salt: str = ""
    ) -> PromptWithMedia:
        """Returns the prompt with its media. `given`: media that callers in this process pass as objects.

        Items are cached for requests of the same `salt`. Raises RequestError that names the item, or Unavailable.
        """
        if self._vision is None:
            self.check(sources)
            return PromptWithMedia(PromptWithImages(token_ids))
        prepared: dict[Source, Item] = {}
        nbytes = 0
        for source in sources:
            key = source._replace(where="")
            if key not in prepared:
                prepared[key] = await self._counted(source, given, salt)
                self._check_size(source, prepared[key])
            nbytes += num_bytes_of(prepared[key])
            if nbytes > MAX_NBYTES:
                raise RequestError(
                    f"{source.where}: the {source.kind}s of a prompt have at most {MAX_NBYTES} bytes of pixels "
                    f"together, as the model reads them; send fewer or smaller ones",
                    param=_param(source),
                )
        items = [prepared[source._replace(where="")] for source in sources]
        images = [item for item in items if not isinstance(item, Video)]
        videos = [item for item in items if isinstance(item, Video)]
        placed = place(token_ids, images, self._vision.rules, param, videos, self._encode)
        if items and len(placed.token_ids) * NUMBERS_NBYTES > MAX_NUMBERS_NBYTES:
            most = MAX_NUMBERS_NBYTES // NUMBERS_NBYTES
            raise RequestError(
                f"{param}: a prompt with images has at most {most} tokens; send a shorter one", param=param
            )
        if not nbytes:
            return PromptWithMedia(placed)
        held, hold = await self.budget.hold(placed.images)
        return PromptWithMedia(msgspec.structs.replace(placed, images=held), hold)

    def _check_size(self, source: Source, item: Item) -> None:
        """Raises RequestError for an item that is larger than the model's folder allows, because of the request's
        options.
        """
        assert self._vision is not None
        for image in item.images if isinstance(item, Video) else item[:1]:
            if problem := self._vision.rules.size_problem(image):
                raise _refusal(
                    source, f"its min_pixels are too close to the folder's max_pixels: {problem}; lower them"
                )

    async def _counted(self, source: Source, given: Sequence[Any], salt: str) -> Item:
        try:
            found = await self._prepared(source, given, salt)
        except RequestError:
            self._counts.medium(source.kind, False)
            raise
        self._counts.medium(source.kind, True)
        return found

    async def _prepared(self, source: Source, given: Sequence[Any], salt: str) -> Item:
        number = source.url.removeprefix(GIVEN)
        if number != source.url and number.isdecimal() and int(number) < len(given):
            return await self._fitted(source, given[int(number)])
        name = self._kept.name_of(source, salt)
        if not source.url:
            named = self._kept.get(name) if name is not None else None
            self._counts.kept_medium(named is not None)
            if named is None:
                why = f"no {source.kind} of this uuid is kept; send it with its URL"
                raise _refusal(source, why if source.uuid else "empty; send a URL, or the uuid of an item sent before")
            return named
        found = await self._kept_or_read(source, salt)
        if name is not None:
            self._kept.replace(name, found)
        return found

    async def _kept_or_read(self, source: Source, salt: str) -> Item:
        key = await self._kept.key(source, salt)
        if key is not None:
            kept = self._kept.get(key)
            self._counts.kept_medium(kept is not None)
            if kept is not None:
                return kept
        found = await self._read(source)
        if key is not None:
            self._kept.put(key, found)
        return found

    async def _read(self, source: Source) -> Item:
        timeout_s = TIMEOUTS_S[source.kind]
        try:
            is_video = source.kind == VIDEOS
            job = PictureJob(source.url, tuple(self._addresses()), is_video, source.max_frames, source.options)
            comes = "given" if source.url.startswith("data:") else "fetched"
            answer = await self.children[source.kind, comes].ask(msgspec.json.encode(job))
        except ChildTimeout:
            raise _refusal(source, f"not ready after {timeout_s:g} s; send a smaller one") from None
        except ChildCrashed:
            raise _refusal(source, "decoding it failed; send another one") from None
        found = msgspec.msgpack.decode(memoryview(answer)[answer.index(b"\n") + 1 :], type=ReadPicture)
        if found.error:
            raise _refusal(source, found.error)
        self._counts.read_medium(found.fetch_s, found.decode_s)
        if found.video is not None:
            return found.video
        assert found.image is not None
        return found.image, found.digest

    async def _fitted(self, source: Source, medium: Any) -> Item:
        from pd_cluster.media.image_files import fitted as fitted_picture
        from pd_cluster.media.video_files import fitted

        assert self._vision is not None
        try:
            rules = source.options.rules(self._vision.rules, "mm_processor_kwargs")
            if isinstance(medium, VideoFrames):
                assert isinstance(rules, GridRules)
                return await asyncio.to_thread(fitted, medium, rules)
            return await asyncio.to_thread(fitted_picture, medium, rules)
        except RequestError as error:
            raise _refusal(source, str(error)) from None


def _refusal(source: Source, why: str) -> RequestError:
    return RequestError(f"{source.where}: {why}", param=_param(source))


def _param(source: Source) -> str:
    return source.where.partition("[")[0].partition(".")[0]
