"""GPUs of xdist workers, end to end: whole runs on a machine whose GPUs a stub of NVML's Python binding lists."""

from __future__ import annotations

import json

import pytest

from support import nvml_stub
from support.inner import InnerProject, InnerResult

pytest.importorskip("xdist", reason="needs pytest-xdist")
pytestmark = [pytest.mark.light, pytest.mark.slow]

FOUR = [{"uuid": f"GPU-{index}"} for index in range(4)]
# Stands for torch, as far as it decides once, at the first question, which devices there are.
TORCH = """
    import os, types
    frozen = []

    def device_count():
        if not frozen:
            frozen.append(os.environ.get("CUDA_VISIBLE_DEVICES"))
        return 1

    def init():
        if "PYTEST_XDIST_WORKER" not in os.environ:
            state.append(1)

    state = []
    cuda = types.SimpleNamespace(
        device_count=device_count, is_available=lambda: device_count() > 0, init=init,
        is_initialized=lambda: bool(state),
    )
"""
SHOW = """
    import os, time
    import pytest
    from support import light

    @pytest.mark.parametrize("number", range(8))
    def test_it(number):
        names = ("PYTEST_XDIST_WORKER", "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "QUACK_RUN_GPUS")
        light.log(" ".join(str(os.environ.get(name)) for name in names))
        time.sleep(0.05)
"""


@pytest.fixture
def machine(inner: InnerProject) -> InnerProject:
    nvml_stub.write_to(inner.root)
    inner.environ["NVML_STUB"] = json.dumps(FOUR)
    return inner


def devices(result: InnerResult) -> dict[str, str]:
    """What each worker saw: its devices, the order of devices, and those of the run."""
    seen = {event.partition(" ")[0]: event.partition(" ")[2] for event in result.events if event.startswith("gw")}
    assert len(seen) == len({event for event in result.events if event.startswith("gw")}), result.show()
    return seen


@pytest.mark.parametrize(
    ("visible", "expected"),
    [
        ("2,3", ["2 None 2,3", "3 None 2,3", "2 None 2,3"]),
        ("", [" None None"] * 3),
        (None, [f"{index} PCI_BUS_ID 0,1,2,3" for index in range(3)]),
    ],
)
def test_each_worker_has_its_own(machine: InnerProject, visible: str | None, expected: list[str]) -> None:
    machine.write("test_it.py", SHOW)
    if visible is not None:
        machine.environ["CUDA_VISIBLE_DEVICES"] = visible
    result = machine.run("-n", "3")
    assert result.counts == {"passed": 8}, result.show()
    assert devices(result) == {f"gw{index}": text for index, text in enumerate(expected)}
    assert ("GPUs for workers" in result.stdout) == (visible != "")


@pytest.mark.parametrize(
    ("arguments", "environ", "workers"),
    [
        (("--workers-per-gpu=2",), {"CUDA_VISIBLE_DEVICES": "3,1"}, {"3": 2, "1": 2}),
        (("--gpus-per-worker=2",), {}, {"0,1": 1, "2,3": 1}),
        (("--maxprocesses=1",), {}, {"0": 1}),
        ((), {"PYTEST_XDIST_AUTO_NUM_WORKERS": "2"}, {"0": 1, "1": 1}),
        ((), {"CUDA_VISIBLE_DEVICES": "", "PYTEST_XDIST_AUTO_NUM_WORKERS": "1"}, {"": 1}),
    ],
)
def test_auto_means_gpus_times_workers(
    machine: InnerProject, arguments: tuple[str, ...], environ: dict[str, str], workers: dict[str, int]
) -> None:
    machine.write("test_it.py", SHOW)
    machine.environ.update(environ)
    result = machine.run("-n", "auto", *arguments)
    assert result.counts == {"passed": 8}, result.show()
    number = sum(workers.values())
    assert f"{number} worker" in result.stdout, result.show()
    seen = [text.rsplit(" ", 2)[0] for text in devices(result).values()]
    assert {name: seen.count(name) for name in workers} == workers
    assert len(seen) == number


@pytest.mark.parametrize("arguments", [("-n", "logical"), ("-n", "auto", "--gpus-per-worker=0"), ("-n", "auto")])
def test_auto_is_xdists_own_where_nobody_asks_for_gpus(machine: InnerProject, arguments: tuple[str, ...]) -> None:
    """Or where a conftest says how many."""
    machine.write("test_it.py", SHOW)
    machine.write(
        "conftest.py",
        """
        from pytest_quack import plugin

        def pytest_xdist_auto_num_workers(config):
            return 2
        """,
    )
    result = machine.run(*arguments)
    assert "2 workers" in result.stdout, result.show()
    assert result.counts == {"passed": 8}


