"""Notices when the inside of pytest or pluggy that we lean on changes."""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Iterator

import pytest

from pytest_quack.deferral import internals
from pytest_quack.deferral.local import bookmark_beside

pytestmark = pytest.mark.light


def test_every_call_of_a_hook_goes_through_the_swapped_function(pytester: pytest.Pytester) -> None:
    config = pytester.parseconfig()
    seen = []

    def execute(name, methods, kwargs, firstresult):  # type: ignore[no-untyped-def]
        seen.append(name)
        return before(name, methods, kwargs, firstresult)

    before = internals.swap_hook_exec(config.hook.pytest_markeval_namespace, execute)
    config.hook.pytest_markeval_namespace(config=config)
    assert seen == ["pytest_markeval_namespace"]
    internals.swap_hook_exec(config.hook.pytest_markeval_namespace, before)
    config.hook.pytest_markeval_namespace(config=config)
    assert len(seen) == 1


def test_historic_calls_can_be_taken_back(pytester: pytest.Pytester) -> None:
    config = pytester.parseconfig()
    caller = config.hook.pytest_warning_recorded
    kwargs = {"warning_message": None, "when": "runtest", "nodeid": "", "location": None}
    methods = internals.swap_hook_exec(caller, lambda *args: [])
    caller.call_historic(kwargs=kwargs)
    assert any(entry[0] is kwargs for entry in caller._call_history)
    internals.forget_historic_call(caller, kwargs)
    assert not any(entry[0] is kwargs for entry in caller._call_history)
    internals.swap_hook_exec(caller, methods)


@pytest.fixture(scope="module")
def reason_in_a_module_fixture() -> str | None:
    return internals.why_not_abandon(sys._getframe())


@pytest.fixture
def reason_in_a_function_fixture() -> str | None:
    return internals.why_not_abandon(sys._getframe())


def test_kind_of_code_is_read_off_the_stack(
    reason_in_a_module_fixture: str | None, reason_in_a_function_fixture: str | None
) -> None:
    assert internals.why_not_abandon(sys._getframe()) is None
    assert reason_in_a_function_fixture is None
    assert reason_in_a_module_fixture == "it runs in the set-up of a module fixture"


def test_item_state_covers_what_an_attempt_changes(pytester: pytest.Pytester) -> None:
    item = pytester.getitem(
        "import pytest\nclass TestIt:\n    @pytest.mark.parametrize('x', [[1]])\n    def test_it(self, x): pass\n",
        "test_it[x0]",
    )
    key = pytest.StashKey[int]()
    state = internals.ItemState(item)
    instance = item.instance
    item.callspec.params["x"].append(2)
    item.add_marker(pytest.mark.usefixtures("request"))
    item.user_properties.append(("a", 1))
    item.add_report_section("call", "stdout", "text")
    item.stash[key] = 1
    item.left_over = True
    state.restore(item)
    assert item.callspec.params["x"] == [1]
    assert not list(item.iter_markers("usefixtures"))
    assert "usefixtures" not in item.keywords
    assert item.user_properties == []
    assert item._report_sections == []
    assert key not in item.stash
    assert not hasattr(item, "left_over")
    assert item.instance is not instance


def test_failed_subtests_are_counted_where_we_take_them_back(request: pytest.FixtureRequest) -> None:
    subtests = pytest.importorskip("_pytest.subtests", reason="sub-tests are part of pytest from version 9 on")
    counts = request.config.stash[subtests.failed_subtests_key]
    item = request.node
    key = getattr(item, "id", item.nodeid)
    counts[key] += 1
    internals.forget_failed_subtests(item)
    assert key not in counts


def test_temporary_directory_is_given_back(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> None:
    first = tmp_path_factory.mktemp("given_back")
    internals.give_back_temporary(request.node, first)
    assert tmp_path_factory.mktemp("given_back") == first


def test_what_is_captured_can_be_read_and_put(request: pytest.FixtureRequest) -> None:
    captured = internals.CapturedOutput(request.config)
    before = captured.position()
    assert before.keys() == {"stdout", "stderr", "log"}
    print("to stdout")
    print("to stderr", file=sys.stderr)
    logging.getLogger().warning("to the log")
    seen = captured.since(before)
    assert seen["stdout"] == "to stdout\n"
    assert seen["stderr"] == "to stderr\n"
    assert "to the log" in seen["log"]
    before = captured.position()
    for stream in before:
        captured.put(stream, f"put into {stream}\n")
    assert captured.since(before) == {stream: f"put into {stream}\n" for stream in before}


def test_where_warnings_are_recorded_is_known() -> None:
    with warnings.catch_warnings(record=True) as record:
        warnings.simplefilter("always")
        warnings.warn("recorded", UserWarning, stacklevel=1)
        assert internals.recorded_warnings() is record
        assert len(record) == 1


def test_tear_down_between_items_is_captured_as_in_one(request: pytest.FixtureRequest) -> None:
    item = bookmark_beside(request.node)
    capture = request.config.pluginmanager.get_plugin("capturemanager")
    with capture.global_and_fixture_disabled(), internals.as_in_teardown(item) as said:
        print("torn down")
        logging.getLogger().warning("logged")
    assert ("teardown", "stdout", "torn down\n") in said
    assert any(stream == "log" and "logged" in text for _, stream, text in said)
    assert item._report_sections == []


@pytest.fixture
def finished(request: pytest.FixtureRequest) -> Iterator[list[str]]:
    names: list[str] = []

    def finish(fixturedef, request):  # type: ignore[no-untyped-def]
        names.append(fixturedef.argname)
        before(fixturedef, request)

    before = internals.swap_fixture_finish(finish)
    yield names
    internals.swap_fixture_finish(before)


def test_fixtures_are_torn_down_through_the_swapped_function(
    finished: list[str], request: pytest.FixtureRequest
) -> None:
    definition = request._get_active_fixturedef("finished")
    request.getfixturevalue("reason_in_a_function_fixture")
    request._get_active_fixturedef("reason_in_a_function_fixture").finish(request)
    assert finished == ["reason_in_a_function_fixture"]
    assert definition.cached_result is not None


def test_what_is_set_up_for_an_item_is_known(request: pytest.FixtureRequest) -> None:
    assert internals.is_torn_down_to(request.session, request.node)
    assert not internals.is_torn_down_to(request.session, None)
