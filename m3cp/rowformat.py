"""Rows for others: what each field of a line is, a validator, and parquet. `data/README.md` documents the same."""

from __future__ import annotations

import dataclasses
import json
import math
import types
import typing
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from m3cp import frames, recording, records
from m3cp.shapes import IndexerShape, Point

VERSION_KEY = b"m3cp.rows.schema"  # in a parquet file's metadata
SHOWN = 10


def fields(cls: type) -> dict[str, Any]:
    """Names and types of a dataclass that stands in a row."""
    hints = typing.get_type_hints(cls)
    return {f.name: hints[f.name] for f in dataclasses.fields(cls)}


def words(kind: Any) -> str:
    """A type as the documentation names it: "number", "integer or null", "list of numbers", "object"."""
    if isinstance(kind, types.UnionType):
        return " or ".join(words(k) for k in typing.get_args(kind))
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin is list:
        return f"list of {words(inner[0])}{'' if words(inner[0]).startswith('list') else 's'}"
    if origin is dict or kind in (Point, IndexerShape):
        return "object"
    return {str: "text", int: "integer", float: "number", bool: "boolean", types.NoneType: "null", Any: "anything"}[kind]


def _fits(value: Any, kind: Any) -> bool:
    if isinstance(kind, types.UnionType):
        return any(_fits(value, k) for k in typing.get_args(kind))
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin is list:
        return isinstance(value, list) and all(_fits(v, inner[0]) for v in value)
    if origin is dict or kind in (Point, IndexerShape):
        return isinstance(value, dict) and (not inner or all(_fits(v, inner[1]) for v in value.values()))
    if kind is Any:
        return True
    if kind is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    return isinstance(value, kind) and (kind is bool or not isinstance(value, bool))


def faults(values: Any) -> list[str]:
    """Why one line's object is no row of this schema, each in words; empty when it is one.

    Args:
        values: what the line says in JSON.
    """
    if not isinstance(values, dict):
        return [f"a line holds one object, not {type(values).__name__}"]
    if values.get("schema") != records.SCHEMA:
        return [records.other_schema(values.get("schema"))]
    found = []
    parts = [(values, records.Row, ""), (values.get("point"), Point, "point.")]
    if isinstance(values.get("point"), dict):
        parts.append((values["point"].get("shape"), IndexerShape, "point.shape."))
    for part, cls, prefix in parts:
        if not isinstance(part, dict):
            continue  # the level above says so
        known = fields(cls)
        found += [f"{prefix}{name}: missing" for name in known if name not in part]
        found += [f"{prefix}{name}: not a field of schema {records.SCHEMA}" for name in part if name not in known]
        found += [
            f"{prefix}{name}={part[name]!r:.60}: must be {words(kind)}"
            for name, kind in known.items()
            if name in part and not _fits(part[name], kind)
        ]
    if found:
        return found
    try:
        row = records.Row.from_dict(values)
    except (ValueError, TypeError) as error:
        return [str(error)]
    return list(recording._faults(row)) if row.status == "ok" else []


def check(run: Path | str) -> tuple[Counter, list[str]]:
    """(rows of each status, faults by file and line) of a run; a torn last line is said and is no fault."""
    counts, found = Counter(), []
    for path in records.rows_files(run):
        with open(path, "rb") as file:
            for number, line in enumerate(file, start=1):
                if not line.endswith(b"\n"):
                    counts["torn last line"] += 1
                    continue
                try:
                    values = json.loads(line.decode())
                    here = faults(values)
                except ValueError as error:
                    here = [f"no JSON: {error}"]
                found += [f"{path.name}, line {number}: {fault}" for fault in here]
                counts[values["status"] if not here else "faulty"] += 1
    return counts, found


