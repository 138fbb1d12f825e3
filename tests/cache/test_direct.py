"""Direct keys as whole behaviours: the right kernel each time, a hit wherever nothing that counts has changed."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pytest_quack.backends import find_backend
from pytest_quack.cache.decorator import JitFunction
from pytest_quack.cache.direct import Fingerprint, describe_call, is_flat_value
from pytest_quack.errors import UnkeyableError
from pytest_quack.runtime import Runtime
from support.fresh import FreshProject, Ran
from support.light import NAME, LightKernel, log

pytestmark = [pytest.mark.light, pytest.mark.slow]


@pytest.fixture
def fresh(tmp_path: Path) -> FreshProject:
    return FreshProject(tmp_path)


def assert_made_once(fresh: FreshProject, script: str, values: list[Any], compiles: int, **environ: str) -> Ran:
    """A first process compiles, a second one finds all of it; both show the right values."""
    first = fresh.run(script, PYTHONHASHSEED="1", **environ)
    assert (first.values, first.compiles) == (values, compiles), first.stderr
    second = fresh.run(script, PYTHONHASHSEED="2", **environ)
    assert (second.values, second.compiles) == (values, 0), second.stderr
    return second


CALL = "import kern\nshow(kern.build()())"
VALUE_READERS = {
    "module constant": """
VALUE = {0}
@jit_cache(backend=NAME)
def build():
    log('compile'); return LightKernel('k', VALUE)""",
    "default": "@jit_cache(backend=NAME)\ndef build(v={0}):\n    log('compile'); return LightKernel('k', v)",
    "keyword default": "@jit_cache(backend=NAME)\ndef build(*, v={0}):\n    log('compile'); return LightKernel('k', v)",
    "class attribute": """
class Config:
    value = {0}
    def get(self):
        return self.value
@jit_cache(backend=NAME)
def build():
    log('compile'); return LightKernel('k', Config().get())""",
    "container": """
TABLE = {{'v': [{0}]}}
@jit_cache(backend=NAME)
def build():
    log('compile'); return LightKernel('k', TABLE['v'][0])""",
    "helper": """
def helper():
    return {0}
@jit_cache(backend=NAME)
def build():
    log('compile'); return LightKernel('k', helper())""",
    "helper with default": """
def helper(v={0}):
    return v
@jit_cache(backend=NAME)
def build():
    log('compile'); return LightKernel('k', helper())""",
    "helper with keyword default": """
def helper(*, v={0}):
    return v
@jit_cache(backend=NAME)
def build():
    log('compile'); return LightKernel('k', helper())""",
    "closure": """
def make(v):
    @jit_cache(backend=NAME)
    def build():
        log('compile'); return LightKernel('k', v)
    return build
build = make({0})""",
    "partial": """
import functools
def inner(v):
    return v
bound = functools.partial(inner, {0})
@jit_cache(backend=NAME)
def build():
    log('compile'); return LightKernel('k', bound())""",
    "own text": "@jit_cache(backend=NAME)\ndef build():\n    log('compile'); return LightKernel('k', {0})",
    "imported inside": """
@jit_cache(backend=NAME)
def build():
    from settings import VALUE
    log('compile'); return LightKernel('k', VALUE)""",
    "computed name": """
import settings
@jit_cache(backend=NAME)
def build():
    log('compile'); return LightKernel('k', getattr(settings, 'VAL' + 'UE'))""",
    "computed at import": """
