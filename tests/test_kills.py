"""Sweeps that are killed: whatever dies, whenever, rows stay whole, nobody stays behind, the same command goes on (P03)."""

import os
import random
import signal
import time

import drivers
import torch

from m3cp import grid as planning
from m3cp import records

GRID = {
    "contexts": [1024, 2176, 3072],
    "batches": [1, 2],
    "worlds": [2],
    "arms": ["tp", "cp", "page_read"],
    "queries": ["gathered"],
    "max_context": 4096,
    "cache": "warm",
}
KILLS = 100


class Kills:
    """A sweep that is started again and again, and what must hold whenever its driver has ended."""

    def __init__(self, folder):
        self.folder, self.runs, self.drivers = folder, 0, 0
        self.points = set(planning.expand(GRID, device="cpu"))
        self.driver, self.family, self.before = None, [], b""

    @property
    def out(self):
        return self.folder / f"run{self.runs}"

    def start(self):
        self.driver, self.drivers = drivers.driver(GRID, self.out, self.folder / "log"), self.drivers + 1
        self.family = []

    def look(self):
        """The driver and its ranks that live now; all that ever lived are remembered."""
        now = drivers.family(self.driver.pid)
        self.family = list(dict.fromkeys([*self.family, *now]))
        return now

    def ended(self):
        """Check what a driver that has ended leaves behind; a run that is complete makes room for the next."""
        status, log = self.driver.wait(), (self.folder / "log").read_text()
        assert drivers.wait_until_gone(self.family, 3.0) == [], log
        self.before, rows = drivers.check_rows(self.out / records.ROWS_FILE, self.before)
        measured = {r.point for r in rows if r.status == "ok"}
        assert (measured == self.points) if status == 0 else (status == -signal.SIGKILL or self.points - measured), log
        if measured == self.points:
            self.runs, self.before = self.runs + 1, b""
        self.driver = None


def test_a_hundred_kills_at_random_moments(tmp_path):
    torch.set_num_threads(1)  # a fork must not enter this process's pool of threads
    chance, begun = random.Random(10), time.monotonic()
    sweeps, killed = Kills(tmp_path), {"driver": 0, "rank": 0, "all": 0}
    while sum(killed.values()) < KILLS:
        if sweeps.driver is None:
            sweeps.start()
        moment = time.monotonic() + chance.uniform(0, 1.6)
        while time.monotonic() < moment and sweeps.driver.poll() is None:
            time.sleep(0.01)
        living, target = sweeps.look(), chance.choice([name for name in killed if killed[name] == min(killed.values())])
        victims = {"driver": living[:1], "rank": chance.sample(living[1:], 1) if living[1:] else [], "all": living}[target]
        if sweeps.driver.poll() is None and victims:
            for pid in victims:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    pass
            killed[target] += 1
        if target != "rank" and victims or sweeps.driver.poll() is not None:
            sweeps.ended()
    while sweeps.driver is None or sweeps.driver.wait() != 0:  # the same command goes on and finishes
        if sweeps.driver:
            sweeps.ended()
        sweeps.start()
        assert sweeps.drivers < 2 * KILLS
    last = sweeps.runs
    sweeps.ended()
    lasted = time.monotonic() - begun
    print(f"{killed} of {sweeps.drivers} drivers in {lasted:.0f} s, {sweeps.runs} runs completed")
    assert sweeps.runs == last + 1 and min(killed.values()) > KILLS // 6 and lasted < 240
