"""What an indexer call takes inside a layer: behind a kernel that streams weights, with one rank late.

A served layer runs its indexer behind other kernels. They have streamed weights through the caches, so neither keys nor
queries, tables, words and code are there any more, and ranks do not arrive together. Here a graph holds layers of

    a streaming read of a weight-sized buffer; on the last rank a wait of the skew; the indexer call

over rotating caches, and a second graph the same layers without the call. The figure is the first graph's time a layer
minus the second's, the slowest rank of each, paired by round: what the call adds from the later rank's arrival on. TP
does not wait for the late rank and CP does, but neither is charged for the skew itself, which both graphs hold on the
late rank: the sum over ranks that ends a served layer waits for that rank under TP too. What the call adds on an early
rank, CP's wait included, stands beside it. No other work joins the ranks: under TP each runs through its layers alone.

Back-to-back figures are of the same calls in a graph of their own, timed in the same alternating rounds.

Runs where torch, triton and tqdm are all there is: `python3 -m m3cp.in_layer --out in_layer.json`.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from m3cp import compiled, doctor, records, sweep, traffic
from m3cp.shapes import IndexerShape, Point, require, tokens_text

SKEWS_US = (0.0, 5.0, 20.0)
SHAPES = {"cuda": ((8192, 8), (131_072, 8)), "cpu": ((576, 2), (1024, 2))}  # (context tokens, batch): near break-even, far above
MAX_CONTEXT = {"cuda": 131_072, "cpu": 1024}
LAYERS = {"cuda": 8, "cpu": 2}  # of a graph at least; a cold rotation may need more
ROUNDS = {"cuda": 21, "cpu": 5}
DRAWS = 1000
# MiniMax-M3's experts, as `MiniMaxM3VLTextConfig` of transformers 5.17 has them: three products of this width each,
# four routed ones a token and the one that all tokens share.
EXPERT_WIDTH, EXPERTS_A_TOKEN = 3072, 4 + 1
CPU_WEIGHT_BYTES = 1 << 20
NOTE = (
    "Microseconds a layer, median over the rounds (95%). In the layer: the slowest rank's time of layers with the call minus that of layers\n"
    "without it, so from the later rank's arrival on; the skew is in both. On the early rank: the same of rank 0 alone, with CP's wait for\n"
    "the late rank. Skew found: the late rank's layers without the call minus rank 0's. CP - TP: of the same rounds."
)


@dataclass
class Timed:
    """One Point at one skew; samples are microseconds a layer, `[ranks][rounds]`, rounds in order.

    Args:
        point: as `Point.to_dict` has it.
        layers: of a graph, each with one call.
        check: of the ids, as a row has it.
        layer_us, bare_us: of layers with and without the call.
        alone_us: of calls back to back, the same at every skew.
        error: why there are no samples.
    """

    point: dict[str, Any]
    skew_us: float
    layers: int = 0
    check: dict[str, Any] = field(default_factory=dict)
    layer_us: list[list[float]] = field(default_factory=list)
    bare_us: list[list[float]] = field(default_factory=list)
    alone_us: list[list[float]] = field(default_factory=list)
    error: str = ""


def _slowest(rank_samples: Sequence[Sequence[float]]) -> list[float]:
    return [max(together) for together in zip(*rank_samples, strict=True)]


def _less(a: Sequence[float], b: Sequence[float]) -> list[float]:
    return [x - y for x, y in zip(a, b, strict=True)]


def interval(samples: Sequence[float]) -> tuple[float, float, float]:
    """The median and its 95% interval by a bootstrap over the rounds; the same samples give the same numbers."""
    rng = random.Random(0)
    drawn = sorted(statistics.median(rng.choices(samples, k=len(samples))) for _ in range(DRAWS))
    return statistics.median(samples), drawn[round(0.025 * (DRAWS - 1))], drawn[round(0.975 * (DRAWS - 1))]


def figures(found: Sequence[Timed]) -> list[dict[str, tuple[float, float, float]]]:
    """(median, low, high) of each figure in microseconds, a dict for each of `found`; empty where it has no samples.

    `in_layer`, `alone` (back to back), `early` (on rank 0), `skew` (as found), `bare` (a layer without the call); where TP
    was timed at the same shape and skew also `over_tp` and `over_tp_alone`, CP - TP in the layer and back to back.
    """
    base = {(t.skew_us, *_shape_of(t)): t for t in found if t.point["arm"] == "tp" and not t.error}
    made = []
    for t in found:
        made.append({})
        if t.error:
            continue
        with_call, without = _slowest(t.layer_us), _slowest(t.bare_us)
        samples = {
            "in_layer": _less(with_call, without), "alone": _slowest(t.alone_us), "early": _less(t.layer_us[0], t.bare_us[0]),
            "skew": _less(t.bare_us[-1], t.bare_us[0]), "bare": without,
        }  # fmt: skip
        tp = base.get((t.skew_us, *_shape_of(t)))
        if tp is not None and tp is not t:
            samples["over_tp"] = _less(with_call, _slowest(tp.layer_us))
            samples["over_tp_alone"] = _less(samples["alone"], _slowest(tp.alone_us))
        made[-1] = {name: interval(values) for name, values in samples.items()}
    return made


def _shape_of(t: Timed) -> tuple[int, int]:
    return t.point["context_tokens"], t.point["batch"]


def weight_bytes(point: Point) -> int:
    """Bytes of weights that one rank streams in a layer for one token, bf16: projections, and its share of the experts.

    More tokens meet more experts, up to all 128; this much is 6.3 times the L2 of an H200 at P = 2 already.
    """
    return traffic.projection_bytes(point) + EXPERTS_A_TOKEN * 3 * traffic.HIDDEN * EXPERT_WIDTH * 2 // point.world


def points(device: str, ranks: int, shapes: Sequence[tuple[int, int]]) -> list[Point]:
    """TP, CP gathered and CP replicated at each (context tokens, batch): one launch over captured graphs on GPUs, a toy
    in the staged form on a CPU.

    Raises:
        ValueError: a shape that a Point refuses.
    """
    common: dict[str, Any] = dict(world=ranks, max_context=MAX_CONTEXT[device])
    if device == "cpu":
        common |= dict(form="staged", cache="warm", launch="eager", shape=IndexerShape(head_dim=64, block_size=64, topk=4))
    else:
        common |= dict(form="one_launch", cache="cold", launch="graph")
    made = []
    for context, batch in shapes:
        tp = Point(context, batch, arm="tp", **common)
        made += [tp, *(tp.replace(arm="cp", exchange="symmetric", queries=queries) for queries in ("gathered", "replicated"))]
    return made


class Layer:
    """What stands before the call in a layer of this rank: the streaming read, and the wait where this rank is late.

    Args:
        weights: bytes that the read takes; rounded down to whole pages of index keys, one at least.
        skews_us: of the waits, each compiled here.

    Raises:
        RuntimeError: the read's checksum is not that of the bytes.
    """

    def __init__(self, place, weights: int, skews_us: Sequence[float], seed: int = 98):
        import torch

        from m3cp import inputs, timing
        from m3cp.kernels import page_read

        self._place, shape = place, IndexerShape()
        self.late = place.peers.rank == place.peers.world - 1
        pages = max(1, weights // shape.key_bytes("bf16"))
        self.bytes = pages * shape.key_bytes("bf16")
        copies = 1 + timing.COLD_OVER_LLC * place.llc_bytes // self.bytes if place.on_gpu else 1
        self._buffer = inputs.make_pool(shape, torch.bfloat16, place.device, pages=pages * copies, seed=seed)
        every = torch.arange(pages * copies, dtype=torch.int32, device=place.device)
        self._lists = every.view(copies, pages).unbind()
        self._reader = page_read.readers(place.device)[-1]
        self._out = torch.empty(page_read.partials(place.device, self._reader), dtype=torch.int32, device=place.device)
        self._read = page_read.page_read
        for number, pages_of_it in enumerate(self._lists):
            self.read(number)
            if int(self._out.sum(dtype=torch.int64)) % 2**32 != page_read.checksum(self._buffer, pages_of_it):
                raise RuntimeError(f"the streaming read of {self.bytes} bytes did not read them all")
        if place.on_gpu and self.late:
            from m3cp.kernels.spin import spin, spins_a_us

            self._spin, rate = spin, spins_a_us(place.device)
            self._counts = {us: torch.tensor([[int(us * rate)]], dtype=torch.int32, device=place.device) for us in skews_us}
            self._turn = torch.zeros(1, dtype=torch.int32, device=place.device)
            for us in skews_us:
                self.wait(us)

    def read(self, number: int) -> None:
        """The streaming read of layer `number`."""
        self._read(self._buffer, self._lists[number % len(self._lists)], self._out, reader=self._reader)

    def wait(self, us: float) -> None:
        """Be late by `us` microseconds."""
        if self._place.on_gpu:
            self._spin(self._counts[us], self._turn, column=0)
        else:
            time.sleep(us / 1e6)

    def steps(self, skew_us: float, calls: Sequence[Callable[[], Any] | None]) -> list[Callable[[], Any]]:
        """The steps of one layer a call, in order; a call that is None is left out."""
        made: list[Callable[[], Any]] = []
        for number, call in enumerate(calls):
            made.append(lambda number=number: self.read(number))
            if skew_us and self.late:
                made.append(lambda: self.wait(skew_us))
            if call is not None:
                made.append(call)
        return made


def body(place, job: dict[str, Any]) -> None:
    """What a rank does: one shape after the other; rank 0 leaves what was found in the scratch folder."""
    from m3cp import worker

    todo = [Point.from_dict(p) for p in job["points"]]
    session = worker.Sweep(place, job)
    layer = place.peers.together(lambda: Layer(place, job["weight_bytes"], job["skews_us"]))
    found: list[Timed] = []
    for shape in dict.fromkeys((p.context_tokens, p.batch) for p in todo):
        together = [p for p in todo if (p.context_tokens, p.batch) == shape]
        try:
            found += timed(session, layer, together, todo, job)
        except worker.Failed as error:
            found += [Timed(p.to_dict(), us, error=str(error)) for p in together for us in job["skews_us"]]
        gc.collect()
        if place.peers.rank == 0:
            write(Path(job["scratch"]) / "result.json", [asdict(t) for t in found])


def timed(session, layer: Layer, arms_points: Sequence[Point], ahead: Sequence[Point], job: dict[str, Any]) -> list[Timed]:
    """Points over the same inputs, checked and then timed at every skew in alternating rounds.

    Args:
        session: the `worker.Sweep` whose pool and checks serve here.
        ahead: all Points of the job.

    Raises:
        worker.Failed: a step that failed for all of them; what fails for one Point is its `error`.
    """
    from m3cp import inputs, timing, worker

    place, agree = session.place, session.peers.together
    first, skews, device = arms_points[0], job["skews_us"], session.place.device.type
    pool = session.pool(list(arms_points), iter(ahead))
    room = max(1, pool.shape[0] // inputs.pages_of_a_cache(first))
    lightest = worker.lightest_bytes(list(arms_points))
    plan = timing.plan_caches(first.cache, lightest, place.llc_bytes, room=room, least_calls=LAYERS[device])
    if plan.evict:
        raise worker.Failed(f"shapes={first.context_tokens}x{first.batch}: {timing.MOST_CALLS} layers do not make its caches cold; allowed: longer contexts or larger batches")
    problem = agree(lambda: inputs.build(first, place.device, caches=plan.caches, pool=pool))
    agree(lambda: worker.refuse_constants(problem))
    expected = agree(lambda: worker.Expected(problem, plan, worker.CHECKED_BLOCKS[device]))
    arms, errors = {}, {}
    for point in arms_points:
        try:
            arms[point] = session.ready(point, problem, plan, expected)
        except worker.Failed as error:
            errors[point] = str(error)
    agree(lambda: worker.refuse_same_path(list(arms.values())))
    todo: dict[tuple, tuple[list, Any]] = {("bare", us): (layer.steps(us, [None] * plan.calls), None) for us in skews}
    for point, arm in arms.items():
        todo["alone", point] = arm.calls, arm
        todo |= {("layer", us, point): (layer.steps(us, arm.calls), arm) for us in skews}
    graphs, runs = [], {}
    for name, (steps, arm) in todo.items():
        if place.on_gpu:
            graph = agree(lambda steps=steps: timing.capture(steps))
            graphs.append(graph)
            once = graph.replay
        else:
            once = lambda steps=steps: [step() for step in steps]  # noqa: E731
        agree(once)
        if arm is not None:
            arm.check["rows"] += session.agreed(agree(lambda arm=arm: worker.checked(arm)))["rows"]
        runs[name] = _run(place, first.cache, once, plan.calls)
    samples = agree(lambda: timing.measure(runs, job["rounds"]))
    for arm in arms.values():
        arm.check["rows"] += session.agreed(agree(lambda arm=arm: worker.checked(arm)))["rows"]
    ranks = session.peers.exchange(list(samples.values()))
    of = {name: [rank[i] for rank in ranks] for i, name in enumerate(samples)}
    for graph in graphs:
        graph.reset()
    for us in skews:
        agree(lambda us=us: timing.refuse_impossible(layer.bytes, timing.median(_slowest(of["bare", us])), place.peak_gbs))
    return [
        Timed(p.to_dict(), us, error=errors[p]) if p in errors
        else Timed(p.to_dict(), us, plan.calls, arms[p].check, of["layer", us, p], of["bare", us], of["alone", p])
        for p in arms_points for us in skews
    ]  # fmt: skip


def _run(place, cache: str, once: Callable[[], Any], layers: int) -> Callable[[], list[float]]:
    """A function that times some replays (a CPU: one) and returns one sample, microseconds a layer; ranks come here together."""
    from m3cp import timing

    place.peers.beat()
    if not place.on_gpu:
        clock = timing.timed_calls([once], align=place.align)
        return lambda: [us / layers for us in clock()]
    once_us = max(place.peers.exchange(place.quick_us(once, 3)))
    replays, _ = timing.replay_counts(cache, once_us)
    return timing.timed_replays(once, calls=layers, replays=replays, align=place.align, hold=place.hold, timer=timing.DeviceTimer())


def write(path: Path, value: Any) -> None:
    """`value` as JSON, whole or not at all: what stood there stays until the new one is complete."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_suffix(".new")
    new.write_text(json.dumps(value, indent=1))
    os.replace(new, path)