import json
VALUE = json.loads('{0}')
@jit_cache(backend=NAME)
def build():
    log('compile'); return LightKernel('k', VALUE)""",
}


@pytest.mark.parametrize("text", VALUE_READERS.values(), ids=VALUE_READERS)
def test_a_value_that_is_edited_between_runs_gives_the_new_kernel(fresh: FreshProject, text: str) -> None:
    fresh.write("settings.py", "VALUE = 1")
    fresh.kernels("kern.py", text.format(1))
    assert_made_once(fresh, CALL, [1], 1)
    fresh.write("settings.py", "VALUE = 2")
    fresh.kernels("kern.py", text.format(2))
    edited = fresh.run(CALL)
    assert (edited.values, edited.compiles) == ([2], 1)


RUN_TIME_CHANGES = {
    "module constant": ("module constant", "kern.VALUE = 2"),
    "class attribute": ("class attribute", "kern.Config.value = 2"),
    "method": ("class attribute", "kern.Config.get = lambda self: 2"),
    "container": ("container", "kern.TABLE['v'][0] = 2"),
    "helper": ("helper", "kern.helper = lambda: 2"),
    "captured value": ("closure", "kern.build.__wrapped__.__closure__[0].cell_contents = 2"),
    "partial": ("partial", "kern.bound = functools.partial(kern.inner, 2)"),
    "imported inside": ("imported inside", "import settings; settings.VALUE = 2"),
    "computed name": ("computed name", "import settings; settings.VALUE = 2"),
    "default of a helper": ("helper with default", "kern.helper.__defaults__ = (2,)"),
    "keyword default of a helper": ("helper with keyword default", "kern.helper.__kwdefaults__['v'] = 2"),
}


@pytest.mark.parametrize(("text", "change"), RUN_TIME_CHANGES.values(), ids=RUN_TIME_CHANGES)
def test_a_value_that_changes_while_the_process_runs_gives_the_new_kernel(
    fresh: FreshProject, text: str, change: str
) -> None:
    fresh.write("settings.py", "VALUE = 1")
    fresh.kernels("kern.py", VALUE_READERS[text].format(1))
    script = f"""
        import functools, kern
        show(kern.build()())
        show(kern.build()())
        {change}
        show(kern.build()())
        show(kern.build()())
    """
    assert_made_once(fresh, script, [1, 1, 2, 2], 2)
    assert fresh.run(CALL).values == [1], "the changed value must not be stored under the key of the original"


def test_two_closures_of_one_factory_have_their_own_kernels(fresh: FreshProject) -> None:
    fresh.kernels("kern.py", VALUE_READERS["closure"].format(1))
    script = "import kern\nshow([kern.make(v)()() for v in (1, 2, 1, 2.5, 2)])"
    assert_made_once(fresh, script, [[1, 2, 1, 2.5, 2]], 3)


def test_closures_behind_decorators_and_caches_have_their_own_kernels(fresh: FreshProject) -> None:
    fresh.kernels(
        "kern.py",
        """
        import functools

        def scaled(k):
            def decorate(f):
                @functools.wraps(f)
                def wrapper(x):
                    return f(x) * k
                return wrapper
            return decorate

        def make(k, how):
            if how == "decorated":
                @scaled(k)
                def helper(x):
                    return x
            else:
                @functools.lru_cache
                def helper(x):
                    return x * k

            @jit_cache(backend=NAME)
            def build():
                log("compile")
                return LightKernel("k", helper(10))
            return build
        """,
    )
    script = 'import kern\nshow([kern.make(k, how)()() for how in ("decorated", "cached") for k in (1, 2)])'
    assert_made_once(fresh, script, [[10, 20, 10, 20]], 4)


def test_functions_of_one_name_in_two_modules_have_their_own_kernels(fresh: FreshProject) -> None:
    for name, value in (("one", 1), ("two", 2)):
        fresh.kernels(f"{name}.py", VALUE_READERS["own text"].format(value))
    assert_made_once(fresh, "import one, two\nshow([one.build()(), two.build()()])", [[1, 2]], 2)


def test_functions_bound_to_one_name_in_turn_have_their_own_kernels(fresh: FreshProject) -> None:
    fresh.kernels(
        "kern.py",
        """
        def build():
            log("compile")
            return LightKernel("k", 1)
        first = jit_cache(backend=NAME)(build)
        def build():
            log("compile")
            return LightKernel("k", 2)
        second = jit_cache(backend=NAME)(build)
        """,
    )
    assert_made_once(fresh, "import kern\nshow([kern.first()(), kern.second()()])", [[1, 2]], 2)


def test_functions_given_as_arguments_have_their_own_kernels(fresh: FreshProject) -> None:
    fresh.kernels(
        "kern.py",
        """
        import functools
        OFFSET = 10
        def twice(x): return 2 * x + OFFSET
        def thrice(x): return 3 * x
        def times(k): return lambda x: k * x
        @jit_cache(backend=NAME)
        def build(f):
            log("compile")
            return LightKernel("k", f(1))
        """,
    )
    script = """
        import functools, kern
        given = [kern.twice, kern.thrice, kern.times(4), kern.times(5), functools.partial(pow, 6), kern.twice]
        show([kern.build(f)() for f in given])
        kern.OFFSET = 20
        show(kern.build(kern.twice)())
    """
    assert_made_once(fresh, script, [[12, 3, 4, 5, 6, 12], 22], 6)


def test_a_module_that_is_not_in_sys_modules_is_keyed_by_what_it_reads(fresh: FreshProject) -> None:
    path = fresh.root / "loose.py"
    script = f"""
        import importlib.util
        spec = importlib.util.spec_from_file_location("loose_module", {str(path)!r})
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        show(module.build()())
    """
    for value in (1, 2):
        fresh.kernels("loose.py", VALUE_READERS["helper"].format(value))
        assert_made_once(fresh, script, [value], 1)


def test_a_script_is_keyed_by_what_its_functions_read_and_import(fresh: FreshProject) -> None:
    script = """
        from pytest_quack import jit_cache
        from support.light import NAME, LightKernel, log
        import helper
        VALUE = 1
        def inner():
            return VALUE
        @jit_cache(backend=NAME)
        def build():
            from helper import number
            log("compile")
            return LightKernel("k", 10 * number() + inner())
        show(build()())
    """
    fresh.write("helper.py", "def number():\n    return 1\n")
    assert_made_once(fresh, script, [11], 1)
    fresh.write("helper.py", "def number():\n    return 2\n")
    assert_made_once(fresh, script, [21], 1)
    assert_made_once(fresh, script.replace("VALUE = 1", "VALUE = 3"), [23], 1)


@pytest.fixture
def chain(fresh: FreshProject) -> FreshProject:
    fresh.write("pkg/__init__.py", "")
    fresh.kernels(
        "pkg/kern.py",
        """
        from sibling import helper
        @jit_cache(backend=NAME)
        def build(n=0):
            log("compile")
            return LightKernel("k", helper.value() + n)
        """,
    )
    fresh.write("sibling/__init__.py", "")
    fresh.write("sibling/helper.py", "from .base import BASE\n\ndef value():\n    return BASE\n")
    fresh.write("sibling/base.py", "BASE = 1\n")
    fresh.write("sibling/unrelated.py", "X = 1\n")
    return fresh


CHAIN = "from pkg import kern\nshow(kern.build()())"


def test_edits_that_mean_nothing_hit_and_edits_that_do_miss(chain: FreshProject) -> None:
    assert_made_once(chain, CHAIN, [1], 1)
    chain.write("sibling/helper.py", "# why\nfrom .base import BASE\n\ndef value():\n    return BASE  # so\n")
    chain.write("sibling/unrelated.py", "X = 2\n")
    (chain.root / "sibling" / "base.py").touch()
    untouched = chain.run(CHAIN)
    assert (untouched.values, untouched.compiles) == ([1], 0)
    chain.write("sibling/base.py", "BASE = 2\n")
    assert_made_once(chain, CHAIN, [2], 1)
    chain.write("sibling/helper.py", "from .base import BASE\n\ndef value():\n    return BASE + 10\n")
    assert_made_once(chain, CHAIN, [12], 1)


def test_moving_the_project_hits(chain: FreshProject, tmp_path: Path) -> None:
    assert_made_once(chain, CHAIN, [1], 1)
    moved = tmp_path / "elsewhere" / "deep"
    moved.parent.mkdir()
    chain.root.rename(moved)
    chain.root = moved
    again = chain.run(CHAIN, cwd=tmp_path)
    assert (again.values, again.compiles) == ([1], 0)


KEYS = """
from pkg import kern
direct = kern.build.__quack_jit__.direct_key((3,), {})
show([direct.key, direct.parts])
"""


def test_keys_are_the_same_in_processes_with_other_folders_and_hash_seeds(chain: FreshProject, tmp_path: Path) -> None:
    one = chain.run(KEYS, PYTHONHASHSEED="1")
    moved = tmp_path / "elsewhere"
    chain.root.rename(moved)
    chain.root = moved
    two = chain.run(KEYS, cwd=tmp_path, PYTHONHASHSEED="4711", QUACK_CACHE_DIR=str(tmp_path / "other"))
    assert one.values == two.values


def test_versions_and_the_host_are_part_of_the_key(chain: FreshProject) -> None:
    for environ in ({}, {"LIGHT_VERSION": "2"}, {"LIGHT_FEATURES": "avx2"}, {"LIGHT_FEATURES": "avx2 avx512f"}):
        assert_made_once(chain, CHAIN, [1], 1, **environ)


ENVIRON = """
import os
@jit_cache(backend=NAME{0})
def build():
    log("compile")
    return LightKernel("k", int(os.environ.get({1}, "0")))
