"""A chat template is a program of its author: one that raises or is endless is refused, in few words."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import AutoTokenizer

from rollbook.policies.chat_template import ChatTemplate, TemplateError
from tiny_model import make_tokenizer

QUESTION = [{"role": "user", "content": "2 + 2?"}]


@pytest.mark.parametrize(
    ("template", "why"),
    [
        ("{{ raise_exception('not for you') }}", "the chat template failed: TemplateError: not for you"),
        ("{{ messages[7].content.x.y }}", "the chat template failed: UndefinedError: "),
        ("{% for", "the chat template failed: TemplateSyntaxError: "),
        ("{{ raise_exception('x' * 10000000) }}", "the chat template failed: TemplateError: xxx"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "the chat template failed: SecurityError: "),
        ("{# " + "x" * 1_000_000 + " #}", "the chat template is 1,000,006 characters long, over the limit"),
    ],
)
def test_it_is_refused(template: str, why: str, tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(make_tokenizer(tmp_path))
    with pytest.raises(TemplateError) as caught:
        chat = ChatTemplate(tokenizer, template)
        chat.text(chat.protect(QUESTION))
    assert str(caught.value).startswith(why)
    assert len(str(caught.value)) < 500
