"""The schedulers' record in a Lease object, over real HTTP, with a server that behaves like the API server."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pd_cluster.cluster.leases import lease_kubernetes
from pd_cluster.cluster.leases.lease_kubernetes import MAX_RECORD_NBYTES, RECORD, KubernetesLease, place_of_lease
from pd_cluster.cluster.leases.membership_lease import DesiredInstance, LeaseRecord, Ownership
from pd_cluster.errors import ConfigError, LeaseUnavailable
from tests.support.certificates import Certificate, make_certificate
from tests.support.lease_server import LeaseServer, make_account, serving
from tests.support.scheduler_world import Store, World

ALL = {"get", "create", "update"}
TIMEOUT_S = 30.0
MEMBER = DesiredInstance(name="a", role="decode", host="192.0.2.7", port=8088, device_ids=["0"], joined_as="decode")


class Api:
    """The server and a test's clients."""

    def __init__(self, leases: LeaseServer, account: Path) -> None:
        self.leases, self.account = leases, account
        self.opened: list[KubernetesLease] = []

    def client(self, timeout_s: float = TIMEOUT_S, url: str = "") -> KubernetesLease:
        made = KubernetesLease("pd", "schedulers", url or self.leases.url, self.account, 15.0, timeout_s)
        self.opened.append(made)
        return made

    def holding(self, **more: Any) -> KubernetesLease:
        """Returns a client that has written version 1."""
        made = self.client(**more)
        assert made.read() == LeaseRecord()
        assert made.write(record(1))
        return made

    def annotate(self, name: str, text: str) -> None:
        """Changes the lease's annotation as another program would."""
        changed = self.lease()
        changed["metadata"]["annotations"][name] = text
        self.leases.put("pd", "schedulers", changed)

    def lease(self) -> dict[str, Any]:
        return self.leases.object("pd", "schedulers")


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Certificate:
    return make_certificate(tmp_path_factory.mktemp("authority"), "cluster")


@pytest.fixture
def api(tmp_path: Path, certificate: Certificate) -> Iterator[Api]:
    leases = LeaseServer()
    leases.rights["pod"] = set(ALL)
    with serving(leases):
        found = Api(leases, make_account(tmp_path / "account", certificate, "pod"))
        yield found
        for each in found.opened:
            each.close()


def record(version: int, holder: str = "scheduler-0@1", term: int = 1, **more: Any) -> LeaseRecord:
    return LeaseRecord(version=version, term=term, holder=holder, members=[MEMBER], **more)


def begin(own: Ownership, client: KubernetesLease) -> None:
    """Writes the first record, without an owner, from which the lease time counts."""
    first = wish(own, client)
    assert (first.version, first.term, first.holder) == (1, 0, "")
    own.after_write(first, client.write(first))
    assert own.term_now is None


def test_the_record_is_in_the_lease_and_its_fields_are_for_people(api: Api) -> None:
    one, other = api.client(), api.client()
    assert one.read() == other.read() == LeaseRecord()
    assert one.write(record(1))
    assert other.read() == record(1)
    spec = api.lease()["spec"]
    assert (spec["holderIdentity"], spec["leaseDurationSeconds"], spec["leaseTransitions"]) == ("scheduler-0@1", 15, 0)
    assert spec["acquireTime"] == spec["renewTime"]
    assert other.write(record(2, "scheduler-1@2", 2))
    assert other.write(record(3, "scheduler-1@2", 2)), "it must know its write's resourceVersion"
    spec = api.lease()["spec"]
    assert (spec["holderIdentity"], spec["leaseTransitions"]) == ("scheduler-1@2", 1)
    assert spec["acquireTime"] < spec["renewTime"]
    assert other.write(record(4, ""))
    assert api.lease()["spec"]["holderIdentity"] == ""


