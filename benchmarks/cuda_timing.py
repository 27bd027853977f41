"""How a time is taken on a GPU: CUDA graphs between two events, and eager bursts by the clock."""

from __future__ import annotations

import torch

from benchmarks.timing import Call, HostTimer

_SCRATCH_BYTES = 512 << 20  # several times any level-2 cache


class CudaTimer(HostTimer):
    """Time calls on a CUDA device."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device
        self._scratch = torch.empty(_SCRATCH_BYTES, dtype=torch.uint8, device=device)

    def wait(self) -> None:
        """Wait until the device has nothing left to do."""
        torch.cuda.synchronize(self._device)

    def record(self, call: Call, calls: int) -> _Graph:
        """Capture the calls as one CUDA graph; each must have run before, so that it is compiled."""
        return _Graph(call, calls, self._scratch)


class _Graph:
    def __init__(self, call: Call, calls: int, scratch: torch.Tensor) -> None:
        self._calls, self._scratch = calls, scratch
        self._begin, self._end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            for number in range(calls):
                self.last = call(number)  # what earlier calls put out is free again, so memory does not grow

    def run(self) -> None:
        self._graph.replay()

    def seconds(self) -> float:
        # The fill takes the caches, and long enough for the replay to be queued behind it: no launch is waited for.
        self._scratch.zero_()
        self._begin.record()
        self._graph.replay()
        self._end.record()
        self._end.synchronize()
        return self._begin.elapsed_time(self._end) / 1e3 / self._calls
