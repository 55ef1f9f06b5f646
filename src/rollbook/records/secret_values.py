"""The values that are known to be secrets, and the forms in which they may be written.

They come from environment variables with a secret's name, from the configs that this process has read, and
from the headers that it sends. A process hands them to its children in `_ROLLBOOK_SECRETS`. From 8 characters
on a value is looked for wherever something is written: as it is, escaped as in JSON, HTML or a URL, and, if a
config or a header holds it, in base64. A placeholder (`EMPTY`) or an ordinary word is not looked for, which
would take that word out of every conversation.
"""

from __future__ import annotations

import base64
import binascii
import html
import json
import os
import re
from collections.abc import Iterable, Mapping
from functools import lru_cache
from urllib.parse import quote, quote_plus, unquote

from rollbook.records.secret_names import (
    ORDINARY_WORD,
    NameKind,
    is_login,
    is_path,
    is_secret,
    looks_like_credential,
    name_kind,
)

REDACTED = "[redacted]"
CHILDREN_VARIABLE = "_ROLLBOOK_SECRETS"
_MIN_VALUE = 8
_MIN_LINE = 16  # of a value of several lines, each of which is looked for
_WORD = re.compile(r"[A-Za-z]?[a-z]{0,11}|[A-Z]{0,12}")
_PLACEHOLDERS = {"any", "anything", "changeme", "dummy", "empty", "fake", "no", "none", "not", "null"}
_PLACEHOLDERS |= {"placeholder", "unused", "xxx", "xxxx"}
_BESIDE_ONE = {"api", "auth", "here", "it", "key", "me", "needed", "required", "set", "sk", "token", "used"}
_ANY_KEY = re.compile(r"(?i)\w+_key")
_SCHEME = re.compile(r"(?i)(bearer|basic|token|digest|api-?key)\s+(\S.*)")
_PLAIN_HEADERS = re.compile(
    r"(?i)accept(?:-\w+)*|content-\w+|user-agent|host|origin|referer|http-referer|x-title|connection"
    r"|cache-control|date|keep-alive|openai-(?:beta|organization|project)|anthropic-(?:beta|version)|api-version"
)

_remembered: set[str] = set()


def remember(value: str) -> None:
    """Look for a secret from now on, in whatever is written."""
    _remembered.update(_worth_looking_for(value))


def remember_variable(name: str) -> None:
    remember(os.environ.get(name, ""))


def remember_header(name: str, value: str) -> None:
    """Look from now on for what a header holds: a key, the password of a login, a cookie."""
    if _PLAIN_HEADERS.fullmatch(name.strip()):
        return
    scheme = _SCHEME.fullmatch(value.strip())
    pieces = [scheme[2] if scheme else value.strip()]
    if scheme and scheme[1].lower() == "basic":
        remember_login(_decoded(scheme[2]))
    if "cookie" in name.lower():
        pieces += [piece.partition("=")[2].strip() for piece in value.split(";")]
    for piece in pieces:
        # `X-Team: reasoning` would take that word out of all that is recorded.
        if name_kind(name) is not NameKind.PLAIN or scheme or looks_like_credential(piece, _MIN_VALUE, 1):
            remember(piece)


def remember_login(login: str) -> None:
    """Look for the password of `user:password`, and for both together, which basic auth sends as base64."""
    user, colon, password = login.partition(":")
    if colon and password:
        remember(password)
        plain = f"{unquote(user)}:{unquote(password)}"
        remember(unquote(password))
        if user and is_login(plain):
            remember(plain)


def known_values() -> list[str]:
    """Every form of every known secret, the longest first so that one inside another leaves no rest."""
    return list(_forms(frozenset(_from_environment(os.environ)), frozenset(_remembered)))


def count_of_remembered() -> int:
    return len(_remembered)


def for_children() -> dict[str, str]:
    """The variable by which a child learns what this process has remembered."""
    inherited = _inherited(os.environ)
    known = sorted(_remembered.union(inherited))
    return {CHILDREN_VARIABLE: json.dumps(known)} if known else {}


def keep_inherited() -> None:
    """Remember what the parent handed over, and hand it no further to commands of the user's."""
    _remembered.update(_inherited(os.environ))
    os.environ.pop(CHILDREN_VARIABLE, None)


def _inherited(environment: Mapping[str, str]) -> list[str]:
    try:
        found = json.loads(environment.get(CHILDREN_VARIABLE, "[]"))
    except ValueError:
        return []
    return [value for value in found if isinstance(value, str)] if isinstance(found, list) else []


def _worth_looking_for(value: str) -> Iterable[str]:
    # A diff prefixes every line, so a value of several lines is looked for line by line.
    pieces = [piece.strip() for piece in value.splitlines() if "-----" not in piece and _is_text(piece)]
    minimum = _MIN_VALUE if len(pieces) == 1 else _MIN_LINE
    return (piece for piece in pieces if len(piece) >= minimum and not _is_ordinary(piece))


def _is_text(value: str) -> bool:
    """Not a lone surrogate, which no file can hold; a byte of another encoding is one that a file can."""
    try:
        value.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        return False
    return True


def _is_ordinary(value: str) -> bool:
    if ORDINARY_WORD.fullmatch(value) or _WORD.fullmatch(value) or is_path(value):
        return True
    words = set(re.split(r"[-_ .]+", value.lower()))
    return words <= _PLACEHOLDERS | _BESIDE_ONE and not words <= _BESIDE_ONE


def _from_environment(environment: Mapping[str, str]) -> set[str]:
    found = set(_inherited(environment))
    for name, value in environment.items():
        if name == CHILDREN_VARIABLE:
            continue
        kind = name_kind(name)
        if kind in (NameKind.SECRET, NameKind.DOUBTFUL):
            is_one = is_secret(name, kind, value)
        else:  # WANDB_KEY, but not SORT_KEY=name
            is_one = _ANY_KEY.fullmatch(name) is not None and looks_like_credential(value)
        if is_one:
            found.update(_worth_looking_for(value))
    return found


@lru_cache(maxsize=16)
def _forms(from_environment: frozenset[str], from_configs: frozenset[str]) -> tuple[str, ...]:
    forms = {form for value in from_environment | from_configs for form in _written(value)}
    forms |= {form for value in from_configs for form in _in_base64(value)}
    return tuple(sorted(forms, key=lambda form: (-len(form), form)))


def _written(value: str) -> set[str]:
    in_json = {json.dumps(value, ensure_ascii=is_ascii)[1:-1] for is_ascii in (True, False)}
    within = {json.dumps(form)[1:-1] for form in in_json}  # JSON quoted in a string of JSON
    quoted = {quote(value, safe=safe, errors="surrogateescape") for safe in ("", "/")}
    in_urls = {*quoted, quote_plus(value, errors="surrogateescape")}
    in_urls |= {re.sub("%..", lambda match: match[0].lower(), form) for form in in_urls}
    in_html = {html.escape(value), html.escape(value, quote=False)}
    in_yaml = value.replace("'", "''")
    return {value, in_yaml, repr(value)[1:-1], *in_json, *within, *in_urls, *in_html}


def _in_base64(value: str) -> set[str]:
    data = value.encode("utf-8", "surrogateescape")
    return {encode(data).decode().rstrip("=") for encode in (base64.b64encode, base64.urlsafe_b64encode)}


def _decoded(text: str) -> str:
    try:
        return base64.b64decode(text + "=" * (-len(text) % 4), validate=True).decode()
    except (binascii.Error, ValueError):
        return ""
