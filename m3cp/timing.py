"""One way to time: fixed counts, rounds that alternate the arms' order, and a sample that is the slowest rank's.

On GPUs several calls stand in one captured graph that is replayed many times a round; on a CPU calls are timed one by
one. Ranks are aligned on the device and nothing synchronises with the host between that and the start event. Counts
are the same on every rank, or a collective inside a call would wait for ever.
"""

from __future__ import annotations

import contextlib
import gc
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

COLD_OVER_LLC = 2  # a rotation is cold when it touches more than this many last-level caches before it returns
MOST_CALLS = 256  # of one rotation; where a cold one needs more, an evicting read stands between calls
EVICTED_CACHES = 16  # distinct caches behind an evicting read
WARM_CALLS, WARM_REPLAYS, WARM_ROUNDS = 8, 100, 7  # the protocol of the published table
COLD_ROUNDS = 11
COLD_ROUND_US = 15_000  # what a round of replays should last
EAGER_ROUNDS = 51  # on GPUs, where the host's time of launching is a wide distribution
EAGER_ARM_US = 600_000  # what an arm's rounds should last where every call is timed by itself
HOLD_CYCLES = 1_000_000  # of a wait, about half a millisecond, while the host enqueues a round


@dataclass(frozen=True)
class CachePlan:
    """How a group of arms meets its caches.

    Args:
        caches: distinct caches to rotate through.
        calls: calls of one rotation, a multiple of `caches`.
        evict: an evicting read stands before each call.
        cold: whether every arm of the group finds its keys in memory, not in a cache.
    """

    caches: int
    calls: int
    evict: bool
    cold: bool


def plan_caches(asked: str, rank_bytes: int, llc_bytes: int, *, room: int, least_calls: int = WARM_CALLS) -> CachePlan:
    """Choose the rotation for arms of which the lightest rank of the lightest arm reads `rank_bytes` a call.

    Args:
        asked: "cold" or "warm".
        rank_bytes: distinct index-key bytes of one call on that rank; 0 when no row reads a key.
        llc_bytes: last-level cache.
        room: distinct caches that the pool has pages for.
        least_calls: calls of a rotation at least.

    Raises:
        ValueError: no room for one cache, or another word for `asked`.
    """
    if asked not in ("cold", "warm"):
        raise ValueError(f"asked={asked!r}: must be one of cold, warm")
    if room < 1:
        raise ValueError(f"room={room}: the pool must hold the pages of one cache at least")
    if asked == "warm":
        return CachePlan(1, least_calls, False, False)
    if rank_bytes == 0:  # nothing to be cold about, but queries and tables should not sit in a cache either
        return CachePlan(1, least_calls, True, False)
    need = COLD_OVER_LLC * llc_bytes // rank_bytes + 1
    if need <= min(MOST_CALLS, room):
        caches = max(need, min(2, room))
        return CachePlan(caches, math.ceil(least_calls / caches) * caches, False, True)
    caches = min(room, EVICTED_CACHES)
    return CachePlan(caches, math.ceil(least_calls / caches) * caches, True, True)


def replay_counts(asked: str, rotation_us: float) -> tuple[int, int]:
    """(replays a round, rounds) of a graph whose calls take `rotation_us` together."""
    if asked == "warm":
        return WARM_REPLAYS, WARM_ROUNDS
    return min(WARM_REPLAYS, max(2, math.ceil(COLD_ROUND_US / max(rotation_us, 1.0)))), COLD_ROUNDS


def eager_rounds(rotation_us: float, most: int = WARM_ROUNDS) -> int:
    """Rounds of a rotation that no graph replays: 3 to `most`."""
    return min(most, max(3, math.ceil(EAGER_ARM_US / max(rotation_us, 1.0))))


def measure(arms: dict[str, Callable[[], list[float]]], rounds: int) -> dict[str, list[float]]:
    """Run every arm once a round, in an order that turns around each round; all samples of this rank, in us.

    Args:
        arms: name to a function that times the arm once (`timed_calls`, `timed_replays`).
    """
    samples: dict[str, list[float]] = {name: [] for name in arms}
    for round_ in range(rounds):
        for name in list(arms) if round_ % 2 == 0 else reversed(list(arms)):
            samples[name] += arms[name]()
    return samples


