"""What this machine is: devices, who else uses them, caches, versions; what will be measured here, and what not.

Facts come back as dataclasses and dicts; `report` alone makes text. torch, triton and the vendors' tools are asked
when a function is called, and everything works, with less to say, where they are missing.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import shutil
import socket
import subprocess
from dataclasses import dataclass, replace
from pathlib import Path

from m3cp import amd as rocm

MIB = 1 << 20
# Bytes of the cache behind the L2 that torch reports. AMD's CDNA 3 and CDNA 4 have 256 MiB of Infinity Cache (the
# vendor's data sheets); torch knows only the 4 MiB L2 slice. On NVIDIA the L2 is the last level.
BEHIND_L2_BYTES = {"gfx942": 256 * MIB, "gfx950": 256 * MIB}
WORLDS = (1, 2, 4, 8)
ENVIRONMENT = ("NCCL_", "RCCL_", "HSA_", "HIP_", "ROCR_", "GPU_MAX_HW_QUEUES", "TORCH_SYMM_MEM_")
DISTRIBUTIONS = ("torch", "triton", "numpy", "pandas", "matplotlib", "scipy", "papermill")


class NodeError(RuntimeError):
    """This machine can't do what was asked; the message names the fix."""


@dataclass(frozen=True)
class Device:
    """One GPU as torch sees it. `last_level_bytes` is what a cold read must outrun; 0 where nobody says."""

    index: int
    vendor: str  # "nvidia" or "amd"
    name: str
    arch: str  # "sm_90", "gfx950"
    units: int  # SMs or CUs
    memory_bytes: int
    l2_bytes: int
    last_level_bytes: int
    uuid: str = ""


@dataclass(frozen=True)
class Cpu:
    """The host processor; `cores` are those this process may use."""

    model: str
    cores: int
    last_level_bytes: int


@dataclass(frozen=True)
class Process:
    """Somebody else's process on a GPU. `device` is the GPU's name in the vendor's tool."""

    device: str
    pid: int
    name: str
    memory_bytes: int | None


@dataclass(frozen=True)
class Torch:
    """The torch in use. `build` is "cuda X", "rocm X" or "cpu"; `error` says why there is none."""

    version: str | None = None
    build: str | None = None
    gpus: int = 0
    error: str | None = None


@dataclass(frozen=True)
class Planned:
    """One thing that a sweep could measure here, whether it will, and why or why not."""

    what: str
    measured: bool
    why: str


@dataclass(frozen=True)
class Node:
    """Everything `m3cp doctor` found. `processes` is None where no tool could say."""

    cpu: Cpu
    torch: Torch
    devices: tuple[Device, ...]
    peers: tuple[tuple[int, int], ...]  # pairs of GPUs that cannot reach each other's memory
    processes: tuple[Process, ...] | None
    versions: dict[str, str]
    triton_owners: tuple[str, ...]
    clocks: tuple[dict, ...]
    drivers: tuple[str, ...]  # "nvidia", "amd": device files that are here
    engines: tuple[tuple[str, str], ...] = ()  # arms of engines' kernels, and why they do not import here, "" when they do
    amd: rocm.Facts | None = None  # what ROCm's command-line tools say; None on other nodes, or where none answers
    plan: tuple[Planned, ...] = ()
    problems: tuple[str, ...] = ()


def cpu(cpuinfo: Path = Path("/proc/cpuinfo"), caches: Path = Path("/sys/devices/system/cpu/cpu0/cache")) -> Cpu:
    """Model, usable cores, and bytes of the largest cache that core 0 reaches (0 where the system doesn't say)."""
    model = platform.processor() or platform.machine()
    if cpuinfo.exists():
        named = re.search(r"^model name\s*:\s*(.+)$", cpuinfo.read_text(errors="replace"), re.M)
        model = named[1].strip() if named else model
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    sizes = [_cache_bytes(path) for path in caches.glob("index*/size")]
    return Cpu(model, cores, max(sizes, default=0))


def _cache_bytes(path: Path) -> int:
    size = re.fullmatch(r"(\d+)([KMG]?)", path.read_text().strip())
    return int(size[1]) << {"": 0, "K": 10, "M": 20, "G": 30}[size[2]] if size else 0


def last_level_bytes(arch: str, l2_bytes: int) -> int:
    """Bytes of a GPU's last-level cache: the table's entry for `arch`, else the L2 that torch reports."""
    return max(BEHIND_L2_BYTES.get(arch.split(":")[0], 0), l2_bytes)


