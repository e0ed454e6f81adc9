"""Decode-time block selection over persistent buffers: tensor-parallel (`TPDecode`) and context-parallel (`CPDecode`).

One object serves all layers and all graph sizes of a model. Nothing in a call allocates, synchronises or reads the
device from the host, so calls can be captured in CUDA and HIP graphs; grids and buffers come from the bounds given at
construction, lengths and strides are run-time values.
"""

from __future__ import annotations

import itertools

import torch

from m3cp import compiled, reference
from m3cp.exchange import WAIT_ERROR, SymmetricExchange, spin_limit
from m3cp.kernels import candidates as candidates_op
from m3cp.kernels import fused as fused_op
from m3cp.kernels import merge as merge_op
from m3cp.kernels import score as score_op
from m3cp.kernels import tile
from m3cp.pagetable import Emission, PageTable
from m3cp.shapes import FORMS, MAX_CONTEXT_LIMIT, MAX_QUERY_LEN, QUERIES, IndexerShape, require, require_int
from m3cp.shard import Shard

LENGTH_ERROR = 1
ERROR_KINDS = {
    LENGTH_ERROR: "a sequence length exceeds max_context, found by rank {rank}",
    WAIT_ERROR: "a wait for rank {rank} expired: that rank is gone, late or calls with other lengths; build the object anew",
}
CACHE_DTYPES = (torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e4m3fnuz)
_FUSED_STAGES = {"one_launch": ["decode"], "two_launch": ["score_and_push", "wait_and_choose"]}
_INTERPRETER_PROGRAMS = 3  # enough to split a request between programs; they run one after another


