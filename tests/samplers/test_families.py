"""The self-test at the start: families that sample as they are trained pass, others are refused."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from rollbook.samplers.selftest import check_model, has_experts, make_rows_independent, rows_are_independent
from rollbook.train.batch import Example
from rollbook.train.checks import SelfTestError, head_matches
from rollbook.train.model import Model
from samplers.tiny import CLOSE, engine_of, tiny_model

_HEADS = {"head_dim": 16}
_GPT = {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 128}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
SERVED: dict[str, dict[str, Any]] = {
    "llama": {"attention_bias": True},
    "qwen2": {},
    "qwen3": _HEADS,
    "mistral": {"sliding_window": 4},
    "gemma2": {**_HEADS, "sliding_window": 4, "query_pre_attn_scalar": 16, "attn_logit_softcapping": 2.0},
    "gemma3_text": {**_HEADS, "sliding_window": 4},
    "olmo2": {},
    "smollm3": {},
    "phi3": {},
    "granite": {"logits_scaling": 4.0},
    "cohere": {},
    "glm4": _HEADS,
    "gpt_neox": {},
    "gpt2": _GPT,
    "opt": {"ffn_dim": 128, "word_embed_proj_dim": 64},
    "stablelm": {},  # the last two do not pass keywords on to the attention
    "nemotron": {},
}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "gpt_oss": ({**_HEADS, "num_local_experts": 4}, "gpt_oss models cannot be sampled here .*s_aux"),
    "mamba": ({}, "mamba models cannot be sampled here: log-probabilities differ .* by [0-9]"),
    "qwen3_next": (
        {
            **_HEADS,
            **_EXPERTS,
            "linear_num_value_heads": 4,
            "linear_num_key_heads": 2,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 16,
            "shared_expert_intermediate_size": 64,
        },
        "qwen3_next models cannot be sampled here: log-probabilities differ",
    ),
    "bloom": ({"n_layer": 2, "n_head": 4}, "bloom models cannot be sampled here"),
    "gptj": ({**_GPT, "rotary_dim": 8}, "gptj models cannot be sampled here: log-probabilities differ"),
    "diffllama": ({}, "diffllama models cannot be sampled here: log-probabilities differ"),
}


def model_of(family: str, **changes: Any) -> Model:
    model = Model(tiny_model(family, **changes), SimpleNamespace(pad_token_id=0))
    tokens = np.arange(2, 30, dtype=np.int32)
    probe = Example(tokens, tokens > 2)
    model.chunks_head = head_matches(model, [probe], torch.device("cpu"))  # as a job does before
    return model


@pytest.mark.parametrize("family", SERVED)
def test_a_dense_decoder_samples_as_it_is_trained(family: str) -> None:
    model = model_of(family, **SERVED[family])
    weights = [(weight.data_ptr(), weight.dtype) for weight in model.base.parameters()]
    for packs in (False, True):  # the trainer's attention, or the model's own
        model.use_packing(packs)
        assert check_model(model, 128) < CLOSE
        assert model.packs == packs
    assert make_rows_independent(engine_of(model.base, slots=6))
    assert not has_experts(model.base.config)
    assert [(weight.data_ptr(), weight.dtype) for weight in model.base.parameters()] == weights


@pytest.mark.parametrize("family", REFUSED)
def test_a_model_that_would_be_wrong_is_refused(family: str, caplog: pytest.LogCaptureFixture) -> None:
    changes, why = REFUSED[family]
    with caplog.at_level(logging.CRITICAL), pytest.raises(SelfTestError, match=why):
        check_model(model_of(family, **changes), 128)


def test_neighbours_that_matter_are_found_out() -> None:
    """Experts take the tokens of all rows together."""
    model = model_of("mixtral", num_local_experts=4)
    assert check_model(model, 128) < CLOSE
    assert has_experts(model.base.config)
    assert not rows_are_independent(engine_of(model.base, slots=6))


def test_rotation_by_the_longest_of_a_batch_is_refused() -> None:
    rope = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0] * 8,
        "long_factor": [2.0] * 8,
        "original_max_position_embeddings": 64,
    }
    model = model_of("phi3", rope_parameters=rope, original_max_position_embeddings=64)
    assert check_model(model, 64) < CLOSE
    with pytest.raises(SelfTestError, match="over 64 tokens; set max_length to at most 64"):
        check_model(model, 128)


def test_bfloat16_weights_are_compared_as_float32_and_come_back() -> None:
    model = model_of("llama")
    model.base.to(torch.bfloat16)
    before = {name: value.clone() for name, value in model.base.state_dict().items()}
    assert check_model(model, 128) < CLOSE
    after = model.base.state_dict()
    assert all(torch.equal(value, after[name]) for name, value in before.items())
    assert {value.dtype for value in after.values()} == {torch.bfloat16}
    assert make_rows_independent(engine_of(model.base, slots=6))
