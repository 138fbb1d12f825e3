"""A suite whose worker is killed while several of its tests are put off, and what must become of each test then."""

from __future__ import annotations

from collections import Counter
from typing import Final

from support.inner import InnerProject, InnerResult

SCHEDULERS: Final = ("load", "worksteal", "loadscope", "loadfile", "loadgroup", "each")
# When the worker is killed: in the first attempt of a test, in the last one, or while no test runs.
MOMENTS: Final = ("first attempt", "last attempt", "between")
FILES: Final = 4
TESTS_PER_FILE: Final = 12
LEAST_PUT_OFF: Final = 5

_STATE: Final = """
    import os, signal, threading, time

    from support import light

    put_off = set()
    running = []

    def kill_once():
        try:
            os.close(os.open(os.environ["SIDE_LOG"] + ".killed", os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return
        light.log(f"killed with {len(put_off)} put off")
        os.kill(os.getpid(), signal.SIGKILL)

    def kill_between():
        idle = 0
        while True:
            time.sleep(0.002)
            idle = 0 if running else idle + 1
            if len(put_off) >= LEAST and idle > 15:  # so that nothing of a test is left to do
                kill_once()
"""
_CONFTEST: Final = """
    import os, threading
    import pytest
    import state

    if os.environ["MOMENT"] == "between" and "PYTEST_XDIST_WORKER" in os.environ:
        threading.Thread(target=state.kill_between, daemon=True).start()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol():
        state.running.append(1)
        try:
            return (yield)
        finally:
            state.running.clear()
"""
_TESTS: Final = """
    import os
    import pytest
    import state
    from support import light

    @pytest.mark.parametrize("number", range(TESTS))
    def test_kernel(number):
        name = f"{__name__}-{number}"
        is_last = name in state.put_off
        if len(state.put_off) >= LEAST and os.environ["MOMENT"] == ("last attempt" if is_last else "first attempt"):
            state.kill_once()
        state.put_off.add(name)
        assert light.build(name, seconds=0.3)() == 1.0
        state.put_off.discard(name)
"""


def write_suite(inner: InnerProject) -> None:
    """Write it; there are `FILES` times `TESTS_PER_FILE` tests, each with a kernel of its own."""
    inner.write("state.py", _STATE.replace("LEAST", str(LEAST_PUT_OFF)))
    inner.write("conftest.py", _CONFTEST)
    for number in range(FILES):
        text = _TESTS.replace("LEAST", str(LEAST_PUT_OFF)).replace("TESTS)", f"{TESTS_PER_FILE})")
        inner.write(f"test_{number}.py", text)


def run(inner: InnerProject, scheduler: str, moment: str) -> InnerResult:
    """Run it with two workers, of which one is killed. Raises subprocess.TimeoutExpired where the run hangs."""
    (inner.log_path.parent / (inner.log_path.name + ".killed")).unlink(missing_ok=True)
    inner.environ["MOMENT"] = moment
    return inner.run("-n", "2", "--dist", scheduler, jobs="8", timeout_s=90)


def faults(result: InnerResult, scheduler: str, moment: str) -> list[str]:
    """What is wrong with the outcomes of a run; nothing where all is well."""
    tests = FILES * TESTS_PER_FILE
    total = tests * (2 if scheduler == "each" else 1)
    failed = int(moment != "between")
    found = []
    if not any(event.startswith("killed with") for event in result.events):
        found.append("no worker was killed")
    if result.status != failed:
        found.append(f"exit status {result.status}")
    expected = {"passed": total - failed, **({"failed": failed} if failed else {})}
    if result.counts != expected:
        found.append(f"outcomes {result.counts} instead of {expected}")
    times = Counter(len(kinds) for kinds in result.outcomes.values())
    if len(result.outcomes) != tests or any(number != total // tests for number in times):
        found.append(f"tests by their number of outcomes: {dict(times)}")
    return found
