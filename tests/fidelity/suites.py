"""Random test suites: what there may be in one, as data, and the files that it stands for.

What a fixture that is wider than a function prints, logs, warns of or raises is marked "wide": it appears in the report
of whichever test runs first or last in its scope, which depends on the order. Everything else is marked "narrow" and
belongs to one test.
"""

from __future__ import annotations

import random
import textwrap
from dataclasses import dataclass, field
from pathlib import Path

import hypothesis
from hypothesis import strategies as st

KINDS = (
    "pass",
    "fail",
    "raise",
    "skip",
    "skip mark",
    "xfail",
    "xfail strict",
    "xpass",
    "xpass strict",
    "xfail call",
    "subtests",
    "bad kernel",
    "property",
    "tmp_path",
    "monkeypatch",
    "capsys",
    "caplog",
)
PLACES = ("body", "body", "body", "late", "twice", "thread", "async", "tear-down", "none")
TORCH_PLACES = ("autograd", "custom op")
CASE_KINDS = ("pass", "fail", "raise", "skip", "expected failure", "unexpected success", "sub-tests", "clean-up fails")
CASE_PLACES = ("body", "body", "setUp", "setUpClass", "tearDown", "async", "none")
SCOPES = ("function", "class", "module", "package", "session")
TROUBLES = ("", "", "", "", "", "set-up", "tear-down")
KEYS = 5
SECONDS = (0.0, 0.01, 0.03, 0.08)


@dataclass(frozen=True)
class FixtureSpec:
    """A fixture; `trouble` says what of it fails, `uses` whether it asks for the fixture before it."""

    scope: str
    params: int
    is_autouse: bool
    trouble: str
    has_kernel: bool
    is_noisy: bool
    uses_former: bool


@dataclass(frozen=True)
class TestSpec:
    """A test function or method; `uses` picks among the fixtures that it can see, `key` among the suite's kernels."""

    __test__ = False

    kind: str
    place: str
    key: int
    is_noisy: bool
    uses: tuple[int, ...]
    params: int


@dataclass(frozen=True)
class ClassSpec:
    is_case: bool
    has_hooks: bool
    tests: tuple[TestSpec, ...]


@dataclass(frozen=True)
class ModuleSpec:
    fixtures: tuple[FixtureSpec, ...]
    tests: tuple[TestSpec, ...]
    classes: tuple[ClassSpec, ...]
    has_hooks: bool


@dataclass(frozen=True)
class SuiteSpec:
    """A suite: fixtures for all, modules at the top, and packages of modules with fixtures of their own."""

    fixtures: tuple[FixtureSpec, ...]
    modules: tuple[ModuleSpec, ...]
    packages: tuple[tuple[tuple[FixtureSpec, ...], tuple[ModuleSpec, ...]], ...]


def _tuples(strategy: st.SearchStrategy, most: int, least: int = 0) -> st.SearchStrategy:
    return st.lists(strategy, min_size=least, max_size=most).map(tuple)


def _fixtures(scopes: tuple[str, ...]) -> st.SearchStrategy[FixtureSpec]:
    return st.builds(
        FixtureSpec,
        scope=st.sampled_from(scopes),
        params=st.sampled_from((0, 0, 0, 2)),
        is_autouse=st.sampled_from((False, False, True)),
        trouble=st.sampled_from(TROUBLES),
        has_kernel=st.sampled_from((False, False, True)),
        is_noisy=st.booleans(),
        uses_former=st.booleans(),
    )


def _tests(kinds: tuple[str, ...], places: tuple[str, ...], params: tuple[int, ...]) -> st.SearchStrategy[TestSpec]:
    return st.builds(
        TestSpec,
        kind=st.sampled_from(kinds),
        place=st.sampled_from(places),
        key=st.integers(0, KEYS - 1),
        is_noisy=st.booleans(),
        uses=_tuples(st.integers(0, 3), 2),
        params=st.sampled_from(params),
    )


