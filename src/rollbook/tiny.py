"""A model directory small enough to train on a CPU in seconds: one token per character, random weights.

It is what the demo and the tests fine-tune. Everything a real one has is there, so every command takes it:
config, tokenizer, chat template with tools, weights.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

PAD, UNKNOWN, END = "<|pad|>", "<|unknown|>", "<|im_end|>"
ROLES = ("system", "user", "assistant", "tool")
MARKS = ("<tool_call>", "</tool_call>", "<think>", "</think>")

# A role is one token, so that a turn costs two tokens more than what it says.
CHAT_TEMPLATE = """\
{%- if tools -%}
<|system|>{% for tool in tools %}{{ tool.function.name }}{{ "" if loop.last else " " }}{% endfor %}<|im_end|>
{%- endif -%}
{%- for message in messages -%}
{{ "<|" + message.role + "|>" }}
{%- if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>{% endif -%}
{{ message.content }}
{%- for call in message.tool_calls or [] -%}
<tool_call>{{ call.function | tojson }}</tool_call>
{%- endfor -%}
<|im_end|>
{%- endfor -%}
{%- if add_generation_prompt %}<|assistant|>{% endif -%}
"""


def write_tiny_model(
    directory: Path, characters: str, *, pieces: Iterable[str] = (), seed: int = 0, **sizes: int
) -> Path:
    """A Llama with random weights in a Hugging Face directory, for text of these `characters`.

    `pieces` are longer texts that become one token each, such as the beginning of every tool call. `sizes`
    are those of `tiny_config`: hidden, layers, heads, intermediate, positions.
    """
    import torch
    from transformers import LlamaForCausalLM

    tokenizer = write_tiny_tokenizer(directory, characters, pieces=pieces)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: Any = LlamaForCausalLM(tiny_config(tokenizer, **sizes))
    with _no_progress_bar():
        model.save_pretrained(directory)
    return directory


@contextmanager
def _no_progress_bar() -> Iterator[None]:
    """Keeps transformers from drawing a bar for a file of a millisecond."""
    from transformers.utils import logging

    bars: Any = logging  # its functions have no types
    was_on = bars.is_progress_bar_enabled()
    bars.disable_progress_bar()
    try:
        yield
    finally:
        if was_on:
            bars.enable_progress_bar()


def tiny_config(
    tokenizer: Any,
    *,
    hidden: int = 64,
    layers: int = 2,
    heads: int = 4,
    intermediate: int = 256,
    positions: int = 512,
) -> Any:
    """The config of a Llama of these sizes for the tokenizer."""
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        max_position_embeddings=positions,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )


def write_tiny_tokenizer(
    directory: Path,
    characters: str,
    *,
    pieces: Iterable[str] = (),
    template: str = CHAT_TEMPLATE,
    added: Iterable[str] = (),
) -> Any:
    """Writes the tokenizer of a tiny model and returns it; `added` are further special tokens."""
    from tokenizers import AddedToken, Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    pieces = list(pieces)
    letters = sorted({*characters, *"".join(pieces)})
    vocabulary = {token: number for number, token in enumerate([PAD, UNKNOWN, END, *letters])}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token=UNKNOWN))
    backend.decoder = decoders.Fuse()
    made: Any = PreTrainedTokenizerFast
    fast = made(tokenizer_object=backend, eos_token=END, pad_token=PAD, unk_token=UNKNOWN)
    roles = [f"<|{role}|>" for role in ROLES]
    fast.add_special_tokens({"additional_special_tokens": [*roles, *added]})
    fast.add_tokens([AddedToken(text, normalized=False) for text in (*MARKS, *pieces)])
    fast.chat_template = template
    fast.save_pretrained(directory)
    return fast
