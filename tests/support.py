"""What is supported in which form, and the cases from life, each with the tests that show it; `python tests/support.py` prints all.

The README's table is made of the first.
"""

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
    ("adaptive: TP's path or CP's, chosen on the device", NO, "test_arguments.py::test_only_the_forms_without_a_cut_are_adaptive", "yes", "test_interpreted_ranks.py::test_few_blocks_take_tps_path_and_many_cps"),
    ("page tables with the ids", "yes", "test_steps.py::test_page_tables_of_every_case", "yes", "test_interpreted_kernels.py::test_page_tables_of_the_fused_forms"),
    ("graph capture", "yes", "test_gpu_capture.py::test_captured_on_one_block_and_replayed_at_any_length", "yes", "test_gpu_capture.py::test_captured_on_one_block_and_replayed_at_any_length"),
    ("profiling runs without a cache", "yes", "test_steps.py::test_a_profiling_run_chooses_nothing_and_says_so", "yes", "test_interpreted_kernels.py::test_profiling_runs_of_the_one_launch_form"),
    ("reused selections", "yes", "test_options.py::test_reusing_layers_neither_score_nor_exchange", "yes", "test_interpreted_ranks.py::test_reusing_layers_hand_on_ids_and_page_tables_and_launch_nothing"),
    ("padding buckets, bounds to 1M tokens, batches to 256, topk 64", "yes", "test_interpreted_kernels.py::test_the_fused_forms_do_what_the_staged_one_does", "yes", "test_interpreted_ranks.py::test_ranks_do_what_the_staged_form_does"),
    ("CPU without a GPU", "yes", "test_gloo.py::test_every_rank_gets_its_heads_ids", "interpreter", "test_interpreted_kernels.py::test_two_launches_choose_as_the_oracle"),
    ("whole steps: decode rows by TP or CP, prefill chunks behind them", "yes", "test_whole_step.py::test_cp_over_the_decode_rows_and_prefill_on_ranks", "yes", "test_interpreted_whole_step.py::test_the_fused_forms_decode_in_a_mixed_step_and_through_its_operator"),
    ("torch.compile: decode and whole steps as operators", "yes", "test_operators.py::test_cp_is_what_a_compiled_model_runs", "yes", "test_interpreted_whole_step.py::test_the_fused_forms_decode_in_a_mixed_step_and_through_its_operator"),
    ("attention over the chosen blocks, bf16, fp16 and fp8 K and V", "yes", "test_attention.py::test_sparse_attention_is_dense_attention_under_the_mask", "yes", "test_interpreted_attention.py::test_sparse_attention_is_dense_attention_under_the_mask"),
]  # fmt: skip


_DO = "test_interpreted_kernels.py::test_the_fused_forms_do_what_the_staged_one_does"  # TP; CP gathered in one launch, replicated in two
_ADAPTIVE = "test_interpreted_kernels.py::test_so_do_adaptive_calls"  # both paths
_RANKS = "test_interpreted_ranks.py::test_ranks_do_what_the_staged_form_does"  # CP of 2 and 8 ranks (16 under -m slow)
_PAGES = "test_interpreted_kernels.py::test_page_tables_of_the_fused_forms"
_REUSE = "test_interpreted_ranks.py::test_reusing_layers_hand_on_ids_and_page_tables_and_launch_nothing"
_MANY = "test_interpreted_kernels.py::test_heads_of_many_replicas"
_TP_MANY = "test_interpreted_kernels.py::test_tp_of_heads_with_many_replicas"
_NO_REUSE = "test_options.py::test_reuse_belongs_to_cp"
WAYS = ("TP", "CP replicated", "CP gathered", "adaptive")
# What the staged form has, done by the forms without a cut: for each of WAYS the tests of one launch and of two.
FUSED: dict[str, tuple[tuple[str, str], ...]] = {
    "P = 8 and 16, beyond the heads": ((_TP_MANY, _TP_MANY), (_RANKS, _MANY), (_RANKS, _RANKS), (_RANKS, _MANY)),
    "page tables and attended tokens": ((_PAGES, _PAGES), (_RANKS, _PAGES), (_RANKS, _RANKS), (_ADAPTIVE, _ADAPTIVE)),
    "reused selections": ((_NO_REUSE, _NO_REUSE), (_REUSE, _REUSE), (_REUSE, _REUSE), (_REUSE, _REUSE)),
    "padding rows of a bucket": ((_DO, _DO), (_RANKS, _DO), (_DO, _RANKS), (_ADAPTIVE, _ADAPTIVE)),
    "a bound of 1M tokens": ((_DO, _DO), (_RANKS, _DO), (_DO, _RANKS), (_ADAPTIVE, _ADAPTIVE)),
    "batches to 256": ((_DO, _DO), (_RANKS, _DO), (_DO, _RANKS), (_ADAPTIVE, _ADAPTIVE)),
    "topk 64": ((_DO, _DO), (_RANKS, _DO), (_DO, _RANKS), (_ADAPTIVE, _ADAPTIVE)),
}


