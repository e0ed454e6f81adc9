"""Transports of context-parallel decode. The only user of torch.distributed.

A transport moves bits: payloads travel as int32 views, never as numeric casts, so that any collective (gloo, NCCL,
RCCL, an engine's own gather of 32-bit words) carries bf16 queries and int64 keys alike.
"""

from __future__ import annotations

import ctypes
import os
import re
import tempfile
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from m3cp.shapes import require_int
from m3cp.shard import Shard

AGREE_S = 20.0  # seconds that a rank waits for the others' row counts before it raises; ten minutes before warm-up
_announced: dict[str, int] = {}  # row counts told so far in each group: ranks run one program, so they count alike
WAIT_ERROR = 2  # kind of the error word: a wait expired
_HOST_WAIT_S = 30.0  # seconds before a wait between processes on a CPU gives up
COARSE = "coarse-grained"


class OneInFlight:
    """Refuses an eager call on another stream while the last one may still run: an exchange has one launch in flight.

    Buffers and generations are the exchange's, so two launches at once would read each other's words. Only eager calls
    are seen from the host; that replays of captured calls do not overlap is the caller's duty.
    """

    def __init__(self):
        self._stream = self._done = None

    def begin(self, device: torch.device) -> None:
        """Raise a RuntimeError when the last call was on another stream and has not finished."""
        if device.type != "cuda" or torch.cuda.is_current_stream_capturing():
            return
        stream = torch.cuda.current_stream(device)
        if self._stream is not None and stream != self._stream and not self._done.query():
            raise RuntimeError(
                f"a call on stream {stream.cuda_stream:#x} while the last one, on stream {self._stream.cuda_stream:#x}, still runs: "
                "an exchange has one launch in flight; let one stream wait for the other and the host for its event, or use one stream"
            )

    def end(self, device: torch.device) -> None:
        """Remember the call that was just issued."""
        if device.type != "cuda" or torch.cuda.is_current_stream_capturing():
            return
        self._stream = torch.cuda.current_stream(device)
        self._done = self._done or torch.cuda.Event()
        self._done.record(self._stream)


class CollectiveExchange:
    """All-gathers over a process group (NCCL, RCCL, gloo), or over a callable.

    Args:
        group: a torch.distributed group; None is the default group. It must have as many ranks as the shard's world.
        gather: an engine's own all-gather in the group's place, called as `gather(out, payload)` with int32 tensors,
            `out` flat `[ranks * n]` and `payload` flat `[n]`; rank r's words must land at `out[r * n : (r + 1) * n]`.

    Raises:
        ValueError: both a group and a callable were given.
    """

    name = "collective"

    def __init__(self, group=None, *, gather: Callable[[torch.Tensor, torch.Tensor], None] | None = None):
        if group is not None and gather is not None:
            raise ValueError("group and gather: give one of them, not both")
        self.group = group
        self._gather = gather
        self._alone = False
        self.in_flight = OneInFlight()
        self._rows: int | None = None  # of this rank's last eager call
        self._lost = ""  # what went wrong for good
        self.calls = 0  # collectives issued from the host, for tests and for rows

    def attach(self, shard: Shard, device: torch.device, payload_words: int = 0, state: torch.Tensor | None = None) -> Callable[[torch.Tensor, torch.Tensor], None]:
        """Check that the group fits the shard and return `gather`.

        Raises:
            ValueError: `shard.world` differs from the group's size, or the rank differs.
            RuntimeError: no process group exists and the shard's world is larger than 1.
        """
        if self._gather is None:
            self._alone = shard.world == 1 and not dist.is_initialized()
            if not self._alone:
                _check_group(self.group, shard, "CollectiveExchange")
        return self.gather

    def agree(self, rows: int, device: torch.device, *, warm: bool = True) -> None:
        """Raise, before any collective, when the ranks come to an eager call with different row counts.

        A rank whose count is that of its last call passes at once; one whose count changed tells the others through
        the process group's store and waits to hear that theirs changed alike. Captures and callables can't be checked:
        there, equal counts are the caller's duty.

        Raises:
            ValueError: the counts differ; it names every rank's.
            RuntimeError: some rank did not change its count, or did not come, within AGREE_S.
        """
        if self._lost:
            raise RuntimeError(f"{self._lost}; the ranks no longer count alike: build the process group and this object anew")
        if self._gather is not None or self._alone or rows == self._rows:
            return
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return
        world, rank = dist.get_world_size(self.group), dist.get_rank(self.group)
        if world == 1:
            return
        group = self.group or dist.group.WORLD
        _announced[group.group_name] = number = _announced.get(group.group_name, 0) + 1
        store = dist.PrefixStore(f"m3cp/rows/{group.group_name}/{number}", dist.distributed_c10d._get_default_store())
        store.set(str(rank), str(rows))
        counts: list[int | None] = [None] * world
        limit = AGREE_S if warm else 600.0
        for other in range(world):
            try:
                store.wait([str(other)], timedelta(seconds=limit))
            except dist.DistStoreError as error:
                self._lost = (
                    f"rank {rank} came with {rows} rows, rank {other} did not say within {limit:.0f} s that its count changed too: "
                    "every rank must reach the exchange with the same row count"
                )
                raise RuntimeError(self._lost) from error
            counts[other] = int(store.get(str(other)))
        if len(set(counts)) > 1:
            self._rows = None
            raise ValueError(f"rows of the ranks {counts}: every rank must reach the exchange with the same row count")
        self._rows = rows

    def gather(self, out: torch.Tensor, payload: torch.Tensor) -> None:
        """Gather `payload` of every rank into `out`, `[ranks, *payload.shape]`, both contiguous. Bit-exact."""
        self.calls += 1
        flat_out, flat = out.view(-1).view(torch.int32), payload.view(-1).view(torch.int32)
        if self._alone:
            flat_out.copy_(flat)
        elif self._gather is not None:
            self._gather(flat_out, flat)
        elif hasattr(dist, "all_gather_single"):  # its name since torch 2.13
            dist.all_gather_single(flat_out, flat, group=self.group)
        else:
            dist.all_gather_into_tensor(flat_out, flat, group=self.group)