def torch_state() -> Torch:
    """Which torch imports here, how it was built, and how many GPUs it can use."""
    try:
        import torch
    except Exception as error:  # a torch whose libraries are missing raises OSError and others
        return Torch(error=f"{type(error).__name__}: {error}")
    build = f"rocm {torch.version.hip}" if torch.version.hip else f"cuda {torch.version.cuda}"
    if not torch.version.hip and not torch.version.cuda:
        build = "cpu"
    return Torch(torch.__version__, build, torch.cuda.device_count() if torch.cuda.is_available() else 0)


def devices() -> tuple[Device, ...]:
    """The GPUs that torch can use, in its order; empty without torch."""
    state = torch_state()
    if not state.gpus:
        return ()
    import torch

    return tuple(device_of(i, torch.cuda.get_device_properties(i), bool(torch.version.hip)) for i in range(state.gpus))


def device_of(index: int, properties, amd: bool) -> Device:
    """The Device that torch's device properties describe."""
    arch = properties.gcnArchName.split(":")[0] if amd else f"sm_{properties.major}{properties.minor}"
    l2_bytes = int(getattr(properties, "L2_cache_size", 0))
    return Device(
        index=index,
        vendor="amd" if amd else "nvidia",
        name=properties.name,
        arch=arch,
        units=properties.multi_processor_count,
        memory_bytes=properties.total_memory,
        l2_bytes=l2_bytes,
        last_level_bytes=last_level_bytes(arch, l2_bytes),
        uuid=str(getattr(properties, "uuid", "")),
    )


def unreachable_peers(count: int) -> tuple[tuple[int, int], ...]:
    """Pairs (from, to) of GPUs without peer access; the symmetric exchange needs it between all of them."""
    if count < 2:
        return ()
    import torch

    pairs = ((a, b) for a in range(count) for b in range(count) if a != b)
    return tuple((a, b) for a, b in pairs if not torch.cuda.can_device_access_peer(a, b))


def drivers(dev: Path = Path("/dev")) -> tuple[str, ...]:
    """Vendors whose GPU driver has device files here, whatever torch can do: "nvidia", "amd"."""
    nvidia = any(re.fullmatch(r"nvidia\d+", p.name) for p in dev.glob("nvidia*"))
    return (("nvidia",) if nvidia else ()) + (("amd",) if (dev / "kfd").exists() else ())


def sweep_device(asked: str | None = None) -> str:
    """Where a sweep runs on this machine: "cuda" (NVIDIA and AMD alike, as in torch) or "cpu".

    Args:
        asked: "cuda", "cpu" or None for what the machine has.

    Raises:
        NodeError: torch is missing; `asked` is "cuda" and torch can use no GPU; or there is a GPU that torch can't
            use and "cpu" was not asked for, since a GPU node's CPU figures are never what was meant.
    """
    return choose_device(asked, torch_state(), drivers())


