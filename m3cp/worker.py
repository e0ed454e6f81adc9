"""One rank of a sweep: for each group of Points build, check, time; rank 0 appends the rows.

`m3cp.sweep` starts `python -m m3cp.worker JOB.json` once a rank. A group holds arms over the same inputs: they are
timed in alternating rounds, between two probes. Ranks agree over a store after every step, so an error on one of them
fails the Point on all; where the others can't answer, because they wait inside a collective, the rank that failed
says so and leaves, and the launcher ends the rest.
"""

from __future__ import annotations

import dataclasses
import gc
import itertools
import json
import os
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from m3cp import engine_kernels, inputs, layer_arms, records, reference, timing, traffic
from m3cp.decode import CPDecode, CPLocal, TPDecode
from m3cp.exchange import CollectiveExchange, SymmetricExchange
from m3cp.kernels import page_read as page_read_op
from m3cp.shapes import LAYER_ARMS, IndexerShape, Point
from m3cp.shard import Shard
from m3cp.testing import overlap_bf16

GIB = 1 << 30
# Bytes a second of a GPU's memory in units of 1e9, from the vendors' data sheets; the longest name that fits is taken.
DATASHEET_GBS = {
    "H200": 4800,
    "H100": 3350,
    "H20": 4000,
    "A100": 2039,
    "MI300X": 5300,
    "MI325X": 6000,
    "MI350X": 8000,
    "MI355X": 8000,
}
POOL_BYTES = {"cuda": 32 * GIB, "cpu": GIB // 2}  # so that address translation is cold too, where memory allows
READS_A_SAMPLE = {"cuda": 8, "cpu": 1}  # of the probe: a millisecond on a GPU, so that launching it does not show
PROBE_BYTES = {"cuda": GIB // 2, "cpu": 1 << 25}
CHECKED_BLOCKS = {"cuda": 600_000, "cpu": 4_000}  # the reference checks caches until it has scored so many blocks
EAGER_BLOCKS = 4_000  # of a rotation, where each call is timed by itself and nothing else asks for more calls
DRIFT = 0.03
SYNC_S = 1.0  # between two times that rows are brought to the disk
JOIN_S = 300.0  # for all ranks to meet
PEER_PATIENCE_S = 600.0  # for ranks that may be compiling
FAILED_PATIENCE_S = 15.0  # for a rank that failed: the others either come at once or are stuck in a collective


class Failed(Exception):
    """A step failed on some rank; raised on all of them, with the same message."""


class Lost(Exception):
    """The ranks can't agree any more; the message says why."""


class Peers:
    """The ranks' control channel: a store on the host, never a collective, so that it works while one is stuck."""

    def __init__(self, rank: int, world: int, scratch: Path):
        self.rank, self.world, self._scratch = rank, world, scratch
        address = scratch / "store"
        if rank == 0:
            self.store = dist.TCPStore("127.0.0.1", 0, world, is_master=True, wait_for_workers=False)
            address.with_suffix(".new").write_text(str(self.store.port))
            address.with_suffix(".new").rename(address)
        else:
            deadline = time.monotonic() + PEER_PATIENCE_S
            while not address.exists():
                if time.monotonic() > deadline:
                    raise Lost("rank 0 opened no store")
                time.sleep(0.02)
            self.store = dist.TCPStore("127.0.0.1", int(address.read_text()), world, is_master=False)
        self._step = 0

    def exchange(self, value: Any, patience_s: float = PEER_PATIENCE_S) -> list[Any]:
        """Every rank's `value` (plain JSON), by rank.

        Raises:
            Lost: a rank did not answer in time.
        """
        self._step += 1
        self.beat()
        if self.world == 1:
            return [json.loads(json.dumps(value))]
        self.store.set(f"{self._step}/{self.rank}", json.dumps(value))
        answers = []
        for rank in range(self.world):
            try:
                self.store.wait([f"{self._step}/{rank}"], timedelta(seconds=patience_s))
                answers.append(json.loads(self.store.get(f"{self._step}/{rank}")))
            except Exception as error:  # torch raises several kinds
                raise Lost(f"rank {rank} did not answer within {patience_s:.0f} s") from error
        return answers

    def together(self, action: Callable[[], Any]) -> Any:
        """Run `action` on every rank and return its value.

        Raises:
            Failed: on all ranks, when it raised on any; the message names the rank.
            Lost: the ranks can't go on together.
        """
        value, problem, dead = None, "", False
        try:
            value = action()
        except Exception as error:
            problem = f"{type(error).__name__}: {' '.join(str(error).split())[:600] or 'no message'}"
            dead = _device_is_dead()
        try:
            answers = self.exchange([problem, dead], FAILED_PATIENCE_S if problem else PEER_PATIENCE_S)
        except Lost as lost:
            if problem:
                raise Lost(problem) from lost
            raise
        found = [f"rank {r}: {text}" for r, (text, _) in enumerate(answers) if text]
        if any(dead for _, dead in answers):
            raise Lost(found[0])
        if found:
            raise Failed(found[0])
        return value

    def beat(self) -> None:
        """Tell the launcher that this job is alive."""
        if self.rank == 0:
            (self._scratch / "beat").touch()

    def leave(self) -> None:
        """Part in order: rank 0, which holds the store, goes last."""
        self.exchange("done")
        if self.world > 1:
            if self.rank:
                self.store.set(f"left/{self.rank}", "1")
            else:
                self.store.wait([f"left/{r}" for r in range(1, self.world)], timedelta(seconds=30))


def _device_is_dead() -> bool:
    """Whether a device error (an illegal access, say) has made every later call fail."""
    if not torch.cuda.is_initialized():
        return False
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False


@dataclass
class Place:
    """Where this rank measures: its device, its peers, the caches that a cold read must outrun."""

    peers: Peers
    device: torch.device
    l2_bytes: int | None
    llc_bytes: int
    peak_gbs: float | None
    _evict_buffer: torch.Tensor | None = None
    _align_words: list[torch.Tensor] = field(default_factory=list)

    @property
    def on_gpu(self) -> bool:
        """Whether kernels run on a device with queues and graphs."""
        return self.device.type == "cuda"

    def align(self) -> None:
        """Let all ranks pass together: a small collective, on a GPU enqueued behind what the stream holds."""
        if self.peers.world == 1:
            return
        if not self._align_words:
            self._align_words = [
                torch.zeros(self.peers.world, 1, dtype=torch.int32, device=self.device),
                torch.zeros(1, dtype=torch.int32, device=self.device),
            ]
            self._aligner = CollectiveExchange()
        self._aligner.gather(*self._align_words)

    def evict(self) -> None:
        """Read a buffer larger than twice the last-level cache."""
        if self._evict_buffer is None:
            page = IndexerShape().key_bytes("bf16")
            pages = (timing.COLD_OVER_LLC * self.llc_bytes) // page + 64
            self._evict_buffer = inputs.make_pool(IndexerShape(), torch.bfloat16, self.device, pages=pages, seed=99)
            self._evict_pages = torch.arange(pages, dtype=torch.int32, device=self.device)
            self._evict_reader = page_read_op.readers(self.device)[-1]
            self._evict_out = torch.empty(
                page_read_op.partials(self.device, self._evict_reader), dtype=torch.int32, device=self.device
            )
        page_read_op.page_read(self._evict_buffer, self._evict_pages, self._evict_out, reader=self._evict_reader)

    @property
    def evict_bytes(self) -> int:
        """Bytes that `evict` reads."""
        return self._evict_buffer.numel() * self._evict_buffer.element_size() if self._evict_buffer is not None else 0

    def hold(self) -> None:
        """Keep the device busy for some hundred microseconds, so that what follows is queued before it runs.

        One kernel that only waits: reads launched one by one end before the next one is there.
        """
        torch.cuda._sleep(timing.HOLD_CYCLES)

    def samples_us(self, call: Callable[[], Any], repeats: int) -> list[float]:
        """Microseconds of single calls on this rank alone."""
        if not self.on_gpu:
            once = timing.timed_calls([call], align=lambda: None)
        else:
            timer = timing.DeviceTimer()
            once = timing.timed_replays(call, calls=1, replays=1, align=lambda: None, hold=self.hold, timer=timer)
        return timing.measure({"call": once}, repeats)["call"]

    def quick_us(self, call: Callable[[], Any], repeats: int) -> float:
        """Median of `samples_us`: for choices and probes, not for rows."""
        return timing.median(self.samples_us(call, repeats))


def join(job: dict[str, Any], peers: Peers, local_rank: int) -> Place:
    """Join the other ranks of a job, of this machine or of several nodes: device, process group.

    Args:
        job: says of this rank's machine what `sweep.job_facts` does.
        peers: the ranks' control channel; the process group meets in its store.
        local_rank: number of this rank's device on its machine.
    """
    if job["device"] == "cuda":
        device, here = torch.device("cuda", local_rank), job["devices"][local_rank]
        torch.cuda.set_device(device)
        name = max((n for n in DATASHEET_GBS if n in here["name"]), key=len, default=None)
        place = Place(peers, device, here["l2_bytes"] or None, here["last_level_bytes"], DATASHEET_GBS.get(name))
        group = {"backend": "nccl", "device_id": device}
    else:
        torch.set_num_threads(1)
        place = Place(peers, torch.device("cpu"), None, job["cpu_last_level_bytes"], None)
        group = {"backend": "gloo"}
    place.llc_bytes = place.llc_bytes or 32 << 20  # where the system doesn't say
    if peers.world > 1:
        store = dist.PrefixStore("group", peers.store)
        dist.init_process_group(**group, store=store, rank=peers.rank, world_size=peers.world, timeout=timedelta(seconds=JOIN_S))
    place.align()
    return place


def run(job: dict[str, Any], body: Callable[[Place, dict[str, Any]], None]) -> None:
    """Run a worker's body between `join` and an orderly leave; never returns.

    What ends a rank is left in the scratch folder for the launcher, named by rank.
    """
    rank, scratch = int(os.environ["RANK"]), Path(job["scratch"])
    status = 1
    try:
        place = join(job, Peers(rank, int(os.environ["WORLD_SIZE"]), scratch), rank)
        body(place, job)
        gc.collect()
        place.peers.leave()
        status = 0
    except BaseException as error:
        lost_peer = isinstance(error, Lost) and "did not answer" in str(error)
        message = str(error) if isinstance(error, Lost) else f"{type(error).__name__}: {error}"
        (scratch / f"{'peer' if lost_peer else 'error'}.{rank}").write_text(message)
        if not lost_peer:
            print(f"m3cp: rank {rank}: {message}", file=sys.stderr, flush=True)
            if not isinstance(error, Lost):
                import traceback

                traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # a process group with captured collectives can hang in its destructor


def bandwidth(place: Place, pool: torch.Tensor) -> dict[str, float]:
    """Best rates of reading the pool's pages, of this run and the slowest rank, GB/s: `page_gbs`, `sequential_gbs`."""
    page_bytes = pool[0].numel() * pool.element_size()
    pages = min(pool.shape[0], max(2 * PROBE_BYTES[place.device.type], 3 * place.llc_bytes) // page_bytes)
    orders = {
        "page_gbs": torch.randperm(pool.shape[0], generator=torch.Generator().manual_seed(5))[:pages]
        .to(torch.int32)
        .to(place.device),
        "sequential_gbs": torch.arange(pages, dtype=torch.int32, device=place.device),
    }
    found = {}
    for name, order in orders.items():
        times = [place.quick_us(read, 5) / READS_A_SAMPLE[place.device.type] for read in _reads(place, pool, order)]
        slow = [max(t) for t in zip(*place.peers.exchange(times), strict=True)]
        found[name] = pages * page_bytes / (min(slow) * 1e3)
    return found


def _reads(place: Place, pool: torch.Tensor, order: torch.Tensor) -> list[Callable[[], Any]]:
    """The pages read `READS_A_SAMPLE` times by each reader, each run once already; on a GPU as one graph."""
    calls = []
    for reader in page_read_op.readers(place.device):
        out = torch.empty(page_read_op.partials(place.device, reader), dtype=torch.int32, device=place.device)
        calls.append(lambda reader=reader, out=out: page_read_op.page_read(pool, order, out, reader=reader))
        calls[-1]()
        if place.on_gpu:
            graph = timing.capture([calls[-1]] * READS_A_SAMPLE["cuda"])
            calls[-1] = graph.replay
            graph.replay()
    return calls


class Probe:
    """The page-read probe: the same random pages with the same reader, before and after a group."""

    def __init__(self, place: Place, pool: torch.Tensor):
        page_bytes = pool[0].numel() * pool.element_size()
        pages = max(1, min(pool.shape[0], PROBE_BYTES[place.device.type] // page_bytes))
        order = (
            torch.randperm(pool.shape[0], generator=torch.Generator().manual_seed(6))[:pages]
            .to(torch.int32)
            .to(place.device)
        )
        self._place, calls = place, _reads(place, pool, order)
        times = [max(t) for t in zip(*place.peers.exchange([place.quick_us(c, 3) for c in calls]), strict=True)]
        self._call = calls[times.index(min(times))]

    def us(self) -> float:
        """Microseconds of the probe now, on this rank."""
        return self._place.quick_us(self._call, 9) / READS_A_SAMPLE[self._place.device.type]


@dataclass
class Arm:
    """One Point made ready: checked, and able to run its calls.

    Args:
        calls: one rotation; as many as the group's plan has, but for the toy's and the projections'.
        path, stages, launches, collectives: of what runs.
        check: as a row has it.
        verify: makes that check of what the calls last wrote, and spoils it for the next time.
        rotation_us: host time of one rotation without graphs.
        best: an engine's arm at the fastest of its launch settings, where that is not the engine's own.
        footprint_bytes: distinct bytes of a rotation, where they are not those of the plan's caches.
        caches: what it rotates through, where that is not the plan's caches: copies of weights, of a model.
    """

    point: Point
    calls: list[Callable[[], Any]]
    path: str
    stages: list[str]
    check: dict[str, Any]
    verify: Callable[[], dict[str, Any]]
    launches: int | None = None
    collectives: int | None = None
    extra: dict[str, Any] = field(default_factory=dict)
    rotation_us: float = 0.0
    best: Arm | None = None
    footprint_bytes: int | None = None
    caches: int | None = None


class Expected:
    """The reference's answers for the caches that are checked, all heads."""

    def __init__(self, problem: inputs.Problem, plan: timing.CachePlan, limit: int):
        self.problem = problem
        blocks = int(
            ((problem.seq_lens.to(torch.int64) + problem.shape.block_size - 1) // problem.shape.block_size).sum()
        )
        count = min(plan.caches, max(2, limit // max(1, blocks)))
        self.caches = sorted({round(i * (plan.caches - 1) / max(1, count - 1)) for i in range(count)})
        self.ids = {
            c: reference.select_blocks(*self._step(c), shape=problem.shape, query_len=problem.query_len)
            for c in self.caches
        }

    def _step(self, cache: int):
        p = self.problem
        return p.q, p.cache, p.block_tables[cache], p.seq_lens

    def keys(self, cache: int, shard: Shard) -> torch.Tensor:
        """A shard's candidates of all heads, `[heads, tokens, topk]` int64."""
        p = self.problem
        bounds = dict(
            shape=p.shape,
            shard=shard,
            query_len=p.query_len,
            max_context=p.block_tables[0].shape[1] * p.shape.block_size,
        )
        return reference.candidates(reference.score(*self._step(cache), **bounds), p.seq_lens, **bounds)


def make_decode(point: Point, rank: int, device: torch.device):
    """The decode object of a Point's arm for one rank: ours, or one around an engine's kernels.

    Raises:
        ValueError: an arm, form or exchange that has no object here.
        ImportError: an engine's kernels that are not importable here.
    """
    shard = Shard(rank % point.world, point.world, point.shape.heads)
    exchange = {None: lambda: None, "collective": CollectiveExchange, "symmetric": SymmetricExchange}[point.exchange]()
    if point.arm not in ("tp", "cp", "cp_local"):
        dtype = inputs.TORCH_DTYPES[point.dtype]
        return engine_kernels.make(point, shard, device=device, cache_dtype=dtype, exchange=exchange)
    bounds = dict(
        max_requests=point.batch + point.rows_padded, max_query_len=point.query_len, max_context=point.max_context,
        device=device, cache_dtype=inputs.TORCH_DTYPES[point.dtype], form=point.form,
    )  # fmt: skip
    if point.arm == "tp":
        return TPDecode(point.shape, shard, **bounds)
    if point.arm == "cp_local":
        return CPLocal(point.shape, shard, **bounds)
    return CPDecode(
        point.shape, shard, exchange=exchange, queries=point.queries, threshold_blocks=point.threshold_blocks, **bounds
    )


def prepare_decode(
    place: Place, point: Point, problem: inputs.Problem, plan: timing.CachePlan, expected: Expected, x=None, setting=None
) -> Arm:
    """Warm up the arm's object and define its calls; `verify` compares whatever they last wrote.

    Args:
        x: what `make_decode` returns; None makes it.
        setting: launch settings of an engine's kernels, compiled already; None is its own.
    """
    x = x or make_decode(point, place.peers.rank, place.device)
    if setting is None:
        x.warmup()
    engine = point.arm in engine_kernels.MODULES
    options = {} if setting is None else {"setting": setting}
    shard, tokens = x.shard, problem.q.shape[0]
    own = point.arm.endswith("tp") or point.queries == "gathered"
    q = problem.local_q(shard) if own else problem.q
    outs = [
        torch.empty(shard.local_heads, tokens, point.shape.topk, dtype=torch.int32, device=place.device)
        for _ in range(plan.calls)
    ]
    owned = slice(shard.owned_heads.start, shard.owned_heads.stop)
    ids = {c: found[owned] for c, found in expected.ids.items()}
    if point.arm == "cp_local":
        # The other ranks' lists stand in the buffer as cache 0 has them: there the choice is the true one, elsewhere
        # it is the merge of these lists with the shard's own.
        peers = x.peers(tokens)
        for r in range(point.world):
            peers[r] = expected.keys(expected.caches[0], Shard(r, point.world, point.world))
        lists = peers.clone()
        for c in expected.caches[1:]:
            lists[shard.rank] = expected.keys(c, Shard(shard.rank, point.world, point.world))
            ids[c] = reference.merge(lists, shape=point.shape, owned=shard.owned_heads)

    def call(number: int) -> None:
        x(
            q,
            problem.cache,
            problem.block_tables[number % plan.caches],
            problem.seq_lens,
            query_len=point.query_len,
            out=outs[number],
            **options,
        )

    def verify() -> dict[str, Any]:
        x.check()
        rows = wrong = ties = 0
        for number, out in enumerate(outs):
            c = number % plan.caches
            if c in ids and engine:
                right, tied = engine_kernels.same_up_to_ties(
                    out, ids[c], problem.q, problem.cache, problem.block_tables[c], problem.seq_lens,
                    shape=point.shape, query_len=point.query_len, heads=shard.owned_heads,
                )  # fmt: skip
                rows, wrong, ties = rows + right.numel(), wrong + int((~right).sum()), ties + int(tied.sum())
            elif c in ids:
                differ = (out != ids[c]).any(2)
                rows, wrong = rows + differ.numel(), wrong + int(differ.sum())
            out.fill_(-2)
        check = {"passed": wrong == 0, "rows": rows, "mismatches": wrong, "against": "reference"}
        return check | ({"against": "reference, ties in any order", "ties": ties} if engine else {})

    exchange = getattr(x, "exchange", None)
    before = exchange.calls if isinstance(exchange, CollectiveExchange) else 0
    call(0)
    ran = exchange.calls - before if isinstance(exchange, CollectiveExchange) else 0
    if ran != x.collectives:
        raise RuntimeError(f"{ran} collectives ran in a call of arm {point.arm!r}; {x.collectives} should")
    arm = Arm(
        point,
        [lambda n=n: call(n) for n in range(plan.calls)],
        x.path,
        list(x.stages),
        {},
        verify,
        x.launches,
        x.collectives,
    )
    if engine:
        arm.extra = {"engine": engine_kernels.label(point), "kernel_files": engine_kernels.sources(point.arm)}
        arm.extra |= {"setting": (setting or engine_kernels.OWN).name, **({"topk_tuned": x.tuned} if point.arm == "vllm_tp" else {})}
    if arm.path != point.arm and not (arm.path == "adaptive" and point.threshold_blocks is not None):
        raise RuntimeError(f"arm {point.arm!r} was asked for, but path {arm.path!r} ran")
    return arm


def prepare_page_read(place: Place, point: Point, problem: inputs.Problem, plan: timing.CachePlan) -> Arm:
    """The floor of a Point: the best reader of its pages on this node."""
    rank = place.peers.rank % point.world
    lists = [problem.pages_read(point, rank, c) for c in range(plan.caches)]
    readers = page_read_op.readers(place.device)
    outs = {
        r: [torch.empty(page_read_op.partials(place.device, r), dtype=torch.int32, device=place.device) for _ in lists]
        for r in readers
    }

    def calls_of(reader: page_read_op.Reader) -> list[Callable[[], Any]]:
        def call(number: int) -> None:
            c = number % plan.caches
            page_read_op.page_read(problem.cache, lists[c], outs[reader][c], reader=reader)

        return [lambda n=n: call(n) for n in range(plan.calls)]

    times = []
    for reader in readers:
        calls = calls_of(reader)
        calls[0]()
        if place.on_gpu and point.launch == "graph":
            graph = timing.capture(calls, place.evict if plan.evict else None)
            graph.replay()
            times.append(place.quick_us(graph.replay, 3))
            graph.reset()
        else:
            times.append(sum(place.quick_us(c, 1) for c in calls[: max(4, 32 // plan.caches)]))
    slow = [max(t) for t in zip(*place.peers.exchange(times), strict=True)]
    best = readers[slow.index(min(slow))]
    checked = sorted({0, plan.caches - 1})
    sums = {c: page_read_op.checksum(problem.cache, lists[c]) for c in checked}

    def verify() -> dict[str, Any]:
        wrong = 0
        for c in checked:
            out = outs[best][c]
            wrong += int(out.sum(dtype=torch.int64)) % 2**32 != sums[c]
            out.fill_(-2)
        return {
            "passed": wrong == 0,
            "rows": sum(lists[c].numel() for c in checked),
            "mismatches": wrong,
            "against": "reference",
        }

    extra = {
        "reader": dataclasses.asdict(best),
        "reader_us": dict(zip(map(str, range(len(readers))), slow, strict=True)),
    }
    return Arm(point, calls_of(best), "page_read", ["page_read"], {}, verify, 1, 0, extra)


def prepare_layer(place: Place, point: Point, problem: inputs.Problem, plan: timing.CachePlan, expected: Expected) -> Arm:
    """An arm of what stands around the indexer."""
    rank, device = place.peers.rank, place.device
    made = layer_arms.prepare(
        point, problem, plan, expected.ids, rank=rank, device=device, llc_bytes=place.llc_bytes,
        make=lambda inner: make_decode(inner, rank, device),
    )  # fmt: skip
    return Arm(point=point, check={}, **made)


def refuse_same_path(arms: list[Arm]) -> None:
    """Raise when two different arms would run the same code: a comparison of a path with itself says nothing.

    Raises:
        RuntimeError: naming both arms.
    """
    for i, a in enumerate(arms):
        for b in arms[:i]:
            if a.point.arm != b.point.arm and a.point.arm != "page_read" and (a.path, a.stages) == (b.path, b.stages):
                raise RuntimeError(
                    f"arms {b.point.arm!r} and {a.point.arm!r} executed the same path {a.path!r} ({', '.join(a.stages)}): nothing to compare"
                )


class Sweep:
    """The body of a measuring worker: runs the job's groups and keeps what they share."""

    def __init__(self, place: Place, job: dict[str, Any]):
        self.place, self.job, self.peers = place, job, place.peers
        self._pool: tuple[tuple, torch.Tensor] | None = None
        self._probe: Probe | None = None
        self._rates: dict[str, float] = {}
        self._synced, self._waiting = float("-inf"), False  # when rows were last brought to the disk, and whether some were not yet
        self.deadline = time.monotonic() + job["seconds"] if job.get("seconds") else None

    def groups(self) -> None:
        """Run all groups, in order, until the time given is up."""
        groups = [[Point.from_dict(p) for p in group["points"]] for group in self.job["groups"]]
        lasted = 0.0
        (Path(self.job["scratch"]) / "progress.json").touch()
        gc.collect()
        gc.freeze()  # the plan and what is imported are no garbage: looking through them again after each group takes 0.1 s
        for number, (points, group) in enumerate(zip(groups, self.job["groups"], strict=True)):
            late = self.deadline is not None and time.monotonic() + lasted > self.deadline
            if self.peers.exchange(late)[0]:
                break
            self._note(number, points[0].label)
            began = time.monotonic()
            ahead = itertools.chain.from_iterable(itertools.islice(groups, number, None))
            try:
                rows = self.group(points, ahead)
            except Failed as error:
                rows = [self.failed(p, str(error)) for p in points]
            if self.peers.rank == 0:
                record = {p for p, wanted in zip(points, group["record"], strict=True) if wanted}
                self._keep([row for row in rows if row.point in record])
            lasted = time.monotonic() - began
            gc.collect()
        if self._waiting:
            records.append(self.job["out"])

    def _keep(self, rows: list[records.Row]) -> None:
        """Append a group's rows. A disk may take longer for them than a short group for its Points: rows that come within
        `SYNC_S` of others are brought to it with the next ones, or at the end."""
        self._waiting = time.monotonic() - self._synced < SYNC_S
        records.append(self.job["out"], *rows, sync=not self._waiting)
        if not self._waiting:
            self._synced = time.monotonic()

    def _note(self, current: int, label: str) -> None:
        """Say which group this is, over what was said before: a new file for each could have to wait for the disk."""
        if self.peers.rank == 0:
            with open(Path(self.job["scratch"]) / "progress.json", "r+b", buffering=0) as file:
                file.write(json.dumps({"current": current, "label": label[:200]}).ljust(1024).encode())

    def pool(self, points: list[Point], ahead: Iterable[Point]) -> torch.Tensor:
        """The pool that this and later groups of the same shape, dtype and seed draw pages from."""
        first = points[0]
        key = (first.shape, first.dtype, first.seed)
        if self._pool is None or self._pool[0] != key:
            self._pool, self._probe = None, None
            page = first.shape.key_bytes(first.dtype)
            same = [p for p in ahead if (p.shape, p.dtype, p.seed) == key]
            if self.place.on_gpu:
                torch.cuda.empty_cache()
                room = int(torch.cuda.mem_get_info()[0] * 0.7)
                wanted = max(POOL_BYTES["cuda"], max(layer_arms.pool_pages(p) * page for p in same))
            else:
                room = int(_host_memory_bytes() * 0.5 / self.peers.world)
                needs = [self.rotation_bytes(p, page) for p in same]
                wanted = min(
                    max(needs) * 5 // 4, max(POOL_BYTES["cpu"], max(layer_arms.pool_pages(p) * page for p in same))
                )
            pages = min(self.peers.exchange(max(1, min(room, wanted) // page)))
            dtype = inputs.TORCH_DTYPES[first.dtype]
            pool = self.peers.together(
                lambda: inputs.make_pool(first.shape, dtype, self.place.device, pages=pages, seed=first.seed)
            )
            self._pool = (key, pool)
            self._rates = self.peers.together(lambda: bandwidth(self.place, pool))
            self._probe = self.peers.together(lambda: Probe(self.place, pool))
        return self._pool[1]

    def rotation_bytes(self, point: Point, page: int) -> int:
        """Bytes of pages that a cold rotation of the Point would draw from a pool without bounds."""
        plan = timing.plan_caches(
            point.cache, lightest_bytes([point]), self.place.llc_bytes, room=timing.MOST_CALLS, least_calls=1
        )
        return plan.caches * layer_arms.pool_pages(point) * page

    def group(self, points: list[Point], ahead: Iterable[Point]) -> list[records.Row]:
        """Build, check and time arms over the same inputs; a row for every Point."""
        place, peers = self.place, self.peers
        first, together = points[0], peers.together
        graphs = place.on_gpu and first.launch == "graph"
        pool = self.pool(points, ahead)
        room = max(1, pool.shape[0] // inputs.pages_of_a_cache(first))
        least = (
            timing.WARM_CALLS
            if graphs
            else max(1, min(timing.WARM_CALLS, EAGER_BLOCKS // inputs.pages_of_a_cache(first)))
        )
        plan = timing.plan_caches(first.cache, lightest_bytes(points), place.llc_bytes, room=room, least_calls=least)
        problem = together(lambda: inputs.build(first, place.device, caches=plan.caches, pool=pool))
        together(lambda: refuse_constants(problem))
        expected = together(lambda: Expected(problem, plan, CHECKED_BLOCKS[place.device.type]))
        # The timed values are exact in fp8 too, so what fp8 changes is told by keys of its own.
        overlap = together(lambda: overlap_bf16(first, place.device)) if first.dtype.startswith("fp8") else None
        arms: dict[Point, Arm] = {}
        rows: dict[Point, records.Row] = {}
        for point in points:
            try:
                ready = self.ready_engine if point.arm in engine_kernels.MODULES else self.ready
                arms[point] = ready(point, problem, plan, expected)
            except Failed as error:
                rows[point] = self.failed(point, str(error))
        together(lambda: refuse_same_path(list(arms.values())))
        if arms:
            for arm in arms.values():
                if overlap is not None and arm.point.arm not in ("page_read", "attention", "projections"):
                    arm.extra["overlap_bf16"] = overlap
            timed = self.timed([a for arm in arms.values() for a in (arm, arm.best) if a], plan, graphs)
            for point, arm in arms.items():
                values = timed.pop(0)
                if arm.best:
                    arm.extra["best"] = self.best(arm.best, timed.pop(0))
                rows[point] = self.row(arm, plan, **values)
            floors = {p: row.median_us for p, row in rows.items() if p.arm == "page_read" and row.status == "ok"}
            rows = {
                p: dataclasses.replace(row, page_read_us=floors.get(traffic.floor_point(p))) for p, row in rows.items()
            }
        return [rows[p] for p in points]

    def ready(self, point: Point, problem: inputs.Problem, plan: timing.CachePlan, expected: Expected) -> Arm:
        """An arm whose every call has given the right answer, called one by one.

        Raises:
            Failed: wrong ids or any error, on every rank.
        """
        place, together = self.place, self.peers.together
        if point.launch == "graph" and not place.on_gpu:
            raise Failed("launch='graph': a CPU has no graphs; allowed here: eager")
        if point.arm == "page_read":
            arm = together(lambda: prepare_page_read(place, point, problem, plan))
        elif point.arm in LAYER_ARMS:
            arm = together(lambda: prepare_layer(place, point, problem, plan, expected))
        else:
            arm = together(lambda: prepare_decode(place, point, problem, plan, expected))
        arm.check = self.agreed(together(lambda: run_once(arm)))
        return arm

    def ready_engine(self, point: Point, problem: inputs.Problem, plan: timing.CachePlan, expected: Expected) -> Arm:
        """As `ready`, for an engine's kernels, with the fastest of their launch settings as the arm's `best`."""
        place, together = self.place, self.peers.together
        # Compiled on every rank before any of them waits in the first exchange.
        x = together(lambda: make_decode(point, place.peers.rank, place.device))
        arm = together(lambda: prepare_decode(place, point, problem, plan, expected, x))
        arm.check = self.agreed(together(lambda: run_once(arm)))
        if point.launch == "graph" and len(x.settings) > 1:
            arm.best = self.fastest(arm, problem, plan, expected, x)
        return arm

    def fastest(self, own: Arm, problem: inputs.Problem, plan: timing.CachePlan, expected: Expected, x) -> Arm | None:
        """An engine's arm at the fastest of its launch settings; None where that is the engine's own.

        What was tried goes to `own.extra["settings_us"]`, microseconds a call with the evicting read where there is
        one: for this choice only, the chosen one is timed beside all other arms. A setting that fails says why there.
        """
        place, together, evict = self.place, self.peers.together, self.place.evict if plan.evict else None
        arms, found = {}, {}
        for setting in x.settings:
            try:
                arm = own
                if setting is not engine_kernels.OWN:
                    together(lambda setting=setting: x.compile(setting))
                    arm = together(lambda setting=setting: prepare_decode(place, own.point, problem, plan, expected, x, setting))
                    arm.check = self.agreed(together(lambda arm=arm: run_once(arm)))
                graph = together(lambda arm=arm: timing.capture(arm.calls, evict))
                together(graph.replay)
                self.agreed(together(lambda arm=arm: checked(arm)))
                run = timing.timed_replays(
                    graph.replay, calls=plan.calls, replays=4, align=place.align, hold=place.hold, timer=timing.DeviceTimer()
                )  # fmt: skip
                found[setting.name] = max(self.peers.exchange(timing.median(timing.measure({"": run}, 5)[""])))
                arms[setting.name] = arm
                graph.reset()
            except Failed as error:
                found[setting.name] = str(error)
        own.extra["settings_us"] = found
        best = min(arms, key=found.get)
        return arms[best] if arms[best] is not own else None

    def best(self, arm: Arm, values: dict[str, Any]) -> dict[str, Any]:
        """What a row says of the engine at its best setting, timed in the same rounds as the row itself."""
        samples = timing.slowest(values["rank_samples_us"])
        return {"setting": arm.extra["setting"], "median_us": timing.median(samples), "samples_us": samples, "check": arm.check}

    def agreed(self, check: dict[str, Any]) -> dict[str, Any]:
        """A check summed over the ranks."""
        each = self.peers.exchange(check)
        return {
            "passed": all(c["passed"] for c in each),
            **{name: sum(c[name] for c in each) for name in ("rows", "mismatches", "ties") if name in check},
            "against": check["against"],
        }

    def timed(self, arms: list[Arm], plan: timing.CachePlan, graphs: bool) -> list[dict[str, Any]]:
        """Time the arms in alternating rounds between two probes; the values of their rows, in order."""
        together = self.peers.together
        before = together(self._probe.us)
        values = self._timed_graphs(arms, plan) if graphs else self._timed_eager(arms, plan)
        after = together(self._probe.us)
        drifts = self.peers.exchange(after / before - 1)
        drift = max(drifts, key=abs)
        return [{**v, "probe_drift": drift} for v in values]

    def _timed_graphs(self, arms: list[Arm], plan: timing.CachePlan) -> list[dict[str, Any]]:
        place, peers, together = self.place, self.peers, self.peers.together
        asked = arms[0].point.cache
        evict = place.evict if plan.evict else None
        place.evict()
        graphs, runs, counts = {}, {}, {}
        names: dict[str, list[Callable[[], Any]] | None] = {str(i): arm.calls for i, arm in enumerate(arms)}
        if evict is not None:
            names["evict"] = [lambda: None] * plan.calls
        timer = timing.DeviceTimer()
        for name, calls in names.items():
            graphs[name] = together(lambda calls=calls: timing.capture(calls, evict))
            together(lambda name=name: graphs[name].replay())
            if name != "evict":
                arm = arms[int(name)]
                replayed = self.agreed(together(lambda arm=arm: checked(arm)))
                arm.check = {**replayed, "rows": arm.check["rows"] + replayed["rows"]}
            rotation_us = max(peers.exchange(place.quick_us(graphs[name].replay, 3)))
            replays, rounds = timing.replay_counts(asked, rotation_us)
            counts[name] = replays
            runs[name] = timing.timed_replays(
                graphs[name].replay, calls=len(calls), replays=replays, align=place.align, hold=place.hold, timer=timer
            )
        samples = together(lambda: timing.measure(self._beating(runs), rounds))
        after = {
            name: self.agreed(together(lambda arm=arm: checked(arm))) for name, arm in zip(names, arms, strict=False)
        }
        ranks = peers.exchange(samples)
        values = []
        for name, arm in zip(names, arms, strict=False):
            evict_us = [timing.median(r["evict"]) for r in ranks] if evict is not None else [0.0] * len(ranks)
            each = [[us - e for us in r[name]] for r, e in zip(ranks, evict_us, strict=True)]
            arm.check["rows"] += after[name]["rows"]
            values.append({
                "rank_samples_us": each, "calls_per_replay": len(arm.calls), "replays_per_round": counts[name],
                "evict_us": max(evict_us) if evict is not None else None,
            })  # fmt: skip
        for graph in graphs.values():
            graph.reset()
        return values

    def _timed_eager(self, arms: list[Arm], plan: timing.CachePlan) -> list[dict[str, Any]]:
        place, peers, together = self.place, self.peers, self.peers.together
        evict = place.evict if plan.evict else None
        if evict is not None:
            place.evict()
        runs = {str(i): self._eager_run(arm, plan, evict) for i, arm in enumerate(arms)}
        slow = max(max(each) for each in peers.exchange([arm.rotation_us for arm in arms]))
        rounds = timing.eager_rounds(slow, timing.EAGER_ROUNDS if place.on_gpu else timing.WARM_ROUNDS)
        samples = together(lambda: timing.measure(self._beating(runs), rounds))
        after = [self.agreed(together(lambda arm=arm: checked(arm))) for arm in arms]
        ranks = peers.exchange(samples)
        values = []
        for (name, arm), check in zip(zip(runs, arms, strict=True), after, strict=True):
            arm.check["rows"] += check["rows"]
            values.append({
                "rank_samples_us": [r[name] for r in ranks], "calls_per_replay": len(arm.calls) if place.on_gpu else 1, "replays_per_round": 1,
                "evict_us": 0.0 if evict is not None else None,  # it stands outside the clock
            })  # fmt: skip
        return values

    def _eager_run(
        self, arm: Arm, plan: timing.CachePlan, evict: Callable[[], Any] | None
    ) -> Callable[[], list[float]]:
        place = self.place
        if not place.on_gpu:
            return timing.timed_calls(arm.calls, align=place.align, evict=evict)
        if evict is not None:
            raise ValueError(
                "launch='eager' behind an evicting read: not offered on a GPU; use launch='graph' or longer contexts"
            )

        def rotation() -> None:
            for call in arm.calls:
                call()

        hold, align = place.hold, place.align
        if arm.point.arm.startswith("mixed_"):
            # Whole steps count what launching them costs: nothing is queued ahead of them, behind the ranks' meeting neither.
            def hold() -> None: ...

            def align() -> None:
                place.align()
                torch.cuda.synchronize(place.device)

        return timing.timed_replays(rotation, calls=len(arm.calls), replays=1, align=align, hold=hold, timer=timing.DeviceTimer())

    def _beating(self, runs: dict[str, Callable[[], list[float]]]) -> dict[str, Callable[[], list[float]]]:
        """The same runs, each telling the launcher first that the job is alive."""

        def run(name: str) -> list[float]:
            self.peers.beat()
            return runs[name]()

        return {name: lambda name=name: run(name) for name in runs}

    def row(
        self, arm: Arm, plan: timing.CachePlan, rank_samples_us: list[list[float]], probe_drift: float, **values: Any
    ) -> records.Row:
        """The row of a timed arm; a failed one where its figures can't be true."""
        point, place = arm.point, self.place
        samples = timing.slowest(rank_samples_us)
        busiest = traffic.distinct_bytes_read(point)
        touched = (arm.footprint_bytes or plan.caches * busiest) + (place.evict_bytes if plan.evict else 0)
        cold = plan.cold and (arm.footprint_bytes is None or touched > timing.COLD_OVER_LLC * place.llc_bytes)
        node = traffic.Node(
            self.job["node"], self._rates["page_gbs"], place.llc_bytes, self._rates["sequential_gbs"], place.peak_gbs
        )
        problem = (
            ""
            if arm.check["passed"]
            else f"wrong ids: {arm.check['mismatches']} of {arm.check['rows']} rows differ from the reference"
        )
        try:
            if timing.median(samples) <= 0:
                raise ValueError(
                    f"a median of {timing.median(samples):.2f} us: the evicting read that was subtracted took longer than the calls behind it"
                )
            if cold:
                timing.refuse_impossible(busiest, timing.median(samples), place.peak_gbs)
        except ValueError as error:
            problem = problem or str(error)
        if problem:
            return dataclasses.replace(self.failed(point, problem), check=arm.check)
        return records.Row(
            point=point, status="ok", path=arm.path, node=self.job["node"], ranks=self.peers.world, timed_region=arm.stages,
            samples_us=samples, rank_samples_us=rank_samples_us, caches=arm.caches or plan.caches,
            pool_bytes=self._pool[1].numel() * self._pool[1].element_size(), cache_state="cold" if cold else "warm",
            footprint_over_l2=touched / place.l2_bytes if place.l2_bytes else None, footprint_over_llc=touched / place.llc_bytes,
            bytes_read=traffic.bytes_read(point), distinct_bytes_read=busiest, bytes_exchanged=traffic.bytes_exchanged(point),
            limit_us=traffic.limit_us(point, node), check=arm.check, launches=arm.launches, collectives=arm.collectives,
            unsteady=abs(probe_drift) > DRIFT, probe_drift=probe_drift,
            extra={**arm.extra, **self._rates, "datasheet_gbs": place.peak_gbs}, provenance=self.provenance(), **values,
        )  # fmt: skip

    def failed(self, point: Point, problem: str) -> records.Row:
        """A row without a time."""
        return records.Row(
            point=point,
            status="failed",
            path=point.arm,
            node=self.job["node"],
            ranks=self.peers.world,
            error=problem,
            provenance=self.provenance(),
        )

    def provenance(self) -> dict[str, Any]:
        """What the launcher found, and the time."""
        return {**self.job["provenance"], "time_utc": datetime.now(UTC).isoformat(timespec="seconds")}


def run_once(arm: Arm) -> dict[str, Any]:
    """The check of an arm's calls, made eagerly one after the other; keeps the host's time of the rotation."""
    start = time.perf_counter()
    for call in arm.calls:
        call()
    arm.rotation_us = (time.perf_counter() - start) * 1e6
    return checked(arm)


def checked(arm: Arm) -> dict[str, Any]:
    """The arm's check of what its calls last wrote.

    Raises:
        ValueError: wrong answers, which never get a time.
    """
    check = arm.verify()
    if not check["passed"]:
        what = "pages" if arm.point.arm == "page_read" else "rows"
        raise ValueError(f"wrong answer: {check['mismatches']} of {check['rows']} {what} differ from the reference")
    return check


def lightest_bytes(points: list[Point]) -> int:
    """Distinct bytes that the lightest rank of the lightest arm reads a call: what a cold rotation is counted in."""
    return min(traffic.distinct_bytes_read(p, rank) for p in points for rank in range(traffic.shards(p)))


def refuse_constants(problem: inputs.Problem) -> None:
    """Raise if the queries or the keys that are about to be timed hold one value only."""
    inputs.refuse_constant("q", problem.q)
    inputs.refuse_constant(
        "cache", problem.cache[problem.block_table[0, :4].to(torch.int64).clamp(0, problem.cache.shape[0] - 1)]
    )


def _host_memory_bytes() -> int:
    """Memory that can still be had on this host."""
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return 4 * GIB


def main(argv: list[str]) -> None:
    """`python -m m3cp.worker JOB.json`, with RANK and WORLD_SIZE in the environment."""
    job = json.loads(Path(argv[0]).read_text())
    run(job, lambda place, job: Sweep(place, job).groups())


if __name__ == "__main__":
    main(sys.argv[1:])
