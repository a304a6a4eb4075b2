"""Which tests are left to `make test-all`, and which of their cases stay in `make test`.

The quick tier keeps at least one case of every kind: every verifier is enumerated, every drafter writes like plain
decoding, every kind of attention is scored, a real model answers, every kernel runs. `test_tiers.py` holds this table
to the tests that exist and to that promise. Times beside entries are seconds of one quiet core.
"""

from __future__ import annotations

import re

NONE = ""

SLOW: dict[str, str] = {
    # Exact enumeration: all worlds and shapes, 106 s
    "conformance/test_verifiers.py::test_the_emitted_law_is_the_target_s_and_no_verifier_passes_the_optimum": (
        ".*-(medium|deep|one path|certain draft|tiny masses in the target|ties 1|zeros 0|end 1)"
    ),
    "conformance/test_verifiers.py::test_every_verdict_has_the_probability_that_the_slow_truth_gives_it": (
        ".*-(far|one level|zeros 0)"
    ),
    "conformance/test_verifiers.py::test_the_emitted_law_is_the_target_s_on_any_laws": (
        "(cascade|traversal|rrs) on paths"
    ),
    "conformance/test_verifiers.py::test_no_verifier_passes_the_optimum_on_any_laws": NONE,
    "conformance/test_verifiers.py::test_verdicts_are_exact_whatever_the_shape_of_the_tree": (
        ".* on wide trees|.* on paths, nodes by token|traversal on ragged trees"
    ),
    "conformance/test_verifiers.py::test_a_frozen_case_has_its_optimum_and_its_block_efficiencies": (
        "(paths|rsd-c)-(3,2,2 medium|4,1,3 far|3,2,3 ties)"
    ),
    "test_enumeration.py::test_the_weights_of_every_draft_sum_to_one": ".*-True",
    "test_slow_truth.py::test_a_frozen_case_has_its_block_efficiency_and_the_law_of_the_target": ".*3,2,2 medium.*",
    "test_slow_truth.py::test_a_frozen_case_has_its_optimum": ".*(3,2,2 medium|4,1,3 far).*",
    "test_verify_precision.py::test_in_float32_the_emitted_law_is_the_target_s_to_six_digits": ".*medium.*",
    "test_verify_precision.py::test_in_float32_any_laws_are_verified_to_six_digits": NONE,
    "test_verify_precision.py::test_awkward_laws_in_float32_give_odds_that_are_odds_and_laws_that_are_laws": ".*-7-.*",
    "test_verify_precision.py::test_odds_and_residuals_in_float32_are_those_in_float64": ".*-device",
    "test_slow_truth.py::test_every_verifier_is_lossless_and_below_the_optimum_on_awkward_laws": r".*-\(2, 2, 3\)",
    "test_policies.py::test_policy_and_verifier_together_keep_the_law_of_the_target": ".*-(plain|zeros|far), V=3, L=2",
    "test_verify_order.py::test_verifiers_stay_exact_where_only_some_tokens_are_ranked": "cascade-2",
    "test_policies.py::test_beams_that_are_drawn_have_the_law_of_the_brute_force": ".*V=3, L=2.*",
    "test_lookup.py::test_the_first_tokens_have_the_targets_law": ("stand-paths:2x2-cascade"),
    "test_fusion.py::test_a_tree_drawn_from_a_model_and_what_was_retrieved_keeps_the_targets_law": "(rsd-s|paths).*",
    "test_claims.py::test_the_command_measures_judges_and_reads_again": NONE,
    "test_model_drafter_probs.py::test_the_first_tokens_have_the_targets_law": "plain-chain-block|recalling-chain.*",
    "test_builder.py::test_short_texts_have_the_law_of_the_target": "(auto|block) on .*",
    "test_guarded.py::test_short_texts_have_the_law_of_the_target_whatever_steps_rest": (
        "(block|rrs) on (paths:2x2|rsd-c:2,1)-at random"
    ),
    "test_guarded.py::test_a_head_predicts_as_in_training_after_any_rests": "carry-topk.*",
    "test_builder.py::test_a_text_does_not_depend_on_the_texts_beside_it": "(auto|cascade|match|rrs)-.*",
    "test_policies.py::test_beams_have_the_law_of_the_first_prefixes_of_a_permutation": "2-.*",
    "test_match.py::test_with_the_same_seed_the_output_equals_plain_decoding": r".*-0\.8-.*",
    "test_verify_cascade.py::test_the_cascade_is_exact_with_any_mixture": "(3,2,3 ties|3,3,2 far)-.*",
    "test_verify_cascade.py::test_the_cascade_leads_the_other_verifiers_of_the_same_paths": "medium",
    "test_with_replacement.py::test_every_rule_that_accepts_them_keeps_the_law": ".*-(wide|deep|flat)",
    "test_fork.py::test_with_one_branch_short_texts_have_the_law_of_the_target": NONE,
    "test_recycle.py::test_the_text_is_that_of_plain_decoding": NONE,
    "test_model_drafter.py::test_the_text_is_that_of_plain_decoding": "another model-wild",
    "test_model_ahead.py::test_trees_are_those_of_level_by_level": (
        "chain:4-block-of all kinds|paths:3x3-cascade-drawn|rsd-c.*-greedy"
    ),
    "test_model_ahead.py::test_trees_are_right_whatever_verdicts_keep": "chain:3",
    "test_model_ahead.py::test_an_interrupted_step_is_drafted_for_again": "1-chain:3",
    "test_model_ahead.py::test_distributions_are_those_of_the_drafter": "fewer tokens",
    "test_inflight.py::test_trees_of_a_draft_model_are_passed_over_before_the_host_knows_where_they_stand": (
        "chain:2-block"
    ),
    "test_lookup.py::test_texts_of_one_seed_do_not_tell_a_memory_of_each_others_draws": NONE,
    "test_verify_identities.py::test_with_one_path_all_block_verifiers_agree_on_any_laws": NONE,
    "test_stand.py::test_memory_is_bounded_over_200_000_tokens": NONE,
    # Audits of a tiny model with many samples
    "test_audit_planted.py::test_the_audit_of_a_server_finds_it": "careless-NOT LOSSLESS",
    "test_audit_planted.py::test_the_audit_of_a_model_finds_it": NONE,
    "test_audit_server.py::test_servers_of_many_kinds_are_audited": "n is refused",
    "test_audit_model.py::test_match_is_lossless": "whole",
    "test_audit_model.py::test_match_is_lossless_whoever_of_several_sources_drafts": NONE,
    "test_audit_model.py::test_a_rule_that_needs_q_is_lossless_for_a_drafter_that_tells_the_truth": "block",
    "test_audit_model.py::test_a_planted_verifier_is_not_lossless": "sharpened",
    "test_audit_model.py::test_several_verifiers_share_a_model_and_the_worst_word_decides": NONE,
    "test_audit_model.py::test_the_command_prints_the_word_on_its_own_line_and_exits_with_its_code": NONE,
    "test_audit_model.py::test_a_model_in_low_precision_is_sampled_and_its_greedy_texts_decide_nothing": NONE,
    # Verifiers over batches, 150 s: 60 of them traced by a compiler
    "test_verify_batches.py::test_a_verifier_traced_on_one_batch_serves_every_batch_of_the_same_shapes": (
        "cascade on paths-all rows|traversal on without-replacement-rows on the walk"
    ),
    "test_verify_batches.py::test_a_batch_gives_each_sequence_what_it_gets_alone": "(cascade|block) on paths-device",
    "test_verify_batches.py::test_a_tree_gets_the_same_verdict_beside_deeper_and_wider_ones": (
        "(cascade|traversal|k-seq) on paths-device"
    ),
    "test_verify_batches.py::test_room_for_more_changes_nothing": ".* on paths-.*",
    "test_verify_batches.py::test_a_sequence_without_a_draft_gets_the_same_token_beside_others": ".* on paths-device",
    "test_verify_batches.py::test_host_and_device_give_the_same_verdicts_in_a_large_vocabulary": (
        "(cascade|block) on paths|traversal on without-replacement"
    ),
    "test_verify_batches.py::test_no_coin_decides_twice_in_trees_of_any_size": "paths:2x140.*-device",
    "test_head_audit.py::test_the_first_tokens_have_the_targets_law": "fspad-gate-chain:2-block",
    # Programs of models: each attack that ends with its time takes seconds
    "test_bench_execution.py::test_an_endless_loop_ends_with_its_time": "when called-the kernel alone",
    "test_bench_execution.py::test_an_endless_sleep_ends_with_its_time": "True",
    "test_bench_execution.py::test_memory_is_bounded": "the kernel alone",
    "test_bench_execution.py::test_every_published_solution_of_humaneval_passes_and_an_empty_one_does_not": "0",
    # Heads that learn, 60 s
    "test_head_learning.py::test_a_head_learns_a_rule": "options0",
    "test_head_cli.py::test_what_a_head_has_learned_is_shown_while_it_learns_and_drawn": "chat",
    "test_head_cli.py::test_a_head_is_trained_and_drafts": "chat",
    "test_head_cli.py::test_whoever_would_wait_for_hours_is_told": "base",
    # Triton's interpreter
    "test_head_kernels.py::test_trees_are_laid_as_without_kernels": (
        "0-topk:3.*|2-topk:9,depth=3,width=3-3-{}|9-topk:40,depth=4,width=4-1-{'carry.*"
    ),
    "test_head_kernels.py::test_wide_heads_draft_as_without_kernels": NONE,
    "test_head_kernels.py::test_the_kernels_compile_for_a_hopper_gpu": NONE,
    "test_prefixes.py::test_a_head_predicts_behind_inherited_rows_as_in_training": (
        "carry|two layers|parallel longspec|longspec with states"
    ),
    "test_head_drafter.py::test_rows_that_a_device_has_committed_are_read_as_in_training": NONE,
    "test_inflight.py::test_trees_of_a_head_are_passed_over_before_the_host_knows_where_they_stand": "1",
    "test_inflight.py::test_a_head_that_rests_reads_later_what_a_pass_ahead_has_overwritten": "1",
    "test_inflight.py::test_sources_take_turns_and_passes_still_begin_ahead": NONE,
    "test_sources.py::test_texts_are_those_of_plain_decoding_whoever_drafts": "0-.*",
    "test_head_drafter.py::test_the_best_trees_are_laid_on_the_device_as_on_the_host": (
        "(eagle-topk:7|fspad-topk:30|two layers-topk:2|low gate-topk:7|carry-topk:30),.*-False|"
        "eagle-topk:2,depth=2,width=2-True"  # the other one 110 s
    ),
    "test_head_drafter.py::test_forks_and_texts_that_come_and_go_are_predicted_as_in_training": (
        "(eagle|carry|cross|parallel longspec)"
    ),
    "test_head_drafter.py::test_a_cache_with_a_window_does_not_grow_with_the_text": "cross|window",
    "test_head_drafter.py::test_a_tree_of_ranks_is_drafted_on_the_device_as_on_the_host": (
        "fork-eagle|recycling-80-fspad"
    ),
    "test_head_replay.py::test_a_replay_counts_the_passes_that_the_engine_makes": (
        "chain:3-shape0-(eagle|cross)|topk:7,.*-(fspad|parallel with bias)|topk:24,.*-longspec"
    ),
    "test_head_learning.py::test_a_run_that_was_ended_goes_on": NONE,
    "test_head_learning.py::test_answers_are_those_of_the_model": NONE,
    "test_controller.py::test_an_honest_source_is_used_about_as_well_as_in_hindsight": (
        "sure-(flat|cliff)|torn-second row|poor-steep"
    ),
    "test_merge.py::test_texts_of_different_tasks_run_together_and_are_those_of_plain_decoding": "match|cascade",
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
    "test_head_ladder.py::test_texts_are_those_of_plain_decoding_whatever_size_is_drafted": "99",
    "test_controller.py::test_a_batch_that_grows_and_shrinks_has_the_size_that_pays_for_it": "sure",
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
    "conformance/test_drafters.py::test_the_text_is_that_of_plain_decoding": ".*-(match|auto)",
    "test_model_drafter.py::test_every_law_is_the_draft_models_own_after_the_whole_text": "0.8-(chain|wild)",
    "conformance/test_target.py::test_low_precision_stays_close_to_the_models_own_forward": (
        "(llama|gemma2|mixtral)-dtype0"
    ),
    "conformance/test_target.py::test_a_forked_sequence_scores_exactly_as_one_that_was_opened": (
        "llama|gemma2|deepseek-v3"
    ),
    "conformance/test_target.py::test_prefill_gives_the_same_law_in_chunks_of_any_size": ".*-3",
    # Texts under a grammar: every drafter stays quick where drafting pays, and a rule of each kind
    "test_constrain.py::test_every_drafter_writes_what_plain_constrained_decoding_writes": ".*-True",
    "test_constrain.py::test_the_first_tokens_have_the_law_of_plain_constrained_decoding": (
        "disturbed-(chain:3-block|topk:6,depth=3-match)|recycle-rsd-c:2,1-rrs"
    ),
    # The real model; `test_smollm2_default.py` stands in
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
    "test_smollm2_presets.py::test_who_drafts_from_the_targets_own_law_is_accepted_to_the_end": "block",
    # Processes of their own, each of which imports torch and most of which load the real model
    "test_cli.py::test_a_mistake_is_one_sentence_and_exit_code_2": r"arguments\d*0-.*",
    "test_cli.py::test_generate_reads_the_prompt_from_a_file_and_seeds_repeat": NONE,
    "test_cli.py::test_generate_streams_plain_text_to_a_pipe_and_reads_standard_input": NONE,
    "test_cli.py::test_show_draft_colours_tokens_by_origin": NONE,
    "test_cli.py::test_chat_keeps_the_conversation_and_survives_a_mistake": NONE,
    "test_cli.py::test_ctrl_c_in_a_chat_ends_the_answer_and_not_the_conversation": NONE,
    "test_cli.py::test_ctrl_c_ends_an_answer_without_a_traceback": NONE,
    "test_cli.py::test_a_reader_that_goes_away_ends_the_writing": NONE,
    "test_bench_commands.py::test_a_mistake_is_one_sentence_before_anything_is_loaded": "words[059]-.*",
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
    "test_bench_run.py::test_a_run_killed_at_any_write_goes_on_without_loss_or_doubling": "inside a line",
    "test_benchmarks.py::test_a_table_that_says_something_else_is_found": NONE,
    "test_gguf.py::test_two_processes_converting_at_once_both_succeed": NONE,
    "test_lingering.py::test_an_end_that_nobody_foresaw_costs_the_others_no_pass": "none-greedy",
    "test_lingering.py::test_who_comes_has_the_slot_before_the_next_step": "none",
    "test_lingering.py::test_the_next_turn_begins_with_the_rows_of_the_text_and_no_others": "none",
    # The process of the server, 20 s: its parts are tested within the process of the tests
    "test_serve_process.py::test_the_openai_client_talks_to_the_process_and_sigterm_ends_a_stream_cleanly": NONE,
    "test_serve_process.py::test_a_model_that_is_not_there_is_one_sentence": NONE,
    # Many requests to a server
    "test_serve_steady.py::test_a_server_is_as_it_was_after_many_requests": "120",
    "test_serve_openapi.py::test_generated_requests_are_answered_as_the_document_says": "200",
    # Students that learn, and a nested model that is audited, 40 s
    "test_students.py::test_a_student_rises_above_what_it_began_with_in_texts_that_it_never_saw": "fkl",
    "test_students.py::test_a_run_that_was_ended_goes_on_to_the_last_bit": "0.4",
    "test_nested.py::test_the_audit_finds_nothing_in_sampled_drafts_of_mixed_exits": "token",
    "test_nested.py::test_a_node_leaves_at_the_first_exit_that_is_sure_and_has_its_distribution": "thresholds0",
}
"""test of a file -> the parameters, as pytest writes them, of the cases that stay quick"""


def is_slow(file: str, test: str, parameters: str) -> bool:
    """Whether a case of a test is left to `make test-all`; `file` is below tests/."""
    quick = SLOW.get(f"{file}::{test}")
    return quick is not None and not (quick and re.fullmatch(quick, parameters))