def table(found: Sequence[Timed], of: Sequence[dict[str, tuple[float, float, float]]]) -> list[str]:
    """A line a Point and skew with its `figures`, and what the columns are."""
    columns = {"alone": "back to back", "in_layer": "in the layer", "early": "on the early rank", "over_tp_alone": "CP - TP back to back", "over_tp": "CP - TP in the layer"}
    lines = [f"{'context, batch':14} {'path':13} {'skew':>6} {'found':>8}" + "".join(f" {words:>24}" for words in columns.values())]
    for t, figure in zip(found, of, strict=True):
        context, batch = _shape_of(t)
        path = "TP" if t.point["arm"] == "tp" else f"CP {t.point['queries']}"
        rest = f"{figure['skew'][0]:8.2f}" + "".join(f" {_text(figure.get(name)):>24}" for name in columns) if figure else t.error
        lines.append(f"{f'{tokens_text(context)}, {batch}':14} {path:13} {t.skew_us:6g} {rest}")
    return [*lines, NOTE]


def _text(figure: tuple[float, float, float] | None) -> str:
    return "{:.2f} ({:.2f} to {:.2f})".format(*figure) if figure else "-"


def main(
    device: str | None = None,
    *,
    ranks: int | None = None,
    shapes: Sequence[tuple[int, int]] = (),
    skews_us: Sequence[float] = SKEWS_US,
    weights: int | None = None,
    rounds: int | None = None,
    out: Path | None = None,
    commit: str | None = None,
) -> int:
    """Time TP and CP in layers of `ranks` processes, print the table, write it to `out`; 0 when every Point has its figures.

    Args:
        device: "cuda" or "cpu"; None for what is here.
        ranks: 2, 4 or 8; None is all that fit.
        shapes: (context tokens, batch); none are those of `SHAPES`.
        skews_us: waits of the last rank, microseconds.
        weights: bytes of the streaming read; None is `weight_bytes` (on a CPU 1 MiB).
        rounds: of all graphs; None is that of `ROUNDS`.
        out: a JSON file for samples, figures and provenance.
        commit: of this code, where the copy that runs has no git history.

    Raises:
        doctor.NodeError: a device that is not here.
        ValueError: naming the argument.
        sweep.WorkersFailed: a rank failed; the message names it.
    """
    from tqdm import tqdm

    device = doctor.sweep_device(device)
    gpus = len(doctor.devices()) if device == "cuda" else 2
    ranks = ranks or max((w for w in (2, 4, 8) if w <= gpus), default=1)
    fits = ranks in (2, 4, 8) and (device == "cpu" or ranks <= gpus)
    require("ranks", ranks, fits, f"2, 4 or 8, and at most the {gpus} GPUs here" if device == "cuda" else "2, 4 or 8")
    require("skews_us", list(skews_us), len(set(skews_us)) == len(skews_us) > 0 and all(0 <= us <= 1e5 for us in skews_us), "different waits of 0 to 100000 us")
    require("rounds", rounds, rounds is None or rounds >= 3, "3 or more: an interval needs some")
    todo = points(device, ranks, shapes or SHAPES[device])
    require("shapes", list(shapes), len(set(todo)) == len(todo), "different (context tokens, batch) pairs")
    weights = weights if weights is not None else weight_bytes(todo[0]) if device == "cuda" else CPU_WEIGHT_BYTES
    require("weights", weights, weights >= IndexerShape().key_bytes("bf16"), f"at least {IndexerShape().key_bytes('bf16')} bytes")
    facts = sweep.job_facts(device)
    provenance = {**doctor.provenance(), "code_hash": records.code_hash(), **sweep.git_state(commit), "command": "m3cp.in_layer"}
    job = {
        **facts, "points": [p.to_dict() for p in todo], "skews_us": list(skews_us), "weight_bytes": weights,
        "rounds": rounds or ROUNDS[device], "provenance": provenance,
    }  # fmt: skip
    print(f"{len(todo)} Points at {len(skews_us)} skews behind a read of {doctor.size(weights)}, {ranks} ranks of {facts['node']}", flush=True)
    if device == "cuda":
        compiled.ahead(todo)
    found: list[Timed] = []
    try:
        with tqdm(total=len(todo) * len(skews_us), unit="figure", mininterval=0.5) as bar:

            def look(scratch: Path) -> None:
                with contextlib.suppress(OSError):
                    found[:] = [Timed(**t) for t in json.loads((scratch / "result.json").read_text())]
                bar.update(len(found) - bar.n)

            sweep.launch("m3cp.in_layer", job, ranks, follow=look)
    finally:  # what was found before a rank failed is not lost
        of = figures(found)
        print("\n".join(table(found, of)), flush=True)
        if out is not None:
            summary = {k: job[k] for k in ("node", "weight_bytes", "rounds", "provenance")} | {"ranks": ranks, "late_rank": ranks - 1}
            write(Path(out), summary | {"points": [asdict(t) | {"figures": figure} for t, figure in zip(found, of, strict=True)]})
    return 0 if len(found) == len(todo) * len(skews_us) and not any(t.error for t in found) else 1