def choose_device(asked: str | None, torch: Torch, found: tuple[str, ...]) -> str:
    """`sweep_device` for a given torch and given drivers (`drivers()`)."""
    if asked not in (None, "cuda", "cpu"):
        raise NodeError(f"device={asked!r}: must be one of cuda, cpu")
    if torch.version is None:
        raise NodeError(f"torch does not import ({torch.error}): run `make setup`")
    if asked == "cpu":
        return "cpu"
    if torch.gpus:
        return "cuda"
    if not found:
        if asked == "cuda":
            raise NodeError(f"device='cuda': torch {torch.version} ({torch.build}) finds no GPU; allowed here: cpu")
        return "cpu"
    vendor = "AMD" if "amd" in found else "NVIDIA"
    wanted = "rocm" if "amd" in found else "cuda"
    if torch.build and torch.build.startswith(wanted):
        hidden = [v for v in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES") if v in os.environ]
        fix = f"unset {' and '.join(hidden)}" if hidden else "check the driver and the container's access to the GPU"
    elif wanted == "rocm":
        fix = "use the vendor's image: `make setup PYTHON=<the image's python3>` makes a venv with its site packages"
    else:
        fix = "install a CUDA build: `make setup TORCH=cuda`, or `make setup PYTHON=<a python3 that has one>`"
    raise NodeError(
        f"this machine has an {vendor} GPU that torch {torch.version} ({torch.build}) cannot use: {fix}. "
        "To measure the CPU instead, ask for it: `--device cpu`"
    )


def skip_reason(world: int, device: str, *, gpus: int, cores: int) -> str | None:
    """Why TP and CP over `world` ranks can't be measured on `device` ("cuda" or "cpu"); None when they can."""
    if device == "cuda" and world > gpus:
        return f"needs {world} GPUs, found {gpus}"
    if device == "cpu" and world > cores:
        return f"needs {world} cores, one a rank, found {cores}"
    return None


def plan(node: Node, asked: str | None = None) -> tuple[Planned, ...]:
    """What a sweep would measure on the node, and what it would skip and why; the refusal where it would refuse."""
    try:
        device = choose_device(asked, node.torch, node.drivers)
    except NodeError as error:
        return (Planned("sweep", False, str(error)),)
    gpus, cores = len(node.devices), node.cpu.cores
    planned = []
    if device == "cuda" and "triton" not in node.versions:
        return (Planned("sweep", False, "the GPU kernels need triton, which does not import here"),)
    place = node.devices[0].name if device == "cuda" else f"{node.cpu.model}, eager torch, ranks over gloo"
    planned.append(Planned("page_read", True, f"bandwidth of page reads on {place}"))
    for world in WORLDS:
        why = skip_reason(world, device, gpus=gpus, cores=cores)
        if why is None and device == "cpu" and world > 2:
            why = f"not unasked on a CPU: `m3cp sweep --world {world}` measures it"
        ranks = "1 rank" if world == 1 else f"{world} ranks, " + ("one a GPU" if device == "cuda" else "over gloo")
        what = f"P={world}: tp" if world == 1 else f"P={world}: tp and cp"
        planned.append(Planned(what, why is None, why or ranks))
    planned.append(Planned("cp_local", True, "CP's part without the exchange; needs no peer, whatever P it stands for"))
    for arm, failed in node.engines:
        why = failed or "the engine's kernels import here; a grid that names the arm measures it"
        if device == "cpu":
            why = f"an engine's kernels need a GPU ({failed or 'they import here'})"
        planned.append(Planned(arm, device == "cuda" and not failed, why))
    return tuple(planned)


def engines() -> tuple[tuple[str, str], ...]:
    """Arms of engines' kernels, each with the import that fails here ("" when none does); empty without torch or triton."""
    try:
        from m3cp import engine_kernels
    except Exception:  # a torch whose libraries are missing raises OSError and others
        return ()
    return tuple((arm, engine_kernels.missing(arm) or "") for arm in engine_kernels.MODULES)


def triton_owners() -> tuple[str, ...]:
    """Distributions that own the top-level module `triton`, as "name version"; two of them overwrite each other."""
    names = importlib.metadata.packages_distributions().get("triton", [])
    return tuple(f"{name} {importlib.metadata.version(name)}" for name in sorted(set(names)))


def versions() -> dict[str, str]:
    """Versions of Python, m3cp and what it stands on; what is not installed has no entry."""
    found = {"python": platform.python_version()}
    for name in ("m3cp", *DISTRIBUTIONS):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    if "triton" not in found and triton_owners():  # ROCm's builds carry another distribution's name
        found["triton"] = triton_owners()[0].split()[1]
    torch = torch_state()
    if torch.version:
        found["torch"] = torch.version  # with the build's local part, which metadata may lack
        found["torch_build"] = torch.build or ""
    collectives = _collectives_version() if torch.gpus else None
    if collectives:
        found["rccl" if torch.build and torch.build.startswith("rocm") else "nccl"] = collectives
    return found


def _collectives_version() -> str | None:
    try:
        import torch.cuda.nccl

        return ".".join(map(str, torch.cuda.nccl.version()))
    except Exception:  # absent from some builds
        return None


def _tool(*command: str) -> str | None:
    """A vendor tool's standard output; None where it is missing or fails."""
    if not shutil.which(command[0]):
        return None
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


def nvidia_clocks(text: str) -> tuple[dict, ...]:
    """Lines of `nvidia-smi --query-gpu=index,clocks.sm,clocks.mem,driver_version` as dicts; unreadable values None."""
    rows = []
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.split(",")]
        if len(cells) == 4:
            sm, memory = (int(c) if c.isdigit() else None for c in cells[1:3])
            rows.append({"sm_mhz": sm, "memory_mhz": memory, "driver": cells[3]})
    return tuple(rows)


def nvidia_processes(text: str, own_pid: int) -> tuple[Process, ...]:
    """Lines of `nvidia-smi --query-compute-apps=gpu_uuid,pid,process_name,used_memory`, this process left out."""
    rows = []
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.split(",")]
        if len(cells) == 4 and cells[1].isdigit() and int(cells[1]) != own_pid:
            memory = int(cells[3]) * MIB if cells[3].isdigit() else None
            rows.append(Process(cells[0], int(cells[1]), os.path.basename(cells[2]), memory))
    return tuple(rows)


