"""Results of serving benchmarks: what `vllm bench serve` and aiperf write, and which pairs of them may be compared."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from m3cp.crossover import tokens_about

INPUT_TOLERANCE = 0.03  # two runs whose mean input lengths differ by more are not compared


@dataclass(frozen=True)
class Result:
    """One run of a serving benchmark, from its own file.

    Args:
        tool: "vllm bench serve" or "aiperf".
        requests, failed: completed and failed.
        input_tokens, output_tokens: means a request; NaN where the file has none.
        tpot_ms: mean time per output token, the first one excluded (aiperf: its inter-token latency).
        output_tokens_s: throughput.
        concurrency: offered, None where unknown.
        acceptance: tokens a step under speculation, None where unknown.
    """

    tool: str
    requests: int
    failed: int
    input_tokens: float
    output_tokens: float
    tpot_ms: float
    output_tokens_s: float
    concurrency: int | None = None
    acceptance: float | None = None


def read_result(path: Path | str) -> Result:
    """Read a result of `vllm bench serve --save-result` or aiperf's `profile_export_aiperf.json`.

    Raises:
        ValueError: another file, several results in one file, or a run that was cancelled; the message names it.
    """
    text = Path(path).read_text()
    try:
        values = json.loads(text)
    except json.JSONDecodeError:
        lines = [line for line in text.splitlines() if line.strip()]
        if len(lines) > 1 and all(line.lstrip().startswith("{") for line in lines):
            raise ValueError(
                f"{path}: {len(lines)} results in one file (--append-result); give one result a file"
            ) from None
        raise ValueError(f"{path}: not JSON") from None
    if not isinstance(values, Mapping):
        raise ValueError(f"{path}: must be one JSON object, is {type(values).__name__}")
    try:
        if "mean_tpot_ms" in values and "total_input_tokens" in values:
            return _vllm(values)
        if isinstance(values.get("inter_token_latency"), Mapping):
            return _aiperf(values)
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path}: {error}") from error
    raise ValueError(
        f"{path}: neither a result of `vllm bench serve` (mean_tpot_ms, total_input_tokens) nor of aiperf (inter_token_latency)"
    )


def _vllm(values: Mapping[str, Any]) -> Result:
    done = int(values["completed"])
    failed = int(values["failed"]) if "failed" in values else int(values.get("num_prompts", done)) - done
    count = max(done, 1)
    concurrency = values.get("max_concurrency")
    return Result(
        "vllm bench serve", done, failed, values["total_input_tokens"] / count, values["total_output_tokens"] / count, float(values["mean_tpot_ms"]),
        float(values["output_throughput"]), int(concurrency) if concurrency else None, values.get("spec_decode_acceptance_length"),
    )  # fmt: skip


def _aiperf(values: Mapping[str, Any]) -> Result:
    if values.get("was_cancelled"):
        raise ValueError("the run was cancelled")

    def mean(name: str, default: float = math.nan) -> float:
        block = values.get(name)
        return float(block["avg"]) if isinstance(block, Mapping) and block.get("avg") is not None else default

    unit = values["inter_token_latency"]["unit"]
    scale = {"ms": 1.0, "s": 1e3, "sec": 1e3, "seconds": 1e3, "us": 1e-3, "ns": 1e-6}.get(unit)
    if scale is None:
        raise ValueError(f"inter_token_latency has unit {unit!r}; known are ms, s, us, ns")
    failed = int(mean("error_request_count", 0.0)) or sum(
        int(e.get("count", 1)) for e in values.get("error_summary") or []
    )
    return Result(
        "aiperf", int(mean("request_count", 0.0)), failed, mean("input_sequence_length"), mean("output_sequence_length"), mean("inter_token_latency") * scale,
        mean("output_token_throughput"), _concurrency(values.get("input_config")),
    )  # fmt: skip


def _concurrency(config: Any) -> int | None:
    """The first whole number under a key "concurrency" in an input configuration, whose shape differs by version."""
    if isinstance(config, Mapping):
        value = config.get("concurrency")
        if isinstance(value, int) and not isinstance(value, bool):
            return value
        config = list(config.values())
    if isinstance(config, list):
        return next((found for found in map(_concurrency, config) if found is not None), None)
    return None


@dataclass(frozen=True)
class Compared:
    """Two serving runs that may be compared: without CP and with it."""

    base: Result
    cp: Result

    @property
    def change_ms(self) -> float:
        """Change of the mean time per output token; negative is faster."""
        return self.cp.tpot_ms - self.base.tpot_ms

    @property
    def change_percent(self) -> float:
        """The same in percent of the baseline."""
        return 100.0 * self.change_ms / self.base.tpot_ms

    @property
    def throughput_percent(self) -> float:
        """Change of output tokens a second, in percent."""
        return 100.0 * (self.cp.output_tokens_s / self.base.output_tokens_s - 1.0)

    @property
    def text(self) -> str:
        """The comparison in words."""
        return (
            f"time per output token {self.base.tpot_ms:.2f} to {self.cp.tpot_ms:.2f} ms ({self.change_percent:+.1f}%), output throughput "
            f"{self.throughput_percent:+.1f}%, {self.base.requests} and {self.cp.requests} requests of {tokens_about(self.base.input_tokens)} input tokens ({self.base.tool})"
        )


def compare(base: Path | str, cp: Path | str) -> Compared:
    """Read a pair of results, the first without CP; refuse pairs that can't be compared.

    Raises:
        ValueError: failed requests, no request, input lengths more than 3% apart, another concurrency or another tool.
    """
    results = {"base": read_result(base), "cp": read_result(cp)}
    for name, result in results.items():
        if result.failed:
            raise ValueError(
                f"{name}: {result.failed} failed requests (of {result.failed + result.requests}); a run with failures is not compared"
            )
        if result.requests < 1:
            raise ValueError(f"{name}: no completed request")
    a, z = results["base"], results["cp"]
    if a.tool != z.tool:
        raise ValueError(f"base is of {a.tool} and cp of {z.tool}: both must be of one tool")
    if a.concurrency != z.concurrency:
        raise ValueError(f"concurrency of base is {a.concurrency} and of cp {z.concurrency}: they must be equal")
    apart = abs(z.input_tokens / a.input_tokens - 1.0) if a.input_tokens else math.inf
    if not apart <= INPUT_TOLERANCE:
        raise ValueError(
            f"mean input lengths of {a.input_tokens:.0f} and {z.input_tokens:.0f} tokens are {apart:.1%} apart: at most {INPUT_TOLERANCE:.0%} is compared"
        )
    return Compared(a, z)
