"""Redacts secrets in what is written to the files of a run.

A value is a secret because of its name (`api_key`, `hf_token`, all of `headers`), because of its shape
(`sk-...`, a JWT, a PEM key, the password or the key in a URL, `-u user:password`), or because it is known, as
`secret_values` says. In free text a value that looks like a credential is redacted where it is assigned to a
secret's name; nothing else is guessed at. It becomes `[redacted]`; neither its length nor a part of it is
kept. What only sounds like a secret stays, as `secret_names` says.

No line is added or removed and every scan is linear: a redacted diff is still a diff, a big one is cheap.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any
from urllib.parse import unquote

from rollbook.records import secret_values
from rollbook.records.secret_names import (
    ORDINARY_WORD,
    NameKind,
    is_login,
    is_numeric_secret,
    is_path,
    is_reference,
    is_secret,
    kind_below,
    looks_like_credential,
    name_kind,
    names_a_variable,
    variable_in,
)

REDACTED = secret_values.REDACTED
_MAX_DEPTH = 200
_MIN_CREDENTIAL = 16
_MIN_ASSIGNED = 8
_MIN_IN_QUERY = 6

# Settings as words of a command: `agents.a.policy.headers.X-Token=...`, `policy={headers: {X-Token: ...}}`.
_SETTING = re.compile(r"([-+\w][-\w.]*)=(.*)", re.DOTALL)
_HEADER_SETTING = re.compile(
    r"((?:headers|cookies)(?:\.[^\s=]+=|[\"']?\s*[=:]\s*(?=[\[{]))).+", re.IGNORECASE | re.DOTALL
)
_HEADER_LINE = re.compile(r"(?m)^([ \t]*[\"']?([A-Za-z][\w-]*)[\"']?[ \t]*:[ \t]*)(\S[^\n]*)")
_COOKIE = re.compile(r"([\w.-]+=)([^;,\s]+)")
_VARIABLE = re.compile(r"\$\{(?:oc\.env:|env:)?([A-Za-z_]\w*)\}|\$([A-Za-z_]\w*)")
# In the query of a URL; a secret's own names are others.
_QUERY_SECRETS = {"key", "sig", "signature", "sas", "x-amz-credential", "x-amz-signature", "x-goog-signature"}
_QUERY_SECRETS |= {
    "x-amz-security-token",
    "x-goog-credential",
    "auth",
    "token",
    "pw",
    "pwd",
    "pass",
    "session",
}
_TEMPLATE = re.compile(
    r"\$?\{[^{}\n]*\}|\$?\{\{[^\n]*\}\}|<[^<>\n]*>|%\(?\w*\)?s|\$\w+|\$\([^\n]*|[:*]*|\.\.\.|\[redacted\]"
)
_FLAG = re.compile(r"--?[A-Za-z][\w-]*")
_FLAGS = {
    "-H": NameKind.HEADER_ENTRY, "--header": NameKind.HEADER_ENTRY, "--proxy-header": NameKind.HEADER_ENTRY,
    "--cookie": NameKind.HEADER,
    "-u": NameKind.LOGIN, "--user": NameKind.LOGIN, "-U": NameKind.LOGIN, "--proxy-user": NameKind.LOGIN,
}  # fmt: skip


def redact_text(text: str) -> str:
    """Redact a diff, a log or a command line. The number of lines stays the same."""
    return Redactor().text(text)


def redact_tree(obj: Any, *, remember: bool = False) -> Any:
    """Redact nested plain data (dicts, lists, tuples, scalars); the input is not changed.

    With `remember`, which is for configs, values found by their keys are redacted everywhere from then on.
    """
    return Redactor(remember).tree(obj, NameKind.PLAIN, "", ())


def remember_secrets(config: Any) -> None:
    """Redact from now on, in whatever is written, the secrets that a config holds or names."""
    redact_tree(config, remember=True)


def redact_shapes(data: bytes) -> bytes:
    """Redact what has a credential's shape in output of any encoding."""
    text = data.decode("latin-1")  # each byte is a character, and shapes are made of ASCII
    return _SHAPES.sub(REDACTED, text).encode("latin-1")


def beginning_of_a_shape(data: bytes) -> int:
    """How many bytes at the end of a part of a stream may be the beginning of a credential."""
    match = _LAST_WORD.search(data)
    word = match[0] if match else b""
    begins = word.startswith(_PREFIXES) or any(prefix.startswith(word) for prefix in _PREFIXES)
    return len(word) if begins else 0


