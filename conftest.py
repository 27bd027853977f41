"""Options and fixtures of every test: `--device`, `--profile`, `--seed`, `--impl`."""

import os

import pytest
import torch
from hypothesis import HealthCheck, settings

from parity.device import choose_device

_QUIET = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow, HealthCheck.data_too_large]}
settings.register_profile("dev", max_examples=50, **_QUIET)
settings.register_profile("ci", max_examples=200, derandomize=True, print_blob=True, **_QUIET)
settings.register_profile("nightly", max_examples=5000, print_blob=True, **_QUIET)


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("engram parity")
    group.addoption("--device", default="auto", help="cpu (Triton's interpreter), cuda, or auto: cuda if it is there")
    group.addoption("--profile", help="hypothesis profile: dev, ci or nightly (default: ci where CI is set, else dev)")
    group.addoption(
        "--impl",
        default="optimized",
        help="implementation the laws judge: reference, optimized, or a Python module of yours",
    )
    group.addoption("--seed", type=int, help="seed of the drawn cases (as `python -m parity --seed`)")


@pytest.hookimpl(tryfirst=True)  # before hypothesis's own plugin reads its seed
def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "gpu: needs a CUDA device")
    settings.load_profile(config.getoption("--profile") or ("ci" if os.environ.get("CI") else "dev"))
    seed = config.getoption("--seed")
    if seed is not None:
        config.option.hypothesis_seed = seed
        settings.register_profile("seeded", settings.default, derandomize=False)
        settings.load_profile("seeded")
    torch.set_num_threads(1)  # small tensors, and two workers on two cores: more threads only get in each other's way
    config.stash[_DEVICE] = choose_device(config.getoption("--device"))


_DEVICE = pytest.StashKey[torch.device]()


def pytest_report_header(config: pytest.Config) -> str:
    implementation, device = config.getoption("--impl"), config.stash[_DEVICE]
    return f"engram parity: implementation {implementation}, device {device}, torch {torch.__version__}"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.stash[_DEVICE].type == "cuda":
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device (--device cuda)"))


@pytest.fixture(scope="session")
def device(request: pytest.FixtureRequest) -> torch.device:
    """The device under test; on the CPU, Triton's interpreter runs the kernels."""
    return request.config.stash[_DEVICE]
