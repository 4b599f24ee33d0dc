"""deploy/kubernetes: Kubernetes' schemas, consistency between files, and kustomize's output."""

import re
import shutil
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from tests.support.manifests import KUSTOMIZE, NEWEST, OLDEST, ROOT, built, check_schema, documents
from tests.unit.test_deploy import parse_serve

README = ROOT / "deploy" / "README.md"
OVERLAYS = {  # folder -> tag of its images, resource name and number of its devices
    "base": ("cpu", "", 1),
    "overlays/cuda": ("cuda", "nvidia.com/gpu", 1),
    "overlays/npu": ("npu", "huawei.com/Ascend910", 2),
    "overlays/npu-cce": ("npu", "huawei.com/ascend-1980", 2),
}
KINDS = {"Deployment": 1, "StatefulSet": 2, "Service": 4, "NetworkPolicy": 3, "PodDisruptionBudget": 2}
WORKERS = ("prefill", "decode")
ROLES = (*WORKERS, "scheduler")
NOT_OF_A_REPLICA = ("metadata.name", "status.podIP")  # the only fields of the pod that its command line uses

overlays = pytest.mark.parametrize("overlay", OVERLAYS)
roles = pytest.mark.parametrize("role", ROLES)


def of(overlay: str, kind: str, name: str) -> dict[str, Any]:
    (found,) = (
        each
        for each in documents(f"{overlay}/pd-cluster.yaml")
        if (each["kind"], each["metadata"]["name"]) == (kind, f"pd-{name}")
    )
    return found


def workload(overlay: str, role: str) -> dict[str, Any]:
    return of(overlay, "Deployment" if role == "scheduler" else "StatefulSet", role)


def pod(overlay: str, role: str) -> dict[str, Any]:
    spec: dict[str, Any] = workload(overlay, role)["spec"]["template"]["spec"]
    return spec


def container(overlay: str, role: str) -> dict[str, Any]:
    (found,) = pod(overlay, role)["containers"]
    assert isinstance(found, dict)
    return found


def labels(overlay: str, role: str) -> dict[str, str]:
    found: dict[str, str] = workload(overlay, role)["spec"]["template"]["metadata"]["labels"]
    return found


def serve_options(overlay: str, role: str) -> dict[str, Any]:
    """Returns the flags of the pod pd-ROLE-1."""
    command, serve, *arguments = container(overlay, role)["args"]
    assert (command, serve) == ("pd-cluster", "serve")
    own = {"POD_NAME": f"pd-{role}-1", "POD_IP": "10.1.2.3"}
    return parse_serve([re.sub(r"\$\((\w+)\)", lambda match: own[match[1]], each) for each in arguments])


# ---- schemas


@pytest.mark.parametrize(
    ("overlay", "version"), [("base", OLDEST), *((f"overlays/{each}", NEWEST) for each in ("cuda", "npu"))]
)
def test_every_object_keeps_to_the_schema(overlay: str, version: str) -> None:
    found = documents(f"{overlay}/pd-cluster.yaml")
    kinds = [each["kind"] for each in found]
    assert {kind: kinds.count(kind) for kind in kinds} == KINDS
    for each in found:
        check_schema(each, version)


@pytest.mark.parametrize("file", ["autoscaling/autoscaling.yaml", "monitoring/monitoring.yaml"])
def test_objects_of_operators_keep_to_theirs(file: str) -> None:
    for each in documents(f"components/{file}"):
        check_schema(each)
        with pytest.raises(jsonschema.ValidationError):
            check_schema({**each, "spec": {**each["spec"], "replicas": 1}})


# ---- consistency


