"""What an xdist worker is told by its controller when it starts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import pytest

from pytest_quack.compile.server import Address

# Under this name workers find what is theirs in `config.workerinput`, and the controller in `workeroutput`.
WORKER_DATA: Final = "pytest_quack"


@dataclass(frozen=True, slots=True)
class WorkerData:
    """What a worker is told by the controller.

    Attributes:
        address: where the controller's pool is.
        name: the worker's name.
        mark: the file for the running test.
        controller_pid: the controller's process.
    """

    address: Address
    name: str
    mark: str
    controller_pid: int


def find_worker_data(config: pytest.Config) -> WorkerData | None:
    """What the controller has told this worker; None where it has not, or there is none."""
    plain = getattr(config, "workerinput", {}).get(WORKER_DATA)
    if not plain:
        return None
    address = Address(plain["machine"], plain["path"], plain["secret"])
    return WorkerData(address, plain["name"], plain["mark"], plain["controller_pid"])