def test_without_the_pool_gpus_are_assigned_where_they_are_asked_for(machine: InnerProject) -> None:
    machine.write("test_it.py", SHOW)
    assert set(devices(machine.run("-n", "2", jobs=None)).values()) == {"None None None"}
    asked = machine.run("-n", "2", "--gpus-per-worker=1", jobs=None)
    assert [text.split()[0] for text in sorted(devices(asked).values())] == ["0", "1"], asked.show()
    switched_off = machine.run("-n", "2", "--gpus-per-worker=0")
    assert set(devices(switched_off).values()) == {"None None None"}


def test_replacement_has_the_device_of_the_worker_it_replaces(machine: InnerProject) -> None:
    machine.write(
        "test_it.py",
        SHOW
        + """
    def test_that_kills_its_worker():
        light.log(f"killed {os.environ['CUDA_VISIBLE_DEVICES']}")
        os.kill(os.getpid(), 9)

    @pytest.mark.parametrize("number", range(20))
    def test_after(number):
        test_it(number)
        time.sleep(0.1)
    """,
    )
    result = machine.run("-n", "2", timeout_s=60)
    assert result.counts == {"failed": 1, "passed": 28}, result.show()
    (killed,) = [event.split()[1] for event in result.events if event.startswith("killed")]
    seen = devices(result)
    assert len(seen) == 3, result.show()
    assert seen["gw2"].split()[0] == killed
    assert sorted(text.split()[0] for name, text in seen.items() if name != "gw2") == ["0", "1"]


LOADED = {
    "by -p": ((), {}, {}),
    "by addopts": ((), {"pytest.ini": "[pytest]\naddopts = -p no:cacheprovider -p pytest_quack\n"}, {}),
    "by pytest_plugins": ((), {"conftest.py": "import frozen\npytest_plugins = ['pytest_quack']\n"}, {}),
    "after a plugin": (("-p", "frozen"), {}, {}),
}


@pytest.mark.parametrize("how", LOADED)
def test_devices_are_there_before_anything_can_ask_for_them(machine: InnerProject, how: str) -> None:
    arguments, files, environ = LOADED[how]
    machine.write("torch.py", TORCH)
    machine.write("frozen.py", "import torch\ntorch.cuda.device_count()\n")
    machine.write("conftest.py", "import frozen\n")
    for name, text in files.items():
        machine.write(name, text)
    machine.environ.update(environ)
    machine.write(
        "test_it.py",
        """
        import os, time
        import pytest
        import torch

        @pytest.mark.parametrize("number", range(8))
        def test_it(number):
            assert torch.frozen == [os.environ["CUDA_VISIBLE_DEVICES"]]
            time.sleep(0.02)
        """,
    )
    result = machine.run("-n", "4", *arguments, has_plugin=how not in {"by addopts", "by pytest_plugins"})
    assert result.counts == {"passed": 8}, result.show()


INITIALISE = "import torch\ntorch.cuda.init()\n"
CULPRITS = {
    "conftest": ({"conftest.py": INITIALISE}, (), "conftest.py"),
    "plugin after ours": ({"culprit.py": INITIALISE}, ("-p", "culprit"), "by culprit ("),
    "plugin of a conftest": (
        {"culprit.py": INITIALISE, "conftest.py": "pytest_plugins = ['culprit']\n"},
        (),
        "by culprit (",
    ),
    "hook": (
        {"culprit.py": "import torch\ndef pytest_configure(config): torch.cuda.init()\n"},
        ("-p", "culprit"),
        "culprit (",
    ),
}


@pytest.mark.parametrize("what", CULPRITS)
def test_who_has_initialised_cuda_in_the_controller_is_named(machine: InnerProject, what: str) -> None:
    files, arguments, named = CULPRITS[what]
    machine.write("torch.py", TORCH)
    machine.write("innocent.py", "import torch\ntorch.cuda.is_available()\n")
    for name, text in files.items():
        machine.write(name, text)
    machine.write("test_it.py", SHOW)
    result = machine.run("-p", "innocent", *arguments, "-n", "2")
    assert result.status == 4, result.show()
    assert "CUDA has been initialised in the controller of this run, by" in result.stderr
    assert named in result.stderr
    assert "innocent" not in result.stderr
    assert "--gpus-per-worker=0" in result.stderr
    allowed = machine.run("-p", "innocent", *arguments, "-n", "2", "--gpus-per-worker=0")
    assert allowed.counts == {"passed": 8}, allowed.show()


