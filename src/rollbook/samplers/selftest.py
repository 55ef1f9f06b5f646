"""Before the first request: does this model sample as the trainer sees it?

Not a list of families decides but the model itself. Some fail silently: a recurrent layer keeps no state over
the steps, an attention of its own never looks into the slots. So short sequences are decoded in two slots at
different positions, over two turns and with a refill, and compared with plain forward passes.

bfloat16 rounds away what is looked for; such weights are widened to float32 for the comparison.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rollbook.samplers.engine import Engine, Sampled, Wanted
from rollbook.train.batch import Example
from rollbook.train.checks import SelfTestError, in_float32
from rollbook.train.model import Model

# Two orders of summation differ by rounding; on a GPU, products may be rounded to fewer bits.
_CPU_TOLERANCE, _GPU_TOLERANCE = 1e-4, 5e-3
_LENGTH = 40
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")


def check_model(model: Model, length: int) -> float:
    """The largest difference to a plain forward pass; raises SelfTestError where it is no rounding."""
    family = model.base.config.model_type
    _check_rope(model.base.config.get_text_config(), length)
    with in_float32(model):
        try:
            results = _sampled(model)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # a model's own code, asked for something it was not made for
            why = f"{family} models cannot be sampled here ({type(error).__name__}: {error})"
            raise SelfTestError(why) from error
        worst = max(_difference(_plain(model, wanted, result), result) for wanted, result in results)
        tolerance = _CPU_TOLERANCE if model.base.device.type == "cpu" else _GPU_TOLERANCE
        if not worst <= tolerance:
            raise SelfTestError(
                f"{family} models cannot be sampled here: log-probabilities differ from those of a plain "
                f"forward pass by {worst:.2g}. The sampler keeps keys and values only; a layer with another "
                "state, or an attention of its own, is not served"
            )
        trained = _trained(model, results)
        if not trained <= tolerance:
            raise SelfTestError(
                f"the trainer's log-probabilities of sampled {family} tokens differ from the sampler's by "
                f"{trained:.2g}"
            )
        _check_stop(model, *results[0])
    return max(worst, trained)


def make_rows_independent(engine: Engine) -> bool:
    """Whether they are, perhaps only with whole slots read: some processors sum in another order then."""
    if rows_are_independent(engine):
        return True
    engine.read_all()
    return rows_are_independent(engine)


def rows_are_independent(engine: Engine) -> bool:
    """Whether a request gets the same bits alone, and beside others in the first slot and the last."""
    vocabulary = engine.model.vocabulary
    count, length = engine.size

    def one() -> Wanted:
        return Wanted(_tokens(min(7, length - 4), vocabulary, 1), seed=1, max_tokens=4)

    lengths = [1 + 7 * number % min(24, length - 4) for number in range(count - 2)]
    others = [Wanted(_tokens(most, vocabulary, most), seed=most, max_tokens=4) for most in lengths]
    (alone,) = _run(engine, [one()])
    engine.forget()
    first, *_, last = _run(engine, [one(), *others, one()])
    engine.forget()
    return alone == first == last


def has_experts(config: Any) -> bool:
    """Whether layers take the tokens of all rows together, those that go to one expert. Whether that changes
    a bit is then a matter of luck, and of the test."""
    return any((getattr(config, name, None) or 0) > 1 for name in _EXPERTS)


def _sampled(model: Model) -> list[tuple[Wanted, Sampled]]:
    """Three requests in two slots, and a second turn of each."""
    vocabulary = model.base.get_output_embeddings().weight.shape[0]
    engine = _engine(model, ())
    firsts = [
        Wanted(_tokens(prompt, vocabulary, prompt), seed=prompt, max_tokens=tokens, temperature=0.7)
        for prompt, tokens in ((3, 8), (9, 5), (6, 6))
    ]
    results = list(zip(firsts, _run(engine, firsts), strict=True))
    seconds = [
        Wanted(
            [*wanted.prompt, *result.token_ids, *_tokens(3, vocabulary, 5)],
            seed=5,
            max_tokens=5,
            first=len(wanted.prompt),
            history=len(wanted.prompt) + len(result.token_ids),
        )
        for wanted, result in results
    ]
    return results + list(zip(seconds, _run(engine, seconds), strict=True))


def _engine(model: Model, stop_ids: Sequence[int]) -> Engine:
    return Engine(model.base, slots=2, length=_LENGTH, stop_ids=stop_ids, decode=str)


def _run(engine: Engine, requests: Sequence[Wanted]) -> list[Sampled]:
    for wanted in requests:
        engine.add(wanted)
    done: dict[Wanted, Sampled] = {}
    with engine.model.sampling():
        while engine.busy:
            done.update(engine.step())
    return [done[wanted] for wanted in requests]


@torch.no_grad()
def _plain(model: Model, wanted: Wanted, result: Sampled) -> Tensor:
    """The log-probabilities of a reply by one forward pass with the attention that the model came with."""
    packs, was_training = model.packs, model.model.training
    model.use_packing(False)
    model.use_dropout(False)
    try:
        ids = torch.tensor([[*wanted.prompt, *result.token_ids]], device=model.base.device)
        logits = model.base(input_ids=ids, use_cache=False).logits[0, len(wanted.prompt) - 1 : -1]
    finally:
        model.use_dropout(was_training)
        model.use_packing(packs)
    chosen = torch.tensor(result.token_ids, device=logits.device)[:, None]
    logprob_TV: Tensor = (logits.float() / wanted.temperature).log_softmax(-1)
    return logprob_TV.gather(1, chosen)[:, 0].cpu()


@torch.no_grad()
def _trained(model: Model, results: Sequence[tuple[Wanted, Sampled]]) -> float:
    """The largest difference to what the trainer computes of the same tokens at their temperatures."""
    was_training = model.model.training
    model.use_dropout(False)
    try:
        return max(_difference(_outputs(model, wanted, result), result) for wanted, result in results)
    finally:
        model.use_dropout(was_training)


def _outputs(model: Model, wanted: Wanted, result: Sampled) -> Tensor:
    tokens = np.array([*wanted.prompt, *result.token_ids], dtype=np.int32)
    trained = np.arange(len(tokens)) >= len(wanted.prompt)
    temperature = np.full(len(tokens), wanted.temperature, dtype=np.float32)
    (batch,) = model.batches([Example(tokens, trained, {"temperature": temperature})], len(tokens))
    return model.outputs(batch.to(model.base.device)).logprob_N.cpu()


def _difference(logprobs: Tensor, result: Sampled) -> float:
    return float((logprobs - torch.tensor(result.logprobs)).abs().max())


def _check_stop(model: Model, wanted: Wanted, result: Sampled) -> None:
    """With one of its tokens as a stop token, the same request must end there."""
    stop = result.token_ids[len(result.token_ids) // 2]
    expected = result.token_ids[: result.token_ids.index(stop) + 1]
    (stopped,) = _run(_engine(model, [stop]), [wanted])
    if stopped.token_ids != expected or stopped.finish_reason != "stop":
        raise SelfTestError("a sampled stop token does not end the reply")


def longest_sequence(model: Model) -> int | None:
    """Tokens that a sequence of the model may have; None where its config does not say."""
    found = (model.positions, _same_rotation(model.base.config.get_text_config()))
    return min((limit for limit in found if limit is not None), default=None)


def _same_rotation(config: Any) -> int | None:
    """Tokens up to which a position means the same, whatever is sampled beside; None where it always does."""
    rope = getattr(config, "rope_parameters", None) or {}
    return rope.get("original_max_position_embeddings") if rope.get("rope_type") == "longrope" else None


def _check_rope(config: Any, length: int) -> None:
    """Positions whose meaning depends on the longest sequence of a batch would depend on the neighbours."""
    trained = _same_rotation(config)
    if trained is not None and length > trained:
        raise SelfTestError(
            f"{config.model_type} models rotate positions otherwise in batches with a sequence over "
            f"{trained} tokens; set max_length to at most {trained} (now {length})"
        )


def _tokens(count: int, vocabulary: int, seed: int) -> list[int]:
    """Some tokens that are not all alike."""
    return [(7919 * (seed + 1) + 104729 * place * place + 31 * place) % vocabulary for place in range(count)]
