"""The pool with real compile processes: states, faults, and that nothing is left behind."""

from __future__ import annotations

import functools
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from pytest_quack import CompilePending, get_active_pool, pool_scope, suppress_pool
from pytest_quack.compile import active
from pytest_quack.compile.job import FailureKind, KeyState
from pytest_quack.compile.pool import CompilePool
from pytest_quack.errors import CompileError
from pytest_quack.runtime import Runtime
from support import light
from support.inner import ROOT, TESTS

pytestmark = pytest.mark.light
DEADLINE_S = 30.0


@pytest.fixture
def side_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "side.log"
    path.write_text("")
    monkeypatch.setenv("SIDE_LOG", str(path))
    return path


@pytest.fixture
def pool(runtime: Runtime, side_log: Path) -> Iterator[CompilePool]:
    """An active pool of two processes with a time limit of 3 s."""
    pool = CompilePool(2, timeout_s=3.0)
    before = active.activate(pool)
    yield pool
    active.deactivate(before)
    pool.shutdown()


def key_of(call: Callable[[], object]) -> str:
    """The key that a call is refused for."""
    with pytest.raises(CompilePending) as refused:
        call()
    return refused.value.key


def settle(pool: CompilePool, call: Callable[[], object]) -> tuple[KeyState, FailureKind | None, str]:
    key = key_of(call)
    state = pool.wait(key, DEADLINE_S)
    failure = pool.poll(key)[1]
    return state, failure.kind if failure else None, failure.message if failure else ""


def until(condition: Callable[[], bool]) -> None:
    """Wait for something outside this process to become true."""
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.01)


def is_alive(process: psutil.Process | None) -> bool:
    try:
        return process is not None and process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def compiling(side_log: Path, name: str) -> int:
    """The process that compiles `name`, once it does."""
    until(lambda: f"compile {name}" in side_log.read_text())
    line = next(line for line in side_log.read_text().splitlines() if line.endswith(f"compile {name}"))
    return int(line.split()[0])


def test_states_of_a_key(pool: CompilePool) -> None:
    assert pool.poll("0" * 64) == (KeyState.NEW, None)
    key = key_of(lambda: light.build("a", seconds=0.5))
    assert pool.poll(key) == (KeyState.PENDING, None)
    assert pool.wait(key, DEADLINE_S) is KeyState.DONE
    assert light.build("a", seconds=0.5)() == 1.0
    stats = pool.stats()
    assert (stats.submitted, stats.done, stats.failed, stats.pending, stats.compiled) == (1, 1, 0, 0, 1)
    assert stats.slowest[0][1].startswith("build(name='a'")


def test_a_key_is_submitted_once_however_often_it_is_asked_for(pool: CompilePool, side_log: Path) -> None:
    keys = {key_of(lambda: light.build("a", seconds=0.3)) for _ in range(5)}
    assert len(keys) == 1
    pool.wait(keys.pop(), DEADLINE_S)
    assert pool.stats().submitted == 1
    assert side_log.read_text().count("compile a") == 1


def test_two_jobs_run_at_the_same_time_and_no_more(pool: CompilePool, side_log: Path) -> None:
    keys = [key_of(lambda n=n: light.build(f"k{n}", seconds=0.6)) for n in range(4)]
    compiling(side_log, "k0")
    compiling(side_log, "k1")
    assert "k2" not in side_log.read_text()
    for key in keys:
        assert pool.wait(key, DEADLINE_S) is KeyState.DONE
    assert len({line.split()[0] for line in side_log.read_text().splitlines()}) == 2


def test_what_is_waited_for_is_compiled_first(pool: CompilePool, side_log: Path) -> None:
    keys = [key_of(lambda n=n: light.build(f"k{n}", seconds=0.4)) for n in range(6)]
    pool.add_waiter(keys[5])
    for key in keys:
        pool.wait(key, DEADLINE_S)
    order = [line.split()[-1] for line in side_log.read_text().splitlines()]
    assert order.index("k5") < order.index("k4")


