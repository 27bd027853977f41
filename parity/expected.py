"""Failures that are expected of a port: a strict list, one a line, `id | reason | issue`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from parity.compare import Comparison
from parity.finding import Finding
from parity.runs import Run


@dataclass(frozen=True)
class ExpectedFailure:
    """Hold one line: the id of what fails, why, and where it is followed up."""

    id: str
    reason: str
    issue: str


class ExpectedFailures:
    """Hold what is expected to fail, and judge what did by it.

    Args:
        entries: of unequal ids.
        name: of the file they stand in.
    """

    def __init__(self, entries: Iterable[ExpectedFailure] = (), name: str = "") -> None:
        self.name = name
        self._entries = {entry.id: entry for entry in entries}

    def __len__(self) -> int:
        return len(self._entries)

    def find(self, name: str) -> ExpectedFailure | None:
        """Give the line of an id, if there is one."""
        return self._entries.get(name)

    def stale(self, there: Iterable[str]) -> list[str]:
        """Give the ids that nothing of the run has."""
        known = set(there)
        return [name for name in self._entries if name not in known]

    def require_known(self, parts: Iterable[str], names: Mapping[str, Iterable[str]]) -> None:
        """Refuse ids of the main job, `part/name`, that it does not have.

        Args:
            parts: of the main job.
            names: of those parts whose names are known, all of them.

        Raises:
            ValueError: a stale line.
        """
        allowed = {part: {*known} for part, known in names.items()}
        for one in self._entries:
            part, _, name = one.partition("/")
            if part not in parts or not name or name not in allowed.get(part, {name}):
                known = ", ".join(sorted(allowed[part])) if part in allowed else f"{', '.join(parts)} and a feature"
                raise ValueError(f"{self.name}: got {one!r}, expected `part/name` of {known}")

    def judge(self, outcomes: Mapping[str, bool]) -> list[str]:
        """Say what stands against a run.

        Args:
            outcomes: by id, whether it failed; what did not run is not among them.

        Returns:
            A sentence for each failure that nobody expected, and for each expected one that passed.
        """
        said = []
        for name, failed in outcomes.items():
            entry = self.find(name)
            if failed and entry is None:
                said.append(f"{name}: failed, which nobody expected")
            if not failed and entry is not None:
                said.append(f"{name}: passed, expected to fail: {entry.reason} ({entry.issue}); take its line out")
        return said


def read_expected_failures(path: Path) -> ExpectedFailures:
    """Read a file of lines `id | reason | issue`; empty lines and those that begin with `#` say nothing.

    Raises:
        OSError: there is no such file.
        ValueError: a line of other parts, an empty part, or an id that stands there twice.
    """
    entries: dict[str, ExpectedFailure] = {}
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        if not line.strip() or line.startswith("#"):
            continue
        parts = [part.strip() for part in line.split(" | ")]
        if len(parts) != 3 or not all(parts):
            raise ValueError(f"{path}:{number}: got {line!r}, expected `id | reason | issue`")
        if parts[0] in entries:
            raise ValueError(f"{path}:{number}: got {parts[0]!r} again, expected every id once")
        entries[parts[0]] = ExpectedFailure(*parts)
    return ExpectedFailures(entries.values(), str(path))


def outcomes(results: Sequence[tuple[Run, Comparison]], findings: Sequence[Finding]) -> dict[str, bool]:
    """Give for every id of the main job that ran, `hash/RUN` or `PART/FEATURE`, whether anything of it was wrong."""
    said = {f"hash/{run.name}": not result.equal for run, result in results}
    return said | {f"{one.what}/{one.feature}": bool(one.unequal.total()) for one in findings}


def without_expected(reasons: Iterable[str], expected: ExpectedFailures, ran: Mapping[str, bool]) -> tuple[str, ...]:
    """Give the reasons against a report that nobody expected, and those against the list itself.

    Args:
        reasons: the report's; one of a failure begins with its run, or with its part and feature.
        expected: the list.
        ran: what `outcomes` gave.
    """
    excused = [name for name, failed in ran.items() if failed and expected.find(name)]
    begins = tuple(
        f"{name.removeprefix('hash/') if name.startswith('hash/') else name.replace('/', ', ', 1)}: "
        for name in excused
    )
    left = [reason for reason in reasons if not (begins and reason.startswith(begins) and " has " in reason)]
    parts = {name.partition("/")[0] for name in ran if not name.startswith("hash/")}
    stale = [name for name in expected.stale(ran) if name.partition("/")[0] in parts]
    unexpected = [said for said in expected.judge(ran) if "passed" in said]
    return (
        *left,
        *unexpected,
        *(f"{name}: expected to fail by {expected.name}, but there is no such feature" for name in stale),
    )
