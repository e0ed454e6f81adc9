"""The row: the only handshake between the machine that measures and the code that explains.

A run is a folder with `rows.jsonl` (one JSON object a line, appended and flushed as points finish) and, where several
drivers measured for it, `rows.<name>.jsonl`: one driver a file, readers take all. Rows are never edited. Pure Python
here; `frame` imports pandas when called.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import io
import json
import os
import re
import subprocess
import tarfile
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from m3cp.shapes import Point

SCHEMA = 1
ROWS_FILE = "rows.jsonl"
OTHER_ROWS_FILES = "rows.*.jsonl"  # of further drivers of the same run, such as a cluster's jobs
TORN = b'{"point":{"context_tokens":'  # how every line begins, so that a torn one is told from a foreign file
RUNTIME = ("torch", "torch_build", "triton", "nccl", "rccl")  # versions that make a measurement another one
PACKAGE = Path(__file__).parent
# The measuring path: a change in any of these files makes older rows another experiment.
MEASURING = ("shapes.py", "shard.py", "keys.py", "reference.py", "inputs.py", "kernels", "exchange.py", "decode.py", "engine_kernels.py", "timing.py", "worker.py",
             "attention.py", "indexer.py", "prefill.py", "toy.py", "layer_arms.py")


class CannotWrite(OSError):
    """A rows file that can't be written; names the file and the system's reason."""

    def __init__(self, error: OSError, path: Path):
        super().__init__(f"{path}: can't be written: {error.strerror or error}; what it held is still there")


@dataclass(frozen=True)
class Row:
    """One measured (or failed, or skipped) Point.

    Args:
        point: what was asked for.
        status: "ok", "failed" (with `error`) or "skipped" (not applicable here; `error` says why in words).
        path: what ran: "tp", "cp", "adaptive", "profiling", "reused", or the arm's name for floors and engines.
        node: name of the machine's hardware, such as "2x NVIDIA H200" or "cpu: <model>".
        ranks: processes that were timed; a sample is the slowest one's.
        timed_region: names of the stages inside the timed region, in order, such as
            ["gather_queries", "score", "candidates", "gather_keys", "merge"].
        samples_us: microseconds a call, one per round: the maximum over the ranks.
        rank_samples_us: the same per rank, `[ranks][rounds]`.
        calls_per_replay, replays_per_round: how many calls a sample averages over.
        caches: distinct caches rotated through, of projections copies of the weights, of a toy its one model; `pool_bytes` is the memory their pages were drawn from.
        evict_us: time of the evicting read that stood between calls and was subtracted; None when none did.
        cache_state: "cold" or "warm": what the bytes touched make it, whatever was asked for.
        footprint_over_l2, footprint_over_llc: distinct bytes a rank touches before it meets the same page again, over
            the L2 and the last-level cache.
        bytes_read, distinct_bytes_read: bytes a call on the busiest rank: index keys, or what `traffic.bytes_read` says of the arm.
        bytes_exchanged: bytes a rank sends to each peer, {"queries": ..., "candidates": ...}.
        limit_us: distinct bytes over the run's best page-read bandwidth; computed; None when that was not measured.
        page_read_us: measured floor of the same shape in the same run; None when that was not measured.
        check: {"passed": bool, "rows": compared rows, "mismatches": count, "against": "reference"}; a row without a
            passed check has no samples.
        launches, collectives: kernels and collectives in one call; None where they can't be counted.
        unsteady: the page-read probe drifted by more than 3% over the row's group of points.
        probe_drift: that drift, as a fraction; None when there was no probe.
        extra: figures of an arm's own, such as a bandwidth curve's footprint.
        provenance: hardware, clocks, versions, code hash, commit, environment, command, time, and `dirty`: whether the
            code on the measuring path differed from the commit's (None where nobody can say).
        error: first line of the failure or the reason to skip.
        process: ordinal of the repeat in fresh processes, 0 for the first; what started them says it in `provenance`.
    """

    point: Point
    status: str
    path: str
    node: str
    ranks: int
    timed_region: list[str] = field(default_factory=list)
    samples_us: list[float] = field(default_factory=list)
    rank_samples_us: list[list[float]] = field(default_factory=list)
    calls_per_replay: int = 0
    replays_per_round: int = 0
    caches: int = 0
    pool_bytes: int = 0
    evict_us: float | None = None
    cache_state: str = "warm"
    footprint_over_l2: float | None = None
    footprint_over_llc: float | None = None
    bytes_read: int = 0
    distinct_bytes_read: int = 0
    bytes_exchanged: dict[str, int] = field(default_factory=dict)
    limit_us: float | None = None
    page_read_us: float | None = None
    check: dict[str, Any] = field(default_factory=dict)
    launches: int | None = None
    collectives: int | None = None
    unsteady: bool = False
    probe_drift: float | None = None
    extra: dict[str, Any] = field(default_factory=dict)
    provenance: dict[str, Any] = field(default_factory=dict)
    error: str = ""
    process: int = 0
    schema: int = SCHEMA

    def __post_init__(self) -> None:
        object.__setattr__(self, "process", self.process or self.provenance.get("process", 0))
        if self.status not in ("ok", "failed", "skipped"):
            raise ValueError(f"status={self.status!r}: must be one of ok, failed, skipped")
        if self.status == "ok" and not self.samples_us:
            raise ValueError("status='ok' without samples_us: an ok row has samples")
        if self.status == "ok" and not self.check.get("passed"):
            raise ValueError(f"check={self.check!r}: a row gets a time only after a passed check")

    @property
    def median_us(self) -> float:
        """Median of the samples, microseconds a call; NaN without samples."""
        ordered = sorted(self.samples_us)
        n = len(ordered)
        return (ordered[(n - 1) // 2] + ordered[n // 2]) / 2 if n else float("nan")

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values, `point` nested; lists and dicts in it are the row's own."""
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(self)} | {"point": self.point.to_dict()}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Row:
        """The Row that `to_dict` wrote.

        Raises:
            ValueError: another schema version, or fields that this version does not know.
        """
        if values.get("schema") != SCHEMA:
            raise ValueError(other_schema(values.get("schema")))
        unknown = set(values) - {f.name for f in dataclasses.fields(cls)}
        if unknown:
            raise ValueError(f"row fields {sorted(unknown)}: not of schema {SCHEMA}")
        values = dict(values)
        return cls(point=Point.from_dict(values.pop("point")), **values)