def suites(*, has_torch: bool = False) -> st.SearchStrategy[SuiteSpec]:
    """Suites of a few modules; with `has_torch`, kernels are also called by autograd and by custom ops."""
    places = PLACES + (TORCH_PLACES if has_torch else ())
    tests = _tests(KINDS, places, (0, 0, 0, 2))
    classes = st.one_of(
        st.builds(ClassSpec, is_case=st.just(False), has_hooks=st.booleans(), tests=_tuples(tests, 3, 1)),
        st.builds(
            ClassSpec,
            is_case=st.just(True),
            has_hooks=st.booleans(),
            tests=_tuples(_tests(CASE_KINDS, CASE_PLACES, (0,)), 3, 1),
        ),
    )
    modules = st.builds(
        ModuleSpec,
        fixtures=_tuples(_fixtures(("function", "class", "module")), 3),
        tests=_tuples(tests, 4, 1),
        classes=_tuples(classes, 2),
        has_hooks=st.booleans(),
    )
    packages = st.tuples(_tuples(_fixtures(SCOPES), 2), _tuples(modules, 2, 1))
    return st.builds(
        SuiteSpec, fixtures=_tuples(_fixtures(SCOPES), 2), modules=_tuples(modules, 2, 1), packages=_tuples(packages, 2)
    )


