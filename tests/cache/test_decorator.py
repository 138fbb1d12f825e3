"""`jit_cache`: memory, then the store, then one compile; never a kernel that was made for something else."""

from __future__ import annotations

import json
import subprocess
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import filelock
import pytest

from pytest_quack import jit_cache
from pytest_quack.cache.decorator import ATTRIBUTE, JitFunction
from pytest_quack.cache.store import LockTimeoutError
from pytest_quack.errors import CacheDirectoryError, ExportError
from pytest_quack.runtime import Runtime, replace_runtime
from pytest_quack.settings import Settings
from support.fresh import FreshProject
from support.light import NAME, LightKernel, log

pytestmark = [pytest.mark.light, pytest.mark.slow]

compiled: list[Any] = []


@pytest.fixture(autouse=True)
def forget(runtime: Runtime) -> None:
    compiled.clear()
    kept.clear()
    for function in (build, build_two, fail, bad_export, slow, keep, sometimes):
        clear(function)


def clear(function: Any) -> None:
    function.cache_clear()


@jit_cache(backend=NAME, ignore=["compiled"])
def build(a: Any, *, b: Any = None) -> Callable[..., float]:
    """The docstring."""
    compiled.append((a, b))
    log("compile")
    return LightKernel(f"{a!r} {b!r}", 0.0)


@jit_cache(backend=NAME, ignore=["compiled"])
def build_two(a: Any, b: Any) -> Callable[..., float]:
    compiled.append((a, b))
    return LightKernel(f"{a!r} {b!r}", 0.0)


@jit_cache(backend=NAME, ignore=["compiled"])
def fail(error: type[BaseException]) -> Callable[..., float]:
    compiled.append(error)
    raise error("of the compile function")


@jit_cache(backend=NAME, ignore=["compiled"])
def bad_export(value: int) -> Any:
    compiled.append(value)
    return value


kept: list[LightKernel] = []


@jit_cache(backend=NAME, ignore=["kept"])
def keep(n: int) -> Callable[..., float]:
    kept.append(LightKernel("kept", n))
    return kept[-1]


entered = threading.Event()
go_on = threading.Event()


@jit_cache(backend=NAME, ignore=["compiled", "entered", "go_on"])
def slow(a: int) -> Callable[..., float]:
    compiled.append(a)
    entered.set()
    assert go_on.wait(60)
    return LightKernel("slow", 0.0)


def test_memory_then_store_then_compile(runtime: Runtime, tmp_path: Path) -> None:
    first = build(1)
    assert build(1) is first
    assert (len(compiled), len(runtime.hits), len(runtime.compiled_here)) == (1, 0, 1)
    clear(build)
    again = build(1)
    assert again is not first
    assert (len(compiled), len(runtime.hits)) == (1, 1)
    assert build(1) is again
    assert len(runtime.hits) == 1


def test_a_miss_returns_what_a_hit_would_the_kernel_loaded_from_its_artifact(runtime: Runtime) -> None:
    kernel = keep(1)
    assert isinstance(kernel, LightKernel)
    assert (kernel.name, kernel.value) == ("kept", 1.0)
    assert kernel is not kept[0]


def test_the_function_keeps_its_name_and_its_documentation() -> None:
    assert build.__name__ == "build"
    assert build.__doc__ == "The docstring."
    assert isinstance(getattr(build, ATTRIBUTE), JitFunction)


CONFUSABLE: list[Any] = [
    *(1, True, 1.0, 1 + 0j, "1", b"1"),
    *(0, False, 0.0, -0.0, None, "", b"", (), [], {}),
    *((1,), (True,), (1.0,), [1], (1, (2, True)), (1, (2, 1)), (1, (2, 1.0)), ((1, 2), True)),
    *({"a": 1}, {"a": True}, {1: "a"}, {True: "a"}, {1}, {True}, frozenset({1}), frozenset({1.0})),
    *(float("inf"), float("nan"), int, float, range(1), slice(1)),
]


@pytest.mark.parametrize("how", ["position", "keyword", "default overridden", "second position"])
def test_arguments_that_are_easily_confused_never_share_a_kernel(how: str) -> None:
    calls: dict[str, Callable[[Any], Any]] = {
        "position": build,
        "keyword": lambda value: build(a=value),
        "default overridden": lambda value: build(0, b=value),
        "second position": lambda value: build_two("x", value),
    }
    expected = {
        "position": "{!r} None",
        "keyword": "{!r} None",
        "default overridden": "0 {!r}",
        "second position": "'x' {!r}",
    }[how]
    for order in (CONFUSABLE, CONFUSABLE[::-1], CONFUSABLE * 2):
        for value in order:
            assert calls[how](value).name == expected.format(value)
    assert len(compiled) == len(CONFUSABLE)