class Redactor:
    """Redacts with the values that are known now; with `remember` it adds those that it finds."""

    def __init__(self, remember: bool = False) -> None:
        self._known = secret_values.known_values()
        self._is_to_remember = remember

    def text(self, text: str) -> str:
        for value in self._known:
            text = text.replace(value, REDACTED)
        if "PRIVATE KEY" in text:
            text = _PEM_ON_ONE_LINE.sub(rf"\1{REDACTED}", text)
            text = _PEM_LINES.sub(_redact_pem, text)
        text = _URL_PASSWORD.sub(self._in_url, text)
        text = _QUERY.sub(self._in_query, text)
        text = _SHAPES.sub(self._shape, text)
        text = _BEARER.sub(_redact_bearer, text)
        text = _LOGIN_FLAG.sub(self._in_login_flag, text)
        return _ASSIGNED.sub(_redact_assigned, text)

    def leaf(self, value: str, kind: NameKind, name: str) -> str:
        """A string that stands under a name."""
        if kind in (NameKind.HEADERS, NameKind.HEADER_ENTRY):
            entry = _COOKIE if ":" not in value and "=" in value else _HEADER_LINE
            return self.text(entry.sub(partial(self._in_headers, name), value))
        if kind is NameKind.SETTING:
            return self._setting(value)
        if kind is NameKind.LOGIN:
            return self._login(value) if is_login(value) else self.text(value)
        if self._is_to_remember:
            self._remember(value, kind, name)
        return REDACTED if is_secret(name, kind, value) else self.text(value)

    def tree(self, value: Any, kind: NameKind, name: str, above: tuple[int, ...]) -> Any:
        if isinstance(value, str):
            return self.leaf(value, kind, name)
        if isinstance(value, bytes):
            text = value.decode("utf-8", "surrogateescape")
            clean = self.tree(text, kind, name, above)
            return value if clean == text else clean.encode("utf-8", "surrogateescape")
        if value is None or isinstance(value, bool | int | float):
            is_number = value is not None and not isinstance(value, bool)
            return REDACTED if is_number and is_numeric_secret(name, kind) else value
        if not isinstance(value, Mapping | list | tuple | set | frozenset):
            return value
        if id(value) in above:
            return "[circular]"
        if len(above) >= _MAX_DEPTH:
            return "[too deep]"
        above = (*above, id(value))
        if isinstance(value, Mapping):
            return self._mapping(value, kind, above)
        plain = next(plain for plain in (list, tuple, set, frozenset) if isinstance(value, plain))
        entries = list(value)
        kinds = kinds_of_items([_text_of(entry) for entry in entries], kind, name)
        return plain(self.tree(entry, *judged, above) for entry, judged in zip(entries, kinds, strict=True))

    def _mapping(self, value: Mapping[Any, Any], kind: NameKind, above: tuple[int, ...]) -> dict[Any, Any]:
        clean: dict[Any, Any] = {}
        for key, entry in value.items():
            if not isinstance(key, str):
                clean[key] = self.tree(entry, kind, "", above)
                continue
            shown = self.text(key)
            if shown != key and shown in clean:
                shown = f"{shown} ({len(clean)})"
            # The name of a type is never a secret, even inside `credentials`.
            below = NameKind.PLAIN if key == "__type__" else kind_below(kind, key)
            clean[shown] = self.tree(entry, below, key, above)
        return clean

    def _remember(self, value: str, kind: NameKind, name: str) -> None:
        if names_a_variable(name):
            secret_values.remember_variable(value)
        elif kind is NameKind.PLAIN:
            return
        elif is_reference(value):
            secret_values.remember_variable(variable_in(value) or "")
        elif kind is NameKind.HEADER:
            for match in _VARIABLE.finditer(value):
                secret_values.remember_variable(match[1] or match[2])
            secret_values.remember_header(name, value)
        elif is_secret(name, kind, value):
            if is_login(value):
                secret_values.remember_login(value)
            secret_values.remember(value)

    def _shape(self, match: re.Match[str]) -> str:
        if self._is_to_remember:
            secret_values.remember(match[0])
        return REDACTED

    def _setting(self, word: str) -> str:
        match = _SETTING.fullmatch(word)
        assert match is not None
        key, value = match.groups()
        kind, name = NameKind.PLAIN, ""
        for name in key.lstrip("-+").split("."):
            kind = kind_below(kind, name)
        if self._is_to_remember:
            self.tree(_as_yaml(value), kind, name, ())
        if kind is not NameKind.HEADERS and is_secret(name, kind, value):
            return f"{key}={REDACTED}"
        return self.text(_HEADER_SETTING.sub(rf"\1{REDACTED}", word))

    def _login(self, value: str) -> str:
        if self._is_to_remember:
            secret_values.remember_login(value)
        return f"{value.partition(':')[0]}:{REDACTED}"

    def _in_headers(self, name: str, match: re.Match[str]) -> str:
        header, value = (match[2], match[3]) if match.re is _HEADER_LINE else (name, match[2])
        if is_reference(value):
            return match[0]
        if self._is_to_remember:
            self._remember(value, NameKind.HEADER, header)
        return f"{match[1]}{REDACTED}"

    def _in_login_flag(self, match: re.Match[str]) -> str:
        return f"{match[1]}{self._login(match[2])}" if is_login(match[2]) else match[0]

    def _in_url(self, match: re.Match[str]) -> str:
        scheme, user, password = match.groups()
        if password is None:
            return f"{scheme}{REDACTED}@" if looks_like_credential(user) else match[0]
        if _stays(password):
            return match[0]
        if self._is_to_remember:
            secret_values.remember_login(f"{user}:{password}")
        return f"{scheme}{user}:{REDACTED}@"

    def _in_query(self, match: re.Match[str]) -> str:
        head, name, value = match.groups()
        kind = name_kind(name)
        named = kind is NameKind.SECRET or name.lower() in ("sig", "signature")
        doubtful = kind is NameKind.DOUBTFUL or name.lower() in _QUERY_SECRETS
        is_one = named or (doubtful and looks_like_credential(value, _MIN_IN_QUERY, 1))
        if not is_one or _stays(value):
            return match[0]
        if self._is_to_remember:
            secret_values.remember(value)
            secret_values.remember(unquote(value))
        return f"{head}{REDACTED}"


