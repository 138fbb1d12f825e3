"""The documentation says what the code does."""

from __future__ import annotations

from pathlib import Path

import pytest

from pytest_quack import settings

pytestmark = pytest.mark.light
ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.parametrize("page", ["README.md", "docs/reference/settings.md"])
def test_settings_table_is_that_of_the_code(page: str) -> None:
    assert settings.table().strip() in (ROOT / page).read_text()


def test_every_option_is_in_the_help(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    text = pytester.runpytest_subprocess("-p", "pytest_quack", "--help").stdout.str()
    for option in settings.OPTIONS:
        for name in (option.flag, option.ini):
            assert name is None or name in text
