"""Everything that leans on the inside of pytest and pluggy, one small function each.

Written for pytest 8.3 to 9.2 and pluggy 1.5 to 1.7; `tests/deferral/test_internals.py` notices when one changes.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import shutil
import sys
import types
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import pytest
from _pytest import fixtures as _fixtures
from _pytest import logging as _logging
from _pytest import runner as _runner
from _pytest import warnings as _warnings

HookExec = Callable[[str, Sequence[Any], dict[str, Any], bool], Any]

# Where pytest runs tear-down code and fixture set-up: frames of this code on the stack tell what kind of code runs.
_TEARDOWN_CODE: Final = frozenset({_runner.SetupState.teardown_exact.__code__, _fixtures.FixtureDef.finish.__code__})
_FIXTURE_SETUP_CODE: Final = _fixtures.pytest_fixture_setup.__code__
_COLLECTOR_SETUP_CODE: Final = _runner.SetupState.setup.__code__


def swap_hook_exec(caller: Any, execute: HookExec) -> HookExec:
    """Have every call of one hook run through `execute`; returns what it ran through before.

    pluggy keeps that function on each hook caller. Callers for a subset of plugins (conftest files) copy it when they
    are first used, which for the hooks of a test run is later than this.
    """
    before: HookExec = caller._hookexec
    caller._hookexec = execute
    return before


def forget_historic_call(caller: Any, kwargs: dict[str, Any]) -> None:
    """Take a call back out of what pluggy repeats to plugins that are registered later."""
    history = getattr(caller, "_call_history", None)
    if history:
        history[:] = [entry for entry in history if entry[0] is not kwargs]


def holds_fixtures(session: pytest.Session, node: Any) -> bool:
    """Whether anything besides the node itself will be torn down with it."""
    entry = session._setupstate.stack.get(node)
    return entry is not None and len(entry[0]) > 1


def is_torn_down_to(session: pytest.Session, nextitem: pytest.Item | None) -> bool:
    """Whether nothing is set up that `nextitem` does not need."""
    stack = list(session._setupstate.stack)
    needed: list[Any] = nextitem.listchain() if nextitem is not None else []
    return stack == needed[: len(stack)]


def tear_down_to(session: pytest.Session, nextitem: pytest.Item | None) -> None:
    """Tear down what is set up now and `nextitem` does not need. Raises what the finalizers raise."""
    session._setupstate.teardown_exact(nextitem)


def why_not_abandon(frame: types.FrameType | None) -> str | None:
    """Why code that runs in `frame` must not be interrupted for good; None where it may be."""
    for code, local_frame in _frames(frame):
        if code is _COLLECTOR_SETUP_CODE and local_frame.f_locals.get("col") is not local_frame.f_locals.get("item"):
            return "it runs in the set-up of a collector"
        if code in _TEARDOWN_CODE:
            return "it runs in a tear-down"
        if code is _FIXTURE_SETUP_CODE:
            fixturedef = local_frame.f_locals.get("fixturedef")
            if fixturedef is not None and fixturedef.scope != "function":
                return f"it runs in the set-up of a {fixturedef.scope} fixture"
        if code.co_name == "__del__":
            return "it runs in __del__, where an exception is lost"
    return None


def _frames(frame: types.FrameType | None) -> Iterator[tuple[types.CodeType, types.FrameType]]:
    while frame is not None:
        yield frame.f_code, frame
        frame = frame.f_back


def forget_failed_subtests(item: pytest.Item) -> None:
    """Forget sub-tests of this item that failed in an attempt that does not count (pytest 9 counts them)."""
    subtests = sys.modules.get("_pytest.subtests")
    key = getattr(subtests, "failed_subtests_key", None)
    counts = item.config.stash.get(key, None) if key is not None else None
    if counts is not None:
        counts.pop(item.nodeid, None)
        if hasattr(item, "id"):  # 9.2 counts by NodeId
            counts.pop(item.id, None)


def give_back_temporary(item: pytest.Item, path: Path) -> None:
    """Remove a test's temporary directory, so that the next one gets the same name."""
    shutil.rmtree(path, ignore_errors=True)
    numbers = getattr(getattr(item.config, "_tmp_path_factory", None), "_next_number", None)  # since 9.2
    prefix = path.name.rstrip("0123456789")
    if numbers is not None and numbers.get(prefix.lower()) == int(path.name[len(prefix) :] or 0) + 1:
        numbers[prefix.lower()] -= 1