def _amd() -> tuple[tuple[dict, ...], tuple[Process, ...]] | None:
    """Clocks and processes from ROCm's own amdsmi; None where it is absent or breaks, which it does in many ways."""
    try:
        import amdsmi

        amdsmi.amdsmi_init()
        try:
            clocks, processes = [], []
            for index, handle in enumerate(amdsmi.amdsmi_get_processor_handles()):
                graphics = amdsmi.amdsmi_get_clock_info(handle, amdsmi.AmdSmiClkType.GFX)
                memory = amdsmi.amdsmi_get_clock_info(handle, amdsmi.AmdSmiClkType.MEM)
                driver = amdsmi.amdsmi_get_gpu_driver_info(handle)
                clocks.append(
                    {"sm_mhz": graphics["clk"], "memory_mhz": memory["clk"], "driver": driver["driver_version"]}
                )
                for row in amdsmi.amdsmi_get_gpu_process_list(handle):
                    if row["pid"] != os.getpid():
                        name = os.path.basename(str(row["name"]))
                        processes.append(Process(f"GPU {index}", row["pid"], name, row["memory_usage"]["vram_mem"]))
            return tuple(clocks), tuple(processes)
        finally:
            amdsmi.amdsmi_shut_down()
    except Exception:
        return None


def clocks() -> tuple[dict, ...]:
    """Clocks now, one dict a GPU: `sm_mhz`, `memory_mhz` (None where unreadable) and the driver's version.

    All GPUs of the host, in the order of the vendor's tool; empty where no tool answers.
    """
    text = _tool("nvidia-smi", "--query-gpu=index,clocks.sm,clocks.mem,driver_version", "--format=csv,noheader,nounits")
    if text is not None:
        return nvidia_clocks(text)
    amd = _amd() if "amd" in drivers() else None
    if amd:
        return amd[0]
    facts = rocm_facts()
    named = facts.gpus if facts else ()
    return tuple({"sm_mhz": _whole(g.gfx_mhz), "memory_mhz": _whole(g.memory_mhz), "driver": g.driver} for g in named)


def _whole(value: float | None) -> int | None:
    return None if value is None else round(value)


def rocm_facts() -> rocm.Facts | None:
    """Partitions, links, NUMA, clocks, power caps and throttling by amd-smi or rocm-smi; None without AMD GPUs or tools."""
    return rocm.facts(_tool) if "amd" in drivers() else None


def other_processes() -> tuple[Process, ...] | None:
    """Processes of others on the GPUs; None where no tool can say. A container may hide those outside it."""
    query = "--query-compute-apps=gpu_uuid,pid,process_name,used_memory"
    text = _tool("nvidia-smi", query, "--format=csv,noheader,nounits")
    if text is not None:
        return nvidia_processes(text, os.getpid())
    amd = _amd() if "amd" in drivers() else None
    return amd[1] if amd else None


def inspect(asked: str | None = None) -> Node:
    """Look at everything; takes seconds, most of it torch's import. `asked` as in `sweep_device`."""
    gpus = devices()
    node = Node(
        cpu=cpu(),
        torch=torch_state(),
        devices=gpus,
        peers=unreachable_peers(len(gpus)),
        processes=other_processes(),
        versions=versions(),
        triton_owners=triton_owners(),
        clocks=clocks(),
        drivers=drivers(),
        engines=engines(),
        amd=rocm_facts(),
    )
    return replace(node, plan=plan(node, asked), problems=problems(node))


def problems(node: Node) -> tuple[str, ...]:
    """What would spoil figures or runs on the node, each with what to do about it."""
    found = []
    if len(node.triton_owners) > 1:
        found.append(
            f"{' and '.join(node.triton_owners)} both own the module triton, and one has overwritten the other: "
            "uninstall both, then reinstall the one that belongs to this torch"
        )
    if node.processes:
        found.append(f"{len(node.processes)} other processes use the GPUs: figures taken beside them mean little")
    if node.peers:
        pairs = ", ".join(f"{a} to {b}" for a, b in node.peers)
        found.append(f"no peer access between GPUs {pairs}: the symmetric exchange can't run there")
    if "amd" in node.drivers:
        found += rocm.problems(node.amd)
    return tuple(found)


def environment(variables: dict[str, str] | None = None, host: str | None = None) -> dict[str, str]:
    """The variables that steer collectives and GPUs, cleaned of paths, addresses and host names."""
    source = os.environ if variables is None else variables
    host = socket.gethostname() if host is None else host
    return {name: _public(source[name], host) for name in sorted(source) if name.startswith(ENVIRONMENT)}


