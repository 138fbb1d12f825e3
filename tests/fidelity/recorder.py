"""A plugin of the runs that are compared: appends what pytest tells its plugins to FIDELITY_LOG, one JSON line each."""

from __future__ import annotations

import json
import os
from typing import Any

import pytest


def _write(kind: str, **what: Any) -> None:
    with open(os.environ["FIDELITY_LOG"], "a") as file:
        file.write(json.dumps({"kind": kind, **what}) + "\n")


def _is_worker(config: pytest.Config) -> bool:
    return hasattr(config, "workerinput")


class _Recorder:
    """Of the process that reports to the user: the only one, or the controller."""

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        _write("start", nodeid=nodeid)

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        _write("finish", nodeid=nodeid)

    def pytest_runtest_logreport(self, report: Any) -> None:
        _write(
            "report",
            nodeid=report.nodeid,
            type=type(report).__name__,
            context=repr(getattr(report, "context", None)),
            when=report.when,
            outcome=report.outcome,
            wasxfail=getattr(report, "wasxfail", None),
            text=report.longreprtext,
            sections=[list(section) for section in report.sections],
            properties=[[name, repr(value)] for name, value in report.user_properties],
            keywords=sorted(map(str, report.keywords)),
            location=list(report.location),
            has_times=isinstance(report.duration, float) and report.duration >= 0 and report.stop >= report.start,
        )

    def pytest_warning_recorded(self, warning_message: Any, when: str, nodeid: str, location: Any) -> None:
        where = f"{os.path.basename(warning_message.filename)}:{warning_message.lineno}"
        category = warning_message.category.__name__
        text = f"{category} at {where}: {warning_message.message}"
        _write("warning", text=text, when=when, nodeid=nodeid, location=repr(location))

    def pytest_sessionfinish(self, exitstatus: int) -> None:
        _write("status", status=int(exitstatus))


class _Interactions:
    """Of every process that runs tests: when a debugger would be opened."""

    def pytest_exception_interact(self, node: Any, call: Any, report: Any) -> None:
        _write("interact", nodeid=node.nodeid, when=call.when, error=repr(call.excinfo.value))


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(_Interactions())
    if not _is_worker(config):
        config.pluginmanager.register(_Recorder())
