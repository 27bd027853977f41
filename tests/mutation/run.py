"""Change reference and serving line by line and see that a test falls: `make mutation`.

Every mutant of `TARGETS` runs the tests of its file in a process of its own, in a copy of the tree. One that no test
notices must stand in survivors.json with the reason why none can, or ought to; and what stands there must survive.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import resource
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from tests.mutation.mutants import TARGETS, Mutant, mutants

ROOT = Path(__file__).resolve().parents[2]
SURVIVORS = Path(__file__).with_name("survivors.json")
ROOMS = ("reference", "optimized", "serving", "parity", "fixtures", "tests")
FIELDS = ("file", "in", "line", "becomes")
_KILLED, _SURVIVED, _STOPPED = "killed", "survived", "stopped"


def main(arguments: list[str] | None = None) -> int:
    """Run the mutants; exit status 1 where one survives that is not listed, or a listed one does not."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutation.run", description=__doc__)
    parser.add_argument("--only", action="append", choices=TARGETS, metavar="FILE", help="repeatable; default: all")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes at a time")
    parser.add_argument("--limit", type=int, default=30, help="seconds of processor time that a mutant may take")
    options = parser.parse_args(arguments)
    _preload()
    known = {tuple(entry[name] for name in FIELDS) for entry in json.loads(SURVIVORS.read_text(encoding="utf-8"))}
    failed = False
    with tempfile.TemporaryDirectory(prefix="mutation-") as room:
        how = {"mp_context": multiprocessing.get_context("fork"), "initializer": _enter, "initargs": (room,)}
        with ProcessPoolExecutor(options.jobs, **how) as pool:
            for file in options.only or TARGETS:
                failed |= not _judge(pool, file, options.limit, known)
    return int(failed)


def _judge(pool: ProcessPoolExecutor, file: str, limit: int, known: set[tuple[str, ...]]) -> bool:
    source, started = (ROOT / file).read_text(encoding="utf-8"), time.monotonic()
    _control(pool, file, source, limit)
    tried = list(mutants(file, source))
    outcomes, survivors = Counter[str](), set()
    for mutant, outcome in zip(tried, pool.map(_try, tried, [limit] * len(tried)), strict=True):
        outcomes[outcome] += 1
        if outcome == _SURVIVED:
            survivors.add(mutant.key)
            if mutant.key not in known:
                _say("SURVIVES", mutant.key)
    _control(pool, file, source, limit)  # again: what broke meanwhile would look like mutants that are caught
    stale = {key for key in known - survivors if key[0] == file}
    for key in sorted(stale):
        _say("STALE in survivors.json, it is killed now", key)
    counts = ", ".join(f"{count} {outcome}" for outcome, count in sorted(outcomes.items()))
    print(f"{file}: {len(tried)} mutants, {counts}; {time.monotonic() - started:.0f} s", flush=True)
    return not stale and survivors <= known


def _control(pool: ProcessPoolExecutor, file: str, source: str, limit: int) -> None:
    if pool.submit(_try, Mutant(file, "", "", "", source), limit).result() != _SURVIVED:
        sys.exit(f"{file}: its tests fail without a mutant: {' '.join(TARGETS[file])}")


def _say(title: str, key: tuple[str, ...]) -> None:
    print(f"{title}: {json.dumps(dict(zip(FIELDS, key, strict=True)), ensure_ascii=False)}", flush=True)


def _preload() -> None:
    """Import once what every test would import anew: a mutant's process is a fork of this one."""
    os.environ["TRITON_INTERPRET"] = "1"  # as the root conftest has it on a CPU, before Triton is imported
    import hypothesis.stateful  # noqa: F401
    import pytest  # noqa: F401
    import torch
    import triton  # noqa: F401

    torch.set_num_threads(1)


def _enter(room: str) -> None:
    """Give a worker its own copy of the tree, and no way to the original."""
    copy = Path(tempfile.mkdtemp(dir=room))
    shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".*", "__pycache__"), dirs_exist_ok=True)
    os.chdir(copy)
    sys.path[:] = [str(copy), *(entry for entry in sys.path if entry and Path(entry).resolve() != ROOT)]
    sys.dont_write_bytecode = True  # a mutant may have the size and the second of the one before


def _try(mutant: Mutant, limit: int) -> str:
    path = Path(mutant.file)
    original = path.read_text(encoding="utf-8")
    path.write_text(mutant.source, encoding="utf-8")
    try:
        child = os.fork()
        if child == 0:
            os.setpgid(0, 0)
            resource.setrlimit(resource.RLIMIT_CPU, (limit, limit))
            _run_tests(TARGETS[mutant.file])
        return _wait(child, limit)
    finally:
        path.write_text(original, encoding="utf-8")


def _run_tests(tests: list[str]) -> None:
    status = 3
    try:
        quiet = os.open(os.devnull, os.O_WRONLY)
        os.dup2(quiet, 1)
        os.dup2(quiet, 2)
        for name in [name for name in sys.modules if name.split(".")[0] in ROOMS]:
            del sys.modules[name]
        import pytest

        options = ("-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "--device", "cpu", "--profile", "mutation")
        status = int(pytest.main([*options, *tests]))
    finally:
        os._exit(status)


def _wait(child: int, limit: int) -> str:
    end = time.monotonic() + 20 * limit  # for one that only sleeps
    while time.monotonic() < end:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return _SURVIVED if status == 0 else _STOPPED if os.WIFSIGNALED(status) else _KILLED
        time.sleep(0.02)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return _STOPPED


if __name__ == "__main__":
    sys.exit(main())