def _public(value: str, host: str) -> str:
    value = re.sub(r"[^\s,;:=]*[/\\][^\s,;]*", "<path>", value)
    if host:
        value = re.sub(rf"\b{re.escape(host)}\b(\.[\w.-]+)?", "<host>", value)
    value = re.sub(r"\b\d{1,3}(\.\d{1,3}){3}\b", "<address>", value)
    # A peer named with a port, as NCCL_COMM_ID has it.
    return re.sub(r"\b[A-Za-z][\w.-]*:\d{4,5}\b", "<host>", value)


def provenance() -> dict:
    """What every row says of the machine it was measured on; names no host, user or path.

    Keys: `cpu_model`, `cpu_cores`, `cpu_last_level_bytes`, `gpus` (name, arch, units and bytes, one dict each),
    `clocks` (as in `clocks`), `driver`, `versions`, `environment`, `platform`; on AMD also `amd` (`amd.Facts`).
    """
    host = cpu()
    at = clocks()
    gpus = [
        {
            "name": d.name,
            "arch": d.arch,
            "units": d.units,
            "memory_bytes": d.memory_bytes,
            "l2_bytes": d.l2_bytes,
            "last_level_bytes": d.last_level_bytes,
        }
        for d in devices()
    ]
    return {
        "cpu_model": host.model,
        "cpu_cores": host.cores,
        "cpu_last_level_bytes": host.last_level_bytes,
        "gpus": gpus,
        "clocks": [{k: v for k, v in row.items() if k != "driver"} for row in at],
        "driver": at[0]["driver"] if at else None,
        "versions": versions(),
        "environment": environment(),
        "platform": f"{platform.system()} {platform.machine()}",
        **({"amd": facts.to_dict()} if (facts := rocm_facts()) else {}),
    }


def size(count: int) -> str:
    """Bytes for people: "256 MiB", "141 GiB"; "unknown" for 0."""
    if not count:
        return "unknown"
    for unit, shift in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if count >= 1 << shift:
            return f"{count / (1 << shift):.4g} {unit}"
    return f"{count} bytes"


def report(node: Node) -> str:
    """The text of `m3cp doctor`."""
    lines = ["Devices"]
    for d in node.devices:
        kind = "CUs" if d.vendor == "amd" else "SMs"
        lines.append(f"  GPU {d.index}: {d.name}, {d.arch}, {d.units} {kind}, {size(d.memory_bytes)}")
        lines.append(f"         L2 {size(d.l2_bytes)}, last-level cache {size(d.last_level_bytes)}")
    for vendor in () if node.devices else node.drivers:
        lines.append(f"  {vendor}: the driver's device files are here, but torch finds no GPU")
    lines.append(
        f"  CPU:   {node.cpu.model}, {node.cpu.cores} cores, last-level cache {size(node.cpu.last_level_bytes)}"
    )
    if len(node.devices) > 1:
        lines.append("  peers: " + ("some GPUs cannot reach each other" if node.peers else "all reach each other"))
    for index, row in enumerate(node.clocks):
        lines.append(f"  clocks now, GPU {index}: SM {row['sm_mhz']} MHz, memory {row['memory_mhz']} MHz")
    if node.amd:
        lines += ["", "What ROCm's tools say", *rocm.lines(node.amd)]
    if node.devices or node.drivers:
        lines += ["", "Other processes on the GPUs"]
        if node.processes is None:
            lines.append("  unknown: no nvidia-smi or amdsmi answers")
        for p in node.processes or ():
            memory = "" if p.memory_bytes is None else f", {size(p.memory_bytes)}"
            lines.append(f"  {p.device}: {p.name} (pid {p.pid}{memory})")
        if node.processes == ():
            lines.append("  none seen (a container may hide those outside it)")
    lines += ["", "Versions"]
    lines += [f"  {name:11} {version}" for name, version in node.versions.items()]
    if node.torch.error:
        lines.append(f"  {'torch':11} does not import: {node.torch.error}")
    if node.clocks:
        lines.append(f"  {'driver':11} {node.clocks[0]['driver']}")
    lines.append(f"  module triton is owned by {' and '.join(node.triton_owners) or 'no distribution'}")
    lines += ["", "A sweep here"]
    lines += [f"  {p.what}: {'measured' if p.measured else 'skipped'}: {p.why}" for p in node.plan]
    if node.problems:
        lines += ["", "Problems"]
        lines += [f"  {problem}" for problem in node.problems]
    return "\n".join(lines)
