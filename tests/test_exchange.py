"""What memory the symmetric exchange maps: told by ROCm's runtime, stated, and refused where a kernel can't poll it.

A library with the runtime's name and its header's struct answers in its place: nothing here ran on AMD.
"""

import contextlib
import ctypes
import subprocess
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric
from ranks import Ranks

from m3cp import exchange
from m3cp.exchange import COARSE, SymmetricExchange
from m3cp.shard import Shard

# The low byte of an address is its answer's flags; 0xff is an address that the runtime refuses.
RUNTIME = """
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
typedef struct { uint64_t handle; } hsa_agent_t;
typedef struct {
  uint32_t size; uint32_t type; void* agentBaseAddress; void* hostBaseAddress; size_t sizeInBytes; void* userData;
  hsa_agent_t agentOwner; uint32_t global_flags; bool registered;
} hsa_amd_pointer_info_t;
int hsa_amd_pointer_info(const void* ptr, hsa_amd_pointer_info_t* info, void* (*alloc)(size_t), uint32_t* count, hsa_agent_t** agents) {
  uint32_t flags = (uintptr_t)ptr & 0xff;
  if (info->size < offsetof(hsa_amd_pointer_info_t, registered) || flags == 0xff) return 0x1001;
  info->global_flags = flags;
  info->registered = true;
  return 0;
}
"""
UNCACHED, FINE, COARSELY, EXTENDED = 1, 2, 4, 8


@pytest.fixture(scope="module")
def ranks():
    ranks = Ranks(2)
    yield ranks
    ranks.close()


@pytest.fixture(scope="module")
def runtime(tmp_path_factory, ranks):  # ranks are forked before this process loads it
    folder = tmp_path_factory.mktemp("rocm")
    (folder / "hsa.c").write_text(RUNTIME)
    library = folder / "libhsa-runtime64.so.1"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, folder / "hsa.c"], check=True)
    return str(library)


def test_the_grain_of_memory_in_words(runtime, tmp_path):
    maps = tmp_path / "maps"
    maps.write_text("")
    assert exchange.grain(4096, maps) == ""
    maps.write_text("7f00 r-xp 00 00:00 0 /opt/rocm/lib/libhsa-runtime64.so.1.14\n")
    assert exchange.grain(4096, maps).startswith("unknown: ")
    maps.write_text(f"7f00 r-xp 00 00:00 0 {runtime}\n")
    said = {flags: exchange.grain(4096 + flags, maps) for flags in (FINE, COARSELY, EXTENDED, EXTENDED | FINE, UNCACHED | FINE, UNCACHED | COARSELY, 0, 0xFF)}
    assert list(said.values()) == [
        "fine-grained", COARSE, "fine-grained, extended scope", "fine-grained, extended scope", "uncached", "uncached", "unknown: flags 0x0",
        "unknown: the runtime answered 0x1001",
    ]  # fmt: skip


def allocated(rank, runtime, flags, hip="7.0.0", **options):
    """memory_type and grain of an allocation whose rank r has `flags[rank][r]` as mapped here, or the refusal; with stand-ins for the device."""
    if runtime:
        ctypes.CDLL(runtime)  # now in this process's maps
    handle = SimpleNamespace(buffer_ptrs=[4096 * (r + 1) + f for r, f in enumerate(flags[rank])])
    x = SymmetricExchange()
    with contextlib.ExitStack() as stack:
        for owner, name, stand_in in (
            (torch.version, "hip", hip), (symmetric, "empty", lambda words, dtype, device: torch.zeros(words, dtype=dtype)),
            (symmetric, "rendezvous", lambda local, group: handle), (symmetric, "get_backend", lambda device: "CUDA"),
            (torch.cuda, "synchronize", lambda device: None), (dist, "barrier", lambda group, device_ids: None),
        ):  # fmt: skip
            stack.enter_context(mock.patch.object(owner, name, stand_in))
        try:
            _, peers, _ = x.allocate(Shard(rank, 2, 4), torch.device("cuda", 0), 8, **options)
            assert peers.tolist() == handle.buffer_ptrs
        except RuntimeError as error:
            return str(error), x.grain
    return x.memory_type, x.grain


TORCH = "torch symmetric memory over CUDA: each rank's device memory, mapped by its peers"


def test_what_was_mapped_is_stated(ranks, runtime):
    assert ranks.run(allocated, "", [[2, 2]] * 2, None) == [(TORCH, "")] * 2  # CUDA
    assert ranks.run(allocated, "", [[2, 2]] * 2) == [(f"{TORCH}, unknown: this process has no ROCm runtime", "unknown: this process has no ROCm runtime")] * 2
    assert ranks.run(allocated, runtime, [[FINE, FINE]] * 2) == [(f"{TORCH}, fine-grained", "fine-grained")] * 2
    assert ranks.run(allocated, runtime, [[FINE, UNCACHED | FINE]] * 2) == [(f"{TORCH}, rank 0's fine-grained, rank 1's uncached", "fine-grained")] * 2
    assert ranks.run(allocated, runtime, [[FINE, 0]] * 2) == [(f"{TORCH}, rank 0's fine-grained, rank 1's unknown: flags 0x0", "unknown: flags 0x0")] * 2


def test_coarse_grained_memory_is_refused_on_every_rank(ranks, runtime):
    """Only rank 1 maps rank 0's memory so; rank 0 must not go on and wait for it."""
    flags = [[FINE, FINE], [COARSELY, FINE]]
    found = ranks.run(allocated, runtime, flags)
    assert all(said.startswith("SymmetricExchange: rank 0's memory as rank 1 maps it is coarse-grained: ") and "use CollectiveExchange" in said for said, _ in found)
    assert [grain for _, grain in ranks.run(for_a_test, runtime, flags)] == ["fine-grained", COARSE]


def for_a_test(rank, runtime, flags):
    return allocated(rank, runtime, flags, allow_coarse=True)
