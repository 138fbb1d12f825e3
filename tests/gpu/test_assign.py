"""Which devices a run may use, and who gets which: CUDA's rules for CUDA_VISIBLE_DEVICES, and an even spread."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_quack.gpu.assign import Choice, environment, read_visible, spread
from pytest_quack.gpu.devices import Device
from support.devices import FOUR, MIXED, PARTITIONED, device

pytestmark = pytest.mark.light


def names(text: str | None, devices: list[Device], order: str | None = None) -> list[str]:
    return [choice.name for choice in read_visible(text, devices, order).choices]


@pytest.mark.parametrize(
    ("text", "expected", "ignored"),
    [
        (None, ["0", "1", "2", "3"], ""),
        ("1", ["1"], ""),
        ("2,3", ["2", "3"], ""),
        ("3,0", ["3", "0"], ""),
        (" 2 , 3 ", ["2", "3"], ""),
        ("3,3", ["3"], ""),
        ("", [], ""),
        (" ", [], ""),
        ("-1", [], ""),
        ("0,-1,1", ["0"], ""),
        ("0,", ["0"], ""),
        ("0,,1", ["0"], ""),
        (",0", [], ""),
        ("0,9", ["0"], "9"),
        ("9,0", [], "9"),
        ("one,0", [], "one"),
        ("²", [], "²"),
        ("1e0", [], "1e0"),
        ("GPU-22-abc2", ["GPU-22-abc2"], ""),
        ("GPU-2,GPU-0", ["GPU-2", "GPU-0"], ""),
        ("GPU-", [], "GPU-"),
        ("GPU-9", [], "GPU-9"),
        ("1,GPU-11-abc1", ["1"], ""),
        ("GPU-3,1", ["GPU-3", "1"], ""),
        ("MIG-1", [], "MIG-1"),
    ],
)
def test_the_callers_list(text: str | None, expected: list[str], ignored: str) -> None:
    visible = read_visible(text, FOUR, None)
    assert [choice.name for choice in visible.choices] == expected
    assert visible.ignored == ignored
    assert visible.is_callers_list == (text is not None)


@pytest.mark.parametrize(
    ("text", "expected", "devices"),
    [
        (None, ["0", "MIG-13-77", "MIG-14-77", "2"], [0, 1, 2, 3]),
        ("MIG-14-77", ["MIG-14-77"], [2]),
        ("MIG-14,MIG-13", ["MIG-14", "MIG-13"], [2, 1]),
        ("MIG-1", [], []),
        ("MIG-GPU-11-abc1/4/0", ["MIG-GPU-11-abc1/4/0"], [2]),
        ("MIG-14-77,MIG-GPU-11-abc1/4/0", ["MIG-14-77"], [2]),
        ("1", ["1"], [1]),
        ("GPU-11", ["GPU-11"], [1]),
        ("2,MIG-13,GPU-00", ["2", "MIG-13", "GPU-00"], [3, 1, 0]),
    ],
)
def test_partitioned_gpus(text: str | None, expected: list[str], devices: list[int]) -> None:
    choices = read_visible(text, PARTITIONED, None).choices
    assert [choice.name for choice in choices] == expected
    assert [choice.device for choice in choices] == [PARTITIONED[index] for index in devices]


def test_a_number_says_nothing_about_the_memory_where_cuda_may_count_otherwise() -> None:
    assert [choice.device for choice in read_visible("1,GPU-2", MIXED, None).choices] == [None, MIXED[2]]
    assert [choice.device for choice in read_visible("1,GPU-2", MIXED, "PCI_BUS_ID").choices] == [MIXED[1], MIXED[2]]
    assert [choice.device for choice in read_visible(None, MIXED, None).choices] == MIXED


def shares(text: str | None, workers: int, per_worker: int = 1, devices: list[Device] = FOUR) -> list[str]:
    groups = spread(read_visible(text, devices, None).choices, workers, per_worker)
    return [",".join(choice.name for choice in group) for group in groups]


@pytest.mark.parametrize(
    ("text", "workers", "per_worker", "expected"),
    [
        ("1", 3, 1, ["1", "1", "1"]),
        ("2,3", 3, 1, ["2", "3", "2"]),
        ("3,2", 2, 1, ["3", "2"]),
        (None, 3, 1, ["0", "1", "2"]),
        (None, 4, 1, ["0", "1", "2", "3"]),
        (None, 8, 1, ["0", "1", "2", "3", "0", "1", "2", "3"]),
        (None, 2, 2, ["0,1", "2,3"]),
        ("3,1,0", 2, 2, ["3,1", "3,1"]),
        (None, 3, 4, ["0,1,2,3"] * 3),
        (None, 0, 1, []),
    ],
)
def test_spread(text: str | None, workers: int, per_worker: int, expected: list[str]) -> None:
    assert shares(text, workers, per_worker) == expected


def test_fewer_workers_than_gpus_take_those_with_most_free_memory_in_the_callers_order() -> None:
    uneven = [device(0, 3), device(1, 70.2), device(2, 80), device(3, 70.9)]
    assert shares(None, 1, devices=uneven) == ["2"]
    assert shares(None, 2, devices=uneven) == ["1", "2"]  # half a GiB more says nothing
    assert shares(None, 6, devices=uneven) == ["0", "1", "2", "3", "1", "2"]
    assert shares(None, 1, 2, devices=uneven) == ["2,3"]


@given(st.lists(st.integers(0, 100), min_size=1, max_size=9), st.integers(0, 40), st.integers(1, 3))
def test_the_spread_is_even_and_nobody_gets_what_is_not_listed(free: list[int], workers: int, per_worker: int) -> None:
    choices = [Choice(str(index), device(index, gib)) for index, gib in enumerate(free)]
    if len(choices) < per_worker:
        return
    groups = spread(choices, workers, per_worker)
    assert len(groups) == workers
    assert all(len(group) == per_worker and set(group) <= set(choices) for group in groups)
    counts = Counter(groups)
    most = max(counts.values(), default=0)
    least = min(counts.values()) if len(counts) == len(choices) // per_worker else 0
    assert most - least <= 1
    used = {choice for group in counts for choice in group}
    assert sum(len(group) for group in counts) == len(used)  # no two groups overlap


def test_environment_pins_the_order_only_where_the_numbers_are_ours() -> None:
    group = read_visible("2,3", FOUR, None).choices
    assert environment(group, is_callers_list=True) == {"CUDA_VISIBLE_DEVICES": "2,3"}
    assert environment(group, is_callers_list=False) == {
        "CUDA_VISIBLE_DEVICES": "2,3",
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
    }
