"""What is supported in which form, and the test that shows it: the README's table is made of this. `python tests/support.py` prints it."""

from __future__ import annotations

NO = "error"  # asking for it raises, naming what is allowed

# (what, staged, test of staged, one and two launches, test of those); tests are file::name
ROWS: list[tuple[str, str, str, str, str]] = [
    ("cache bf16", "yes", "test_interpreted_kernels.py::test_cp_chooses_as_the_oracle", "yes", "test_interpreted_kernels.py::test_two_launches_choose_as_the_oracle"),
    ("cache fp16", "yes", "test_cache_types.py::test_any_data_is_chosen_alike_by_tp_and_cp", "yes", "test_interpreted_kernels.py::test_two_launches_choose_as_the_oracle"),
    ("cache fp8 e4m3fn and e4m3fnuz, as such or as bytes", "yes", "test_cache_types.py::test_bytes_are_read_in_the_stated_format", "yes", "test_interpreted_kernels.py::test_two_launches_choose_as_the_oracle"),
    ("any page stride", "yes", "test_life.py::test_life", "yes", "test_interpreted_kernels.py::test_two_launches_choose_as_the_oracle"),
    ("P = 1, 2, 4, 8, 16, TP and CP", "yes", "test_reference.py::test_every_world_chooses_alike", "yes", "test_interpreted_kernels.py::test_two_launches_choose_as_the_oracle"),
    ("query_len 1 to 8, topk 1 to 64, any forced counts", "yes", "test_reference.py::test_any_problem_on_any_world", "yes", "test_interpreted_kernels.py::test_two_launches_choose_as_the_oracle"),
    ("queries gathered or replicated", "yes", "test_gloo.py::test_every_rank_gets_its_heads_ids", "yes", "test_gpu_ranks.py::test_ranks"),
    ("exchange: process group or a callable", "yes", "test_gloo.py::test_every_rank_gets_its_heads_ids", NO, "test_arguments.py::test_cp_names_what_is_wrong"),
    ("exchange: symmetric memory", "yes", "test_gloo.py::test_every_rank_gets_its_heads_ids", "yes", "test_gpu_ranks.py::test_ranks"),
    ("page tables with the ids", "yes", "test_steps.py::test_page_tables_of_every_case", NO, "test_arguments.py::test_what_only_the_staged_form_has_is_an_error_on_the_others"),
    ("graph capture", "yes", "test_gpu_capture.py::test_captured_on_one_block_and_replayed_at_any_length", "yes", "test_gpu_capture.py::test_captured_on_one_block_and_replayed_at_any_length"),
    ("profiling runs without a cache", "yes", "test_steps.py::test_a_profiling_run_chooses_nothing_and_says_so", "yes", "test_interpreted_kernels.py::test_profiling_runs_of_the_one_launch_form"),
    ("reused selections", "yes", "test_options.py::test_reusing_layers_neither_score_nor_exchange", "yes", "test_options.py::test_reusing_layers_neither_score_nor_exchange"),
    ("CPU without a GPU", "yes", "test_gloo.py::test_every_rank_gets_its_heads_ids", "interpreter", "test_interpreted_kernels.py::test_two_launches_choose_as_the_oracle"),
]  # fmt: skip


def table() -> str:
    """The table as Markdown."""
    lines = ["| what | staged | one and two launches | shown by |", "| --- | --- | --- | --- |"]
    for what, staged, test, fused, other in ROWS:
        shown = [test] if test == other else [test, other]
        lines.append(f"| {what} | {staged} | {fused} | {', '.join(f'`{name}`' for name in shown)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
