"""What ROCm's tools say of AMD GPUs: partitions, links, NUMA, clocks, power cap, throttling.

`amd-smi` is asked first, then `rocm-smi`; what a tool or a release does not say is None. Both are read as JSON:

- `amd-smi static | metric | topology --json`, all releases since 6.2: the samples in
  https://github.com/ROCm/amdsmi/blob/amd-staging/CHANGELOG.md ("limit" as max_power/socket_power, later as ppt0;
  "partition" as compute_partition, later accelerator_partition; "links" a list; a list, later under "gpu_data") and
  https://github.com/ROCm/amdsmi/blob/amd-staging/docs/how-to/amdsmi-cli-tool.md (fields of `static`).
- `rocm-smi --json`: https://github.com/ROCm/rocm_smi_lib/blob/develop/python_smi_tools/rocm_smi.py (its printed keys).

Nobody has run this on a machine with AMD GPUs yet; serial numbers and bus addresses are not kept.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

WHOLE = ("SPX", "NPS1")  # one GPU is one device, and its memory one pool: what the figures are of unless they say so
ROCM_SMI = (
    "--showcomputepartition", "--showmemorypartition", "--showmaxpower", "--showpower", "--showclocks", "--showtopo", "--json",
)  # fmt: skip


@dataclass(frozen=True)
class Gpu:
    """One GPU (or partition of one) in the order of the tool; None where it does not say.

    Args:
        compute_partition, memory_partition: such as "SPX" and "NPS1".
        power_cap_w, power_cap_max_w, power_w: socket limit, the most that it can be set to, and what it draws now.
        throttled: kinds of violation that are active now, such as ("ppt",); () when none is.
        throttle_counts: violations counted since the driver started, by kind: two readings tell what a run met.
    """

    index: int
    compute_partition: str | None = None
    memory_partition: str | None = None
    numa_node: int | None = None
    power_cap_w: float | None = None
    power_cap_max_w: float | None = None
    power_w: float | None = None
    gfx_mhz: float | None = None
    memory_mhz: float | None = None
    throttled: tuple[str, ...] | None = None
    throttle_counts: dict[str, int] | None = None
    driver: str | None = None


@dataclass(frozen=True)
class Link:
    """What lies between two GPUs: "XGMI" or "PCIE", how many hops, the tool's weight and bandwidth in its own words."""

    a: int
    b: int
    kind: str
    hops: int | None = None
    weight: float | None = None
    bandwidth: str | None = None


