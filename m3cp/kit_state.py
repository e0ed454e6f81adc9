"""What the node kit keeps in a run's folder: what became of each step, as JSON files that are written whole."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from m3cp import records

STATE_FILE, FACTS_FILE = "kit.json", "facts.json"
PUBLISHED = "published"  # folder of the rows of the published shapes
DONE, FAILED, LEFT_OUT, CUT, RUNNING = "done", "failed", "left out", "cut short", "running"


class LeftOut(Exception):
    """A step that has nothing to run here; the message says why."""


class Cut(Exception):
    """A step whose time was up; what is done is kept."""


@dataclass
class Record:
    """What became of a step so far."""

    status: str = ""
    why: str = ""
    seconds: float = 0.0
    tries: int = 0
    lines: list[str] = field(default_factory=list)

    @property
    def words(self) -> str:
        """In one line: why not, else the last that it said."""
        said = [line for line in (self.why.splitlines()[:1] if self.why else self.lines) if line.strip()]
        return said[-1] if said else ""


@dataclass
class State:
    """The kit's memory: `kit.json` in the run's folder, written whole before and after each step."""

    name: str
    code_hash: str
    device: str | None = None  # that was asked for
    commit: str | None = None  # of this code, where the copy has no git history
    stretches: int = 0
    steps: dict[str, Record] = field(default_factory=dict)

    @classmethod
    def load(cls, run: Path, name: str, device: str | None = None, commit: str | None = None) -> State:
        """The folder's state, or a new one.

        Raises:
            ValueError: the folder belongs to other code.
        """
        values, code = read(run / STATE_FILE), records.code_hash()
        if values is None:
            return cls(name, code, device, commit)
        if values["code_hash"] != code:
            raise ValueError(f"out={str(run)!r}: holds a run of code {values['code_hash']}, this is {code}; give another --out")
        return cls.of(values)

    @classmethod
    def of(cls, values: dict[str, Any]) -> State:
        """What `save` wrote, whatever code is here."""
        return cls(**{**values, "steps": {name: Record(**step) for name, step in values["steps"].items()}})

    def save(self, run: Path) -> None:
        """Write it in one piece."""
        write(run / STATE_FILE, asdict(self))


def write(path: Path, value: Any) -> None:
    """A JSON file, put in place at once."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    part.write_text(json.dumps(value, indent=1))
    os.replace(part, path)


def read(path: Path) -> Any:
    """A JSON file's value; None where there is none."""
    return json.loads(path.read_text()) if path.exists() else None


def now() -> str:
    """The time in UTC, to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")
