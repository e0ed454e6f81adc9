"""A model's decode indexing as an engine configures it: options that are checked at start-up, and whole steps.

Context parallelism is off unless asked for. What was asked for either runs or is an error at construction: nothing
falls back, and nothing turns it on by itself (a policy advises, the options decide).
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from m3cp.decode import CPDecode, TPDecode
from m3cp.exchange import CollectiveExchange, SymmetricExchange
from m3cp.pagetable import PageTable
from m3cp.prefill import Prefill
from m3cp.shapes import EXCHANGES, FORMS, MAX_CONTEXT_LIMIT, MAX_QUERY_LEN, QUERIES, IndexerShape, require, require_int
from m3cp.shard import Shard

_CACHE_DTYPES = {
    "auto": torch.bfloat16, "bf16": torch.bfloat16, "bfloat16": torch.bfloat16, "fp16": torch.float16, "float16": torch.float16,
    "half": torch.float16, "fp8_e4m3fn": torch.float8_e4m3fn, "fp8_e4m3fnuz": torch.float8_e4m3fnuz, "float8_e4m3fn": torch.float8_e4m3fn,
    "float8_e4m3fnuz": torch.float8_e4m3fnuz,
}  # fmt: skip
_PLATFORM_FP8 = ("fp8", "fp8_e4m3")  # the device's own e4m3: fnuz on gfx942, fn elsewhere
_QUERY_DTYPES = ("auto", "bf16", "bfloat16", "fp16", "float16", "half")
_DEVICES = ("cuda", "cpu")  # torch calls AMD's GPUs cuda too


@dataclass(frozen=True)
class CPOptions:
    """Context-parallel decode indexing, off by default; validated when made, and only when `enabled`.

    Args:
        enabled: turn it on. Off, the tensor-parallel path runs and nothing below is looked at.
        world: ranks that share the index heads and, here, the context.
        shape: the indexer's constants.
        cache_dtype: as engines write it: "auto" (bf16), "bf16", "fp16", "fp8_e4m3fn", "fp8_e4m3fnuz", or "fp8" and
            "fp8_e4m3" for the format of the device's `arch`.
        query_dtype: "auto" is the one that goes with the cache.
        device: torch's device type: "cuda" (NVIDIA and AMD) or "cpu".
        arch: of an AMD GPU, such as "gfx942"; it decides what "fp8" means.
        page_size: tokens of an index-cache page.
        max_requests, max_query_len, max_context: bounds of a step; `max_context` in tokens.
        queries: "gathered" or "replicated". exchange: "collective" or "symmetric". form: "staged", "one_launch", "two_launch".
        threshold_blocks: None, or where an adaptive path changes over.
        reuse_every: layers that share one selection; 1: each makes its own. Reuse changes answers.
        score_type, index_values: of the model; M3's "max" and none.
        fused_sparse_decode, decode_context_parallel, attention_data_parallel, two_batch_overlap, dense_sparse_decode:
            what else the engine has been told to do.

    Raises:
        ValueError: naming the setting, what was given and what is allowed.
    """

    enabled: bool = False
    world: int = 1
    shape: IndexerShape = field(default_factory=IndexerShape)
    cache_dtype: str = "auto"
    query_dtype: str = "auto"
    device: str = "cuda"
    arch: str | None = None
    page_size: int = 128
    max_requests: int = 256
    max_query_len: int = 4
    max_context: int = 262_144
    queries: str = "gathered"
    exchange: str = "collective"
    form: str = "staged"
    threshold_blocks: int | None = None
    reuse_every: int = 1
    score_type: str = "max"
    index_values: bool = False
    fused_sparse_decode: bool = False
    decode_context_parallel: int = 1
    attention_data_parallel: int = 1
    two_batch_overlap: bool = False
    dense_sparse_decode: bool = False

    def __post_init__(self) -> None:
        require("enabled", self.enabled, isinstance(self.enabled, bool), "True or False")
        if not self.enabled:
            return
        require_int("world", self.world, 2, 1024, " with CP enabled: one rank has no context to share")
        Shard(0, self.world, self.shape.heads)
        known = (*_CACHE_DTYPES, *_PLATFORM_FP8)
        require("cache_dtype", self.cache_dtype, self.cache_dtype in known, f"one of {', '.join(known)}: no CP kernel reads another")
        require("device", self.device, self.device in _DEVICES, f"one of {', '.join(_DEVICES)}: no other device has kernels")
        require("page_size", self.page_size, self.page_size == self.shape.block_size, f"the kernels' block size, {self.shape.block_size}")
        require("query_dtype", self.query_dtype, self.query_dtype in _QUERY_DTYPES, f"one of {', '.join(_QUERY_DTYPES)}: no kernel takes fp8 queries")
        if self.query_dtype != "auto":
            fits = (_CACHE_DTYPES[self.query_dtype] == torch.float16) == (self.torch_cache_dtype == torch.float16)
            require("query_dtype", self.query_dtype, fits, f"fp16 with an fp16 cache and bf16 otherwise (cache_dtype={self.cache_dtype!r})")
        require_int("max_requests", self.max_requests, 1, 65_536)
        require_int("max_query_len", self.max_query_len, 1, MAX_QUERY_LEN)
        require_int("max_context", self.max_context, 1, MAX_CONTEXT_LIMIT, " tokens: what lengths and keys can hold")
        require("queries", self.queries, self.queries in QUERIES, f"one of {', '.join(QUERIES)}")
        require("exchange", self.exchange, self.exchange in EXCHANGES, f"one of {', '.join(EXCHANGES)}")
        require("form", self.form, self.form in FORMS, f"one of {', '.join(FORMS)}")
        if self.form != "staged":
            require("exchange", self.exchange, self.exchange == "symmetric", f"'symmetric' for form {self.form!r}")
        require("score_type", self.score_type, self.score_type == "max", "'max', the model's")
        for name, why in (
            ("index_values", "the model's sparse layers have no index values"),
            ("fused_sparse_decode", "that kernel computes the indexer's top-k itself"),
            ("two_batch_overlap", "an exchange has one launch in flight"),
            ("dense_sparse_decode", "dense decode selects nothing"),
        ):
            require(name, getattr(self, name), getattr(self, name) is False, f"False with CP enabled: {why}")
        for name, why in (
            ("decode_context_parallel", "it shards the KV cache over the context already and owns that axis"),
            ("attention_data_parallel", "its ranks hold different requests"),
        ):
            value = getattr(self, name)
            require(name, value, isinstance(value, int) and not isinstance(value, bool) and value == 1, f"1 with CP enabled: {why}")
        require_int("reuse_every", self.reuse_every, 1, 64, " layers")

    @property
    def path(self) -> str:
        """What these options run: "cp" or "tp"."""
        return "cp" if self.enabled else "tp"

    @property
    def torch_cache_dtype(self) -> torch.dtype:
        """The cache's element type; "fp8" is the device's own e4m3."""
        if self.cache_dtype in _PLATFORM_FP8:
            return torch.float8_e4m3fnuz if (self.arch or "").startswith("gfx942") else torch.float8_e4m3fn
        return _CACHE_DTYPES[self.cache_dtype]

    def build(self, shard: Shard, device: torch.device | str, *, exchange=None) -> TPDecode | CPDecode:
        """The object that decodes on this rank.

        Args:
            shard: this rank's; with CP enabled its world is `world`.
            exchange: a transport to use in the place of the one that `exchange` names.
        """
        bounds = dict(
            max_requests=self.max_requests, max_query_len=self.max_query_len, max_context=self.max_context, device=device,
            cache_dtype=self.torch_cache_dtype, form=self.form,
        )  # fmt: skip
        if not self.enabled:
            return TPDecode(self.shape, shard, **bounds)
        require("shard.world", shard.world, shard.world == self.world, f"the options' world={self.world}")
        require("device", str(device), torch.device(device).type == self.device, f"of the type that the options state, {self.device!r}")
        exchange = exchange or (SymmetricExchange() if self.exchange == "symmetric" else CollectiveExchange())
        return CPDecode(self.shape, shard, exchange=exchange, queries=self.queries, threshold_blocks=self.threshold_blocks, **bounds)


class Indexer:
    """The indexing steps of a model's sparse layers, one after another, by one object of persistent buffers.

    With `reuse_every` = n, of each n layers the first selects and the others return its choice: no scoring, no
    exchange, on every rank alike, since only the layer's number decides. `path` says what the last step was.

    Args:
        options: as checked; `options.build` makes the decoding object.
        decode: what `options.build` returned.
    """

    def __init__(self, options: CPOptions, decode: TPDecode | CPDecode):
        self.options, self.decode = options, decode
        self.path = options.path
        self._layer: int | None = None  # the one whose selection is held
        self._chosen: torch.Tensor | None = None
        self._pages: PageTable | None = None

    def __call__(
        self, layer: int, q, cache, block_table, seq_lens, *, query_len: int = 1, out: torch.Tensor | None = None, pages: PageTable | None = None
    ) -> torch.Tensor:
        """The selection of sparse layer `layer` (0, 1, ...); the other arguments are the decoding object's.

        A reusing layer returns the tensor of the layer that selected, or copies it to `out`; its page table must have
        been written then too, with the same page size and stride.

        Raises:
            ValueError: a reusing layer before the one that selects, with another number of rows or another page table.
        """
        require_int("layer", layer, 0, 1 << 16)
        first = layer - layer % (self.options.reuse_every if self.options.enabled else 1)
        if layer == first:
            self._layer = None  # nothing is held if this raises
            self._chosen = self.decode(q, cache, block_table, seq_lens, query_len=query_len, out=out, pages=pages)
            self._layer, self._pages, self.path = layer, pages, self.decode.path
            return self._chosen
        tokens = seq_lens.shape[0] * query_len
        if self._layer != first or self._chosen.shape[1] != tokens:
            rows = "none" if self._layer != first else self._chosen.shape[1]
            raise ValueError(f"layer={layer} of {tokens} rows reuses layer {first}'s selection, which has {rows}: that layer must run first")
        if pages is not None and pages is not self._pages:
            shape, held = self.decode.shape, self._pages
            if held is None or (held.page_size, held.entry_stride(shape), held.pages.shape) != (pages.page_size, pages.entry_stride(shape), pages.pages.shape):
                wrote = "no page table" if held is None else f"one of page_size={held.page_size}, stride={held.stride}, shape {tuple(held.pages.shape)}"
                given = f"page_size={pages.page_size}, stride={pages.stride}, shape {tuple(pages.pages.shape)}"
                raise ValueError(f"pages of layer={layer} ({given}), which reuses layer {first}: that layer wrote {wrote}")
            pages.pages.copy_(held.pages)
            pages.attended.copy_(held.attended)
        self.path = "reused"
        return self._chosen if out is None else out.copy_(self._chosen)


class WholeStep:
    """One indexing step of a mixed batch: decode requests first, then prefill chunks, each row exactly once.

    Decode rows go to `decode` (TP or CP), prefill rows to `prefill` (unsharded, this rank's heads), into disjoint
    slices of one buffer. Such a step runs eager; a batch without prefill rows may be captured.

    Args:
        decode: what `CPOptions.build` returned.
        prefill: of the same shape, shard and bound.

    Raises:
        ValueError: the two differ.
    """

    def __init__(self, decode: TPDecode | CPDecode, prefill: Prefill):
        for name in ("shape", "shard", "max_context", "cache_dtype"):
            ours, theirs = getattr(decode, name), getattr(prefill, name)
            require(f"prefill.{name}", theirs, ours == theirs, f"the decode object's {name}={ours!r}")
        self.decode, self.prefill = decode, prefill
        rows = decode.max_tokens + prefill.max_tokens
        self._out = torch.empty(decode.shard.local_heads * rows * decode.shape.topk, dtype=torch.int32, device=decode.device)

    @property
    def path(self) -> str:
        """What ran the last step's decode rows."""
        return self.decode.path

    @property
    def nbytes(self) -> int:
        """Bytes of persistent buffers, both parts' included."""
        return self.decode.nbytes + self.prefill.nbytes + self._out.numel() * 4

    def check(self) -> None:
        """Raise what the device found in either part; synchronises."""
        self.decode.check()
        self.prefill.check()

    def __call__(
        self, q, cache, block_table, seq_lens, starts, *, decode_requests: int, query_len: int = 1, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Choose blocks for every row of the batch.

        Args:
            q: `[tokens, local_heads, D]` (`[tokens, heads, D]` with replicated queries): `decode_requests * query_len`
                rows of decode, then the prefill requests' rows.
            cache: `[pages, block_size, D]`.
            block_table: `[requests, width]` int32, decode requests first.
            seq_lens: `[requests]` int32, this step's tokens included; 0 for a padding row of the decode part.
            starts: `[prefill requests + 1]` int32 on the device: each prefill request's first row, counted from the first
                prefill row; the last entry is the number of prefill rows.
            decode_requests: requests of the decode part, its padding included; the same on every rank.
            query_len: query tokens of a decode request.
            out: `[local_heads, tokens, topk]` int32, contiguous; None returns a view of this object's buffer.

        Returns:
            Logical block ids, ascending, then -1.

        Raises:
            ValueError: naming the argument, what was given and what is allowed; before any exchange.
        """
        decode, shard, requests = self.decode, self.decode.shard, seq_lens.shape[0]
        require_int("decode_requests", decode_requests, 0, requests, " (requests of seq_lens)")
        require_int("query_len", query_len, 1, decode.max_query_len, " (max_query_len)")
        rows = decode_requests * query_len  # of the decode part
        require("q.shape[0]", q.shape[0], rows <= q.shape[0], f"at least the {rows} rows of {decode_requests} decode requests")
        fits = q.shape[0] - rows <= self.prefill.max_tokens and (q.shape[0] == rows or requests > decode_requests)
        require("q.shape[0]", q.shape[0], fits, f"{rows} decode rows and, with prefill requests, at most {self.prefill.max_tokens} prefill rows")
        size = (shard.local_heads, q.shape[0], decode.shape.topk)
        if out is None:
            out = self._out[: size[0] * size[1] * size[2]].view(size)
        elif tuple(out.shape) != size or out.dtype != torch.int32 or not out.is_contiguous():
            raise ValueError(f"out of shape {tuple(out.shape)}, {out.dtype}: must be contiguous {size} int32")
        chunks = q[rows:]
        if shard.local_heads != q.shape[1] == decode.shape.heads:  # replicated queries: a prefill needs the owned heads only
            chunks = chunks[:, shard.owned_heads.start : shard.owned_heads.stop]
        prefill = (chunks, cache, block_table[decode_requests:], seq_lens[decode_requests:], starts)
        self.prefill.checked(*prefill)
        # The decode object's output is contiguous and its own; a copy puts its rows, and only those, into their slice.
        out[:, :rows].copy_(decode(q[:rows], cache, block_table[:decode_requests], seq_lens[:decode_requests], query_len=query_len))
        self.prefill(*prefill, out=out[:, rows:])
        return out