"""


def test_an_environment_variable_that_the_source_reads_is_part_of_the_key(fresh: FreshProject) -> None:
    fresh.kernels("kern.py", ENVIRON.format("", '"KERN_TILE"'))
    assert_made_once(fresh, CALL, [0], 1)
    assert_made_once(fresh, CALL, [8], 1, KERN_TILE="8")
    assert_made_once(fresh, CALL, [16], 1, KERN_TILE="16")
    other = fresh.run(CALL, KERN_OTHER="1")
    assert (other.values, other.compiles) == ([0], 0)


def test_a_variable_that_changes_while_the_process_runs_gives_the_new_kernel(fresh: FreshProject) -> None:
    fresh.kernels("kern.py", ENVIRON.format("", '"KERN_TILE"'))
    script = """
        import os, kern
        show(kern.build()())
        os.environ["KERN_TILE"] = "8"
        show(kern.build()())
        del os.environ["KERN_TILE"]
        show(kern.build()())
    """
    assert_made_once(fresh, script, [0, 8, 0], 2)


COMPUTED_ENVIRON = {
    "name in a variable": "NAME_OF = 'KERN_' + 'TILE'\ndef read(): return os.environ.get(NAME_OF, '0')",
    "alias": "env = os.environ\ndef read(): return env['KERN_' + 'TILE'] if 'KERN_' + 'TILE' in env else '0'",
    "helper": "def get(name): return os.getenv(name, '0')\ndef read(): return get('KERN_TILE')",
    "method": "get = os.environ.get\ndef read(): return get('KERN_TILE', '0')",
    "expanded text": "def read(): return os.path.expandvars('$KERN' + '_TILE').replace('$KERN_TILE', '0')",
    "bytes": "def read(): return os.environb.get(b'KERN' + b'_TILE', b'0')",
    "module imported inside": "def read():\n    import late\n    return late.TILE",
}


@pytest.mark.parametrize("text", COMPUTED_ENVIRON.values(), ids=COMPUTED_ENVIRON)
@pytest.mark.parametrize("is_stored", [True, False])
def test_a_variable_read_by_a_name_that_only_the_run_tells_is_never_stale(
    fresh: FreshProject, text: str, is_stored: bool
) -> None:
    fresh.write("late.py", "import os\nTILE = os.environ.get('_'.join(['KERN', 'TILE']), '0')")
    fresh.kernels(
        "kern.py",
        f"""
