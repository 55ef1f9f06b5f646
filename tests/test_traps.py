"""The traps of training with rewards, by number, each with the tests that prove it is none here.

They are bugs that users of other systems reported, most of them silent. Where a part of one cannot occur, its
note says why.
"""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

from helpers.places import REPOSITORY
from helpers.proofs import why_not_run

CORE, FORMULAS, BATCH = "train/test_core_traps.py", "train/test_loss_formulas.py", "train/test_batch.py"
LOCAL, ENGINE, FAMILIES = "samplers/test_local.py", "samplers/test_engine.py", "samplers/test_families.py"
NOISE, CHAT = "samplers/test_noise.py", "policies/test_chat_format.py"
RUN, TRAPS, SAMPLED = "rl/test_run.py", "rl/test_run_traps.py", "rl/test_sampled_logprobs.py"
GROUPS, ADVANTAGES, WATCH = "rl/test_groups.py", "rl/test_advantages.py", "rl/test_watch.py"
EXPORT, METRICS, STATE = "rl/test_token_export.py", "rl/test_metrics.py", "train/test_state.py"
NO_SERVER = "weights are not sent to a server: the sampler runs on the trainer's own, in its process"


class Trap(NamedTuple):
    what: str
    tests: dict[str, list[str]]  # by file
    note: str = ""  # why a part of it cannot occur