@overlays
@roles
def test_services_and_workloads_select_the_pods(overlay: str, role: str) -> None:
    own = labels(overlay, role)
    service = of(overlay, "Service", role)["spec"]
    assert workload(overlay, role)["spec"]["selector"]["matchLabels"] == own == service["selector"]
    assert own not in [labels(overlay, other) for other in ROLES if other != role]
    (port,) = service["ports"]
    ports = {each["name"]: each["containerPort"] for each in container(overlay, role)["ports"]}
    assert port["port"] == ports[port["targetPort"]] == serve_options(overlay, role)["port"]


@overlays
@pytest.mark.parametrize("role", WORKERS)
def test_workers_register_where_the_scheduler_listens(overlay: str, role: str) -> None:
    join = of(overlay, "Service", "join")["spec"]
    scheduler = serve_options(overlay, "scheduler")
    assert (join["clusterIP"], join["publishNotReadyAddresses"]) == ("None", True), "must be found before it is ready"
    assert join["selector"] == labels(overlay, "scheduler")
    options = serve_options(overlay, role)
    assert (options["role"], scheduler["role"]) == (role, "scheduler")
    assert options["join"] == f"pd-join:{scheduler['join_port']}" == f"pd-join:{join['ports'][0]['port']}"
    assert (options["instance_name"], options["advertise_host"]) == (f"pd-{role}-1", "10.1.2.3")


@pytest.mark.parametrize("overlay", ["base", "overlays/npu-cce"])
@pytest.mark.parametrize("role", WORKERS)
def test_a_pod_of_a_role_does_not_depend_on_the_number_of_pods(overlay: str, role: str) -> None:
    """StatefulSets replace pods when the template changes, so scaling a role must not change it."""
    spec = workload(overlay, role)["spec"]
    assert spec["podManagementPolicy"] == "Parallel"
    sources = [each["valueFrom"] for each in container(overlay, role)["env"] if "valueFrom" in each]
    fields = [each["fieldRef"]["fieldPath"] for each in sources if "fieldRef" in each]
    assert tuple(fields) == NOT_OF_A_REPLICA
    assert "envFrom" not in container(overlay, role)
    assert "initContainers" not in pod(overlay, role)
    assert all("configMap" not in volume for volume in pod(overlay, role)["volumes"])


@pytest.mark.parametrize("overlay", ["base", "overlays/npu-cce"])
@roles
def test_a_pod_is_started_with_known_flags(overlay: str, role: str) -> None:
    options, mounts = serve_options(overlay, role), container(overlay, role)["volumeMounts"]
    paths = [mount["mountPath"] for mount in mounts]
    assert options["host"] == "0.0.0.0"
    shipped = "/opt/pd-cluster/pd_cluster/models/tiny-chat"  # this path exists in every image
    assert options["model"] in (shipped, *paths)
    (secret,) = [volume["secret"] for volume in pod(overlay, role)["volumes"] if volume["name"] == "secret"]
    names = ["cluster.secret", "scheduler.key", "admin.token"] if role == "scheduler" else ["cluster.secret"]
    assert [item["key"] for item in secret["items"]] == [item["path"] for item in secret["items"]] == names
    files = [options[name] for name in ("secret_file", "scheduler_key_file", "admin_token_file") if options[name]]
    assert files == [f"/run/secrets/pd-cluster/{name}" for name in names]
    tag, _, num_devices = OVERLAYS[overlay]
    assert container(overlay, role)["image"] == f"pd-cluster:{tag}"
    assert role == "scheduler" or options["tensor_parallel_size"] == num_devices
    assert {mount["name"] for mount in mounts} == {volume["name"] for volume in pod(overlay, role)["volumes"]}
    assert {"/tmp", "/dev/shm"} <= {*paths}, "only these places may be writable"
    assert container(overlay, role)["workingDir"] == "/tmp"