def to_parquet(run: Path | str, path: Path | str) -> int:
    """Write a run's rows as one parquet file and return how many.

    Columns are the row's fields; the Point's stand beside them by their own names, the shape's as `shape_<name>`;
    `median_us` is computed; objects (`check`, `extra`, `provenance`, `bytes_exchanged`) are JSON text.

    Raises:
        ValueError, FileNotFoundError: as `records.load`.
    """
    import pyarrow
    import pyarrow.parquet

    schema = pyarrow.schema([(name, _column(kind)) for name, kind in _columns()], metadata={VERSION_KEY: str(records.SCHEMA)})
    path, count = Path(path), 0
    part = path.with_name(path.name + ".part")
    with pyarrow.parquet.ParquetWriter(part, schema) as writer:
        for rows in _chunks(records.scan(run)):
            writer.write_table(pyarrow.Table.from_pylist([_flat(row) for row in rows], schema=schema))
            count += len(rows)
    part.replace(path)
    return count


def from_parquet(path: Path | str) -> list[records.Row]:
    """The rows that `to_parquet` wrote.

    Raises:
        ValueError: a file without this schema's version.
    """
    import pyarrow.parquet

    table = pyarrow.parquet.read_table(path)
    version = (table.schema.metadata or {}).get(VERSION_KEY, b"none").decode()
    if version != str(records.SCHEMA):
        raise ValueError(f"{path}: {records.other_schema(version)}")
    rows = []
    for line in table.to_pylist():
        shape = {name: line[f"shape_{name}"] for name in fields(IndexerShape)}
        point = {name: line[name] for name in fields(Point) if name != "shape"} | {"shape": shape}
        own = {n: json.loads(line[n]) if words(k) == "object" else line[n] for n, k in fields(records.Row).items() if n != "point"}
        rows.append(records.Row.from_dict({"point": point, **own}))
    return rows


def _columns() -> list[tuple[str, Any]]:
    point = [(n, k) for n, k in fields(Point).items() if n != "shape"]
    shape = [(f"shape_{n}", k) for n, k in fields(IndexerShape).items()]
    own = [(n, k) for n, k in fields(records.Row).items() if n != "point"]
    return [*point, *shape, *own, ("median_us", float)]


def _column(kind: Any):
    import pyarrow

    if words(kind) == "object":
        return pyarrow.string()
    if typing.get_origin(kind) is list:
        return pyarrow.list_(_column(typing.get_args(kind)[0]))
    plain = next(k for k in (typing.get_args(kind) or (kind,)) if k is not types.NoneType)
    return {str: pyarrow.string(), int: pyarrow.int64(), float: pyarrow.float64(), bool: pyarrow.bool_()}[plain]


def _flat(row: records.Row) -> dict[str, Any]:
    values = row.to_dict()
    point = values.pop("point")
    shape = {f"shape_{name}": value for name, value in point.pop("shape").items()}
    own = {n: json.dumps(values[n]) if words(k) == "object" else values[n] for n, k in fields(records.Row).items() if n != "point"}
    return {**point, **shape, **own, "median_us": row.median_us if row.samples_us else None}


def _chunks(rows: Iterator[records.Row], size: int = 1000) -> Iterator[list[records.Row]]:
    chunk: list[records.Row] = []
    for row in rows:
        chunk.append(row)
        if len(chunk) == size:
            yield chunk
            chunk = []
    if chunk:
        yield chunk


def main(run: str, parquet: Path | None = None) -> list[str]:
    """Lines to print: what a run holds, and where the parquet file is.

    Raises:
        ValueError: lines that are no rows, the first of them by number and reason.
        FileNotFoundError: no such run.
    """
    folder = frames.find_run(run)
    counts, found = check(folder)
    said = f"{folder}: schema {records.SCHEMA}, {', '.join(f'{n} {what}' for what, n in counts.items()) or 'empty'}"
    if found:
        raise ValueError("\n".join([said, *found[:SHOWN], *([f"and {len(found) - SHOWN} more"] if len(found) > SHOWN else [])]))
    lines = [said + "; every row is valid"]
    if parquet is not None:
        lines.append(f"{to_parquet(folder, parquet)} rows in {parquet}")
    return lines
