"""The serving engines' own decode kernels as arms, imported under the engines' names when they can be, never copied.

The kernels are the engines'; buffers, gathers and the order of the calls are this module's, and `label` says so. vLLM's
ids come highest score first and its ties go to the higher id (CP) or to nobody in particular (TP); SGLang's come
ascending with ties to the lower id. `same_up_to_ties` compares them with the reference.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from m3cp import keys, reference
from m3cp.exchange import WAIT_ERROR
from m3cp.shapes import IndexerShape, Point, require
from m3cp.shard import Shard

MODULES = {
    "vllm_tp": ("vllm.models.minimax_m3.common.ops.index_topk",),
    "vllm_cp": (
        "vllm.models.minimax_m3.amd.ops.indexer_context_parallel",
        "vllm.models.minimax_m3.amd.ops.indexer_cp_exchange",
    ),
    "sglang_cp": ("sglang.kernels.ops.attention.minimax_sparse.decode.indexer_cp",),
}
DTYPES = {"vllm_tp": ("bf16", "fp8_e4m3fn"), "vllm_cp": ("bf16",), "sglang_cp": ("bf16", "fp8_e4m3fn")}
# Blocks that a packed key of the engine holds: 16 bits of id, vLLM's from 1 on.
MOST_BLOCKS = {"vllm_tp": 2**24, "vllm_cp": 0xFFFE, "sglang_cp": 16_384}


@dataclass(frozen=True)
class Setting:
    """Launch settings in place of an engine's own, as far as its functions let them be changed from outside.

    Args:
        name: in words.
        constants: values for constants of the engine's modules.
        launches: options for launches of its kernels, by kernel.
    """

    name: str
    constants: Mapping[str, int] = field(default_factory=dict)
    launches: Mapping[str, Mapping[str, int]] = field(default_factory=dict)


OWN = Setting("the engine's own")
# What the engines' best is looked for in. vLLM TP: warps, stages and chunks of the score kernel; its top-k tile is
# tuned by vLLM itself, its top-k chunks and dependent launch are fixed inside its functions. vLLM CP: blocks a program
# walks, warps and stages of the score kernel, warps and tile of the two top-k kernels.
_TP_SCORE, _CP_SCORE = "_decode_index_score_kernel", "_context_score"
SETTINGS: dict[str, tuple[Setting, ...]] = {
    "vllm_tp": (
        OWN,
        Setting("score with 2 stages", launches={_TP_SCORE: {"num_stages": 2}}),
        Setting("score with 8 warps", launches={_TP_SCORE: {"num_warps": 8}}),
        Setting("score in 64 chunks", launches={_TP_SCORE: {"num_kv_chunks": 64}}),
        Setting("score in 32 chunks, 4 stages", launches={_TP_SCORE: {"num_kv_chunks": 32, "num_stages": 4}}),
        Setting("score in 16 chunks", launches={_TP_SCORE: {"num_kv_chunks": 16}}),
    ),
    "vllm_cp": (
        OWN,
        Setting("top-k with 4 warps", {"DECODE_TOPK_NUM_WARPS": 4}),
        Setting("1 block a program, top-k with 4 warps", {"DECODE_SCORE_MIN_BLOCKS": 1, "DECODE_TOPK_NUM_WARPS": 4}),
        Setting("8 blocks a program, top-k with 4 warps", {"DECODE_SCORE_MIN_BLOCKS": 8, "DECODE_TOPK_NUM_WARPS": 4}),
        Setting("score with 2 stages, top-k with 4 warps", {"DECODE_TOPK_NUM_WARPS": 4}, {_CP_SCORE: {"num_stages": 2}}),
        Setting("score with 8 warps, top-k with 4 warps", {"DECODE_TOPK_NUM_WARPS": 4}, {_CP_SCORE: {"num_warps": 8}}),
        Setting("top-k tile of 256, 4 warps", {"DECODE_TOPK_TILE": 256, "DECODE_TOPK_NUM_WARPS": 4}),
    ),
    "sglang_cp": (OWN,),  # every launch setting is written into its functions
}  # fmt: skip


@functools.cache
def missing(arm: str) -> str | None:
    """Which import of the arm's kernels fails here, and how; None when all succeed."""
    for name in MODULES[arm]:
        try:
            importlib.import_module(name)
        except Exception as error:  # an engine that is half there raises all kinds
            words = re.sub(r"\S*/\S*", "<path>", " ".join(str(error).split()))[:200]  # rows hold no machine's paths
            return f"import {name}: {type(error).__name__}: {words}"
    return None


