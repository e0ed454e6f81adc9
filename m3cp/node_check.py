"""The node's ceilings before anything is believed: bandwidth against footprint, collective latency, right answers.

`run` starts workers and returns what they found, also written to `node_check.json`; the notebook `00_node_check`
shows it. Every figure comes with its samples, and with the check that was made in the same process.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from m3cp import doctor, records, sweep, timing
from m3cp.shapes import IndexerShape, Point

MIB = 1 << 20
RESULT_FILE = "node_check.json"
LARGEST_BYTES = {"cuda": 2048 * MIB, "cpu": 512 * MIB}
READ_BYTES = {"cuda": 256 * MIB, "cpu": 8 * MIB}  # a small footprint is read again and again up to so many bytes a call
PAYLOADS = tuple(1 << n for n in range(10, 23))  # bytes a rank, 1 KiB to 4 MiB
GATHERS_A_GRAPH = 16
CHAINS = (8, 136)  # nodes of two graphs: what 128 more of them take tells a node's cost without the graph's own


def run(
    device: str | None = None, worlds: Sequence[int] | None = None, quick: bool = False, out: Path | str | None = None, curves: bool = True,
    commit: str | None = None,
) -> dict[str, Any]:
    """Check this node: workers over one rank, then over each larger world that fits.

    Args:
        device: "cuda", "cpu" or None for what the machine has.
        worlds: numbers of ranks to check; those that don't fit are listed under "skipped", in words.
        quick: fewer footprints and payloads; under a minute on a CPU.
        out: folder for `node_check.json`; None writes none.
        curves: whether to read the curve of bandwidth against footprint, once.
        commit: of this code, where the copy that runs has no git history.

    Returns:
        {"node", "last_level_bytes", "datasheet_gbs", "curve", "collectives", "gaps", "checks", "skipped", "provenance"}:
        lists of flat dicts, one a measurement.

    Raises:
        sweep.WorkersFailed: a rank failed or died; the message names it.
        doctor.NodeError: a machine that can't measure what was asked.
    """
    device = doctor.sweep_device(device)
    facts = sweep.job_facts(device)
    ranks = len(facts["devices"]) if device == "cuda" else doctor.cpu().cores
    found: dict[str, Any] = {
        "node": facts["node"],
        "last_level_bytes": facts["devices"][0]["last_level_bytes"]
        if device == "cuda"
        else facts["cpu_last_level_bytes"],
        "curve": [],
        "collectives": [],
        "gaps": [],
        "checks": [],
        "skipped": [],
        "provenance": {
            **doctor.provenance(),
            "code_hash": records.code_hash(),
            **sweep.git_state(commit),
            "time_utc": datetime.now(UTC).isoformat(timespec="seconds"),
        },
    }
    for world in worlds or (1, 2):
        reason = doctor.skip_reason(world, device, gpus=ranks, cores=ranks)
        if reason:
            found["skipped"].append({"world": world, "reason": reason})
            continue
        points = check_points(world, device)
        job = {**facts, "quick": quick, "curve": curves and not found["curve"], "points": [p.to_dict() for p in points]}
        results: dict[str, Any] = {}

        def look(scratch: Path, results: dict[str, Any] = results) -> None:
            if not results and (scratch / "result.json").exists():
                results.update(json.loads((scratch / "result.json").read_text()))

        sweep.launch("m3cp.node_check", job, world, follow=look)
        if not results:
            raise sweep.WorkersFailed(f"{world} ranks ended without a result")
        for name in ("curve", "collectives", "gaps", "checks"):
            found[name] += results[name]
        found["datasheet_gbs"] = results["datasheet_gbs"]
    if out is not None:
        Path(out).mkdir(parents=True, exist_ok=True)
        (Path(out) / RESULT_FILE).write_text(json.dumps(found, indent=1))
    return found


def check_points(world: int, device: str) -> list[Point]:
    """One Point a path: a ragged batch, two query tokens, a padding row."""
    shape = dict(mix="log_uniform", query_len=2, rows_padded=1, max_context=16_384, cache="warm")
    launch = "graph" if device == "cuda" else "eager"
    tp = Point(5000, 3, arm="tp", form="staged", world=world, launch=launch, **shape)
    if world == 1:
        return [tp]
    cp = tp.replace(arm="cp", exchange="collective", queries="gathered")
    return [tp, cp, cp.replace(queries="replicated"), tp.replace(arm="cp_local")]


def footprints(device: str, quick: bool) -> list[int]:
    """Bytes of the curve's footprints: powers of two from 1 MiB; every other one when quick."""
    top = LARGEST_BYTES[device] // (4 if quick else 1)
    sizes = [MIB << n for n in range(20) if MIB << n <= top]
    return sizes[::2] if quick else sizes