def _shape(text: str) -> tuple[int, int]:
    try:
        context, batch = map(int, text.split("x"))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: must be context tokens x batch, such as 8192x8") from None
    return context, batch


def _arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python3 -m m3cp.in_layer", description="What TP and CP take inside a layer: cold, behind streamed weights, one rank late.")
    parser.add_argument("--device", help="cuda or cpu")
    parser.add_argument("--ranks", type=int, help="processes, one a GPU; default: all that fit")
    parser.add_argument("--shapes", type=_shape, nargs="*", default=[], metavar="8192x8", help="context tokens x batch; default: two")
    parser.add_argument("--skews", type=float, nargs="*", default=list(SKEWS_US), dest="skews_us", help="microseconds that the last rank is late")
    parser.add_argument("--weights", type=int, help="bytes of the streaming read; default: one token's weights of an M3 layer on one rank")
    parser.add_argument("--rounds", type=int, help="in which all graphs alternate")
    parser.add_argument("--out", type=Path, help="a JSON file for samples, figures and provenance")
    parser.add_argument("--commit", help="of this code, where the copy that runs has no git history")
    return parser.parse_args(argv)


if __name__ == "__main__":
    if len(sys.argv) == 2 and sys.argv[1].endswith("job.json"):
        from m3cp import worker

        worker.run(json.loads(Path(sys.argv[1]).read_text()), body)
    try:
        sys.exit(main(**vars(_arguments(sys.argv[1:]))))
    except (doctor.NodeError, ValueError, sweep.WorkersFailed) as problem:
        print(f"m3cp.in_layer: {problem}", file=sys.stderr)
        sys.exit(2)