@dataclass
class _Writer:
    """Turns one suite into files."""

    folder: Path
    name: str
    names: int = 0
    visible: list[tuple[str, str]] = field(default_factory=list)  # fixtures in sight: name, scope

    def kernel(self, key: int) -> str:
        return f'call("{self.name}_k{key}", {SECONDS[key % len(SECONDS)]})'

    def fresh(self, stem: str) -> str:
        self.names += 1
        return f"{self.name}_{stem}{self.names}"

    def fixture(self, spec: FixtureSpec) -> str:
        name = self.fresh(spec.scope)
        mark = "narrow" if spec.scope == "function" else "wide"
        rank = SCOPES.index(spec.scope)
        wider = [other for other, scope in self.visible if SCOPES.index(scope) >= rank]
        former = wider[-1] if spec.uses_former and wider else None
        arguments = ", ".join(["request", *filter(None, [former])])
        options = [f'scope="{spec.scope}"']
        if spec.params:
            options.append(f"params={list(range(spec.params))}")
        if spec.is_autouse:
            options.append("autouse=True")
        lines = [
            f"@pytest.fixture({', '.join(options)})",
            f"def {name}({arguments}):",
            f'    label = "{mark} {name}" + str(getattr(request, "param", ""))',
            '    log(f"begin {label}")',
        ]
        if spec.is_noisy:
            lines.append('    noise(f"{label} in set-up")')
        if spec.has_kernel:
            lines.append(f"    {self.kernel(self.names % KEYS)}")
        if spec.trouble == "set-up":
            lines.append('    raise RuntimeError(f"{label} cannot be set up")')
        lines += ['    log(f"set up {label}")', "    yield 1.0", '    log(f"tear down {label}")']
        if spec.is_noisy:
            lines.append('    noise(f"{label} in tear-down")')
        if spec.trouble == "tear-down":
            lines.append('    raise RuntimeError(f"{label} cannot be torn down")')
        self.visible.append((name, spec.scope))
        return "\n".join(lines) + "\n"

    def uses(self, spec: TestSpec) -> list[str]:
        chosen = [self.visible[i % len(self.visible)][0] for i in spec.uses] if self.visible else []
        return list(dict.fromkeys(chosen))

    def test(self, spec: TestSpec, *, is_method: bool = False) -> str:
        name = self.fresh("test_").removeprefix(f"{self.name}_")
        arguments = ["self"] if is_method else []
        arguments += self.uses(spec)
        marks = {
            "skip mark": '@pytest.mark.skip(reason="narrow mark")',
            "xfail": '@pytest.mark.xfail(reason="narrow expected")',
            "xfail strict": '@pytest.mark.xfail(reason="narrow strict", strict=True)',
            "xpass": '@pytest.mark.xfail(reason="narrow pass")',
            "xpass strict": '@pytest.mark.xfail(reason="narrow strict pass", strict=True)',
        }
        lines = [marks[spec.kind]] if spec.kind in marks else []
        if spec.params:
            lines.append(f'@pytest.mark.parametrize("number", {list(range(spec.params))})')
            arguments.append("number")
        extra = {
            "subtests": ["subtests"],
            "property": ["record_property"],
            "tmp_path": ["tmp_path"],
            "monkeypatch": ["monkeypatch"],
            "capsys": ["capsys"],
            "caplog": ["caplog"],
        }
        arguments += extra.get(spec.kind, [])
        if spec.place == "tear-down":
            arguments.append("request")
        lines.append(f"def {name}({', '.join(arguments)}):")
        body = []
        if spec.is_noisy:
            body.append(f'noise("narrow {name}")')
        body += self.kind_before(spec.kind)
        body += self.place(spec)
        if spec.place == "late":
            body = [f'print("narrow {name} begins")', *body, f'print("narrow {name} ends")']
        body += self.kind_after(spec)
        lines.append(textwrap.indent("\n".join(body), "    "))
        return "\n".join(lines) + "\n"

    def place(self, spec: TestSpec) -> list[str]:
        kernel = self.kernel(spec.key)
        return {
            "body": [f"value = {kernel}"],
            "late": ["value = 1.0", f"value = {kernel}"],
            "twice": [f"value = {kernel}", f"value = {self.kernel(spec.key + 1)}"],
            "thread": [f"value = in_thread(lambda: {kernel})"],
            "async": ["async def main():", "    await asyncio.sleep(0)", f"    return {kernel}", "value = run(main())"],
            "tear-down": [f"request.addfinalizer(lambda: {kernel})", "value = 1.0"],
            "none": ["value = 1.0"],
            "autograd": [f"value = through_autograd(lambda: {kernel})"],
            "custom op": [f'value = through_custom_op("{self.name}_k{spec.key}")'],
        }[spec.place]

    def kind_before(self, kind: str) -> list[str]:
        return {
            "subtests": ["for i in range(3):", "    with subtests.test(i=i):", "        assert i != 1"],
            "property": ['record_property("narrow", "before")'],
            "tmp_path": ["assert list(tmp_path.iterdir()) == []", '(tmp_path / "file").write_text("narrow")'],
            "monkeypatch": ['assert "NARROW" not in os.environ', 'monkeypatch.setenv("NARROW", "1")'],
            "capsys": ['print("narrow to be read")'],
            "caplog": ['caplog.set_level(0, logger="suite")'],
        }.get(kind, [])

    def kind_after(self, spec: TestSpec) -> list[str]:
        return {
            "fail": ['assert {"value": value, "more": [1, 2]} == {"value": 2.0, "more": [1, 3]}'],
            "raise": ['raise LookupError("narrow trouble") from ValueError("narrow cause")'],
            "skip": ['pytest.skip("narrow reason")'],
            "xfail": ["assert value == 2.0"],
            "xfail strict": ["assert value == 2.0"],
            "xfail call": ['pytest.xfail("narrow call")'],
            "subtests": ["with subtests.test(msg='last'):", f"    assert {self.kernel(spec.key + 1)} == 1.0"],
            "bad kernel": [f'call_bad("{self.name}_bad{spec.key}")'],
            "property": ['record_property("narrow", value)'],
            "capsys": ['assert capsys.readouterr().out == "narrow to be read\\n"', 'print("narrow after reading")']
            if not spec.is_noisy
            else ["capsys.readouterr()"],
            "caplog": ['logging.getLogger("suite").debug("narrow debug")', "assert caplog.records"],
        }.get(spec.kind, ["assert value == 1.0"])

    def case_test(self, spec: TestSpec) -> str:
        name = self.fresh("test_").removeprefix(f"{self.name}_")
        lines = ["@unittest.expectedFailure"] if spec.kind in ("expected failure", "unexpected success") else []
        is_async = spec.place == "async"
        lines.append(f"{'async ' if is_async else ''}def {name}(self):")
        body = [f'noise("narrow {name}")'] if spec.is_noisy else []
        if spec.kind == "clean-up fails":
            body.append("self.addCleanup(lambda: 1 / 0)")
        body.append(f"value = {self.kernel(spec.key)}" if spec.place in ("body", "async") else "value = 1.0")
        body += {
            "fail": ["self.assertEqual([value], [2.0])"],
            "raise": ['raise LookupError("narrow trouble")'],
            "skip": ['self.skipTest("narrow reason")'],
            "expected failure": ["self.assertEqual(value, 2.0)"],
            "sub-tests": [
                "for i in range(3):",
                "    with self.subTest(i=i):",
                f"        self.assertEqual({self.kernel(spec.key + 2)}, 2.0 if i == 1 else 1.0)",
            ],
        }.get(spec.kind, ["self.assertEqual(value, 1.0)"])
        lines.append(textwrap.indent("\n".join(body), "    "))
        return "\n".join(lines) + "\n"

    def class_of(self, spec: ClassSpec) -> str:
        name = "Test" + self.fresh("C")
        if not spec.is_case:
            lines = [f"class {name}:"]
            if spec.has_hooks:
                lines += [
                    f"    def setup_method(self):\n        self.value = {self.kernel(self.names % KEYS)}\n",
                    f'    def teardown_method(self):\n        noise("narrow teardown_method of {name}")\n',
                    "    @classmethod\n    def setup_class(cls):",
                    textwrap.indent(_wide_set_up(name), "        "),
                    "    @classmethod\n    def teardown_class(cls):",
                    textwrap.indent(_wide_tear_down(name), "        "),
                ]
            lines += [textwrap.indent(self.test(test, is_method=True), "    ") for test in spec.tests]
            return "\n".join(lines)
        is_async = any(test.place == "async" for test in spec.tests)
        lines = [f"class {name}(unittest.{'IsolatedAsyncioTestCase' if is_async else 'TestCase'}):"]
        places = {test.place: test.key for test in spec.tests}
        for method in ("setUp", "tearDown"):
            if method in places:
                lines.append(f"    def {method}(self):\n        {self.kernel(places[method])}\n")
        if "setUpClass" in places or spec.has_hooks:
            kernel = self.kernel(places["setUpClass"]) + "\n" if "setUpClass" in places else ""
            lines.append("    @classmethod\n    def setUpClass(cls):")
            lines.append(textwrap.indent(kernel + _wide_set_up(name), "        "))
            lines.append("    @classmethod\n    def tearDownClass(cls):")
            lines.append(textwrap.indent(_wide_tear_down(name), "        "))
        lines += [textwrap.indent(self.case_test(test), "    ") for test in spec.tests]
        return "\n".join(lines)

    def module(self, spec: ModuleSpec, folder: Path) -> None:
        name = self.fresh("m")
        outside = list(self.visible)
        parts = [self.fixture(fixture) for fixture in spec.fixtures]
        if spec.has_hooks:
            parts.append("def setup_module():\n" + textwrap.indent(_wide_set_up(name), "    "))
            parts.append("def teardown_module():\n" + textwrap.indent(_wide_tear_down(name), "    "))
        parts += [self.test(test) for test in spec.tests]
        parts += [self.class_of(spec_of_class) for spec_of_class in spec.classes]
        (folder / f"test_{name}.py").write_text(_HEAD + "\n\n".join(parts))
        self.visible = outside

    def conftest(self, fixtures: tuple[FixtureSpec, ...], folder: Path) -> None:
        (folder / "conftest.py").write_text(_HEAD + "\n\n".join(self.fixture(fixture) for fixture in fixtures))

    def suite(self, spec: SuiteSpec) -> None:
        self.folder.mkdir(parents=True)
        self.conftest(spec.fixtures, self.folder)
        for module in spec.modules:
            self.module(module, self.folder)
        for fixtures, modules in spec.packages:
            outside = list(self.visible)
            package = self.folder / self.fresh("package")
            package.mkdir()
            (package / "__init__.py").write_text("")
            self.conftest(fixtures, package)
            for module in modules:
                self.module(module, package)
            self.visible = outside