def curve(place, quick: bool) -> list[dict[str, Any]]:
    """Rates of reading a footprint again and again, pages in random and in rising order, best reader, one rank's."""
    import torch

    from m3cp import inputs
    from m3cp.kernels import page_read as op

    shape, sizes = IndexerShape(), footprints(place.device.type, quick)
    page = shape.key_bytes("bf16")
    pool = inputs.make_pool(shape, torch.bfloat16, place.device, pages=sizes[-1] // page, seed=3)
    inputs.refuse_constant("cache", pool[:2])
    random = torch.randperm(pool.shape[0], generator=torch.Generator().manual_seed(4)).to(torch.int32)
    found = []
    for size in sizes:
        pages = size // page
        again = max(1, READ_BYTES[place.device.type] // size)
        for order, ids in (("random", random[random < pages]), ("sequential", torch.arange(pages, dtype=torch.int32))):
            ids = ids.repeat(again).to(place.device)
            expected = op.checksum(pool, ids)
            best: dict[str, Any] = {}
            for reader in op.readers(place.device):
                out = torch.empty(op.partials(place.device, reader), dtype=torch.int32, device=place.device)

                def call(reader=reader, out=out, ids=ids):
                    return op.page_read(pool, ids, out, reader=reader)

                call()
                if int(out.sum(dtype=torch.int64)) % 2**32 != expected:
                    raise ValueError(f"page_read of {pages} pages found another sum than plain torch")
                samples = place.samples_us(call, 5)
                us = timing.median(samples)
                if not best or us < best["us"]:
                    best = {"us": us, "samples_us": samples}
            rate = ids.numel() * page / (best["us"] * 1e3)
            found.append({"footprint_bytes": size, "order": order, "gbs": rate, "reads": again, **best})
            place.peers.beat()
    return found


def collectives(place, quick: bool) -> list[dict[str, Any]]:
    """Latency of an all-gather by payload, microseconds: the slowest rank, median; inside a graph on a GPU."""
    import torch

    from m3cp.exchange import CollectiveExchange

    exchange, world, found = CollectiveExchange(), place.peers.world, []
    rounds = 10 if quick else 30
    for payload in PAYLOADS[::3] if quick else PAYLOADS:
        mine = torch.randint(-(2**31), 2**31 - 1, (payload // 4,), dtype=torch.int32, device=place.device)
        everyone = torch.empty(world, payload // 4, dtype=torch.int32, device=place.device)

        def gather(everyone=everyone, mine=mine):
            exchange.gather(everyone, mine)

        gather()
        if not torch.equal(everyone[place.peers.rank], mine):
            raise ValueError(f"all-gather of {payload} bytes: rank {place.peers.rank} did not get its own words back")
        if place.on_gpu:
            graph = timing.capture([gather] * GATHERS_A_GRAPH)
            graph.replay()
            once = timing.timed_replays(
                graph.replay,
                calls=GATHERS_A_GRAPH,
                replays=4,
                align=place.align,
                hold=place.hold,
                timer=timing.DeviceTimer(),
            )
            mode = "graph"
        else:
            once, mode = timing.timed_calls([gather], align=place.align), "eager"
        samples = timing.slowest(place.peers.exchange(timing.measure({"gather": once}, rounds)["gather"]))
        found.append(
            {
                "world": world,
                "payload_bytes": payload,
                "launch": mode,
                "us": timing.median(samples),
                "samples_us": samples,
            }
        )
        if place.on_gpu:
            graph.reset()
    return found


def gaps(place) -> list[dict[str, Any]]:
    """What a node of a graph costs: chains of the smallest kernels, and of such kernels around an all-gather of 1 KiB.

    The second, less a kernel's share, is a collective with the idle time that it leaves on both sides. Microseconds a
    node, the slowest rank's, median; none on a CPU, which has no graphs.
    """
    import torch

    from m3cp.exchange import CollectiveExchange

    if not place.on_gpu:
        return []
    one = torch.zeros(1, dtype=torch.int32, device=place.device)
    mine = torch.arange(256, dtype=torch.int32, device=place.device)
    everyone = torch.empty(place.peers.world, 256, dtype=torch.int32, device=place.device)
    exchange = CollectiveExchange()

    def kernel() -> None:
        one.add_(1)

    def gather() -> None:
        exchange.gather(everyone, mine)
        one.add_(1)

    found = []
    for name, call in (("kernel", kernel), ("kernel and all-gather", gather))[: 1 if place.peers.world == 1 else 2]:
        call()
        runs = {}
        for nodes in CHAINS:
            graph = timing.capture([call] * nodes)
            graph.replay()
            runs[str(nodes)] = timing.timed_replays(
                graph.replay, calls=1, replays=4, align=place.align, hold=place.hold, timer=timing.DeviceTimer()
            )
        times = timing.measure(runs, 15)
        few, many = (timing.slowest(place.peers.exchange(times[str(nodes)])) for nodes in CHAINS)
        samples = [(b - a) / (CHAINS[1] - CHAINS[0]) for a, b in zip(few, many, strict=True)]
        found.append({"world": place.peers.world, "node": name, "us": timing.median(samples), "samples_us": samples})
    return found


def checks(place, points: list[Point]) -> list[dict[str, Any]]:
    """Each path once against the reference, called one by one and, on a GPU, replayed from a graph."""
    from m3cp import inputs, worker

    problem = inputs.build(points[0], place.device, caches=2, poison=True)
    plan = timing.CachePlan(2, 2, False, False)
    expected = worker.Expected(problem, plan, 10_000)
    found = []
    for point in points:
        arm = place.peers.together(lambda point=point: worker.prepare_decode(place, point, problem, plan, expected))

        def passes(arm=arm) -> list[dict[str, Any]]:
            for call in arm.calls:
                call()
            each = [arm.verify()]
            if place.on_gpu:
                graph = timing.capture(arm.calls)
                graph.replay()
                each.append(arm.verify())
                graph.reset()
            return each

        each = [c for rank in place.peers.exchange(place.peers.together(passes)) for c in rank]
        found.append(
            {
                "world": place.peers.world,
                "path": arm.path,
                "queries": point.queries,
                "stages": arm.stages,
                "rows": sum(c["rows"] for c in each),
                "mismatches": sum(c["mismatches"] for c in each),
                "passed": all(c["passed"] for c in each),
            }
        )
    return found


def body(place, job: dict[str, Any]) -> None:
    """What a rank of the node check does; rank 0 leaves the result in the scratch folder."""
    points = [Point.from_dict(p) for p in job["points"]]
    result = {
        "checks": checks(place, points),
        "collectives": collectives(place, job["quick"]) if place.peers.world > 1 else [],
        "gaps": gaps(place),
        "curve": curve(place, job["quick"]) if job["curve"] else [],
        "datasheet_gbs": place.peak_gbs,
    }
    if place.peers.rank == 0:
        path = Path(job["scratch"]) / "result.json"
        path.with_suffix(".new").write_text(json.dumps(result))
        path.with_suffix(".new").rename(path)


if __name__ == "__main__":
    from m3cp import worker

    worker.run(json.loads(Path(sys.argv[1]).read_text()), body)