def test_equal_calls_written_in_different_ways_share_a_kernel() -> None:
    first = build(1, b=2)
    assert build(a=1, b=2) is build(b=2, a=1) is first
    assert build(1) is build(1, b=None) is build(a=1)
    assert build([1, {"x"}]) is build([1, {"x"}])
    assert len(compiled) == 3


def test_a_container_that_changes_between_calls_gives_another_kernel() -> None:
    tiles = [1, 2]
    assert build(tiles).name == "[1, 2] None"
    tiles.append(3)
    assert build(tiles).name == "[1, 2, 3] None"
    assert build(a=tiles).name == "[1, 2, 3] None"


def test_arguments_that_do_not_fit_raise_and_compile_nothing() -> None:
    with pytest.raises(TypeError):
        build()  # type: ignore[call-arg]
    with pytest.raises(TypeError):
        build(1, c=2)  # type: ignore[call-arg]
    assert compiled == []


def test_a_call_that_cannot_be_keyed_is_compiled_each_time_and_the_reason_is_kept_once(runtime: Runtime) -> None:
    lock = threading.Lock()
    kernels = [build(1, b=lock) for _ in range(3)]
    assert len(compiled) == 3
    assert all(isinstance(kernel, LightKernel) for kernel in kernels)
    assert runtime.uncached == 3
    ((notice, count),) = runtime.notices.counts.items()
    assert count == 3
    assert "build is compiled at each call, not cached: of its argument b: " in notice
    assert "lock" in notice


def test_the_reason_is_logged_once_where_no_plugin_reports_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    before = replace_runtime(Runtime(Settings(cache_dir=str(tmp_path / "c"))))
    try:
        for _ in range(3):
            build(1, b=threading.Lock())
    finally:
        replace_runtime(before)
    assert len(caplog.messages) == 1


@pytest.mark.parametrize(
    "error",
    [
        ValueError,
        OSError,
        FileNotFoundError,
        TimeoutError,
        filelock.Timeout,
        LockTimeoutError,
        KeyError,
        TypeError,
        NameError,
        AttributeError,
        LookupError,
        KeyboardInterrupt,
        SystemExit,
        ExportError,
        CacheDirectoryError,
    ],
)
def test_what_the_compile_function_raises_passes_through_after_one_run(
    runtime: Runtime, error: type[BaseException]
) -> None:
    with pytest.raises(error) as caught:
        fail(error)
    assert caught.value.args == ("of the compile function",) or error is filelock.Timeout
    assert caught.value.__cause__ is None
    assert compiled == [error]
    assert dict(runtime.notices.counts) == {}
    with pytest.raises(error):
        fail(error)
    assert len(compiled) == 2, "a failure is not remembered"


def test_what_cannot_be_exported_is_an_error_that_names_its_type(runtime: Runtime) -> None:
    with pytest.raises(ExportError, match="int"):
        bad_export(1)
    assert compiled == [1]
    with pytest.raises(ExportError):
        bad_export(1)


is_broken = threading.Event()


@jit_cache(backend=NAME, ignore=["is_broken"])
def sometimes() -> Callable[..., float]:
    if is_broken.is_set():
        raise ValueError("broken")
    return LightKernel("sometimes", 1.0)


def test_a_failed_compile_is_made_good_by_the_next_call(runtime: Runtime) -> None:
    is_broken.set()
    with pytest.raises(ValueError, match="broken"):
        sometimes()
    is_broken.clear()
    kernel = sometimes()
    assert kernel() == 1.0
    sometimes.cache_clear()  # type: ignore[attr-defined]
    assert sometimes()() == 1.0
    assert len(runtime.hits) == 1


@pytest.mark.parametrize("is_cache_on", [True, False])
def test_threads_that_ask_for_one_key_share_one_compile(tmp_path: Path, is_cache_on: bool) -> None:
    settings = Settings(cache_dir=str(tmp_path / "threads"), is_cache_enabled=is_cache_on)
    before = replace_runtime(Runtime(settings, is_reported=True))
    entered.clear()
    go_on.clear()
    try:
        with ThreadPoolExecutor(16) as threads:
            asked = [threads.submit(slow, 1) for _ in range(16)]
            assert entered.wait(60)
            go_on.set()
            kernels = [future.result(60) for future in asked]
    finally:
        replace_runtime(before)
    assert compiled == [1]
    assert all(isinstance(kernel, LightKernel) for kernel in kernels)


