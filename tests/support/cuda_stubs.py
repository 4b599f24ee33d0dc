"""Makes stubs of CUDA's libraries, so that PyPI's CUDA builds of torch load on machines without CUDA.

    python -m tests.support.cuda_stubs TORCH FOLDER [--tools PREFIX] [--beside FOLDER...] [--change-for-torch-npu]

TORCH is a package folder. FOLDER gets a stub for each library that torch's libraries need and that is missing in TORCH
and in the folders of --beside. All stub functions return an error, so torch finds no device. --tools: a prefix of gcc
and objdump. --change-for-torch-npu: also changes TORCH, a copy of 2.11 or 2.12, so that torch-npu loads beside its CUDA
part.
"""

from __future__ import annotations

import argparse
import re
import subprocess
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

BUILD_TIMEOUT_S = 300
# The parts of pinned_reserve_segment_size_mb and per_process_memory_fraction that the compiler leaves in one piece.
SHARED_SETTINGS = (b"pinned_reserve_s", b"per_process_memo")
NO_CAPTURE = "return False  # no device"
LOOSE = re.compile(r"cu|nccl|nvrtc|nvshmem")  # unversioned functions, for which no library is recorded


@dataclass(slots=True)
class Wanted:
    """The needed libraries, the library of each version, and undefined and defined symbols."""

    libraries: set[str] = field(default_factory=set)
    library_of: dict[str, str] = field(default_factory=dict)  # version -> library
    symbols: set[str] = field(default_factory=set)  # `name` or `name@version`
    known: set[str] = field(default_factory=set)


def output(*command: str) -> list[str]:
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=BUILD_TIMEOUT_S)
    return done.stdout.splitlines()


def read(files: list[Path], objdump: str) -> Wanted:
    wanted = Wanted()
    for file in files:
        library = ""
        for line in output(objdump, "-p", str(file)):
            if match := re.match(r"\s+NEEDED\s+(\S+)", line):
                wanted.libraries.add(match[1])
            elif match := re.match(r"\s*required from (\S+):", line):
                library = match[1]
            elif library and (match := re.match(r"\s+0x[0-9a-f]+ 0x[0-9a-f]+ \d+ (\S+)$", line)):
                wanted.library_of[match[1]] = library
        for which, found in (("--undefined-only", wanted.symbols), ("--defined-only", wanted.known)):
            found |= {line.split()[-1] for line in output("nm", "-D", which, str(file)) if line.split()}
    wanted.known = {name.partition("@")[0] for name in wanted.known}
    return wanted


def write(folder: Path, library: str, versions: dict[str, set[str]], gcc: str) -> None:
    """Writes a library that exports these functions by version ("": unversioned)."""
    functions = sorted(set().union(*versions.values()))
    source = "".join(f"long {name}(void) {{ return 100; }}\n" for name in functions)  # 100 is CUDA's code for no device
    command = [gcc, "-shared", "-fPIC", "-w", "-x", "c", f"-Wl,-soname,{library}", "-o", str(folder / library), "-"]
    script = folder / f"{library}.map"
    nodes = {version: "".join(f"{name};" for name in sorted(own)) for version, own in versions.items() if version}
    if nodes:
        script.write_text(
            "".join(f"{version} {{ {names and 'global: ' + names} }};\n" for version, names in nodes.items())
        )
        command.insert(1, f"-Wl,--version-script={script}")
    subprocess.run(command, input=source, text=True, check=True, timeout=BUILD_TIMEOUT_S)
    script.unlink(missing_ok=True)


def change_for_torch_npu(torch: Path) -> None:
    """Renames allocator settings that both libraries register, and makes the query for a capturing stream work without
    CUDA.

    Raises AssertionError if torch lacks one of the names. Does nothing if torch has been changed already.
    """
    library, source = torch / "lib" / "libc10_cuda.so", torch / "cuda" / "graphs.py"
    code = library.read_bytes()
    for name in SHARED_SETTINGS:
        changed = b"q" + name[1:]
        assert name in code or changed in code, f"{library} has no {name.decode()}"
        code = code.replace(name, changed)
    library.write_bytes(code)
    text = source.read_text("utf-8")
    assert "return _cuda_isCurrentStreamCapturing()" in text or NO_CAPTURE in text, source
    source.write_text(text.replace("return _cuda_isCurrentStreamCapturing()", NO_CAPTURE), "utf-8")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("torch", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--tools", default="")
    parser.add_argument("--beside", type=Path, nargs="*", default=[Path("/usr/lib/x86_64-linux-gnu"), Path("/lib64")])
    parser.add_argument("--change-for-torch-npu", action="store_true")
    given = parser.parse_args()
    if given.change_for_torch_npu:
        change_for_torch_npu(given.torch)
    files = sorted(given.torch.glob("lib/*.so*"))
    wanted = read(files, f"{given.tools}objdump")
    there = {file.name for folder in (given.torch / "lib", *given.beside) for file in folder.glob("*.so*")}
    absent = wanted.libraries - there
    versions: dict[str, dict[str, set[str]]] = {library: defaultdict(set) for library in absent}
    for version, library in wanted.library_of.items():
        if library in absent:
            versions[library][version] = set()
    loose = set()
    for symbol in wanted.symbols:
        name, _, version = symbol.partition("@")
        if library := wanted.library_of.get(version, ""):
            if library in absent:
                versions[library][version].add(name)
        elif not version and name not in wanted.known and LOOSE.match(name):
            loose.add(name)
    given.folder.mkdir(parents=True, exist_ok=True)
    for library in sorted(absent):
        write(given.folder, library, versions[library] or {"": loose}, f"{given.tools}gcc")
    print(f"{len(absent)} stub libraries in {given.folder}")


if __name__ == "__main__":
    main()
