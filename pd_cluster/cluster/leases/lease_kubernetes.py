"""Keeps the schedulers' shared record in a Lease object of Kubernetes (coordination.k8s.io/v1), through the API server.

The whole record is an annotation of the Lease, so one replacement, conditional on the resourceVersion that was read,
writes all of it or nothing. The fields of the Lease's spec repeat the record for people and tools, but are never read:
a follower times the lease by its own clock, from the moment when it sees a new version. Knows nothing of the record's
meaning (membership_lease.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import re
import ssl
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
import msgspec

from pd_cluster.cluster.leases.membership_lease import LeaseRecord
from pd_cluster.errors import ConfigError, LeaseUnavailable, called
from ranktable_tools.host_addresses import bracketed

SCHEME = "kubernetes:"
RECORD = "pd-cluster/membership"  # the annotation
SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
MAX_RECORD_NBYTES = 240 << 10  # an object's annotations may total 256 KiB
MAX_ANSWER_NBYTES = 1 << 20
MAX_REASON = 300  # characters of the API server's message
NAME = r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?"
PLACE = re.compile(f"(?P<namespace>{NAME})/(?P<name>{NAME})")
VERSION, KIND = "coordination.k8s.io/v1", "Lease"


def place_of_lease(written: str) -> tuple[str, str] | None:
    """Returns (namespace, name) of `kubernetes:NAMESPACE/NAME`; None for a folder. Raises ConfigError."""
    if not written.startswith(SCHEME):
        return None
    found = PLACE.fullmatch(written.removeprefix(SCHEME))
    if found is None:
        raise ConfigError(f"{called('scheduler_lease')} {written[:300]}: expected kubernetes:NAMESPACE/NAME")
    return found["namespace"], found["name"]


class KubernetesLease:
    """The store in the API server at `url`. `account`: the service account's folder (token, ca.crt), whose files may
    change.

    `duration_s`: the lease's duration, for people who look at the object. `timeout_s`: for one request to the API
    server, from connecting to the last byte of the answer.
    """

    max_record_nbytes = MAX_RECORD_NBYTES

    def __init__(self, namespace: str, name: str, url: str, account: Path, duration_s: float, timeout_s: float) -> None:
        self._name, self._namespace, self._duration_s = name, namespace, duration_s
        self._url, self._leases = url, f"{url}/apis/{VERSION}/namespaces/{quote(namespace)}/leases"
        self._account, self._timeout_s = account, timeout_s
        # with asyncio, one deadline covers a whole request; a blocking client has none
        self._runner = asyncio.Runner(loop_factory=asyncio.SelectorEventLoop)
        self._client: httpx.AsyncClient | None = None
        self._authority = b""  # the ca.crt of the current client
        self._found: dict[str, Any] | None = None  # the object as last read or written
        self._version = 0  # the version of the record in that object

    @classmethod
    def in_pod(
        cls, namespace: str, name: str, duration_s: float, env: Mapping[str, str] = os.environ
    ) -> KubernetesLease:
        """Returns the store that this pod's service account can reach. Raises ConfigError outside a pod."""
        host, port = env.get("KUBERNETES_SERVICE_HOST"), env.get("KUBERNETES_SERVICE_PORT_HTTPS", "443")
        written = f"{called('scheduler_lease')} {SCHEME}{namespace}/{name}"
        if not host:
            raise ConfigError(f"{written}: works only in a pod of Kubernetes; KUBERNETES_SERVICE_HOST is not set")
        if not (SERVICE_ACCOUNT / "token").is_file():
            raise ConfigError(
                f"{written}: {SERVICE_ACCOUNT}/token does not exist; set automountServiceAccountToken in the pod"
            )
        return cls(
            namespace, name, f"https://{bracketed(host)}:{port}", SERVICE_ACCOUNT, duration_s, min(5.0, duration_s / 3)
        )

    def read(self) -> LeaseRecord:
        status, found = self._ask("GET", f"{self._leases}/{quote(self._name)}")
        if status == 404:
            self._found, self._version = None, 0
            return LeaseRecord()
        record = self._record_of(found)
        self._found, self._version = found, record.version
        return record

    def write(self, record: LeaseRecord) -> bool:
        if record.version != self._version + 1:
            return False
        written = msgspec.json.encode(record).decode()
        if len(written) > MAX_RECORD_NBYTES:
            raise LeaseUnavailable(f"the record has {len(written)} bytes; a Lease can have {MAX_RECORD_NBYTES}")
        new = self._object(record, written)
        if self._found is None:
            status, found = self._ask("POST", self._leases, new)
        else:
            status, found = self._ask("PUT", f"{self._leases}/{quote(self._name)}", new)
        if status == 404 and self._found is None:  # the namespace does not exist
            raise LeaseUnavailable(self._problem(status, str(found.get("message", ""))[:MAX_REASON]))
        if status in (404, 409):  # another scheduler has written or removed it
            return False
        self._found, self._version = found, record.version
        return True

    def _object(self, record: LeaseRecord, written: str) -> dict[str, Any]:
        """Returns the Lease to send; keeps the fields that other programs have added to the last one."""
        old = self._found or {}
        metadata = {**old.get("metadata", {}), "name": self._name, "namespace": self._namespace}
        metadata["annotations"] = {**(metadata.get("annotations") or {}), RECORD: written}
        spec = dict(old.get("spec") or {})
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        if record.holder and record.holder != spec.get("holderIdentity"):
            spec |= {"acquireTime": now, "leaseTransitions": int(spec.get("leaseTransitions") or 0) + bool(old)}
        spec |= {
            "holderIdentity": record.holder,
            "leaseDurationSeconds": max(1, math.ceil(self._duration_s)),
            "renewTime": now,
        }
        return {"apiVersion": VERSION, "kind": KIND, "metadata": metadata, "spec": spec}

    def _record_of(self, found: dict[str, Any]) -> LeaseRecord:
        """Returns the record in a Lease. Raises LeaseUnavailable for a Lease of another owner, and for an invalid
        record.
        """
        metadata, spec = found.get("metadata") or {}, found.get("spec") or {}
        written = (metadata.get("annotations") or {}).get(RECORD)
        if written is None:
            if holder := spec.get("holderIdentity"):
                raise LeaseUnavailable(f"the Lease {self._place} belongs to {str(holder)[:100]!r}; use another Lease")
            return LeaseRecord()
        try:
            return msgspec.json.decode(written, type=LeaseRecord)
        except (ValueError, TypeError) as error:
            raise LeaseUnavailable(f"the Lease {self._place}: its annotation {RECORD}: {error}") from None

    @property
    def _place(self) -> str:
        return f"{self._namespace}/{self._name}"

    def _ask(self, method: str, url: str, body: dict[str, Any] | None = None) -> tuple[int, dict[str, Any]]:
        """Returns (200, 201, 404 or 409, the answer's object). Raises LeaseUnavailable for any other outcome."""
        status, content = self._runner.run(self._answer(method, url, body))
        found: Any = None
        with contextlib.suppress(ValueError, RecursionError):
            found = msgspec.json.decode(content)
        if not isinstance(found, dict):
            raise LeaseUnavailable(f"the API server answers {status} without an object")
        if (status in (200, 201) and found.get("kind") == KIND) or status in (404, 409):
            return status, found
        raise LeaseUnavailable(self._problem(status, str(found.get("message", ""))[:MAX_REASON]))

    async def _answer(self, method: str, url: str, body: dict[str, Any] | None) -> tuple[int, bytes]:
        """Returns the status and the content. Raises LeaseUnavailable, also after `timeout_s`."""
        headers, content = {"Authorization": f"Bearer {self._token()}", "Accept-Encoding": "identity"}, bytearray()
        client = await self._opened()
        try:
            async with (
                asyncio.timeout(self._timeout_s),
                client.stream(method, url, headers=headers, json=body) as answer,
            ):
                async for part in answer.aiter_raw():
                    content += part
                    if len(content) > MAX_ANSWER_NBYTES:
                        raise httpx.ReadError("its answer is too long")
        except (httpx.HTTPError, ValueError, TimeoutError) as error:
            await self._hang_up()  # a connection that did not answer is not used again
            reason = str(error) or type(error).__name__
            if isinstance(error, TimeoutError):
                reason = f"no complete answer within {self._timeout_s:g} s"
            raise LeaseUnavailable(f"the API server at {self._url}: {reason}") from None
        return answer.status_code, bytes(content)

    def _problem(self, status: int, message: str) -> str:
        if status == 401:
            return f"the API server does not accept this pod's service account (401 {message})"
        if status == 403:
            rights = "get, create and update leases of coordination.k8s.io"
            return f"this pod's service account cannot {rights} in {self._namespace}; give it a Role (403 {message})"
        return f"the API server answers {status} {message}"

    def _token(self) -> str:
        """Reads the token each time, because the kubelet renews it. Raises LeaseUnavailable."""
        try:
            return (self._account / "token").read_text(encoding="ascii").strip()
        except (OSError, ValueError) as error:
            raise LeaseUnavailable(f"{self._account}/token: {error}") from None

    async def _opened(self) -> httpx.AsyncClient:
        """Opens a client that trusts only the cluster's own authority. Raises LeaseUnavailable."""
        try:
            authority = (self._account / "ca.crt").read_bytes()
            if self._client is None or authority != self._authority:
                await self._hang_up()
                context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
                context.load_verify_locations(cadata=authority.decode("ascii"))
                self._client = httpx.AsyncClient(verify=context, timeout=None, trust_env=False)
                self._authority = authority
        except (OSError, ValueError) as error:
            raise LeaseUnavailable(f"{self._account}/ca.crt: {error}") from None
        return self._client

    async def _hang_up(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            await client.aclose()

    def close(self) -> None:
        self._runner.run(self._hang_up())
        self._runner.close()
