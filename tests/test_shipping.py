"""Where a compile function may live (hazard C27): the right kernel each time, from the pool or, with a reason, not."""

from __future__ import annotations

import pytest

from support.inner import InnerProject

pytestmark = [pytest.mark.light, pytest.mark.slow]

COMPILE_FUNCTION = """
from pytest_quack import jit_cache
from support.light import LightKernel, NAME, log

@jit_cache(backend=NAME)
def compile_it(n):
    log("compile {name}")
    return LightKernel("{name}", {value})
"""


@pytest.mark.parametrize("mode", ["prepend", "append", "importlib"])
def test_in_a_test_file(inner: InnerProject, mode: str) -> None:
    inner.write(
        "test_it.py",
        COMPILE_FUNCTION.format(name="mine", value=3.0) + "\ndef test_it():\n    assert compile_it(1)() == 3.0\n",
    )
    cold, warm = inner.run(f"--import-mode={mode}"), inner.run(f"--import-mode={mode}")
    assert cold.counts == warm.counts == {"passed": 1}, cold.show()
    assert cold.events["compile mine"] == 1
    assert warm.events["compile mine"] == 0


def test_in_conftest(inner: InnerProject) -> None:
    inner.write(
        "conftest.py",
        COMPILE_FUNCTION.format(name="mine", value=3.0)
        + "\nimport pytest\n@pytest.fixture\ndef make():\n    return compile_it\n",
    )
    inner.write(
        "sub/conftest.py",
        COMPILE_FUNCTION.format(name="other", value=4.0)
        + "\nimport pytest\n@pytest.fixture\ndef make():\n    return compile_it\n",
    )
    inner.write("test_it.py", "def test_it(make):\n    assert make(1)() == 3.0\n")
    inner.write("sub/test_sub.py", "def test_sub(make):\n    assert make(1)() == 4.0\n")
    for _ in range(2):
        result = inner.run()
        assert result.counts == {"passed": 2}, result.show()


@pytest.mark.parametrize("mode", ["prepend", "importlib"])
def test_two_files_of_one_name(inner: InnerProject, mode: str) -> None:
    for folder, value in (("a", 3.0), ("b", 4.0)):
        if mode == "prepend":
            inner.write(f"{folder}/__init__.py", "")
        inner.write(
            f"{folder}/test_it.py",
            COMPILE_FUNCTION.format(name=folder, value=value)
            + f"\ndef test_it():\n    assert compile_it(1)() == {value}\n",
        )
    for _ in range(2):
        result = inner.run(f"--import-mode={mode}")
        assert result.counts == {"passed": 2}, result.show()


def test_closures(inner: InnerProject) -> None:
    inner.write(
        "test_it.py",
        """
import pytest
from pytest_quack import jit_cache
from support.light import LightKernel, NAME, log

def make(value):
    @jit_cache(backend=NAME)
    def compile_it(n):
        log(f"compile {value}")
        return LightKernel("closure", value)
    return compile_it

@pytest.mark.parametrize("value", [3.0, 4.0])
def test_it(value):
    assert make(value)(1)() == value
""",
    )
    cold, warm = inner.run(), inner.run()
    assert cold.counts == warm.counts == {"passed": 2}, cold.show()
    assert "defined inside another function" in cold.stdout
    assert sum(cold.events[f"compile {v}"] for v in (3.0, 4.0)) == 2
    assert sum(warm.events[f"compile {v}"] for v in (3.0, 4.0)) == 0


def test_name_bound_to_another_function_at_run_time(inner: InnerProject) -> None:
    inner.write("kernels.py", COMPILE_FUNCTION.format(name="original", value=3.0))
    inner.write(
        "other.py",
        "import kernels\n"
        + COMPILE_FUNCTION.format(name="replacement", value=4.0)
        + "\ncompile_it.__wrapped__.__module__ = 'kernels'\n",
    )
    inner.write(
        "test_it.py",
        """
import kernels

def test_replaced(monkeypatch):
    import other
    monkeypatch.setattr(kernels, "compile_it", other.compile_it)
    assert kernels.compile_it(1)() == 4.0

def test_original():
    assert kernels.compile_it(1)() == 3.0
""",
    )
    for _ in range(2):
        result = inner.run()
        assert result.counts == {"passed": 2}, result.show()


def test_module_that_a_compile_process_cannot_import(inner: InnerProject) -> None:
    inner.write(
        "kernels.py", "import builtins\nbuiltins.set_up_by_conftest\n" + COMPILE_FUNCTION.format(name="mine", value=3.0)
    )
    inner.write("conftest.py", "import builtins\nbuiltins.set_up_by_conftest = True\n")
    inner.write("test_it.py", "import kernels\ndef test_it():\n    assert kernels.compile_it(1)() == 3.0\n")
    cold, warm = inner.run(), inner.run()
    assert cold.counts == warm.counts == {"passed": 1}, cold.show()
    assert "a compile process cannot import it (AttributeError" in cold.stdout, cold.show()
    assert warm.events["compile mine"] == 0


def test_arguments_that_cannot_be_sent(inner: InnerProject) -> None:
    inner.write(
        "test_it.py",
        """
from pytest_quack import jit_cache
from support.light import LightKernel, NAME, log

@jit_cache(backend=NAME)
def compile_it(epilogue):
    log("compile it")
    return LightKernel("it", epilogue(2.0))

def test_it():
    assert compile_it(lambda x: x * 2)() == 4.0
    assert compile_it(lambda x: x * 3)() == 6.0
""",
    )
    cold, warm = inner.run(), inner.run()
    assert cold.counts == warm.counts == {"passed": 1}, cold.show()
    assert "cannot be sent to another process" in cold.stdout
    assert (cold.events["compile it"], warm.events["compile it"]) == (2, 0)