def other_schema(version: Any) -> str:
    """Why rows of another version are refused, in words."""
    newer = str(version).isdigit() and int(version) > SCHEMA
    hint = "; a newer m3cp wrote it, which reads it" if newer else "; there was none before 1" if version is not None else ""
    return f"schema={version!r}: this version reads rows of schema {SCHEMA}{hint}"


def rows_file(run: Path | str) -> Path:
    """The rows file that a driver writes: the given one, or `rows.jsonl` of a run's folder."""
    path = Path(run)
    return path if path.suffix == ".jsonl" else path / ROWS_FILE


def rows_files(run: Path | str) -> list[Path]:
    """The rows files of a run, one a driver that wrote there: `rows.jsonl` first, then `rows.<name>.jsonl` by name."""
    path = Path(run)
    if not path.is_dir():
        return [path] if path.exists() else []
    return [p for p in (path / ROWS_FILE, *sorted(path.glob(OTHER_ROWS_FILES))) if p.exists()]


def append(run: Path | str, *rows: Row, sync: bool = True) -> None:
    """Append rows to a run's rows file; creates the folder. All of their lines stay, or none of them.

    A torn line that an earlier crash left at the end of the file is cut off first.

    Args:
        sync: wait until the disk has them, and what was appended before. Without that they outlive this process, however
            it ends, but not the machine.

    Raises:
        CannotWrite: a full disk, a read-only folder; what the file held is there as before.
        ValueError: the file ends in something that is no part of a row, which is left alone.
    """
    path = rows_file(run)
    lines = "".join(json.dumps(row.to_dict(), allow_nan=False, separators=(",", ":")) + "\n" for row in rows).encode()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o666)
        try:
            size = _whole_bytes(file, path)
            try:
                left = memoryview(lines)
                while left:
                    left = left[os.write(file, left) :]
                if sync:
                    os.fsync(file)
            except OSError:
                os.ftruncate(file, size)
                raise
        finally:
            os.close(file)
    except OSError as error:
        raise CannotWrite(error, path) from error


def _whole_bytes(file: int, path: Path) -> int:
    """Bytes of the file's whole lines; what a crash left behind them is cut off."""
    size = os.fstat(file).st_size
    if size == 0 or os.pread(file, 1, size - 1) == b"\n":
        return size
    tail, start = b"", size
    while start and b"\n" not in tail:
        step = min(start, 1 << 16)
        start -= step
        tail = os.pread(file, step, start) + tail
    torn = tail[tail.rfind(b"\n") + 1 :]
    if torn[: len(TORN)] != TORN[: len(torn)]:
        raise ValueError(f"{path}: its last line is no row and no part of one ({torn[:40]!r}); it is left as it is")
    os.ftruncate(file, size - len(torn))
    return size - len(torn)


