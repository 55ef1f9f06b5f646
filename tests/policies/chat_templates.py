"""Chat templates in the style of model families, and a tokenizer of single characters that takes them."""

from __future__ import annotations

import string
from pathlib import Path
from typing import Any

from rollbook.tiny import write_tiny_tokenizer

_ASKS_FOR_REPLY = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
_CALLS = (
    "{% for call in message.tool_calls or [] %}"
    "{{ '\n' if message.content or not loop.first }}{{ '<tool_call>\n' }}"
    '{"name": {{ call.function.name | tojson }}, "arguments": {{ call.function.arguments | tojson }}}'
    "\n</tool_call>{% endfor %}"
)
_TOOLS = "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}"

CHATML = (
    _TOOLS + "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.reasoning_content %}<think>\n{{ message.reasoning_content }}\n</think>\n\n{% endif %}"
    "{{ message.content }}" + _CALLS + "<|im_end|>\n{% endfor %}" + _ASKS_FOR_REPLY
)
# Thoughts before the last question are dropped, and tool results stand together in one user's turn.
FORGETS_THOUGHTS = (
    _TOOLS + "{% set now = namespace(asked=0) %}{% for message in messages %}"
    "{% if message.role == 'user' %}{% set now.asked = loop.index0 %}{% endif %}{% endfor %}"
    "{% for message in messages %}"
    "{% if message.role == 'tool' %}"
    "{% if loop.first or messages[loop.index0 - 1].role != 'tool' %}<|im_start|>user{% endif %}"
    "{{ '\n<tool_response>\n' }}{{ message.content }}\n</tool_response>"
    "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|im_end|>\n{% endif %}"
    "{% else %}<|im_start|>{{ message.role }}\n"
    "{% if message.reasoning_content and loop.index0 > now.asked %}"
    "<think>\n{{ message.reasoning_content }}\n</think>\n\n{% endif %}"
    "{{ message.content }}" + _CALLS + "<|im_end|>\n{% endif %}{% endfor %}" + _ASKS_FOR_REPLY
)
PREFILLS_THOUGHT = CHATML.replace("assistant\n{% endif %}", "assistant\n<think>\n{% endif %}")
# A call is bare JSON, without what the reply says beside it; there is one, and each turn is trimmed.
LLAMA3 = (
    "<|begin|>{% for message in messages %}"
    "<|head|>{{ 'ipython' if message.role == 'tool' else message.role }}<|/head|>\n\n"
    "{% if message.tool_calls %}"
    "{% if message.tool_calls | length > 1 %}{{ raise_exception('one call at a time') }}{% endif %}"
    "{% set call = message.tool_calls[0].function %}"
    '{"name": {{ call.name | tojson }}, "parameters": {{ call.arguments | tojson }}}'
    "{% else %}{{ message.content | trim }}{% endif %}<|eot|>{% endfor %}"
    "{% if add_generation_prompt %}<|head|>assistant<|/head|>\n\n{% endif %}"
)
REWRITES = CHATML.replace(
    "<|im_start|>{{ message.role }}\n",
    "<|im_start|>{{ message.role }}\n{% if message.role == 'assistant' and not loop.last %}(said)<|im_end|>\n"
    "{% continue %}{% endif %}",
)
# The text of a reply is closed before its turn is, and a conversation that is over ends with a token more.
CLOSES_TWICE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{{ message.content }}{% if message.role == 'assistant' %}<|head|>{% endif %}<|eot|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% else %}<|begin|>{% endif %}"
)
# Arguments are joined as text, and a reply's own text stands behind the results of its calls.
JOINS_ARGUMENTS = (
    "{% for message in messages %}{% if message.role == 'tool' %}<tool_response>{{ message.content }}"
    "</tool_response>{% else %}<|im_start|>{{ message.role }}\n"
    "{% for call in message.tool_calls or [] %}"
    '{{ \'<tool_call>{"name": "\' + call.function.name + \'", "arguments": \' + call.function.arguments }}}'
    "</tool_call>{% endfor %}"
    "{% if message.tool_calls %}<|eot|>{% else %}{{ message.content }}<|im_end|>\n{% endif %}{% endif %}"
    "{% endfor %}" + _ASKS_FOR_REPLY
)
# No token of its own ends a reply: the next role does.
ENDLESS = (
    "{% for message in messages %}<|{{ message.role }}|>\n{{ message.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
WITHOUT_TOOLS = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{{ message.content }}<|im_end|>\n{% endfor %}" + _ASKS_FOR_REPLY
)
STYLES = {
    "chatml": CHATML,
    "forgets thoughts": FORGETS_THOUGHTS,
    "prefills a thought": PREFILLS_THOUGHT,
    "llama3": LLAMA3,
}
_ADDED = (
    "<|im_start|>",
    "<|begin|>",
    "<|head|>",
    "<|/head|>",
    "<|eot|>",
    "<tool_response>",
    "</tool_response>",
)


def make_tokenizer(directory: Path, template: str, **changes: Any) -> Any:
    tokenizer = write_tiny_tokenizer(directory, string.printable + "é✓", template=template, added=_ADDED)
    for name, value in changes.items():
        setattr(tokenizer, name, value)
    return tokenizer