@pytest.mark.parametrize(
    ("how", "kind", "words"),
    [
        ("raise", FailureKind.RAISED, "ValueError: x has a bad tile"),
        ("crash", FailureKind.CRASHED, "SIGSEGV"),
        ("exit", FailureKind.CRASHED, "exited with status 3"),
        ("hang", FailureKind.TIMED_OUT, "QUACK_COMPILE_TIMEOUT"),
        ("export", FailureKind.RAISED, "is not a light kernel"),
    ],
)
def test_a_compile_that_goes_wrong_takes_only_its_own_key(
    pool: CompilePool, how: str, kind: FailureKind, words: str
) -> None:
    good = [key_of(lambda n=n: light.build(f"k{n}", seconds=0.2)) for n in range(4)]
    state, found, message = settle(pool, lambda: light.build_badly("x", how))
    assert (state, found) == (KeyState.FAILED, kind)
    assert words in message
    for key in good:
        assert pool.wait(key, DEADLINE_S) is KeyState.DONE
    assert settle(pool, lambda: light.build("afterwards"))[0] is KeyState.DONE


def test_a_crash_is_reported_with_its_last_words_and_not_tried_here(pool: CompilePool, side_log: Path) -> None:
    settle(pool, lambda: light.build_badly("x", "crash"))
    with pytest.raises(CompileError, match=r"SIGSEGV.*about to crash in x"):
        light.build_badly("x", "crash")
    assert side_log.read_text().count("compile x") == 1


def test_an_error_is_raised_here_as_it_would_be_without_a_pool(pool: CompilePool) -> None:
    settle(pool, lambda: light.build_badly("x", "raise"))
    with pytest.raises(ValueError, match="x has a bad tile"):
        light.build_badly("x", "raise")


def test_a_failure_in_compile_processes_only_is_made_good_here_and_told(pool: CompilePool, runtime: Runtime) -> None:
    settle(pool, lambda: light.build_badly("x", "worker"))
    assert light.build_badly("x", "worker")() == 1.0
    assert any("fails in a compile process only" in text for text in runtime.notices.counts)


def test_idle_process_killed(pool: CompilePool, side_log: Path) -> None:
    settle(pool, lambda: light.build("a"))
    pid = compiling(side_log, "a")
    os.kill(pid, signal.SIGKILL)
    until(lambda: not psutil.pid_exists(pid))
    assert settle(pool, lambda: light.build("b"))[0] is KeyState.DONE
    assert pool.stats().workers_crashed == 0


def test_busy_process_killed_by_somebody_is_started_again(pool: CompilePool, side_log: Path) -> None:
    key = key_of(lambda: light.build("a", seconds=1.0))
    os.kill(compiling(side_log, "a"), signal.SIGKILL)
    assert pool.wait(key, DEADLINE_S) is KeyState.DONE
    assert side_log.read_text().count("compile a") == 2
    assert pool.stats().workers_crashed == 1


@pytest.mark.slow
def test_server_killed_while_compiles_run(pool: CompilePool, side_log: Path) -> None:
    keys = [key_of(lambda n=n: light.build(f"k{n}", seconds=1.0)) for n in range(3)]
    worker = psutil.Process(compiling(side_log, "k0"))
    server = worker.parent()
    assert server is not None
    server.kill()
    for key in keys:
        assert pool.wait(key, DEADLINE_S) is KeyState.DONE
    until(lambda: not worker.is_running())


@pytest.mark.slow
def test_stopped_process_runs_over_its_time_limit(pool: CompilePool, side_log: Path) -> None:
    key = key_of(lambda: light.build("a", seconds=1.0))
    os.kill(compiling(side_log, "a"), signal.SIGSTOP)
    assert pool.wait(key, DEADLINE_S) is KeyState.FAILED
    failure = pool.poll(key)[1]
    assert failure is not None
    assert failure.kind is FailureKind.TIMED_OUT


