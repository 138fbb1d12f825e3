"""What a compile function reads: found wherever it lies, part of the key, and noticed when it changes at run time."""

from __future__ import annotations

import functools
import sys
import textwrap
import threading
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pytest_quack.cache import direct
from pytest_quack.cache.reach import Reach, is_immutable
from pytest_quack.errors import UnkeyableError

pytestmark = pytest.mark.light


class Modules:
    """Modules of a project, written and imported by a test."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def make(self, name: str, text: str) -> Any:
        path = self.root / f"{name.replace('.', '/')}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text))
        __import__(name)
        return sys.modules[name]


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Modules]:
    monkeypatch.syspath_prepend(tmp_path)
    before = set(sys.modules)
    yield Modules(tmp_path)
    for name in set(sys.modules) - before:
        del sys.modules[name]


def holds(reach: Reach) -> bool:
    return direct.holds(reach.check)


def assert_noticed(function: Any, change: Callable[[], object]) -> None:
    """The check holds until the change, fails after it, and the values for the key differ."""
    before = Reach([function])
    encoded = before.encoded()
    assert holds(before)
    assert Reach([function]).encoded() == encoded
    change()
    assert not holds(before)
    assert Reach([function]).encoded() != encoded


KERNELS = """
    import collections
    import math
    from math import floor as rounded

    import reach_config
    import reach_config as aliased
    import reach_pkg
    from reach_config import imported_constant, other_helper

    TILE = 1
    CONFIG = {"tile": [1, 2]}
    MEMBERS = {"a", "b"}
    UNREAD = 1

    class Options:
        stages = 2

        @staticmethod
        def depth():
            return 3

    class Box:
        def __init__(self, size):
            self.size = size

    BOX = Box(1)

    class Base:
        tile = 4

    class Kernel(Base):
        unread = 1

        def __init__(self, n):
            self.n = n

        def run(self):
            return self.tile * self.scale()

        def scale(self):
            return SCALE

        @property
        def deep(self):
            return DEEP

    SCALE = 5
    DEEP = 6

    def helper():
        return HELPED

    HELPED = 7

    def scaled(k):
        import functools

        def decorate(function):
            @functools.wraps(function)
            def wrapper(*args):
                return function(*args) * k * FACTOR
            return wrapper
        return decorate

    FACTOR = 8

    @scaled(9)
    def wrapped():
        return 1

    def reads_constant(): return TILE
    def reads_dict(): return CONFIG["tile"]
    def reads_set(): return "a" in MEMBERS
    def reads_class_attribute(): return Options.stages
    def reads_class_attribute_of_base(): return Kernel.tile
    def reads_instance(): return BOX.size
    def reads_through_self(): return Kernel(1).run()
    def reads_property(): return Kernel(1).deep
    def reads_static(): return Options.depth()
    def reads_module_constant(): return reach_config.CONST
    def reads_aliased_module_constant(): return aliased.CONST
    def reads_nested_module_constant(): return reach_pkg.inner.CONST
    def reads_imported_constant(): return imported_constant
    def calls_helper(): return helper()
    def calls_other_helper(): return other_helper()
    def calls_module_helper(): return reach_config.other_helper()
    def calls_wrapped(): return wrapped()
    def calls_foreign(): return rounded(1.5)
    def reads_inside(): return [(lambda: TILE)() for _ in range(1)]
    def reads_in_default(f=helper): return f()
    def reads_imported_inside():
        from reach_config import CONST as const
        return const
    def reads_module_imported_inside():
        import reach_config as c
        return c.CONST
    def reads_package_imported_inside():
        import reach_pkg.inner
        return reach_pkg.inner.CONST
    def reads_submodule_imported_inside():
        from reach_pkg import inner
        return [inner.CONST for _ in range(1)]
    def calls_helper_imported_inside():
        from reach_config import other_helper
        def inside():
            return other_helper()
        return inside()
    def reads_by_computed_name(): return getattr(reach_config, "CON" + "ST")
    def reads_from_dict_of_module(): return vars(reach_config)["CON" + "ST"]
    def reads_dict_of_module(): return reach_config.__dict__["CON" + "ST"]
    def reads_own_globals(): return globals()["TI" + "LE"]
    def reads_class_attribute_by_getattr(): return getattr(Options, "stages")
    def reads_class_attribute_by_computed_name(): return getattr(BOX_OF, "til" + "e")
    BOX_OF = Kernel(1)
    def reads_instance_by_computed_name(): return getattr(reach_config, "hold" + "er").size
    def calls_helper_by_computed_name(): return getattr(reach_config, "other" + "_helper")()
    STORED = [reach_config]
    class Holding:
        module = reach_config
    def reads_stored_module(): return STORED[0].CONST
    def reads_module_of_a_class(): return Holding.module.CONST
    def reads_module_in_default(m=reach_config): return m.CONST
    def reads_module_by_import_module():
        import importlib
        return importlib.import_module("reach_config").CONST
    def reads_module_from_sys_modules():
        import sys
        return sys.modules["reach_config"].CONST
    def with_attribute(): return with_attribute.scale
    with_attribute.scale = 2
    def reads_function_attribute(): return with_attribute()
    class Descriptor:
        def __init__(self, value): self.value = value
        def __get__(self, instance, owner): return self.value
    class Described:
        size = Descriptor(1)
    def reads_descriptor(): return Described.size
    class Meta(type):
        def __getattr__(cls, name): return METAVALUE
    METAVALUE = 1
    class WithMeta(metaclass=Meta): pass
    def reads_through_metaclass(): return WithMeta.anything
    def reads_by_eval(): return eval("TI" + "LE")
    def with_default(n=1, *, m=2): return n + m
    def calls_with_default(): return with_default()
    def reads_in_class_body():
        class Local:
            tile = TILE
        return Local
