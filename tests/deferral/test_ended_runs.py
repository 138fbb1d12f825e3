"""Runs that end before their time leave nothing behind: no process, no lock, no directory."""

from __future__ import annotations

import pytest

from support.ended import WAYS, end
from support.inner import InnerProject

pytest.importorskip("xdist", reason="needs pytest-xdist")
pytestmark = [pytest.mark.light, pytest.mark.slow]


@pytest.mark.parametrize("arguments", [(), ("-n", "2")], ids=["alone", "xdist"])
@pytest.mark.parametrize("way", WAYS)
def test_nothing_is_left(inner: InnerProject, way: str, arguments: tuple[str, ...]) -> None:
    assert end(inner, way, *arguments) == []
    if "SIGTERM" not in way and "SIGKILL" not in way and "twice" not in way:
        assert inner.log_path.read_text().count("down") == inner.log_path.read_text().count("up")


@pytest.mark.parametrize("way", ["Ctrl-C", "SIGINT to the controller"])
def test_test_that_ignores_an_interrupt_is_ended_too(inner: InnerProject, way: str) -> None:
    stubborn = """
        while True:
            try:
                time.sleep(60)
            except KeyboardInterrupt:
                pass
    """
    assert end(inner, way, "-n", "2", body=stubborn) == []
