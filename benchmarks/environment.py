"""What a run ran on: card, driver, versions, date and command."""

from __future__ import annotations

import platform
import shlex
import subprocess
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import torch

_UNKNOWN = "unknown"


def describe(device: torch.device, arguments: Sequence[str], baseline: str) -> dict[str, str]:
    """Describe machine, software and command, by name; paths are cut to their last part.

    Args:
        device: where the work runs.
        arguments: of the command line.
        baseline: name and fingerprint, or "none".
    """
    import triton

    gpu = device.type == "cuda"
    words = [Path(word).name if "/" in word else word for word in arguments]
    return {
        "card": torch.cuda.get_device_name(device) if gpu else "none",
        "driver": _first_line("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader") if gpu else "none",
        "cuda": torch.version.cuda or "none",
        "processor": _processor(),
        "system": platform.system(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
        "commit": _first_line("git", "describe", "--always", "--dirty"),
        "baseline": baseline,
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "command": shlex.join(["python", "-m", "benchmarks", *words]),
    }


def _first_line(*command: str) -> str:
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, check=True, timeout=20, cwd=Path(__file__).parent
        )
    except (OSError, subprocess.SubprocessError):
        return _UNKNOWN
    return (done.stdout.splitlines() or [_UNKNOWN])[0]


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