def refusal(point: Point) -> str | None:
    """Why the engine's kernels can't run a Point on any machine, in words; None when they can."""
    arm, shape = point.arm, point.shape
    if arm not in MODULES:
        return f"arm {arm!r}: no kernels of that name are imported, only published figures carry it"
    blocks = shape.blocks(point.max_context)
    forced = shape.init_blocks + shape.local_blocks
    needs = [
        (shape.block_size == shape.head_dim == 128, f"block_size 128 and head_dim 128, not {shape.block_size} and {shape.head_dim}"),
        (point.dtype in DTYPES[arm], f"a cache of {' or '.join(DTYPES[arm])}, not {point.dtype}"),
        (forced <= shape.topk, f"at most topk={shape.topk} forced blocks, not {forced}"),
        (blocks <= MOST_BLOCKS[arm], f"max_context of at most {MOST_BLOCKS[arm]} blocks, not {blocks}"),
    ]  # fmt: skip
    if arm == "sglang_cp":
        needs += [
            (point.world == shape.heads, f"as many ranks as heads: they take the world size for the head count, and world={point.world} with {shape.heads} heads"),
            (shape.topk == 16, f"topk 16, not {shape.topk}"),
            (point.query_len == 1, f"query_len 1 (their rows carry lengths of their own), not {point.query_len}"),
        ]  # fmt: skip
    return next((f"arm {arm!r}: its kernels need {what}" for met, what in needs if not met), None)


def label(point: Point) -> str:
    """What an engine's row was made of, such as "vLLM kernels, NCCL, our glue"."""
    engine = {"vllm": "vLLM", "sglang": "SGLang"}[point.arm.split("_")[0]]
    if point.exchange is None:
        return f"{engine} kernels, our buffers"
    collective = "RCCL" if torch.version.hip else "NCCL"
    return f"{engine} kernels, {collective if point.exchange == 'collective' else 'our symmetric gather'}, our glue"


def sources(arm: str) -> dict[str, str]:
    """The first 12 hex digits of each kernel file's SHA-256, by module: which release was measured."""
    files = {name: importlib.import_module(name).__file__ for name in MODULES[arm]}
    return {name: hashlib.sha256(Path(file).read_bytes()).hexdigest()[:12] for name, file in files.items()}


def make(point: Point, shard: Shard, *, device: torch.device | str, cache_dtype: torch.dtype, exchange=None) -> _Engine:
    """The decode object of an engine's Point for one rank, its kernels compiled; `exchange` for CP arms.

    Raises:
        ValueError: what `refusal` says.
        ImportError: the kernels are not importable.
    """
    problem = refusal(point)
    if problem:
        raise ValueError(problem)
    bounds = dict(
        max_requests=point.batch + point.rows_padded, max_query_len=point.query_len, max_context=point.max_context,
        device=device, cache_dtype=cache_dtype,
    )  # fmt: skip
    if point.arm == "vllm_tp":
        return VllmTP(point.shape, shard, **bounds)
    return {"vllm_cp": VllmCP, "sglang_cp": SglangCP}[point.arm](point.shape, shard, exchange=exchange, **bounds)


