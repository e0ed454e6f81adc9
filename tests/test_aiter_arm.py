"""AITER's arm around a stand-in with the public signature, in plain torch: what is passed, what is compared, what is refused."""

import ctypes
import json
import sys
import time
import types
from pathlib import Path

import drivers
import pytest
import torch

from m3cp import aiter_arm, kit, kit_state, sweep

WORKER = "import json, sys; sys.path.insert(0, {tests!r}); import test_aiter_arm as t; t.install({wrong!r}, {shard!r})\nfrom m3cp import aiter_arm, worker\nworker.run(json.load(open(sys.argv[1])), aiter_arm.body)\n"
FORCED = 1e30  # a sentinel that outranks scores, as the public kernels write for forced blocks


def install(wrong: str = "", shard: bool = True) -> None:
    """Put the stand-in where `aiter_arm` looks; `wrong` plants a fault, `shard` gives the scoring pass rank and world."""

    def scores(q_idx, key_cache_idx, score, block_table, seq_lens, init_blocks, local_blocks, query_len, max_seq_len, rank=0, world=1):
        assert q_idx.dtype == key_cache_idx.dtype == torch.float8_e4m3fn and q_idx.is_contiguous() and key_cache_idx.is_contiguous()
        assert score.shape[:2] == (q_idx.shape[1], q_idx.shape[0]) and score.dtype == torch.float32 and score.stride(2) == 1
        for token in range(q_idx.shape[0]):
            n = int(seq_lens[token // query_len]) - query_len + token % query_len + 1
            for block in range(rank, -(-n // 128), world):
                keys = key_cache_idx[int(block_table[token // query_len, block])].float()[: n - block * 128]
                score[:, token, block // world] = (q_idx[token].float() @ keys.T).amax(1) + (wrong == "scores")
                if block < init_blocks or block >= -(-n // 128) - local_blocks:
                    score[:, token, block // world] = FORCED

    def score_decode(q_idx, key_cache_idx, score, block_table, seq_lens, init_blocks=0, local_blocks=0, query_len=1, num_chunks=0, num_waves=0, max_seq_len=0):
        scores(q_idx, key_cache_idx, score, block_table, seq_lens, init_blocks, local_blocks, query_len, max_seq_len)

    def score_shard(q_idx, key_cache_idx, score, block_table, seq_lens, init_blocks=0, local_blocks=0, query_len=1, num_chunks=0, num_waves=0, max_seq_len=0, rank=0, world=1):
        scores(q_idx, key_cache_idx, score, block_table, seq_lens, init_blocks, local_blocks, query_len, max_seq_len, rank, world)

    def topk(score, topk_idx, block_table, seq_lens, max_seq_len, block_size, query_len=1, num_waves=0, num_valid_pages=None, sparse_bt=None,
             sparse_ctx=None, row_req_id=None, kv_lens=None, num_kv_heads=1, pages_per_block=8):  # fmt: skip
        strips = -(-max_seq_len // (64 * block_size))
        assert score.shape[2] >= 64 << (strips - 1).bit_length() and num_kv_heads % score.shape[0] == 0
        assert sparse_bt.shape == (score.shape[1] * num_kv_heads, topk_idx.shape[2] * pages_per_block)
        best = score.topk(topk_idx.shape[2], dim=2)
        topk_idx.copy_(torch.where(best.values > float("-inf"), best.indices, -1))
        if wrong == "ids":
            topk_idx[0, 0, 3] = (topk_idx[0, 0].max() + 1) % 60

    rows: dict[int, int] = {}  # candidate rows of each caller

    def topk_cp(score, peer_cand_ptrs, cp_gen, topk_idx, seq_lens, block_table, sparse_bt, sparse_ctx, max_seq_len, block_size, cand_rows=0,
                query_len=1, init_blocks=0, local_blocks=0, num_kv_heads=1, pages_per_block=8, rank=0, world=1, num_waves=0):  # fmt: skip
        heads, tokens, width = score.shape
        owned, k = heads // world, topk_idx.shape[2]
        assert peer_cand_ptrs.dtype == torch.int64 and peer_cand_ptrs.device.type == "cpu" and peer_cand_ptrs.numel() == world
        assert cp_gen.dtype == torch.int32 and cp_gen.numel() == 256 and cand_rows >= tokens and num_kv_heads == owned == topk_idx.shape[0]
        assert sparse_bt.shape == (tokens * owned, k * pages_per_block) and width % 64 == 0 and width * world * block_size >= max_seq_len
        assert rows.setdefault(id(cp_gen), cand_rows) == cand_rows, "an address means one candidate for the life of the buffers"
        size = (2, world, owned, cand_rows, k)
        buffers = [torch.frombuffer((ctypes.c_int64 * int(torch.tensor(size).prod())).from_address(at), dtype=torch.int64).view(size) for at in peer_cand_ptrs.tolist()]
        cp_gen += 1
        generation = int(cp_gen[0])
        best = score.topk(k, dim=2)
        block = torch.where(best.values > float("-inf"), best.indices * world + rank + 1 + (wrong == "shard"), 0)
        words = (best.values.view(torch.int32).to(torch.int64) << 32) | (generation << 24) | block
        for owner in range(world):
            buffers[owner][generation & 1, rank, :, :tokens] = words[owner * owned : (owner + 1) * owned]
        mine, deadline = buffers[rank][generation & 1, :, :, :tokens], time.monotonic() + 20
        while bool(((mine >> 24 & 255) != generation).any()) and time.monotonic() < deadline:
            time.sleep(0.001)
        came = mine.permute(1, 2, 0, 3).reshape(owned, tokens, world * k)
        ids, values = (came & 0xFFFFFF) - 1, (came >> 32).to(torch.int32).view(torch.float32)
        chosen = values.where(ids >= 0, float("-inf")).topk(k, dim=2)
        topk_idx.copy_(torch.where(chosen.values > float("-inf"), ids.gather(2, chosen.indices), -1))

    for name in ("aiter", "aiter.ops", aiter_arm.MODULE):
        sys.modules[name] = types.ModuleType(name)
        sys.modules[name].__path__ = []
    module = sys.modules[aiter_arm.MODULE]
    module.pa_sparse_block_score_decode, module.pa_sparse_block_topk = score_shard if shard else score_decode, topk
    module.pa_sparse_block_topk_cp, module.CP_MAX_BLOCKS = topk_cp, 256
    module.topk_cp_candidate_numel = lambda world, owned_heads, total_q, topk: 2 * world * owned_heads * total_q * topk


def run(tmp_path, wrong="", shard=True, shapes=((2944, 2),), between=False):
    path = tmp_path / "worker.py"
    path.write_text(WORKER.format(tests=str(Path(__file__).parent), wrong=wrong, shard=shard))
    with drivers.forked():
        return aiter_arm.run("cpu", 2, shapes, module=str(path), between=between)


def test_ids_and_a_shards_scores_are_the_references(tmp_path):
    found = run(tmp_path)
    tp, cp = found["arms"]
    assert (tp["arm"], cp["arm"]) == ("aiter_tp", "aiter_cp_score") and found["label"] == tp["label"] == aiter_arm.LABEL
    assert "never run" in aiter_arm.LABEL
    assert tp["rows"] == 2 * 2 and cp["rows"] > 50 and tp["us"] > 0 and json.dumps(found)


@pytest.mark.slow
def test_a_release_without_shards_gives_tp_alone(tmp_path):
    assert [a["arm"] for a in run(tmp_path, shard=False)["arms"]] == ["aiter_tp"]


@pytest.mark.parametrize("wrong, words", [("ids", "aiter_tp .* 1 of 4 rows differ"), ("scores", "aiter_cp_score .* differ from the reference")])
def test_wrong_answers_get_no_time(tmp_path, wrong, words):
    with pytest.raises(sweep.WorkersFailed, match=words):
        run(tmp_path, wrong)


def test_cp_between_ranks_chooses_the_references_ids(tmp_path):
    """A wide batch after a narrow one, through the same buffers: rows are strided by the widest."""
    narrow, wide = run(tmp_path, shapes=((2944, 1), (4000, 3)), between=True)["arms"]
    assert {narrow["arm"], wide["arm"]} == {"aiter_cp"} and narrow["memory"] == "host shared memory" and narrow["us"] > 0
    assert (narrow["rows"], wide["rows"]) == (4, 12), "all heads of all ranks, checked after the timed calls"


@pytest.mark.slow
def test_cp_that_chooses_otherwise_gets_no_time(tmp_path):
    with pytest.raises(sweep.WorkersFailed, match="aiter_cp .* rows differ from the reference"):
        run(tmp_path, "shard", between=True)


def test_score_rows_are_whole_strips_and_a_power_of_two_of_them():
    assert [aiter_arm.score_width(n, 128) for n in (1, 8192, 8193, 131_072, 131_073)] == [64, 64, 128, 1024, 2048]


def test_a_missing_or_half_installed_library_is_said(monkeypatch):
    assert aiter_arm.missing().startswith(f"import {aiter_arm.MODULE}: ModuleNotFoundError")
    monkeypatch.setitem(sys.modules, "aiter", None)
    for name in ("aiter", "aiter.ops", aiter_arm.MODULE):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    assert "has no pa_sparse_block_score_decode or pa_sparse_block_topk" in aiter_arm.missing() == aiter_arm.missing_cp()
    sys.modules[aiter_arm.MODULE].pa_sparse_block_score_decode = lambda q_idx, max_seq_len=0: None
    sys.modules[aiter_arm.MODULE].pa_sparse_block_topk = None
    assert aiter_arm.missing() == "" and "has no pa_sparse_block_topk_cp" in aiter_arm.missing_cp() and "or world of" in aiter_arm.missing_cp()


def test_the_kit_leaves_the_step_out_by_name(tmp_path):
    kit_state.write(tmp_path / kit_state.FACTS_FILE, {"device": "cuda", "node": "4x GPU", "ranks": 4, "gpus": 4, "arch": "gfx950"})
    assert kit.run_step("aiter", tmp_path, 60) == kit.LEFT_OUT_STATUS
    assert aiter_arm.MODULE in kit_state.read(tmp_path / "said" / "aiter.json")["why"]
