"""Settings: which source wins, what each accepts, and errors that name the source, the value and the choices."""

from __future__ import annotations

import dataclasses
import os
import pickle
import re

import pytest

from pytest_quack.errors import SettingsError
from pytest_quack.settings import OPTIONS, Settings, resolve, table

pytestmark = pytest.mark.light

ON = {"--async-compile": "3"}

# A value of each kind for every option, as text, and what it comes to.
SOURCES = {
    "jobs": (("3", 3), ("5", 5), ("7", 7)),
    "mode": (("wait", "wait"), ("defer", "defer"), ("wait", "wait")),
    "timeout_s": (("1.5", 1.5), ("20", 20.0), ("1e3", 1000.0)),
    "compile_arch": (("sm_90a", "sm_90a"), ("SM_100A", "sm_100a"), ("sm_120", "sm_120")),
    "cache_dir": (("/a", "/a"), ("b", "b"), ("~/c", "~/c")),
    "is_cache_enabled": (("0", False), ("yes", True), ("off", False)),
    "is_cache_trusted": ((None, None), (None, None), ("1", True)),
    "is_interception_on": (("1", True), ("0", False), ("yes", True)),
    "sources": ((None, None), ("a\nb", ("a", "b")), (f"a{os.pathsep}b", ("a", "b"))),
    "gpus_per_worker": (("2", 2), ("0", 0), ("4", 4)),
    "workers_per_gpu": (("2", 2), ("3", 3), ("4", 4)),
    "gpu_min_free_bytes": (("20GB", 20 * 10**9), ("1.5 GiB", 3 << 29), ("500mb", 500 * 10**6)),
    "gpu_wait_s": (("60", 60.0), ("0", 0.0), ("1.5", 1.5)),
    "oom_retries": (("2", 2), ("0", 0), ("3", 3)),
}


def test_every_field_has_one_row_and_one_name_in_each_place() -> None:
    assert {option.field for option in OPTIONS} == {field.name for field in dataclasses.fields(Settings)}
    assert SOURCES.keys() == {option.field for option in OPTIONS}
    for names in (
        [option.flag for option in OPTIONS if option.flag],
        [option.ini for option in OPTIONS if option.ini],
        [name for option in OPTIONS for name in option.environ],
    ):
        assert len(set(names)) == len(names)


@pytest.mark.parametrize("option", OPTIONS, ids=lambda option: option.field)
def test_the_command_line_wins_over_the_ini_file_and_that_over_the_environment(option: object) -> None:
    row = next(row for row in OPTIONS if row is option)
    (flag_text, by_flag), (ini_text, by_ini), (environ_text, by_environ) = SOURCES[row.field]
    assert environ_text is not None
    environ = {row.environ[0]: environ_text}
    base = {} if row.field == "jobs" else dict(ON)
    if row.field != "jobs":
        assert getattr(resolve(base, {}, environ), row.field) == by_environ
    if row.ini is not None:
        assert ini_text is not None
        assert getattr(resolve(base, {row.ini: ini_text}, environ), row.field) == by_ini
    if row.flag is not None:
        assert flag_text is not None
        ini = {row.ini: ini_text} if row.ini and ini_text else {}
        assert getattr(resolve({**base, row.flag: flag_text}, ini, environ), row.field) == by_flag


def test_nothing_given_means_the_defaults() -> None:
    assert resolve({}, {}, {}) == Settings()
    assert not Settings().is_pool_on


@pytest.mark.parametrize(
    ("flag", "environ", "jobs"),
    [
        ("", {}, 0),
        ("", {"QUACK_COMPILE_JOBS": "4"}, 4),
        ("", {"QUACK_COMPILE_WORKERS": "6"}, 6),
        ("", {"QUACK_COMPILE_JOBS": "4", "QUACK_COMPILE_WORKERS": "6"}, 4),
        ("", {"QUACK_COMPILE_JOBS": ""}, 0),
        ("", {"QUACK_COMPILE_JOBS": "auto"}, 0),
        ("auto", {"QUACK_COMPILE_JOBS": "4"}, 0),
        (" Auto ", {}, 0),
        ("2", {"QUACK_COMPILE_JOBS": "4"}, 2),
        ("0", {"QUACK_COMPILE_JOBS": "4"}, None),
        ("", {"QUACK_COMPILE_JOBS": "0"}, None),
    ],
)
def test_the_number_of_jobs(flag: str, environ: dict[str, str], jobs: int | None) -> None:
    settings = resolve({"--async-compile": flag}, {}, environ)
    assert settings.jobs == jobs
    assert settings.is_pool_on == (jobs is not None)


