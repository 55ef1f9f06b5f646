"""Slots that refill: what a request gets is what the model says, and depends on the request alone."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch

from rollbook.samplers.engine import Wanted
from samplers.tiny import CLOSE, VOCABULARY, engine_of, largest_difference, plain, run, tiny_model, wanted


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_model()


@pytest.mark.parametrize("seed", range(3))
def test_logprobs_and_entropies_are_those_of_a_plain_forward_pass(model: Any, seed: int) -> None:
    """Per token, for prompts and replies of many lengths, at temperatures other than 1 too (T1, T5)."""
    requests = wanted(24, seed=seed)
    results = run(engine_of(model, slots=6, stop_ids=[1]), requests)
    assert largest_difference(model, requests, results) < CLOSE
    assert {request.temperature for request in requests} == {0.7, 1.0, 1.3}


def test_a_request_gets_the_same_bits_alone_and_among_others_in_any_slot(model: Any) -> None:
    requests = wanted(40, seed=5)
    engine = engine_of(model, slots=8, stop_ids=[1])
    together = run(engine, requests)
    shuffled = list(range(40))
    random.Random(0).shuffle(shuffled)
    again = run(engine, [requests[number] for number in shuffled])
    assert [again[shuffled.index(number)] for number in range(40)] == together
    for number in (0, 3, 17, 39):
        assert run(engine_of(model, slots=8, stop_ids=[1]), [requests[number]]) == [together[number]]
    assert run(engine_of(model, slots=8, stop_ids=[1], steps_per_look=5), requests) == together
    longer = engine_of(model, slots=8, stop_ids=[1], length=128)
    assert run(longer, requests) == together
    longer.read_all()
    assert run(longer, requests) == together


def test_the_number_of_slots_does_not_change_the_tokens(model: Any) -> None:
    requests = wanted(60, seed=6)
    few = run(engine_of(model, slots=16, stop_ids=[1]), requests)
    many = run(engine_of(model, slots=40, stop_ids=[1]), requests)
    assert [result.token_ids for result in few] == [result.token_ids for result in many]
    for one, other in zip(few, many, strict=True):
        assert one.logprobs == pytest.approx(other.logprobs, abs=CLOSE)


def test_a_prompt_is_computed_once_for_its_group(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    computed = []
    engine = engine_of(model, slots=3)
    prefill = engine.model.prefill

    def counted(slot: int, ids: tuple[int, ...]) -> None:
        computed.append(ids)
        prefill(slot, ids)

    monkeypatch.setattr(engine.model, "prefill", counted)
    prompts = [[5, 6, 7], [8, 9, 5, 4]]
    requests = [Wanted(prompt, seed=number, max_tokens=3) for prompt in prompts for number in range(8)]
    first = run(engine, requests)
    assert computed == [(5, 6), (8, 9, 5)]
    engine.forget()
    assert run(engine, requests) == first
    assert computed == [(5, 6), (8, 9, 5)] * 2


def test_samples_of_a_group_differ(model: Any) -> None:
    """Seeds decide, also those that agree in 32 bits (T26)."""
    seeds = [1, 2, 1 | 1 << 40, 2 | 1 << 40, 1 | 1 << 61]
    requests = [Wanted([5, 6], seed=seed, max_tokens=12) for seed in seeds]
    results = run(engine_of(model, slots=2), requests)
    assert len({tuple(result.token_ids) for result in results}) == len(seeds)


def test_tokens_are_drawn_with_the_probabilities_of_the_model(model: Any) -> None:
    requests = [Wanted([5, 6, 7], seed=seed, max_tokens=1, temperature=1.3) for seed in range(4000)]
    results = run(engine_of(model, slots=64), requests)
    counts = torch.bincount(torch.tensor([r.token_ids[0] for r in results]), minlength=VOCABULARY)
    p = plain(model, requests[0], [0])[0].exp()
    likely = p * 4000 > 5
    distance = (counts - p * 4000)[likely] / (p * 4000 * (1 - p)).sqrt()[likely]
    assert float(distance.abs().max()) < 4.5


def test_a_stop_token_is_sampled_and_ends_the_reply(model: Any) -> None:
    requests = wanted(40, seed=8, most=30)
    results = run(engine_of(model, slots=8, stop_ids=[1, 9]), requests)
    assert {result.finish_reason for result in results} == {"stop", "length"}
    for request, result in zip(requests, results, strict=True):
        stopped = result.token_ids[-1] in (1, 9)
        assert result.finish_reason == ("stop" if stopped else "length")
        assert not {1, 9} & set(result.token_ids[:-1])
        assert len(result.token_ids) == len(result.logprobs) == len(result.entropies)
        asked_for = request.last - len(request.prompt) + 1
        assert len(result.token_ids) == asked_for or stopped
    assert largest_difference(model, requests, results) < CLOSE  # the stop token's among them


def test_temperature_zero_takes_the_most_likely_token(model: Any) -> None:
    requests = wanted(12, seed=9, temperature=0)
    for request, result in zip(requests, run(engine_of(model, slots=4), requests), strict=True):
        best = plain(model, request, result.token_ids).argmax(-1)
        assert result.token_ids == best.tolist()


@pytest.mark.parametrize(("top_k", "top_p"), [(3, 1.0), (0, 0.5), (4, 0.6), (1, 1.0)])
def test_top_k_and_top_p_leave_the_most_likely_tokens(model: Any, top_k: int, top_p: float) -> None:
    """Rows that ask for neither get what they get without such neighbours."""
    requests = wanted(16, seed=10, top_k=top_k, top_p=top_p)
    others = wanted(16, seed=11)
    alone = run(engine_of(model, slots=8), others)
    mixed = [request for pair in zip(requests, others, strict=True) for request in pair]
    results = run(engine_of(model, slots=8), mixed)
    assert results[1::2] == alone
    for request, result in zip(requests, results[::2], strict=True):
        for place, token in enumerate(result.token_ids):
            p, order = plain(model, request, result.token_ids)[place].exp().sort(descending=True)
            rank = order.tolist().index(token)
            assert not top_k or rank < top_k
            assert rank == 0 or float(p[:rank].sum()) < top_p + 1e-5
    assert largest_difference(model, requests, results[::2]) < CLOSE  # of the whole distribution


@pytest.mark.parametrize("steps_per_look", [1, 4])
def test_a_stop_string_ends_a_reply_where_it_is_complete(model: Any, steps_per_look: int) -> None:
    requests = wanted(8, seed=12, most=30)
    free = run(engine_of(model, slots=4), requests)
    texts = ["".join(chr(97 + number) for number in result.token_ids) for result in free]
    strings = [text[len(text) // 2 :][:2] for text in texts]
    stopped = [
        Wanted(r.prompt, seed=r.seed, max_tokens=30, temperature=r.temperature,
               stop=("zzzz", string))
        for r, string in zip(requests, strings, strict=True)
    ]  # fmt: skip
    engine = engine_of(model, slots=4, steps_per_look=steps_per_look)
    for result, text, string in zip(run(engine, stopped), texts, strings, strict=True):
        end = text.index(string) + len(string)
        assert "".join(chr(97 + number) for number in result.token_ids) == text[:end]
        assert result.finish_reason == "stop"


def test_an_abandoned_request_leaves_its_slot(model: Any) -> None:
    engine = engine_of(model, slots=2)
    long = [Wanted([5, 6], seed=seed, max_tokens=60) for seed in range(3)]
    for request in long:
        engine.add(request)
    with engine.model.sampling():
        assert engine.step() == []
        for request in long:
            request.abandoned = True
        assert {
            request: result.finish_reason for request, result in (*engine.step(), *engine.step())
        }.keys() == set(long)
    assert not engine.busy


def test_sampling_changes_nothing_of_the_model() -> None:
    """Values, types and addresses of the weights, training mode and attention are as before (T21, T36)."""
    model = tiny_model(attention_dropout=0.5)
    model.train()
    model.model.layers[0].eval()
    before = {
        name: (value.clone(), value.data_ptr(), value.dtype) for name, value in model.state_dict().items()
    }
    modes = [module.training for module in model.modules()]
    attention = model.config._attn_implementation
    requests = wanted(8, seed=13)
    results = run(engine_of(model, slots=4), requests)
    assert [module.training for module in model.modules()] == modes
    assert model.config._attn_implementation == attention
    for name, value in model.state_dict().items():
        kept, address, dtype = before[name]
        assert torch.equal(kept, value)
        assert (value.data_ptr(), value.dtype) == (address, dtype)
    assert largest_difference(model.eval(), requests, results) < CLOSE  # and nothing was dropped out


def test_weights_that_change_without_an_update_are_found_out() -> None:
    model = tiny_model()
    engine = engine_of(model, slots=2)
    run(engine, wanted(2))
    with torch.no_grad():
        model.lm_head.weight += 0.1
    with pytest.raises(RuntimeError, match=r"call update\(\)"):
        run(engine, wanted(2))
    engine = engine_of(model, slots=2)
    run(engine, wanted(2))
    with torch.no_grad():
        model.lm_head.weight += 0.1
    engine.forget()
    requests = wanted(2)
    assert largest_difference(model, requests, run(engine, requests)) < CLOSE


def test_logits_that_are_no_numbers_end_a_request_and_spoil_no_other() -> None:
    model = tiny_model()
    with torch.no_grad():
        model.model.embed_tokens.weight[44] = math.nan
    engine = engine_of(model, slots=2)
    requests = wanted(12, seed=14)
    pairs = zip(requests, run(engine, requests), strict=True)
    clean = [(request, result) for request, result in pairs if result.finish_reason == "length"]
    assert len(clean) > 4
    spoiled = [Wanted([5, 44, 6], seed=seed, max_tokens=30) for seed in range(2)]
    results = run(engine, [*spoiled, *(request for request, _ in clean)])
    assert [result.finish_reason for result in results[:2]] == ["not_finite"] * 2
    assert results[2:] == [result for _, result in clean]


def second_turns(requests: list[Wanted], results: list[Any]) -> list[Wanted]:
    """Each goes on from its own tokens, after a few that nobody sampled."""
    return [
        Wanted(
            [*request.prompt, *result.token_ids, 1, 7, 3],
            seed=request.seed + 1,
            max_tokens=10,
            first=len(request.prompt),
            history=len(request.prompt) + len(result.token_ids),
        )
        for request, result in zip(requests, results, strict=True)
    ]


def test_a_later_turn_gets_the_same_bits_whether_its_slot_was_kept_or_not(model: Any) -> None:
    requests = wanted(16, seed=15)
    engine = engine_of(model, slots=16, length=100, stop_ids=[1])
    turns = second_turns(requests, run(engine, requests))
    fed = count_steps(engine)
    kept = run(engine, turns)
    assert fed() == max(4 + len(result.token_ids) for result in kept) - 1  # the last token sampled, and three
    assert largest_difference(model, turns, kept) < CLOSE
    engine.forget()
    assert run(engine, turns) == kept
    run(engine, requests)
    run(engine, wanted(5, seed=16))  # these take some of the slots
    assert run(engine, turns[::-1]) == kept[::-1]
    alone = engine_of(model, slots=16, length=100, stop_ids=[1])
    assert run(alone, [turns[3]]) == [kept[3]]


def count_steps(engine: Any) -> Any:
    before = engine._steps
    return lambda: engine._steps - before


def test_stop_tokens_and_stop_strings_of_earlier_turns_stop_nothing(model: Any) -> None:
    prompt = [5, 1, 6, 1, 7, 1]
    request = Wanted(prompt, seed=3, max_tokens=9, first=2, history=4, stop=("gb", "h"))
    engine = engine_of(model, slots=2, stop_ids=[1])
    result = run(engine, [request])[0]
    assert result.token_ids
    assert largest_difference(model, [request], [result]) < CLOSE


@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (2, 2), (8, 1)])
def test_a_longer_neighbour_changes_no_bit(heads: tuple[int, int]) -> None:
    """What is read of the caches ends behind the longest row; sums over it have one order all the same."""
    model = tiny_model(num_attention_heads=heads[0], num_key_value_heads=heads[1])
    requests = wanted(3, seed=17)
    alone = run(engine_of(model, slots=6, length=128), requests)
    long = [Wanted([3] * 90, seed=seed, max_tokens=38) for seed in range(3)]
    assert run(engine_of(model, slots=6, length=128), [*long, *requests])[3:] == alone


def test_an_episode_abandoned_before_its_first_token_leaves_what_it_has(model: Any) -> None:
    prompt = [5, 6, *range(2, 20)]
    request = Wanted(prompt, seed=3, max_tokens=9, first=2, history=18)
    engine = engine_of(model, slots=1)
    expected = run(engine, [request])
    engine.forget()
    given_up = Wanted(prompt, seed=3, max_tokens=9, first=2, history=18)
    engine.add(given_up)
    with engine.model.sampling():
        engine.step()
        given_up.abandoned = True
        assert engine.step() == [(given_up, ([], [], [], "length"))]
    assert run(engine, [request]) == expected
