"""Every setting, read once: the command line first, then the ini file, then the environment, then the default.

`OPTIONS` is the one table of them; the command line, the ini keys, the environment variables and the table in the
documentation all come from it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, Final, Literal

from pytest_quack.errors import SettingsError

Mode = Literal["defer", "wait"]
AUTO: Final = "auto"


@dataclass(frozen=True, slots=True)
class Settings:
    """What the user asked for.

    Attributes:
        jobs: compile processes; None where the pool is off, 0 for as many as the machine allows.
        mode: "defer" lets a test step aside while its kernel compiles, "wait" makes the call wait instead.
        timeout_s: the longest that one compile may take, in seconds.
        compile_arch: the architecture that device code is compiled for, such as "sm_90a"; None to ask the GPU.
        cache_dir: the directory that the user named; None for the default place.
        is_cache_enabled: whether artifacts are looked up and stored on disk.
        is_cache_trusted: whether a directory that others own or can write to is used all the same.
        is_interception_on: whether every compile of the DSL is looked up and compiled in the pool, or only those of
            `jit_cache`.
        sources: directories whose files count as sources of every compile function.
        gpus_per_worker: how many GPUs each xdist worker gets; 0 assigns none, None means 1 where the pool is on.
        workers_per_gpu: how many xdist workers `-n auto` starts for each GPU.
        gpu_min_free_bytes: memory that must be free on a GPU for workers to get it.
        gpu_wait_s: how long to wait for a GPU with that much free memory, in seconds.
        oom_retries: how often a test that runs out of device memory is run again.
    """

    jobs: int | None = None
    mode: Mode = "defer"
    timeout_s: float = 600.0
    compile_arch: str | None = None
    cache_dir: str | None = None
    is_cache_enabled: bool = True
    is_cache_trusted: bool = False
    is_interception_on: bool = True
    sources: tuple[str, ...] = ()
    gpus_per_worker: int | None = None
    workers_per_gpu: int = 1
    gpu_min_free_bytes: int = 0
    gpu_wait_s: float = 0.0
    oom_retries: int = 1

    @property
    def is_pool_on(self) -> bool:
        return self.jobs is not None

    @property
    def gpus_for_each_worker(self) -> int:
        """How many GPUs each xdist worker gets; 0 where none are assigned."""
        return int(self.is_pool_on) if self.gpus_per_worker is None else self.gpus_per_worker


def parse_jobs(text: str) -> int | None:
    """The number of jobs that `text` asks for: None for "0" (off), 0 for "auto"."""
    if text.strip().lower() == AUTO:
        return 0
    try:
        jobs = int(text)
    except ValueError:
        raise ValueError('a whole number of compile processes, "auto", or 0 for none') from None
    if jobs < 0:
        raise ValueError('at least 0: 0 switches the pool off, "auto" takes what the machine allows')
    return jobs or None


def parse_bool(text: str) -> bool:
    word = text.strip().lower()
    if word in {"1", "true", "yes", "on"}:
        return True
    if word in {"0", "false", "no", "off", ""}:
        return False
    raise ValueError("1, true, yes, on, 0, false, no or off")


def parse_seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 < seconds < float("inf"):
        raise ValueError("a number of seconds above 0")
    return seconds


def parse_count(text: str) -> int:
    try:
        number = int(text)
    except ValueError:
        number = -1
    if number < 0:
        raise ValueError("a whole number, 0 or more")
    return number


def parse_positive(text: str) -> int:
    number = int(text) if text.strip().isdigit() else 0
    if number < 1:
        raise ValueError("a whole number, 1 or more")
    return number


def parse_wait(text: str) -> float:
    return 0.0 if text.strip() == "0" else parse_seconds(text)


def parse_size(text: str) -> int:
    """Bytes: "20GB" is 20 * 10**9, "20GiB" is 20 * 2**30."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(?:([kmgt])(i?)b)?\s*", text, re.IGNORECASE)
    if match is None or (match[2] is None and float(match[1])):
        raise ValueError('a size with its unit, such as "20GB" (powers of 1000) or "20GiB" (powers of 1024)')
    step = 1024 if match[3] else 1000
    power = "kmgt".index(match[2].lower()) + 1 if match[2] else 0
    return int(float(match[1]) * step**power)