def test_plugin_that_came_before_us_is_named(machine: InnerProject) -> None:
    machine.write("torch.py", TORCH)
    machine.write("culprit.py", INITIALISE)
    machine.write("test_it.py", SHOW)
    result = machine.run("-p", "culprit", "-p", "pytest_quack", "-n", "2", has_plugin=False)
    assert result.status == 4, result.show()
    assert "by culprit (" in result.stderr


def test_too_little_free_memory_ends_the_run_and_waiting_helps(machine: InnerProject) -> None:
    listing = machine.root / "gpus.json"
    listing.write_text(json.dumps([{"uuid": "GPU-a", "free": 3}, {"uuid": "GPU-b", "free": 5}]))
    machine.environ["NVML_STUB_FILE"] = str(listing)
    machine.write("test_it.py", SHOW)
    result = machine.run("-n", "auto", "--gpu-min-free=20GB")
    assert result.status == 4, result.show()
    assert "no GPU has 20.0 GB free, as --gpu-min-free asks: 0 (Stub H200, 3.2 GB of 85.9 GB free), 1 " in result.stderr
    machine.write(
        "later.py",
        f"""
        import json, threading, time

        def change():
            time.sleep(1.0)
            gpus = [{{"uuid": "GPU-a", "free": 3}}, {{"uuid": "GPU-b", "free": 50}}]
            open({str(listing)!r} + ".new", "w").write(json.dumps(gpus))
            import os
            os.rename({str(listing)!r} + ".new", {str(listing)!r})

        threading.Thread(target=change, daemon=True).start()
        """,
    )
    result = machine.run("-p", "later", "-n", "auto", "--gpu-min-free=20GB", "--gpu-wait=30")
    assert result.counts == {"passed": 8}, result.show()
    assert {text.split()[0] for text in devices(result).values()} == {"1"}
    assert "waiting up to 30 s: no GPU has 20.0 GB free" in result.stderr


OUT_OF_MEMORY = """
    import os, time
    import pytest
    from support import light

    def attempts(count=[]):
        count.append(1)
        return len(count)

    def span(name, seconds):
        began = time.monotonic()
        time.sleep(seconds)
        light.log(f"span {os.environ['CUDA_VISIBLE_DEVICES']} {name} {began} {time.monotonic()}")

    def test_that_runs_out():
        if attempts() == 1:
            raise RuntimeError("CUDA error: out of memory")
        if os.environ.get("DIES"):
            os.kill(os.getpid(), 9)
        span("alone", 1.0)

    @pytest.mark.parametrize("number", range(30))
    def test_other(number):
        span("other", 0.1)
        if number % 3 == 0:
            assert light.build(f"k{number}", seconds=0.2)() == 1.0
"""


@pytest.mark.parametrize("gpus", [1, 2])
def test_retry_has_its_gpu_alone_and_holds_up_no_other(machine: InnerProject, gpus: int) -> None:
    machine.environ["NVML_STUB"] = json.dumps(FOUR[:gpus])
    machine.write("test_it.py", OUT_OF_MEMORY)
    result = machine.run("-n", "2" if gpus == 1 else "4")
    assert result.counts == {"passed": 31}, result.show()
    spans = [event.split()[1:] for event in result.events if event.startswith("span")]
    ((gpu, _, begin, end),) = [span for span in spans if span[1] == "alone"]
    others = [span for span in spans if span[1] == "other"]
    overlapping = [s for s in others if float(s[2]) < float(end) and float(s[3]) > float(begin)]
    assert not any(span[0] == gpu for span in overlapping), result.show()
    assert bool(overlapping) == (gpus == 2), result.show()
    assert "out of device memory: 1 attempt" in result.stdout


def test_worker_that_dies_while_it_has_a_gpu_alone_holds_up_nobody(machine: InnerProject) -> None:
    machine.environ.update(NVML_STUB=json.dumps(FOUR[:1]), DIES="1")
    machine.write("test_it.py", OUT_OF_MEMORY)
    result = machine.run("-n", "2", timeout_s=90)
    assert result.counts == {"failed": 1, "passed": 30}, result.show()
    assert "FAILED test_it.py::test_that_runs_out" in result.stdout