@overlays
def test_the_network_lets_through_what_is_needed_and_nothing_else(overlay: str) -> None:
    """The admin port is on loopback. The system chooses workers' data ports, so workers may reach all ports."""
    peers = {role: {"podSelector": {"matchLabels": labels(overlay, role)}} for role in ROLES}
    for role in WORKERS:
        options, policy = serve_options(overlay, role), of(overlay, "NetworkPolicy", role)["spec"]

        from_scheduler, from_workers = policy["ingress"]
        ports = [{"port": options["port"]}, {"port": int(options["kv_port_range"])}]
        assert from_scheduler == {"ports": ports, "from": [peers["scheduler"]]}
        assert from_workers == {"from": [peers["prefill"], peers["decode"]]}
        assert policy["podSelector"]["matchLabels"] == labels(overlay, role)
    options = serve_options(overlay, "scheduler")
    clients, joining = of(overlay, "NetworkPolicy", "scheduler")["spec"]["ingress"]
    assert clients == {"ports": [{"port": options["port"]}]}
    assert joining["ports"] == [{"port": options["join_port"]}]
    selected = joining["from"][0]["podSelector"]["matchLabels"]
    assert all(selected.items() <= labels(overlay, role).items() for role in ROLES)
    assert options["admin_host"] == "127.0.0.1"


@pytest.mark.parametrize("overlay", ["base", "overlays/cuda"])
@roles
def test_pods_keep_to_the_restricted_standard(overlay: str, role: str) -> None:
    spec, own = pod(overlay, role), container(overlay, role)["securityContext"]
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert (own["allowPrivilegeEscalation"], own["capabilities"]) == (False, {"drop": ["ALL"]})
    assert own["readOnlyRootFilesystem"] is True
    assert spec["automountServiceAccountToken"] is False
    assert not [volume for volume in spec["volumes"] if "hostPath" in volume]


# ---- kustomize


@pytest.mark.parametrize("overlay", ["base", "overlays/npu"])
def test_an_overlay_of_one_s_own_is_what_the_readme_has(overlay: str, tmp_path: Path) -> None:
    (text,) = re.findall(r"^```yaml\n(.*?)^```$", README.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    folder = tmp_path / "kubernetes"
    shutil.copytree(KUSTOMIZE, folder)
    own = folder / "overlays" / "own" / "kustomization.yaml"
    own.parent.mkdir()
    own.write_text(text.replace("../npu", f"../../{overlay}"), encoding="utf-8")
    found = {(each["kind"], each["metadata"]["name"]): each for each in built(own.parent)}
    for role, count in (("prefill", 2), ("decode", 3)):
        scaled = found["StatefulSet", f"pd-{role}"]["spec"]
        assert scaled["replicas"] == count
        (image,) = (each["image"] for each in scaled["template"]["spec"]["containers"])
        assert image.startswith("registry.example/pd-cluster:")
    assert ("PodMonitor", "pd-scheduler") in found


@pytest.mark.parametrize("others", [[], ["schedulers"]])
def test_with_an_autoscaler_the_manifests_have_no_numbers(others: list[str], tmp_path: Path) -> None:
    """With an autoscaler the roles have no replica counts; the number of schedulers stays."""
    folder = tmp_path / "kubernetes"
    shutil.copytree(KUSTOMIZE, folder)
    own = folder / "own" / "kustomization.yaml"
    own.parent.mkdir()
    components = ", ".join(f"../components/{name}" for name in [*others, "autoscaling"])
    own.write_text(f"resources: [../base]\ncomponents: [{components}]\n", encoding="utf-8")
    found = built(own.parent)
    scaled = [each["spec"]["scaleTargetRef"] for each in found if each["kind"] == "ScaledObject"]
    sets = [each for each in found if each["kind"] == "StatefulSet" and each["metadata"]["name"] != "pd-scheduler"]
    assert sorted(each["name"] for each in scaled) == sorted(each["metadata"]["name"] for each in sets)
    assert all("replicas" not in each["spec"] for each in sets)
    specs = [each.get("spec", {}) for each in found if each["metadata"]["name"] == "pd-scheduler"]
    assert [spec["replicas"] for spec in specs if "replicas" in spec] == [2 if others else 1]