import os
{text}

@jit_cache(backend=NAME)
def build():
    log("compile")
    return LightKernel("k", int(read()))
""",
    )
    environ = {} if is_stored else {"QUACK_CACHE_ENABLED": "0"}
    for tile in (0, 8, 16):
        more = {"KERN_TILE": str(tile)} if tile else {}
        first, second = (fresh.run(CALL, **environ, **more) for _ in range(2))
        assert (first.values, second.values) == ([tile], [tile])
        assert (first.compiles, second.compiles) == ((1, 0) if is_stored else (1, 1))
    if "late" in text:
        return  # what was read when a module was imported stays as it is
    script = """
        import os, kern
        from pytest_quack import CompilePending, pool_scope
        show(kern.build()())
        show(kern.build()())
        for tile in ("8", "8", "16"):
            os.environ["KERN_TILE"] = tile
            show(kern.build()())
        with pool_scope(2) as pool:
            for tile in ("32", "64"):
                os.environ["KERN_TILE"] = tile
                for _ in range(2):
                    try:
                        show(kern.build()())
                        break
                    except CompilePending as pending:
                        pool.wait(pending.key)
    """
    assert fresh.run(script, **environ).values == [0, 0, 8, 8, 16, 32, 64]


def test_a_variable_that_others_read_while_a_kernel_compiles_is_not_part_of_it(fresh: FreshProject) -> None:
    fresh.kernels(
        "kern.py",
        """