def test_the_environment_gives_a_number_but_does_not_switch_the_pool_on() -> None:
    assert resolve({}, {}, {"QUACK_COMPILE_JOBS": "4"}).jobs is None
    assert resolve({}, {"async_compile": "4"}, {}).jobs == 4
    assert resolve({"--async-compile": "0"}, {"async_compile": "4"}, {}).jobs is None


BAD = {
    "jobs": (["-1", "-16", "many", "1.5", "2 4", "tests/test_it.py", "0x4"], r'"auto"'),
    "mode": (["later", "Defer", "defer,wait"], '"defer" or "wait"'),
    "timeout_s": (["0", "-1", "soon", "nan", "inf", "10s"], "a number of seconds above 0"),
    "compile_arch": (["hopper", "90a", "sm90", "sm_", "sm_x", "sm_90b", "sm_90a;sm_100a"], 'such as "sm_90a"'),
    "is_cache_enabled": (["perhaps", "2", "-1"], "1, true, yes, on, 0, false, no or off"),
    "is_cache_trusted": (["perhaps", "2"], "1, true, yes, on, 0, false, no or off"),
    "gpus_per_worker": (["-1", "all", "1.5"], "a whole number, 0 or more"),
    "workers_per_gpu": (["0", "-1", "many", "1.5"], "a whole number, 1 or more"),
    "gpu_min_free_bytes": (["20", "GB", "-1GB", "20 G", "1e9B", "nan GB", "20GB free"], 'such as "20GB"'),
    "gpu_wait_s": (["-1", "soon", "nan", "inf"], "a number of seconds"),
    "oom_retries": (["-1", "once", "1.5"], "a whole number, 0 or more"),
}


@pytest.mark.parametrize(
    ("field", "text"), [(field, text) for field, (texts, _) in BAD.items() for text in texts], ids=str
)
def test_a_bad_value_is_named_with_its_source_and_the_choices(field: str, text: str) -> None:
    row = next(row for row in OPTIONS if row.field == field)
    choices = BAD[field][1]
    switch = {"--async-compile": ""} if field == "jobs" else ON
    sources: list[tuple[str, dict[str, str], dict[str, str], dict[str, str]]]
    sources = [(name, switch, {}, {name: text}) for name in row.environ]
    if row.flag:
        sources.append((row.flag, {**ON, row.flag: text}, {}, {}))
    if row.ini:
        sources.append((row.ini, {}, {row.ini: text}, {}))
    for name, command_line, ini, environ in sources:
        with pytest.raises(SettingsError) as error:
            resolve(command_line, ini, environ)
        assert str(error.value).startswith(f"{name}={text} cannot be used; write ")
        assert choices in str(error.value)
        assert str(pickle.loads(pickle.dumps(error.value))) == str(error.value)


def test_a_bad_value_that_a_better_source_overrides_is_not_read() -> None:
    settings = resolve({"--async-compile": "2"}, {"async_compile": "many"}, {"QUACK_COMPILE_JOBS": "-1"})
    assert settings.jobs == 2


def test_the_process_environment_is_read_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUACK_COMPILE_TIMEOUT", "12")
    assert resolve().timeout_s == 12.0


def test_the_table_of_the_documentation_names_every_setting() -> None:
    rows = table().splitlines()
    assert len(rows) == len(OPTIONS) + 2
    for option, row in zip(OPTIONS, rows[2:], strict=True):
        assert row.count(" | ") == 3
        for name in (option.flag, option.ini, *option.environ):
            assert not name or re.search(rf"`{re.escape(name)}[`=]", row)


def test_settings_do_not_change_and_travel_between_processes() -> None:
    settings = resolve({"--async-compile": "2"}, {}, {"QUACK_CACHE_DIR": "/a"})
    assert pickle.loads(pickle.dumps(settings)) == settings
    with pytest.raises(dataclasses.FrozenInstanceError):
        settings.jobs = 3  # type: ignore[misc]
