"""Make the virtual environment of the project: `python setup_environment.py .venv`.

Where the Python that runs this already has torch and triton (an image for GPUs), its packages are used as they are and
only what is missing is installed; elsewhere everything is installed as pinned in constraints.txt.
"""

import importlib.metadata
import importlib.util
import site
import subprocess
import sys
import sysconfig
import tomllib
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent


def main(target: Path) -> None:
    """Create the environment and install what the project, its tests and its benchmarks need."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    wanted = [*project["dependencies"], *extras["test"], *extras["lint"], *extras["bench"]]
    pins = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    brought = all(importlib.util.find_spec(name) for name in ("torch", "triton"))
    venv.create(target, with_pip=True, clear=True)
    python = target / "bin" / "python"
    if brought:
        _show_packages(python)
        pins = [pin for pin in pins if not _is_installed(pin)]
    else:
        # By its own pin, alone: asked for through a package's range, pip may take a newer and much larger build.
        _install(python, target, pins, ["torch"])
    _install(python, target, pins, wanted)


def _install(python: Path, target: Path, pins: list[str], wanted: list[str]) -> None:
    constraints = target / "constraints.txt"
    constraints.write_text("\n".join(pins) + "\n", encoding="utf-8")
    pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "--constraint", str(constraints), *wanted], check=True)


def _show_packages(python: Path) -> None:
    # `--system-site-packages` would miss the packages of a Python that itself stands in a virtual environment.
    query = [str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
    inside = Path(subprocess.run(query, check=True, capture_output=True, text=True).stdout.strip())
    packages = dict.fromkeys([*site.getsitepackages(), sysconfig.get_path("purelib")])
    (inside / "image.pth").write_text("\n".join(packages) + "\n", encoding="utf-8")


def _is_installed(pin: str) -> bool:
    name = pin.partition("==")[0].strip()
    return any(importlib.metadata.distributions(name=name)) if name and not name.startswith("#") else False


if __name__ == "__main__":
    main(Path(sys.argv[1]))
