"""Modules import only lower layers, and heavy or restricted modules only where allowed."""

from __future__ import annotations

import ast
import functools
import graphlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "pd_cluster"

# Each layer may import the layers listed before it; names in one layer do not import each other.
LAYERS: list[tuple[str, ...]] = [
    ("errors",),
    ("extra_table", "output_files", "private_files"),
    ("host", "native"),
    ("types",),
    ("costs", "media", "numerics", "parsers", "result_tables"),
    ("wire",),
    ("process_messages",),
    ("settings",),
    ("checkpoints", "devices", "net"),
    ("kv", "logits_processors", "text"),
    ("model",),
    ("transport",),
    ("engine",),
    ("cluster",),
    ("client", "service"),
    ("api", "bench"),
    ("offline", "simulate"),
    ("plan",),
    ("commands",),
    ("extras",),
    ("__main__",),
]
# Places are modules or packages of pd_cluster.
ONLY_IN = {
    "fastapi": ("api", "extras.dashboard", "extras.resumable_streams"),
    "fastapi_offline": ("api",),
    "starlette": ("api", "extras.dashboard"),
    "uvicorn": ("api",),
    "transformers": ("model", "extras.quantize"),
    "torch": (
        *("kv", "native", "transport", "model", "engine", "devices"),
        *("logits_processors", "offline.local_engine", "extras.encoders", "extras.quantize"),
    ),
    "zmq": ("net",),
    "llguidance": ("text.grammar",),
    "jinja2": ("text.chat_template", "text.template_roles"),
    "tokenizers": ("text",),
    "typer": ("commands", "extras"),
    "matplotlib": ("commands.trace.timeline_png", "commands.load_chart", "commands.compare_chart"),
    "tqdm": ("offline.progress_bar",),
    "triton": ("model.kernels.cuda", "kv.copy_kernel"),
    "PIL": ("media",),
    "python_multipart": ("api.files.multipart_form",),
    "cryptography": ("extras.node_keys.node_proofs", "kv.block_seal"),
    "redis": ("kv.shared_store",),
    "grpc": ("extras.gateway.picker_server",),
    "google": ("extras.gateway.messages_pb2",),
    "av": ("media",),
    "opentelemetry": ("service.request_traces",),
    "flashinfer": ("model.kernels.cuda.attention.flashinfer",),
    "fla": ("model.kernels.cuda.states.fla_chunks",),
    "guidellm": ("bench.load.guidellm_plugin",),
}
TORCH_FREE = [
    "pd_cluster.service.guides.guide_child",
    "pd_cluster.api.scheduler_app",
    "pd_cluster.service.prompts.template_child",
    "pd_cluster.service.media.media_child",
    "pd_cluster.api.worker_app",
    "pd_cluster.commands.cli",
    "pd_cluster.devices.hccl_environment",
    "pd_cluster.extras.gateway.picker_server",
    "pd_cluster.offline.batch_job",
    "pd_cluster.commands.serve_command",
]
SCHEDULER = "pd_cluster.api.scheduler_app"
HEAVY = ("torch", "transformers", "llguidance")
ROLES = {  # what each role's process imports at its start
    "up": "import pd_cluster.commands.cli, pd_cluster.cluster.processes.launcher",
    "worker's parent": "import pd_cluster.commands.cli, pd_cluster.commands.serve_command, pd_cluster.api.worker_app",
    "scheduler": "import pd_cluster.commands.cli, pd_cluster.commands.serve_command, pd_cluster.api.scheduler_app",
    "rank process": (
        "from pd_cluster.engine.start.rank_main import import_engine; import_engine(light=True)\n"
        "from pd_cluster.model.loading.light_transformers import import_architecture; import_architecture('llama')"
    ),
}
# Top-level packages imported by these, besides the standard library.
COMMON = {"anyio", "idna", "jinja2", "markupsafe", "msgspec", "pd_cluster", "ranktable_tools", "typing_extensions"}
COMMAND = {"annotated_doc", "click", "httptools", "shellingham", "starlette", "typer", "uvicorn"}
ALLOWED = {
    "up": COMMON | COMMAND,
    "worker's parent": COMMON | COMMAND,
    "scheduler": {
        *(*COMMON, *COMMAND, "annotated_types", "fastapi", "fastapi_offline", "httpx", "opentelemetry", "pydantic"),
        *("prometheus_client", "pydantic_core", "pygments", "rich", "tokenizers", "typing_inspection", "zmq"),
    },
    "rank process": {
        *(*COMMON, "filelock", "h11", "httpcore2", "httpx2", "huggingface_hub", "llguidance", "numpy", "packaging"),
        *("regex", "safetensors", "tokenizers", "torch", "torchgen", "tqdm", "transformers", "truststore"),
        *("xxhash", "yaml", "zmq"),
    },
}
TRACES = {"opentelemetry.sdk", "opentelemetry.exporter"}  # imported only with --otlp-traces-endpoint
NOT_IN_A_RANK = {"sympy", "torch._dynamo.convert_frame", "torch.distributed.fsdp", "torch.distributed.tensor"}
# Optional packages that the libraries above import if they are installed.
CHANCE = {"PIL", "accelerate", "charset_normalizer", "cython_runtime", "dill", "h11", "httpcore", "httpx", "orjson"}
CHANCE |= {"psutil", "python_multipart", "sklearn", "sniffio", "triton", "zstandard", "opentelemetry", "google"}
CHANCE |= {"sitecustomize"}  # from Debian's Python