class CapturedOutput:
    """What has been captured so far of the phase that runs, by stream: "stdout", "stderr", "log".

    Gives nothing where nothing is captured.
    """

    def __init__(self, config: pytest.Config) -> None:
        self._plugins: Final = config.pluginmanager

    def position(self) -> dict[str, int]:
        """Where each stream ends now."""
        ends = {name: file.buffer.seek(0, os.SEEK_END) for name, file in self._files().items()}
        log = self._log()
        return ends if log is None else {**ends, "log": len(log.getvalue())}

    def since(self, position: Mapping[str, int]) -> dict[str, str]:
        """What has come since then."""
        texts = {}
        for name, file in self._files().items():
            file.buffer.seek(position[name])
            texts[name] = file.buffer.read().decode(errors="replace")
        log = self._log()
        if log is not None and "log" in position:
            texts["log"] = log.getvalue()[position["log"] :]
        return {name: text for name, text in texts.items() if text}

    def put(self, stream: str, text: str) -> None:
        """Have `text` be captured, and be shown nowhere now."""
        log, file = self._log(), self._files().get(stream)
        if stream == "log" and log is not None:
            log.write(text)
        elif file is not None:
            io.TextIOWrapper.write(file, text)  # `--capture=tee-sys` would show it once more

    def _files(self) -> dict[str, Any]:
        capturing = getattr(self._plugins.get_plugin("capturemanager"), "_global_capturing", None)
        files = {}
        for name, attribute in (("stdout", "out"), ("stderr", "err")):
            file = getattr(getattr(capturing, attribute, None), "tmpfile", None)
            if isinstance(file, io.TextIOWrapper):
                file.flush()
                files[name] = file
        return files

    def _log(self) -> Any:
        handler = getattr(self._plugins.get_plugin("logging-plugin"), "report_handler", None)
        return getattr(handler, "stream", None)


def recorded_warnings() -> list[warnings.WarningMessage]:
    """The list that warnings of this moment are recorded in; an empty one where that cannot be known."""
    record = getattr(getattr(warnings, "_showwarnmsg_impl", None), "__self__", None)
    return record if isinstance(record, list) else []


@contextlib.contextmanager
def as_in_teardown(item: pytest.Item) -> Iterator[list[tuple[str, str, str]]]:
    """Capture, log and warn as in the tear-down of an item; afterwards the list holds the new report sections."""
    plugins, sections = item.config.pluginmanager, item._report_sections
    before, new = len(sections), list[tuple[str, str, str]]()
    with contextlib.ExitStack() as stack:
        if plugins.hasplugin("warnings"):
            catch = _warnings.catch_warnings_for_item
            stack.enter_context(catch(config=item.config, ihook=item.ihook, when="runtest", item=item))
        _runner._update_current_test_var(item, "teardown")
        stack.callback(_runner._update_current_test_var, item, None)
        if (logger := plugins.get_plugin("logging-plugin")) is not None:
            item.stash[_logging.caplog_records_key] = {}
            stack.callback(item.stash._storage.pop, _logging.caplog_records_key, None)
            stack.callback(item.stash._storage.pop, _logging.caplog_handler_key, None)
            stack.enter_context(_as_context(logger._runtest_for(item, "teardown")))
        if (capture := plugins.get_plugin("capturemanager")) is not None:
            stack.enter_context(capture.item_capture("teardown", item))
        yield new
    new += sections[before:]
    del sections[before:]


def _as_context(manager: Any) -> Any:
    """pytest 8 has a generator where later ones have a context manager."""
    return manager if hasattr(manager, "__enter__") else contextlib.contextmanager(lambda: manager)()


def log_file_handler(config: pytest.Config) -> logging.Handler | None:
    """The handler that writes `--log-file`; None where nobody asked for one."""
    handler = getattr(config.pluginmanager.get_plugin("logging-plugin"), "log_file_handler", None)
    if not isinstance(handler, logging.FileHandler) or handler.baseFilename == os.path.abspath(os.devnull):
        return None
    return handler


def crash_line(report: pytest.TestReport) -> str:
    """The error of a failed report in one line."""
    crash = getattr(report.longrepr, "reprcrash", None)
    text = crash.message if crash is not None else report.longreprtext.strip()
    return (text.splitlines() or ["no reason given"])[0]


def mark_fixture_as_set_up(fixturedef: Any, request: Any, error: BaseException) -> None:
    """Have the finalizers of a fixture run whose set-up was abandoned.

    pytest does so for errors that it knows as outcomes; from 9.2 on a fixture without a result is not finished at all.
    """
    if fixturedef.cached_result is None:
        fixturedef.cached_result = (None, fixturedef.cache_key(request), (error, None))