"""
CONFIG = """
    CONST = 1
    imported_constant = 2

    class Holder:
        size = 1

    holder = Holder()
    HIDDEN = 3

    def other_helper():
        return HIDDEN
"""


@pytest.fixture
def kernels(modules: Modules) -> Any:
    modules.make("reach_config", CONFIG)
    modules.make("reach_pkg", "")
    (modules.root / "reach_pkg.py").unlink()
    del sys.modules["reach_pkg"]
    (modules.root / "reach_pkg").mkdir()
    (modules.root / "reach_pkg" / "__init__.py").write_text("from . import inner")
    (modules.root / "reach_pkg" / "inner.py").write_text("CONST = 1")
    return modules.make("reach_kernels", KERNELS)


def config() -> Any:
    return sys.modules["reach_config"]


# The function that reads, and what changes under it at run time.
CHANGES: dict[str, tuple[str, Callable[[Any], object]]] = {
    "constant": ("reads_constant", lambda k: vars(k).update(TILE=2)),
    "constant of another type": ("reads_constant", lambda k: vars(k).update(TILE=True)),
    "item of a container": ("reads_dict", lambda k: k.CONFIG["tile"].append(3)),
    "container": ("reads_dict", lambda k: vars(k).update(CONFIG={"tile": []})),
    "set": ("reads_set", lambda k: k.MEMBERS.add("c")),
    "class attribute": ("reads_class_attribute", lambda k: setattr(k.Options, "stages", 3)),
    "class attribute of a base": ("reads_class_attribute_of_base", lambda k: setattr(k.Base, "tile", 5)),
    "class attribute read through self": ("reads_through_self", lambda k: setattr(k.Base, "tile", 5)),
    "method": ("reads_through_self", lambda k: setattr(k.Kernel, "scale", lambda self: 0)),
    "global read by a method": ("reads_through_self", lambda k: vars(k).update(SCALE=6)),
    "global read by a property": ("reads_property", lambda k: vars(k).update(DEEP=7)),
    "static method": ("reads_static", lambda k: setattr(k.Options, "depth", staticmethod(lambda: 4))),
    "class": ("reads_class_attribute", lambda k: vars(k).update(Options=k.Kernel)),
    "attribute of an instance": ("reads_instance", lambda k: setattr(k.BOX, "size", 2)),
    "constant of a module": ("reads_module_constant", lambda k: vars(config()).update(CONST=2)),
    "constant of an aliased module": ("reads_aliased_module_constant", lambda k: vars(config()).update(CONST=2)),
    "constant in a package": ("reads_nested_module_constant", lambda k: setattr(k.reach_pkg.inner, "CONST", 2)),
    "another module": ("reads_module_constant", lambda k: vars(k).update(reach_config=k.reach_pkg.inner)),
    "imported constant": ("reads_imported_constant", lambda k: vars(k).update(imported_constant=3)),
    "helper": ("calls_helper", lambda k: vars(k).update(helper=lambda: 8)),
    "global of a helper": ("calls_helper", lambda k: vars(k).update(HELPED=8)),
    "global of an imported helper": ("calls_other_helper", lambda k: vars(config()).update(HIDDEN=4)),
    "helper of a module": ("calls_module_helper", lambda k: vars(config()).update(other_helper=lambda: 8)),
    "global of a module's helper": ("calls_module_helper", lambda k: vars(config()).update(HIDDEN=4)),
    "global of a decorator": ("calls_wrapped", lambda k: vars(k).update(FACTOR=9)),
    "function of the standard library": ("calls_foreign", lambda k: vars(k).update(rounded=k.math.ceil)),
    "constant read by an inner function": ("reads_inside", lambda k: vars(k).update(TILE=2)),
    "constant read in a class body": ("reads_in_class_body", lambda k: vars(k).update(TILE=2)),
    "global of a default": ("reads_in_default", lambda k: vars(k).update(HELPED=8)),
    "constant imported inside": ("reads_imported_inside", lambda k: vars(config()).update(CONST=2)),
    "constant of a module imported inside": ("reads_module_imported_inside", lambda k: vars(config()).update(CONST=2)),
    "constant of a package imported inside": (
        "reads_package_imported_inside", lambda k: setattr(k.reach_pkg.inner, "CONST", 2)
    ),
    "constant of a submodule imported inside": (
        "reads_submodule_imported_inside", lambda k: setattr(k.reach_pkg.inner, "CONST", 2)
    ),
    "helper imported inside": ("calls_helper_imported_inside", lambda k: vars(config()).update(HIDDEN=4)),
    "constant read by a computed name": ("reads_by_computed_name", lambda k: vars(config()).update(CONST=2)),
    "constant read through vars": ("reads_from_dict_of_module", lambda k: vars(config()).update(CONST=2)),
    "constant read through __dict__": ("reads_dict_of_module", lambda k: vars(config()).update(CONST=2)),
    "constant read through globals": ("reads_own_globals", lambda k: vars(k).update(TILE=2)),
    "class attribute by getattr": (
        "reads_class_attribute_by_getattr", lambda k: setattr(k.Options, "stages", 3)
    ),
    "class attribute by a computed name": (
        "reads_class_attribute_by_computed_name", lambda k: setattr(k.Base, "tile", 5)
    ),
    "instance by a computed name": (
        "reads_instance_by_computed_name", lambda k: setattr(config().holder, "size", 2)
    ),
    "default of a helper by a computed name": (
        "calls_helper_by_computed_name", lambda k: vars(config()).update(HIDDEN=4)
    ),
    "stored module": ("reads_stored_module", lambda k: vars(config()).update(CONST=2)),
    "module of a class": ("reads_module_of_a_class", lambda k: vars(config()).update(CONST=2)),
    "module in a default": ("reads_module_in_default", lambda k: vars(config()).update(CONST=2)),
    "module by import_module": ("reads_module_by_import_module", lambda k: vars(config()).update(CONST=2)),
    "module from sys.modules": ("reads_module_from_sys_modules", lambda k: vars(config()).update(CONST=2)),
    "attribute of a function": ("reads_function_attribute", lambda k: setattr(k.with_attribute, "scale", 3)),
    "state of a descriptor": ("reads_descriptor", lambda k: setattr(vars(k.Described)["size"], "value", 2)),
    "value read by a metaclass": ("reads_through_metaclass", lambda k: vars(k).update(METAVALUE=2)),
    "value read by eval": ("reads_by_eval", lambda k: vars(k).update(TILE=2)),
    "default of a helper": ("calls_with_default", lambda k: setattr(k.with_default, "__defaults__", (2,))),
    "keyword default of a helper": ("calls_with_default", lambda k: k.with_default.__kwdefaults__.update(m=3)),
    "all keyword defaults": ("calls_with_default", lambda k: setattr(k.with_default, "__kwdefaults__", None)),
    "name that is gone": ("reads_constant", lambda k: vars(k).pop("TILE")),
}  # fmt: skip


@pytest.mark.parametrize(("name", "change"), CHANGES.values(), ids=CHANGES)
def test_a_change_at_run_time_is_noticed_and_changes_the_key(
    kernels: Any, name: str, change: Callable[[Any], object]
) -> None:
    assert_noticed(getattr(kernels, name), lambda: change(kernels))


# Whatever a module holds may be what these read.
READS_ALL = {
    "calls_helper_by_computed_name",
    "reads_by_computed_name",
    "reads_by_eval",
    "reads_class_attribute_by_computed_name",
    "reads_dict_of_module",
    "reads_from_dict_of_module",
    "reads_instance_by_computed_name",
    "reads_module_by_import_module",
    "reads_module_from_sys_modules",
    "reads_module_in_default",
    "reads_module_of_a_class",
    "reads_own_globals",
    "reads_stored_module",
}


@pytest.mark.parametrize("name", sorted({name for name, _ in CHANGES.values()} - READS_ALL))
def test_a_change_of_what_is_not_read_is_ignored(kernels: Any, name: str) -> None:
    function = getattr(kernels, name)
    reach = Reach([function])
    encoded = reach.encoded()
    kernels.UNREAD = 2
    kernels.Kernel.unread = 2
    config().unread = 2
    function()  # nor does running it change what it reads
    assert holds(reach)
    assert Reach([function]).encoded() == encoded


def test_the_modules_that_are_reached_are_named(kernels: Any) -> None:
    assert Reach([kernels.calls_other_helper]).modules == {"reach_kernels", "reach_config"}
    assert Reach([kernels.reads_nested_module_constant]).modules >= {"reach_kernels", "reach_pkg.inner"}
    assert Reach([kernels.reads_constant]).modules == {"reach_kernels"}


def test_labels_say_which_module_and_name(kernels: Any) -> None:
    assert set(Reach([kernels.reads_module_constant]).encoded()) == {"reach_kernels.reach_config", "reach_config.CONST"}
    assert "reach_kernels.Base.tile" in Reach([kernels.reads_through_self]).encoded()


def test_ignored_names_are_neither_keyed_nor_checked(kernels: Any) -> None:
    for function, name, change in (
        (kernels.reads_constant, "TILE", lambda: vars(kernels).update(TILE=2)),
        (kernels.calls_other_helper, "HIDDEN", lambda: vars(config()).update(HIDDEN=4)),
        (kernels.reads_module_constant, "CONST", lambda: vars(config()).update(CONST=4)),
        (kernels.reads_through_self, "tile", lambda: setattr(kernels.Base, "tile", 9)),
    ):
        reach = Reach([function], (name,))
        encoded = reach.encoded()
        change()
        assert holds(reach), name
        assert Reach([function], (name,)).encoded() == encoded


def make_closure(start: Any) -> tuple[Callable[[], Any], Callable[[Any], None]]:
    value = start

    def function() -> Any:
        return value

    def change(new: Any) -> None:
        nonlocal value
        value = new

    return function, change


def test_a_captured_variable_that_is_bound_anew_is_noticed() -> None:
    function, change = make_closure(1)
    assert_noticed(function, lambda: change(2))


def test_a_captured_container_that_changes_is_noticed() -> None:
    held = [1]
    function, _ = make_closure(held)
    assert_noticed(function, lambda: held.append(2))


def test_what_a_captured_function_captured_is_noticed() -> None:
    inner, change = make_closure(1)
    outer, _ = make_closure(inner)
    assert_noticed(outer, lambda: change(2))


def test_closures_with_different_captured_values_differ() -> None:
    encoded = [Reach([make_closure(value)[0]]).encoded() for value in (1, True, 1.0, 2, "1")]
    assert all(one != other for i, one in enumerate(encoded) for other in encoded[:i])


def test_functions_made_of_others_are_followed(kernels: Any) -> None:
    for made in (
        functools.partial(kernels.helper),
        functools.partial(kernels.reads_in_default, kernels.helper),
        functools.lru_cache(kernels.helper),
        kernels.Kernel(1).run,
        [kernels.helper],
        {"f": (kernels.helper,)},
    ):
        reach = Reach([made])
        kernels.HELPED += 1
        kernels.SCALE += 1
        assert not holds(reach), made


def test_a_function_of_a_module_that_nobody_can_import_is_followed_by_value() -> None:
    scope: dict[str, Any] = {"__name__": "reach_unregistered"}
    text = "TILE = 1\ndef helper(): return TILE\nclass K:\n  def run(self): return helper()\ndef f(): return K().run()"
    exec(text, scope)
    assert_noticed(scope["f"], lambda: scope.update(TILE=2))


def test_the_memo_of_a_decorator_is_not_part_of_the_key(modules: Modules) -> None:
    module = modules.make(
        "reach_memo",
        """
        def memoized(function):
            import functools
            memo = {}
            @functools.wraps(function)
            def wrapper(x):
                if x not in memo:
                    memo[x] = function(x)
                return memo[x]
            return wrapper

        @memoized
        def helper(x):
            return x

        def build(x):
            return helper(x)
        """,
    )
    reach = Reach([module.build])
    encoded = reach.encoded()
    module.build(1)
    assert holds(reach)
    assert Reach([module.build]).encoded() == encoded


def test_an_unkeyable_global_is_refused_with_its_name_and_what_to_do(modules: Modules) -> None:
    module = modules.make(
        "reach_locked",
        """
        import threading
        LOCK = threading.Lock()
        class Kernel:
            guard = threading.Lock()
            def run(self):
                return self.guard
        def build():
            return LOCK
        def build_class():
            return Kernel().run()
        """,
    )
    with pytest.raises(UnkeyableError, match=r'reads reach_locked\.LOCK.*lock.*ignore=\["LOCK"\]'):
        Reach([module.build]).encoded()
    assert Reach([module.build], ("LOCK",)).encoded() == {}
    with pytest.raises(UnkeyableError, match=r'reads reach_locked\.Kernel\.guard.*ignore=\["Kernel\.guard"\]'):
        Reach([module.build_class]).encoded()
    assert Reach([module.build_class], ("Kernel.guard",)).encoded()


def test_markers_are_told_apart_by_their_names(modules: Modules) -> None:
    module = modules.make("reach_marker", "ONE = object()\nTWO = object()\ndef f(): return ONE\ndef g(): return TWO")
    reach = Reach([module.f])
    assert reach.encoded() != Reach([module.g]).encoded()
    assert holds(reach)
    module.ONE = object()
    assert not holds(reach)


def test_what_is_too_large_to_look_at_is_refused(modules: Modules) -> None:
    module = modules.make(
        "reach_large", "TABLE = [(i, [i]) for i in range(20_000)]\nAFTER = 1\ndef f():\n    return TABLE, AFTER"
    )
    with pytest.raises(UnkeyableError, match="too many"):
        Reach([module.f]).encoded()
    reach = Reach([module.f], ("TABLE",))
    assert reach.encoded()
    module.AFTER = 2
    assert not holds(reach)


def test_cyclic_structures_are_visited_once(modules: Modules) -> None:
    module = modules.make(
        "reach_cyclic",
        """
        RING = []
        RING.append(RING)
        def even(n): return n == 0 or odd(n - 1)
        def odd(n): return n != 0 and even(n - 1)
        def f(): return even(2), RING
        """,
    )
    assert_noticed(module.f, lambda: module.RING.append(1))


def test_other_distributions_are_named_not_followed() -> None:
    scope: dict[str, Any] = {"__name__": "reach_foreign", "loads": __import__("json").loads, "json": __import__("json")}
    exec("def f(): return loads('1'), json.dumps(1)", scope)
    reach = Reach([scope["f"]])
    assert reach.encoded().keys() == {"reach_foreign.loads"}
    assert reach.modules == {"reach_foreign"}


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (1, True),
        ("a", True),
        ((1, ("a", None)), True),
        (frozenset({1}), True),
        (len, True),
        (int, True),
        ([], False),
        ({}, False),
        (([],), False),
        (types.SimpleNamespace(), False),
        (threading.Lock(), False),
    ],
)
def test_immutable_is_what_cannot_change_inside(value: Any, expected: bool) -> None:
    assert is_immutable(value) is expected


def test_a_module_that_is_imported_inside_and_cannot_be_is_left_to_the_call(modules: Modules) -> None:
    kernels = modules.make(
        "reach_optional",
        """
        def build():
            try:
                from reach_broken import VALUE
            except ImportError:
                VALUE = 1
            import reach_nowhere.at_all
            return VALUE
        """,
    )
    (modules.root / "reach_broken.py").write_text("raise ImportError('no')")
    assert set(Reach([kernels.build]).encoded()) == set()


def test_defaults_without_a_canonical_form_are_for_the_source_to_say(modules: Modules) -> None:
    kernels = modules.make(
        "reach_defaults",
        """
        import threading

        def helper(lock=threading.Lock(), *, other=threading.Lock()):
            return 1

        def build():
            return helper()
        """,
    )
    reach = Reach([kernels.build])
    assert set(reach.encoded()) == {"reach_defaults.helper"}
    kernels.helper.__defaults__ = (threading.Lock(),)
    assert not holds(reach)


@pytest.mark.parametrize(
    "text", ["import sys; sys.exit('no')", "import pytest; pytest.skip('no', allow_module_level=True)"]
)
def test_a_module_that_skips_or_exits_when_it_is_imported_spoils_nothing(modules: Modules, text: str) -> None:
    (modules.root / "reach_exits.py").write_text(text)
    kernels = modules.make(
        "reach_fancy",
        """
        def build(is_fancy=False):
            if is_fancy:
                from reach_exits import VALUE
            return 1
        """,
    )
    assert set(Reach([kernels.build]).encoded()) == {"reach_fancy.build.__defaults__"}
