"""Which tests are left to `make test-all`, and which of their cases stay in `make test`.

The quick tier keeps at least one case of every kind: every verifier is enumerated, every drafter writes like plain
decoding, every kind of attention is scored, a real model answers, every kernel runs. `test_tiers.py` holds this table
to the tests that exist and to that promise. Times beside entries are seconds of one quiet core.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import pytest

NONE = ""

SLOW: dict[str, str | int] = {
    # Exact enumeration: all worlds and shapes, 106 s
    "conformance/test_verifiers.py::test_the_emitted_law_is_the_target_s_and_no_verifier_passes_the_optimum": (
        ".*-(ties 1|zeros 0|end 1)"
    ),
    "conformance/test_verifiers.py::test_every_verdict_has_the_probability_that_the_slow_truth_gives_it": (
        ".*-(one level|zeros 0)"
    ),
    "conformance/test_verifiers.py::test_the_emitted_law_is_the_target_s_on_any_laws": (
        "(cascade|traversal|rrs) on paths"
    ),
    "conformance/test_verifiers.py::test_no_verifier_passes_the_optimum_on_any_laws": NONE,
    "conformance/test_verifiers.py::test_verdicts_are_exact_whatever_the_shape_of_the_tree": (
        "traversal on (wide|ragged) trees|(gbv|cascade|k-seq) on paths, nodes by token"
    ),
    "conformance/test_verifiers.py::test_a_frozen_case_has_its_optimum_and_its_block_efficiencies": (
        "(paths|rsd-c)-(3,2,2 medium|4,1,3 far|3,2,3 ties)"
    ),
    "test_enumeration.py::test_the_weights_of_every_draft_sum_to_one": "(cascade|mss|traversal)-True",
    "test_slow_truth.py::test_a_frozen_case_has_its_block_efficiency_and_the_law_of_the_target": ".*3,2,2 medium.*",
    "test_slow_truth.py::test_a_frozen_case_has_its_optimum": ".*(3,2,2 medium|4,1,3 far).*",
    "test_verify_precision.py::test_in_float32_the_emitted_law_is_the_target_s_to_six_digits": ".*medium.*",
    "test_verify_precision.py::test_in_float32_any_laws_are_verified_to_six_digits": NONE,
    "test_verify_precision.py::test_awkward_laws_in_float32_give_odds_that_are_odds_and_laws_that_are_laws": (
        "(block|gbv|cascade|mss|k-seq) on paths-7-device|(rrs|traversal) on rsd-c-7-device"
    ),
    "test_verify_precision.py::test_odds_and_residuals_in_float32_are_those_in_float64": (
        "(token|gbv|cascade|mss|k-seq) on paths-device|(rrs|traversal) on rsd-c-device"
    ),
    "test_slow_truth.py::test_every_verifier_is_lossless_and_below_the_optimum_on_awkward_laws": r".*-\(2, 2, 3\)",
    "test_policies.py::test_policy_and_verifier_together_keep_the_law_of_the_target": 8,
    "test_verify_order.py::test_verifiers_stay_exact_where_only_some_tokens_are_ranked": "cascade-2",
    "test_policies.py::test_beams_that_are_drawn_have_the_law_of_the_brute_force": NONE,
    "test_lookup.py::test_the_first_tokens_have_the_targets_law": ("stand-paths:2x2-cascade"),
    "test_fusion.py::test_a_tree_drawn_from_a_model_and_what_was_retrieved_keeps_the_targets_law": "rsd-s.*",
    "test_claims.py::test_the_command_measures_judges_and_reads_again": NONE,
    "test_model_drafter_probs.py::test_the_first_tokens_have_the_targets_law": "plain-chain-block",
    "test_builder.py::test_short_texts_have_the_law_of_the_target": "auto on rsd-c:2,1",
    "test_guarded.py::test_short_texts_have_the_law_of_the_target_whatever_steps_rest": "block on paths:2x2-at random",
    "test_guarded.py::test_a_head_predicts_as_in_training_after_any_rests": "carry-topk.*",
    "test_builder.py::test_a_text_does_not_depend_on_the_texts_beside_it": (
        "cascade-paths:2x2|match-rsd-c:2,1|rrs-dynamic:3"
    ),
    "test_policies.py::test_beams_have_the_law_of_the_first_prefixes_of_a_permutation": "2-.*",
    "test_match.py::test_with_the_same_seed_the_output_equals_plain_decoding": 5,
    "test_verify_cascade.py::test_the_cascade_is_exact_with_any_mixture": "(3,2,3 ties|3,3,2 far)-.*",
    "test_verify_cascade.py::test_the_cascade_leads_the_other_verifiers_of_the_same_paths": NONE,
    "test_with_replacement.py::test_every_rule_that_accepts_them_keeps_the_law": ".*-wide",
    "test_fork.py::test_with_one_branch_short_texts_have_the_law_of_the_target": NONE,
    "test_recycle.py::test_the_text_is_that_of_plain_decoding": NONE,
    "test_model_drafter.py::test_the_text_is_that_of_plain_decoding": "another model-wild",
    "test_model_ahead.py::test_trees_are_those_of_level_by_level": "paths:3x3-cascade-drawn|rsd-c.*-greedy",
    "test_model_ahead.py::test_trees_are_right_whatever_verdicts_keep": NONE,
    "test_model_ahead.py::test_an_interrupted_step_is_drafted_for_again": "1-chain:3",
    "test_model_ahead.py::test_distributions_are_those_of_the_drafter": NONE,
    "test_inflight.py::test_trees_of_a_draft_model_are_passed_over_before_the_host_knows_where_they_stand": (
        "chain:2-block"
    ),
    "test_lookup.py::test_texts_of_one_seed_do_not_tell_a_memory_of_each_others_draws": NONE,
    "test_verify_identities.py::test_with_one_path_all_block_verifiers_agree_on_any_laws": NONE,
    "test_stand.py::test_memory_is_bounded_over_200_000_tokens": NONE,
    # Audits of a tiny model with many samples
    "test_audit_server.py::test_the_command_prints_the_word_and_exits_with_its_code": "argmax_draft-.*",
    "test_audit_planted.py::test_the_audit_of_a_server_finds_it": NONE,
    "test_audit_planted.py::test_the_audit_of_a_model_finds_it": NONE,
    "test_audit_server.py::test_servers_of_many_kinds_are_audited": NONE,
    "test_audit_model.py::test_match_is_lossless": "whole",
    "test_audit_model.py::test_match_is_lossless_whoever_of_several_sources_drafts": NONE,
    "test_audit_model.py::test_a_rule_that_needs_q_is_lossless_for_a_drafter_that_tells_the_truth": "block",
    "test_audit_model.py::test_a_planted_verifier_is_not_lossless": "sharpened",
    "test_audit_model.py::test_several_verifiers_share_a_model_and_the_worst_word_decides": NONE,
    "test_audit_model.py::test_the_command_prints_the_word_on_its_own_line_and_exits_with_its_code": NONE,
    "test_audit_model.py::test_a_model_in_low_precision_is_sampled_and_its_greedy_texts_decide_nothing": NONE,
    # Verifiers over batches, 150 s: 60 of them traced by a compiler
    "test_verify_batches.py::test_a_verifier_traced_on_one_batch_serves_every_batch_of_the_same_shapes": (
        "traversal on without-replacement-rows on the walk"
    ),
    "test_verify_batches.py::test_a_batch_gives_each_sequence_what_it_gets_alone": "block on paths-device",
    "test_verify_batches.py::test_a_tree_gets_the_same_verdict_beside_deeper_and_wider_ones": (
        "(traversal|k-seq) on paths-device"
    ),
    "test_verify_batches.py::test_room_for_more_changes_nothing": 8,
    "test_verify_batches.py::test_a_sequence_without_a_draft_gets_the_same_token_beside_others": 4,
    "test_verify_batches.py::test_host_and_device_give_the_same_verdicts_in_a_large_vocabulary": (
        "(cascade|block) on paths|traversal on without-replacement"
    ),
    "test_verify_batches.py::test_no_coin_decides_twice_in_trees_of_any_size": "paths:2x140.*-device",
    "test_head_audit.py::test_the_first_tokens_have_the_targets_law": NONE,
    # Programs of models: each attack that ends with its time takes seconds
    "test_bench_execution.py::test_an_endless_loop_ends_with_its_time": "when called-the kernel alone",
    "test_bench_execution.py::test_an_endless_sleep_ends_with_its_time": "True",
    "test_bench_execution.py::test_memory_is_bounded": "the kernel alone",
    "test_bench_execution.py::test_every_published_solution_of_humaneval_passes_and_an_empty_one_does_not": "0",
    # Heads that learn, 60 s
    "test_head_learning.py::test_a_head_learns_a_rule": NONE,
    "test_head_cli.py::test_what_a_head_has_learned_is_shown_while_it_learns_and_drawn": NONE,
    "test_head_cli.py::test_a_head_is_trained_and_drafts": "chat",
    "test_head_cli.py::test_whoever_would_wait_for_hours_is_told": NONE,
    # Triton's interpreter
    "test_head_kernels.py::test_trees_are_laid_as_without_kernels": (
        "0-topk:3.*|2-topk:9,depth=3,width=3-3-{}|9-topk:40,depth=4,width=4-1-{'carry': True}"
    ),
    "test_head_kernels.py::test_trees_of_any_form_are_laid_as_without_kernels": "{'masks': 2, 'bias': 3}",
    "test_head_kernels.py::test_wide_heads_draft_as_without_kernels": NONE,
    "test_head_kernels.py::test_the_kernels_compile_for_a_hopper_gpu": NONE,
    "test_head_kernels.py::test_heads_of_large_models_fit_into_the_shared_memory_of_a_smaller_gpu": NONE,
    "test_layer_kernels.py::test_passes_of_usual_layers_score_as_the_model_does": "qwen2-window",
    "test_layer_kernels.py::test_products_find_the_same_in_slices": "8",
    "test_head_kernels.py::test_products_find_the_same_in_slices": NONE,
    "test_layer_kernels.py::test_positions_of_a_model_that_sees_images_are_its_own": NONE,
    "test_draw.py::test_flat_rows_are_cut_as_they_would_be_whole": "0",
    "test_layer_kernels.py::test_other_layers_are_left_alone": "gemma2",
    "test_layer_kernels.py::test_what_is_changed_around_the_layers_counts": "norm",
    "test_layer_kernels.py::test_a_layer_with_other_positions_is_seen_in_a_pass_that_is_mostly_padding": NONE,
    "test_layer_kernels.py::test_layers_with_large_matrices_leave_products_to_the_library": "qwen3",
    "test_layer_kernels.py::test_slots_that_a_padded_pass_does_not_name_stay_as_they_are": NONE,
    "test_layer_kernels.py::test_positions_that_depend_on_the_others_are_not_looked_up": "scaling2-False",
    "test_layer_kernels.py::test_what_stands_around_the_layers_is_one_kernel_each": "llama-dtype0",
    "test_layer_kernels.py::test_each_layer_is_compared_until_one_agrees_in_a_pass_of_this_size": NONE,
    "test_layer_kernels.py::test_the_kernels_compile_for_a_hopper_gpu": NONE,
    "test_prefixes.py::test_a_head_predicts_behind_inherited_rows_as_in_training": "longspec with states",
    "test_head_drafter.py::test_rows_that_a_device_has_committed_are_read_as_in_training": NONE,
    "test_inflight.py::test_trees_of_a_head_are_passed_over_before_the_host_knows_where_they_stand": "1",
    "test_inflight.py::test_a_head_that_rests_reads_later_what_a_pass_ahead_has_overwritten": NONE,
    "test_inflight.py::test_sources_take_turns_and_passes_still_begin_ahead": NONE,
    "test_sources.py::test_texts_are_those_of_plain_decoding_whoever_drafts": "0-0.0",
    "test_head_drafter.py::test_the_best_trees_are_laid_on_the_device_as_on_the_host": (
        "(fspad-topk:30|two layers-topk:2),.*-False|eagle-topk:2,depth=2,width=2-True"
    ),
    "test_head_ahead.py::test_trees_laid_behind_a_verdict_are_those_of_the_host": (
        "parallel longspec-topk:12,.*|longspec with states-ranks:mcsd"
    ),
    "test_head_ahead.py::test_sampled_texts_are_those_of_plain_decoding": "parallel with bias",
    "test_head_drawn.py::test_trees_are_those_of_level_by_level": ("paths:3x3-cascade-of all kinds"),
    "test_head_drawn.py::test_heads_of_every_form_draw_so": "longspec with states-paths.*|parallel with bias-chain.*",
    "test_head_drawn.py::test_a_verdict_that_never_counted_is_undone": "(before-chain:3|after-paths:2x3)-carry",
    "test_head_drawn.py::test_where_a_distribution_has_too_few_tokens_the_host_grows_the_tree": NONE,
    "test_head_drawn.py::test_options_of_the_drafter_count": NONE,
    "test_head_drawn.py::test_a_head_by_kernels_draws_what_the_host_draws": "paths:2x2.*",
    "test_head_kernels.py::test_what_follows_the_nodes_of_drawn_trees_is_the_same_without_kernels": (
        r"paths:3x3-\{'carry': True, 'gate': 'full'\}|template:mcsd-\{'layers': 2, 'carry': True\}"
    ),
    "test_head_drafter.py::test_forks_and_texts_that_come_and_go_are_predicted_as_in_training": "parallel longspec",
    "test_head_drafter.py::test_a_cache_with_a_window_does_not_grow_with_the_text": "window",
    "test_head_drafter.py::test_a_tree_of_ranks_is_drafted_on_the_device_as_on_the_host": "fork-eagle",
    "test_head_replay.py::test_a_replay_counts_the_passes_that_the_engine_makes": "topk:24,.*-fspad",
    "test_head_learning.py::test_a_run_that_was_ended_goes_on": NONE,
    "test_head_learning.py::test_answers_are_those_of_the_model": NONE,
    "test_controller.py::test_an_honest_source_is_used_about_as_well_as_in_hindsight": "poor-steep",
    "test_merge.py::test_texts_of_different_tasks_run_together_and_are_those_of_plain_decoding": "cascade",
    "test_attention.py::test_tree_attention_equals_the_plain_one": (
        "(a tree behind nothing|texts of different lengths|nine heads over three|head width 80|values wider|"
        "eight splits|soft|.*window|padding).*"
    ),
    "test_attention.py::test_the_kernels_compile_for_a_hopper_gpu": NONE,
    "test_recycle_kernels.py::test_learning_equals_the_plain_one": (
        "(one node alone|a table that is full|several parts|several blocks|texts in a batch|padding).*"
    ),
    "test_recycle_kernels.py::test_the_kernels_compile_for_a_hopper_gpu": NONE,
    "test_recycle_kernels.py::test_any_laws_are_averaged": NONE,
    "test_device_paths.py::test_the_kernel_compiles_for_a_hopper_gpu": NONE,
    "test_draw.py::test_the_kernel_compiles_for_a_hopper_gpu": NONE,
    "test_head_ladder.py::test_texts_are_those_of_plain_decoding_whatever_size_is_drafted": NONE,
    "test_controller.py::test_a_batch_that_grows_and_shrinks_has_the_size_that_pays_for_it": NONE,
    "test_device_paths.py::test_the_kernel_draws_the_same": "1-1-0|5-4-2",
    "test_device_paths.py::test_the_first_tokens_have_the_targets_law": "paths:2x2-cascade",
    "test_graphs.py::test_a_pass_by_kernels_scores_trees_as_the_model_does": NONE,
    "test_graphs.py::test_a_fused_pass_scores_as_the_model_does": "qwen2-window",
    "test_graphs.py::test_drafting_with_a_model_by_kernels_writes_the_same_texts": NONE,
    "test_rounding.py::test_layers_of_a_large_residual_stream_run_compiled": "dtype1",
    "test_rounding.py::test_layers_whose_program_attends_with_another_scale_run_uncompiled": "dtype1",
    "test_inflight.py::test_sampled_texts_are_the_same": NONE,
    "test_inflight.py::test_texts_that_begin_with_cached_rows_are_written_and_drafted_for_alike": NONE,
    "test_inflight.py::test_a_table_foresees_its_trees": NONE,
    "test_graphs.py::test_trees_without_a_text_change_nothing_for_the_others": NONE,
    "test_inflight.py::test_an_interrupted_step_is_made_again": NONE,
    "test_inflight.py::test_a_commit_that_was_interrupted_is_made_again": NONE,
    "test_inflight.py::test_a_text_that_stops_leaves_a_pass_behind_that_nobody_uses": NONE,
    "test_inflight.py::test_engines_that_share_a_target_take_nothing_from_each_other": NONE,
    "test_inflight.py::test_where_there_is_no_memory_for_it_a_pass_does_not_begin": NONE,
    "test_inflight.py::test_nothing_of_a_pass_that_nobody_uses_stays_in_the_slots": NONE,
    "test_inflight.py::test_a_bounded_depth_does_not_keep_a_pass_from_beginning": NONE,
    "test_inflight.py::test_idle_time_behind_a_pass_that_nobody_uses_is_nobodys": NONE,
    # Drafters, and families of models: one for every kind of attention
    "conformance/test_drafters.py::test_the_text_is_that_of_plain_decoding": ".*-match|disturbed-auto",
    "test_model_drafter.py::test_every_law_is_the_draft_models_own_after_the_whole_text": "0.8-chain",
    "conformance/test_target.py::test_low_precision_stays_close_to_the_models_own_forward": (
        "(llama|gemma2|mixtral)-dtype0"
    ),
    "conformance/test_target.py::test_a_forked_sequence_scores_exactly_as_one_that_was_opened": (
        "llama|gemma2|deepseek-v3"
    ),
    "conformance/test_target.py::test_prefill_gives_the_same_law_in_chunks_of_any_size": ".*-3",
    # Texts under a grammar: every drafter stays quick where drafting pays, and a rule of each kind
    "test_constrain.py::test_every_drafter_writes_what_plain_constrained_decoding_writes": ".*-True",
    "test_constrain.py::test_the_first_tokens_have_the_law_of_plain_constrained_decoding": "disturbed-chain:3-block",
    # The real model; `test_smollm2_default.py` stands in
    "test_smollm2.py::test_conversations_and_texts_give_the_same_prompt": NONE,
    "test_smollm2.py::test_options_that_do_not_exist_or_do_not_fit_get_one_sentence": NONE,
    "test_smollm2.py::test_what_is_no_prompt_gets_one_sentence": NONE,
    "test_smollm2.py::test_leaving_a_stream_early_frees_its_slot": NONE,
    "test_smollm2.py::test_an_answer_carries_the_seed_that_writes_it_again": NONE,
    "test_smollm2.py::test_a_streamed_character_is_never_split": NONE,
    "test_golden.py::test_texts_are_the_recorded_ones": NONE,
    "test_demo.py::test_the_demo_shows_a_copy_and_free_writing": NONE,
    "test_methods.py::test_a_method_by_name_writes_what_the_model_would_have_written": NONE,
    "test_smollm2.py::test_the_prompts_are_varied_enough_to_mean_something": NONE,
    "test_smollm2.py::test_greedy_output_equals_transformers_generate": NONE,
    "test_smollm2.py::test_greedy_output_in_a_batch_equals_transformers_generate": NONE,
    "test_smollm2.py::test_the_same_seed_writes_the_same_text_with_and_without_drafting": NONE,
    "test_smollm2.py::test_logprobs_equal_a_plain_forward_under_speculation": NONE,
    "test_smollm2.py::test_penalties_write_the_same_with_and_without_drafting": NONE,
    "test_smollm2.py::test_streamed_text_equals_the_completion": NONE,
    "test_smollm2.py::test_two_streams_at_once_both_get_their_whole_text": NONE,
    "test_smollm2.py::test_threads_may_share_a_model": NONE,
    "test_smollm2.py::test_a_stop_string_that_spans_tokens_ends_the_text_before_it": NONE,
    "test_int8.py::test_smollm2_drafts_with_its_head_and_writes_what_plain_decoding_writes": NONE,
    "test_int8.py::test_smollm2_scores_trees_bit_for_bit": NONE,
    "test_smollm2_presets.py::test_greedy_text_is_that_of_plain_decoding": "cascade",
    "test_smollm2_presets.py::test_sampled_text_is_that_of_plain_decoding_seed_for_seed": NONE,
    "test_smollm2_presets.py::test_who_drafts_from_the_targets_own_law_is_accepted_to_the_end": NONE,
    # Processes of their own, each of which imports torch and most of which load the real model
    "test_cli.py::test_a_mistake_is_one_sentence_and_exit_code_2": "arguments10-.*",
    "test_cli.py::test_generate_reads_the_prompt_from_a_file_and_seeds_repeat": NONE,
    "test_cli.py::test_generate_streams_plain_text_to_a_pipe_and_reads_standard_input": NONE,
    "test_cli.py::test_show_draft_colours_tokens_by_origin": NONE,
    "test_cli.py::test_chat_keeps_the_conversation_and_survives_a_mistake": NONE,
    "test_cli.py::test_ctrl_c_in_a_chat_ends_the_answer_and_not_the_conversation": NONE,
    "test_cli.py::test_ctrl_c_ends_an_answer_without_a_traceback": NONE,
    "test_cli.py::test_a_reader_that_goes_away_ends_the_writing": NONE,
    "test_bench_commands.py::test_a_mistake_is_one_sentence_before_anything_is_loaded": "words5-.*",
    "test_bench_commands.py::test_a_run_that_was_killed_goes_on": NONE,
    "test_bench_commands.py::test_bench_records_every_contestant_and_prints_one_json_object": NONE,
    "test_bench_commands.py::test_every_record_says_where_it_comes_from": NONE,
    "test_bench_commands.py::test_exports_have_the_forms_of_others": NONE,
    "test_bench_commands.py::test_a_report_is_made_from_records_alone": NONE,
    "test_bench_report.py::test_the_page_is_seen_and_darkens_where_the_reader_wants_it_dark": NONE,
    "test_state.py::test_of_writers_at_once_one_wins_and_readers_find_whole_files": NONE,
    "test_bench_commands.py::test_the_same_command_again_does_nothing_and_another_is_refused": NONE,
    "test_bench_commands.py::test_answers_that_differ_in_float32_are_a_failure": NONE,
    "test_bench_commands.py::test_draft_passes_and_their_cost_are_recorded": NONE,
    "test_bench_commands.py::test_a_budget_bounds_the_nodes_below_the_root_of_every_method": NONE,
    "test_bench_commands.py::test_the_table_and_the_csv_show_what_drafting_costs": NONE,
    "test_bench_commands.py::test_whoever_runs_a_lossy_method_is_told_and_it_is_no_bug": NONE,
    "test_bench_peers.py::test_a_longer_prompt_and_a_larger_batch_get_the_room_that_they_need": NONE,
    "test_bench_peers.py::test_a_seed_writes_the_same_again": NONE,
    "test_bench_peers.py::test_greedy_answers_are_the_models_own_up_to_rounding_and_have_the_length_asked_for": NONE,
    "test_bench_metrics.py::test_intervals_hold_the_true_ratio_as_often_as_they_say": "8",
    "test_bench_commands.py::test_a_report_of_nothing_is_one_sentence": NONE,
    "test_bench_peers.py::test_a_stop_token_that_llama_cpp_does_not_know_ends_an_answer_too": NONE,
    "test_bench_peers.py::test_an_answer_ends_where_the_model_ends_it": NONE,
    "test_bench_run.py::test_a_run_killed_at_any_write_goes_on_without_loss_or_doubling": "5-inside a line",
    "test_benchmarks.py::test_a_table_that_says_something_else_is_found": NONE,
    "test_gguf.py::test_two_processes_converting_at_once_both_succeed": NONE,
    "test_lingering.py::test_an_end_that_nobody_foresaw_costs_the_others_no_pass": "none-greedy",
    "test_lingering.py::test_who_comes_has_the_slot_before_the_next_step": "none",
    "test_lingering.py::test_the_next_turn_begins_with_the_rows_of_the_text_and_no_others": "none",
    "test_lingering.py::test_whoever_comes_and_goes_texts_are_those_they_are_alone": "7-.*",
    # The process of the server, 20 s: its parts are tested within the process of the tests
    "test_serve_process.py::test_the_openai_client_talks_to_the_process_and_sigterm_ends_a_stream_cleanly": NONE,
    "test_serve_process.py::test_a_model_that_is_not_there_is_one_sentence": NONE,
    # Many requests to a server
    "test_serve_steady.py::test_a_server_is_as_it_was_after_many_requests": NONE,
    "test_serve_openapi.py::test_generated_requests_are_answered_as_the_document_says": NONE,
    # Students that learn, and a nested model that is audited, 40 s
    "test_students.py::test_all_exits_learn_together": NONE,
    "test_students.py::test_a_student_rises_above_what_it_began_with_in_texts_that_it_never_saw": "fkl",
    "test_students.py::test_a_run_that_was_ended_goes_on_to_the_last_bit": NONE,
    "test_nested.py::test_the_audit_finds_nothing_in_sampled_drafts_of_mixed_exits": NONE,
    "test_nested.py::test_a_node_leaves_at_the_first_exit_that_is_sure_and_has_its_distribution": "thresholds0",
    # Exact laws again: worlds, sizes and devices, of which a few are enough
    "test_audit_methods.py::test_verifiers_of_the_same_trees_stand_in_the_known_order": NONE,
    "test_verify_precision.py::test_sixteen_paths_are_as_exact_as_two": 1,
    "test_builder.py::test_siblings_come_in_the_order_of_draws_without_replacement": NONE,
    "test_template.py::test_with_a_stop_it_may_end_early": NONE,
    "test_longest.py::test_one_branch_is_speculative_sampling_and_lossless": 20,
    "test_longest.py::test_the_distance_is_there_and_grows_with_the_branches_and_with_a_worse_draft": NONE,
    "test_sampler.py::test_a_policy_grows_the_same_tree_from_few_tokens_as_from_rows": 10,
    "test_rng.py::test_noise_is_uniform": 2,
    "test_rng.py::test_neighbours_are_independent": 2,
    "test_verify_order.py::test_the_order_is_strict_so_that_masses_add_up_to_one": 30,
    "test_verify_block.py::test_block_is_never_below_token": 10,
    "test_probe.py::test_a_calm_model_is_held_to_the_strict_bound": 4,
    "test_rounding.py::test_rounding_alone_is_no_fault_however_large_the_residual_stream": 6,
    "test_audit_blocks.py::test_p_values_of_a_correct_decoder_are_as_rare_as_they_say": 1,
    "test_merge.py::test_a_pack_is_lossless_by_the_audit": NONE,
    "test_rounding.py::test_a_planted_fault_is_found": 20,
    "test_audit_methods.py::test_what_was_enumerated_is_the_policy_of_the_method": NONE,
    "test_audit_methods.py::test_a_lossless_preset_is_lossless": "plain|block|cascade|traversal|mcsd|eagle",
    "test_head_audit.py::test_the_emitted_law_is_the_target_s": (
        "(carry|two-layers|parallelspec|longspec-states)-paths:2x2-a token of the prompt|"
        "eagle-(chain:2|rsd-c:2,1|dynamic:3|topk.*)-the table alone"
    ),
    "test_head_audit.py::test_what_is_said_after_a_branch_does_not_depend_on_what_else_was_drawn": (
        "carry|parallelspec|longspec-states"
    ),
    "test_head_audit.py::test_the_audit_of_a_model_takes_a_head": NONE,
    "test_stop.py::test_a_tree_that_stops_early_keeps_the_law": (
        "chain:2-3-2-block|paths:1x3-2-3-gbv|iid.*-mss|rsd-c:2,2-3-2-rrs|rsd-s.*-traversal"
    ),
    "test_stop.py::test_a_fork_of_one_branch_that_stops_early_keeps_the_law": 3,
    "test_verify_batches.py::test_host_and_device_give_the_same_verdicts": (
        "(block|cascade) on paths|traversal on without-replacement"
    ),
    "test_verify_batches.py::test_bare_roots_beside_trees_are_judged_by_the_same_graph": 5,
    "test_verify_batches.py::test_a_greedy_row_among_sampled_ones_is_decided_by_no_coin": 5,
    "test_verify_gbv.py::test_the_rows_that_a_path_is_verified_against_are_the_law_it_was_taken_from": 6,
    "test_verify_gbv.py::test_of_several_paths_the_one_that_ranks_highest_is_taken": 12,
    "test_verify_spectr.py::test_as_much_is_accepted_as_at_the_root_that_bisection_finds": 3,
    "test_verify_spectr.py::test_a_rho_above_the_root_accepts_less_and_stays_exact": 8,
    "test_verify_identities.py::test_with_one_path_a_verifier_is_block_or_token": 16,
    "test_verify_identities.py::test_a_perfect_drafter_is_accepted_whole": 8,
    "test_verify_recursive.py::test_recursive_rejection_is_never_above_traversal_on_the_same_trees": 10,
    "test_verify_precision.py::test_the_vocabulary_of_a_real_model_is_verified_as_exactly": 4,
    "test_verify_order.py::test_the_mass_below_every_token_is_that_of_a_full_sort": 60,
    "test_verify_auto.py::test_it_gives_the_verdicts_of_what_it_picks": 3,
    "test_longest.py::test_every_verdict_is_that_of_the_slow_truth": 4,
    "test_with_replacement.py::test_every_verdict_of_mss_has_the_probability_that_the_paper_gives_it": 3,
    "test_policies.py::test_a_policy_that_peeks_at_the_token_it_admits_is_caught": 4,
    "test_mixing.py::test_short_texts_have_the_law_of_the_target": "block-chain:2",
    "test_vllm_hooks.py::test_sampled_tokens_have_the_law_of_the_model_beside_greedy_ones": "1.4-drawn",
    "test_int8.py::test_the_audit_of_an_int8_target_is_lossless": NONE,
    # Texts that are those of plain decoding, and drafts that are those of the slow way
    "test_bench_peers.py::test_peers_between_our_own_runs_change_nothing_on_either_side": 2,
    "test_bench_peers.py::test_forbidden_ends_give_answers_of_full_length_without_them": 2,
    "test_bench_peers.py::test_a_batch_is_written_as_its_prompts_alone": 2,
    "test_bench_peers.py::test_a_seed_writes_the_same_again_and_leaves_torchs_own_draws_alone": 2,
    "test_sources.py::test_every_source_has_the_rows_that_a_text_begins_with": 1,
    "test_sources.py::test_a_warm_up_lets_every_source_draft_and_leaves_no_verdict": 1,
    "test_hf.py::test_greedy_output_equals_generate": 4,
    "test_models.py::test_smollm2_tokenizes_as_llama_cpp_does_and_back": 2,
    "test_int8.py::test_a_damaged_copy_is_made_again": 2,
    "test_inflight.py::test_logprobs_are_right_although_the_next_pass_overwrites_the_logits": NONE,
    "test_draw.py::test_texts_with_penalties_are_judged_by_the_graphs_of_all_others": NONE,
    "test_model_ahead.py::test_near_the_end_of_the_draft_models_context_the_host_drafts": NONE,
    "test_model_drafter.py::test_a_draft_model_that_sees_a_window_counts_the_rows_of_a_tree_in_it": NONE,
    "test_puct.py::test_texts_are_those_of_plain_decoding": 1,
    "test_constrain.py::test_greedy_texts_are_the_same_with_every_rule": 8,
    "test_guarded.py::test_a_bare_root_is_a_step_of_plain_decoding_for_every_rule": 4,
    "test_recycle.py::test_memory_is_bounded_over_200_000_tokens": NONE,
    "test_model_ahead.py::test_where_a_distribution_has_too_few_tokens_the_host_grows_the_tree": NONE,
    "test_device_paths.py::test_the_text_is_that_of_plain_decoding": "chain:4",
    "test_cells.py::test_a_memory_knows_nothing_of_the_turns_before_unless_it_may": "False",
    "test_builder.py::test_greedy_texts_are_those_of_plain_decoding": (
        "(match|token|gbv|lambda-gbv) on paths:2x2|rrs on dynamic:3|traversal on (rsd-s|threshold).*"
    ),
    "test_guarded.py::test_both_steps_write_like_plain_decoding": (
        "exact sizes-known ahead-PipelinedStep|buckets-learning-Step"
    ),
    "test_guarded.py::test_the_text_of_every_drafter_is_that_of_plain_decoding": (
        "(disturbed|head|memories|model|ngram|recycle)-0.9"
    ),
    "test_guarded.py::test_the_distributions_of_a_draft_model_are_right_after_any_rests": "chain:4-block",
    "test_guarded.py::test_after_a_rest_a_drafter_drafts_what_it_would_have_drafted_without": 4,
    "test_engine.py::test_speculation_writes_what_plain_decoding_writes": (
        r"ngram-0\.8|adversarial-2\.0|truth among decoys-0\.0"
    ),
    "test_engine.py::test_penalties_follow_each_nodes_own_path": r"0\.0-penalty1|0\.9-penalty[02]",
    "conformance/test_steps.py::test_texts_are_those_of_plain_decoding": (
        "exact sizes-0.9-.*-PipelinedStep|buckets-0.0-.*-Step"
    ),
    "test_builder.py::test_a_greedy_text_is_that_of_plain_decoding_beside_sampled_ones": (
        "(auto|block|cascade|mss|k-seq) on paths:2x2|(rrs|traversal) on rsd-c:2,1"
    ),
    "test_builder.py::test_with_match_sampled_texts_are_those_of_plain_decoding_seed_for_seed": 3,
    "test_builder.py::test_every_budget_is_kept": 5,
    "test_methods.py::test_a_preset_drafts_at_most_24_nodes_and_is_cut_to_any_budget": 6,
    "test_methods.py::test_a_preset_without_a_model_keeps_to_any_budget_and_writes_the_same": 4,
    "test_template.py::test_texts_are_those_of_plain_decoding": 2,
    "test_topk.py::test_texts_are_those_of_plain_decoding": "topk:8,.*-2",
    "test_graph.py::test_texts_are_those_of_plain_decoding": "graph:8-2",
    "test_trigram.py::test_texts_are_those_of_plain_decoding_cold_and_warm": "None",
    "test_ngram.py::test_the_text_is_that_of_plain_decoding": 2,
    "test_suffix.py::test_the_text_is_that_of_plain_decoding": 2,
    "test_head_copies.py::test_copies_change_no_text_and_reach_deeper_than_the_head": "0.8",
    "test_serve_prefixes.py::test_conversations_are_the_same_with_and_without_it": "head-sampling2",
    "test_prefixes.py::test_a_model_writes_what_it_writes_from_whole_prompts": "memories|head",
    "test_prefixes.py::test_conversations_are_written_as_if_every_prompt_were_prefilled_whole": (
        "none|memories|head with a window"
    ),
    "test_cells.py::test_every_engine_writes_the_texts_of_plain_decoding_and_is_counted_by_them": (
        "greedy-8|t1-3|bias-1"
    ),
    "test_int8.py::test_drafted_texts_are_those_of_plain_decoding": "ngram|disturbed/paths.*",
    "test_int8.py::test_a_tree_scores_bit_for_bit_as_plain_decoding_does": "llama-int8|gemma2-int4",
    "test_long_prefix.py::test_trees_behind_long_prefixes_score_as_the_model_does": "qwen2-window|deepseek-v3",
    "test_experts.py::test_the_folder_is_loaded_by_transformers_and_drafts": 2,
    "test_merge.py::test_drafts_ahead_of_the_host_are_those_of_the_host": "mixed",
    "test_model_drafter_probs.py::test_every_law_that_is_said_or_recorded_is_one": "plain|another tokenizer",
    "test_model_drafter_probs.py::test_laws_that_are_read_at_fixed_places_are_the_same": "trimmed|recalling",
    "test_device_paths.py::test_trees_drawn_on_a_device_are_those_of_the_host": 5,
    "test_best_tokens.py::test_best_tokens_are_those_of_logits_in_memory": r"1-8-.*-0\.0|(1-1|3-5)-.*-0\.7",
    "test_recycle_kernels.py::test_learning_in_low_precision": "case0-dtype0|case1-dtype1",
    # Forms of heads, of which every part drafts somewhere, and what else is trained
    "test_train_stop.py::test_a_soft_stop_learns_from_hidden_states_how_much_is_accepted": NONE,
    "test_train_stop.py::test_the_same_seed_collects_the_same_samples": NONE,
    "test_students.py::test_the_kernel_says_what_the_plain_divergence_says": 4,
    "test_head_drafter.py::test_a_tree_is_predicted_as_in_training": (
        "chain:4-(two layers|window)|topk:12,.*-(fspad|longspec with states)|paths:2x3-(low gate|parallel longspec)"
    ),
    "test_head_drafter.py::test_a_step_that_was_interrupted_is_drafted_again_as_if_nothing_had_been": (
        "score-paths:2x3-carry|commit-topk:7,.*-carry|commit-paths:2x3-parallelspec"
    ),
    "test_head_drafter.py::test_a_prompt_longer_than_one_pass_is_read_as_in_training": "1-two layers|19-carry",
    "test_head_replay.py::test_a_replay_copies_as_the_engine_does": "9-carry",
    "test_head_replay.py::test_a_replay_predicts_what_training_does": (
        "two layers|fspad|parallel with bias|longspec with states"
    ),
    "test_head_training.py::test_no_row_sees_what_comes_after_its_anchor": (
        "low gate|carry|parallel with bias|longspec with states"
    ),
    "test_head_exchange.py::test_a_folder_drafts_what_the_layout_says": "taps|qwen3 with yarn",
    "test_head_kernels.py::test_rows_of_a_verdict_are_written_as_without_kernels": (
        "{'layers': 2, 'carry': True}|{'carry': True, 'gate': 'full'}|{'window': 6, 'cross': 'a'}"
    ),
    "test_sources.py::test_a_head_predicts_as_in_training_whoever_drafted_before": (
        "read when asked-two layers|read along-carry"
    ),
    "test_head_learning.py::test_a_head_does_not_learn_noise": NONE,
    "test_head_cli.py::test_texts_may_be_programs": NONE,
    "test_students.py::test_a_student_learns_nothing_of_texts_from_what_the_target_says_elsewhere": NONE,
    # Controllers against worlds of which everything is known
    "test_guard_race.py::test_a_batch_that_grows_and_shrinks_has_the_source_that_pays_for_it": NONE,
    "test_guard_race.py::test_where_none_pays_all_of_them_together_cost_next_to_nothing": NONE,
    "test_tune.py::test_a_planted_cliff_is_found_through_noise": 8,
    "test_tune.py::test_no_cliff_is_found_on_a_smooth_line_with_noise": 8,
    "test_guard_race.py::test_it_recovers_where_another_source_becomes_the_best": 1,
    "test_controller.py::test_a_source_that_promises_too_much_never_makes_a_text_slower": (
        r"\(0\.0, 0\.0\)-flat|\(0\.3, 0\.1\)-cliff"
    ),
    "test_controller.py::test_where_times_are_noisy_plain_decoding_is_not_mistaken_for_slower": 2,
    "test_guard.py::test_a_method_that_loses_costs_next_to_nothing_after_a_short_trial": 3,
    "test_guard.py::test_a_method_that_pays_keeps_its_speed": 2,
    "test_guard_race.py::test_the_fastest_source_drafts_within_a_few_percent": 3,
    # More processes, and more that load the real model
    "test_cli.py::test_generate_prints_one_json_object_with_everything_in_it": NONE,
    "test_claims.py::test_a_run_measures_what_it_can_and_goes_on_where_it_was_stopped": NONE,
    "test_cells.py::test_a_model_is_measured_from_its_folder_to_the_table": NONE,
    "test_serve_refusals.py::test_what_is_no_good_is_refused": 20,
    "test_audit_server.py::test_answers_that_were_not_promised_are_one_sentence": 5,
    "test_methods.py::test_every_command_that_takes_a_method_says_what_is_wrong_with_it": 20,
    "test_bench_peers.py::test_greedy_ids_are_those_of_our_plain_decoding": "lookup|static",
    "test_bench_peers.py::test_the_static_peer_compiles_its_passes_where_asked_and_writes_the_same": NONE,
    "test_architecture.py::test_the_python_snippets_of_the_documentation_run": "code[0-6]",
    "test_cli.py::test_generate_follows_a_schema_and_says_what_is_wrong_with_one": NONE,
    "test_cli.py::test_a_folder_without_a_model_is_one_sentence": NONE,
    "test_cli.py::test_a_truncated_gguf_is_one_sentence": NONE,
    "test_cli.py::test_a_corrupt_gguf_is_one_sentence_and_leaves_the_cache_clean": NONE,
    "test_cli.py::test_no_network_is_one_sentence": NONE,
    "test_cli.py::test_an_unreachable_hub_id_is_one_sentence": NONE,
    "test_state.py::test_the_command_line_says_one_sentence": NONE,
    "test_bench_execution.py::test_values_travel_with_their_types": 5,
    "test_bench_answers.py::test_hostile_answers_are_refused_quickly": 5,
}
"""test of a file -> the parameters, as pytest writes them, of the cases that stay quick, or how many of them do"""

CASES = pytest.StashKey[dict[str, dict[str, bool]]]()
"""every `file::test` that pytest has collected -> the parameters of its cases, and whether they are quick"""

GOLDEN = (5**0.5 - 1) / 2


def quick_cases(test: str, cases: Sequence[str]) -> list[str]:
    """The cases of `file::test` that `make test` runs, by their parameters; the file is below tests/."""
    kept = SLOW.get(test)
    if isinstance(kept, int):
        # By multiples of the golden ratio, so that no parameter that comes again and again is always the same.
        scattered = sorted(range(len(cases)), key=lambda number: number * GOLDEN % 1)
        return [cases[number] for number in sorted(scattered[:kept])]
    return [case for case in cases if kept is None or (kept and re.fullmatch(kept, case))]
