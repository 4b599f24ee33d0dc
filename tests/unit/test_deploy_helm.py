"""The Helm chart, rendered by Helm's own library; deploy/kubernetes is its output for the example values.

Needs the extra `helm`. `python tests/unit/test_deploy_helm.py --fix` writes deploy/kubernetes again.
"""

from __future__ import annotations

import functools
import json
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from pd_cluster.cluster.leases.lease_kubernetes import place_of_lease
from pd_cluster.commands.cli import app
from pd_cluster.settings.routing_settings import MAX_SCHEDULERS
from tests.support.manifests import CHART, KUSTOMIZE, built, check_schema

ROOT = Path(__file__).resolve().parents[2]
RENDER = ROOT / "tests" / "support" / "render_chart.py"
TOP = "# Written from deploy/helm/pd-cluster by `python tests/unit/test_deploy_helm.py --fix`; change that.\n"
CLUSTER = ("scheduler", "workers", "availability")
MADE: dict[str, tuple[tuple[str, ...], dict[str, Any], tuple[str, ...]]] = {  # file -> values, templates
    "base/pd-cluster.yaml": ((), {}, CLUSTER),
    "overlays/cuda/pd-cluster.yaml": (("values-cuda.yaml",), {}, CLUSTER),
    "overlays/npu/pd-cluster.yaml": (("values-npu.yaml",), {}, CLUSTER),
    "overlays/npu-cce/pd-cluster.yaml": (("values-npu.yaml", "values-npu-cce.yaml"), {}, CLUSTER),
    "components/autoscaling/autoscaling.yaml": ((), {"autoscaling": {"enabled": True}}, ("autoscaling",)),
    "components/schedulers/schedulers.yaml": ((), {"scheduler": {"replicas": 2}}, ("schedulers",)),
    "components/monitoring/monitoring.yaml": ((), {"monitoring": {"enabled": True}}, ("monitoring",)),
}
EVERYTHING: dict[str, Any] = {
    "autoscaling": {"enabled": True},
    "monitoring": {"enabled": True, "dashboard": True, "metricsKey": True, "labels": {"release": "x"}},
    "imagePullSecrets": ["registry"],
    "priorityClassName": "high",
    "networkPolicy": {"clients": [{"namespaceSelector": {}}]},
    "scheduler": {"args": ["--otlp-traces-endpoint=http://collector:4318"], "nodeSelector": {"a": "b"}},
    "roles": {"decode": {"tolerations": [{"operator": "Exists"}], "args": ["--max-model-len=4096"]}},
}
MODELS = [
    {"source": "claim"},
    {"source": "image", "image": "registry.example/models/llama:8b"},
    {"source": "download", "repository": "org/model", "tokenSecret": "hub"},
]
DOWNLOAD: dict[str, Any] = {"source": "download", "repository": "org/model"}
DOWNLOADS: list[dict[str, Any]] = [  # the first two give the same Job
    {"model": DOWNLOAD},
    {"model": DOWNLOAD, "roles": {"decode": {"replicas": 5}}},
    {"model": {**DOWNLOAD, "repository": "org/other"}},
    {"model": DOWNLOAD, "image": {"tag": "next"}},
]
SERVICES: list[tuple[dict[str, Any], bool]] = [  # values, whether clients need no key
    ({"type": "ClusterIP"}, True),
    ({"type": "NodePort"}, False),
    ({"type": "LoadBalancer"}, False),
    ({"type": "LoadBalancer", "withoutKey": True}, True),
]
PICKERS: list[dict[str, Any]] = [  # values of endpointPicker
    {"enabled": True},
    {"enabled": True, "tlsSecret": "picker-tls", "maxRequests": 64, "fallbacks": 2, "failureMode": "FailClose"},
]
SEVERAL: list[tuple[str, tuple[str, ...], int]] = [  # folder of deploy/kubernetes, values, schedulers
    ("base", (), 2),
    ("overlays/npu-cce", ("values-npu.yaml", "values-npu-cce.yaml"), 3),
]
UNIT: dict[str, Any] = {"roles": {"decode": {"replicas": 4, "sharesExperts": True}}}
WRONG: list[tuple[dict[str, Any], str]] = [
    ({"replicas": 3}, "replicas"),
    ({"scheduler": {"replicas": MAX_SCHEDULERS + 1}}, "replicas"),
    ({"scheduler": {"replicas": 0}}, "replicas"),
    ({"roles": {"decode": {"replicas": -1}}}, "replicas"),
    ({"model": {"source": "s3"}}, "source"),
    ({"model": {"source": "image"}}, "model.image"),
    ({"device": {"kind": "tpu"}}, "kind"),
    ({"scheduler": {"service": {"type": "ExternalName"}}}, "type"),
    ({**UNIT, "autoscaling": {"enabled": True}}, "roles.decode.sharesExperts"),
]


