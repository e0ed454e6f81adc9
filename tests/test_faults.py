"""Sweeps in which something breaks: the rank and the Point are named, the rest is measured, nothing is lost."""

import functools
import itertools
import os
import resource
import signal
import tempfile
import time
from pathlib import Path

import drivers
import pytest
import torch

from m3cp import doctor, exchange, records, sweep, timing, worker
from m3cp import grid as planning
from m3cp.shapes import Point

GRID = {
    "contexts": [1024, 2176, 3072],
    "batches": [1],
    "worlds": [2],
    "arms": ["tp", "cp", "page_read"],
    "queries": ["gathered"],
    "max_context": 4096,
    "cache": "warm",
}
POINTS = planning.expand(GRID, device="cpu")


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    torch.set_num_threads(1)  # a fork must not enter this process's pool of threads


def broken(where, what, rank=1, arm="cp"):
    """A `spoil`: that rank does `what` when it makes the arm of that context."""

    def spoil(me):
        make = worker.make_decode
        if me == rank:
            worker.make_decode = lambda point, *rest: (
                what() if (point.context_tokens, point.arm) == (where, arm) else make(point, *rest)
            )

    return spoil


def stand_still():
    time.sleep(600)


@pytest.mark.parametrize(
    ("what", "words"),
    [
        (lambda: os._exit(3), "rank 1: ended with exit status 3"),
        (lambda: os.kill(os.getpid(), signal.SIGKILL), "rank 1: ended with signal 9 (killed; by the system where memory ran out)"),
        (stand_still, "no rank has moved for 3 s; rank 1 said nothing and stands at worker.py, line"),
    ],
    ids=["exits", "is killed", "hangs"],
)  # fmt: skip
def test_the_point_at_fault_fails_by_itself_and_the_sweep_goes_on(tmp_path, what, words):
    out, log, begun = tmp_path / "run", tmp_path / "log", time.monotonic()
    broke = drivers.driver(GRID, out, log, spoil=broken(2176, what), stall_s=3.0)
    family, status = [], None
    while status is None:
        family, status = list({*family, *drivers.family(broke.pid)}), broke.poll()
        time.sleep(0.05)
    assert status == sweep.FAILED and time.monotonic() - begun < 60, log.read_text()
    assert drivers.wait_until_gone(family, 1.0) == []
    whole, rows = drivers.check_rows(out / records.ROWS_FILE, b"")
    (failed,) = [r for r in rows if r.status == "failed"]
    assert words in failed.error and (failed.point.arm, failed.point.context_tokens) == ("cp", 2176)
    assert {r.point for r in rows if r.status == "ok"} == set(POINTS) - {failed.point}
    alone = {r.point.arm for r in rows if "alone_after" in r.provenance}
    assert alone == {"tp", "cp", "page_read"}, "the group's other Points were measured without the one at fault"
    said = log.read_text()
    assert f"     1 failed\n         {failed.point.label}: {words}" in said
    mended = drivers.driver(GRID, out, log)
    assert mended.wait() == 0, log.read_text()
    _, rows = drivers.check_rows(out / records.ROWS_FILE, whole)
    assert [r.point for r in rows[len(POINTS) :]] == [failed.point] and rows[-1].status == "ok"


def test_workers_that_never_start_end_the_sweep(tmp_path):
    log = tmp_path / "log"
    broke = drivers.driver(GRID, tmp_path / "run", log, spoil=lambda rank: os._exit(5))
    assert broke.wait() == sweep.FAILED
    assert "2 ranks ended 3 times before their first Point: rank 0: ended with exit status 5" in log.read_text()
    assert f"{len(POINTS):>6} not reached" in log.read_text() and not (tmp_path / "run" / records.ROWS_FILE).exists()


@pytest.mark.parametrize(
    ("peer", "words"),
    [
        (lambda *_: os._exit(7), "rank 1: ended with exit status 7"),
        (lambda *_: stand_still(), "rank 0: RuntimeError: rank 0 waited 2.0 s for rank 1 in a symmetric gather"),
    ],
    ids=["dies", "stands still"],
)
def test_a_peer_that_is_gone_in_the_symmetric_exchange_is_named(tmp_path, peer, words):
    grid = {**GRID, "contexts": [2176], "exchanges": ["symmetric"]}

    def spoil(rank):
        exchange._HOST_WAIT_S, worker.FAILED_PATIENCE_S = 2.0, 2.0
        if rank == 1:
            exchange._gather_on_host = peer

    out, log, begun = tmp_path / "run", tmp_path / "log", time.monotonic()
    status = drivers.driver(grid, out, log, spoil=spoil, stall_s=30.0).wait()
    assert status == sweep.FAILED and time.monotonic() - begun < 45, log.read_text()
    rows = {r.point.arm: r for r in records.load(out)}
    assert words in rows["cp"].error, rows["cp"].error
    assert rows["tp"].status == rows["page_read"].status == "ok"


def test_two_drivers_on_one_folder(tmp_path, monkeypatch):
    out, logs, go = tmp_path / "run", [tmp_path / "log0", tmp_path / "log1"], tmp_path / "go"

    def waits(rank):
        deadline = time.monotonic() + 60
        while not go.exists() and time.monotonic() < deadline:
            time.sleep(0.01)

    first = drivers.driver(GRID, out, logs[0], spoil=waits)
    while not (out / records.ROWS_FILE).exists():
        time.sleep(0.01)
    monkeypatch.setattr(records, "locked", functools.partial(records.locked, patience_s=0.2))
    second = drivers.driver(GRID, out, logs[1])
    assert second.wait() == sweep.NOT_MEASURED
    assert "rows.jsonl: another driver is writing there; wait for it, or give this one a folder" in logs[1].read_text()
    go.touch()
    assert first.wait() == 0, logs[0].read_text()
    _, rows = drivers.check_rows(out / records.ROWS_FILE, b"")
    assert {r.point for r in rows} == set(POINTS)