def parse_mode(text: str) -> str:
    if text not in {"defer", "wait"}:
        raise ValueError('"defer" or "wait"')
    return text


def parse_arch(text: str) -> str:
    word = text.strip().lower()
    if not word.startswith("sm_") or not word[3:].rstrip("af").isdigit():
        raise ValueError('a GPU architecture such as "sm_90a"')
    return word


def parse_paths(text: str) -> tuple[str, ...]:
    return tuple(line.strip() for line in text.replace(os.pathsep, "\n").splitlines() if line.strip())


@dataclass(frozen=True, slots=True)
class Option:
    """One row of the settings table.

    Attributes:
        field: the field of `Settings` that it fills.
        flag: the command-line option; None where there is none.
        ini: the ini key; None where there is none.
        environ: environment variables that are read, the first that is set wins.
        parse: from text to value; raises ValueError whose text says what is accepted.
        metavar: what stands for the value in the help; None for a switch without a value.
        help: one sentence for the help and the documentation.
    """

    field: str
    flag: str | None
    ini: str | None
    environ: tuple[str, ...]
    parse: Callable[[str], Any]
    metavar: str | None
    help: str


OPTIONS: Final = (
    Option(
        "jobs",
        "--async-compile",
        "async_compile",
        ("QUACK_COMPILE_JOBS", "QUACK_COMPILE_WORKERS"),
        parse_jobs,
        "N",
        'Compile missing kernels in N processes while other tests run. "auto" takes what the CPU affinity, the cgroup '
        "and the memory allow, 0 switches it off. The environment variable gives the number but does not switch it on.",
    ),
    Option(
        "mode",
        "--async-compile-mode",
        "async_compile_mode",
        ("QUACK_COMPILE_MODE",),
        parse_mode,
        "MODE",
        '"defer" (default): a test whose kernel is missing steps aside and is run again; "wait": it waits in place.',
    ),
    Option(
        "timeout_s",
        "--async-compile-timeout",
        "async_compile_timeout",
        ("QUACK_COMPILE_TIMEOUT",),
        parse_seconds,
        "SECONDS",
        "The longest that one compile may take before its process is ended and its test fails (default 600).",
    ),
    Option(
        "compile_arch",
        "--compile-arch",
        "compile_arch",
        ("CUTE_DSL_ARCH",),
        parse_arch,
        "ARCH",
        "Compile device code for this architecture, such as sm_90a; needed where there is no GPU to ask.",
    ),
    Option(
        "cache_dir",
        "--quack-cache-dir",
        "quack_cache_dir",
        ("QUACK_CACHE_DIR",),
        str,
        "DIR",
        "Where artifacts are kept (default: the user's cache directory, ~/.cache/quack on Linux).",
    ),
    Option(
        "is_cache_enabled",
        "--quack-cache",
        "quack_cache_enabled",
        ("QUACK_CACHE_ENABLED",),
        parse_bool,
        "BOOL",
        "0 keeps artifacts out of the cache directory: nothing is read from it or written to it (default 1).",
    ),
    Option(
        "is_cache_trusted",
        None,
        None,
        ("QUACK_CACHE_TRUST",),
        parse_bool,
        "BOOL",
        "1 uses a cache directory that others own or can write to; artifacts are code that this process runs.",
    ),
    Option(
        "is_interception_on",
        "--async-compile-intercept",
        "async_compile_intercept",
        ("QUACK_COMPILE_INTERCEPT",),
        parse_bool,
        "BOOL",
        "1 (default): with --async-compile, every cute.compile of any code is cached and compiled in the pool; 0: only "
        "what is decorated with jit_cache.",
    ),
    Option(
        "sources",
        None,
        "async_compile_sources",
        ("QUACK_COMPILE_SOURCES",),
        parse_paths,
        "DIRS",
        "More directories, one a line, whose Python files count as sources of every compile function.",
    ),
    Option(
        "gpus_per_worker",
        "--gpus-per-worker",
        "gpus_per_worker",
        ("QUACK_GPUS_PER_WORKER",),
        parse_count,
        "N",
        "Give each xdist worker N GPUs of its own, of those that CUDA_VISIBLE_DEVICES names or of all (default 1 with "
        "--async-compile); 0 leaves CUDA_VISIBLE_DEVICES alone.",
    ),
    Option(
        "workers_per_gpu",
        "--workers-per-gpu",
        "workers_per_gpu",
        ("QUACK_WORKERS_PER_GPU",),
        parse_positive,
        "N",
        "How many workers -n auto starts for each GPU, or for each group of --gpus-per-worker (default 1).",
    ),
    Option(
        "gpu_min_free_bytes",
        "--gpu-min-free",
        "gpu_min_free",
        ("QUACK_GPU_MIN_FREE",),
        parse_size,
        "SIZE",
        'Give workers only GPUs on which this much memory is free when the run starts, such as "20GB".',
    ),
    Option(
        "gpu_wait_s",
        "--gpu-wait",
        "gpu_wait",
        ("QUACK_GPU_WAIT",),
        parse_wait,
        "SECONDS",
        "How long to wait for enough GPUs with the memory of --gpu-min-free before the run fails (default 0).",
    ),
    Option(
        "oom_retries",
        "--oom-retries",
        "oom_retries",
        ("QUACK_OOM_RETRIES",),
        parse_count,
        "N",
        "How often a test that runs out of device memory is run again, alone on its GPU; with --async-compile "
        "(default 1).",
    ),
)


