"""How each serving engine turns indexer CP on, and the line of its log that proves it: facts with their sources.

The module changes when an engine does. It holds what was read in the engines' own sources on 2026-11-30; nobody has
run the switches here.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Switch:
    """One engine's way to turn indexer CP on.

    Args:
        engine: with the release that was read.
        on: what to add to the command line or the environment.
        proof: what the log says when it took effect.
        refusal: what it says or does when it did not.
        needs: conditions, in words.
        vendor: "amd", "nvidia" or "any": whose devices have the kernels.
        worlds: numbers of ranks it takes; empty for any from 2 that divides, or is divided by, the heads.
        dtypes: of the index cache.
        sure: how sure this is, in words.
        source: where it was read.
    """

    engine: str
    on: str
    proof: str
    refusal: str
    needs: str
    vendor: str
    worlds: tuple[int, ...]
    dtypes: tuple[str, ...]
    sure: str
    source: str

    def refuses(self, vendor: str, world: int, dtype: str) -> str:
        """Why the engine has no CP for such a node, in words; "" when it has. An unknown vendor refuses nothing."""
        if self.vendor != "any" and vendor not in (self.vendor, ""):
            return {"amd": "AMD only", "nvidia": "NVIDIA only"}[self.vendor]
        if self.worlds and world not in self.worlds:
            return f"P = {', '.join(map(str, self.worlds))} only"
        if dtype not in self.dtypes:
            return f"no {dtype} index cache"
        return ""


SWITCHES = (
    Switch(
        "m3cp's own kernels",
        "CPOptions(enabled=True, world=P, ...).build(shard, device)",
        "no log: the step's path is 'cp'",
        "a ValueError at construction names the setting",
        "no engine loads it by itself: the caller builds it",
        "any", (), ("bf16", "fp16", "fp8_e4m3fn", "fp8_e4m3fnuz"), "this package", "m3cp/indexer.py",
    ),
    Switch(
        "vLLM 0.33, bf16 index cache",
        """--attention-config '{"minimax_m3_indexer_cp": true}'""",
        "MiniMax M3 indexer: selected Triton CP (context-parallel, ROCm)",
        "a ValueError at start-up that names minimax_m3_indexer_cp",
        "ROCm, tensor parallel size above 1",
        "amd", (), ("bf16",), "read in the released package, not run",
        "vllm/config/attention.py, vllm/models/minimax_m3/common/indexer.py, release 0.33.0",
    ),
    Switch(
        "vLLM 0.33, fp8 index cache",
        """--attention-config '{"minimax_m3_indexer_cp": true, "indexer_kv_dtype": "fp8"}'""",
        "MiniMax M3 indexer CP: enabled over",
        "MiniMax M3 indexer CP: disabled (reason)",
        "ROCm, gfx950, the AITER MSA indexer selected",
        "amd", (), ("fp8_e4m3fn",), "read in the released package, not run",
        "vllm/config/attention.py, vllm/models/minimax_m3/amd/indexer_msa.py, release 0.33.0",
    ),
    Switch(
        "SGLang 0.5.23",
        "SGLANG_MINIMAX_M3_INDEXER_CP=1",
        "MiniMax indexer CP enabled: TP4, decode-only",
        "MiniMax indexer CP disabled: reason",
        "gfx950, TP4, attention CP and DP of 1, bf16 or fp8 index cache",
        "amd", (4,), ("bf16", "fp8_e4m3fn"), "read in the repository, not compared with the release, not run",
        "sgl-project/sglang, make_indexer_cp of the MiniMax sparse backend",
    ),
    Switch(
        "ATOM",
        "ATOM_M3_INDEXER_CP=1",
        "dcp_config.indexer_dcp_only enabled",
        "the same line with `disabled`; the `Engine kwargs` line is printed before the override and proves nothing",
        "TP4, decode context parallel size 1",
        "amd", (4,), ("bf16", "fp8_e4m3fn"), "read in its authors' recipe, not run",
        "ROCm/ATOM pull request 2229 and the MiniMax-M3 agentic recipe",
    ),
)  # fmt: skip


def vendor_of(node: str) -> str:
    """The vendor, "nvidia" or "amd", from a node's name, "" where it says neither (a CPU, say)."""
    name = node.lower()
    if "nvidia" in name or any(f" {model}" in name for model in ("h100", "h200", "b200", "gb200")):
        return "nvidia"
    return "amd" if any(word in name for word in ("amd", "instinct", "mi300", "mi325", "mi350", "mi355")) else ""