TRAPS: dict[int, Trap] = {
    1: Trap("the trainer's logprobs are not those of the sampling temperature", {
        CORE: ["test_t01_logprobs_and_entropy_are_those_of_the_temperature_of_each_token",
               "test_mixed_temperatures_equal_a_plain_softmax"],
        SAMPLED: ["test_sampled_logprobs_are_those_of_a_fresh_forward_pass"],
    }),
    2: Trap("the sampler returns logprobs from before the temperature", {
        ENGINE: ["test_logprobs_and_entropies_are_those_of_a_plain_forward_pass"],
        FAMILIES: ["test_a_dense_decoder_samples_as_it_is_trained"],
    }, NO_SERVER),
    3: Trap("top-k or top-p in sampling, all tokens in the trainer", {
        LOCAL: ["test_training_with_a_part_of_the_distribution_is_refused",
                "test_requests_that_training_could_not_use_are_refused"],
        TRAPS: ["test_t03_what_cuts_the_distribution_is_refused"],
    }),
    4: Trap("a generation_config.json adds top-p or a penalty in silence", {
        TRAPS: ["test_t04_a_generation_config_changes_no_sample"],
    }),
    5: Trap("the logprob of another token than the sampled one", {
        ENGINE: ["test_logprobs_and_entropies_are_those_of_a_plain_forward_pass"],
        "policies/test_openai_tokens.py": ["test_other_numbers_of_tokens_and_logprobs_are_a_bad_answer"],
    }),
    6: Trap("logits or logprobs in low precision", {
        CORE: ["test_t06_every_logprob_is_float32"],
        SAMPLED: ["test_a_bfloat16_sampler_stays_close_to_its_trainer"],
    }),
    7: Trap("off by one in shifted logprobs", {
        CORE: ["test_t07_a_token_is_predicted_by_the_row_before_it"],
        BATCH: ["test_the_first_token_is_never_trained"],
    }),
    8: Trap("the ratio of the first step is not exactly 1", {
        CORE: ["test_t08_the_first_step_on_own_samples_is_on_policy_to_the_bit"],
        FORMULAS: ["test_t08_on_policy_every_ratio_is_exactly_one"],
    }),
    9: Trap("micro-batches or processes scale the loss", {
        CORE: ["test_t09_how_many_micro_batches_there_are_changes_no_gradient"],
        TRAPS: ["test_t09_two_processes_take_the_steps_of_one"],
    }),
    10: Trap("masked tokens count in the denominator", {
        CORE: ["test_t10_and_t24_what_a_tool_says_after_the_last_sample_changes_nothing",
               "test_a_clipped_token_leaves_the_denominator_alone"],
    }),
    11: Trap("metrics are means of means", {
        CORE: ["test_t11_every_metric_is_the_same_however_the_step_is_cut",
               "test_t11_every_metric_is_its_formula"],
        METRICS: ["test_what_is_measured_of_the_trained_tokens"],
        TRAPS: ["test_t09_two_processes_take_the_steps_of_one"],
    }),
    12: Trap("a column of tokens is not moved or padded with them", {
        BATCH: ["test_t12_columns_move_with_their_tokens"],
    }),
    13: Trap("uneven groups, groups of one", {
        GROUPS: ["test_uneven_groups_are_compared_with_their_own_survivors_only"],
    }),
    14: Trap("a tiny or zero standard deviation", {
        ADVANTAGES: ["test_rewards_that_do_not_differ_give_exactly_zero"],
    }),
    15: Trap("groups are found by the text of the prompt", {
        TRAPS: ["test_t15_equal_prompts_of_two_tasks_are_two_groups"],
    }),
    16: Trap("zero times NaN, masked infinities", {
        FORMULAS: ["test_t16_what_is_left_out_may_be_infinite"],
        CORE: ["test_forbidden_tokens_have_no_part_in_the_entropy"],
        ENGINE: ["test_logits_that_are_no_numbers_end_a_request_and_spoil_no_other"],
    }),
    17: Trap("weights arrive half or never", {
        TRAPS: ["test_t17_every_iteration_samples_with_the_weights_of_the_last_step"],
        LOCAL: ["test_weights_that_change_without_an_update_are_found_out"],
    }, NO_SERVER),
    18: Trap("sampling goes on before the update is finished", {
        LOCAL: ["test_weights_cannot_change_while_sequences_are_sampled"],
    }),
    19: Trap("keys and values of old weights are used again", {
        LOCAL: ["test_an_update_forgets_what_the_old_weights_computed"],
    }),
    20: Trap("a KL term with the gradient of something else", {
        FORMULAS: ["test_t20_terms_have_the_gradient_of_what_they_estimate",
                   "test_gradients_are_finite_differences",
                   "test_reference_kl_is_the_formula_with_its_advantage_held"],
        "train/test_step_gradients.py": ["test_a_step_goes_down_the_slope_of_its_loss"],
    }),
    21: Trap("dropout differs between sampling and training", {
        CORE: ["test_t21_dropout_is_off_where_it_was_off_in_sampling"],
        ENGINE: ["test_sampling_changes_nothing_of_the_model"],
    }),
    22: Trap("the stop token is not trained, or is taken for padding", {
        BATCH: ["test_t22_padding_may_be_the_stop_token"],
        ENGINE: ["test_a_stop_token_is_sampled_and_ends_the_reply"],
        GROUPS: ["test_only_sampled_tokens_are_trained_with_the_values_they_were_sampled_with"],
        STATE: ["test_a_padding_token_that_a_model_writes_is_trained_before_and_after_a_save"],
    }),
    23: Trap("history is rendered again; a second BOS", {
        CHAT: ["test_the_prompt_of_each_turn_starts_with_all_tokens_of_the_turn_before",
               "test_there_is_one_bos"],
        LOCAL: ["test_turns_continue_the_tokens_of_the_turns_before",
                "test_a_template_that_cannot_be_continued_begins_a_new_row"],
    }),
    24: Trap("tokens of a tool or an environment are trained", {
        CORE: ["test_t10_and_t24_what_a_tool_says_after_the_last_sample_changes_nothing"],
        GROUPS: ["test_only_sampled_tokens_are_trained_with_the_values_they_were_sampled_with"],
    }),
    25: Trap("what was cut or timed out is a reward of zero, or gone", {
        RUN: ["test_t25_what_was_cut_off_has_its_reward_and_is_trained_as_the_settings_say"],
        TRAPS: ["test_t25_and_t34_rollouts_that_hang_are_named_and_then_failures"],
        GROUPS: ["test_a_masked_truncated_rollout_counts_in_the_baseline_and_a_dropped_one_does_not",
                 "test_an_episode_that_grew_too_long_between_two_replies_is_truncated_too"],
    }),
    26: Trap("one seed for all samples of a group", {
        ENGINE: ["test_samples_of_a_group_differ"],
        TRAPS: ["test_t26_every_rollout_of_an_iteration_has_a_seed_of_its_own"],
        GROUPS: ["test_the_duplicates_that_are_expected_are_those_that_chance_gives"],
        WATCH: ["test_an_alert_is_raised_where_it_begins_to_hold_and_not_by_what_is_all_right"],
    }),
    27: Trap("noise too coarse to draw unlikely tokens", {
        NOISE: ["test_numbers_keep_their_precision_down_to_22_nats",
                "test_a_token_10_nats_down_is_drawn_as_often_as_it_should"],
    }),
    28: Trap("advantages on the wrong rows of a rollout that has several", {
        GROUPS: ["test_every_row_of_a_rewritten_history_has_the_advantage_of_its_rollout"],
    }),
    29: Trap("other experts in training than in sampling", {
        LOCAL: ["test_a_model_whose_rows_see_each_other_is_for_evals_only"],
        FAMILIES: ["test_neighbours_that_matter_are_found_out"],
        TRAPS: ["test_t29_a_model_with_experts_is_refused_before_anything_is_written"],
    }, "models with experts are refused in training"),
    30: Trap("a resume repeats, skips, or ends at once", {
        EXPORT: ["test_a_run_that_was_killed_exports_what_an_untouched_one_does"],
        TRAPS: ["test_t34_a_writer_that_fails_ends_the_run"],
        "rl/test_schedule.py": ["test_an_iteration_draws_the_same_whoever_asks_and_when"],
    }, "the schedule has no state to lose: it is a function of the seed and the iteration"),
    31: Trap("drift at a rate of zero", {
        CORE: ["test_t31_a_rate_of_zero_moves_no_bit"],
        TRAPS: ["test_t31_a_rate_of_zero_changes_nothing"],
    }),
    32: Trap("signs, separators and fractions of an answer are misread", {
        TRAPS: ["test_t32_signs_separators_fractions_and_units_are_read"],
        "envs/test_answers.py": ["test_last_number", "test_fractions_are_compared_by_their_value"],
        "envs/test_math_grader.py": ["test_equal_in_maths"],
    }),
    33: Trap("a sharded model loses gradients of earlier micro-batches", {
        "sft/test_processes.py": ["test_two_processes_take_the_steps_of_one",
                                  "test_adapters_of_two_processes_are_those_of_one"],
    }, "with rewards each process has a copy of the model; fine-tuning shards it, on the same engine"),
    34: Trap("an error in the background is swallowed, and the loop waits for ever", {
        LOCAL: ["test_an_error_in_the_thread_reaches_everybody"],
        TRAPS: ["test_t34_a_broken_environment_is_recorded_with_its_place",
                "test_t34_an_environment_that_does_not_close_costs_no_rollout",
                "test_t34_an_error_in_the_sampling_thread_ends_the_run",
                "test_t34_a_writer_that_fails_ends_the_run",
                "test_t25_and_t34_rollouts_that_hang_are_named_and_then_failures"],
    }),
    35: Trap("an evaluation changes the training", {
        TRAPS: ["test_t35_evaluations_change_nothing_of_the_training"],
    }),
    36: Trap("the sampler casts the weights in place", {
        ENGINE: ["test_sampling_changes_nothing_of_the_model"],
        FAMILIES: ["test_bfloat16_weights_are_compared_as_float32_and_come_back"],
    }),
}  # fmt: skip