# Failures that people hit in systems like this one: what, and the tests of that whole kind of fault. A case's function in
# life.py is run by test_life.py, and by test_gpu_life.py on a device.
CASES: dict[str, tuple[str, tuple[str, ...]]] = {
    "K01": ("padding rows with draft tokens", ("life.py::k01_padding_rows_of_draft_tokens", "test_gpu_kernels.py::test_short_and_padding_rows_with_huge_lengths_next_to_them")),
    "K02": ("lengths without the draft tokens", ("life.py::k02_lengths_include_the_draft_tokens",)),
    "K05": ("more ties than a tie buffer holds", ("life.py::k05_ties_overflow_no_buffer",)),
    "K08": ("a needle beyond 128k lost", ("life.py::k08_a_needle_anywhere_is_found",)),
    "K10": ("table read a token, or first tokens alone scored", ("life.py::k10_any_token_of_a_block_may_hold_its_maximum",)),
    "K13": ("a mutation test that cannot fail", ("life.py::k13_a_draft_token_is_seen_from_its_own_row_on", "test_life.py::test_where_the_mask_of_the_longest_row_can_be_seen", "test_life.py::test_mutants_fail_the_table_of_cases", "test_interpreted_mutants.py::test_a_broken_kernel_is_noticed")),
    "X02": ("several sources of the world size", ("test_gloo.py::test_a_shard_that_does_not_fit_is_refused", "test_options.py::test_options_build_what_they_say", "test_arguments.py::test_calls_name_what_is_wrong", "test_gpu_ranks.py::run_group_size")),
    "X05": ("a rank with nothing to do leaves early", ("test_gloo.py::test_ranks_with_different_row_counts_all_raise_before_any_collective", "test_whole_step.py::test_ranks_whose_decode_rows_differ_all_raise")),
    "X07": ("fewer candidates than topk", ("life.py::x07_fewer_candidates_than_topk",)),
    "X10": ("int64 keys through 32-bit transports", ("test_gloo.py::test_keys_travel_bit_for_bit",)),
    "X14": ("one rank raises, the others wait", ("test_sweep.py::test_a_rank_with_a_bad_table_is_named_and_no_rank_is_left", "test_sweep.py::test_a_rank_that_dies_before_its_first_exchange_is_named_and_no_rank_is_left")),
    "G01": ("captured on one block, replayed at 128k", ("test_gpu_capture.py::test_captured_on_one_block_and_replayed_at_any_length", "test_reference.py::test_every_world_chooses_alike")),
    "G04": ("forbidden inside a capture", ("test_gpu_capture.py::test_captured_on_one_block_and_replayed_at_any_length", "test_gpu_capture.py::test_a_call_neither_allocates_nor_synchronises", "test_gpu_ranks.py::run_capture_after_collectives")),
    "G06": ("first collective inside a capture", ("test_gpu_ranks.py::test_the_first_call_of_fresh_processes_is_inside_a_capture", "test_gpu_capture.py::test_capture_before_warmup_raises", "test_gloo.py::test_the_first_call_of_fresh_processes_finds_its_transport_warm")),
    "G08": ("rubbish in a bucket's padding", ("life.py::g08_padding_of_a_bucket_changes_nothing", "test_gpu_capture.py::test_a_bucket_larger_than_the_batch_with_rubbish_in_its_padding")),
    "N02": ("negative zero", ("life.py::n02_zeros_of_both_signs_are_one_score", "test_keys.py::test_codes_order_as_scores_do")),
    "N03": ("fp8 formats, labels, scales", ("test_cache_types.py::test_one_byte_means_different_numbers", "test_cache_types.py::test_bytes_are_read_in_the_stated_format", "test_cache_types.py::test_bytes_without_a_format_are_refused", "test_cache_types.py::test_scales_touch_returned_scores_only", "test_options.py::test_names_of_cache_types")),
    "N06": ("traps of the interpreter and of topk", ("life.py::n06_infinities_are_chosen_once", "test_interpreted_kernels.py::test_the_interpreters_bf16_dot_is_still_wrong", "test_interpreted_kernels.py::test_with_tritons_own_sort")),
    "M01": ("page times stride beyond 2**31", ("life.py::m01_pages_beyond_two_to_the_31_elements", "test_gpu_kernels.py::test_pages_beyond_two_to_the_31_elements", "test_gpu_kernels.py::test_score_rows_beyond_two_to_the_31_elements")),
    "M02": ("sliced caches", ("life.py::m02_caches_may_be_slices",)),
    "M07": ("lengths, table and key widths disagree", ("life.py::m07_the_highest_block_is_returned_as_itself", "test_keys.py::test_every_block_id_of_the_longest_context_comes_back", "test_gpu_capture.py::test_the_longest_bound_gives_the_highest_ids")),
    "C05": ("ranks and heads", ("test_shard.py::test_heads_of_m3", "test_shard.py::test_worlds_that_do_not_fit_are_refused_by_name", "test_shard.py::test_heads_are_owned_in_runs_and_replicas_share", "test_reference.py::test_every_world_chooses_alike")),
    "C09": ("page size is not the block", ("test_arguments.py::test_a_cache_of_the_wrong_page_size_names_the_block", "test_shapes.py::test_shapes_name_what_is_wrong")),
    "B02": ("warm caches and constant inputs", ("test_timing.py::test_one_cache_of_8_mib_on_a_50_mib_cache_is_never_called_cold", "test_timing.py::test_a_rate_above_the_memorys_peak_is_refused", "test_inputs.py::test_constant_inputs_are_refused_for_timing", "test_sweep.py::test_constant_keys_are_never_timed")),
    "B04": ("rank 0's clock alone", ("test_timing.py::test_a_sample_is_the_slowest_rank_of_the_same_iteration", "test_records.py::test_the_median_of_slowest_ranks")),
    "B05": ("uniform lengths alone", ("test_fit.py::test_b05_ragged_and_uniform_rows_never_share_a_label", "test_fit.py::test_b05_the_published_skewed_row", "test_sweep.py::test_the_default_gpu_grid_is_what_the_issue_asks_for")),
    "B06": ("both arms the same code", ("test_fit.py::test_b06_one_edited_row_is_rejected_from_the_fit", "test_fit.py::test_b06_both_arms_the_same_code", "test_sweep.py::test_two_arms_that_ran_the_same_path_are_an_error")),
    "P02": ("failures that exit 0", ("test_notebook_10.py::test_a_point_that_failed_fails_the_notebook_after_its_table", "test_notebook_20.py::test_failures_that_may_exit_0")),
    "P03": ("killed, or children left behind", ("test_kills.py::test_a_hundred_kills_at_random_moments", "test_sweep.py::test_workers_die_with_the_launcher")),
    "P06": ("widgets that are only text", ("test_notebook_20.py::test_it_runs_headless_and_without_ipywidgets",)),
    "F01": ("badly scaled parameters", ("test_fit.py::test_f01_units_do_not_matter", "test_fit.py::test_f01_what_never_varies_is_reported_and_not_invented")),
    "F02": ("a parameter that is zero", ("test_fit.py::test_f02_errors_are_right_where_a_parameter_is_zero", "test_fit.py::test_f02_a_cost_that_fits_to_zero_has_a_finite_interval_the_right_way_round")),
    "F05": ("one line through a switch", ("test_fit.py::test_f05_a_transport_switch_shows_in_the_residuals", "test_fit.py::test_f05_beyond_the_fitted_range_is_marked")),
}  # fmt: skip


