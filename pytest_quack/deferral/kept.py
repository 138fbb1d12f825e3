"""What wider fixtures say in an attempt that does not count.

Such a fixture is set up once and stays, so what it prints, logs and warns of is part of some result. It is kept for the
item whose attempt it was set up or torn down in, and is in the same phase of the attempt of that item that counts.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Final

import pytest

from pytest_quack.deferral import internals
from pytest_quack.deferral.attempt import Attempt

PLUGIN_NAME: Final = "pytest_quack_kept"


class KeptOutput:
    """What is kept for each item, by its position; a plugin that is registered when there is something."""

    def __init__(self, config: pytest.Config, current: Callable[[], int]) -> None:
        """Take how to find the item that runs now."""
        self._config = config
        self._current = current
        self._captured = internals.CapturedOutput(config)
        self._kept: dict[int, list[tuple[str, str, str]]] = {}  # phase, stream, text

    @contextlib.contextmanager
    def listen(self, attempt: Attempt, phase: str) -> Iterator[None]:
        """Note in the attempt what is captured and warned of in the block."""
        __tracebackhide__ = True
        position, record = self._captured.position(), internals.recorded_warnings()
        before = len(record)
        try:
            yield
        finally:
            said = self._captured.since(position)
            attempt.wider_output += [(phase, stream, text) for stream, text in said.items()]
            attempt.wider_warnings += record[before:]

    def keep(self, index: int, said: list[tuple[str, str, str]]) -> None:
        """Have this be part of the result that the item will have."""
        if said:
            self._kept.setdefault(index, []).extend(said)
            if not self._config.pluginmanager.hasplugin(PLUGIN_NAME):
                self._config.pluginmanager.register(self, PLUGIN_NAME)

    def forget(self, index: int) -> None:
        """The item has its result."""
        self._kept.pop(index, None)

    def close(self) -> None:
        if self._config.pluginmanager.hasplugin(PLUGIN_NAME):
            self._config.pluginmanager.unregister(self)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self) -> None:
        self._say_again("setup")

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_call(self) -> None:
        self._say_again("call")

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_teardown(self) -> None:
        self._say_again("teardown")

    def _say_again(self, phase: str) -> None:
        for when, stream, text in self._kept.get(self._current(), ()):
            if when == phase:
                self._captured.put(stream, text)


def add_sections(report: pytest.TestReport, said: list[tuple[str, str, str]]) -> None:
    """Add to a report what came after it was made."""
    for phase, stream, text in said:
        title = f"Captured {stream} {phase}"
        at = next((i for i, section in enumerate(report.sections) if section[0] == title), None)
        if at is None:
            report.sections.append((title, text))
        else:
            between = "\n" if stream == "log" else ""  # pytest strips what was logged
            report.sections[at] = (title, report.sections[at][1] + between + text)