class _Decode:
    """What both paths share: checks of the arguments, buffers, the score and candidates stages, the error word."""

    path: str  # of the last call: this class's own, or "profiling"
    stages: list[str]  # names of what a call runs, in order
    launches: int  # kernels a call
    collectives: int  # collectives a call

    def __init__(self, shape, shard, *, blocks, scored_heads, max_requests, max_query_len, max_context, device, cache_dtype, form):
        device = torch.device(device)
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        require_int("max_requests", max_requests, 1, 65_536)
        require_int("max_query_len", max_query_len, 1, MAX_QUERY_LEN)
        require_int("max_context", max_context, 1, MAX_CONTEXT_LIMIT, " tokens")
        formats = f"one of {', '.join(map(str, CACHE_DTYPES))} (bytes need the format that they hold)"
        require("cache_dtype", cache_dtype, cache_dtype in CACHE_DTYPES, formats)
        require("form", form, form in FORMS, f"one of {', '.join(FORMS)}")
        self.shape, self.shard, self.device, self.cache_dtype, self.form = shape, shard, device, cache_dtype, form
        self.max_requests, self.max_query_len, self.max_context = max_requests, max_query_len, max_context
        self.max_tokens = max_requests * max_query_len
        self.query_dtype = torch.float16 if cache_dtype == torch.float16 else torch.bfloat16
        self._blocks = blocks  # the shard of blocks: (0, 1) for TP
        self._scored_heads = scored_heads
        self._triton = device.type == "cuda" or tile.INTERPRETED
        self._warm = False
        self._refused = ""  # why calls are refused for good
        self._way = self.path  # of a call that has a cache
        self._warm_page_sizes: set[int] = set()
        self._buffers: list[torch.Tensor] = []
        if form == "staged":
            width = max(1, blocks.local_blocks(shape.blocks(max_context)))
            self._scores = self._buffer((self.max_tokens, scored_heads, width), torch.float32)
        elif not self._triton:
            raise ValueError(f"form={form!r} on {device}: the eager backend has form 'staged' only (set TRITON_INTERPRET=1 before import to interpret)")
        self._out = self._buffer((shard.local_heads * self.max_tokens * shape.topk,), torch.int32)
        self._state = torch.zeros(4, dtype=torch.int64, device=device)  # launches, then the error word: kind, rank, launch
        self._programs = _INTERPRETER_PROGRAMS if device.type != "cuda" else tile.setting(tile.cache_format(cache_dtype)).programs_per_unit * _compute_units(device)

    def _buffer(self, size: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        self._buffers.append(torch.empty(size, dtype=dtype, device=self.device))
        return self._buffers[-1]

    @property
    def nbytes(self) -> int:
        """Bytes of persistent buffers that this object holds on its device."""
        return sum(b.numel() * b.element_size() for b in [*self._buffers, self._state])

    def warmup(self, page_size: int | None = None) -> None:
        """Compile every kernel and warm every transport that a call can choose; capture is refused before it.

        Runs one call for each query length and each bucket of batch sizes, on a cache of one page and requests whose
        lengths are just beyond `topk` blocks where the bound allows it, so that every stage runs.

        Args:
            page_size: also warm calls that write page tables of this page size.
        """
        shape = self.shape
        width = shape.blocks(self.max_context)
        cache = torch.zeros(1, shape.block_size, shape.head_dim, dtype=self.cache_dtype, device=self.device)
        buckets = sorted({min(n, self.max_requests) for n in (1, 32, 256, 2048, 16_384, 65_536)})
        # Short requests first: they compile everything and wait for nobody, so that ranks which compile slowly do not
        # keep the others waiting in their first exchange.
        for length in (1, min(self.max_context, (shape.topk + 1) * shape.block_size)):
            for requests, query_len in itertools.product(buckets, range(1, self.max_query_len + 1)):
                table = torch.zeros(requests, width, dtype=torch.int32, device=self.device)
                lens = torch.full((requests,), length, dtype=torch.int32, device=self.device)
                q = torch.zeros(requests * query_len, self._given_heads, shape.head_dim, dtype=self.query_dtype, device=self.device)
                pages = None
                if page_size is not None:
                    given = dict(local_heads=self.shard.local_heads, tokens=requests * query_len, page_size=page_size, device=self.device)
                    pages = PageTable.empty(shape, **given)
                    self(q, cache, table, lens, query_len=query_len, pages=pages)
                self(q, cache, table, lens, query_len=query_len)
        self._warm_page_sizes |= {page_size}
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.check()
        self._warm = True

    def check(self) -> None:
        """Raise what the device found since construction; synchronises.

        Raises:
            RuntimeError: naming the kind of error, the rank and the launch. The rows concerned hold -1. After an
                expired wait the ranks no longer count alike: later launches, replays too, write -1 and send nothing,
                and once it was raised here, calls are refused.
        """
        launch, kind, rank, at = self._state.tolist()
        if kind:
            message = f"{ERROR_KINDS[kind].format(rank=rank)} (launch {at} of {launch}); the rows concerned are -1"
            self._refused = message if kind == WAIT_ERROR else ""
            raise RuntimeError(message)

    def _checked(self, q, cache, block_table, seq_lens, query_len, out, pages) -> int:
        """Raise on what the host can see; returns the number of tokens."""
        if self._refused:
            raise RuntimeError(f"{self._refused}: this object refuses calls")
        shape = self.shape
        profiling = cache is None or (isinstance(cache, torch.Tensor) and cache.numel() == 0)
        given = (("q", q, 3), ("block_table", block_table, 2), ("seq_lens", seq_lens, 1), *(() if profiling else (("cache", cache, 3),)))
        for name, value, dims in given:
            if not isinstance(value, torch.Tensor) or value.dim() != dims:
                given = tuple(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__
                raise ValueError(f"{name} of shape {given}: must be a tensor of {dims} dimensions")
            if value.device != self.device:
                raise ValueError(f"{name} on {value.device}: this object was built for {self.device}")
        for name, value in (("block_table", block_table), ("seq_lens", seq_lens)):
            require(f"{name}.dtype", value.dtype, value.dtype == torch.int32, "torch.int32")
            require(f"{name}.stride(-1)", value.stride(-1), value.stride(-1) == 1 or value.shape[-1] < 2, "1")
        require_int("query_len", query_len, 1, self.max_query_len, " (max_query_len)")
        requests = seq_lens.shape[0]
        tokens = requests * query_len
        if requests > self.max_requests:
            raise ValueError(f"seq_lens of {requests} requests: the buffers hold max_requests={self.max_requests}")
        if block_table.shape[0] != requests:
            raise ValueError(f"block_table of {block_table.shape[0]} rows: must equal the {requests} requests of seq_lens")
        if block_table.shape[1] * shape.block_size < self.max_context:
            raise ValueError(
                f"block_table of width {block_table.shape[1]}: {block_table.shape[1]} x block_size {shape.block_size} tokens is less than "
                f"max_context={self.max_context}"
            )
        if not profiling:
            self._check_cache(cache)
        if tuple(q.shape) != (tokens, self._given_heads, shape.head_dim):
            raise ValueError(
                f"q of shape {tuple(q.shape)}: must be [tokens={tokens} (requests {requests} x query_len {query_len}), "
                f"heads={self._given_heads}, head_dim={shape.head_dim}]"
            )
        require("q.dtype", q.dtype, q.dtype == self.query_dtype, f"{self.query_dtype} with a cache of {self.cache_dtype}")
        if tokens and (q.stride(2) != 1 or q.data_ptr() % 16 or any(q.stride(d) * q.element_size() % 16 for d in (0, 1) if q.shape[d] > 1)):
            raise ValueError(f"q with strides {q.stride()} at address {q.data_ptr():#x}: each (token, head) row must be contiguous and 16-byte aligned")
        if out is not None:
            expected = (self.shard.local_heads, tokens, shape.topk)
            if tuple(out.shape) != expected or out.dtype != torch.int32 or out.device != self.device or not out.is_contiguous():
                raise ValueError(f"out of shape {tuple(out.shape)}, {out.dtype} on {out.device}: must be contiguous {expected} int32 on {self.device}")
        if pages is not None:
            cache_pages = 0 if profiling else cache.shape[0]
            pages.checked(shape, local_heads=self.shard.local_heads, tokens=tokens, cache_pages=cache_pages, device=self.device)
        if self.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            if not self._warm:
                raise RuntimeError("capture before warmup(): call warmup() once after construction, before the first capture")
            if pages is not None and pages.page_size not in self._warm_page_sizes:
                raise RuntimeError(f"capture of page tables before warmup(page_size={pages.page_size}): call it before the first capture")
        return tokens

    def _check_cache(self, cache: torch.Tensor) -> None:
        shape = self.shape
        if tuple(cache.shape[1:]) != (shape.block_size, shape.head_dim):
            raise ValueError(f"cache of shape {tuple(cache.shape)}: must be [pages, block_size={shape.block_size}, head_dim={shape.head_dim}]")
        stated = cache.dtype == self.cache_dtype or (cache.dtype == torch.uint8 and self.cache_dtype.itemsize == 1)
        require("cache.dtype", cache.dtype, stated, f"{self.cache_dtype}, as given at construction")
        if cache.stride(2) != 1 or cache.stride(1) != shape.head_dim:
            raise ValueError(f"cache with strides {cache.stride()}: a page must be contiguous (strides [any, {shape.head_dim}, 1])")

    def _without_cache(self, cache: torch.Tensor | None, ids: torch.Tensor, pages: PageTable | None) -> bool:
        """An engine's profiling run has no cache yet (None, or no pages): all -1, no exchange, and `path` says so."""
        profiling = cache is None or cache.numel() == 0
        self.path = "profiling" if profiling else self._way
        if profiling:
            ids.fill_(-1)
            if pages is not None:
                pages.pages.fill_(-1)
                pages.attended.zero_()
        return profiling

    def _emission(self, pages: PageTable | None, cache, block_table, seq_lens, query_len: int) -> Emission | None:
        return None if pages is None else Emission(pages, block_table, seq_lens, query_len, self.max_context, cache.shape[0])

    def _result(self, tokens: int, out: torch.Tensor | None) -> torch.Tensor:
        size = (self.shard.local_heads, tokens, self.shape.topk)
        return self._out[: size[0] * size[1] * size[2]].view(size) if out is None else out

    def _local(self, q, cache, block_table, seq_lens, query_len: int, tokens: int, out: torch.Tensor, emit: Emission | None = None) -> None:
        """Score this object's blocks and write their best keys (int64 `out`) or, in a world of one, ids (int32) and pages."""
        bounds = dict(shape=self.shape, shard=self._blocks, query_len=query_len, max_context=self.max_context)
        if self._triton:
            score_op.score(q, cache, block_table, seq_lens, out=self._scores, state=self._state, programs=self._programs, **bounds)
            candidates_op.candidates(self._scores, seq_lens, tokens=tokens, out=out, emit=emit, **bounds)
            return
        self._state[0] += 1
        if bool((seq_lens > self.max_context).any()) and not self._state[1]:
            self._state[1:] = torch.tensor([1, self.shard.rank, int(self._state[0])])
        scores = reference.score(q, cache, block_table, seq_lens, out=self._scores, **bounds)
        if out.dtype == torch.int64:
            reference.candidates(scores, seq_lens, out=out, **bounds)
        else:
            found = reference.candidates(scores, seq_lens, **bounds)
            reference.merge(found[None], shape=self.shape, owned=range(self._scored_heads), out=out)
            if emit is not None:
                reference.emit_pages(out, emit, shape=self.shape)

    def _merge(self, gathered: torch.Tensor, out: torch.Tensor, emit: Emission | None = None) -> None:
        if self._triton:
            merge_op.merge(gathered, shape=self.shape, owned=self.shard.owned_heads, out=out, emit=emit, state=self._state)
            return
        reference.merge(gathered, shape=self.shape, owned=self.shard.owned_heads, out=out)
        if emit is not None:
            reference.emit_pages(out, emit, shape=self.shape)


class TPDecode(_Decode):
    """Tensor parallelism, the baseline: each rank streams the whole index cache to score its own heads.

    Args:
        shape: the indexer's constants.
        shard: this rank's share; it owns `shard.owned_heads`.
        max_requests, max_query_len: bounds of a call; buffers hold their product of tokens.
        max_context: bound of every sequence length, tokens; shapes buffers, never the work.
        device: where the tensors of every call live.
        cache_dtype: of the index-K cache: bf16, fp16, fp8 e4m3fn or e4m3fnuz. A cache given as bytes is read as this
            format. Queries are fp16 with an fp16 cache, else bf16; an fp8 cache's scale does not change a choice.
        form: "staged" (two kernels), "one_launch", or "two_launch" (the same code cut in two).

    Raises:
        ValueError: naming the argument, what was given and what is allowed.
    """

    path = "tp"
    stages = ["score", "choose"]
    launches, collectives = 2, 0

    def __init__(
        self,
        shape: IndexerShape,
        shard: Shard,
        *,
        max_requests: int,
        max_query_len: int,
        max_context: int,
        device: torch.device | str,
        cache_dtype: torch.dtype = torch.bfloat16,
        form: str = "staged",
    ):
        _require_shard(shape, shard)
        self._given_heads = shard.local_heads
        super().__init__(
            shape, shard, blocks=Shard(0, 1, shape.heads), scored_heads=shard.local_heads, max_requests=max_requests,
            max_query_len=max_query_len, max_context=max_context, device=device, cache_dtype=cache_dtype, form=form,
        )  # fmt: skip
        if form != "staged":
            self._fused = _Fused(self, exchange=None, gather=False)
            self.stages, self.launches = _FUSED_STAGES[form], len(_FUSED_STAGES[form])

    def __call__(self, q, cache, block_table, seq_lens, *, query_len: int = 1, out: torch.Tensor | None = None, pages: PageTable | None = None) -> torch.Tensor:
        """Choose blocks for the owned heads.

        Args:
            q: `[tokens, local_heads, D]`, `tokens = requests * query_len`, request-major, post-RoPE.
            cache: `[pages, block_size, D]`, any page stride.
            block_table: `[requests, width]` int32 with `width * block_size >= max_context`.
            seq_lens: `[requests]` int32: total tokens including this step's queries; 0 for a padding row.
            out: `[local_heads, tokens, topk]` int32; None returns a view of this object's buffer, valid until the next call.
            pages: a page table to write in the same pass.

        Returns:
            Logical block ids, ascending, then -1.
        """
        tokens = self._checked(q, cache, block_table, seq_lens, query_len, out, pages)
        ids = self._result(tokens, out)
        if self._without_cache(cache, ids, pages) or not tokens:
            return ids
        cache = cache.view(self.cache_dtype)
        emit = self._emission(pages, cache, block_table, seq_lens, query_len)
        if self.form != "staged":
            self._fused(q, cache, block_table, seq_lens, query_len, ids, emit)
        else:
            self._local(q, cache, block_table, seq_lens, query_len, tokens, ids, emit)
        return ids


class CPLocal(_Decode):
    """CP's part without the exchange: score a shard for all heads, take its candidates, merge `world` lists.

    Runs on one device for any world size; timed as the arm `cp_local`. The other ranks' lists stand in `peers`.
    Arguments as `TPDecode`; queries are all heads', `[tokens, heads, D]`, or gathered `[world, tokens, local_heads, D]`.
    """

    path = "cp_local"
    stages = ["score", "candidates", "merge"]
    launches, collectives = 3, 0

    def __init__(
        self,
        shape: IndexerShape,
        shard: Shard,
        *,
        max_requests: int,
        max_query_len: int,
        max_context: int,
        device: torch.device | str,
        cache_dtype: torch.dtype = torch.bfloat16,
        form: str = "staged",
    ):
        if type(self) is CPLocal:
            require("form", form, form == "staged", "'staged': CP without its exchange has no other form")
        _require_shard(shape, shard)
        self._given_heads = shape.heads
        super().__init__(
            shape, shard, blocks=Shard(shard.rank, shard.world, shard.world), scored_heads=shape.heads, max_requests=max_requests,
            max_query_len=max_query_len, max_context=max_context, device=device, cache_dtype=cache_dtype, form=form,
        )  # fmt: skip
        if form == "staged":
            self._gathered = self._buffer((shard.world * shape.heads * self.max_tokens * shape.topk,), torch.int64)

    def peers(self, tokens: int) -> torch.Tensor:
        """The gathered keys of a call of `tokens` tokens, `[world, heads, tokens, topk]` int64: a view to fill."""
        size = (self.shard.world, self.shape.heads, tokens, self.shape.topk)
        return self._gathered[: size[0] * size[1] * size[2] * size[3]].view(size)

    def local_keys(self, q, cache, block_table, seq_lens, query_len: int, out: torch.Tensor) -> None:
        """Write this shard's candidates of all heads, `[heads, tokens, topk]` int64; `q` may be gathered (4 dimensions)."""
        self._local(q, cache, block_table, seq_lens, query_len, seq_lens.shape[0] * query_len, out)

    def __call__(self, q, cache, block_table, seq_lens, *, query_len: int = 1, out: torch.Tensor | None = None, pages: PageTable | None = None) -> torch.Tensor:
        """As `TPDecode`, with this shard's keys placed among `peers(tokens)`."""
        tokens = self._checked(q, cache, block_table, seq_lens, query_len, out, pages)
        ids = self._result(tokens, out)
        if self._without_cache(cache, ids, pages) or not tokens:
            return ids
        cache = cache.view(self.cache_dtype)
        emit = self._emission(pages, cache, block_table, seq_lens, query_len)
        gathered = self.peers(tokens)
        self.local_keys(q, cache, block_table, seq_lens, query_len, gathered[self.shard.rank])
        self._merge(gathered, ids, emit)
        return ids


class CPDecode(CPLocal):
    """Context parallelism: each rank scores all heads on its share of the blocks; the ranks exchange candidates.

    Args:
        exchange: a transport from `m3cp.exchange`.
        queries: "gathered": each rank is given its own heads' queries and they are gathered; "replicated": each rank
            is given all heads'.
        form: "staged" takes either exchange; "one_launch" and "two_launch" take a SymmetricExchange.
        threshold_blocks: None: always CP. Else, in the forms that are not staged, each call takes TP's path where its
            requests see at most so many blocks in all, decided on the device, captured or not; `path` is "adaptive",
            and `counts()` says how often which.

    The rest as `TPDecode`. Every rank must call with the same number of rows.

    Raises:
        ValueError: also when the exchange's group does not have `shard.world` ranks.
    """

    path = "cp"

    def __init__(
        self,
        shape: IndexerShape,
        shard: Shard,
        *,
        max_requests: int,
        max_query_len: int,
        max_context: int,
        device: torch.device | str,
        cache_dtype: torch.dtype = torch.bfloat16,
        exchange,
        queries: str = "gathered",
        form: str = "staged",
        threshold_blocks: int | None = None,
    ):
        require("queries", queries, queries in QUERIES, f"one of {', '.join(QUERIES)}")
        if threshold_blocks is not None:
            require_int("threshold_blocks", threshold_blocks, 0, 2**31 - 1, " blocks")
            require("threshold_blocks", threshold_blocks, form != "staged", "None for form 'staged', which has no adaptive path")
            self.path = "adaptive"
        super().__init__(
            shape, shard, max_requests=max_requests, max_query_len=max_query_len, max_context=max_context, device=device,
            cache_dtype=cache_dtype, form=form,
        )  # fmt: skip
        self.exchange, self.queries, self.threshold_blocks = exchange, queries, threshold_blocks
        gathers = queries == "gathered"
        self._given_heads = shard.local_heads if gathers else shape.heads
        if form != "staged":
            if not isinstance(exchange, SymmetricExchange):
                raise ValueError(f"exchange={exchange!r} with form={form!r}: must be a SymmetricExchange")
            self._fused = _Fused(self, exchange=exchange, gather=gathers, threshold=threshold_blocks)
            self.stages, self.launches = _FUSED_STAGES[form], len(_FUSED_STAGES[form])
            return
        self.stages = [*(["gather_queries"] if gathers else []), "score", "candidates", "gather_keys", "merge"]
        symmetric = isinstance(exchange, SymmetricExchange)  # its gathers are kernels
        self.collectives = 0 if symmetric else 1 + gathers
        self.launches = 3 + (1 + gathers if symmetric else 0)
        row = shard.local_heads * shape.head_dim
        payload_words = self.max_tokens * max(shape.heads * shape.topk * 2, row // 2 if gathers else 0)
        self._gather = exchange.attach(shard, self.device, payload_words, self._state)
        self._sent_keys = self._buffer((shape.heads * self.max_tokens * shape.topk,), torch.int64)
        if gathers:
            self._sent_queries = self._buffer((self.max_tokens * row,), self.query_dtype)
            self._queries = self._buffer((shard.world * self.max_tokens * row,), self.query_dtype)

    def __call__(self, q, cache, block_table, seq_lens, *, query_len: int = 1, out: torch.Tensor | None = None, pages: PageTable | None = None) -> torch.Tensor:
        """As `TPDecode`; `q` is `[tokens, local_heads, D]` when gathered, `[tokens, heads, D]` when replicated."""
        tokens = self._checked(q, cache, block_table, seq_lens, query_len, out, pages)
        ids = self._result(tokens, out)
        if self._without_cache(cache, ids, pages):
            return ids
        self.exchange.agree(tokens, self.device, warm=self._warm)
        if not tokens:
            return ids
        cache = cache.view(self.cache_dtype)
        emit = self._emission(pages, cache, block_table, seq_lens, query_len)
        self.exchange.in_flight.begin(self.device)
        if self.form != "staged":
            self._fused(q, cache, block_table, seq_lens, query_len, ids, emit)
        else:
            self._staged(q, cache, block_table, seq_lens, query_len, ids, emit)
        self.exchange.in_flight.end(self.device)
        return ids

    def counts(self) -> dict[str, int]:
        """Calls so far of an adaptive object by path, from the device (synchronises): "tp" holds those that read no key.

        Raises:
            ValueError: without `threshold_blocks`.
        """
        require("threshold_blocks", None, self._way == "adaptive", "a number of blocks: this object always takes CP's path")
        exchanged, launches = self._fused.memory.counters[:, 0].tolist()
        return {"cp": exchanged, "tp": launches - exchanged}

    def _staged(self, q, cache, block_table, seq_lens, query_len: int, ids: torch.Tensor, emit: Emission | None) -> None:
        tokens = ids.shape[1]
        if self.queries == "gathered":
            if not q.is_contiguous():  # one more launch: a slice of a fused projection
                q = self._sent_queries[: q.numel()].view(q.shape).copy_(q)
            everyone = self._queries[: self.shard.world * q.numel()].view(self.shard.world, *q.shape)
            self._gather(everyone, q)
            q = everyone
        keys = self._sent_keys[: self.shape.heads * tokens * self.shape.topk].view(self.shape.heads, tokens, self.shape.topk)
        self.local_keys(q, cache, block_table, seq_lens, query_len, keys)
        gathered = self.peers(tokens)
        self._gather(gathered, keys)
        self._merge(gathered, ids, emit)


class _Fused:
    """The one-launch and two-launch forms over their memory: what `TPDecode` and `CPDecode` hold when not staged.

    Args:
        owner: the object whose bounds count.
        exchange: a SymmetricExchange, or None for TP.
        gather: whether queries travel too.
        threshold: sum of blocks up to which a call takes TP's path; None never does.

    Raises:
        RuntimeError: fewer programs than one a compute unit would be resident.
    """

    def __init__(self, owner: _Decode, *, exchange: SymmetricExchange | None, gather: bool, threshold: int | None = None):
        shape, shard, device = owner.shape, owner.shard, owner.device
        self.owner, self.exchange, self.gather, self.threshold = owner, exchange is not None, gather, threshold
        self.spin_limit = (exchange and exchange.spin_limit) or spin_limit(device)
        # TP is a world of one that owns the heads it was given.
        self.shard = shard if self.exchange else Shard(0, 1, shard.local_heads)
        bounds = dict(max_tokens=owner.max_tokens, max_context=owner.max_context)
        width = fused_op.row_words(shape, owner.max_context)
        slot_words = fused_op.words_a_slot(shape, self.shard, gather=gather, **bounds)
        if exchange is None:
            words = torch.zeros(slot_words, dtype=torch.int64, device=device)
            peers = torch.tensor([words.data_ptr()], device=device)
        else:
            alone = 0 if threshold is None else fused_op.owned_words(shape, self.shard, **bounds)  # of calls on TP's path
            words, peers, self._mapped = exchange.allocate(self.shard, device, 2 * slot_words + alone)
        rows = self.shard.local_heads * owner.max_tokens
        parts = torch.zeros(rows * width // fused_op.SEGMENT * 2 * candidates_op.kept(shape.topk), dtype=torch.int64, device=device)
        self.phases = (fused_op.ONE_LAUNCH,) if owner.form == "one_launch" else (fused_op.PUSH, fused_op.CHOOSE)
        counters = torch.zeros(2, self._resident(), dtype=torch.int64, device=device)
        owner._buffers += [words, parts, counters]
        self.memory = fused_op.Memory(words, peers, parts, counters, owner._state, width, slot_words, owner.max_tokens)

    def _resident(self) -> int:
        """Programs of the grid: those that the device is sure to hold at once, by registers and shared memory."""
        if self.owner.device.type != "cuda":
            return 1  # interpreted programs run one after another: one pushes everything before it waits
        units = _compute_units(self.owner.device)
        owner = self.owner
        bounds = (owner.max_requests, owner.max_query_len, owner.cache_dtype)
        first = self.phases[0]
        built = fused_op.heaviest(owner.shape, self.shard, *bounds, self.exchange, self.gather, self.threshold is not None, first)
        fit = compiled.resident_programs(built, self.owner.device)
        if fit < 1:
            raise RuntimeError(f"form={self.owner.form!r}: no program of this kernel fits a compute unit of {self.owner.device}")
        return units * min(tile.setting(tile.cache_format(owner.cache_dtype)).programs_per_unit, fit)

    def launch(self, phase: int, q, cache, block_table, seq_lens, query_len: int, out: torch.Tensor, emit: Emission | None = None) -> None:
        built = fused_op.fused(
            q, cache, block_table, seq_lens, shape=self.owner.shape, shard=self.shard, query_len=query_len, max_context=self.owner.max_context,
            memory=self.memory, out=out, phase=phase, spin_limit=self.spin_limit, exchange=self.exchange, gather=self.gather,
            threshold=self.threshold, emit=emit,
        )  # fmt: skip
        warm = self.owner._warm and (emit is None or emit.table.page_size in self.owner._warm_page_sizes)
        # Only programs of one launch that wait for each other must all be resident.
        if not warm and phase == fused_op.ONE_LAUNCH and self.owner.device.type == "cuda":
            fit = compiled.resident_programs(built, self.owner.device) * _compute_units(self.owner.device)
            if fit < self.memory.counters.shape[1]:
                raise RuntimeError(f"{fit} programs of this kernel are resident at once, the grid has {self.memory.counters.shape[1]}: they could wait for ever")

    def __call__(self, q, cache, block_table, seq_lens, query_len: int, out: torch.Tensor, emit: Emission | None) -> None:
        for phase in self.phases:
            self.launch(phase, q, cache, block_table, seq_lens, query_len, out, emit)


def _require_shard(shape: IndexerShape, shard: Shard) -> None:
    if not isinstance(shape, IndexerShape):
        raise TypeError(f"shape={shape!r}: must be an IndexerShape")
    if not isinstance(shard, Shard) or shard.heads != shape.heads:
        raise ValueError(f"shard={shard!r}: must be a Shard of shape.heads={shape.heads} heads")


def _compute_units(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count