def case_table() -> str:
    """The cases from life and their tests, as Markdown."""
    lines = ["| case | what went wrong elsewhere | tests |", "| --- | --- | --- |"]
    return "\n".join(lines + [f"| {case} | {what} | {', '.join(f'`{name}`' for name in tests)} |" for case, (what, tests) in CASES.items()])


def table() -> str:
    """The table as Markdown."""
    lines = ["| what | staged | one and two launches | shown by |", "| --- | --- | --- | --- |"]
    for what, staged, test, fused, other in ROWS:
        shown = [test] if test == other else [test, other]
        lines.append(f"| {what} | {staged} | {fused} | {', '.join(f'`{name}`' for name in shown)} |")
    return "\n".join(lines)


def fused_table() -> str:
    """What the one- and two-launch forms do as the staged one does, and by whose tests, as Markdown."""
    lines = [f"| in one and two launches | {' | '.join(WAYS)} |", "| --- " * (1 + len(WAYS)) + "|"]
    cells = {what: [", ".join(f"`{name}`" for name in dict.fromkeys(pair)) for pair in pairs] for what, pairs in FUSED.items()}
    return "\n".join(lines + [f"| {what} | {' | '.join(row)} |" for what, row in cells.items()])


if __name__ == "__main__":
    print(table(), fused_table(), case_table(), sep="\n\n")
