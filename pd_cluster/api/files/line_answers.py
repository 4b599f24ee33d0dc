"""Answers batch requests as the API would, but after interactive requests. Knows nothing of files."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterator
from typing import NamedTuple

from pd_cluster.api.files.line_admission import LineAdmission
from pd_cluster.api.middleware.api_key_auth import NAMED
from pd_cluster.api.routes.in_process_api import InProcessApi
from pd_cluster.cluster.tenancy.tenant_counts import OTHERS, TenantCounts
from pd_cluster.errors import GenerationError, Overloaded, PdClusterError, Unavailable
from pd_cluster.service.callers.caller import Caller
from pd_cluster.service.callers.usage_meter import Meter
from pd_cluster.service.files.batch_lines import BatchEntry, error_of, line_of
from pd_cluster.service.files.batch_states import KeptBatch
from pd_cluster.service.schema.error_bodies import status_of
from pd_cluster.settings.http_settings import HttpConfig
from pd_cluster.types.request_spec import BATCH_PRIORITY

log = logging.getLogger(__name__)

MOST_TRIES = 3  # how many times a request is tried if it loses its instances or times out
RETRY_S, LONGEST_WAIT_S = 1.0, 30.0


class LineAnswer(NamedTuple):
    """A line of a batch's output or error file. `is_complete`: whether it is an answer rather than an error."""

    line: bytes
    is_complete: bool


class LineAnswers:
    """`is_ending`: whether the server stops; failures are then not recorded as answers."""

    def __init__(
        self,
        calls: InProcessApi,
        admission: LineAdmission,
        http: HttpConfig,
        counts: TenantCounts,
        is_ending: Callable[[], bool],
    ) -> None:
        self._calls, self._admission, self._http, self._counts = calls, admission, http, counts
        self._is_ending = is_ending

    async def answer(self, kept: KeptBatch, entry: BatchEntry) -> LineAnswer:
        """Tries until there is an answer, or an error of the request itself."""
        num_failed = num_waits = 0
        while True:
            try:
                async with self._admission.admitted():
                    return await self._tried(kept, entry)
            except (Unavailable, Overloaded) as error:
                wait_s = min(LONGEST_WAIT_S, max(error.retry_after_s, 2**num_waits))
                num_waits = min(num_waits + 1, 5)
            except GenerationError as error:
                num_failed += 1
                if num_failed >= MOST_TRIES and not self._is_ending():
                    return LineAnswer(error_of(entry, error), is_complete=False)
                wait_s = RETRY_S
            except PdClusterError as error:
                return LineAnswer(error_of(entry, error), is_complete=False)
            except Exception as error:  # as in the API: an error affects only its own request
                log.error("%s, custom_id %r: %s", kept.batch.id, entry.custom_id, error, exc_info=error)
                return LineAnswer(error_of(entry, error), is_complete=False)
            await asyncio.sleep(wait_s)

    async def _tried(self, kept: KeptBatch, entry: BatchEntry) -> LineAnswer:
        meter = self._meter(kept.owner)
        with _metered(meter) if meter is not None else contextlib.nullcontext():
            called = await self._calls.call(entry.url, entry.body, self._caller(kept, meter))
        return LineAnswer(line_of(entry, 200, called.body), is_complete=True)

    def _caller(self, kept: KeptBatch, meter: Meter | None) -> Caller:
        """Returns a caller with the models and cached prompts of the batch's owner, but with separate turns: a batch
        does not delay its owner's other requests.
        """
        return Caller(
            client=f"batches of {kept.owner}",
            tenant="" if self._http.shares_prefix_cache or not self._http.has_keys else kept.owner,
            models=kept.models,
            meter=meter,
            base_priority=BATCH_PRIORITY,
        )

    def _meter(self, owner: str) -> Meter | None:
        """Counts tokens for the owner. The limits of its keys do not apply to batches."""
        if not self._http.has_keys:
            return None
        return Meter(owner.removeprefix(NAMED) if owner.startswith(NAMED) else OTHERS, self._counts)


@contextlib.contextmanager
def _metered(meter: Meter) -> Iterator[None]:
    """Counts a request by its outcome, like a client's request."""
    try:
        yield
        meter.answers(200, is_computed=True)
    except asyncio.CancelledError:
        meter.is_left()
        raise
    except Exception as error:
        meter.answers(status_of(error), is_computed=True)
        raise
    finally:
        meter.has_answered()
        meter.ends()