def _wide_set_up(name: str) -> str:
    return f'log("begin wide {name}")\nnoise("wide {name} in set-up")\nlog("set up wide {name}")\n'


def _wide_tear_down(name: str) -> str:
    return f'log("tear down wide {name}")\nnoise("wide {name} in tear-down")\n'


_HEAD = """\
import asyncio
import logging
import os
import unittest

import pytest
from fidelity.kernels import call, call_bad, in_thread, log, noise, run, through_autograd, through_custom_op

"""


def draw(count: int, seed: int, *, has_torch: bool = False) -> list[SuiteSpec]:
    """So many random suites, always the same for a seed."""
    found: list[SuiteSpec] = []

    @hypothesis.seed(seed)
    @hypothesis.settings(
        max_examples=count,
        phases=[hypothesis.Phase.generate],
        database=None,
        deadline=None,
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    @hypothesis.given(suites(has_torch=has_torch))
    def collect(spec: SuiteSpec) -> None:
        found.append(spec)

    collect()
    return found


def write(spec: SuiteSpec, folder: Path) -> None:
    """Write a suite's files into `folder`, whose name is also the prefix of its kernels, fixtures and modules."""
    _Writer(folder, folder.name).suite(spec)


def cool_down(cache: Path, seed: int) -> None:
    """Have about half of the kernels of a warm cache be missing again."""
    chooser = random.Random(seed)
    for pointer in sorted(cache.glob("direct/*/*")):
        if chooser.random() < 0.5:
            pointer.unlink()
