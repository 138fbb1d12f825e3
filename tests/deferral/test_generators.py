"""The remembered state of a generator is always the one that it has."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_quack.deferral.generators import Generators, PythonState

PYTHON_STEPS: dict[str, Callable[[], Any]] = {
    "nothing": lambda: None,
    "random": random.random,
    "gauss": lambda: random.gauss(0.0, 1.0),
    "bytes": lambda: random.randbytes(4000),
    "seed": lambda: random.seed(7),
    "setstate": lambda: random.setstate(random.Random(3).getstate()),
}


@pytest.fixture(autouse=True)
def untouched() -> Iterator[None]:
    before = Generators.capture()
    yield
    before.restore()


@pytest.mark.light
@given(st.lists(st.sampled_from(sorted(PYTHON_STEPS)), max_size=12))
def test_state_of_random_is_the_one_it_has(steps: list[str]) -> None:
    for step in steps:
        PYTHON_STEPS[step]()
        assert Generators.capture().python == random.getstate(), step


@pytest.mark.light
def test_state_of_random_is_taken_anew_only_where_it_changed() -> None:
    taken = []
    remembered = PythonState(lambda: taken.append(1) or random.getstate())  # type: ignore[func-returns-value]
    random.seed(1)
    first = remembered.state()
    assert remembered.state() is first
    assert len(taken) == 1
    random.random()
    assert remembered.state() == random.getstate() != first
    assert len(taken) == 2
    random.seed(1)
    random.gauss(0.0, 1.0)
    with_gauss = remembered.state()
    random.seed(1)
    random.random()
    random.random()
    assert remembered.state() == random.getstate() != with_gauss


def test_states_of_numpy_and_torch_are_put_back() -> None:
    numpy_random = pytest.importorskip("numpy.random", reason="needs numpy")
    torch = pytest.importorskip("torch", reason="needs torch")
    numpy_random.randn()
    state = Generators.capture()
    drawn = [(numpy_random.randn(), torch.rand(1).item()) for _ in range(3)]
    state.restore()
    assert [(numpy_random.randn(), torch.rand(1).item()) for _ in range(3)] == drawn
