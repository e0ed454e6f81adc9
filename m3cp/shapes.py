"""What an experiment is: the indexer's constants and the frozen `Point` that names one measurement.

Pure Python: this module imports neither torch nor triton (nor numpy), so that rows can be read anywhere.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

MAX_CONTEXT_LIMIT = 2**31 - 1  # tokens; lengths are int32
MAX_QUERY_LEN = 8  # query tokens a request and step (speculative verification uses 4)
MAX_TOPK = 64

DTYPES = ("bf16", "fp16", "fp8_e4m3fn", "fp8_e4m3fnuz")
ELEMENT_BYTES = {"bf16": 2, "fp16": 2, "fp8_e4m3fn": 1, "fp8_e4m3fnuz": 1}
MIXES = ("uniform", "one_long_rest_1k", "one_long_rest_4k", "log_uniform", "agentic")
FORMS = ("staged", "two_launch", "one_launch")
EXCHANGES = ("collective", "symmetric")
QUERIES = ("gathered", "replicated")
CACHES = ("cold", "warm")
LAUNCHES = ("graph", "eager")

# Which optional fields of a Point each arm uses; every other optional field must be None there.
ARM_FIELDS: dict[str, tuple[str, ...]] = {
    "tp": ("form",),
    "cp": ("form", "exchange", "queries"),
    "cp_local": ("form",),
    "page_read": (),
    "vllm_tp": (),
    "vllm_cp": ("exchange", "queries"),
    "sglang_tp": (),
    "sglang_cp": ("exchange", "queries"),
    "attention": (),
    "projections": (),
    "mixed_tp": ("form",),
    "mixed_cp": ("form", "exchange", "queries"),
    "toy_tp": ("form",),
    "toy_cp": ("form", "exchange", "queries"),
}
# What stands around the indexer in a sparse layer (`m3cp.layer_arms`): never in a fit, a policy or a comparison of paths.
LAYER_ARMS = ("attention", "projections", "mixed_tp", "mixed_cp", "toy_tp", "toy_cp")
TOY_LAYERS = 3  # of the toy model that arms toy_tp and toy_cp time


def require(name: str, value: Any, allowed: bool, what: str) -> None:
    """Raise a ValueError that names the argument, what was given and what is allowed."""
    if not allowed:
        raise ValueError(f"{name}={value!r}: must be {what}")


def require_int(name: str, value: Any, low: int, high: int, unit: str = "") -> None:
    """Raise a ValueError unless `value` is an integer (no bool) from `low` to `high`."""
    require(name, value, _is_int(value) and low <= value <= high, f"{low} to {high}{unit}")


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


@dataclass(frozen=True)
class IndexerShape:
    """Constants of a sparse layer's lightning indexer (`spec.md`, section 1); the defaults are MiniMax-M3's.

    Args:
        heads: index heads (= KV heads) of the whole model.
        head_dim: index head dimension, 64 or 128.
        block_size: tokens a block, 64 or 128; the KV page size.
        topk: blocks kept per (token, head), 1 to 64.
        init_blocks: first blocks that are always chosen.
        local_blocks: last visible blocks that are always chosen.

    Raises:
        ValueError: a constant outside the range above.
    """

    heads: int = 4
    head_dim: int = 128
    block_size: int = 128
    topk: int = 16
    init_blocks: int = 0
    local_blocks: int = 1

    def __post_init__(self) -> None:
        require("heads", self.heads, _is_int(self.heads) and 1 <= self.heads <= 64, "an integer from 1 to 64")
        require("head_dim", self.head_dim, self.head_dim in (64, 128), "64 or 128")
        require("block_size", self.block_size, self.block_size in (64, 128), "64 or 128")
        require("topk", self.topk, _is_int(self.topk) and 1 <= self.topk <= MAX_TOPK, f"an integer from 1 to {MAX_TOPK}")
        for name in ("init_blocks", "local_blocks"):
            value = getattr(self, name)
            require(name, value, _is_int(value) and 0 <= value < 2**24, "an integer from 0 to 2**24 - 1")

    def blocks(self, tokens: int) -> int:
        """Blocks that `tokens` tokens touch: ceil(tokens / block_size), 0 for none."""
        return max(0, -(-tokens // self.block_size))

    def key_bytes(self, dtype: str) -> int:
        """Bytes of one block of index keys in a cache of `dtype`."""
        return self.block_size * self.head_dim * ELEMENT_BYTES[dtype]


@dataclass(frozen=True)
class Point:
    """One experiment: predicted by `traffic`, built by `inputs`, timed by `sweep`, stored in a row, plotted.

    Args:
        context_tokens: length of the longest request, this step's queries included.
        batch: requests with a context.
        mix: how lengths spread over the batch (`traffic.context_lengths` says exactly).
        shared_prefix_tokens: leading tokens whose pages all requests share.
        rows_padded: padding requests (length 0) added behind the batch, as a graph bucket does.
        world: ranks that the heads (and, for CP, the blocks) are sharded over. `cp_local` and `page_read` run
            without a peer: for them it is the number of shards, of which every process reads one.
        dtype: of the index-K cache: "bf16", "fp16", "fp8_e4m3fn" or "fp8_e4m3fnuz".
        query_len: query tokens a request, 1 to 8.
        shape: the indexer's constants.
        max_context: the bound, in tokens, that shapes grids and buffers.
        arm: what is timed: "tp", "cp", "cp_local", "page_read", an engine's kernels ("vllm_tp", ...), or what stands
            around the indexer: "attention", "projections", "mixed_tp", "mixed_cp", "toy_tp", "toy_cp" (`m3cp.layer_arms`).
        form: "staged", "two_launch" or "one_launch".
        exchange: "collective" or "symmetric".
        queries: "gathered" or "replicated"; of arm "projections" None, one rank's own heads, or "replicated", the other
            ranks' index heads too.
        threshold_blocks: adaptive CP takes the CP path above this sum of blocks; None always takes it.
        cache: "cold" or "warm", what the timing was asked for; the row says what it got.
        launch: "graph" or "eager".
        seed: of the inputs.

    A field that the arm does not use is None, so that one experiment is one Point.

    Raises:
        ValueError: naming the field, what was given and what is allowed.
    """

    context_tokens: int
    batch: int
    mix: str = "uniform"
    shared_prefix_tokens: int = 0
    rows_padded: int = 0
    world: int = 1
    dtype: str = "bf16"
    query_len: int = 1
    shape: IndexerShape = field(default_factory=IndexerShape)
    max_context: int = 262_144
    arm: str = "tp"
    form: str | None = None
    exchange: str | None = None
    queries: str | None = None
    threshold_blocks: int | None = None
    cache: str = "cold"
    launch: str = "graph"
    seed: int = 0

    def __post_init__(self) -> None:
        bound = self.max_context
        require("max_context", bound, _is_int(bound) and 1 <= bound <= MAX_CONTEXT_LIMIT, f"1 to {MAX_CONTEXT_LIMIT} tokens")
        tokens = self.context_tokens
        require("context_tokens", tokens, _is_int(tokens) and 1 <= tokens <= bound, f"1 to max_context={bound} tokens")
        for name, low, high in (("batch", 1, 65_536), ("rows_padded", 0, 65_536), ("query_len", 1, MAX_QUERY_LEN), ("world", 1, 1024)):
            value = getattr(self, name)
            require(name, value, _is_int(value) and low <= value <= high, f"an integer from {low} to {high}")
        prefix = self.shared_prefix_tokens
        require("shared_prefix_tokens", prefix, _is_int(prefix) and 0 <= prefix <= tokens, f"0 to context_tokens={tokens}")
        for name, allowed in (("mix", MIXES), ("dtype", DTYPES), ("arm", tuple(ARM_FIELDS)), ("cache", CACHES), ("launch", LAUNCHES)):
            require(name, getattr(self, name), getattr(self, name) in allowed, f"one of {', '.join(allowed)}")
        used = ARM_FIELDS[self.arm]
        for name, allowed in (("form", FORMS), ("exchange", EXCHANGES), ("queries", QUERIES)):
            value = getattr(self, name)
            if name in used:
                require(name, value, value in allowed, f"one of {', '.join(allowed)} for arm {self.arm!r}")
            elif self.arm == "projections" and name == "queries" and self.world > 1:
                require(name, value, value in (None, "replicated"), "None (own heads) or 'replicated' for arm 'projections'")
            else:
                require(name, value, value is None, f"None: arm {self.arm!r} does not use it")
        if self.arm in ("vllm_cp", "sglang_cp"):
            require("queries", self.queries, self.queries == "gathered", f"'gathered': the engine of arm {self.arm!r} gathers them")
        if "form" in used and "exchange" in used and self.form != "staged":
            require("exchange", self.exchange, self.exchange == "symmetric", f"'symmetric' for form {self.form!r}")
        if self.arm in LAYER_ARMS:
            require("query_len", self.query_len, self.query_len == 1, f"1 for arm {self.arm!r}")
            require("shared_prefix_tokens", prefix, prefix == 0, f"0 for arm {self.arm!r}")
        if self.arm.startswith("mixed_"):
            require("launch", self.launch, self.launch == "eager", f"'eager' for arm {self.arm!r}: a step with prefill rows is not captured")
        if self.arm.startswith("toy_"):
            require("dtype", self.dtype, self.dtype == "bf16", f"'bf16' for arm {self.arm!r}")
            require("rows_padded", self.rows_padded, self.rows_padded == 0, f"0 for arm {self.arm!r}")
            require("world", self.world, self.world <= self.shape.heads, f"at most the {self.shape.heads} heads for arm {self.arm!r}")
        threshold = self.threshold_blocks
        if self.arm == "cp":
            ok = threshold is None or (_is_int(threshold) and threshold >= 0)
            require("threshold_blocks", threshold, ok, "None or a number of blocks >= 0")
        else:
            require("threshold_blocks", threshold, threshold is None, f"None: arm {self.arm!r} does not use it")

    def to_dict(self) -> dict[str, Any]:
        """The Point as plain JSON values; `shape` is a nested dict."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Point:
        """The Point that `to_dict` wrote. Unknown names raise TypeError."""
        values = dict(values)
        shape = values.pop("shape", {})
        return cls(shape=shape if isinstance(shape, IndexerShape) else IndexerShape(**shape), **values)

    def replace(self, **changes: Any) -> Point:
        """A Point with some fields changed, validated anew."""
        return dataclasses.replace(self, **changes)

    @property
    def label(self) -> str:
        """A short name for progress bars and tables, such as "cp/one_launch/gathered 32k x8 P=2"."""
        kind = "/".join(v for v in (self.arm, self.form, self.exchange, self.queries) if v)
        extra = "" if self.mix == "uniform" else f" {self.mix}"
        extra += "" if self.query_len == 1 else f" q{self.query_len}"
        extra += "" if self.dtype == "bf16" else f" {self.dtype}"
        return f"{kind} {tokens_text(self.context_tokens)} x{self.batch} P={self.world}{extra} {self.cache}"


def tokens_text(tokens: int) -> str:
    """A token count as engineers write it: 8192 is "8k", 1048576 "1M", 1000 "1000"."""
    for unit, size in (("M", 1 << 20), ("k", 1 << 10)):
        if tokens >= size and tokens % size == 0:
            return f"{tokens // size}{unit}"
    return str(tokens)