@cache
def names_in(file: str) -> frozenset[str]:
    tree = ast.parse((REPOSITORY / "tests" / file).read_text())
    return frozenset(node.name for node in tree.body if isinstance(node, ast.FunctionDef))


@pytest.mark.parametrize("number", TRAPS)
def test_a_trap_has_its_proofs_and_make_test_runs_them(number: int) -> None:
    trap = TRAPS[number]
    assert trap.tests and all(trap.tests.values())
    whys = {
        f"{file}::{name}": why
        for file, names in trap.tests.items()
        for name in names
        if (why := why_not_run(REPOSITORY / "tests" / file, name))
    }
    assert not whys, f"{trap.what}: {whys}"


_PROOFS = """
import pytest

faults = pytest.mark.faults

@pytest.fixture
def peers():
    pytest.skip("they are not here")

@pytest.fixture
def above(peers):
    return peers

@pytest.mark.parametrize("n", [1, pytest.param(2, marks=pytest.mark.faults)])
@pytest.mark.skipif(False, reason="never")
def test_run(n, tmp_path): ...

@pytest.mark.skip(reason="later")
def test_skipped(): ...

@pytest.mark.skipif(1 > 0, reason="always")
def test_skipped_here(): ...

@pytest.mark.faults
def test_of_faults(): ...

@pytest.mark.xfail
def test_that_may_fail(): ...

@pytest.mark.parametrize("n", [pytest.param(1, marks=pytest.mark.skip), pytest.param(2, marks=faults)])
def test_without_a_case(n): ...

def test_that_skips_itself():
    if 1 > 0:
        pytest.skip("not today")

def test_that_needs_a_package():
    pytest.importorskip("nothing")

def test_that_needs_a_fixture(above): ...
"""
_FOR_ALL = """
@pytest.fixture(autouse=True)
def here():
    pytest.skip("not on this machine")
"""


def test_a_proof_that_is_not_run_is_none(tmp_path: Path) -> None:
    path = tmp_path / "test_proofs.py"
    path.write_text(_PROOFS)
    names = re.findall(r"def (test_\w+)", _PROOFS)
    whys = {name: why_not_run(path, name) for name in names}
    assert whys.pop("test_run") is None
    assert whys == {
        "test_skipped": "it is marked skip",
        "test_skipped_here": "it is marked skipif, and so it is: always",
        "test_of_faults": "it is marked faults",
        "test_that_may_fail": "it is marked xfail",
        "test_without_a_case": "it has no case that is run",
        "test_that_skips_itself": "test_that_skips_itself calls pytest.skip",
        "test_that_needs_a_package": "test_that_needs_a_package calls pytest.importorskip",
        "test_that_needs_a_fixture": "peers calls pytest.skip",
    }
    assert why_not_run(path, "test_gone") == "there is no such test"
    for number, (text, why) in enumerate(
        (("pytestmark = [pytest.mark.interop]", "it is marked interop"), (_FOR_ALL, "here calls pytest.skip"))
    ):
        other = tmp_path / f"test_all_of_them_{number}.py"
        other.write_text(f"{_PROOFS}\n{text}\n")
        assert why_not_run(other, "test_run") == why


def test_every_number_is_there() -> None:
    assert list(TRAPS) == list(range(1, 37))


def test_a_test_that_bears_a_number_is_listed_under_it() -> None:
    listed = {
        number: {(file, name) for file, names in trap.tests.items() for name in names}
        for number, trap in TRAPS.items()
    }
    for file in {file for trap in TRAPS.values() for file in trap.tests}:
        for name in names_in(file):
            for number in re.findall(r"(?:^test|_and)_t(\d\d)(?=_)", name):
                assert (file, name) in listed[int(number)]
