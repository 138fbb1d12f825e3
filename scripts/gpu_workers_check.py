"""Check on a machine with one or more GPUs what xdist workers get of them, and print a table.

    python scripts/gpu_workers_check.py --json benchmarks/results/gpu_workers.json

Needs torch, pytest-xdist and nvidia-ml-py in the running interpreter and an NVIDIA GPU; for the suite the CuTe DSL too.
Each row is one or more pytest runs in a process of their own.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "benchmarks"), str(ROOT)]

from environment import describe  # noqa: E402 - found through the path above
from gpu_check import run  # noqa: E402 - beside this file

from pytest_quack.gpu.devices import Device, list_devices  # noqa: E402 - as above

PRELUDE = """
import json, os, time
import pytest, torch

def log(**what):
    what.update(worker=os.environ.get("PYTEST_XDIST_WORKER", "controller"), time=time.time())
    with open(os.environ["SIDE_LOG"], "a") as file:
        file.write(json.dumps(what) + "\\n")

def uuids():
    if not torch.cuda.is_available():
        return []
    return [f"GPU-{torch.cuda.get_device_properties(i).uuid}" for i in range(torch.cuda.device_count())]

attempts = {}

def attempt(name):
    attempts[name] = attempts.get(name, 0) + 1
    return attempts[name]
"""
SHOW = """
@pytest.mark.parametrize("number", range(12))
def test_it(number):
    log(uuids=uuids())
    time.sleep(0.05)
"""
KILL = """
@pytest.mark.parametrize("number", range(120))
def test_it(number):
    log(uuids=uuids())
    if number == 3:
        log(killed=True)
        os.kill(os.getpid(), 9)
    time.sleep(0.2)
"""
# Classes, one for each worker, each with a test that needs more than half of a GPU and holds it for a while.
EXCEED = """
def big(number):
    free, total = torch.cuda.mem_get_info()
    log(big=number, attempt=attempt(number), allocated=torch.cuda.memory_allocated(), free=free, uuids=uuids())
    time.sleep(0.5)
    x = torch.empty(int(0.65 * total), dtype=torch.uint8, device="cuda")
    x[:1 << 20] = 1
    time.sleep(2.0)
    assert int(x[:1 << 20].sum()) == 1 << 20
    log(done=number)

def small():
    began = time.time()
    x = torch.ones(1 << 20, device="cuda")
    time.sleep(0.1)
    assert float(x.sum()) == 1 << 20
    log(small=began, uuids=uuids())

def make(number):
    class Test:
        def test_big(self):
            big(number)

        @pytest.mark.parametrize("number", range(12))
        def test_small(self, number):
            small()

    return Test

for _number in range(int(os.environ["BIG"])):
    globals()[f"Test{_number}"] = make(_number)
"""
KINDS = """
import weakref
seen = []

def run_out(kind):
    free, total = torch.cuda.mem_get_info()
    if kind == "torch":
        return torch.empty(4 * total, dtype=torch.uint8, device="cuda")
    if kind == "runtime":
        from cuda.bindings import runtime
        error, pointer = runtime.cudaMalloc(4 * total)
        if error != runtime.cudaError_t.cudaSuccess:
            raise RuntimeError(f"cudaMalloc: {error.name}")
    if kind == "driver":
        from cuda.bindings import driver
        error, pointer = driver.cuMemAlloc(4 * total)
        if error != driver.CUresult.CUDA_SUCCESS:
            raise RuntimeError(f"cuMemAlloc: {error.name}")
    if kind == "dsl":
        from cutlass.base_dsl.runtime import cuda
        from cuda.bindings import driver
        raise cuda.create_cuda_runtime_error(int(driver.CUresult.CUDA_ERROR_OUT_OF_MEMORY))

@pytest.mark.parametrize("kind", ["torch", "runtime", "driver", "dsl"])
def test_kind(kind):
    torch.cuda.init()
    gone = all(reference() is None for reference in seen)
    log(kind=kind, attempt=attempt(kind), allocated=torch.cuda.memory_allocated(), gone=gone)
    held = torch.ones(1 << 28, device="cuda")  # a GiB that the second attempt must not find
    seen.append(weakref.ref(held))
    if attempt(kind + " body") == 1:
        run_out(kind)

def test_that_never_fits():
    log(never=attempt("never"))
    run_out("torch")

@pytest.fixture
def torn_down():
    yield
    held = torch.ones(1 << 28, device="cuda")
    if attempt("torn down") == 1:
        run_out("torch")

def test_teardown(torn_down):
    log(teardown=attempt("teardown"), allocated=torch.cuda.memory_allocated())
"""
CONTROLLER = """
import os

def pytest_sessionfinish(session):
    if "PYTEST_XDIST_WORKER" not in os.environ:
        from pytest_quack.gpu.devices import has_cuda_context
        from test_it import log
        links = []
        for name in os.listdir("/proc/self/fd"):
            try:
                links.append(os.readlink(f"/proc/self/fd/{name}"))
            except OSError:
                pass
        log(context=has_cuda_context(), open=[link for link in links if "nvidia" in link])