def test_a_compile_function_may_call_another_one(runtime: Runtime) -> None:
    @jit_cache(backend=NAME, ignore=["compiled"])
    def outer(n: int) -> Callable[..., float]:
        return LightKernel(build(n).name, n)  # type: ignore[attr-defined]

    assert outer(1)() == 1.0
    assert compiled == [(1, None)]


def test_nothing_is_stored_where_the_cache_is_switched_off(tmp_path: Path) -> None:
    settings = Settings(cache_dir=str(tmp_path / "off"), is_cache_enabled=False)
    before = replace_runtime(Runtime(settings))
    try:
        assert build(1) is build(1)
        clear(build)
        build(1)
    finally:
        replace_runtime(before)
    assert len(compiled) == 2
    assert not (tmp_path / "off").exists()


def test_clearing_forgets_what_this_process_holds_and_nothing_else(runtime: Runtime) -> None:
    for call in (lambda: build(1), lambda: build(a=1), lambda: build([1]), lambda: build_two(1, 2)):
        call()
    other = build_two(1, 2)
    clear(build)
    assert build_two(1, 2) is other
    for call in (lambda: build(1), lambda: build(a=1), lambda: build([1])):
        call()
    assert len(runtime.hits) == 2
    assert len(compiled) == 3


def damaged(runtime: Runtime) -> Iterator[Path]:
    assert runtime.store is not None
    yield from runtime.store.root.glob("artifacts/*/*.o")


def test_a_damaged_artifact_is_compiled_again_once(runtime: Runtime) -> None:
    build(1)
    (path,) = damaged(runtime)
    path.write_bytes(path.read_bytes()[:-3])
    clear(build)
    assert build(1).name == "1 None"  # type: ignore[attr-defined]
    assert len(compiled) == 2
    clear(build)
    build(1)
    assert len(compiled) == 2
    assert runtime.store is not None
    assert runtime.store.corrupt == 1


