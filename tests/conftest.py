"""Worlds and implementations that many tests share."""

import pytest
import torch

from parity.protocol import Implementation, load_implementation
from parity.runs import with_another_pad
from parity.world import World, flash, toy


@pytest.fixture(scope="session")
def worlds() -> dict[str, World]:
    """DeepSeek-V4.1-Flash, the same with a pad token that compresses to another id, and a toy."""
    real = flash()
    return {"flash": real, "another_pad": with_another_pad(real), "toy": toy()}


@pytest.fixture(scope="session")
def model() -> tuple[Implementation, torch.device]:
    """The reference's model of one step, on the CPU."""
    return load_implementation("reference"), torch.device("cpu")


@pytest.fixture(scope="session")
def under_test(request: pytest.FixtureRequest, device: torch.device) -> tuple[Implementation, torch.device]:
    """The implementation that `--impl` names, and its device."""
    return load_implementation(request.config.getoption("--impl")), device