"""
INITIALISE = "import torch\ntorch.zeros(1, device='cuda')\n"


class Project:
    """A folder with a test file, and runs in it."""

    def __init__(self, work: Path, name: str, tests: str, conftest: str = "") -> None:
        self.folder = work / re.sub(r"\W", "_", name)
        self.folder.mkdir()
        self.log_path = self.folder / "side.log"
        (self.folder / "test_it.py").write_text(PRELUDE + tests)
        (self.folder / "conftest.py").write_text(conftest)

    def run(self, *arguments: str, **environ: str | None) -> dict[str, Any]:
        self.log_path.write_text("")
        more = {"SIDE_LOG": str(self.log_path), **environ}
        result = run(self.folder, self.folder / "cache", ["-p", "pytest_quack", *arguments], more)
        result["log"] = [json.loads(line) for line in self.log_path.read_text().splitlines()]
        return result


def workers(result: dict[str, Any]) -> dict[str, list[str]]:
    """Which devices each worker saw."""
    return {entry["worker"]: entry["uuids"] for entry in result["log"] if "uuids" in entry}


Check = Callable[[Path, list[Device]], dict[str, Any]]


def check_assignment(work: Path, devices: list[Device]) -> dict[str, Any]:
    """Which device each of some workers sees, for several values of CUDA_VISIBLE_DEVICES."""
    last = devices[-1]
    indices = [str(device.index) for device in devices]
    lists: dict[str, tuple[str | None, list[Device]]] = {
        "unset": (None, devices),
        "all, backwards": (",".join(reversed(indices)), devices[::-1]),
        "the last": (indices[-1], [last]),
        "by UUID": (last.uuids[0], [last]),
        "by short UUID": (last.uuids[0][:12], [last]),
        "with blanks, twice": (f" {indices[-1]} , {indices[-1]} ", [last]),
        "empty": ("", []),
        "-1": ("-1", []),
    }
    project = Project(work, "assignment", SHOW)
    seen: dict[str, Any] = {}
    is_right = True
    number = len(devices) + 1
    for name, (visible, expected) in lists.items():
        result = project.run("-n", str(number), "--async-compile=2", CUDA_VISIBLE_DEVICES=visible)
        found = workers(result)
        ours = [[expected[i % len(expected)].uuids[0]] if expected else [] for i in range(number)]
        counts = Counter(uuid for uuids in found.values() for uuid in uuids)
        is_even = not counts or max(counts.values()) - min(counts.values()) <= 1
        in_order = [found.get(f"gw{i}") for i in range(min(number, max(1, len(expected))))]
        right = result["status"] == 0 and in_order == ours[: len(in_order)] and is_even and len(found) == number
        seen[name] = {"visible": visible, "workers": found, "is_right": right}
        if not right:
            print(result["output"], found, ours)
        is_right = is_right and right
    return {"is_right": is_right, "seen": seen}


def check_replacement(work: Path, devices: list[Device]) -> dict[str, Any]:
    """A worker is killed: its replacement sees the same device."""
    arguments = ("-n", str(max(2, len(devices))), "--maxschedchunk=1", "--async-compile=2")
    result = Project(work, "replacement", KILL).run(*arguments)
    (killed,) = [entry["worker"] for entry in result["log"] if entry.get("killed")]
    found = workers(result)
    newest = f"gw{max(2, len(devices))}"
    is_right = result["counts"] == {"failed": 1, "passed": 119} and found.get(newest) == found[killed]
    if not is_right:
        print(result["output"], found)
    return {"is_right": is_right, "killed": killed, "workers": found}


def check_controller(work: Path, devices: list[Device]) -> dict[str, Any]:
    """The controller holds no device when the run is over, and refuses to run where a conftest has taken one."""
    result = Project(work, "controller", SHOW, CONTROLLER).run("-n", "2", "--async-compile=2")
    (own,) = [entry for entry in result["log"] if "context" in entry]
    refused = Project(work, "refused", SHOW, INITIALISE).run("-n", "2", "--async-compile=2")
    allowed = Project(work, "allowed", SHOW, INITIALISE).run("-n", "2", "--async-compile=2", "--gpus-per-worker=0")
    text = "CUDA has been initialised in the controller of this run, by"
    is_right = result["status"] == 0 and not own["context"] and not own["open"]
    is_right = is_right and refused["status"] == 4 and text in refused["output"] and "conftest.py" in refused["output"]
    is_right = is_right and allowed["status"] == 0
    if not is_right:
        print(result["output"], own, refused["output"], allowed["output"])
    return {"is_right": is_right, "context": own["context"], "open": own["open"]}


def check_memory_asked_for(work: Path, devices: list[Device]) -> dict[str, Any]:
    """--gpu-min-free, and -n auto."""
    project = Project(work, "free", SHOW)
    enough = project.run("-n", "auto", "--workers-per-gpu=2", "--async-compile=2", "--gpu-min-free=10GB")
    too_much = project.run("-n", "auto", "--async-compile=2", "--gpu-min-free=900GB", "--gpu-wait=2")
    number = 2 * len(devices)
    is_right = f"{number} workers" in enough["output"] or f"{number}/{number} workers" in enough["output"]
    is_right = enough["status"] == 0 and (is_right or len(workers(enough)) == number)
    is_right = is_right and too_much["status"] == 4 and "no GPU has 900.0 GB free" in too_much["output"]
    if not is_right:
        print(enough["output"], too_much["output"])
    return {"is_right": is_right, "workers": len(workers(enough))}


def check_exceed(work: Path, devices: list[Device]) -> dict[str, Any]:
    """Workers whose tests together need more than each GPU has: all pass, and only their own GPU is held up."""
    number = 2 * len(devices)
    result = Project(work, "exceed", EXCEED).run(
        "-n", str(number), "--dist=loadscope", "--async-compile=2", BIG=str(number), CUDA_VISIBLE_DEVICES=None
    )
    attempts = Counter(entry["big"] for entry in result["log"] if "big" in entry)
    again = [entry for entry in result["log"] if entry.get("attempt", 0) > 1]
    kept = [entry["allocated"] for entry in again]
    is_right = result["status"] == 0 and result["counts"] == {"passed": 13 * number}
    is_right = is_right and sum(attempts.values()) > number and not any(kept)
    summary = re.findall(r"out of device memory: .*|.* was run again, .*", result["output"])
    if not is_right:
        print(result["output"], result["log"])
    return {"is_right": is_right, "attempts": attempts, "allocated_before_retry": kept, "summary": summary}


def check_kinds(work: Path, devices: list[Device]) -> dict[str, Any]:
    """Each way to run out of memory; nothing of the first attempt is left; what never fits fails."""
    result = Project(work, "kinds", KINDS).run("--async-compile=2")
    again = [entry for entry in result["log"] if entry.get("attempt", 0) == 2]
    is_right = result["counts"] == {"failed": 1, "passed": 5} and len(again) == 4
    is_right = is_right and all(entry["gone"] and not entry["allocated"] for entry in again)
    is_right = is_right and [entry["never"] for entry in result["log"] if "never" in entry] == [1, 2]
    teardowns = [(entry["teardown"], entry["allocated"]) for entry in result["log"] if "teardown" in entry]
    is_right = is_right and teardowns == [(1, 0), (2, 0)]
    if not is_right:
        print(result["output"], result["log"])
    return {"is_right": is_right, "summary": re.findall(r".* was run again, .*", result["output"])}


def check_suite(work: Path, devices: list[Device]) -> dict[str, Any]:
    """The kernel suite with several workers and one pool: cold, then warm."""
    runs: dict[str, dict[str, Any]] = {}
    numbers = {"0", "4"} | ({"auto"} if len(devices) > 1 else set())
    for number in sorted(numbers):
        folder = work / f"suite_{number}"
        folder.mkdir()
        arguments = ("-p", "pytest_quack", "-n", number, "--async-compile=16", "--pyargs", "quack_kernels")
        for phase in ("cold", "warm"):
            result = run(folder, folder / "cache", arguments, {})
            if result["status"]:
                print(result["output"][-6000:])
            del result["output"]
            runs[f"-n {number}, {phase}"] = result
            print(f"suite -n {number}, {phase}: {result}", flush=True)
    is_right = all(result["status"] == 0 for result in runs.values())
    is_right = is_right and all(one["submitted"] == 0 for name, one in runs.items() if name.endswith("warm"))
    return {"is_right": is_right, "runs": runs}


CHECKS: dict[str, Check] = {
    "assignment": check_assignment,
    "replacement": check_replacement,
    "controller": check_controller,
    "memory": check_memory_asked_for,
    "exceed": check_exceed,
    "kinds": check_kinds,
    "suite": check_suite,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the result here")
    parser.add_argument("--only", nargs="+", choices=CHECKS, default=list(CHECKS))
    args = parser.parse_args()
    devices = list_devices()
    if not devices:
        parser.error("there is no GPU here")
    rows: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory(prefix="gpu-workers-") as folder:
        for name in args.only:
            rows[name] = CHECKS[name](Path(folder), devices)
            print(f"{name}: {rows[name]['is_right']}", flush=True)
            if args.json:
                gpus = [device.model for device in devices]
                args.json.write_text(json.dumps({**describe(), "gpus": gpus, "checks": rows}, indent=1) + "\n")
    print(f"\n{'check':14} right   on {len(devices)} x {devices[0].model}")
    for name, row in rows.items():
        print(f"{name:14} {row['is_right']!s:7} {(CHECKS[name].__doc__ or '').strip()}")
    for name, result in rows.get("suite", {}).get("runs", {}).items():
        print(f"  {name:14} {result['wall_s']:7.2f} s  {result['submitted']:4d} submitted  {result['counts']}")
    if not all(row["is_right"] for row in rows.values()):
        sys.exit(1)


if __name__ == "__main__":
    main()
