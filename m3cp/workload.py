"""Decode batches of real or made-up traffic: the context lengths of the requests in each step.

A workload is a list of `Step`. It is read from JSON lines, imported from request traces, or generated. Pure Python.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from m3cp.shapes import MAX_CONTEXT_LIMIT, require
from m3cp.traffic import AGENTIC_SPREAD

KINDS = ("uniform", "log_uniform", "agentic")
DECODING_SHARE = (0.22, 0.41)  # of offered concurrency decodes at any instant, in agentic traffic (ATOM's authors)

# Names that traces use. Seconds: "time" and "t". Milliseconds: "timestamp", as the Mooncake traces have it.
TIME_S, TIME_MS = ("time_s", "time", "t"), ("timestamp_ms", "timestamp")
INPUT = ("input_tokens", "input_length", "in")
OUTPUT = ("output_tokens", "output_length", "out")
BLOCKS = ("block_ids", "hash_ids")


@dataclass(frozen=True)
class Step:
    """One decode step: total tokens of each request, and the leading tokens that all of them share."""

    context_lengths: tuple[int, ...]
    shared_prefix_tokens: int = 0

    def __post_init__(self) -> None:
        lengths = self.context_lengths
        ok = all(isinstance(n, int) and not isinstance(n, bool) and 0 <= n <= MAX_CONTEXT_LIMIT for n in lengths)
        require("context_lengths", lengths, ok, f"whole numbers of tokens from 0 to {MAX_CONTEXT_LIMIT}")
        prefix, top = self.shared_prefix_tokens, min((n for n in lengths if n), default=0)
        require(
            "shared_prefix_tokens",
            prefix,
            isinstance(prefix, int) and 0 <= prefix <= top,
            f"0 to {top}, the shortest request",
        )

    @property
    def distinct_tokens(self) -> int:
        """Tokens cached for the step with the shared prefix counted once."""
        requests = sum(1 for n in self.context_lengths if n)
        return sum(self.context_lengths) - max(0, requests - 1) * self.shared_prefix_tokens


def read(path: Path | str) -> list[Step]:
    """Read a workload: JSON lines, each a list of context lengths or an object that `write` wrote.

    Raises:
        ValueError: a line that is neither, naming file and line; or an empty file.
    """
    steps = []
    for number, line in enumerate(Path(path).read_text().splitlines(), start=1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
            if isinstance(value, list):
                value = {"context_lengths": value}
            if not isinstance(value, dict) or not {"context_lengths"} <= set(value) <= {
                "context_lengths",
                "shared_prefix_tokens",
            }:
                raise ValueError(
                    "must be a list of context lengths, or an object with context_lengths and maybe shared_prefix_tokens"
                )
            steps.append(Step(tuple(value["context_lengths"]), value.get("shared_prefix_tokens", 0)))
        except (ValueError, TypeError) as error:
            raise ValueError(f"{path}, line {number}: {error}") from None
    if not steps:
        raise ValueError(f"{path}: no step in it")
    return steps


def write(path: Path | str, steps: Iterable[Step]) -> Path:
    """Write a workload as JSON lines, creating the folder."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [
        json.dumps({"context_lengths": list(s.context_lengths), "shared_prefix_tokens": s.shared_prefix_tokens})
        for s in steps
    ]
    path.write_text("\n".join(lines) + "\n")
    return path


@dataclass(frozen=True)
class Request:
    """One request of a trace."""

    time_s: float
    input_tokens: int
    output_tokens: int
    block_ids: tuple[Any, ...] = ()