def kinds_of_items(texts: Sequence[str | None], kind: NameKind, name: str) -> Iterator[tuple[NameKind, str]]:
    """Kind and name of each item of a list, of which `texts` are those that are text.

    The value after a secret's flag is a secret: `["--api-key", "..."]`, and so is the second of a header's
    pair and of `auth: [user, password]`.
    """
    if kind is NameKind.HEADERS:
        yield from ((NameKind.HEADER_ENTRY, name) for _ in texts)
    elif kind is NameKind.HEADER_ENTRY:  # [name, value]
        header = next((text for text in texts if text), name)
        yield from (
            (NameKind.HEADER, header) if place else (NameKind.PLAIN, "") for place in range(len(texts))
        )
    elif kind is NameKind.DOUBTFUL and name.lower().endswith("auth") and len(texts) == 2:
        yield from ((NameKind.PLAIN, ""), (NameKind.SECRET, "password"))
    else:
        flag = ""
        for text in texts:
            if flag and kind is not NameKind.SECRET and not (text or "").startswith("-"):
                yield _FLAGS.get(flag, name_kind(flag)), flag
            elif kind is not NameKind.SECRET and text is not None and _SETTING.fullmatch(text):
                yield NameKind.SETTING, ""
            else:
                yield kind, name
            flag = text if text is not None and _FLAG.fullmatch(text) else ""


def _as_yaml(word: str) -> Any:
    """The mapping or list that a word of a command spells out."""
    if word.startswith(("{", "[")):
        import yaml

        with suppress(yaml.YAMLError, RecursionError, ValueError):
            return yaml.safe_load(word)
    return word


def _text_of(value: Any) -> str | None:
    return value if isinstance(value, str) else None


def _stays(value: str) -> bool:
    """Not a secret but a place for one: `{password}`, `<key>`, `pass`."""
    return bool(_TEMPLATE.fullmatch(value) or ORDINARY_WORD.fullmatch(value))


# What may stand before a secret: not a letter of a longer word, but the sign of a diff line, an escaped line
# break, a percent escape or a terminal colour. No alternative lets a match start inside a run of its own
# characters, which keeps the search linear.
_START = r"(?:(?<![A-Za-z0-9_-])|(?<=^-)|(?<=\\[nrt])|(?<=%[0-9A-F]{2})|(?<=\[\dm)|(?<=\[\d\dm))"
_SHAPES = re.compile(
    _START
    + r"""(?:
    sk-(?=[A-Za-z_-]*[0-9])[A-Za-z0-9_-]{16,} | (?:sk|rk)_(?:live|test)_[A-Za-z0-9]{16,}
  | (?:hf|api_org)_[A-Za-z0-9]{16,}(?!_) | gh[pousr]_[A-Za-z0-9]{20,} | github_pat_[A-Za-z0-9_]{20,}
  | glpat-[A-Za-z0-9_-]{16,} | xox[abeprs]-[A-Za-z0-9-]{10,} | (?<=hooks\.slack\.com/)[A-Za-z0-9/]{20,}
  | (?:AKIA|ASIA)[A-Z0-9]{16}(?![A-Za-z0-9]) | AIza[A-Za-z0-9_-]{30,}
  | ya29\.[A-Za-z0-9_-]{20,} | (?:npm|gsk|fw|r8)_[A-Za-z0-9]{32,}(?!_) | pypi-[A-Za-z0-9_-]{40,}
  | (?:nvapi|xai|pplx|tml)-(?=[A-Za-z_-]*[0-9])[A-Za-z0-9_-]{24,}
  | lsv2_[a-z]{2}_[A-Za-z0-9_]{24,} | SG\.[A-Za-z0-9_-]{16,}\.[A-Za-z0-9_-]{16,}
  | eyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]{8,}
    )""",
    re.VERBOSE | re.MULTILINE,
)
_PREFIXES = tuple(
    b"sk- sk_ rk_ hf_ api_org_ gho_ ghp_ ghr_ ghs_ ghu_ github_pat_ glpat- xox AKIA ASIA AIza ya29. npm_ gsk_"
    b" fw_ r8_ pypi- nvapi- xai- pplx- tml- lsv2_ SG. eyJ".split()
)
_LAST_WORD = re.compile(rb"(?<![A-Za-z0-9_-])[A-Za-z0-9_.-]{1,4096}\Z")
_BEARER = re.compile(
    r"((?:authorization\\?[\"']?[ \t]{0,4}[:=][ \t]{0,4}\\?[\"']?(?:bearer|basic|token|digest)|bearer)"
    r"[ \t]{1,4})([^\s\"'`,;<>(){}\[\]\\$]{6,})",
    re.IGNORECASE,
)
_LOGIN_FLAG = re.compile(
    r"((?<![\w-])(?:-u|--user|--proxy-user)(?:[ \t]{1,4}|=)[\"']?)([^\s:\"'/]{1,64}:[^\s\"']{1,256})"
)
_QUERY = re.compile(r"([?&](?:amp;)?([\w.-]{1,40})=)([^&\s\"'<>\\#`]{1,1024})")
_URL_PASSWORD = re.compile(r"(://)([^\s/:@\"'<>\[\]]{0,256})(?::([^\s/@\"'<>]{1,512}))?@")