def swap_fixture_finish(finish: Callable[..., Any]) -> Callable[..., Any]:
    """Have fixtures be torn down through `finish(fixturedef, request)`; returns what they were torn down through."""
    before: Callable[..., Any] = _fixtures.FixtureDef.finish
    _fixtures.FixtureDef.finish = finish  # type: ignore[method-assign]
    return before


def finish_failed_fixtures(item: pytest.Item, is_failure: Callable[[BaseException], bool]) -> None:
    """Have fixtures that failed be set up anew: pytest keeps the error of a wider one as long as its value."""
    info = getattr(item, "_fixtureinfo", None)
    for fixturedefs in info.name2fixturedefs.values() if info is not None else ():
        for fixturedef in fixturedefs:
            failure = fixturedef.cached_result[2] if fixturedef.cached_result is not None else None
            error = failure[0] if isinstance(failure, tuple) else failure
            if error is not None and is_failure(error):
                function: Any = item
                if not function._request:
                    function._initrequest()
                fixturedef.finish(function._request)


def forget_log_records(config: pytest.Config) -> None:
    """Forget the log records of the last phase: what they refer to would live on with them."""
    plugin = config.pluginmanager.get_plugin("logging-plugin")
    for name in ("caplog_handler", "report_handler"):
        handler = getattr(plugin, name, None)
        if handler is not None:
            handler.reset()


def note_phase(item: pytest.Item, when: str) -> None:
    """Note that a phase is over, where the tear-down of tmp_path looks for it."""
    key = getattr(sys.modules.get("_pytest.tmpdir"), "tmppath_result_key", None)
    if key is not None:
        item.stash.setdefault(key, {})[when] = True


def forget_unittest_errors(item: pytest.Item) -> None:
    """Forget what a TestCase method has noted of its attempt; pytest would raise it in the next phase."""
    item.__dict__.pop("_excinfo", None)


class ItemState:
    """What an attempt may change on an item, to be put back before the next one.

    Covers the attributes (the next attempt gets a test-class instance of its own), markers, keywords, the stash, report
    sections, user properties, and the contents of mutable parameters.
    """

    def __init__(self, item: pytest.Item) -> None:
        self._attributes = dict(item.__dict__)
        self._stash = dict(item.stash._storage)
        self._lists = {
            name: list(getattr(item, name)) for name in _LISTS if isinstance(getattr(item, name, None), list)
        }
        keywords: Any = item.keywords
        self._keywords = dict(keywords._markers) if hasattr(keywords, "_markers") else None
        callspec = getattr(item, "callspec", None)
        params = callspec.params.values() if callspec is not None else ()
        self._parameters = [(value, _copy(value)) for value in params if isinstance(value, _MUTABLE)]

    def restore(self, item: pytest.Item) -> None:
        item.__dict__.clear()
        item.__dict__.update(self._attributes)
        item.stash._storage.clear()
        item.stash._storage.update(self._stash)
        for name, values in self._lists.items():
            getattr(item, name)[:] = values
        if self._keywords is not None:
            keywords: Any = item.keywords
            keywords._markers.clear()
            keywords._markers.update(self._keywords)
        for value, former in self._parameters:
            _restore(value, former)
        if item.__dict__.get("_instance") is not None:
            # pytest makes the test-class instance when it collects the item, and a new one where there is none.
            del item.__dict__["_instance"]
            item.__dict__.pop("_obj", None)
        if hasattr(item, "_request"):
            function: Any = item
            function._request = False  # pytest makes a new one for an item that runs again
            function.funcargs = None


_LISTS: Final = ("user_properties", "_report_sections", "own_markers", "extra_keyword_matches")
_MUTABLE: Final = (list, dict, set, bytearray)


def _copy(value: Any) -> Any:
    """A copy of plain containers all the way down; anything else inside is shared."""
    kind = type(value)
    if kind in (list, tuple, set, frozenset):
        return kind(_copy(part) for part in value)
    if kind is dict:
        return {name: _copy(part) for name, part in value.items()}
    return bytearray(value) if kind is bytearray else value


def _restore(value: Any, former: Any) -> None:
    """Put the former contents back into the same object: others may hold it too."""
    if isinstance(value, (list, bytearray)):
        value[:] = former
    else:
        value.clear()
        value.update(former)