class SymmetricExchange:
    """Peers' memory, written and awaited by the kernels themselves.

    On GPUs the memory comes from torch's symmetric memory (CUDA; ROCm where torch has it); between processes on a CPU
    it is host shared memory, so that the protocol itself runs without a GPU.

    Args:
        group: a torch.distributed group, used to set up only; None is the default group.
        spin_limit: polls after which a wait inside a kernel gives up; None: `spin_limit(device)`.

    Attributes:
        memory: what was mapped last, in words.
        grains: how coherent each rank's memory is as mapped here, in words (`grain_of`); empty but on ROCm.

    Raises:
        ValueError: `spin_limit` is not an integer from 1 to 2**31 - 1.
    """

    name = "symmetric"

    def __init__(self, group=None, *, spin_limit: int | None = None):
        if spin_limit is not None:
            require_int("spin_limit", spin_limit, 1, 2**31 - 1, " polls")
        self.group, self.spin_limit = group, spin_limit
        self.in_flight = OneInFlight()
        self.calls = 0
        self.memory, self.grains = "none yet", []

    @property
    def grain(self) -> str:
        """The weakest of `grains`; "" where there is none."""
        return min(self.grains, key=lambda g: (g != COARSE, not g.startswith("unknown")), default="")

    @property
    def memory_type(self) -> str:
        """`memory`, and on ROCm how coherent it is, rank by rank where ranks differ."""
        if len(set(self.grains)) > 1:
            return ", ".join((self.memory, *(f"rank {r}'s {g}" for r, g in enumerate(self.grains))))
        return ", ".join((self.memory, *self.grains[:1]))

    def attach(self, shard: Shard, device: torch.device, payload_words: int, state: torch.Tensor | None = None) -> Callable[[torch.Tensor, torch.Tensor], None]:
        """A gather of up to `payload_words` int32 words a rank, as one launch; collective over the group.

        An expired wait is written to `state`, `[4]` int64: launches, then (kind, rank waited for, launch).

        Raises:
            ValueError, RuntimeError: as `CollectiveExchange.attach`.
        """
        from m3cp.kernels import gather as op
        from m3cp.kernels import tile

        words, peers, mapped = self.allocate(shard, device, 2 * shard.world * payload_words)
        programs = max(1, min(op.PROGRAMS, -(-payload_words // op.CHUNK))) if device.type == "cuda" else 1
        counters = torch.zeros(programs, dtype=torch.int64, device=device)
        state = torch.zeros(4, dtype=torch.int64, device=device) if state is None else state

        def gather(out: torch.Tensor, payload: torch.Tensor) -> None:
            self.calls += 1
            flat_out, flat = out.view(-1).view(torch.int32), payload.view(-1).view(torch.int32)
            if flat.numel() > payload_words:
                raise ValueError(f"payload of {flat.numel()} words: this transport was set up for payload_words={payload_words}")
            if device.type == "cuda" or tile.INTERPRETED:
                op.gather(
                    flat_out, flat, words=words, peers=peers, counters=counters, state=state, rank=shard.rank, world=shard.world,
                    capacity=payload_words, spin_limit=self.spin_limit or spin_limit(device), programs=programs,
                )  # fmt: skip
            else:
                _gather_on_host(flat_out, flat, mapped, counters, state, shard, payload_words)

        return gather

    def agree(self, rows: int, device: torch.device, *, warm: bool = True) -> None:
        """Nothing: waits here are bounded, and ranks that come with different row counts end in an error of `check()`."""

    def allocate(
        self, shard: Shard, device: torch.device, words: int, *, allow_coarse: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
        """A zeroed symmetric buffer; collective over the group.

        Args:
            allow_coarse: map coarse-grained memory too, for a test that tells what polls of it see.

        Returns:
            (this rank's buffer `[words]` int64, addresses of every rank's buffer as mapped here `[world]` int64 on the
            device, the mapped tensors: host memory only).

        Raises:
            RuntimeError: on ROCm, some rank maps some rank's memory as coarse-grained; on every rank alike.
        """
        self.grains = []
        if not dist.is_initialized() and shard.world == 1:
            self.memory = "private: a world of one"
            local = torch.zeros(words, dtype=torch.int64, device=device)
            return local, torch.tensor([local.data_ptr()], device=device), [local]
        _check_group(self.group, shard, "SymmetricExchange")
        group = self.group or dist.group.WORLD
        if device.type == "cuda":
            import torch.distributed._symmetric_memory as symmetric

            local = symmetric.empty(words, dtype=torch.int64, device=device)
            handle = symmetric.rendezvous(local, group)
            local.zero_()
            torch.cuda.synchronize(device)
            dist.barrier(group, device_ids=[device.index])  # nobody writes before everybody has zeroed
            self.memory = f"torch symmetric memory over {symmetric.get_backend(device)}: each rank's device memory, mapped by its peers"
            pointers = list(handle.buffer_ptrs)
            if torch.version.hip is not None:
                self.grains = [grain(pointer) or "unknown: this process has no ROCm runtime" for pointer in pointers]
                if not allow_coarse:
                    _refuse_coarse(self.grains, group)
            self._keep = [*getattr(self, "_keep", []), handle]
            return local, torch.tensor(pointers, dtype=torch.int64, device=local.device), []
        self.memory = "host shared memory"
        mapped = _host_shared(words, shard, group)
        return mapped[shard.rank], torch.tensor([t.data_ptr() for t in mapped]), mapped


def spin_limit(device: torch.device) -> int:
    """Polls after which a wait gives up: some seconds on a GPU (a poll takes about 0.7 us), half a minute interpreted."""
    return 20_000_000 if device.type == "cuda" else 200_000


class _PointerInfo(ctypes.Structure):
    # hsa_amd_pointer_info_t, https://github.com/ROCm/ROCR-Runtime/blob/amd-staging/runtime/hsa-runtime/inc/hsa_ext_amd.h
    _fields_ = [
        ("size", ctypes.c_uint32), ("type", ctypes.c_uint32), ("agent_base", ctypes.c_void_p), ("host_base", ctypes.c_void_p),
        ("bytes", ctypes.c_size_t), ("user_data", ctypes.c_void_p), ("owner", ctypes.c_uint64), ("global_flags", ctypes.c_uint32),
        ("registered", ctypes.c_bool),
    ]  # fmt: skip


def grain(address: int, maps: Path = Path("/proc/self/maps")) -> str:
    """How coherent the memory at a device address is, as ROCm's runtime says; "" where this process has no such runtime.

    Of memory mapped through HIP's virtual memory, as torch's symmetric memory is, the runtime tells the flags of the pool
    that it came from; older ones tell none. Never run on AMD yet: an answer that starts with "unknown" says why.
    """
    try:
        loaded = re.search(r"(/\S*libhsa-runtime64\S*)", maps.read_text())
        if loaded is None:
            return ""
        info = _PointerInfo(size=ctypes.sizeof(_PointerInfo))
        ask = ctypes.CDLL(loaded[1]).hsa_amd_pointer_info
        status = ask(ctypes.c_void_p(address), ctypes.byref(info), None, None, None)
    except (OSError, AttributeError) as error:
        return f"unknown: {error}"
    return f"unknown: the runtime answered {status:#x}" if status else grain_of(info.global_flags)


def grain_of(flags: int) -> str:
    """The words for a pointer's global flags (`hsa_amd_memory_pool_global_flag_t`).

    The runtime says by bit 1, of a pool "kernel arguments", that a pointer's memory is uncached (ROCR's `Runtime::PtrInfo`).
    """
    for bit, words in ((8, "fine-grained, extended scope"), (1, "uncached"), (2, "fine-grained"), (4, COARSE)):
        if flags & bit:
            return words
    return f"unknown: flags {flags:#x}"


def _refuse_coarse(grains: Sequence[str], group) -> None:
    """Raise on every rank when any maps coarse-grained memory: one that went on alone would wait for those that raised."""
    told: list[list[str]] = [[]] * dist.get_world_size(group)
    dist.all_gather_object(told, list(grains), group=group)
    coarse = [f"rank {owner}'s memory as rank {reader} maps it" for reader, seen in enumerate(told) for owner, g in enumerate(seen) if g == COARSE]
    if coarse:
        raise RuntimeError(
            f"SymmetricExchange: {', '.join(coarse)} is {COARSE}: a kernel that polls it may never see another GPU's words. Allowed is fine-grained or "
            "uncached memory; use CollectiveExchange (form 'staged'), or a torch whose symmetric memory is one of these on this GPU"
        )


def _check_group(group, shard: Shard, who: str) -> None:
    if not dist.is_initialized():
        raise RuntimeError(f"shard.world={shard.world}: {who} needs an initialised process group of that size")
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    if size != shard.world:
        raise ValueError(f"shard.world={shard.world}: the process group has {size} ranks; they must be equal")
    if rank != shard.rank:
        raise ValueError(f"shard.rank={shard.rank}: this process is rank {rank} of its group; they must be equal")


def _host_shared(words: int, shard: Shard, group) -> list[torch.Tensor]:
    """Every rank's buffer, mapped into this process; the files are unlinked once all have mapped them."""
    folder = "/dev/shm" if os.path.isdir("/dev/shm") else None
    descriptor, path = tempfile.mkstemp(prefix="m3cp-", dir=folder)
    os.close(descriptor)
    mine = torch.from_file(path, shared=True, size=words, dtype=torch.int64).zero_()
    paths: list[str] = [""] * shard.world
    dist.all_gather_object(paths, path, group=group)
    mapped = [mine if r == shard.rank else torch.from_file(p, shared=True, size=words, dtype=torch.int64) for r, p in enumerate(paths)]
    dist.barrier(group)
    os.unlink(path)
    return mapped


def _gather_on_host(
    out: torch.Tensor, payload: torch.Tensor, mapped: list[torch.Tensor], counters: torch.Tensor, state: torch.Tensor, shard: Shard, capacity: int
) -> None:  # fmt: skip
    """The gather kernel's protocol in torch, for ranks on a CPU: push tagged words to all, then await all.

    Raises:
        RuntimeError: a wait expired, in this call or an earlier one; the error word in `state` says so too.
    """
    if int(state[1]) == WAIT_ERROR:
        raise RuntimeError(f"rank {shard.rank} waited in vain for rank {int(state[2])} before: build the object anew")
    counters[0] += 1
    tag = int(counters[0]) & 0x7FFFFFFF
    slot = (int(counters[0]) & 1) * shard.world * capacity
    n = payload.numel()
    word = (payload.to(torch.int64) & 0xFFFFFFFF) | (tag << 32)
    for buffer in mapped:
        buffer[slot + shard.rank * capacity :][:n] = word
    for rank in range(shard.world):
        incoming = mapped[shard.rank][slot + rank * capacity :][:n]
        deadline = time.monotonic() + _HOST_WAIT_S
        while not bool((incoming >> 32 == tag).all()):
            if time.monotonic() > deadline:
                state[1:] = torch.tensor([WAIT_ERROR, rank, int(counters[0])])
                raise RuntimeError(f"rank {shard.rank} waited {_HOST_WAIT_S} s for rank {rank} in a symmetric gather: that rank is gone or late")
            time.sleep(0)
        out[rank * n : (rank + 1) * n] = incoming.to(torch.int32)