def test_a_disk_that_fills_up_ends_the_sweep_in_words_and_loses_nothing(tmp_path):
    out, log = tmp_path / "run", tmp_path / "log"
    full = drivers.driver({**GRID, "contexts": [1024]}, out, log)
    assert full.wait() == 0
    before = (out / records.ROWS_FILE).read_bytes()

    def no_room(rank):
        resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + 5000, resource.RLIM_INFINITY))

    full = drivers.driver(GRID, out, log, spoil=no_room)
    assert full.wait() == sweep.NOT_MEASURED
    assert "rows.jsonl: can't be written: File too large; what it held is still there" in log.read_text()
    whole, _ = drivers.check_rows(out / records.ROWS_FILE, before)
    assert drivers.driver(GRID, out, log).wait() == 0
    _, rows = drivers.check_rows(out / records.ROWS_FILE, whole)
    assert {r.point for r in rows if r.status == "ok"} == set(POINTS)


def test_a_folder_that_cannot_be_written_is_an_error_before_anything_is_measured(tmp_path):
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        Path(folder).chmod(0o555)

        def body():
            if os.geteuid() == 0:
                os.seteuid(65534)  # root may write anywhere
            try:
                with records.locked(folder):
                    return 0
            except records.CannotWrite as error:
                print(error)
                return 9

        assert drivers.Forked(body, tmp_path / "log").wait() == 9
    assert "rows.jsonl: can't be written: Permission denied" in (tmp_path / "log").read_text()


@pytest.mark.parametrize(
    ("held", "words"),
    [
        (b'{"point": 3}\n', "line 1: schema=None"),
        (b"a diary of mine\n", "line 1: Expecting value"),
        (b'{"schema":2}\n', "line 1: schema=2: this version reads rows of schema 1"),
        (b"\0" * 64 + b"\n", "line 1: Expecting value"),
    ],
)  # fmt: skip
def test_a_corrupt_or_foreign_rows_file_is_refused_and_left_alone(tmp_path, held, words):
    path = tmp_path / records.ROWS_FILE
    path.write_bytes(held)
    with pytest.raises(ValueError, match="rows.jsonl, ") as refusal:
        sweep.main(GRID, device="cpu", out=tmp_path)
    assert words in str(refusal.value) and path.read_bytes() == held


def rss_bytes(pid):
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmRSS")), 0)


MOST_APPENDS = 5  # of one row that a Point of no length may take as long as


@pytest.mark.parametrize("count", [1000, pytest.param(10_000, marks=pytest.mark.slow)])
def test_points_of_no_length_cost_little(tmp_path, count):
    out, log, syncs = tmp_path / "run", tmp_path / "log", tmp_path / "syncs"
    points = [
        Point(1 + n // 100, 1 + n % 100, form="staged", max_context=4096, cache="warm", launch="eager") for n in range(count)
    ]

    def at_once(rank):
        def group(self, points, ahead):
            samples = {"samples_us": [1.0] * 7, "rank_samples_us": [[1.0] * 7], "check": {"passed": True, "rows": 1}}
            return [records.Row(p, "ok", p.arm, "here", 1, provenance=self.provenance(), **samples) for p in points]

        def counted(file):
            with open(syncs, "a") as counts:
                counts.write(".")
            fsync(file)

        worker.Sweep.group, fsync, os.fsync = group, os.fsync, counted

    def append_on():  # beside the sweep, so that both feel what else the machine does
        row = records.Row(points[0], "ok", "tp", "here", 1, provenance=doctor.provenance(), samples_us=[1.0] * 7, check={"passed": True})
        while True:
            records.append(tmp_path / "beside", row, sync=False)

    begun, beside = time.monotonic(), drivers.Forked(append_on, tmp_path / "beside.log")
    try:
        driver = drivers.driver(points, out, log, spoil=at_once)
        grown, appended, held = records.Growth(out), records.Growth(tmp_path / "beside"), []
        while driver.poll() is None:
            held.append((grown.look(), appended.look(), time.monotonic(), rss_bytes(driver.pid)))
            time.sleep(0.05)
    finally:
        beside.kill()
        beside.wait()
    assert driver.returncode == 0, log.read_text()
    assert sum(1 for _ in records.scan(out)) == count
    assert len(syncs.read_text()) < 3 + (time.monotonic() - begun) / worker.SYNC_S, "the disk is waited for more often than once a second"
    steps = [(m, (k - j) / (m - n), (t - s) / (m - n) * 1e3) for (n, j, s, _), (m, k, t, _) in itertools.pairwise(held) if n and m > n]
    appends, each_ms = (timing.median(values) for values in zip(*[step[1:] for step in steps], strict=True))
    early, late = (timing.median([a for rows, a, _ in steps if low < rows / count <= high]) for low, high in ((0, 0.5), (0.5, 1)))
    print(f"{each_ms:.2f} ms a point, as {appends:.1f} appends (first half {early:.1f}, second {late:.1f}); {len(steps)} stretches")
    assert appends <= MOST_APPENDS
    if count == 10_000:
        assert each_ms <= 5 and late < 2 * early, "the cost of a Point grows with the rows"
    early, late = (max(size for rows, *_, size in held if low < rows / count <= high) for low, high in ((0.1, 0.5), (0.5, 1)))
    assert late - early < 4 << 20, "the driver's memory grows with the rows"
