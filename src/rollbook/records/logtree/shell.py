"""What stands around the tree on a page: the head with its security policy, the bar, the outline's place.

`page.css` and `page.js` are embedded, and the policy names them by their hash: no other style, script,
frame, form, font or request is possible, whatever the text between holds.
"""

from __future__ import annotations

import base64
import hashlib
from functools import cache
from typing import NamedTuple

from rollbook.records.logtree.escape import escape, escape_plainly
from rollbook.records.logtree.tree import Trace

_ICONS = {
    "menu": '<path d="M2 4h12M2 8h12M2 12h8"/>',
    "up": '<path d="M4 10l4-4 4 4"/>',
    "down": '<path d="M4 6l4 4 4-4"/>',
    "theme": '<circle cx="8" cy="8" r="5.5"/><path d="M8 2.5a5.5 5.5 0 0 1 0 11z" fill="currentColor"/>',
}


class Counts(NamedTuple):
    """What a page holds; a group in full shows what was said, the others only numbers."""

    groups: int
    groups_in_full: int
    trajectories: int


def head(trace: Trace, counts: Counts) -> str:
    style, script = _asset("page.css"), _asset("page.js")
    policy = (
        f"default-src 'none'; img-src data:; style-src '{_hash(style)}'; script-src '{_hash(script)}'; "
        "base-uri 'none'; form-action 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
    )
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        '<meta name="referrer" content="no-referrer"><meta name="color-scheme" content="light dark">'
        f"<title>{escape_plainly(trace.title)}</title><style>{style}</style></head>\n<body>"
        f'<a class="skip" href="#lt-main">Skip to the content</a>{_bar(trace.title)}'
        '<nav id="lt-outline" aria-label="Outline"></nav>'
        f'<main id="lt-main" tabindex="-1"><p class="about">{_about(trace, counts)}</p>\n'
    )


def foot() -> str:
    return f"</main>\n<script>{_asset('page.js')}</script></body></html>\n"


def _bar(title: str) -> str:
    return (
        '<header id="lt-bar">'
        f"{_button('menu', 'Outline', 'Outline', 'menu')}<h1>{escape(title)}</h1>"
        '<div role="search" id="lt-search"><input id="lt-find" type="search" placeholder="Find"'
        ' aria-label="Find in this page" title="Find ( / )" autocomplete="off" spellcheck="false">'
        '<kbd>/</kbd><output id="lt-count" for="lt-find"></output>'
        f"{_button('previous', 'Previous match', 'Previous match (Shift+Enter)', 'up')}"
        f"{_button('next', 'Next match', 'Next match (Enter)', 'down')}</div>"
        '<button id="lt-all" type="button" title="Expand or collapse everything ( e )">Expand all</button>'
        f"{_button('theme', 'Colours: automatic', 'Colours: automatic', 'theme')}</header>"
    )


def _button(name: str, label: str, tip: str, icon: str) -> str:
    drawing = f'<svg viewBox="0 0 16 16" width="16" height="16" aria-hidden="true">{_ICONS[icon]}</svg>'
    return f'<button id="lt-{name}" type="button" aria-label="{label}" title="{tip}">{drawing}</button>'


def _about(trace: Trace, counts: Counts) -> str:
    zone = " UTC" if trace.started_at.endswith(("Z", "+00:00")) else ""
    some = f", {counts.groups_in_full:,} of them in full" if counts.groups_in_full < counts.groups else ""
    facts = [
        trace.started_at[:19].replace("T", " ") + zone,
        _counted(counts.groups, "group", "groups") + some,
        _counted(counts.trajectories, "trajectory", "trajectories") + (" shown" if some else ""),
    ]
    return escape(" · ".join(fact for fact in facts if fact))


def _counted(number: int, one: str, many: str) -> str:
    return f"{number:,} {one if number == 1 else many}" if number else ""


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


@cache
def _asset(name: str) -> str:
    from importlib.resources import files  # slow to import, and needed for the first page only

    return files("rollbook.records.logtree").joinpath(name).read_text(encoding="utf-8").strip()
