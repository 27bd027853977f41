"""Real processes over gloo: every way to share a layer over ranks gives what one rank has, bit for bit."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
BY_ROWS_OR_HEADS = {
    1: {4: "heads", 9: "heads", 15: "heads", 24: "heads"},
    2: {4: "heads", 9: "heads", 15: "heads", 24: "heads"},
    3: {4: "rows", 9: "heads", 15: "heads", 24: "heads"},
    4: {4: "heads", 9: "rows", 15: "heads", 24: "heads"},
    5: {4: "rows", 9: "heads", 15: "heads", 24: "heads"},
    6: {15: "rows"},
}
SECONDS = 150  # a rank that waits for a dead one gives up after 60


def run(ranks: int, folder: Path, backend: str) -> list[dict]:
    """Start the processes of a run, end them all whatever happens, and give what each rank wrote."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    if backend == "gloo":
        environment |= {"TRITON_INTERPRET": "1", "GLOO_SOCKET_IFNAME": "lo"}
    command = [sys.executable, "-m", "tests.distributed.worker", str(ranks), str(folder), "--backend", backend]
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=SECONDS)
    except subprocess.TimeoutExpired:
        pytest.fail(f"{ranks} ranks did not end within {SECONDS} s")
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    assert process.returncode == 0, f"a rank failed:\n{output[-4000:]}"
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(ranks)]


def assert_one_rank(reports: list[dict]) -> None:
    """Name every share, of any rank, that is not what one rank has."""
    unequal = [f"rank {rank}: {line}" for rank, report in enumerate(reports) for line in report["unequal"]]
    assert not unequal, f"{len(unequal)} shares are not one rank's:\n" + "\n".join(unequal[:20])


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5, 6])
def test_every_arrangement_is_one_rank(tmp_path: Path, ranks: int) -> None:
    """Tensor, sequence (both forms) and data parallel with an idle rank, by heads or by rows, change no bit."""
    reports = run(ranks, tmp_path, "gloo")
    assert_one_rank(reports)
    kinds = {int(columns): kind for report in reports for columns, kind in report["kinds"].items()}
    assert kinds == BY_ROWS_OR_HEADS[ranks]


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize("ranks", [2, 4])
def test_every_arrangement_is_one_rank_on_nccl(tmp_path: Path, ranks: int) -> None:
    """What holds over gloo holds over NCCL."""
    if torch.cuda.device_count() < ranks:
        pytest.skip(f"needs {ranks} CUDA devices")
    assert_one_rank(run(ranks, tmp_path, "nccl"))
