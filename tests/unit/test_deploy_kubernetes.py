"""deploy/kubernetes: Kubernetes' own schemas, what kustomize makes of it, and the init step with real processes."""

import copy
import functools
import importlib.util
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import kubernetes_validate
import pytest
import yaml

from pd_cluster.cluster.members.credentials import credentials_of
from pd_cluster.cluster.members.place import find_place, node_ports
from pd_cluster.settings.processes import KeyFiles
from ranktable_tools.files import PRIVATE
from ranktable_tools.keys import SECRET_FILE, read_secret, write_keys
from tests.unit.test_deploy import parse_serve

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "deploy" / "kubernetes"
INIT = FOLDER / "ranktable_init.py"
README = ROOT / "deploy" / "README.md"
OVERLAYS = {"base": "cpu", "overlays/cuda": "cuda", "overlays/npu": "npu"}  # folder -> tag of its images
RESOURCES = {"base": None, "overlays/cuda": "nvidia.com/gpu", "overlays/npu": "huawei.com/Ascend910"}
OLDEST, NEWEST = "1.29", "1.37"
ROLES = ("prefill", "decode", "scheduler")

overlays = pytest.mark.parametrize("overlay", OVERLAYS)


@functools.cache
def rendered(overlay: str) -> dict[tuple[str, str], dict[str, Any]]:
    """(kind, name without the content's hash) -> object."""
    kubectl = shutil.which("kubectl") or shutil.which("kustomize")
    if kubectl is None:
        pytest.skip("neither kubectl nor kustomize is installed")
    command = [kubectl, "kustomize" if kubectl.endswith("kubectl") else "build", str(FOLDER / overlay)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    documents = list(yaml.safe_load_all(done.stdout))
    return {(each["kind"], re.sub(r"(pd-cluster)-\w+$", r"\1", each["metadata"]["name"])): each for each in documents}


def workload(overlay: str, role: str) -> dict[str, Any]:
    return rendered(overlay)["Deployment" if role == "scheduler" else "StatefulSet", f"pd-{role}"]


def pod(overlay: str, role: str) -> dict[str, Any]:
    spec: dict[str, Any] = workload(overlay, role)["spec"]["template"]["spec"]
    return spec


def environment(overlay: str, container: dict[str, Any], pod_name: str) -> dict[str, str]:
    """Returns kubelet's variables: the ConfigMap first, then `env` in its order, with references resolved."""
    found: dict[str, str] = {}
    for source in container["envFrom"]:
        config = rendered(overlay)["ConfigMap", "pd-cluster"]
        assert source["configMapRef"]["name"] == config["metadata"]["name"]
        found |= config["data"]
    for each in container.get("env", []):
        if "value" in each:
            found[each["name"]] = expanded(each["value"], found)
        elif each["name"] == "POD_NAME":
            assert each["valueFrom"] == {"fieldRef": {"fieldPath": "metadata.name"}}
            found["POD_NAME"] = pod_name
    return found


def expanded(text: str, env: dict[str, str]) -> str:
    return re.sub(r"\$\((\w+)\)", lambda match: env[match[1]], text)


def serve_options(overlay: str, role: str) -> dict[str, Any]:
    (container,) = pod(overlay, role)["containers"]
    env = environment(overlay, container, f"pd-{role}-0")
    return parse_serve([expanded(argument, env) for argument in container["args"]])


# ---- files


def test_a_kustomization_names_files_that_are_there_and_all_of_them() -> None:
    for path in FOLDER.rglob("kustomization.yaml"):
        loaded = yaml.safe_load(path.read_text(encoding="utf-8"))
        named = {*loaded.get("resources", []), *loaded.get("components", [])}
        named |= {patch["path"] for patch in loaded.get("patches", [])}
        assert all((path.parent / name).exists() for name in named)
        beside = {each.name for each in path.parent.glob("*.yaml")} - {path.name}
        assert beside <= named


# ---- schemas


@pytest.mark.parametrize(("overlay", "version"), [("base", OLDEST), *((overlay, NEWEST) for overlay in OVERLAYS)])
def test_every_object_keeps_to_the_schema(overlay: str, version: str) -> None:
    kinds = [kind for kind, _ in rendered(overlay)]
    assert sorted(kinds) == ["ConfigMap", "Deployment", "Service", "Service", "Service", "StatefulSet", "StatefulSet"]
    for each in rendered(overlay).values():
        kubernetes_validate.validate(each, version, strict=True)


def test_the_schema_finds_a_mistake() -> None:
    broken = copy.deepcopy(workload("base", "decode"))
    broken["spec"]["template"]["spec"]["terminationGracePeriod"] = 45
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(broken, NEWEST, strict=True)


# ---- what belongs together


@overlays
@pytest.mark.parametrize("role", ROLES)
def test_services_and_workloads_select_the_pods(overlay: str, role: str) -> None:
    labels = workload(overlay, role)["spec"]["template"]["metadata"]["labels"]
    service = rendered(overlay)["Service", f"pd-{role}"]["spec"]
    assert workload(overlay, role)["spec"]["selector"]["matchLabels"] == labels == service["selector"]
    others = [workload(overlay, other)["spec"]["template"]["metadata"]["labels"] for other in ROLES if other != role]
    assert labels not in others
    (port,) = service["ports"]
    (container_port,) = pod(overlay, role)["containers"][0]["ports"]
    assert port["targetPort"] == container_port["name"]
    assert port["port"] == container_port["containerPort"] == serve_options(overlay, role)["port"]


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_worker_has_a_name_that_lasts_before_it_is_ready(role: str) -> None:
    service = rendered("base")["Service", f"pd-{role}"]["spec"]
    assert service["clusterIP"] == "None"
    assert service["publishNotReadyAddresses"] is True
    assert workload("base", role)["spec"]["serviceName"] == f"pd-{role}"
    (term,) = pod("base", role)["affinity"]["podAntiAffinity"]["preferredDuringSchedulingIgnoredDuringExecution"]
    labels = workload("base", role)["spec"]["template"]["metadata"]["labels"]
    assert term["podAffinityTerm"]["labelSelector"]["matchLabels"] == labels


def test_there_is_one_scheduler_at_a_time() -> None:
    spec = workload("base", "scheduler")["spec"]
    assert (spec["replicas"], spec["strategy"]) == (1, {"type": "Recreate"})


@overlays
@pytest.mark.parametrize("role", ROLES)
def test_a_pod_is_started_with_known_flags(overlay: str, role: str) -> None:
    options = serve_options(overlay, role)
    (container,) = pod(overlay, role)["containers"]
    assert options["host"] == "0.0.0.0"
    mounts = [mount["mountPath"] for mount in container["volumeMounts"]]
    assert options["model"] in ("", *mounts)  # "": the model that the project ships
    assert options["secret_file"] is None, "it is beside the table"
    (secret,) = [volume["secret"] for volume in pod(overlay, role)["volumes"] if volume["name"] == "secret"]
    names = ["cluster.secret", "scheduler.key", "admin.token"] if role == "scheduler" else ["cluster.secret"]
    assert [item["key"] for item in secret["items"]] == [item["path"] for item in secret["items"]] == names
    assert container["image"] == f"pd-cluster:{OVERLAYS[overlay]}"
    volumes = {volume["name"] for volume in pod(overlay, role)["volumes"]}
    used = [*container["volumeMounts"], *pod(overlay, role)["initContainers"][0]["volumeMounts"]]
    assert {mount["name"] for mount in used} == volumes


@overlays
@pytest.mark.parametrize("role", ROLES)
def test_a_pod_has_time_to_drain(overlay: str, role: str) -> None:
    hook = pod(overlay, role)["containers"][0].get("lifecycle", {}).get("preStop", {})
    first_s = int(hook["exec"]["command"][1]) if hook else 0
    drain_s = serve_options(overlay, role)["drain_timeout"]
    assert pod(overlay, role)["terminationGracePeriodSeconds"] > first_s + drain_s


@overlays
@pytest.mark.parametrize("role", ROLES)
def test_only_readiness_depends_on_what_others_do(overlay: str, role: str) -> None:
    """/health is 503 while a model loads, while a scheduler has nobody and while anybody drains."""
    (container,) = pod(overlay, role)["containers"]
    asked = {probe: container[f"{probe}Probe"]["httpGet"] for probe in ("startup", "readiness", "liveness")}
    assert asked["readiness"]["path"] == "/health"
    assert asked["liveness"]["path"] == ("/live" if role == "scheduler" else "/instance")
    assert asked["startup"]["path"] == ("/live" if role == "scheduler" else "/health")
    startup = container["startupProbe"]
    if role != "scheduler":
        assert startup["periodSeconds"] * startup["failureThreshold"] >= 1800
    assert {probe["port"] for probe in asked.values()} == {"http"}


@overlays
def test_a_worker_gets_as_many_devices_as_its_table_has(overlay: str) -> None:
    num_devices = int(rendered(overlay)["ConfigMap", "pd-cluster"]["data"]["DEVICES"])
    for role in ROLES:
        assert serve_options(overlay, role)["tensor_parallel_size"] == num_devices
        limits = pod(overlay, role)["containers"][0]["resources"]["limits"]
        wanted = RESOURCES[overlay] if role != "scheduler" else None
        assert {name: value for name, value in limits.items() if "/" in name} == (
            {wanted: num_devices} if wanted else {}
        )


def test_the_number_of_instances_is_written_once(tmp_path: Path) -> None:
    folder = tmp_path / "kubernetes"
    shutil.copytree(FOLDER, folder)
    path = folder / "base" / "decode.yaml"
    path.write_text(path.read_text(encoding="utf-8").replace("replicas: 1", "replicas: 3"), encoding="utf-8")
    kubectl = shutil.which("kubectl")
    if kubectl is None:
        pytest.skip("kubectl is not installed")
    command = [kubectl, "kustomize", str(folder / "overlays" / "cuda")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    (config,) = (each for each in yaml.safe_load_all(done.stdout) if each["kind"] == "ConfigMap")
    assert (config["data"]["NUM_PREFILL"], config["data"]["NUM_DECODE"]) == ("1", "3")


@pytest.mark.parametrize("overlay", ["base", "overlays/cuda", "overlays/npu"])
def test_an_overlay_of_one_s_own_is_what_the_readme_has(overlay: str, tmp_path: Path) -> None:
    """kustomize has counted the base's replicas before an overlay changes them."""
    kubectl = shutil.which("kubectl")
    if kubectl is None:
        pytest.skip("kubectl is not installed")
    (text,) = re.findall(r"^```yaml\n(.*?)^```$", README.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    folder = tmp_path / "kubernetes"
    shutil.copytree(FOLDER, folder)
    own = folder / "overlays" / "own" / "kustomization.yaml"
    own.parent.mkdir()
    own.write_text(text.replace("../npu", f"../../{overlay}"), encoding="utf-8")
    done = subprocess.run([kubectl, "kustomize", own.parent], capture_output=True, text=True, timeout=60, check=True)
    documents = list(yaml.safe_load_all(done.stdout))
    (data,) = (each["data"] for each in documents if each["kind"] == "ConfigMap")
    counts = {each["metadata"]["name"]: each["spec"]["replicas"] for each in documents if each["kind"] == "StatefulSet"}
    assert counts == {"pd-prefill": 2, "pd-decode": 3}
    assert (data["NUM_PREFILL"], data["NUM_DECODE"]) == ("2", "3")


def test_a_node_without_hccn_conf_starts_no_pod() -> None:
    volumes = {
        each["hostPath"]["path"]: each for each in pod("overlays/npu", "decode")["volumes"] if "hostPath" in each
    }
    assert volumes["/etc/hccn.conf"]["hostPath"]["type"] == "File"


# ---- the init step


@functools.cache
def init() -> ModuleType:
    spec = importlib.util.spec_from_file_location("deploy_ranktable_init", INIT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def init_arguments(overlay: str, role: str, save_dir: Path) -> list[str]:
    """Returns the arguments in the pod `pd-ROLE-0`, except for the folder and the secret."""
    (container,) = pod(overlay, role)["initContainers"]
    assert container["command"] == ["python3", "/opt/pd-cluster/deploy/kubernetes/ranktable_init.py"]
    env = environment(overlay, container, f"pd-{role}-0")
    arguments = [expanded(argument, env) for argument in container["args"]]
    return [each for each in arguments if "--save-dir" not in each and "--secrets" not in each] + [
        f"--save-dir={save_dir}"
    ]


@overlays
def test_every_pod_makes_the_same_tables_and_its_own_entry(overlay: str, tmp_path: Path) -> None:
    made = set()
    for role in ROLES:
        folder = tmp_path / role
        init().write_tables(init().parse(init_arguments(overlay, role, folder)))
        container = pod(overlay, role)["containers"][0]
        env = environment(overlay, container, f"pd-{role}-0")
        env = {name: value.replace("/etc/pd-cluster", str(folder)) for name, value in env.items()}
        place = find_place(env)
        assert place.name == (role if role == "scheduler" else f"{role}-0")
        assert node_ports(env, place) == [8088, 8089]
        assert place.hosts == {"prefill-0": "pd-prefill-0.pd-prefill", "decode-0": "pd-decode-0.pd-decode"}
        made.add((folder / "global_ranktable.json").read_bytes())
        assert all(path.stat().st_mode & 0o077 == 0 for path in folder.iterdir())
    assert len(made) == 1


LOCAL = [
    "--scheduler=127.0.0.2",
    "--prefill=127.0.0.3{}",
    "--num-prefill=2",
    "--prefill-port=8088",
    "--prefill-devices=2",
]
LOCAL += ["--decode=127.0.0.4{}", "--num-decode=1", "--decode-port=8089"]


@pytest.fixture
def secrets(tmp_path: Path) -> Path:
    """Mounts the secrets as Kubernetes does, readable for a group."""
    for path in write_keys(tmp_path / "mounted", PRIVATE):
        path.chmod(0o440)
    return tmp_path / "mounted"


def test_real_processes_end_with_the_same_table(tmp_path: Path, secrets: Path) -> None:
    hosts = ["127.0.0.2", "127.0.0.30", "127.0.0.31", "127.0.0.40"]
    started = [
        subprocess.Popen(
            [
                sys.executable,
                "-I",
                INIT,
                f"--me={host}",
                *LOCAL,
                f"--save-dir={tmp_path / host}",
                f"--secrets={secrets}",
            ],
            stderr=subprocess.PIPE,
        )
        for host in hosts
    ]
    told = [process.communicate(timeout=60)[1] for process in started]
    assert told == [b""] * 4
    assert [process.returncode for process in started] == [0] * 4
    tables = {(tmp_path / host / "global_ranktable.json").read_bytes() for host in hosts}
    assert len(tables) == 1
    names = []
    for host in hosts:
        env = {"GLOBAL_RANK_TABLE_FILE_PATH": str(tmp_path / host / "global_ranktable.json")}
        env["RANK_TABLE_FILE_PATH"] = str(tmp_path / host / "local_ranktable.json")
        place = find_place(env)
        assert place.server.server_ip == host
        assert credentials_of(place, KeyFiles()).secret == read_secret(secrets / SECRET_FILE).secret
        assert (tmp_path / host / "scheduler.key").exists() is (place.role == "scheduler")
        names.append(place.name)
    assert names == ["scheduler", "prefill-0", "prefill-1", "decode-0"]


@pytest.mark.parametrize(
    ("me", "code", "reason"),
    [
        ("decode-0", 1, "decode-0 is no address of this pod"),  # the name server still tells another's
        ("scheduler", 0, "prefill-0 cannot be resolved"),  # its peers
    ],
)
def test_the_deadline_names_who_is_missing(
    me: str, code: int, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def name_server(host: str, *_: object, **__: object) -> list[Any]:
        if host == "prefill-0":
            raise socket.gaierror(socket.EAI_NONAME, "no such name")
        return [(socket.AF_INET, socket.SOCK_STREAM, 0, "", ("192.0.2.1", 0))]

    monkeypatch.setattr(socket, "getaddrinfo", name_server)
    arguments = ["--scheduler=scheduler", "--prefill=prefill-{}", "--num-prefill=1", "--prefill-port=1"]
    arguments += ["--decode=decode-{}", "--num-decode=1", "--decode-port=2", f"--save-dir={tmp_path}", "--timeout=0"]
    assert init().main([f"--me={me}", *arguments]) == code
    assert capsys.readouterr().err.startswith(f"ranktable_init.py: after 0 s {reason}")


def test_a_name_that_comes_late_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(init(), "POLL_S", 0.001)
    answers = iter([False, False, True])
    assert init().wait_for(["late"], lambda _: next(answers), 30.0) == []
    assert list(answers) == []


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"--me": "127.0.0.9"}, "--me 127.0.0.9: the tables have 127.0.0.2"),
        ({"--num-decode": "0"}, "at least 1 of each"),
        ({"--prefill": "127.0.0.3"}, "has no {} for the number, and there are 2"),
        ({"--decode": "no host"}, "--decode no host: expected"),
        ({"--decode": "127.0.0.3{}"}, "nobody else uses"),
        ({"--secrets": "/nowhere"}, "/nowhere/cluster.secret"),
    ],
)
def test_what_makes_no_table_is_named(
    changed: dict[str, str], reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = dict(option.split("=", 1) for option in ["--me=127.0.0.2", *LOCAL, f"--save-dir={tmp_path}"])
    assert init().main([f"{name}={value}" for name, value in (given | changed).items()]) == 1
    assert reason in capsys.readouterr().err