def read_trace(path: Path | str) -> list[Request]:
    """Read a request trace: JSON lines with time, input tokens, output tokens and, if known, ids of the prompt's blocks.

    Names: time_s, time or t (seconds), or timestamp_ms or timestamp (milliseconds); input_tokens, input_length or in;
    output_tokens, output_length or out; block_ids or hash_ids.

    Raises:
        ValueError: a line without one of them, naming file and line; or an empty file.
    """
    found = []
    for number, line in enumerate(Path(path).read_text().splitlines(), start=1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
            time = _first(value, TIME_S, required=False)
            time = float(time) if time is not None else float(_first(value, TIME_MS, also=TIME_S)) / 1000.0
            found.append(
                Request(
                    time,
                    int(_first(value, INPUT)),
                    int(_first(value, OUTPUT)),
                    tuple(_first(value, BLOCKS, required=False) or ()),
                )
            )
        except (ValueError, TypeError) as error:
            raise ValueError(f"{path}, line {number}: {error}") from None
    if not found:
        raise ValueError(f"{path}: no request in it")
    return sorted(found, key=lambda r: r.time_s)


def _first(value: Mapping[str, Any], names: Sequence[str], required: bool = True, also: Sequence[str] = ()) -> Any:
    if not isinstance(value, Mapping):
        raise ValueError(f"{value!r}: must be an object")
    for name in names:
        if name in value:
            return value[name]
    if required:
        raise ValueError(f"has none of {', '.join((*also, *names))}")
    return None


def from_trace(
    requests: Sequence[Request],
    tpot_ms: float = 20.0,
    prefill_tokens_s: float = 20_000.0,
    block_tokens: int = 512,
    steps: int = 500,
    max_batch: int = 256,
) -> list[Step]:
    """Decode steps of a request trace, sampled evenly over the time in which anything decodes.

    A request decodes from its arrival plus its prefill on, one token every `tpot_ms`; blocks that an earlier request
    had need no prefill. Queues are not simulated: where more than `max_batch` decode, the earliest are taken.

    Args:
        requests: of `read_trace`.
        tpot_ms: time per output token.
        prefill_tokens_s: prompt tokens a second.
        block_tokens: tokens a block id stands for (512 in the Mooncake traces).
        steps: how many to sample.
        max_batch: requests decoding at once.

    Raises:
        ValueError: a number that is not positive, or a trace in which nothing decodes.
    """
    for name, value in (
        ("tpot_ms", tpot_ms),
        ("prefill_tokens_s", prefill_tokens_s),
        ("block_tokens", block_tokens),
        ("steps", steps),
        ("max_batch", max_batch),
    ):
        require(name, value, value > 0, "positive")
    step_s, seen, spans = tpot_ms / 1000.0, set(), []
    for request in requests:
        cached = 0
        for block in request.block_ids:
            if block not in seen:
                break
            cached += block_tokens
        seen.update(request.block_ids)
        start = request.time_s + max(0, request.input_tokens - cached) / prefill_tokens_s
        spans.append((start, start + request.output_tokens * step_s, request))
    busy = [(start, end) for start, end, request in spans if request.output_tokens > 0]
    if not busy:
        raise ValueError("from_trace: no request has an output token; nothing decodes")
    edges = sorted({edge for span in busy for edge in span})
    pieces, clock = [], 0.0  # the stretches of time in which something decodes, one after the other
    for a, b in zip(edges, edges[1:], strict=False):
        if any(start <= a and b <= end for start, end in busy):
            pieces.append((clock, a, b))
            clock += b - a
    found, place = [], 0
    for i in range(steps):
        at = clock * (i + 0.5) / steps
        while place + 1 < len(pieces) and pieces[place + 1][0] <= at:
            place += 1
        now = pieces[place][1] + at - pieces[place][0]
        active = [(start, request) for start, end, request in spans if start <= now < end][:max_batch]
        lengths = tuple(request.input_tokens + 1 + int((now - start) / step_s) for start, request in active)
        if lengths:
            found.append(Step(lengths, _shared([r for _, r in active], block_tokens, min(lengths))))
    return found


def _shared(active: Sequence[Request], block_tokens: int, shortest: int) -> int:
    """Leading tokens that all of the requests share, by their block ids; 0 for a single one."""
    if len(active) < 2:
        return 0
    count = 0
    for blocks in zip(*(r.block_ids for r in active), strict=False):
        if len(set(blocks)) > 1:
            break
        count += 1
    return min(count * block_tokens, shortest)


def generate(
    kind: str, steps: int, context_tokens: int, batch: int = 0, concurrency: int = 0, seed: int = 0
) -> list[Step]:
    """Make up a workload.

    Args:
        kind: "uniform": every request has `context_tokens`. "log_uniform": logarithms of the lengths uniform between
            1,024 and `context_tokens`. "agentic": the longest request of a step uniform in its logarithm between a
            quarter of `context_tokens` and all of it, the max/min ratio of a step 2.5 at the median and about 22 at
            p90, and nine tenths of the shortest request shared by all.
        steps: how many.
        context_tokens: of the longest request.
        batch: requests a step; or give `concurrency`.
        concurrency: offered requests, of which a share uniform between 22 and 41% decodes in each step.
        seed: the same seed gives the same steps.

    Raises:
        ValueError: naming the argument.
    """
    require("kind", kind, kind in KINDS, f"one of {', '.join(KINDS)}")
    require("steps", steps, steps > 0, "positive")
    require(
        "context_tokens", context_tokens, 1024 <= context_tokens <= MAX_CONTEXT_LIMIT, f"1024 to {MAX_CONTEXT_LIMIT}"
    )
    require("batch", batch, (batch > 0) != (concurrency > 0), "positive, or concurrency must be, and not both")
    rng, found = random.Random(seed), []
    for _ in range(steps):
        size = batch or max(1, round(concurrency * rng.uniform(*DECODING_SHARE)))
        if kind == "uniform":
            found.append(Step((context_tokens,) * size))
        elif kind == "log_uniform":
            low = math.log(1024)
            found.append(Step(tuple(round(math.exp(rng.uniform(low, math.log(context_tokens)))) for _ in range(size))))
        else:
            longest = round(context_tokens * 4.0 ** -rng.random())
            spread = min(rng.expovariate(1 / AGENTIC_SPREAD), math.log(max(longest, 1024) / 1024)) if size > 1 else 0.0
            drawn = [0.0, spread][:size] + [rng.uniform(0.0, spread) for _ in range(size - 2)]
            lengths = tuple(max(1, round(longest * math.exp(-d))) for d in drawn)
            found.append(Step(lengths, int(0.9 * min(lengths)) if size > 1 else 0))
    return found