def modules() -> Iterator[tuple[str, Path]]:
    for file in sorted(PACKAGE.rglob("*.py")):
        yield ".".join(file.relative_to(ROOT).with_suffix("").parts), file


@functools.cache
def imports_of(file: Path) -> set[str]:
    found: set[str] = set()
    for node in statements(ast.parse(file.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            of = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {name if _is_module(name) else node.module for name in of}
    return found


def _is_module(name: str) -> bool:
    path = ROOT / Path(*name.split("."))
    return name.startswith("pd_cluster.") and (path.with_suffix(".py").exists() or (path / "__init__.py").exists())


def statements(node: ast.AST) -> Iterator[ast.AST]:
    """Yields all nested statements; skips expressions, which have no imports."""
    for part in ("body", "orelse", "finalbody", "handlers", "cases"):
        for child in getattr(node, part, ()):
            yield child
            yield from statements(child)


def layer_of(module: str) -> int | None:
    part = module.split(".")[1] if "." in module else ""
    return next((at for at, layer in enumerate(LAYERS) if part in layer), None)


def test_imports_point_downward() -> None:
    for module, file in modules():
        if module == "pd_cluster.__init__":
            assert not {name for name in imports_of(file) if name.startswith("pd_cluster.")}
            continue
        own = layer_of(module)
        assert own is not None, f"{module} is in no layer: add it to LAYERS and to docs/architecture.md"
        for name in imports_of(file):
            if name.startswith("pd_cluster."):
                other = layer_of(name)
                assert other is not None, f"{module} imports {name}, which is in no layer"
                assert other <= own, f"{module} imports {name}, which is a layer above it"
                is_same = other < own or name.split(".")[1] == module.split(".")[1]
                assert is_same, f"{module} imports {name}, which is in the same layer"
            top = name.split(".")[0]
            assert top not in ("benchmarks", "tests"), f"{module} imports {name}, which is not installed"
            if top in ONLY_IN:
                places = tuple(f"pd_cluster.{place}." for place in ONLY_IN[top])
                assert f"{module}.".startswith(places), f"{module} imports {name}; only {ONLY_IN[top]} may"


def room_of(module: str) -> str:
    """Returns a module's subpackage within its layer, or the module itself if it is in none."""
    parts = module.removesuffix(".__init__").split(".")
    is_package = (ROOT / Path(*parts[:3])).is_dir()
    return ".".join(parts[:3]) if len(parts) > 3 or is_package else module.removesuffix(".__init__")


def test_no_circles() -> None:
    """Neither modules nor packages import each other in cycles, at any depth."""
    known = {name for name, _ in modules()}
    of_modules: dict[str, set[str]] = {}
    of_rooms: dict[str, set[str]] = {}
    for module, file in modules():
        found, room = imports_of(file) & known, room_of(module)
        of_modules[module] = found - {module}
        of_rooms.setdefault(room, set()).update({room_of(name) for name in found} - {room})
    for graph in (of_modules, of_rooms):
        graphlib.TopologicalSorter(graph).prepare()  # raises CycleError, which names the cycle


def test_rank_table_tools_import_nothing_of_the_cluster() -> None:
    for file in (ROOT / "ranktable_tools").rglob("*.py"):
        assert not [name for name in imports_of(file) if name.split(".")[0] == "pd_cluster"], file


@functools.cache
def heavy_after() -> dict[str, list[str]]:
    """Returns module -> heavy modules loaded after it; one process imports them in order, the scheduler's first."""
    code = "import importlib, sys\nfor name in sys.argv[1:]:\n    importlib.import_module(name)\n"
    code += f"    print(name, *(heavy for heavy in {HEAVY} if heavy in sys.modules))"
    command = [sys.executable, "-c", code, SCHEDULER, *(name for name in TORCH_FREE if name != SCHEDULER)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    return {name: heavy for name, *heavy in map(str.split, done.stdout.splitlines())}


def test_scheduler_and_parents_never_import_torch_and_leave_guides_to_children() -> None:
    assert [module for module, heavy in heavy_after().items() if {"torch", "transformers"} & {*heavy}] == []
    assert "llguidance" not in heavy_after()[SCHEDULER]
    assert "llguidance" in heavy_after()["pd_cluster.service.guides.guide_child"]


def test_nothing_is_pickled_and_torch_names_accelerators_in_one_file() -> None:
    """The source contains no pickle calls, and names torch's accelerators in one file only."""
    words = ("pickle", "marshal", "dill", "torch.load(")
    for file in (*PACKAGE.rglob("*.py"), *(ROOT / "ranktable_tools").rglob("*.py")):
        text = file.read_text("utf-8")
        names = () if file == PACKAGE / "devices" / "device.py" else ("torch.cuda", "torch.npu")
        assert not any(word in text for word in (*words, *names)), file


@pytest.mark.parametrize("role", ALLOWED)
def test_a_role_imports_no_more_than_it_needs(role: str) -> None:
    code = f"import sys\n{ROLES[role]}\nprint(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=100)
    modules = {*done.stdout.split()}
    packages = {name.split(".")[0] for name in modules} - sys.stdlib_module_names
    assert {name for name in packages if not name.startswith("_")} <= ALLOWED[role] | CHANCE
    assert "pd_cluster.errors" in modules
    assert role != "rank process" or not NOT_IN_A_RANK & modules
    assert not TRACES & modules