def test_only_the_next_version_of_what_was_read_is_written(api: Api) -> None:
    one, other = api.client(), api.client()
    assert one.read() == other.read()
    assert one.write(record(1))
    assert not other.write(record(1, "scheduler-1@2")), "expected 409: it exists"
    assert other.read() == record(1)
    assert one.write(record(2))
    assert not other.write(record(2, "scheduler-1@2")), "expected 409: another resourceVersion"
    assert not one.write(record(2)), "not the next version"
    assert other.read() == record(2)


def test_a_lease_that_was_deleted_is_made_again_and_a_late_write_to_it_is_refused(api: Api) -> None:
    one, other = api.holding(), api.client()
    assert other.read() == record(1)
    api.leases.remove("pd", "schedulers")
    assert not one.write(record(2)), "a deleted object must not be written"
    assert one.read() == LeaseRecord()
    assert one.write(record(1, term=7))
    assert not other.write(record(2, "scheduler-1@2", 2)), "it has read an earlier object"
    assert other.read().term == 7


def test_what_others_wrote_into_the_object_stays(api: Api) -> None:
    one = api.holding()
    changed = api.lease()
    changed["metadata"]["labels"] = {"team": "x"}
    api.leases.put("pd", "schedulers", changed)
    api.annotate("note", "y")
    assert not one.write(record(2)), "the object has changed meanwhile"
    assert one.read() == record(1)
    assert one.write(record(2))
    metadata = api.lease()["metadata"]
    assert (metadata["labels"], metadata["annotations"]["note"]) == ({"team": "x"}, "y")


def test_a_namespace_that_is_none_is_named(api: Api) -> None:
    one = api.client()
    api.leases.answers = (404, b'{"kind":"Status","message":"namespaces \\"pd\\" not found"}')
    assert one.read() == LeaseRecord(), "expected the same as without a Lease"
    with pytest.raises(LeaseUnavailable, match='404 namespaces "pd" not found'):
        one.write(record(1))


def owning(api: Api) -> tuple[list[float], KubernetesLease, Ownership]:
    """Returns the clock, client and ownership of a scheduler that may own the lease now."""
    clock = [100.0]
    one, own = api.client(), Ownership("scheduler-0@1", 15.0, lambda: clock[0])
    begin(own, one)
    clock[0] += 15
    return clock, one, own


def wish(own: Ownership, client: KubernetesLease) -> LeaseRecord:
    wanted = own.after_read(client.read(), [MEMBER])
    assert wanted is not None
    return wanted


def test_an_annotation_of_another_program_ends_no_ownership(api: Api) -> None:
    clock, one, own = owning(api)
    for is_written in (True, False, True):
        wanted = wish(own, one)
        if not is_written:
            api.annotate("note", "y")
        assert one.write(wanted) == is_written
        own.after_write(wanted, is_written)
        assert own.term_now == 1
        clock[0] += 5
    clock[0] += 9.9
    assert own.term_now == 1