@contextlib.contextmanager
def locked(run: Path | str, patience_s: float = 5.0) -> Iterator[int]:
    """Hold a run's rows file for one driver; yields a descriptor that ranks inherit, so that the file stays held until
    the last of them is gone. A file that is still empty in the end is removed.

    Args:
        patience_s: how long ranks of a driver that was killed may take to die.

    Raises:
        CannotWrite: the folder can't be written.
        ValueError: another driver holds the file.
    """
    import fcntl

    path = rows_file(run)
    deadline = time.monotonic() + patience_s
    while True:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o666)
        except OSError as error:
            raise CannotWrite(error, path) from error
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if path.exists() and os.path.samestat(os.fstat(file), path.stat()):
                break
        except BlockingIOError:
            if time.monotonic() > deadline:
                os.close(file)
                raise ValueError(
                    f"{path}: another driver is writing there; wait for it, or give this one a folder of its own (`--out`)"
                ) from None
            time.sleep(0.05)
        os.close(file)
    try:
        yield file
    finally:
        if os.fstat(file).st_size == 0:
            path.unlink(missing_ok=True)
        os.close(file)


def scan(*runs: Path | str, start: int = 0) -> Iterator[Row]:
    """The rows of the given run folders or files, one after the other; a torn last line is left out.

    Args:
        start: bytes to skip of each file.

    Raises:
        ValueError: a line that is no row, naming file and line.
        FileNotFoundError: a run without rows.
    """
    for run in runs:
        files = rows_files(run)
        if not files:
            raise FileNotFoundError(f"{run}: no {ROWS_FILE} there; `m3cp sweep` writes one")
        for path in files:
            with open(path, "rb") as file:
                file.seek(start)
                for number, line in enumerate(file, start=1):
                    if not line.endswith(b"\n") or not line.strip():  # a torn last line, or nothing
                        continue
                    try:
                        yield Row.from_dict(json.loads(line.decode()))
                    except (ValueError, TypeError, AttributeError) as error:
                        after = f" after byte {start}" if start else ""
                        raise ValueError(f"{path}, line {number}{after}: {error}") from error


def load(*runs: Path | str) -> list[Row]:
    """All rows of the given run folders or files, as `scan` gives them."""
    return list(scan(*runs))


class Growth:
    """Counts the rows that a run gains from now on, reading only what is new."""

    def __init__(self, run: Path | str):
        self._run, self.rows = run, 0
        self._sizes = {path: path.stat().st_size for path in rows_files(run)}

    def look(self) -> int:
        """Rows gained so far."""
        for path in rows_files(self._run):
            with open(path, "rb") as file:
                file.seek(self._sizes.get(path, 0))
                new = file.read()
            whole = new[: new.rfind(b"\n") + 1]
            self.rows += whole.count(b"\n")
            self._sizes[path] = self._sizes.get(path, 0) + len(whole)
        return self.rows


def frame(rows: list[Row]):
    """A pandas DataFrame, one line a row: the Point's fields, the row's fields and `median_us`.

    `shape` stays a frozen IndexerShape, nested values stay Python objects.
    """
    import pandas

    records = []
    for row in rows:
        point = {f.name: getattr(row.point, f.name) for f in dataclasses.fields(Point)}
        own = {f.name: getattr(row, f.name) for f in dataclasses.fields(Row) if f.name != "point"}
        records.append({**point, **own, "median_us": row.median_us})
    return pandas.DataFrame.from_records(records)


def measured(rows: Iterable[Row], code_hash: str, node: str, versions: Mapping[str, str], process: int = 0) -> set[Point]:
    """Points that already have an ok row of this repeat and code, on this node, with these versions of what runs (`RUNTIME`)."""
    return {
        r.point
        for r in rows
        if r.status == "ok"
        and r.process == process
        and r.node == node
        and r.provenance.get("code_hash") == code_hash
        and all(r.provenance.get("versions", {}).get(name) == versions.get(name) for name in RUNTIME)
    }


def code_hash() -> str:
    """Hash of the package files on the measuring path (12 hex digits): the code version of a row."""
    return _hash({path.relative_to(PACKAGE).as_posix(): path.read_bytes() for path in PACKAGE.rglob("*.py")})


def committed_hash(commit: str) -> str | None:
    """What `code_hash` is of a commit's files, whatever stands beside them; None where git does not have it."""
    if not re.fullmatch(r"[0-9a-f]{7,40}", commit):
        return None
    packed = ["git", "-C", str(PACKAGE.parent), "archive", commit, PACKAGE.name]
    try:
        done = subprocess.run(packed, capture_output=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return None
    if done.returncode:
        return None
    with tarfile.open(fileobj=io.BytesIO(done.stdout)) as tar:
        files = {m.name.removeprefix(PACKAGE.name + "/"): tar.extractfile(m).read() for m in tar if m.isfile()}
    return _hash(files)


def _hash(files: dict[str, bytes]) -> str:
    """Of the contents of those files, by path in the package, that are on the measuring path."""
    digest = hashlib.sha256()
    for name in MEASURING:
        folder = name + "/"
        for path in [name] if name in files else sorted(p for p in files if p.startswith(folder) and "/" not in p[len(folder) :]):
            digest.update(path.rpartition("/")[2].encode() + b"\0" + files[path] + b"\0")
    return digest.hexdigest()[:12]