@dataclass(frozen=True)
class Facts:
    """All that was found, and by which tool."""

    source: str
    gpus: tuple[Gpu, ...]
    links: tuple[Link, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values, for provenance."""
        return json.loads(json.dumps(asdict(self)))


def documents(text: str) -> list[dict[str, Any]]:
    """The entries, one a GPU, of what amd-smi printed: a list, a list under "gpu_data", or several of either.

    Warnings before the JSON are left out; text without JSON gives [].
    """
    found: list[dict[str, Any]] = []
    decoder, at = json.JSONDecoder(), 0
    while match := re.compile(r"^\s*[\[{]", re.M).search(text, at):
        try:
            value, at = decoder.raw_decode(text, match.end() - 1)
        except ValueError:
            at = match.end()
            continue
        value = value.get("gpu_data", [value]) if isinstance(value, dict) else value
        found += [entry for entry in value if isinstance(entry, dict)] if isinstance(value, list) else []
    return found


def number(value: Any) -> float | None:
    """The number in 12, "12", "12 W", "(12Mhz)" or {"value": 12, "unit": "W"}; None in "N/A" and all else."""
    if isinstance(value, dict):
        return number(value.get("value"))
    if isinstance(value, bool) or value is None:
        return None
    if isinstance(value, (int, float)):
        return float(value)
    match = re.match(r"\s*\(?(-?\d+(?:\.\d+)?)\s*[A-Za-z%/]*\)?\s*$", str(value))
    return float(match[1]) if match else None


def _section(entry: dict[str, Any], *names: str) -> dict[str, Any]:
    for name in names:
        entry = entry.get(name) if isinstance(entry.get(name), dict) else {}
    return entry


def _word(value: Any) -> str | None:
    return str(value) if value not in (None, "", "N/A") else None


def _whole(value: float | None) -> int | None:
    return None if value is None else int(value)


def _first(*values: Any) -> Any:
    return next((v for v in values if v is not None), None)


def from_amd_smi(static: str, metric: str, topology: str) -> Facts | None:
    """Facts out of what the three commands printed, any of them ""; None when none names a GPU."""
    gpus: dict[int, Gpu] = {}
    for entry in documents(static):
        index = _whole(number(entry.get("gpu")))
        if index is None:
            continue
        limit, partition = _section(entry, "limit"), _section(entry, "partition")
        ppt = _section(limit, "ppt0")
        gpus[index] = Gpu(
            index,
            compute_partition=_first(_word(partition.get("accelerator_partition")), _word(partition.get("compute_partition"))),
            memory_partition=_word(partition.get("memory_partition")),
            numa_node=_whole(number(_section(entry, "numa").get("node"))),
            power_cap_w=_first(number(ppt.get("socket_power_limit")), number(limit.get("socket_power"))),
            power_cap_max_w=_first(number(ppt.get("max_power_limit")), number(limit.get("max_power"))),
            driver=_word(_section(entry, "driver").get("version")),
        )
    for entry in documents(metric):
        index = _whole(number(entry.get("gpu")))
        if index is None:
            continue
        gpus[index] = replace(
            gpus.get(index, Gpu(index)),
            power_w=number(_section(entry, "power").get("socket_power")),
            gfx_mhz=number(_section(entry, "clock", "gfx_0").get("clk")),
            memory_mhz=number(_section(entry, "clock", "mem_0").get("clk")),
            throttled=_throttled(entry),
            throttle_counts=_counts(_section(entry, "throttle")),
        )
    if not gpus:
        return None
    return Facts("amd-smi", tuple(gpus[i] for i in sorted(gpus)), _links(documents(topology)))


def _throttled(entry: dict[str, Any]) -> tuple[str, ...] | None:
    """Violations that a metric entry calls active; without such fields its one word THROTTLED or UNTHROTTLED."""
    found, said = [], False
    for name, value in _section(entry, "throttle").items():
        kind = re.fullmatch(r"(\w+)_violation_(?:status|active)", name)
        if kind and value in ("ACTIVE", "NOT ACTIVE"):
            said = True
            found += [kind[1]] if value == "ACTIVE" else []
    if said:
        return tuple(found)
    word = _section(entry, "power").get("throttle_status")
    return {"THROTTLED": ("unnamed",), "UNTHROTTLED": ()}.get(word) if isinstance(word, str) else None


def _counts(throttle: dict[str, Any]) -> dict[str, int] | None:
    counts = {n.removesuffix("_accumulated"): number(v) for n, v in throttle.items() if n.endswith("_accumulated")}
    return {name: int(count) for name, count in counts.items() if count is not None} or None


def _links(entries: list[dict[str, Any]]) -> tuple[Link, ...]:
    """Each pair once, lower index first; from the list of links, or from the older map of names to words."""
    found: dict[tuple[int, int], Link] = {}
    for entry in entries:
        a = _whole(number(entry.get("gpu")))
        if a is None:
            continue
        links = entry.get("links")
        if not isinstance(links, list):
            kinds, hops = _section(entry, "link_type"), _section(entry, "num_hops")
            weights, rates = _section(entry, "weight"), _section(entry, "numa_bandwidth")
            links = [
                {"gpu": key.removeprefix("gpu_"), "link_type": kind, "num_hops": hops.get(key), "weight": weights.get(key),
                 "bandwidth": rates.get(key)} for key, kind in kinds.items()
            ]  # fmt: skip
        for link in links:
            b = _whole(number(link.get("gpu"))) if isinstance(link, dict) else None
            if b is None or b == a or (min(a, b), max(a, b)) in found:
                continue
            found[min(a, b), max(a, b)] = Link(
                min(a, b), max(a, b), _word(link.get("link_type")) or "unknown", _whole(number(link.get("num_hops"))),
                number(link.get("weight")), _word(link.get("bandwidth")),
            )  # fmt: skip
    return tuple(found[pair] for pair in sorted(found))


def from_rocm_smi(text: str) -> Facts | None:
    """Facts out of `rocm-smi ... --json`; None when it names no card. It does not say whether a GPU throttles."""
    try:
        cards = json.loads(text[text.find("{") :])
    except ValueError:
        return None
    gpus, links = [], {}
    for name, card in cards.items() if isinstance(cards, dict) else ():
        match = re.fullmatch(r"card(\d+)", name)
        if match and isinstance(card, dict):
            gpus.append(
                Gpu(
                    int(match[1]),
                    compute_partition=_word(card.get("Compute Partition")),
                    memory_partition=_word(card.get("Memory Partition")),
                    numa_node=_whole(number(card.get("(Topology) Numa Node"))),
                    power_cap_w=number(card.get("Max Graphics Package Power (W)")),
                    power_w=_first(*(number(v) for n, v in card.items() if re.search(r"(Average|Socket) Graphics Package Power", n))),
                    gfx_mhz=number(card.get("sclk clock speed:")),
                    memory_mhz=number(card.get("mclk clock speed:")),
                )
            )
    system = cards.get("system") if isinstance(cards, dict) and isinstance(cards.get("system"), dict) else {}
    for words, value in system.items():
        match = re.fullmatch(r"\(Topology\) (Link type|Hops|Weight) between DRM devices (\d+) and (\d+)", words)
        if match:
            links.setdefault((int(match[2]), int(match[3])), {})[match[1]] = value
    found = [
        Link(a, b, _word(said.get("Link type")) or "unknown", _whole(number(said.get("Hops"))), number(said.get("Weight")))
        for (a, b), said in sorted(links.items())
    ]
    return Facts("rocm-smi", tuple(sorted(gpus, key=lambda g: g.index)), tuple(found)) if gpus else None


def facts(tool: Callable[..., str | None]) -> Facts | None:
    """Ask the tools that are here.

    Args:
        tool: runs a command and returns its output, None where it is missing or fails.
    """
    said = [tool("amd-smi", command, "--json") or "" for command in ("static", "metric", "topology")]
    return from_amd_smi(*said) or from_rocm_smi(tool("rocm-smi", *ROCM_SMI) or "")


def problems(found: Facts | None) -> tuple[str, ...]:
    """What of these facts a reader of figures must know, in words."""
    if found is None:
        return ("neither amd-smi nor rocm-smi answers: partitions, links, power cap and throttling are not known",)
    words = []
    modes = {(g.compute_partition, g.memory_partition) for g in found.gpus}
    if modes - {(None, None)} and any(not {None, c, m} <= {None, *WHOLE} for c, m in modes):
        named = ", ".join(sorted("/".join(v or "unknown" for v in mode) for mode in modes))
        words.append(f"partition modes {named}: figures are of partitions; {'/'.join(WHOLE)} makes one device of a GPU")
    slow = [f"{link.a} to {link.b} ({link.kind})" for link in found.links if link.kind not in ("XGMI", "SELF")]
    if slow:
        words.append(f"GPUs without an xGMI link: {', '.join(slow)}")
    capped = [f"GPU {g.index}: {g.power_cap_w:g} of {g.power_cap_max_w:g} W" for g in found.gpus
              if g.power_cap_w and g.power_cap_max_w and g.power_cap_w < g.power_cap_max_w]  # fmt: skip
    if capped:
        words.append(f"power caps below the highest: {', '.join(capped)}")
    hot = [f"GPU {g.index} ({', '.join(g.throttled)})" for g in found.gpus if g.throttled]
    if hot:
        words.append(f"throttled now: {', '.join(hot)}")
    return tuple(words)


def lines(found: Facts) -> list[str]:
    """For the doctor's report: a line a GPU, a line for the links."""

    def said(value: Any, unit: str = "") -> str:
        return "unknown" if value is None else f"{value:g}{unit}" if isinstance(value, float) else f"{value}{unit}"

    text = []
    for g in found.gpus:
        throttling = "unknown" if g.throttled is None else ", ".join(g.throttled) or "none"
        text.append(
            f"  GPU {g.index}: partition {said(g.compute_partition)}/{said(g.memory_partition)}, NUMA node {said(g.numa_node)}, "
            f"power {said(g.power_w, ' W')} of {said(g.power_cap_w, ' W')}, clocks {said(g.gfx_mhz, ' MHz')} and memory "
            f"{said(g.memory_mhz, ' MHz')}, throttling {throttling}"
        )
    kinds = sorted({(link.kind, link.hops) for link in found.links}, key=str)
    named = ", ".join(f"{kind}, {said(hops)} hops" for kind, hops in kinds)
    text.append(f"  links of {len(found.links)} pairs: {named or 'unknown'} (by {found.source})")
    return text