def test_an_empty_lease_is_used_and_one_of_another_program_is_not(api: Api) -> None:
    empty = {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": {}, "spec": {}}
    api.leases.put("pd", "schedulers", empty)
    one = api.holding()
    api.leases.put("pd", "schedulers", {**empty, "spec": {"holderIdentity": "controller-7"}})
    with pytest.raises(LeaseUnavailable, match=r"pd/schedulers belongs to 'controller-7'"):
        one.read()


@pytest.mark.parametrize("written", ["{", "[]", '{"members":[{"name":"a"}]}'])
def test_a_record_that_is_none_is_an_error_that_names_it(api: Api, written: str) -> None:
    one = api.holding()
    api.annotate(RECORD, written)
    with pytest.raises(LeaseUnavailable, match=f"pd/schedulers: its annotation {RECORD}"):
        one.read()


def test_what_the_api_server_refuses_is_told_in_one_line(api: Api) -> None:
    one = api.client()
    for rights, told in ((None, "does not accept this pod's service account"), ({"create"}, "give it a Role")):
        api.leases.rights.clear()
        if rights is not None:
            api.leases.rights["pod"] = rights
        with pytest.raises(LeaseUnavailable, match=told) as caught:
            one.read()
        assert "\n" not in str(caught.value)
    (api.account / "token").write_text("renewed")  # as the kubelet renews it
    api.leases.rights["renewed"] = set(ALL)
    assert one.read() == LeaseRecord()
    api.leases.rights["renewed"] = {"get"}
    with pytest.raises(LeaseUnavailable, match="cannot get, create and update leases"):
        one.write(record(1))


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        ((500, b'{"message":"etcdserver: request timed out"}'), "500 etcdserver: request timed out"),
        ((200, b'{"kind":"Pod"}'), "the API server answers 200"),
        ((200, b"[" * 100_000), "answers 200 without an object"),
        ((302, b""), "answers 302 without an object"),
        ((200, b" " * (2 << 20)), "too long"),
    ],
)
def test_an_answer_that_is_none(api: Api, answer: tuple[int, bytes], told: str) -> None:
    api.leases.answers = answer
    one = api.client()
    for ask in (one.read, lambda: one.write(record(1))):
        with pytest.raises(LeaseUnavailable, match=told):
            ask()


def test_a_question_has_one_deadline_from_the_connection_to_the_last_byte(api: Api) -> None:
    one, late = api.holding(timeout_s=0.3), r"http://127\.0\.0\.1:\d+: no complete answer within 0\.3 s"
    api.leases.drip_s = 0.05  # each byte arrives in time, but all together take seconds
    with pytest.raises(LeaseUnavailable, match=late):
        one.read()
    api.leases.drip_s, api.leases.is_endless = 0.0, True
    for ask in (one.read, lambda: one.write(record(2))):
        with pytest.raises(LeaseUnavailable, match=late):
            ask()
    api.leases.is_endless = False
    assert one.read() == record(2), "expected a retry over a new connection, since only the answer was lost"
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"https://127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(LeaseUnavailable, match=r"no complete answer within 0\.3 s"):
            api.client(0.3, url).read()


def test_a_write_whose_answer_is_lost_is_seen_at_the_next_look(api: Api) -> None:
    clock, one, own = owning(api)
    wanted = wish(own, one)
    own.after_write(wanted, one.write(wanted))
    clock[0] += 4
    renewal = wish(own, one)
    api.leases.loses_answers = True
    with pytest.raises(LeaseUnavailable):
        one.write(renewal)
    api.leases.loses_answers = False
    clock[0] += 2
    again = wish(own, one)
    assert again.version == renewal.version + 1
    own.after_write(again, one.write(again))
    assert own.term_now == 1


def test_a_server_that_is_gone_and_comes_back(tmp_path: Path, certificate: Certificate) -> None:
    leases = LeaseServer()
    leases.rights["pod"] = set(ALL)
    api = Api(leases, make_account(tmp_path / "account", certificate, "pod"))
    with serving(leases):
        one, port = api.holding(), int(leases.url.rpartition(":")[2])
    with pytest.raises(LeaseUnavailable, match="the API server at"):
        one.read()
    with serving(leases, port=port):
        assert one.read() == record(1)
        assert one.write(record(2))
    one.close()


def test_only_the_cluster_s_own_authority_is_believed(tmp_path: Path) -> None:
    own, other = make_certificate(tmp_path, "own"), make_certificate(tmp_path, "other")
    leases = LeaseServer()
    leases.rights["pod"] = set(ALL)
    account = make_account(tmp_path / "account", other, "pod")
    with serving(leases, own):
        one = KubernetesLease("pd", "schedulers", leases.url, account, 15.0, TIMEOUT_S)
        with pytest.raises(LeaseUnavailable, match="CERTIFICATE_VERIFY_FAILED"):
            one.read()
        assert not leases.asked, "the token must not be sent"
        make_account(account, own, "pod")  # replaces the service account
        assert one.read() == LeaseRecord()
        one.close()


