"""Pictures of prompts: prepared by child processes, and put in the places of their placeholders.

Knows nothing of how a conversation names them, or of tensors.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import msgspec

from pd_cluster.checkpoints.vision import VisionPart
from pd_cluster.errors import RequestError
from pd_cluster.media.fetch import Places
from pd_cluster.media.kinds.table import WrittenRules
from pd_cluster.media.rules import Placed, place
from pd_cluster.service.helpers.children import Broke, Children, TookTooLong
from pd_cluster.service.pixels import PixelBudget, PixelHold
from pd_cluster.service.prompts.picture_child import PictureJob, PictureSettings, ReadPicture
from pd_cluster.settings.media import MediaSettings
from pd_cluster.types import Image

MAX_NBYTES = 56 << 20  # of a prompt's pictures, as their model reads them: they travel in one message
NUMBERS_NBYTES = 20  # of a token's id and its three positions, beside them
MAX_NUMBERS_NBYTES = 6 << 20
TIMEOUT_S = 20.0
GIVEN = "given:"  # the scheme of pictures that a caller in this process has as objects


class Source(NamedTuple):
    """A picture by its URL; `where` is its place in the request, for errors."""

    where: str
    url: str


class Shown(NamedTuple):
    """A prompt in tokens with its pictures; None: it holds none."""

    prompt: Placed
    hold: PixelHold | None = None


class PictureIntake:
    """`vision` None: the model takes none."""

    def __init__(
        self,
        vision: VisionPart | None,
        config: MediaSettings,
        addresses: Callable[[], Iterable[str]] = tuple,
        count: Callable[[bool], None] = lambda is_read: None,
    ) -> None:
        """`addresses`: those of the cluster, which are never fetched from. `count` is called for each picture."""
        self._vision, self._config, self._addresses, self._count = vision, config, addresses, count
        self._budget = PixelBudget()
        self._children: Children | None = None
        if vision is not None:
            places = Places(config.local_root, config.domains)
            settings = msgspec.json.encode(PictureSettings(WrittenRules.of(vision.rules), places))
            module = "pd_cluster.service.prompts.picture_child"
            self._children = Children(module, settings, TIMEOUT_S, "picture", quick_s=None)

    async def close(self) -> None:
        if self._children is not None:
            await self._children.close()

    @property
    def is_able(self) -> bool:
        """Whether the model takes pictures."""
        return self._vision is not None

    def check(self, sources: Sequence[Source]) -> None:
        """Checks a prompt's pictures before any work. Raises RequestError."""
        if not sources:
            return
        if self._vision is None:
            raise RequestError(f"{sources[0].where}: this model takes no images; leave them out", param="messages")
        if len(sources) > self._config.most_images:
            raise RequestError(
                f"{sources[self._config.most_images].where}: {len(sources)} images; this server takes "
                f"{self._config.most_images} in a prompt (--limit-mm-per-prompt)",
                param=_param(sources[0]),
            )

    async def place(
        self, token_ids: list[int], sources: Sequence[Source], param: str, given: Sequence[Any] = ()
    ) -> Shown:
        """Returns the prompt with its pictures. `given`: those that callers of this process have as objects.

        Raises RequestError that names the picture, or Unavailable.
        """
        if self._vision is None:
            self.check(sources)
            return Shown(Placed(token_ids))
        prepared: dict[str, tuple[Image, bytes]] = {}
        nbytes = 0
        for source in sources:
            if source.url not in prepared:
                prepared[source.url] = await self._counted(source, given)
            nbytes += len(prepared[source.url][0].pixels)
            if nbytes > MAX_NBYTES:
                raise RequestError(
                    f"{source.where}: the images of a prompt have at most {MAX_NBYTES} bytes of pixels together, as "
                    f"the model reads them; send fewer or smaller ones",
                    param=_param(source),
                )
        images = [prepared[source.url] for source in sources]
        placed = place(token_ids, images, self._vision.rules, param)
        if images and len(placed.token_ids) * NUMBERS_NBYTES > MAX_NUMBERS_NBYTES:
            most = MAX_NUMBERS_NBYTES // NUMBERS_NBYTES
            raise RequestError(
                f"{param}: a prompt with images has at most {most} tokens; send a shorter one", param=param
            )
        return Shown(placed, self._budget.take(nbytes) if nbytes else None)

    async def _counted(self, source: Source, given: Sequence[Any]) -> tuple[Image, bytes]:
        try:
            found = await self._prepared(source, given)
        except RequestError:
            self._count(False)
            raise
        self._count(True)
        return found

    async def _prepared(self, source: Source, given: Sequence[Any]) -> tuple[Image, bytes]:
        number = source.url.removeprefix(GIVEN)
        if number != source.url and number.isdecimal() and int(number) < len(given):
            return await self._fitted(source, given[int(number)])
        assert self._children is not None
        try:
            job = PictureJob(source.url, tuple(self._addresses()))
            answer = await self._children.ask(msgspec.json.encode(job))
        except TookTooLong:
            raise _refusal(source, f"not ready after {TIMEOUT_S:g} s; send a smaller one") from None
        except Broke:
            raise _refusal(source, "decoding it failed; send another one") from None
        found = msgspec.msgpack.decode(memoryview(answer)[answer.index(b"\n") + 1 :], type=ReadPicture)
        if found.image is None:
            raise _refusal(source, found.error)
        return found.image, found.digest

    async def _fitted(self, source: Source, picture: Any) -> tuple[Image, bytes]:
        from pd_cluster.media.pictures import fitted

        assert self._vision is not None
        try:
            return await asyncio.to_thread(fitted, picture, self._vision.rules)
        except RequestError as error:
            raise _refusal(source, str(error)) from None


def _refusal(source: Source, why: str) -> RequestError:
    return RequestError(f"{source.where}: {why}", param=_param(source))


def _param(source: Source) -> str:
    return source.where.partition("[")[0].partition(".")[0]