def test_an_artifact_that_passes_its_checks_but_cannot_be_loaded_is_compiled_again_once(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    from support.light import LightBackend

    refused: list[str] = []
    load = LightBackend.load

    def refuse_once(self: LightBackend, artifact: Any) -> Any:
        if not refused:
            refused.append(artifact.sidecar.content_key)
            from pytest_quack.errors import ArtifactError

            raise ArtifactError("no")
        return load(self, artifact)

    build(1)
    clear(build)
    monkeypatch.setattr(LightBackend, "load", refuse_once)
    build(1)
    assert len(compiled) == 2
    clear(build)
    build(1)
    assert len(compiled) == 2
    assert len(refused) == 1


@pytest.fixture
def fresh(tmp_path: Path) -> FreshProject:
    fresh = FreshProject(tmp_path)
    fresh.kernels(
        "kern.py",
        """
        import sys

        def hold():
            print('"compiling"', flush=True)
            sys.stdin.readline()

        @jit_cache(backend=NAME)
        def build(n, how=""):
            log("compile")
            if how == "hold":
                hold()
            return LightKernel("k", n)
        """,
    )
    return fresh


@pytest.mark.parametrize("count", [16, 64])
def test_processes_that_ask_for_one_cold_key_at_once_compile_it_once(fresh: FreshProject, count: int) -> None:
    script = "import kern, sys\nkern.build.__quack_jit__\nshow('ready')\nsys.stdin.readline()\nshow(kern.build(7)())"
    processes = [fresh.start(script) for _ in range(count)]
    for process in processes:
        assert process.stdout is not None
        assert json.loads(process.stdout.readline()) == "ready"
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    said = [process.communicate(timeout=120) for process in processes]
    assert [json.loads(out) for out, _ in said] == [7] * count, [err for _, err in said if err]
    assert fresh.compiles() == 1


def start_holder(fresh: FreshProject) -> subprocess.Popen[str]:
    holder = fresh.start("import kern\nshow(kern.build(1, 'hold')())")
    assert holder.stdout is not None
    assert json.loads(holder.stdout.readline()) == "compiling"
    return holder


def test_a_key_whose_compiling_process_was_killed_is_free_at_once(fresh: FreshProject) -> None:
    holder = start_holder(fresh)
    waiter = fresh.start("import kern\nshow('asks')\nshow(kern.build(1, 'hold')())")
    assert waiter.stdout is not None
    assert json.loads(waiter.stdout.readline()) == "asks"
    holder.kill()
    holder.communicate(timeout=60)
    out, err = waiter.communicate("go\n", timeout=60)
    assert [json.loads(line) for line in out.splitlines()] == ["compiling", 1], err
    again = fresh.run("import kern\nshow(kern.build(2)())")
    assert again.values == [2]


def test_who_waits_longer_than_the_limit_compiles_for_itself_and_says_so(fresh: FreshProject) -> None:
    holder = start_holder(fresh)
    script = "import kern\nshow(kern.build(1, 'hold')())"
    waiter = fresh.start(script, QUACK_COMPILE_TIMEOUT="0.2")
    out, err = waiter.communicate("go\n", timeout=60)
    assert [json.loads(line) for line in out.splitlines()] == ["compiling", 1]
    assert err.count("compiled without its lock") == 1
    out, _ = holder.communicate("go\n", timeout=60)
    assert json.loads(out) == 1
    assert fresh.run("import kern\nshow(kern.build(1, 'hold')())").compiles == 0


def shaped_as(declaration: str) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """A compile function with these parameters, decorated and plain; both give what they got as a light kernel."""
    scope: dict[str, Any] = {"LightKernel": LightKernel, "__name__": __name__}
    exec(f"def shaped({declaration}):\n    return LightKernel(repr(sorted(locals().items())), 0.0)", scope)
    return jit_cache(backend=NAME)(scope["shaped"]), scope["shaped"]


SHAPES = {
    "": ["()"],
    "a, b=1, *, c, d=2": [
        "(1, c=3)",
        "(1, 2, c=3, d=4)",
        "(a=1, b=2, c=3)",
        "(1, c=4, b=7)",
        "(1, 2)",
        "(1, 2, 3, c=1)",
    ],
    "a, b=1, /, c=2, *, d=3": ["(1)", "(1, 2, 3, d=4)", "(1, c=5)", "(1, 2, d=9)", "(a=1)", "(1, b=2)", "()"],
    "a=0, b=1, c=2": ["()", "(c=9)", "(1, c=9)", "(b=9)", "(9)", "(1, 2, 3)", "(True)", "(1.0)", "(1, a=2)", "(z=1)"],
    "_quack_hits, _quack_miss=1, _quack_kernel=2": ["(1)", "(1, _quack_kernel=5)", "(1, _quack_miss=5)"],
    "Exception, KeyError=1, kernel=2": ["(1)", "(1, kernel=5)", "(1, KeyError=5)"],
    "*args, **kwargs": ["()", "(1)", "(1, a=2)", "(a=2)", "(a=2, b=3)", "((1,), 'a', 2)"],
}


@pytest.mark.parametrize(("declaration", "calls"), SHAPES.items(), ids=SHAPES)
def test_a_call_means_what_it_means_without_the_decorator(runtime: Runtime, declaration: str, calls: list[str]) -> None:
    decorated, plain = shaped_as(declaration)
    for call in [*calls, *calls]:
        assert outcome(decorated, call) == outcome(plain, call)


def outcome(function: Callable[..., Any], call: str) -> str:
    try:
        return str(eval(f"function{call}", {"function": function}).name)
    except TypeError as error:
        return str(error)


def test_a_default_that_is_replaced_is_used(runtime: Runtime) -> None:
    decorated, plain = shaped_as("a, b=1, *, c=2")
    assert "('b', 1), ('c', 2)" in decorated(0).name
    plain.__defaults__ = (5,)  # type: ignore[attr-defined]
    assert "('b', 5), ('c', 2)" in decorated(0).name
    plain.__kwdefaults__["c"] = 6  # type: ignore[attr-defined]
    assert "('b', 5), ('c', 6)" in decorated(0).name


class Grumpy:
    """Neither hashed nor compared, and asked for nothing that it does not have."""

    def __hash__(self) -> int:
        raise ValueError("no hash")

    def __eq__(self, other: object) -> bool:
        raise RuntimeError("no comparison")

    def __getattr__(self, name: str) -> Any:
        raise LookupError(name)


def test_an_argument_that_refuses_everything_is_only_not_kept(runtime: Runtime) -> None:
    decorated, plain = shaped_as("a, *, b=1")
    grumpy = Grumpy()
    assert decorated(grumpy).name == decorated(grumpy).name == plain(grumpy).name
    variadic, _ = shaped_as("*args")
    assert "Grumpy" in variadic(grumpy).name