def resolve(
    command_line: Mapping[str, str] | None = None,
    ini: Mapping[str, str] | None = None,
    environ: Mapping[str, str] | None = None,
) -> Settings:
    """The settings that these three sources add up to, keyed by flag, by ini key and by variable.

    Raises SettingsError naming the source, the value and what is accepted.
    """
    command_line, ini = command_line or {}, ini or {}
    environ = os.environ if environ is None else environ
    values: dict[str, Any] = {}
    for option in OPTIONS:
        for name, text in _given(option, command_line, ini, environ):
            try:
                values[option.field] = option.parse(text)
            except ValueError as error:
                raise SettingsError(f"{name}={text} cannot be used; write {error}.") from None
            break
    is_switched_on = "--async-compile" in command_line or "async_compile" in ini
    if not is_switched_on:
        values["jobs"] = None
    unknown = values.keys() - {f.name for f in fields(Settings)}
    assert not unknown, unknown
    return Settings(**values)


def _given(
    option: Option, command_line: Mapping[str, str], ini: Mapping[str, str], environ: Mapping[str, str]
) -> list[tuple[str, str]]:
    """Each source that gives this option a value, as (name, text), the one that wins first."""
    given = []
    is_bare = False
    if option.flag is not None and option.flag in command_line:
        if command_line[option.flag]:
            given.append((option.flag, command_line[option.flag]))
        is_bare = not command_line[option.flag]
    if option.ini is not None and ini.get(option.ini):
        given.append((option.ini, ini[option.ini]))
    given += [(name, environ[name]) for name in option.environ if environ.get(name)]
    if is_bare and not given:
        given.append((str(option.flag), AUTO))
    return given


def table() -> str:
    """The settings table of the documentation, in Markdown."""
    lines = ["| command line | ini | environment | what it does |", "|---|---|---|---|"]
    for option in OPTIONS:
        flag = f"`{option.flag}={option.metavar}`" if option.flag else ""
        ini = f"`{option.ini}`" if option.ini else ""
        environ = ", ".join(f"`{name}`" for name in option.environ)
        lines.append(f"| {flag} | {ini} | {environ} | {option.help} |")
    return "\n".join(lines) + "\n"