import os, subprocess, sys, tempfile
@jit_cache(backend=NAME)
def build():
    log("compile")
    subprocess.run([sys.executable, "-c", ""], env=dict(os.environ))
    tempfile.gettempdir()
    return LightKernel("k", 1)
""",
    )
    assert_made_once(fresh, CALL, [1], 1, TMPDIR="/tmp")
    assert fresh.run(CALL, TMPDIR="/var/tmp").compiles == 0


def test_a_variable_that_the_decorator_names_is_part_of_the_key(fresh: FreshProject) -> None:
    fresh.kernels("kern.py", ENVIRON.format(', environ=["KERN_TILE"]', '"".join(["KERN", "_TILE"])'))
    assert_made_once(fresh, CALL, [8], 1, KERN_TILE="8")
    assert_made_once(fresh, CALL, [16], 1, KERN_TILE="16")


def test_an_ignored_global_is_not_part_of_the_key(fresh: FreshProject) -> None:
    text = "import threading\nLOCK = threading.Lock()\nCOUNT = 0\n@jit_cache(backend=NAME, ignore=['LOCK', 'COUNT'])\n"
    text += "def build():\n    with LOCK:\n        log('compile'); return LightKernel('k', COUNT * 0 + 1)"
    fresh.kernels("kern.py", text)
    assert_made_once(fresh, CALL + "\nkern.COUNT = 1\nshow(kern.build()())", [1, 1], 1)


DYNAMIC = """
import importlib
@jit_cache(backend=NAME)
def build(name):
    log("compile")
    return LightKernel("k", importlib.import_module("plug_" + name).VALUE)
"""


def test_a_module_that_is_imported_by_a_computed_name_is_checked(fresh: FreshProject) -> None:
    fresh.kernels("kern.py", DYNAMIC)
    fresh.write("plug_a.py", "VALUE = 1\n")
    script = "import kern\nshow(kern.build('a')())"
    assert_made_once(fresh, script, [1], 1)
    fresh.write("plug_a.py", "VALUE = 2\n")
    assert_made_once(fresh, script, [2], 1)


@pytest.mark.parametrize("early", ["kern.build('b')", "import plug_a"], ids=["an earlier compile", "somebody else"])
def test_a_module_imported_by_a_computed_name_is_checked_though_it_was_loaded_before(
    fresh: FreshProject, early: str
) -> None:
    fresh.kernels("kern.py", DYNAMIC)
    fresh.write("plug_a.py", "VALUE = 1\n")
    fresh.write("plug_b.py", "import plug_a\nVALUE = 5\n")
    script = f"import kern\n{early}\nshow(kern.build('a')())"
    fresh.run(script)
    assert fresh.run(script).compiles == 0
    fresh.write("plug_a.py", "VALUE = 2\n")
    assert fresh.run(script).values == [2]


EDIT_WHILE_RUNNING = """
import pathlib, sys, time
import kern
path = pathlib.Path(kern.__file__).parent / "helper.py"
started = time.time_ns()
def edit():
    # The file system's clock ticks coarsely: write until the change is dated after the import.
    while path.stat().st_mtime_ns <= started:
        path.write_text("def number():\\n    return 2\\n")