class _Engine:
    """What the arms share: bounds, the engine's modules, checks of the arguments, the error word of a transport.

    Args:
        shape, shard, max_requests, max_query_len, max_context, device, cache_dtype: as `m3cp.decode.TPDecode` takes
            them. The engines' queries are bf16; fp16 with an fp16 cache is for the interpreter, which multiplies no bf16.
    """

    path: str
    stages: list[str]
    launches: int
    collectives = 0
    exchange = None

    def __init__(self, shape: IndexerShape, shard: Shard, *, max_requests: int, max_query_len: int, max_context: int, device, cache_dtype):
        self.shape, self.shard, self.device, self.cache_dtype = shape, shard, torch.device(device), cache_dtype
        self.max_requests, self.max_query_len, self.max_context = max_requests, max_query_len, max_context
        self.max_tokens = max_requests * max_query_len
        self.query_dtype = torch.float16 if cache_dtype == torch.float16 else torch.bfloat16
        self.modules = tuple(importlib.import_module(name) for name in MODULES[self.path])
        self.settings = SETTINGS[self.path]
        self._state = torch.zeros(4, dtype=torch.int64, device=self.device)

    def warmup(self) -> None:
        """One whole call at the bounds, every request as long as the bound allows; ranks that exchange meet here."""
        self(*self._stand_in(), query_len=self.max_query_len)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.check()

    def check(self) -> None:
        """Raise what a transport found; synchronises.

        Raises:
            RuntimeError: a wait for a rank expired.
        """
        launch, kind, rank, at = self._state.tolist()
        if kind == WAIT_ERROR:
            raise RuntimeError(f"a wait for rank {rank} expired in launch {at} of {launch}: that rank is gone or late")

    def _stand_in(self) -> tuple[torch.Tensor, ...]:
        """Arguments of a call at the bounds, over a cache of one page."""
        made = dict(device=self.device)
        q = torch.zeros(self.max_tokens, self.shard.local_heads, self.shape.head_dim, dtype=self.query_dtype, **made)
        cache = torch.zeros(1, self.shape.block_size, self.shape.head_dim, dtype=self.cache_dtype, **made)
        table = torch.zeros(self.max_requests, self.shape.blocks(self.max_context), dtype=torch.int32, **made)
        return q, cache, table, torch.full((self.max_requests,), self.max_context, dtype=torch.int32, **made)

    def _checked(self, q: torch.Tensor, seq_lens: torch.Tensor, query_len: int, out: torch.Tensor | None) -> torch.Tensor:
        """The tensor to write ids to.

        Raises:
            ValueError: queries or `out` of another shape, or more rows than the buffers hold.
        """
        tokens, local = seq_lens.shape[0] * query_len, self.shard.local_heads
        size, fits = (local, tokens, self.shape.topk), (tokens, local, self.shape.head_dim)
        require("q.shape", tuple(q.shape), tuple(q.shape) == fits, f"[tokens, local heads, head_dim] = {list(fits)}")
        require("q.is_contiguous()", q.is_contiguous(), q.is_contiguous(), "True")
        require("tokens", tokens, tokens <= self.max_tokens, f"at most max_requests * max_query_len = {self.max_tokens}")
        if out is None:
            return torch.empty(size, dtype=torch.int32, device=self.device)
        require("out.shape", tuple(out.shape), tuple(out.shape) == size, f"[local heads, tokens, topk] = {list(size)}")
        return out


