"""Options and fixtures of every test: `--device`, `--profile`, `--seed`, `--impl`, `--expected-failures`."""

import os
import platform
from collections import Counter
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, Phase, settings

from parity.device import choose_device
from parity.expected import ExpectedFailures, read_expected_failures
from parity.protocol import NotOffered, load_implementation

_QUIET = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow, HealthCheck.data_too_large]}
settings.register_profile("dev", max_examples=50, **_QUIET)
settings.register_profile("ci", max_examples=200, derandomize=True, print_blob=True, **_QUIET)
settings.register_profile("nightly", max_examples=5000, print_blob=True, **_QUIET)
# That a mutant is caught is all that matters, not by how small a case.
_UNSHRUNK = {"derandomize": True, "database": None, "phases": [Phase.explicit, Phase.generate]}
settings.register_profile("mutation", max_examples=50, **_UNSHRUNK, **_QUIET)


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("engram parity")
    group.addoption("--device", default="auto", help="cpu (Triton's interpreter), cuda, or auto: cuda if it is there")
    group.addoption(
        "--profile", help="hypothesis profile: dev, ci, nightly or mutation (default: ci where CI is set, else dev)"
    )
    group.addoption(
        "--impl",
        default="optimized",
        help="implementation the laws judge: reference, optimized, or a port: my_module or my_module:object",
    )
    group.addoption("--expected-failures", type=Path, metavar="FILE", help="lines `id | reason | issue`, strictly so")
    group.addoption("--seed", type=int, help="seed of the drawn cases (as `python -m parity --seed`)")


@pytest.hookimpl(tryfirst=True)  # before hypothesis's own plugin reads its seed
def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "gpu: needs a CUDA device")
    config.addinivalue_line("markers", "port: judges what `--impl` names (given to every test that asks for it)")
    profile = config.getoption("--profile") or ("ci" if os.environ.get("CI") else "dev")
    settings.load_profile(profile)
    seed = config.getoption("--seed")
    if seed is not None:
        config.option.hypothesis_seed = seed
        settings.register_profile("seeded", settings.default, derandomize=False)
        settings.load_profile("seeded")
    torch.set_num_threads(1)  # small tensors, and two workers on two cores: more threads only get in each other's way
    config.stash[_DEVICE] = choose_device(config.getoption("--device"))
    try:
        path = config.getoption("--expected-failures")
        config.stash[_EXPECTED] = read_expected_failures(path) if path else ExpectedFailures()
        name = config.getoption("--impl")
        # Ours are imported by the tests that need them, so that one which is broken spoils no other room's tests.
        config.stash[_PORT] = name if name in ("reference", "optimized") else load_implementation(name).describe()
    except (OSError, ValueError, TypeError, AttributeError, ImportError) as error:
        raise pytest.UsageError(str(error)) from error
    drawn = "fixed" if settings.default and settings.default.derandomize else "drawn"
    config.stash[_CASES] = f"profile {profile}, seed {drawn if seed is None else seed}"


_DEVICE = pytest.StashKey[torch.device]()
_PORT = pytest.StashKey[str]()
_CASES = pytest.StashKey[str]()
_EXPECTED = pytest.StashKey[ExpectedFailures]()
_LACKS = "--impl lacks "


def pytest_report_header(config: pytest.Config) -> list[str]:
    expected = config.stash[_EXPECTED]
    versions = ", ".join(f"{name} {version(name)}" for name in ("torch", "triton", "numpy", "hypothesis"))
    return [
        f"engram parity: implementation {config.stash[_PORT]}",
        f"engram parity: device {config.stash[_DEVICE]}, {config.stash[_CASES]}; "
        f"Python {platform.python_version()}, {versions}",
        *([f"engram parity: {len(expected)} failures are expected by {expected.name}"] if expected.name else []),
    ]


@pytest.hookimpl(tryfirst=True)  # before `-m` and `-k` take tests away
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    _expect_failures(config, items)
    for item in items:
        if "under_test" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.port)
        if item.get_closest_marker("gpu") and config.stash[_DEVICE].type != "cuda":
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device (--device cuda)"))


def _expect_failures(config: pytest.Config, items: list[pytest.Item]) -> None:
    expected = config.stash[_EXPECTED]
    for item in items:
        if entry := expected.find(item.nodeid):
            item.add_marker(pytest.mark.xfail(strict=True, reason=f"{entry.reason} ({entry.issue})"))
    whole = {item.nodeid.partition("::")[0] for item in items} if not any("::" in one for one in config.args) else set()
    for name in expected.stale(item.nodeid for item in items):
        file = name.partition("::")[0]
        if file in whole or not (config.rootpath / file).is_file():
            raise pytest.UsageError(f"{expected.name}: got {name!r}, expected the id of a test that there is")


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Iterator[None]:
    """Skip a test that asks the implementation under test for what it lacks."""
    try:
        return (yield)
    except NotOffered as lacking:
        if lacking.implementation != pyfuncitem.config.getoption("--impl"):
            pytest.fail(str(lacking))  # by itself it would be taken for a skip
        pytest.skip(f"{_LACKS}{lacking.path}")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Count what a port was not judged on."""
    reasons = (report.longrepr[2] for report in terminalreporter.stats.get("skipped", ()))
    lacking = Counter(reason.partition(_LACKS)[2] for reason in reasons if _LACKS in reason)
    for path, count in sorted(lacking.items()):
        terminalreporter.write_line(f"engram parity: NOT JUDGED: {path}, which --impl lacks: {count} tests skipped")


@pytest.fixture(scope="session")
def device(request: pytest.FixtureRequest) -> torch.device:
    """The device under test; on the CPU, Triton's interpreter runs the kernels."""
    return request.config.stash[_DEVICE]
