"""Where a run happens: a CUDA device, or the CPU with Triton's interpreter."""

import os

import torch


def choose_device(name: str) -> torch.device:
    """Resolve `auto`, `cpu`, `cuda` or `cuda:N` and prepare Triton for it.

    On the CPU this sets `TRITON_INTERPRET=1`, which Triton reads when a kernel is defined: call it before `optimized`
    is imported.

    Raises:
        ValueError: CUDA was asked for and is not there, or the name is not a device.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ValueError(f"device: got {name!r}, expected auto, cpu, cuda or cuda:N") from error
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise ValueError("device: got cuda, but torch sees no CUDA device; expected cpu (Triton's interpreter)")
        return torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)
    if device.type != "cpu":
        raise ValueError(f"device: got {name!r}, expected auto, cpu, cuda or cuda:N")
    os.environ["TRITON_INTERPRET"] = "1"
    return device