class VllmTP(_Engine):
    """vLLM's decode scoring and split top-k over this rank's own heads, with the dependent launch that it uses."""

    path = "vllm_tp"
    stages = ["score", "partial_topk", "merge_topk"]
    launches = 3

    def __init__(self, shape: IndexerShape, shard: Shard, **bounds: Any):
        super().__init__(shape, shard, **bounds)
        width = -(-shape.blocks(self.max_context) // 16) * 16  # strides that vLLM's own buffers have
        self._scores = torch.empty(shard.local_heads, self.max_tokens, width, dtype=torch.float32, device=self.device)
        self.compile()

    def compile(self, setting: Setting = OWN) -> None:
        """Compile, and let vLLM's autotuner choose its top-k tile at its first call of a process, on rows at the bound."""
        self(*self._stand_in(), query_len=self.max_query_len, setting=setting)

    @property
    def tuned(self) -> str:
        """What vLLM's autotuner chose for its top-k."""
        return str(getattr(self.modules[0]._topk_index_partial_kernel.fn, "best_config", None))

    def __call__(self, q, cache, block_table, seq_lens, *, query_len: int = 1, out: torch.Tensor | None = None, setting: Setting = OWN) -> torch.Tensor:
        """As `m3cp.decode.TPDecode`, ids in vLLM's order: forced blocks first, then by score, then -1."""
        out = self._checked(q, seq_lens, query_len, out)
        with using(self.modules, setting):
            self.modules[0].minimax_m3_index_decode(
                q, cache, block_table, seq_lens, self.max_context, self.shape.topk, self.shape.init_blocks, self.shape.local_blocks,
                self.shard.local_heads, query_len, self.max_query_len, out=out, score_out=self._scores[:, : out.shape[1]],
            )  # fmt: skip
        return out


class _EngineCP(_Engine):
    """An engine's CP: gather queries, score and choose on the shard, gather keys, merge; gathers from an exchange.

    Args:
        exchange: a transport from `m3cp.exchange`; None for ranks that are run in turn (`local_keys`, then `merge`).
    """

    def __init__(self, shape: IndexerShape, shard: Shard, *, exchange=None, **bounds: Any):
        super().__init__(shape, shard, **bounds)
        self.exchange = exchange
        row = shard.local_heads * shape.head_dim
        buffers = dict(device=self.device)
        self._gathered_queries = torch.empty(shard.world * self.max_tokens * row, dtype=self.query_dtype, **buffers)
        self._keys = torch.empty(shape.heads * self.max_tokens * shape.topk, dtype=torch.int64, **buffers)
        self._gathered_keys = torch.empty(shard.world * self._keys.numel(), dtype=torch.int64, **buffers)
        if exchange is not None:
            symmetric = exchange.name == "symmetric"  # its gathers are kernels
            self.collectives, self.launches = (0, self.launches + 2) if symmetric else (2, self.launches)
            payload_words = self.max_tokens * max(2 * shape.heads * shape.topk, row // 2)
            self._gather = exchange.attach(shard, self.device, payload_words, self._state)

    def compile(self, setting: Setting = OWN) -> None:
        """Compile every kernel without a peer, so that no rank waits in an exchange for one that compiles."""
        q, cache, table, lens = self._stand_in()
        world = self.shard.world
        ids = torch.empty(self.shard.local_heads, self.max_tokens, self.shape.topk, dtype=torch.int32, device=self.device)
        with using(self.modules, setting):
            found = self.local_keys(self.ordered(q.expand(world, *q.shape).contiguous()), cache, table, lens, self.max_query_len)
            self.merge(found.expand(world, *found.shape).contiguous(), lens, self.max_query_len, ids)

    def __call__(self, q, cache, block_table, seq_lens, *, query_len: int = 1, out: torch.Tensor | None = None, setting: Setting = OWN) -> torch.Tensor:
        """As `m3cp.decode.CPDecode` with gathered queries; the order of ids is the engine's."""
        out = self._checked(q, seq_lens, query_len, out)
        self.exchange.in_flight.begin(self.device)
        everyone = self._gathered_queries[: self.shard.world * q.numel()].view(self.shard.world, *q.shape)
        self._gather(everyone, q)
        with using(self.modules, setting):
            found = self.local_keys(self.ordered(everyone), cache, block_table, seq_lens, query_len)
            gathered = self._gathered_keys[: self.shard.world * found.numel()].view(self.shard.world, *found.shape)
            self._gather(gathered, found)
            self.merge(gathered, seq_lens, query_len, out)
        self.exchange.in_flight.end(self.device)
        return out


class VllmCP(_EngineCP):
    """vLLM's Triton CP kernels in the order in which vLLM calls them.

    vLLM also copies its local queries before it gathers them; here they are contiguous and that copy is left out.
    """

    path = "vllm_cp"
    stages = ["gather_queries", "order_queries", "score", "candidates", "gather_keys", "merge"]
    launches = 4

    def __init__(self, shape: IndexerShape, shard: Shard, **bounds: Any):
        super().__init__(shape, shard, **bounds)
        width = -(-shape.blocks(self.max_context) // shard.world)
        self._scores = torch.empty(shape.heads, self.max_tokens, width, dtype=torch.float32, device=self.device)
        self._queries = torch.empty(self.max_tokens * shape.heads * shape.head_dim, dtype=self.query_dtype, device=self.device)
        self.compile()

    def ordered(self, everyone: torch.Tensor) -> torch.Tensor:
        """Gathered queries `[world, tokens, local heads, D]` as `[tokens, heads, D]`, one of each head's replicas."""
        _, tokens, local, dim = everyone.shape
        q = self._queries[: tokens * self.shape.heads * dim].view(tokens, self.shape.heads // local, local, dim)
        return q.copy_(everyone[:: self.shard.replicas].permute(1, 0, 2, 3)).view(tokens, self.shape.heads, dim)

    def local_keys(self, q, cache, block_table, seq_lens, query_len: int) -> torch.Tensor:
        """This shard's packed candidates of all heads, `[heads, tokens, topk]` int64; `q` is `[tokens, heads, D]`."""
        shape, shard, tokens = self.shape, self.shard, q.shape[0]
        scoring, exchanging = self.modules
        scores = scoring.indexer_context_scores(
            q, cache, block_table, seq_lens, self.max_context, shard.rank, shard.world, query_len, shape.head_dim**-0.5, out=self._scores
        )  # fmt: skip
        return exchanging.local_topk_keys(
            scores, seq_lens, topk=shape.topk, rank=shard.rank, world=shard.world, query_len=query_len,
            global_blocks=shape.blocks(self.max_context), init_blocks=shape.init_blocks, local_blocks=shape.local_blocks,
            out=self._keys[: shape.heads * tokens * shape.topk].view(shape.heads, tokens, shape.topk),
        )  # fmt: skip

    def merge(self, gathered: torch.Tensor, seq_lens: torch.Tensor, query_len: int, out: torch.Tensor) -> None:
        """The choice of the owned heads from `[world, heads, tokens, topk]` keys."""
        owned, shape = self.shard.owned_heads, self.shape
        forced = dict(init_blocks=shape.init_blocks, local_blocks=shape.local_blocks)
        self.modules[1].merge_topk_keys(gathered[:, owned.start : owned.stop], out, seq_lens, query_len=query_len, **forced)


class SglangCP(_EngineCP):
    """SGLang's indexer CP kernels: one head a rank, `query_len` 1, keys addressed token by token.

    A block table becomes SGLang's table of token slots at its first eager call and is kept, as the engine keeps its own.
    """

    path = "sglang_cp"
    stages = ["gather_queries", "score_tokens", "candidates", "gather_keys", "merge"]
    launches = 3

    def __init__(self, shape: IndexerShape, shard: Shard, **bounds: Any):
        super().__init__(shape, shard, **bounds)
        self._slots: dict[tuple, tuple[torch.Tensor, torch.Tensor]] = {}
        self._requests = torch.arange(self.max_requests, dtype=torch.int32, device=self.device)
        self.compile()

    def ordered(self, everyone: torch.Tensor) -> torch.Tensor:
        """Gathered queries `[world, tokens, 1, D]` as SGLang takes them, `[heads, tokens, D]`: no copy."""
        return everyone[:, :, 0]

    def local_keys(self, q, cache, block_table, seq_lens, query_len: int) -> torch.Tensor:
        """This shard's packed candidates of all heads, `[heads, tokens, topk]` int64; `q` is `[heads, tokens, D]`."""
        shape, rank, (engine,) = self.shape, self.shard.rank, self.modules
        scores = engine.score_local_blocks(
            q, cache.view(-1, 1, shape.head_dim), self._token_slots(block_table), self._requests[: seq_lens.shape[0]], seq_lens,
            self.max_context, rank, shape.init_blocks, shape.local_blocks, shape.head_dim**-0.5, 1.0,
        )  # fmt: skip
        return engine.select_local_candidates(scores, seq_lens, rank, self.max_context, shape.topk)

    def merge(self, gathered: torch.Tensor, seq_lens: torch.Tensor, query_len: int, out: torch.Tensor) -> None:
        """The choice of this rank's head from `[world, heads, tokens, topk]` keys.

        SGLang's own launcher allocates its output; its kernel is launched here so that the ids land in `out`.
        """
        batch = seq_lens.shape[0]
        sizes = dict(BATCH=batch, WORLD=self.shard.world, HEAD=self.shard.owned_heads.start, TOPK=self.shape.topk)
        self.modules[0]._merge_candidates[(batch,)](gathered, out, num_warps=4, **sizes)

    def _token_slots(self, block_table: torch.Tensor) -> torch.Tensor:
        """The slot of each token, `[requests, width * block_size]` int32, of a table seen before or seen now, eagerly.

        Raises:
            RuntimeError: a new table while a stream is capturing.
        """
        key = (block_table.data_ptr(), *block_table.shape)
        if key not in self._slots:
            if self.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
                raise RuntimeError("capture with a block table that was not seen before: call once eagerly with it")
            within = torch.arange(self.shape.block_size, dtype=torch.int32, device=self.device)
            slots = (block_table[:, :, None] * self.shape.block_size + within).flatten(1).contiguous()
            self._slots[key] = (slots, block_table)  # the table is held so that its address stays its own
        return self._slots[key][0]


class _Launched:
    """A kernel of an engine, launched with some options of ours."""

    def __init__(self, kernel, options: Mapping[str, int]):
        self._kernel, self._options = kernel, options

    def __getitem__(self, grid):
        if "num_kv_chunks" in self._options:  # vLLM's split: the second dimension of the grid is its number of chunks
            grid = (grid[0], self._options["num_kv_chunks"])
        return lambda *args, **named: self._kernel[grid](*args, **{**named, **self._options})


@contextlib.contextmanager
def using(modules: tuple, setting: Setting) -> Iterator[None]:
    """The engine's modules with a setting's constants and launches, for the length of a call.

    Raises:
        AttributeError: no module has such a name: another release of the engine.
    """
    before = []
    try:
        for name in (*setting.constants, *setting.launches):
            module = next((m for m in modules if hasattr(m, name)), None)
            if module is None:
                raise AttributeError(f"setting {setting.name!r}: {name} is in none of {', '.join(m.__name__ for m in modules)}")
            value = getattr(module, name)
            before.append((module, name, value))
            setattr(module, name, setting.constants[name] if name in setting.constants else _Launched(value, setting.launches[name]))
        yield
    finally:
        for module, name, value in before:
            setattr(module, name, value)


def ascending(ids: torch.Tensor) -> torch.Tensor:
    """Ids of each row in the reference's order: ascending, then -1."""
    last = torch.iinfo(torch.int32).max
    ids = torch.where(ids < 0, last, ids).sort(-1).values
    return torch.where(ids == last, -1, ids)


def same_up_to_ties(
    got: torch.Tensor, expected: torch.Tensor, q, cache, block_table, seq_lens, *, shape: IndexerShape, query_len: int, heads: range
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Which rows of an engine's choice are right, and which of those differ from the reference by a tie alone.

    A row that differs is right when it has as many distinct visible blocks, the same forced ones, and the same scores.

    Args:
        got: `[local heads, tokens, topk]` int32 in any order; `expected` likewise, the reference's.
        q: `[tokens, all heads, D]`; the other tensors and `query_len` as of the call. `heads`: those of `got`.

    Returns:
        (right, tied), both `[local heads, tokens]` bool.
    """
    got = ascending(got)
    differ = (got != expected).any(-1)
    tied = torch.zeros_like(differ)
    requests = differ.unflatten(1, (-1, query_len)).any(2).any(0).nonzero().flatten()
    if not requests.numel():
        return ~differ, tied
    rows = (requests[:, None] * query_len + torch.arange(query_len, device=q.device)).flatten()
    lens, width = seq_lens[requests], block_table.shape[1]
    bounds = dict(shape=shape, shard=Shard(0, 1, shape.heads), query_len=query_len, max_context=width * shape.block_size)
    scores = reference.score(q[rows], cache, block_table[requests], lens, **bounds)[:, heads.start : heads.stop]
    n = reference.row_lengths(lens, query_len, bounds["max_context"])
    visible = ((n + shape.block_size - 1) // shape.block_size)[:, None, None]
    blocks = torch.arange(width, device=q.device)[None, None]
    rank = keys.encode(keys.order_code(scores), blocks, visible, shape.init_blocks, shape.local_blocks) >> keys.ID_BITS
    rank = rank.transpose(0, 1)  # [local heads, rows, blocks]: class and score of each block, 0 where not visible

    def ranks(ids: torch.Tensor) -> torch.Tensor:
        known = (ids >= 0) & (ids < width)
        found = rank.gather(2, torch.where(known, ids, 0).to(torch.int64))
        return torch.where(known, found, 0).sort(-1).values

    mine, theirs = got[:, rows], expected[:, rows]
    distinct = ((mine[..., 1:] != mine[..., :-1]) | (mine[..., 1:] < 0)).all(-1)
    alike = ((mine >= 0) == (theirs >= 0)).all(-1) & (ranks(mine) == ranks(theirs)).all(-1)
    tied[:, rows] = distinct & alike & differ[:, rows]
    return ~differ | tied, tied