def values_of(*files: str) -> dict[str, Any]:
    """Merges values as `helm -f A -f B` does: objects are merged, lists replaced."""
    found: dict[str, Any] = {}
    for file in files:
        _merge(found, yaml.safe_load((CHART / file).read_text(encoding="utf-8")))
    return found


def _merge(into: dict[str, Any], values: dict[str, Any]) -> None:
    for name, value in values.items():
        if isinstance(value, dict) and isinstance(into.get(name), dict):
            _merge(into[name], value)
        else:
            into[name] = value


def asked() -> list[dict[str, Any]]:
    made = [{**values_of(*files), **more} for files, more, _ in MADE.values()]
    services = ({"scheduler": {"service": service}} for service, _ in SERVICES)
    models = ({"model": model} for model in MODELS)
    several = []
    for _, files, count in SEVERAL:
        several.append(values_of(*files))
        _merge(several[-1], {"scheduler": {"replicas": count}})
    pickers = ({"endpointPicker": picker, "networkPolicy": EVERYTHING["networkPolicy"]} for picker in PICKERS)
    return [
        *made,
        EVERYTHING,
        *models,
        *DOWNLOADS,
        *services,
        *several,
        *pickers,
        UNIT,
        *(values for values, _ in WRONG),
    ]


@functools.cache
def rendered() -> list[Any]:
    if find_spec("helm_python") is None:
        pytest.skip("helm-python-sdk is not installed; sh scripts/setup.sh test,helm")
    done = subprocess.run(
        [sys.executable, RENDER], input=json.dumps(asked()), capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    found: list[Any] = json.loads(done.stdout)
    return found


def files() -> dict[str, str]:
    """Returns the contents of deploy/kubernetes as rendered by the chart, by file."""
    found = {}
    for (file, (_, _, templates)), texts in zip(MADE.items(), rendered(), strict=False):
        parts = [next(text for name, text in texts.items() if name.endswith(f"/{each}.yaml")) for each in templates]
        lines = "\n---\n".join(part.strip().removeprefix("---").strip() for part in parts).splitlines()
        found[file] = TOP + "\n".join(line.rstrip() for line in lines if line.strip()) + "\n"
    return found


def objects(texts: dict[str, str]) -> list[dict[str, Any]]:
    assert "error" not in texts, texts["error"]
    return [each for text in texts.values() for each in yaml.safe_load_all(text) if each]


def test_kustomize_has_what_the_chart_makes() -> None:
    for file, text in files().items():
        assert (KUSTOMIZE / file).read_text(encoding="utf-8") == text, f"{file}: run {__file__} --fix"


def test_the_linter_finds_nothing() -> None:
    lint = rendered()[-1]
    assert lint["errors"] == []
    assert [each["error"] for each in lint["messages"]] == ["icon is recommended"]


@pytest.mark.parametrize("at", range(len(MADE), len(MADE) + 1 + len(MODELS)))
def test_other_values_keep_to_the_schemas(at: int) -> None:
    found = objects(rendered()[at])
    for each in found:
        check_schema(each)
    kinds = {each["kind"] for each in found}
    assert {"ScaledObject", "PodMonitor", "PrometheusRule"} <= kinds or at > len(MADE)
    assert ("Job" in kinds) is (at == len(MADE) + len(MODELS))


def test_a_download_that_changes_is_another_job() -> None:
    start = len(MADE) + 1 + len(MODELS)
    found = [objects(texts) for texts in rendered()[start : start + len(DOWNLOADS)]]
    names = [each["metadata"]["name"] for one in found for each in one if each["kind"] == "Job"]
    assert len(names) == len(DOWNLOADS)
    assert names[0] == names[1]
    assert len(set(names)) == len(DOWNLOADS) - 1
    assert all(name.startswith("pd-download-") for name in names)
    for one in found:
        (job,) = (each for each in one if each["kind"] == "Job")
        (container,) = job["spec"]["template"]["spec"]["containers"]
        assert {"name": "HF_HUB_OFFLINE", "value": "0"} in container["env"], "the images must disable access to the hub"


def test_hosts_outside_of_the_cluster_need_a_key() -> None:
    start = len(MADE) + 1 + len(MODELS) + len(DOWNLOADS)
    for (service, is_optional), texts in zip(SERVICES, rendered()[start : start + len(SERVICES)], strict=True):
        scheduler = next(each for each in objects(texts) if each["kind"] == "Deployment")
        variables = scheduler["spec"]["template"]["spec"]["containers"][0]["env"]
        key = next(each for each in variables if each["name"] == "VLLM_API_KEY")
        assert key["valueFrom"]["secretKeyRef"]["optional"] is is_optional, service


@pytest.mark.parametrize("at", range(len(SEVERAL)))
def test_several_schedulers_have_one_lease_and_the_right_to_it(at: int, tmp_path: Path) -> None:
    """They share one lease and the permission for it; kustomize's component gives the same result."""
    folder, _, count = SEVERAL[at]
    start = len(MADE) + 1 + len(MODELS) + len(DOWNLOADS) + len(SERVICES)
    found = by_name(objects(rendered()[start + at]))
    for each in found.values():
        check_schema(each)
    assert ("Deployment", "pd-scheduler") not in found
    spec = found["StatefulSet", "pd-scheduler"]["spec"]
    assert (spec["replicas"], spec["serviceName"]) == (count, "pd-join")
    pod = spec["template"]["spec"]
    (container,) = pod["containers"]
    flags = dict(each.partition("=")[::2] for each in container["args"])
    sources = {each["name"]: each.get("valueFrom", {}).get("fieldRef", {}) for each in container["env"]}
    assert sources["POD_NAMESPACE"] == {"fieldPath": "metadata.namespace"}
    assert sources["POD_INDEX"] == {"fieldPath": "metadata.labels['apps.kubernetes.io/pod-index']"}
    lease = flags["--scheduler-lease"].replace("$(POD_NAMESPACE)", "pd")
    assert flags["--scheduler-index"] == "$(POD_INDEX)"
    place = place_of_lease(lease)
    assert place is not None
    assert (pod["serviceAccountName"], pod["automountServiceAccountToken"]) == ("pd-scheduler", True)
    rules = found["Role", "pd-scheduler"]["rules"]
    rights = {verb: rule.get("resourceNames") for rule in rules for verb in rule["verbs"]}
    assert rights == {"get": [place[1]], "update": [place[1]], "create": None}
    assert {(*rule["apiGroups"], *rule["resources"]) for rule in rules} == {("coordination.k8s.io", "leases")}
    binding = found["RoleBinding", "pd-scheduler"]
    assert (binding["roleRef"]["name"], binding["subjects"][0]["name"]) == ("pd-scheduler", pod["serviceAccountName"])
    assert found["PodDisruptionBudget", "pd-scheduler"]["spec"]["maxUnavailable"] == 1
    own = tmp_path / "kubernetes"
    shutil.copytree(KUSTOMIZE, own)
    (own / "own").mkdir()
    (own / "own" / "kustomization.yaml").write_text(
        f"resources: [../{folder}]\ncomponents: [../components/schedulers]\n"
        f"replicas: [{{name: pd-scheduler, count: {count}}}]\n"
    )
    made = by_name(built(own / "own"))
    assert made.keys() == found.keys()
    for key, each in found.items():
        assert in_order(made[key]) == in_order(each), key


@pytest.mark.parametrize("at", range(len(PICKERS)))
def test_the_endpoint_picker_asks_the_pods_of_the_pool(at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    start = len(MADE) + 1 + len(MODELS) + len(DOWNLOADS) + len(SERVICES) + len(SEVERAL)
    found = by_name(objects(rendered()[start + at]))
    for each in found.values():
        check_schema(each)
    pool, service = found["InferencePool", "pd-scheduler"]["spec"], found["Service", "pd-endpoint-picker"]["spec"]
    labels = found["Deployment", "pd-scheduler"]["spec"]["template"]["metadata"]["labels"]
    assert pool["selector"]["matchLabels"] == labels == found["Service", "pd-join"]["spec"]["selector"]
    reference = pool["endpointPickerRef"]
    assert (reference["name"], reference["port"]["number"]) == ("pd-endpoint-picker", service["ports"][0]["port"])
    assert reference["failureMode"] == PICKERS[at].get("failureMode", "FailOpen")
    workload = found["Deployment", "pd-endpoint-picker"]["spec"]["template"]
    assert service["selector"] == workload["metadata"]["labels"]
    (container,) = workload["spec"]["containers"]
    asked: dict[str, Any] = {}
    monkeypatch.setattr("pd_cluster.extras.gateway.picker_certificate.Certificate", lambda *files: files)
    monkeypatch.setattr(
        "pd_cluster.extras.gateway.picker_server.serve", lambda *given: asked.update(given=given) or _nothing()
    )
    result = CliRunner().invoke(app, [each.partition(" #")[0] for each in container["args"][1:]])
    assert result.exit_code == 0, result.exception
    watch, choice, listening, drain_s = asked["given"]
    assert watch.addresses == [("pd-join", pool["targetPorts"][0]["number"])]
    assert choice.most_requests == PICKERS[at].get("maxRequests", 0)
    assert choice.num_endpoints == 1 + PICKERS[at].get("fallbacks", 0)
    assert (listening.port, listening.certificate is not None) == (service["ports"][0]["targetPort"] and 9002, at == 1)
    (pause_s,) = container["lifecycle"]["preStop"]["exec"]["command"][1:]
    assert workload["spec"]["terminationGracePeriodSeconds"] >= int(pause_s) + drain_s + 10
    policy = found["NetworkPolicy", "pd-scheduler"]["spec"]["ingress"][0]
    assert {"podSelector": {"matchLabels": service["selector"]}} in policy["from"]
    assert found["NetworkPolicy", "pd-endpoint-picker"]["spec"]["ingress"][0]["ports"] == [{"port": 9002}]


def test_the_pods_of_a_unit_start_as_one_group() -> None:
    found = by_name(objects(rendered()[-2 - len(WRONG)]))
    sets = {role: found["StatefulSet", f"pd-{role}"]["spec"] for role in ("prefill", "decode")}
    check_schema(found["StatefulSet", "pd-decode"])
    own = sets["decode"]
    assert (own["replicas"], own["podManagementPolicy"], own["updateStrategy"]) == (4, "Parallel", {"type": "OnDelete"})
    (container,) = own["template"]["spec"]["containers"]
    flags = dict(each.partition("=")[::2] for each in container["args"])
    assert (flags["--data-parallel-size"], flags["--data-parallel-rank"]) == ("4", "$(POD_INDEX)")
    assert "POD_INDEX" in [each["name"] for each in container["env"]]
    assert "data-parallel" not in str(sets["prefill"])
    assert "updateStrategy" not in sets["prefill"]


def test_values_that_nothing_could_be_made_of_are_refused_by_name() -> None:
    for (_, name), texts in zip(WRONG, rendered()[-1 - len(WRONG) : -1], strict=True):
        assert name in texts.get("error", ""), name


async def _nothing() -> None: ...


def by_name(found: list[dict[str, Any]]) -> dict[tuple[str, str], dict[str, Any]]:
    return {(each["kind"], each["metadata"]["name"]): each for each in found}


def in_order(found: dict[str, Any]) -> dict[str, Any]:
    """Returns the object with flags and variables sorted, because a patch appends its own."""
    for container in found["spec"].get("template", {}).get("spec", {}).get("containers", []) if "spec" in found else []:
        container["args"] = [*container["args"][:2], *sorted(container["args"][2:])]
        container["env"] = sorted(container["env"], key=lambda each: str(each["name"]))
    return found


if __name__ == "__main__" and sys.argv[1:] == ["--fix"]:
    for file, text in files().items():
        (KUSTOMIZE / file).write_text(text, encoding="utf-8")