def test_missing_files_are_named(api: Api) -> None:
    for name in ("token", "ca.crt"):
        (api.account / name).rename(api.account / "away")
        with pytest.raises(LeaseUnavailable, match=name):
            api.client().read()
        (api.account / "away").rename(api.account / name)


def test_the_record_has_a_bound_that_the_annotation_keeps(api: Api) -> None:
    one = api.client()
    one.read()
    most = LeaseRecord(version=1, term=1, holder="a@1", members=[MEMBER] * 3000)
    while len(msgspec.json.encode(most)) > MAX_RECORD_NBYTES:
        most = msgspec.structs.replace(most, members=most.members[1:])
    assert one.write(most)
    assert one.read() == most
    larger = msgspec.structs.replace(most, version=2, members=[*most.members, MEMBER, MEMBER])
    with pytest.raises(LeaseUnavailable, match=f"a Lease can have {MAX_RECORD_NBYTES}"):
        one.write(larger)


@pytest.mark.parametrize("place", ["name", "a/b/c", "A/b"])
def test_a_place_that_is_none(place: str) -> None:
    with pytest.raises(ConfigError, match=r"expected kubernetes:NAMESPACE/NAME"):
        place_of_lease(f"kubernetes:{place}")


def test_a_place_and_a_folder() -> None:
    assert place_of_lease("kubernetes:pd/pd-schedulers") == ("pd", "pd-schedulers")
    assert place_of_lease("/run/pd/kubernetes:a") is None


def test_outside_of_a_pod_it_says_so(tmp_path: Path, certificate: Certificate, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="only in a pod of Kubernetes"):
        KubernetesLease.in_pod("pd", "x", 15.0, {})
    monkeypatch.setattr(lease_kubernetes, "SERVICE_ACCOUNT", tmp_path)
    env = {"KUBERNETES_SERVICE_HOST": "fd00::1", "KUBERNETES_SERVICE_PORT_HTTPS": "6443"}
    with pytest.raises(ConfigError, match="automountServiceAccountToken"):
        KubernetesLease.in_pod("pd", "x", 15.0, env)
    make_account(tmp_path, certificate, "pod")
    made = KubernetesLease.in_pod("pd", "x", 15.0, env)
    assert (made._url, made._timeout_s) == ("https://[fd00::1]:6443", 5.0)


# ---- the random orders of test_membership_lease.py, over HTTP


class ApiWay:
    """One scheduler's access to a world's record in a Lease."""

    def __init__(self, store: Store, client: KubernetesLease) -> None:
        self._store, self._client = store, client

    def read(self) -> LeaseRecord:
        self._store.reach()
        return self._client.read()

    def write(self, record: LeaseRecord) -> bool:
        self._store.reach()
        return self._client.write(record) and self._store.write_whole(record)


def explore(api: Api, seeds: range, removals: float = 0.0) -> tuple[int, int]:
    def remove() -> None:
        api.leases.remove("pd", "schedulers")

    owners = refused = 0
    for seed in seeds:
        world = World(seed, way_of=lambda world: ApiWay(world.store, api.client()), removals=removals, remove=remove)
        try:
            world.run()
            world.settle()
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error
        owners, refused = owners + world.num_owners, refused + world.num_refused
        remove()
        while api.opened:
            api.opened.pop().close()
    return owners, refused


def test_no_two_own_membership_over_the_api_server(api: Api) -> None:
    owners, _ = explore(api, range(4))
    assert owners > 4
    owners, _ = explore(api, range(2), removals=0.5)
    assert owners > 2


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_no_two_own_membership_over_the_api_server_in_many_orders(api: Api) -> None:
    owners, refused = explore(api, range(20_000, 20_300))
    assert owners > 600
    assert refused > 5
    owners, _ = explore(api, range(30_000, 30_100), removals=0.5)
    assert owners > 100
