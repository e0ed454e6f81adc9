"""AITER's arm around a stand-in with the public signature, in plain torch: what is passed, what is compared, what is refused."""

import json
import sys
import types
from pathlib import Path

import pytest
import torch

from m3cp import aiter_arm, kit, sweep

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

    for name in ("aiter", "aiter.ops", aiter_arm.MODULE):
        sys.modules[name] = types.ModuleType(name)
        sys.modules[name].__path__ = []
    module = sys.modules[aiter_arm.MODULE]
    module.pa_sparse_block_score_decode, module.pa_sparse_block_topk = score_shard if shard else score_decode, topk


def run(tmp_path, wrong="", shard=True, shapes=((2944, 2),)):
    path = tmp_path / "worker.py"
    path.write_text(WORKER.format(tests=str(Path(__file__).parent), wrong=wrong, shard=shard))
    return aiter_arm.run("cpu", 2, shapes, module=str(path))


def test_ids_and_a_shards_scores_are_the_references(tmp_path):
    found = run(tmp_path)
    tp, cp = found["arms"]
    assert (tp["arm"], cp["arm"]) == ("aiter_tp", "aiter_cp_score") and found["label"] == tp["label"] == aiter_arm.LABEL
    assert "never run" in aiter_arm.LABEL
    assert tp["rows"] == 2 * 2 and cp["rows"] > 50 and tp["us"] > 0 and json.dumps(found)


def test_a_release_without_shards_gives_tp_alone(tmp_path):
    assert [a["arm"] for a in run(tmp_path, shard=False)["arms"]] == ["aiter_tp"]


@pytest.mark.parametrize("wrong, words", [("ids", "aiter_tp .* 1 of 4 rows differ"), ("scores", "aiter_cp_score .* differ from the reference")])
def test_wrong_answers_get_no_time(tmp_path, wrong, words):
    with pytest.raises(sweep.WorkersFailed, match=words):
        run(tmp_path, wrong)


def test_score_rows_are_whole_strips_and_a_power_of_two_of_them():
    assert [aiter_arm.score_width(n, 128) for n in (1, 8192, 8193, 131_072, 131_073)] == [64, 64, 128, 1024, 2048]


def test_a_missing_or_half_installed_library_is_said(monkeypatch):
    assert aiter_arm.missing().startswith(f"import {aiter_arm.MODULE}: ModuleNotFoundError")
    monkeypatch.setitem(sys.modules, "aiter", None)
    for name in ("aiter", "aiter.ops", aiter_arm.MODULE):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    assert "has no pa_sparse_block_score_decode or pa_sparse_block_topk" in aiter_arm.missing()


def test_the_kit_leaves_the_step_out_by_name(tmp_path):
    kit.write(tmp_path / kit.FACTS_FILE, {"device": "cuda", "node": "4x GPU", "ranks": 4, "gpus": 4, "arch": "gfx950"})
    assert kit.run_step("aiter", tmp_path, 60) == kit.LEFT_OUT_STATUS
    assert aiter_arm.MODULE in kit.read(tmp_path / "said" / "aiter.json")["why"]