def test_no_server_means_compiling_here_with_one_notice(
    runtime: Runtime, side_log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pool_scope(2) as pool:
        key = key_of(lambda: light.build("a"))
        assert pool.wait(key, DEADLINE_S) is KeyState.FAILED
        assert light.build("a")() == 1.0
    assert [text for text in runtime.notices.counts if "did not start" in text]


def test_compile_processes_see_no_gpu_and_the_asking_environment(
    pool: CompilePool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    settle(pool, lambda: light.build_surroundings(0))
    assert light.build_surroundings(0).name == f"gpus=[] mode=None cwd={os.getcwd()}"
    monkeypatch.setenv("LIGHT_MODE", "fast")
    monkeypatch.chdir(tmp_path)
    settle(pool, lambda: light.build_surroundings(0))
    assert light.build_surroundings(0).name == f"gpus=[] mode=fast cwd={tmp_path}"
    monkeypatch.delenv("LIGHT_MODE")
    assert "mode=None" in light.build_surroundings(0).name


def test_a_value_changed_in_the_asking_process_only_is_compiled_here(
    pool: CompilePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(light, "SCALE", 7.0)
    state, kind, message = settle(pool, lambda: light.build_scaled("a"))
    assert (state, kind) == (KeyState.FAILED, FailureKind.REFUSED)
    assert "another globals" in message
    assert light.build_scaled("a")() == 7.0
    monkeypatch.undo()
    assert settle(pool, lambda: light.build_scaled("a"))[0] is KeyState.DONE
    assert light.build_scaled("a")() == 1.0


def test_child_made_by_fork_compiles_for_itself(pool: CompilePool) -> None:
    pid = os.fork()
    if pid == 0:
        os._exit(0 if get_active_pool() is None and light.build("in-child")() == 1.0 else 1)
    assert os.waitpid(pid, 0)[1] == 0
    assert pool.stats().submitted == 0


def test_suppressed_pool_is_suppressed_in_this_thread_only(pool: CompilePool) -> None:
    seen: list[object] = []
    with suppress_pool():
        assert get_active_pool() is None
        thread = threading.Thread(target=lambda: seen.append(get_active_pool()))
        thread.start()
        thread.join()
        assert light.build("a")() == 1.0
    assert seen == [pool]
    assert get_active_pool() is pool


def test_pool_scope_reuses_the_active_pool_or_ends_its_own(runtime: Runtime) -> None:
    with pool_scope(1) as outer:
        with pool_scope(2) as inner:
            assert inner is outer
        key = key_of(lambda: light.build("a"))
        assert outer.wait_any([key], DEADLINE_S) == (key,)
    assert get_active_pool() is None
    assert outer.submit(outer_job(outer)) is KeyState.FAILED


def test_waiting_for_nothing_ends_at_once(pool: CompilePool) -> None:
    waiting = threading.Thread(target=lambda: pool.wait_any([]), daemon=True)
    waiting.start()
    waiting.join(DEADLINE_S)
    assert not waiting.is_alive()


def outer_job(pool: CompilePool):
    """Some job, for a pool that is shut down."""
    from dataclasses import replace

    job = next(iter(pool._entries.values())).job
    return replace(job, key="f" * 64)


@pytest.mark.parametrize("jobs", [-1, -5])
def test_negative_number_of_jobs(runtime: Runtime, jobs: int) -> None:
    with pytest.raises(ValueError, match="at least 1 compile process"):
        CompilePool(jobs)


def test_number_of_jobs_from_the_environment(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUACK_COMPILE_WORKERS", "5")
    assert CompilePool().jobs == 5
    monkeypatch.setenv("QUACK_COMPILE_JOBS", "3")
    assert CompilePool().jobs == 3


def test_prewarm_starts_the_server_before_the_first_miss(pool: CompilePool) -> None:
    pool.prewarm()
    until(lambda: len(psutil.Process().children()) > 0)
    assert pool.stats().submitted == 0


def start_server(pool: CompilePool) -> psutil.Process:
    """The process that the pool forks its compile processes from."""
    others = set(psutil.Process().children())
    pool.prewarm()
    until(lambda: len(set(psutil.Process().children()) - others) > 0)
    (server,) = set(psutil.Process().children()) - others
    return server


def test_prewarm_again_imports_what_has_come_since(
    pool: CompilePool, side_log: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = start_server(pool)
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("come_late", "come_later"):
        (tmp_path / f"{name}.py").write_text(
            textwrap.dedent(
                """
                from pytest_quack import jit_cache
                from support.light import NAME, LightKernel, log

                log(f"import {__name__}")

                @jit_cache(backend=NAME)
                def build(value):
                    return LightKernel(__name__, value)
                """
            )
        )
        module = __import__(name)
        keys = [key_of(functools.partial(module.build, value)) for value in (1.0, 2.0, 3.0)]
        for key in keys:
            assert pool.wait(key, DEADLINE_S) is KeyState.DONE, pool.poll(key)
    imports = [line for line in side_log.read_text().splitlines() if " import come_l" in line]
    ours = f"{os.getpid()} "
    assert [line.partition(" ")[2] for line in imports if line.startswith(ours)] == [
        "import come_late",
        "import come_later",
    ]
    assert f"{server.pid} import come_late" in imports, imports
    assert server.is_running()


def test_environment_that_is_adopted_replaces_a_server_that_began_with_another(
    pool: CompilePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    early = start_server(pool)
    pool.adopt_environ()
    pool.prewarm()
    assert pool.wait(key_of(lambda: light.build("a")), DEADLINE_S) is KeyState.DONE
    assert early.is_running(), "nothing has changed"
    monkeypatch.setenv("QUACK_TEST_SOMETHING", "1")
    pool.adopt_environ()
    pool.prewarm()
    assert pool.wait(key_of(lambda: light.build("b")), DEADLINE_S) is KeyState.DONE
    until(lambda: not is_alive(early))


def test_shutdown_leaves_no_process_and_fails_what_is_pending(runtime: Runtime, side_log: Path) -> None:
    with pool_scope(2) as pool:
        key = key_of(lambda: light.build("a", seconds=60.0))
        worker = psutil.Process(compiling(side_log, "a"))
        family = [worker, worker.parent()]
    assert pool.poll(key)[0] is KeyState.FAILED
    until(lambda: not any(is_alive(process) for process in family))


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_asking_process_that_is_ended_leaves_no_process_and_no_lock(
    tmp_path: Path, side_log: Path, how: signal.Signals
) -> None:
    script = tmp_path / "asker.py"
    script.write_text(
        textwrap.dedent(
            """
            import signal, time
            from pytest_quack import CompilePending, pool_scope
            from support import light

            signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may have us ignore it

            with pool_scope(2) as pool:
                for name in ("a", "b", "c"):
                    try:
                        light.build(name, seconds=60.0)
                    except CompilePending:
                        pass
                time.sleep(60)
            """
        )
    )
    environ = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(TESTS), str(ROOT)]),
        "QUACK_CACHE_DIR": str(tmp_path / "cache"),
    }
    with subprocess.Popen([sys.executable, str(script)], env=environ, stderr=subprocess.DEVNULL) as asker:
        workers = [psutil.Process(compiling(side_log, name)) for name in ("a", "b")]
        family = [*workers, workers[0].parent()]
        asker.send_signal(how)
        asker.wait(DEADLINE_S)
        until(lambda: not any(is_alive(process) for process in family))
    locks = list((tmp_path / "cache" / "pytest-quack" / "v1" / "locks").iterdir())
    assert len(locks) == 2
    import filelock

    for path in locks:
        filelock.FileLock(path).acquire(timeout=0.5)


def test_another_holder_of_the_lock_that_never_ends_is_not_waited_for_twice(
    pool: CompilePool, runtime: Runtime, side_log: Path
) -> None:
    store = runtime.store
    assert store is not None
    key = light.build.__quack_jit__.direct_key(("a",), {}).key
    object.__setattr__(runtime.settings, "timeout_s", 0.5)
    with store.lock(key, timeout_s=5):
        state, kind, message = settle(pool, lambda: light.build("a"))
        assert (state, kind) == (KeyState.FAILED, FailureKind.REFUSED)
        assert "has held the lock" in message
        assert light.build("a")() == 1.0
    assert any("without its lock" in text for text in runtime.notices.counts)