def timed_calls(
    calls: Sequence[Callable[[], object]],
    *,
    align: Callable[[], object],
    evict: Callable[[], object] | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> Callable[[], list[float]]:
    """A function that times each call by itself, ranks aligned before it, the evicting read outside the clock.

    For devices without queues: a call returns when its work is done. Samples are microseconds, one a call.
    """

    def run() -> list[float]:
        samples = []
        for call in calls:
            if evict is not None:
                evict()
            align()
            start = clock()
            call()
            samples.append((clock() - start) * 1e6)
        return samples

    return run


class DeviceTimer:
    """A pair of device events; `stop` waits for the second and returns microseconds between them."""

    def __init__(self) -> None:
        self._start, self._end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def start(self) -> None:
        """Enqueue the start event."""
        self._start.record()

    def stop(self) -> float:
        """Enqueue the end event, wait for it, and return the microseconds between the two."""
        self._end.record()
        self._end.synchronize()
        return self._start.elapsed_time(self._end) * 1e3


def timed_replays(
    replay: Callable[[], object],
    *,
    calls: int,
    replays: int,
    align: Callable[[], object],
    hold: Callable[[], object],
    timer: DeviceTimer,
) -> Callable[[], list[float]]:
    """A function that times `replays` replays of a graph of `calls` calls; its one sample is microseconds a call.

    `hold` enqueues work that outlasts the host's enqueueing, `align` a collective: both run on the device, so the
    start event is reached by all ranks together with the replays already queued behind it.
    """

    def run() -> list[float]:
        hold()
        align()
        timer.start()
        for _ in range(replays):
            replay()
        return [timer.stop() / (calls * replays)]

    return run


def capture(calls: Sequence[Callable[[], object]], evict: Callable[[], object] | None = None) -> torch.cuda.CUDAGraph:
    """Capture the calls in order in one graph, the evicting read before each.

    The calls must have run before: a kernel compiled or a transport connected during capture is an error. The graph
    keeps the calls, and through them every tensor that its replays touch.
    """
    if evict is not None:
        evict()  # it makes its buffer when it first runs
    torch.cuda.synchronize()
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    collecting = gc.isenabled()
    gc.disable()  # a collection may unload a module, which a capturing stream does not survive
    try:
        with torch.cuda.stream(stream):
            # Other threads (a collective's watchdog) may touch the device meanwhile.
            graph.capture_begin(capture_error_mode="thread_local")
            try:
                for call in calls:
                    if evict is not None:
                        evict()
                    call()
            except BaseException:
                with contextlib.suppress(RuntimeError):  # what broke the call is the error to show
                    graph.capture_end()
                raise
            graph.capture_end()
    finally:
        if collecting:
            gc.enable()
    torch.cuda.current_stream().wait_stream(stream)
    graph.calls = (tuple(calls), evict)
    return graph


def slowest(rank_samples: Sequence[Sequence[float]]) -> list[float]:
    """For each sample the maximum over the ranks: a call ends with its slowest rank.

    Raises:
        ValueError: ranks with different numbers of samples.
    """
    counts = {len(samples) for samples in rank_samples}
    if len(counts) != 1:
        raise ValueError(f"rank_samples of {sorted(counts)} samples: every rank must have the same number")
    return [max(together) for together in zip(*rank_samples, strict=True)]


def median(samples: Sequence[float]) -> float:
    """The median; NaN of nothing."""
    ordered = sorted(samples)
    n = len(ordered)
    return (ordered[(n - 1) // 2] + ordered[n // 2]) / 2 if n else float("nan")


def refuse_impossible(bytes_read: int, us: float, peak_gbs: float | None) -> None:
    """Raise when a cold call's rate exceeds what the device's memory can deliver: then it was not cold.

    Raises:
        ValueError: naming both rates.
    """
    if peak_gbs is None or not bytes_read:
        return
    rate = bytes_read / (us * 1e3)
    if rate > peak_gbs:
        raise ValueError(
            f"{rate:.0f} GB/s read, but the device's memory peaks at {peak_gbs:.0f} GB/s: the keys came from a cache"
        )