# `api_key = "..."`, `"api_key": "..."`, `API_KEY=...`, also with quotes escaped as in a notebook's JSON.
_ASSIGNED = re.compile(
    r"(?<![A-Za-z0-9_-])(?P<name>[A-Za-z_-][A-Za-z0-9_-]{1,63})(?:\\{0,3}[\"'])?\]?"
    r"(?:[ \t]?:[ \t]?[A-Za-z][\w.\[\]| ]{0,60}(?==))?[ \t]{0,8}(?:=>|:=|[:=])[ \t]{0,8}[rbfuRBFU]{0,2}"
    r"(?P<quote>\\{0,3}[\"'])?(?P<value>[^\s\"'`,;&|<>(){}\[\]\\]{8,512})"
)
_PEM_MARK = r"-----{} [A-Z0-9 ]{{0,40}}PRIVATE KEY(?: BLOCK)?-----"
_PEM_BEGIN, _PEM_END = map(_PEM_MARK.format, ("BEGIN", "END"))
_PEM_ON_ONE_LINE = re.compile(rf"({_PEM_BEGIN})(?:\\[nr]|[A-Za-z0-9+/=]){{32,}}")
_PEM_LINE = (
    r"^([ +-]?[ \t\"']*+)([A-Za-z0-9+/=]++|(?:Proc-Type|DEK-Info|Version|Comment):[^\n]*+)?"
    r"((?:\\[nr])*+[\"',)]*+[ \t\r]*+)$"
)
# A run of lines that may be a key's body, with the mark above it or below it: a hunk can show one of them.
_PEM_LINES = re.compile(
    rf"(?:{_PEM_BEGIN}[^\n]{{0,80}}\n)?+(?:{_PEM_LINE}\n?)++(?:[^\n]{{0,80}}{_PEM_END})?", re.MULTILINE
)
_PEM_BODY = re.compile(_PEM_LINE, re.MULTILINE)
_FULL_PEM_LINE = re.compile(r"[A-Za-z0-9+/=]{32}")


def _redact_pem(match: re.Match[str]) -> str:
    """Each line of a key's body; a mark that is only quoted in code has no body."""
    if "PRIVATE KEY" not in match[0] or not _FULL_PEM_LINE.search(match[0]):
        return match[0]
    return _PEM_BODY.sub(lambda line: f"{line[1]}{REDACTED if line[2] else ''}{line[3]}", match[0])


def _redact_bearer(match: re.Match[str]) -> str:
    head, value = match.groups()
    secret = ":" in head or "=" in head or looks_like_credential(value.rstrip("."))
    return f"{head}{REDACTED}" if secret else match[0]


def _redact_assigned(match: re.Match[str]) -> str:
    kind, value = name_kind(match["name"]), match["value"]
    if match["name"].lower().endswith("pwd") and is_path(value):  # the directory that `pwd` prints
        return match[0]
    is_plain_name = kind is NameKind.SECRET and match["quote"]
    minimum, digits = (_MIN_ASSIGNED, 1) if is_plain_name else (_MIN_CREDENTIAL, 2)
    if kind is NameKind.PLAIN or not looks_like_credential(value, minimum, digits):
        return match[0]
    return match[0][: match.start("value") - match.start()] + REDACTED