"""


def test_an_edit_while_the_process_runs_is_never_stored_under_a_wrong_key(fresh: FreshProject) -> None:
    fresh.kernels(
        "kern.py",
        """
        import helper
        hook = None
        @jit_cache(backend=NAME, ignore=["hook"])
        def build():
            log("compile")
            if hook is not None:
                hook()
            return LightKernel("k", helper.number())
        """,
    )
    for when in ("kern.hook = edit", "edit()"):  # during the compile, and before it
        fresh.write("helper.py", "def number():\n    return 1\n")
        assert fresh.run(f"{EDIT_WHILE_RUNNING}\n{when}\nshow(kern.build()())").values == [1], (
            "what runs is the old text"
        )
        fresh.write("helper.py", "def number():\n    return 1\n")
        assert_made_once(fresh, CALL, [1], 1)
        fresh.write("helper.py", "def number():\n    return 2\n")
        assert_made_once(fresh, CALL, [2], 1)
        for entry in sorted(fresh.cache.rglob("*"), reverse=True):
            entry.rmdir() if entry.is_dir() else entry.unlink()


def test_an_edited_module_is_compiled_at_each_call_and_the_reason_is_given(fresh: FreshProject) -> None:
    fresh.kernels("kern.py", "import helper\n" + VALUE_READERS["own text"].format("helper.number()"))
    fresh.write("helper.py", "def number():\n    return 1\n")
    ran = fresh.run(f"{EDIT_WHILE_RUNNING}\nedit()\nshow(kern.build()())\nshow(kern.build()())")
    assert (ran.values, ran.compiles) == ([1, 1], 2)
    assert ran.stderr.count("helper.py was edited after it was imported") == 1


def plain(a: Any, b: Any = 2, *rest: Any, c: Any = 3, **more: Any) -> LightKernel:
    log("compile plain")
    return LightKernel("plain", 0.0)


def key_of(function: Callable[..., Any], *args: Any, **kwargs: Any) -> str:
    return JitFunction(function, (), (), NAME).direct_key(args, kwargs).key


def test_positional_keyword_and_default_arguments_give_one_key(runtime: Runtime) -> None:
    assert len({key_of(plain, 1), key_of(plain, a=1), key_of(plain, 1, 2), key_of(plain, b=2, a=1, c=3)}) == 1
    assert key_of(plain, 1, x=1, y=2) == key_of(plain, 1, y=2, x=1)
    different = [key_of(plain, 1), key_of(plain, 2), key_of(plain, 1, 1), key_of(plain, 1, c=2), key_of(plain, 1, 2, 3)]
    different += [key_of(plain, 1, x=1), key_of(plain, 1, y=1), key_of(plain, True), key_of(plain, 1.0)]
    assert len(set(different)) == len(different)


def test_two_keys_that_differ_say_in_which_part(runtime: Runtime) -> None:
    jit = JitFunction(plain, (), (), NAME)
    one, other = jit.direct_key((1,), {}), jit.direct_key((2,), {})
    assert one.differing_parts(other.parts) == ("arguments",)
    assert one.differing_parts(one.parts) == ()
    assert one.differing_parts({**one.parts, "new": "1"}) == ("new",)


def test_arguments_that_do_not_fit_raise_as_the_call_would(runtime: Runtime) -> None:
    with pytest.raises(TypeError, match="'a'"):
        key_of(plain)


def test_an_argument_without_a_canonical_form_is_named(runtime: Runtime) -> None:
    with pytest.raises(UnkeyableError, match=r"of its argument b: .*generator"):
        key_of(plain, 1, (x for x in [1]))


def test_the_check_of_a_key_fails_when_an_argument_reads_something_else(runtime: Runtime) -> None:
    values = [1]
    fingerprint = Fingerprint(plain, (), ())
    _, check = fingerprint.compute(fingerprint.bind((lambda: values,), {}), find_backend(NAME), NAME, ())
    assert check is not None
    assert check()
    values.append(2)
    assert not check()


def test_flat_values_are_those_whose_type_and_equality_say_all() -> None:
    assert all(map(is_flat_value, [1, True, "a", b"a", None, 1.5, float("inf"), int, LightKernel]))
    assert not any(map(is_flat_value, [0.0, -0.0, (), (1,), [1], {}, 1j, functools.partial(int), Path("a")]))


def test_a_call_is_described_in_one_short_line(runtime: Runtime) -> None:
    class Rude:
        def __repr__(self) -> str:
            raise ValueError

    fingerprint = Fingerprint(plain, (), ())
    text = describe_call(plain, fingerprint.bind((1, "x" * 100, Rude(), "a\nb"), {"d": int}))
    assert text.startswith("plain(a=1, b='xxx")
    assert "\n" not in text
    assert len(text) <= 120
