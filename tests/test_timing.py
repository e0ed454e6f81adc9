"""Timing on synthetic clocks: slowest rank, alternating order, cold rotations, fixed counts."""

import itertools

import pytest

from m3cp import timing

MIB = 1 << 20


def test_a_sample_is_the_slowest_rank_of_the_same_iteration():
    # B04: rank r takes 20 us at iteration r, 10 us otherwise.
    ranks = [[20.0 if i == r else 10.0 for i in range(5)] for r in range(4)]
    samples = timing.slowest(ranks)
    assert samples == [20, 20, 20, 20, 10] and timing.median(samples) == 20
    assert timing.median(ranks[0]) == 10 and max(timing.median(r) for r in ranks) == 10  # what must not be reported


def test_ranks_that_counted_differently_are_an_error():
    with pytest.raises(ValueError, match=r"rank_samples of \[2, 3\] samples"):
        timing.slowest([[1.0, 2.0, 3.0], [1.0, 2.0]])


def test_rounds_turn_the_order_of_the_arms_around():
    log = []
    arms = {name: lambda name=name: [log.append(name) or float(len(log))] for name in "abc"}
    samples = timing.measure(arms, 3)
    assert "".join(log) == "abccbaabc"
    assert samples["a"] == [1, 6, 7] and samples["c"] == [3, 4, 9]


def test_eager_calls_are_aligned_one_by_one_and_evicting_is_outside_the_clock():
    now, log = [0.0], []

    def takes(name, seconds):
        def run():
            log.append(name)
            now[0] += seconds

        return run

    run = timing.timed_calls(
        [takes("x", 3e-6), takes("y", 5e-6)],
        align=takes("align", 1e-3),
        evict=takes("evict", 1e-2),
        clock=lambda: now[0],
    )
    assert run() == pytest.approx([3.0, 5.0], abs=1e-6)
    assert log == ["evict", "align", "x", "evict", "align", "y"]


def test_replays_start_right_behind_the_alignment():
    log = []

    class Timer:
        def start(self):
            log.append("start")

        def stop(self):
            log.append("stop")
            return 1200.0

    run = timing.timed_replays(
        lambda: log.append("replay"),
        calls=8,
        replays=3,
        align=lambda: log.append("align"),
        hold=lambda: log.append("hold"),
        timer=Timer(),
    )
    assert run() == [50.0]
    assert log == ["hold", "align", "start", "replay", "replay", "replay", "stop"]


@pytest.mark.parametrize("rank_bytes", [MIB // 4, MIB, 3 * MIB, 40 * MIB, 60 * MIB, 120 * MIB, 121 * MIB, 4096 * MIB])
@pytest.mark.parametrize("room", [1, 2, 100, 1000])
def test_a_rotation_called_cold_touches_more_than_two_last_level_caches(rank_bytes, room):
    plan = timing.plan_caches("cold", rank_bytes, 60 * MIB, room=room)
    assert plan.cold and plan.caches <= room and plan.calls % plan.caches == 0 and plan.calls >= 8
    assert plan.evict or plan.caches * rank_bytes > 2 * 60 * MIB
    assert plan.calls <= timing.MOST_CALLS
    # The evicting read is the exception: only where a rotation would need too many calls or pages.
    enough = next(n for n in itertools.count(1) if n * rank_bytes > 2 * 60 * MIB)
    assert plan.evict == (enough > min(256, room))


def test_one_cache_of_8_mib_on_a_50_mib_cache_is_never_called_cold():
    # B02: the helper rotates, evicts, or says warm.
    plan = timing.plan_caches("cold", 8 * MIB, 50 * MIB, room=1)
    assert plan.evict
    assert not timing.plan_caches("warm", 8 * MIB, 50 * MIB, room=100).cold
    assert timing.plan_caches("cold", 8 * MIB, 50 * MIB, room=100) == timing.CachePlan(13, 13, False, True)


def test_a_call_that_reads_nothing_is_timed_behind_the_evicting_read_and_not_called_cold():
    assert timing.plan_caches("cold", 0, 50 * MIB, room=9) == timing.CachePlan(1, 8, True, False)


def test_warm_is_the_published_protocol():
    plan = timing.plan_caches("warm", MIB, 50 * MIB, room=9)
    assert (plan.caches, plan.calls, *timing.replay_counts("warm", 123.0)) == (1, 8, 100, 7)


def test_counts_are_bounded():
    for rotation_us in (0.0, 1.0, 40.0, 1e3, 1e5, 1e8):
        replays, rounds = timing.replay_counts("cold", rotation_us)
        assert 2 <= replays <= 100 and rounds == timing.COLD_ROUNDS
        assert 3 <= timing.eager_rounds(rotation_us) <= 7
    assert timing.eager_rounds(2000.0, 51) == 51 and timing.eager_rounds(60_000.0, 51) == 10
    assert timing.replay_counts("cold", 1500.0)[0] == 10


def test_bad_words_and_empty_pools_are_named():
    with pytest.raises(ValueError, match="asked='hot': must be one of cold, warm"):
        timing.plan_caches("hot", 1, 1, room=1)
    with pytest.raises(ValueError, match="room=0"):
        timing.plan_caches("cold", 1, 1, room=0)


def test_a_rate_above_the_memorys_peak_is_refused():
    # B02: 5,019 GB/s where the device peaks at 4,800.
    with pytest.raises(ValueError, match="5019 GB/s read, but the device's memory peaks at 4800"):
        timing.refuse_impossible(5_019_000, 1.0, 4800.0)
    timing.refuse_impossible(4_700_000, 1.0, 4800.0)
    timing.refuse_impossible(5_019_000, 1.0, None)
    timing.refuse_impossible(0, 0.0, 4800.0)
