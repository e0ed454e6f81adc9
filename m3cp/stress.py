"""`m3cp check`: one pass a path; with `--stress`, millions of launches between ranks, every one of them compared.

A leg is a Point run again and again: its calls, each over a cache of its own so that keys and words are cold, stand in
one captured graph as the layers of a few decode steps do, all through one object. Between them come calls that don't
exchange and, before about one launch in a thousand, a wait of up to 500 us on one rank. The graph itself compares the
ids of each of its calls with the reference's and adds up mismatches on the device; the host looks about once a second.
Calls of an adaptive object draw their lengths just above its threshold's sum of blocks and at it, so that both paths come.

Runs where torch, triton and tqdm are all there is: `python3 -m m3cp.stress --stress --minutes 5 --out stress.json`.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import random
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from m3cp import compiled, doctor, records, sweep
from m3cp.shapes import IndexerShape, Point, require

LAYERS = 57  # calls of one decode step, through one object
DELAYED = 1 / 1000  # of all launches
MOST_DELAY_US = 500.0
SHORT_EVERY = 8  # one call in so many has short rows only, so exchanges nothing
DELAY_ROWS = 4096  # replays until the drawn delays repeat
BATCH_S = 1.0  # of replays between two looks of the host, during which nothing is queued
LEAST_S = 0.2  # of a leg
POOL_PAGES = {"cuda": 131_072, "cpu": 600}  # 4 GiB of bf16 keys on a GPU: distinct pages of a leg's caches
MOST_BLOCKS = {"cuda": 120_000, "cpu": 2_000}  # that the reference scores for one leg
THRASH_BYTES = 256 << 20
THRESHOLD, LARGE_THRESHOLD = 40, 600  # blocks, of adaptive legs
CELLS = ("fp8", "adaptive", "padded")  # words of legs' names that the table sums over all kinds

# Context tokens, batch, mix, query_len, padding rows. At most 32 rows, or kernels of another bucket would be compiled.
SMALL = [(8192, 1, "uniform", 1, 0), (4096, 4, "uniform", 1, 0), (2200, 8, "uniform", 1, 2), (8192, 3, "uniform", 4, 1)]
NEAR = (5200, 1, "uniform", 1, 0)  # one block above THRESHOLD
LARGE = [(131_072, 4, "uniform", 1, 0), (65_536, 2, "uniform", 8, 1), (50_000, 6, "log_uniform", 5, 0), (131_072, 16, "one_long_rest_4k", 1, 2),
         (32_768, 30, "log_uniform", 1, 2), (131_072, 16, "log_uniform", 2, 0), (20_000, 5, "uniform", 3, 0)]  # fmt: skip
EAGER = [(8192, 1, "uniform", 1, 0), (30_000, 7, "log_uniform", 2, 1)]


@dataclass(frozen=True)
class Leg:
    """What is run again and again: a Point, how many steps of LAYERS calls a graph holds, its share of the time."""

    point: Point
    steps: int
    share: float

    @property
    def name(self) -> str:
        p = self.point
        adaptive = "" if p.threshold_blocks is None else f" adaptive above {p.threshold_blocks}"
        padded = f" +{p.rows_padded} padded" if p.rows_padded else ""
        return f"{p.label.rsplit(' ', 1)[0]}{adaptive}{padded} {p.launch}"

    @property
    def shared(self) -> tuple:
        """Legs of which this is alike run through one object."""
        p = self.point
        return p.arm, p.form, p.queries, p.dtype, p.threshold_blocks


@dataclass
class Found:
    """What a leg found. Launches are calls of one rank; every rank runs and compares as many, sums are over ranks."""

    leg: str
    kind: str
    launches: int = 0
    mismatches: int = 0
    expiries: int = 0
    exchanging: int = 0
    delays: int = 0
    seconds: float = 0.0
    error: str = ""

    @property
    def bound(self) -> float | None:
        """Upper end of the 95% interval of the mismatch rate after `launches` without any: 3 / n."""
        return (
            3 / self.launches
            if self.launches and not self.mismatches and not self.expiries and not self.error
            else None
        )


def legs(world: int, device: str, interpreted: bool = False) -> list[Leg]:
    """bf16, then fp8 caches; of each small captured shapes, then large ones, mixes and query lengths, then eager calls; a toy of it on a CPU.

    Shares are seconds, so that 20 million small, 200,000 large and 100,000 eager launches a rank come at about the same
    time: on two H200 in 4.25 minutes 26 million, 430,000 and 180,000 (`data/measured/h200x2/stress.json`).
    """
    if device == "cpu":
        # The eager backend knows the staged form only; interpreted, the one-launch kernel itself runs.
        base = Point(64 * 9, 2, shape=IndexerShape(head_dim=64, block_size=64, topk=4), max_context=64 * 16, arm="cp", world=world,
                     form="one_launch" if interpreted else "staged", exchange="symmetric", queries="gathered", launch="eager")  # fmt: skip
        verify = base.replace(queries="replicated", query_len=3, mix="log_uniform", rows_padded=1)
        made = [base, verify, base.replace(dtype="fp8_e4m3fn")]
        if interpreted:
            made += [p.replace(threshold_blocks=12) for p in (base, verify)]
            made += [base.replace(dtype="fp8_e4m3fn", threshold_blocks=12, form="two_launch", query_len=2)]
        return [Leg(point, 1, 1.0) for point in made]
    tp = Point(8192, 1, arm="tp", form="one_launch", max_context=131_072, world=world)
    fp8, adaptive = {"dtype": "fp8_e4m3fn"}, {"threshold_blocks": THRESHOLD}
    # What runs, seconds of each small leg, of each eager one, the shapes.
    some, near = [SMALL[0], *SMALL[2:]], [NEAR, SMALL[1], SMALL[3]]
    ways = [(tp, 2, 1.2, some, LARGE[::3], EAGER[:1]), (tp.replace(**fp8), 2, 1.2, some[::2], LARGE[:2], EAGER[:1])]
    if world > 1:
        replicated = tp.replace(arm="cp", exchange="symmetric", queries="replicated")
        both = replicated, replicated.replace(queries="gathered")
        two = [p.replace(form="two_launch") for p in both]
        ways = [
            *((p, 6, 1.2, SMALL, LARGE, EAGER) for p in both),
            ways[0],
            *((p, 3, 0.6, some[:2], LARGE[::6], EAGER[:1]) for p in two),
            *((p.replace(**adaptive), 6, 1.2, near, LARGE[:3], EAGER) for p in both),
            *((p.replace(**fp8), 4, 1.2, some, LARGE[:2], EAGER) for p in both),
            ways[1],
            *((p.replace(**fp8, **adaptive), 6, 0.6, near[::2], [], EAGER[:1]) for p in both),
            (two[1].replace(**fp8, **adaptive), 3, 0.6, near[::2], [], EAGER[:1]),
        ]
    found = []
    for way, small_s, eager_s, *shapes in ways:
        for kind, of_kind in zip(("small", "large", "eager"), shapes, strict=True):
            point = way.replace(launch="eager" if kind == "eager" else "graph")
            if kind == "large" and way.threshold_blocks is not None:
                point = point.replace(threshold_blocks=LARGE_THRESHOLD)
            for tokens, batch, mix, query_len, padding in of_kind:
                changed = point.replace(context_tokens=tokens, batch=batch, mix=mix, query_len=query_len, rows_padded=padding)
                found.append(Leg(changed, 4 if kind == "small" else 1, {"small": small_s, "large": 0.2, "eager": eager_s}[kind]))
    order = {"small": 0, "large": 1, "eager": 2}
    return sorted(found, key=lambda leg: (leg.point.dtype, order[kind_of(leg)]))


def chosen(job: dict[str, Any], world: int) -> list[Leg]:
    """The legs that a job asks for.

    Raises:
        ValueError: `only` names none.
    """
    from m3cp.kernels import tile

    todo = legs(world, job["device"], tile.INTERPRETED)
    todo = [leg for leg in todo if not job["only"] or any(word in f"{kind_of(leg)} {leg.name}" for word in job["only"])]
    require("only", job["only"], bool(todo), "words that a leg's kind or name contains")
    return todo


def bounds(todo: Sequence[Leg]) -> dict[tuple, Point]:
    """For each object that legs share, a Point as large as the largest of them."""
    found: dict[tuple, Point] = {}
    for leg in todo:
        point, most = leg.point, found.get(leg.shared, leg.point)
        found[leg.shared] = point.replace(
            batch=max(most.batch, point.batch + point.rows_padded), query_len=max(most.query_len, point.query_len), context_tokens=1, mix="uniform", rows_padded=0
        )
    return found


def at_threshold(lengths: Sequence[int], threshold: int, block_size: int) -> list[int]:
    """The same requests, shortened by whole blocks until they see `threshold` blocks in all: the first stay longest, none goes."""
    blocks = [-(-n // block_size) for n in lengths]
    left, found = threshold - sum(b > 0 for b in blocks), []
    for n, b in zip(lengths, blocks, strict=True):
        more = min(max(b - 1, 0), left)
        left -= more
        found.append(n - (b - 1 - more) * block_size if b else 0)
    return found


def kind_of(leg: Leg) -> str:
    """ "small" and "large" are captured; "eager" is not."""
    return "eager" if leg.point.launch == "eager" else "small" if leg.steps > 1 else "large"


class Delay:
    """Waits on one rank before some launches: which, where and how long is drawn alike on every rank beforehand.

    Args:
        place: this rank.
        calls: launches of one rotation.
        rng: drawn from alike on all ranks.
    """

    def __init__(self, place, calls: int, rng: random.Random):
        import torch

        self.positions = sorted(rng.sample(range(calls), min(calls, max(1, calls // LAYERS))))
        chance = min(1.0, DELAYED * calls / len(self.positions))
        self.drawn_us = [[0.0] * len(self.positions) for _ in range(DELAY_ROWS)]
        for row in self.drawn_us:
            for i in range(len(row)):
                hit, who, us = rng.random() < chance, rng.randrange(place.peers.world), rng.uniform(0, MOST_DELAY_US)
                row[i] = us if hit and who == place.peers.rank else 0.0
        self._counts = [sum(us > 0 for us in row) for row in self.drawn_us]
        self.on_gpu, self.turn = place.on_gpu, 0
        if self.on_gpu:
            from m3cp.kernels.spin import spin, spins_a_us

            rate = spins_a_us(place.device)
            self._spin = spin
            self._table = torch.tensor(
                [[int(us * rate) for us in row] for row in self.drawn_us], dtype=torch.int32, device=place.device
            )
            self._turn = torch.zeros(1, dtype=torch.int32, device=place.device)

    def before(self, call: int) -> None:
        """Wait, if this turn says so, before launch `call` of the rotation."""
        if call not in self.positions:
            return
        i = self.positions.index(call)
        if self.on_gpu:
            self._spin(self._table, self._turn, column=i)
        elif self.drawn_us[self.turn % DELAY_ROWS][i]:
            time.sleep(self.drawn_us[self.turn % DELAY_ROWS][i] / 1e6)

    def end(self) -> None:
        """The rotation's end: the next one waits elsewhere."""
        if self.on_gpu:
            self._turn.add_(1).remainder_(DELAY_ROWS)
        self.turn += 1

    def count(self, rotations: int) -> int:
        """Waits that this rank made in the first `rotations` rotations."""
        return sum(self._counts) * (rotations // DELAY_ROWS) + sum(self._counts[: rotations % DELAY_ROWS])


class Rotation:
    """A leg made ready: its calls with what each must choose, the comparison, and the graph of both.

    Args:
        decode: the object that all legs of its arm share.
        pool: pages to draw caches from.
    """

    def __init__(self, place, leg: Leg, decode, pool, seed: int):
        import torch

        from m3cp import inputs, reference, timing, traffic

        point, rng = leg.point, random.Random(seed)
        self.leg, self.decode, self.place = leg, decode, place
        self.calls = leg.steps * LAYERS if place.on_gpu else 6
        need = inputs.pages_of_a_cache(point)
        blocks = sum(point.shape.blocks(n) for n in traffic.context_lengths(point))
        # Enough that a cache is out of the last level when its turn comes again, where the reference keeps up.
        cold = 2 + timing.COLD_OVER_LLC * place.llc_bytes * point.world // max(
            1, blocks * point.shape.key_bytes(point.dtype)
        )
        caches = max(1, min(self.calls, pool.shape[0] // need, cold, max(2, MOST_BLOCKS[place.device.type] // blocks)))
        problem = inputs.build(point.replace(seed=seed % 2**31), place.device, caches=caches, pool=pool)
        lens = {"long": problem.seq_lens, "short": (problem.seq_lens // 7).clamp(max=point.shape.topk * point.shape.block_size)}
        used = point.shape.blocks(point.context_tokens)
        owned = slice(decode.shard.owned_heads.start, decode.shard.owned_heads.stop)
        q = problem.local_q(decode.shard) if point.arm == "tp" or point.queries == "gathered" else problem.q
        if point.threshold_blocks is not None:
            few = at_threshold(problem.seq_lens.tolist(), point.threshold_blocks, point.shape.block_size)
            lens["few"] = torch.tensor(few, dtype=torch.int32, device=place.device)

        def right(lens, count: int):
            """Ids in each of the first `count` caches, scored as one batch."""
            tables = torch.cat([table[:, :used] for table in problem.block_tables[:count]])
            given = (problem.q.repeat(count, 1, 1), problem.cache, tables, lens.repeat(count))
            return reference.select_blocks(*given, shape=point.shape, query_len=point.query_len)[owned].chunk(count, dim=1)

        # Rows that choose all they see choose the same in every cache.
        ids = {way: right(given, 1 if way == "short" else caches) for way, given in lens.items()}
        drawn = [way for way in lens if way != "short"]
        kinds = ["short" if rng.randrange(SHORT_EVERY) == 0 else rng.choice(drawn) for _ in range(self.calls)]
        kinds[: len(drawn)] = drawn
        needs = any(point.shape.blocks(n) > point.shape.topk for n in traffic.context_lengths(point))
        self.exchanging = kinds.count("long") if point.arm == "cp" and needs else 0
        self.expect = torch.stack([ids[way][n % len(ids[way])] for n, way in enumerate(kinds)])
        self.outs = torch.full_like(self.expect, -2)
        self.bad = torch.zeros(1, dtype=torch.int64, device=place.device)
        self.delay = Delay(place, self.calls, rng)
        self.rotations = 0
        self._before = self._exchanged()

        def rotation() -> None:
            for n, way in enumerate(kinds):
                self.delay.before(n)
                decode(q, problem.cache, problem.block_tables[n % caches], lens[way], query_len=point.query_len, out=self.outs[n])
            self.bad.add_((self.outs != self.expect).flatten(1).any(1).sum())
            self.outs.fill_(-2)
            self.delay.end()

        self.run: Callable[[], None] = rotation
        self.graph = None

    def start(self) -> None:
        """Run once as it is, where what compiles compiles, then capture. Ranks come here together."""
        from m3cp import timing

        self.run()
        self.rotations += 1
        if self.leg.point.launch == "graph":
            self.graph = timing.capture([self.run])
            self.run = self.graph.replay

    def look(self) -> tuple[int, list[int]]:
        """(mismatches so far, the error word) of this rank; waits for the device."""
        return int(self.bad), self.decode._state.tolist()

    def _exchanged(self) -> int:
        return self.decode.counts()["cp"] if self.leg.point.threshold_blocks is not None else 0

    def strayed(self) -> int:
        """Calls of an adaptive object that took CP's path beyond those that should have, on this rank."""
        adaptive = self.leg.point.threshold_blocks is not None
        return self._exchanged() - self._before - self.rotations * self.exchanging if adaptive else 0

    def close(self) -> None:
        """Free the graph."""
        if self.graph is not None:
            self.graph.reset()


class Thrash:
    """A second stream that writes through a buffer larger than L2, beside what is being checked."""

    def __init__(self, place, on: bool):
        import torch

        self._on = on and place.on_gpu
        if self._on:
            self._buffer = torch.zeros(THRASH_BYTES // 4, dtype=torch.int32, device=place.device)
            self._stream = torch.cuda.Stream(place.device)

    def once(self) -> None:
        """Enqueue one pass over the buffer."""
        if self._on:
            import torch

            with torch.cuda.stream(self._stream):
                self._buffer.add_(1)

    def wait(self) -> None:
        """Until the passes so far are done, so that their queue stays short."""
        if self._on:
            self._stream.synchronize()


def body(place, job: dict[str, Any]) -> None:
    """What a rank of the stress run does; rank 0 leaves progress and the result in the scratch folder."""
    from m3cp import inputs, worker

    todo = chosen(job, place.peers.world)
    began, thrash, pool, objects = time.monotonic(), Thrash(place, job["thrash"]), None, {}
    results = [Found(leg.name, kind_of(leg)) for leg in todo]  # a leg that time did not reach says 0 launches
    seconds, scratch = job["minutes"] * 60, Path(job["scratch"])
    for key, bound in bounds(todo).items():
        say(place, scratch, results, 0.0, f"setting up {' '.join(str(k) for k in key if k is not None)}")

        def make(bound=bound):
            decode = worker.make_decode(bound, place.peers.rank, place.device)
            decode.warmup()
            return decode

        objects[key] = place.peers.together(make)
    left, set_up = sum(leg.share for leg in todo), 0.0
    for number, (leg, found) in enumerate(zip(todo, results, strict=True)):
        if place.peers.exchange(time.monotonic() - began > seconds)[0]:  # rank 0's clock, or some would go on alone
            break

        def tell(label=leg.name, number=number) -> None:
            say(place, scratch, results, number / len(todo), label)

        tell(label=f"setting up {leg.name}")
        start, dtype = time.monotonic(), inputs.TORCH_DTYPES[leg.point.dtype]
        if pool is None or pool.dtype != dtype:
            pool = None
            gc.collect()  # a leg's rotation refers to itself, so to its pool
            pool = inputs.make_pool(leg.point.shape, dtype, place.device, pages=POOL_PAGES[place.device.type], seed=job["seed"])
        ready = place.peers.together(
            lambda leg=leg, number=number, pool=pool: Rotation(place, leg, objects[leg.shared], pool, job["seed"] + number)
        )
        place.peers.together(ready.start)
        # What is left of the time is shared out anew at each leg, less what setting up the others will take.
        now = time.monotonic()
        set_up += now - start
        spare = seconds - (now - began) - set_up / (number + 1) * (len(todo) - number - 1)
        share = max(LEAST_S, spare * leg.share / left)
        left -= leg.share
        problem = run_leg(place, ready, found, thrash, now + share, tell)
        ready.close()
        del ready
        if place.peers.rank == 0:
            _write(scratch / "result.json", [asdict(f) for f in results])
        if problem:
            break


def run_leg(place, ready: Rotation, found: Found, thrash: Thrash, until: float, tell: Callable[[], None]) -> bool:
    """Run rotations until rank 0's clock says so; fills `found`; whether anything was wrong on any rank."""
    start, count = time.monotonic(), 1
    while True:
        for _ in range(count):
            ready.run()
            thrash.once()
        ready.rotations += count
        bad, state = ready.look()
        thrash.wait()
        took = time.monotonic() - start
        # Rank 0 decides how many come next and when it is enough, so that all ranks run as many.
        remaining = until - time.monotonic()
        answers = place.peers.exchange([bad, state, took, remaining, ready.delay.count(ready.rotations), ready.strayed()])
        found.launches = ready.rotations * ready.calls
        found.exchanging = ready.rotations * ready.exchanging
        found.mismatches = sum(a[0] for a in answers)
        words = [(rank, a[1]) for rank, a in enumerate(answers) if a[1][1]]
        found.expiries = sum(state[1] == 2 for _, state in words)
        found.delays = sum(a[4] for a in answers)
        found.seconds = round(answers[0][2], 3)
        if words:
            rank, (launch, kind, other, at) = words[0]
            found.error = f"rank {rank} found error {kind} (rank {other}) at launch {at} of {launch}"
        elif strayed := {rank: a[5] for rank, a in enumerate(answers) if a[5]}:
            found.error = f"calls on CP's path beyond those above the threshold, by rank: {strayed}"
        tell()
        if found.mismatches or found.error:
            return True
        took, remaining = answers[0][2:4]
        if remaining <= 0:
            return False
        count = max(1, min(1000, int(min(BATCH_S, remaining) / max(1e-4, took / (ready.rotations - 1)))))


def say(place, scratch: Path, results: list[Found], share: float, label: str) -> None:
    """Leave word for the launcher's progress bar."""
    place.peers.beat()
    if place.peers.rank == 0:
        done = {
            "share": share,
            "label": label,
            "launches": sum(f.launches for f in results),
            "mismatches": sum(f.mismatches for f in results),
        }
        _write(scratch / "progress.json", done)


def _write(path: Path, value: Any) -> None:
    path.with_suffix(".new").write_text(json.dumps(value))
    path.with_suffix(".new").rename(path)


class Bar:
    """One line of progress, redrawn on a terminal, else printed every ten seconds."""

    def __init__(self, minutes: float):
        self._start, self._seconds, self._last, self._again = time.monotonic(), minutes * 60, 0.0, sys.stdout.isatty()

    def look(self, scratch: Path) -> None:
        """Called by the launcher about ten times a second."""
        now = time.monotonic()
        if now - self._last < (0.5 if self._again else 10.0):
            return
        try:
            at = json.loads((scratch / "progress.json").read_text())
        except (OSError, ValueError):
            return
        self._last, past = now, now - self._start
        share = min(1.0, max(at["share"], past / self._seconds))
        left = max(0.0, self._seconds - past)
        text = f"[{'#' * round(share * 20):20}] {at['launches']:,} launches, {at['mismatches']} mismatches, about {left / 60:.1f} min left: {at['label']}"
        print(f"\r{text[:150]:150}" if self._again else text, end="" if self._again else "\n", flush=True)


def table(found: Sequence[Found]) -> list[str]:
    """The summary: a line a leg, a line a kind, a line for each of CELLS."""
    width = max([len(f.leg) for f in found] + [20])
    lines = [
        f"{'leg':{width}} {'launches':>12} {'exchanging':>12} {'delays':>8} {'mismatches':>10} {'expiries':>8}  95% bound"
    ]
    for f in [*found, *(total(some, f"all {name}") for name, some in groups(found).items())]:
        bound = f"{f.bound:.1e}" if f.bound is not None else f.error or "-"
        lines.append(
            f"{f.leg:{width}} {f.launches:12,} {f.exchanging:12,} {f.delays:8,} {f.mismatches:10,} {f.expiries:8,}  {bound}"
        )
    return lines


def groups(found: Sequence[Found]) -> dict[str, list[Found]]:
    """Legs by kind, then those whose name holds one of CELLS, whatever their kind."""
    some = {kind: [f for f in found if f.kind == kind] for kind in ("small", "large", "eager")}
    some |= {cell: [f for f in found if cell in f.leg] for cell in CELLS}
    return {name: legs for name, legs in some.items() if legs}


def total(found: Sequence[Found], name: str) -> Found:
    """The sum of some legs."""
    sums = {
        k: sum(getattr(f, k) for f in found)
        for k in ("launches", "mismatches", "expiries", "exchanging", "delays", "seconds")
    }
    kind = "/".join(dict.fromkeys(f.kind for f in found))
    return Found(name, kind, error="; ".join(f.error for f in found if f.error), **sums)


def stress(
    device: str,
    ranks: int,
    minutes: float,
    *,
    out: Path | None = None,
    thrash: bool = True,
    seed: int = 0,
    only: Sequence[str] = (),
) -> int:
    """Run every leg between `ranks` processes for about `minutes`, print the table, write it to `out`; 0 when all is well.

    Args:
        device: "cuda" or "cpu".
        only: legs whose kind or name contains one of these words; all when empty.

    Raises:
        ValueError: `minutes` is not positive, or `only` names no leg.
        sweep.WorkersFailed: a rank failed; the message names it.
    """
    require("minutes", minutes, minutes > 0, "a positive number of minutes")
    facts = sweep.job_facts(device)
    print(f"stress: {ranks} ranks of {facts['node']}, about {minutes:g} min", flush=True)
    job = {**facts, "minutes": minutes, "thrash": thrash, "seed": seed, "only": list(only)}
    todo = chosen(job, ranks)
    if device == "cuda":  # the minutes are for launches
        count, problems = compiled.ahead(bounds(todo).values())
        print("\n".join([f"{count} kernels compiled ahead", *problems]), flush=True)
    bar, results = Bar(minutes), []

    def look(scratch: Path) -> None:
        bar.look(scratch)
        with contextlib.suppress(OSError, ValueError):
            results[:] = [Found(**f) for f in json.loads((scratch / "result.json").read_text())]

    try:
        sweep.launch("m3cp.stress", job, ranks, follow=look, limit_s=minutes * 60 + 300)
    finally:  # what was found before a rank failed is not lost
        print("\n" + "\n".join(table(results)), flush=True)
        if out is not None:
            write(Path(out), results, facts["node"], job, ranks)
    unreached = sum(not f.launches for f in results)
    if unreached:
        print(f"{unreached} of {len(results)} legs were not reached in {minutes:g} min: nothing is known of them", flush=True)
    fine = bool(results) and not any(f.mismatches or f.expiries or f.error for f in results)
    return 0 if fine else 1


def write(out: Path, results: Sequence[Found], node: str, job: dict[str, Any], ranks: int) -> None:
    """The legs and their sums as JSON."""
    kinds = {name: total(some, name) for name, some in groups(results).items()}
    summary = {
        "node": node, "ranks": ranks, "minutes": job["minutes"], "thrash": job["thrash"] and job["device"] == "cuda", "seed": job["seed"],
        "code_hash": records.code_hash(), "provenance": doctor.provenance(), "legs": [asdict(f) for f in results],
        "kinds": {kind: {**asdict(f), "bound_95": f.bound} for kind, f in kinds.items()},
    }  # fmt: skip
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(summary, indent=1))


def paths(device: str) -> list[tuple[str, str, int]]:
    """(path, form, ranks) that one process can run here through virtual ranks."""
    from m3cp.kernels import tile

    forms = ["staged", "two_launch"] if device == "cuda" or tile.INTERPRETED else ["staged"]
    return [
        (path, form, world)
        for form in forms
        for path in ("tp", "cp")
        for world in (1, 2, 4, 8)
        if not (path == "tp" and form == "two_launch" and world > 4)
    ]


def check(device: str) -> int:
    """One pass a path against the reference, with virtual ranks in this process; 0 when every id is right."""
    import torch

    from m3cp import inputs, reference
    from m3cp.testing import select_virtual

    wrong = 0
    point = Point(9_000, 3, mix="log_uniform", query_len=2, rows_padded=1, max_context=16_384, form="staged")
    problem = inputs.build(point, device, poison=True)
    given = (problem.q, problem.cache, problem.block_table, problem.seq_lens)
    expect = reference.select_blocks(*given, shape=point.shape, query_len=2)
    for path, form, world in paths(device):
        got = select_virtual(*given, shape=point.shape, world=world, query_len=2, path=path, form=form)
        differ = int((got != expect).any(2).sum())
        wrong += differ
        print(
            f"{path:3} {form:10} {world} rank{'s' if world > 1 else ' '}: {'ok' if not differ else f'{differ} rows differ'} ({expect[..., 0].numel()} rows)",
            flush=True,
        )
    assert torch.equal(expect[:, -1], torch.full_like(expect[:, -1], -1)), "the padding row chose blocks"
    return 1 if wrong else 0


def main(
    device: str | None = None,
    *,
    stressed: bool = False,
    minutes: float = 5.0,
    ranks: int | None = None,
    out: Path | None = None,
    thrash: bool = True,
    seed: int = 0,
    only: Sequence[str] = (),
) -> int:
    """What `m3cp check` does; the exit status.

    Raises:
        doctor.NodeError: a device that is not here.
        ValueError: more ranks than GPUs, or a number of ranks that the heads don't allow.
    """
    device = doctor.sweep_device(device)
    if not stressed:
        return check(device)
    gpus = len(doctor.devices()) if device == "cuda" else 2
    ranks = ranks or max(w for w in (1, 2, 4, 8) if w <= gpus)
    require(
        "ranks",
        ranks,
        ranks in (1, 2, 4, 8) and (device == "cpu" or ranks <= gpus),
        f"1, 2, 4 or 8, and at most the {gpus} GPUs here",
    )
    try:
        return stress(device, ranks, minutes, out=out, thrash=thrash, seed=seed, only=only)
    except sweep.WorkersFailed as error:
        print(f"\nm3cp check: {error}", file=sys.stderr)
        return 1


def _arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python3 -m m3cp.stress",
        description="One pass a path; with --stress, as many launches as the time allows.",
    )
    parser.add_argument("--stress", action="store_true", help="launches between ranks, every one compared")
    parser.add_argument("--minutes", type=float, default=5.0, help="about how long")
    parser.add_argument("--ranks", type=int, help="processes, one a GPU; default: all that fit")
    parser.add_argument("--device", help="cuda or cpu")
    parser.add_argument("--out", type=Path, help="a JSON file for the table")
    parser.add_argument("--no-thrash", action="store_true", help="no kernel that thrashes L2 on a second stream")
    parser.add_argument("--seed", type=int, default=0, help="of inputs, delays and order")
    parser.add_argument("--only", nargs="*", default=[], help="legs whose kind or name contains one of these words")
    return parser.parse_args(argv)


if __name__ == "__main__":
    if len(sys.argv) == 2 and sys.argv[1].endswith("job.json"):
        from m3cp import worker

        worker.run(json.loads(Path(sys.argv[1]).read_text()), body)
    given = _arguments(sys.argv[1:])
    sys.exit(
        main(
            given.device, stressed=given.stress, minutes=given.minutes, ranks=given.ranks, out=given.out,
            thrash=not given.no_thrash, seed=given.seed, only=given.only,
        )
    )  # fmt: skip
