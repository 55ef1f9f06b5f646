"""Redacts secrets in what is written to the files of a run.

A value is a secret because of its key (`api_key`, `hf_token`, all of `headers`), because of its shape
(`sk-...`, a JWT, a PEM key, the password in a URL), or because its value is known: it is that of an
environment variable with a secret's name, or the value of such a key in a config. In free text a value that
looks like a credential is redacted where it is assigned to such a name. It becomes `[redacted]`; neither its
length nor a part of it is kept. What only sounds like a secret stays: `max_tokens`, `pad_token: <pad>`,
`api_key_env: OPENAI_API_KEY`, commit hashes, `api_key = os.environ["KEY"]`.

No line is added or removed and every scan is linear: a redacted diff is still a diff, a big one is cheap.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from enum import Enum
from functools import lru_cache
from typing import Any

REDACTED = "[redacted]"
_MAX_DEPTH = 200
_MIN_ENVIRONMENT_VALUE = 8
_MIN_CREDENTIAL = 16
_MIN_KNOWN = 12
_MIN_ASSIGNED = 8


class NameKind(Enum):
    """What a key's name says about its value."""

    PLAIN = 0
    DOUBTFUL = 1  # `token`, `auth`: a secret only when the value looks like one
    SECRET = 2
    HEADER = 3  # of a request: a secret whatever it is called


_SECRET_NAME = re.compile(  # of a name's words joined together
    r".*(?:secret|password|passwd|passphrase|passcode|authorization|credential"
    r"|(?:api|secret|private|access|signing|encryption|subscription|account)key"
    r"|(?:admin|db|mail|mysql|pg|postgres|redis|root|smtp|user)pass)"
)
_NUMERIC_SECRET_NAME = re.compile(r"(?i).*(?:secret|password|passwd|passphrase|passcode)")
_DOUBTFUL_WORDS = {"token", "auth", "jwt", "cookie", "bearer"}
_TOKEN_OF_A_SERVICE = re.compile(
    r"access|auth|api|app|bearer|bot|ci|csrf|deploy|face|gh|github|gitlab|hf|hub|huggingface|id|jwt|npm|oauth"
    r"|personal|pypi|refresh|secret|security|service|session|slack|tinker|vault|wandb|webhook"
)
_TOKEN_OF_A_VOCABULARY = re.compile(
    r"audio|begin|bos|cls|end|eos|first|image|last|mask|new|next|pad|sep|special|start|stop|think|unk|video"
)
# Inside `credentials: {...}` these say where a secret is, not what it is.
_REFERENCE_WORDS = {"env", "var", "file", "path", "name", "type"}

_HEADERS = re.compile(r"(?:(?:default|extra|http|request)[_-]?)?headers", re.IGNORECASE)
_SECRET_TAGS = {f"tag:yaml.org,2002:{kind}" for kind in ("str", "int", "float", "timestamp", "binary")}
# Settings as words of a command: `agents.a.policy.headers.X-Token=...`, `policy={headers: {X-Token: ...}}`.
_SETTING = re.compile(r"([-+\w][-\w.]*)=(.*)", re.DOTALL)
_HEADER_SETTING = re.compile(r"(headers(?:\.[^\s=]+=|[\"']?\s*[=:]\s*(?=\{))).+", re.IGNORECASE | re.DOTALL)

_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[0-9]+")
_REFERENCE = re.compile(r"\$\{(?:oc\.env:|env:)?[A-Za-z_]\w*\}|\$?[A-Z][A-Z0-9]*(?:_[A-Z0-9]+)+")
_TEMPLATE = re.compile(
    r"\$?\{[^{}\n]*\}|\$?\{\{[^\n]*\}\}|<[^<>\n]*>|%\(?\w*\)?s|\$\w+|\$\([^\n]*|[:*]*|\.\.\.|\[redacted\]"
)
_FILE_PATH = re.compile(r"(?:~|\.{1,2}|[A-Za-z]:)?[/\\].*\.\w{2,5}")
_FLAG = re.compile(r"--?[A-Za-z][\w-]*")
_CREDENTIAL = re.compile(r"[A-Za-z0-9_\-.+/=~:%!@#^*]+")
_CODE_NAME = re.compile(r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)+|(?:[A-Z][a-z]+){2,}|[A-Z_]+|[A-Za-z_]\w*[(\[].*")
_ORDINARY_WORD = re.compile(
    r"(?i)none|null|nil|true|false|yes|no|on|off|str|string|text|int|bool|bytes|float|any|object|optional|"
    r"required|secretstr|undefined|self|default|empty|missing|hidden|password|passwd|pass|pwd|secret|token|api_?key|"
    r"a|an|the|to|or|and|is|are|was|if|for|in|with|as|when|from|must|can|may|will|not|by|flags?|options?|values?|arguments?"
)


@lru_cache(maxsize=4096)
def name_kind(name: str) -> NameKind:
    """Judge one key, flag or variable name: `api_key`, `--api-key`, `hfToken`, `WANDB_API_KEY`."""
    words = [word.lower() for word in _WORD.findall(name)]
    while words and words[-1].isdigit():
        words.pop()
    if not words:
        return NameKind.PLAIN
    last, before = words[-1], words[-2] if len(words) > 1 else ""
    singular = last[:-1] if last.endswith("s") and not last.endswith("ss") else last
    service = before if singular == "token" else singular.removesuffix("token")
    of_a_service = singular.endswith("token") and _TOKEN_OF_A_SERVICE.fullmatch(service)
    if of_a_service or _SECRET_NAME.fullmatch("".join((*words[:-1], singular))):
        return NameKind.SECRET
    doubtful = last in _DOUBTFUL_WORDS and not _TOKEN_OF_A_VOCABULARY.fullmatch(before)
    return NameKind.DOUBTFUL if doubtful else NameKind.PLAIN


def redact_text(text: str) -> str:
    """Redact a diff, a log or a command line. The number of lines stays the same."""
    return _Redactor().text(text)


def redact_tree(obj: Any, *, remember: bool = False) -> Any:
    """Redact nested plain data (dicts, lists, tuples, scalars); the input is not changed.

    With `remember`, which is for configs, values found by their keys are redacted everywhere from then on.
    """
    return _Redactor(remember).tree(obj, NameKind.PLAIN, "", ())


def remember_secrets(config: Any) -> None:
    """Redact from now on, in whatever is written, the secrets that a config holds or names."""
    redact_tree(config, remember=True)


def redact_yaml(text: str) -> str:
    """Redact a config file as it is written, with its comments: by its keys, and as any text."""
    import yaml

    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except (yaml.YAMLError, RecursionError):
        return redact_text(text)
    for start, end in sorted(set(_secret_spans(root, NameKind.PLAIN, "")), reverse=True):
        text = text[:start] + REDACTED + ("\n" if text[start:end].endswith("\n") else "") + text[end:]
    return redact_text(text)


def _secret_spans(root: Any, kind: NameKind, name: str) -> Iterator[tuple[int, int]]:
    pending, seen = [(root, kind, name)], set[tuple[int, NameKind]]()
    while pending:
        node, kind, name = pending.pop()
        if node is None or (id(node), kind) in seen:  # an alias
            continue
        seen.add((id(node), kind))
        if isinstance(node.value, str):
            if _is_secret(name, kind, node.value) and node.tag in _SECRET_TAGS:
                yield node.start_mark.index, node.end_mark.index
        elif node.value and isinstance(node.value[0], tuple):
            outer = NameKind.HEADER if _HEADERS.fullmatch(name) else kind
            entries = ((str(key.value), value) for key, value in node.value)
            pending += [(value, _kind_below(outer, key), key) for key, value in entries]
        else:
            pending += [(value, kind, name) for value in node.value]


_remembered: set[str] = set()


def _remember(value: str) -> None:
    if _looks_like_credential(value, _MIN_KNOWN):
        _remembered.add(value)


def known_credentials() -> list[str]:
    """The values to look for in every record: of the environment and of configs, the longest first.

    Only those that are not a word by accident, and are written the same in JSON and HTML.
    """
    found = (value for value in _environment_secrets(os.environ) if _looks_like_credential(value, _MIN_KNOWN))
    return sorted(_remembered.union(found), key=lambda value: (-len(value), value))


def count_of_remembered() -> int:
    return len(_remembered)


def _kind_below(outer: NameKind, name: str) -> NameKind:
    """A secret's name covers all it contains, except entries that only say where the secret is."""
    if outer is NameKind.HEADER:
        return outer
    if outer is not NameKind.SECRET:
        return name_kind(name)
    words = _WORD.findall(name)
    return NameKind.PLAIN if words and words[-1].lower() in _REFERENCE_WORDS else NameKind.SECRET


def _looks_like_credential(value: str, minimum: int = _MIN_CREDENTIAL, digits: int = 2) -> bool:
    return (
        len(value) >= minimum
        and _CREDENTIAL.fullmatch(value) is not None
        and sum(character.isdigit() for character in value) >= digits
        and any(character.isalpha() for character in value)
        and "://" not in value
        and not _FILE_PATH.fullmatch(value)
        and not _CODE_NAME.fullmatch(value)
    )


def _is_reference(value: str) -> bool:
    """`${HF_TOKEN}` or `OPENAI_API_KEY`: the name of a variable that holds a secret, not the secret."""
    return _REFERENCE.fullmatch(value) is not None and name_kind(value.strip("${}")) is not NameKind.PLAIN


def _is_secret(name: str, kind: NameKind, value: str) -> bool:
    if kind is NameKind.DOUBTFUL:
        return _looks_like_credential(value)
    if kind is NameKind.PLAIN or not value.strip() or _is_reference(value):
        return False
    # `credentials: ~/.config/service.json` names a file.
    return not ("credential" in name.lower() and _FILE_PATH.fullmatch(value))


def _environment_secrets(environment: Mapping[str, str]) -> list[str]:
    """Values worth looking for in text, longest first so that one inside another does not leave a rest."""
    found: set[str] = set()
    for name, value in environment.items():
        if not _is_secret(name, name_kind(name), value):
            continue
        # A diff prefixes every line, so a value of several lines is looked for line by line.
        pieces = [piece for piece in value.splitlines() if "-----" not in piece]
        minimum = _MIN_ENVIRONMENT_VALUE if len(pieces) == 1 else _MIN_CREDENTIAL
        found.update(piece.strip() for piece in pieces if len(piece.strip()) >= minimum)
    return sorted(found, key=lambda value: (-len(value), value))


class _Redactor:
    def __init__(self, remember: bool = False) -> None:
        self._known = _environment_secrets(os.environ)
        self._known += sorted(_remembered - set(self._known), key=len, reverse=True)
        self._is_to_remember = remember

    def text(self, text: str) -> str:
        for value in self._known:
            text = text.replace(value, REDACTED)
        if "PRIVATE KEY" in text:
            text = _PEM_ON_ONE_LINE.sub(rf"\1{REDACTED}", text)
            text = _PEM_LINES.sub(_redact_pem, text)
        text = _URL_PASSWORD.sub(_redact_url, text)
        text = _SHAPES.sub(REDACTED, text)
        text = _BEARER.sub(_redact_bearer, text)
        return _ASSIGNED.sub(_redact_assigned, text)

    def tree(self, value: Any, kind: NameKind, name: str, above: tuple[int, ...]) -> Any:
        if isinstance(value, str):
            if not _is_secret(name, kind, value):
                return self.text(value)
            if self._is_to_remember:
                _remember(value)
            return REDACTED
        if isinstance(value, bytes):
            text = value.decode("utf-8", "surrogateescape")
            clean = self.tree(text, kind, name, above)
            return value if clean == text else clean.encode("utf-8", "surrogateescape")
        if value is None or isinstance(value, bool | int | float):
            numeric = kind is NameKind.SECRET and _NUMERIC_SECRET_NAME.fullmatch(name)
            secret = kind is NameKind.HEADER or bool(numeric)
            return REDACTED if secret and value is not None and not isinstance(value, bool) else value
        if not isinstance(value, Mapping | list | tuple | set | frozenset):
            return value
        if id(value) in above:
            return "[circular]"
        if len(above) >= _MAX_DEPTH:
            return "[too deep]"
        above = (*above, id(value))
        if isinstance(value, Mapping):
            return self._mapping(value, NameKind.HEADER if _HEADERS.fullmatch(name) else kind, above)
        plain = next(plain for plain in (list, tuple, set, frozenset) if isinstance(value, plain))
        return plain(self._items(value, kind, name, above))

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
            below = NameKind.PLAIN if key == "__type__" else _kind_below(kind, key)
            if self._is_to_remember and key.endswith("_env") and name_kind(key[:-4]) is NameKind.SECRET:
                _remember(os.environ.get(entry, "") if isinstance(entry, str) else "")
            clean[shown] = self.tree(entry, below, key, above)
        return clean

    def _items(self, values: Any, kind: NameKind, name: str, above: tuple[int, ...]) -> Iterator[Any]:
        """The value after a secret's flag is a secret: `["--api-key", "..."]`, and so is `api_key=...`."""
        flag = ""
        for value in values:
            if flag and kind is not NameKind.SECRET and not (isinstance(value, str) and value[:1] == "-"):
                yield self.tree(value, name_kind(flag), flag, above)
            else:
                yield self.tree(_redact_setting(value), kind, name, above)
            flag = value if isinstance(value, str) and _FLAG.fullmatch(value) else ""


def _redact_setting(word: Any) -> Any:
    match = _SETTING.fullmatch(word) if isinstance(word, str) else None
    if match is None:
        return word
    name = match[1].rpartition(".")[2]
    if _is_secret(name, name_kind(name), match[2]):
        return f"{match[1]}={REDACTED}"
    return _HEADER_SETTING.sub(rf"\1{REDACTED}", word)


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
_BEARER = re.compile(
    r"((?:authorization\\?[\"']?[ \t]{0,4}[:=][ \t]{0,4}\\?[\"']?(?:bearer|basic|token|digest)|bearer)"
    r"[ \t]{1,4})([^\s\"'`,;<>(){}\[\]\\$]{6,})",
    re.IGNORECASE,
)
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


def _redact_url(match: re.Match[str]) -> str:
    scheme, user, password = match.groups()
    if password is None:
        return f"{scheme}{REDACTED}@" if _looks_like_credential(user) else match[0]
    stays = _TEMPLATE.fullmatch(password) or _ORDINARY_WORD.fullmatch(password)
    return match[0] if stays else f"{scheme}{user}:{REDACTED}@"


def _redact_bearer(match: re.Match[str]) -> str:
    head, value = match.groups()
    secret = ":" in head or "=" in head or _looks_like_credential(value.rstrip("."))
    return f"{head}{REDACTED}" if secret else match[0]


def _redact_assigned(match: re.Match[str]) -> str:
    kind, value = name_kind(match["name"]), match["value"]
    is_plain_name = kind is NameKind.SECRET and match["quote"]
    minimum, digits = (_MIN_ASSIGNED, 1) if is_plain_name else (_MIN_CREDENTIAL, 2)
    if kind is NameKind.PLAIN or not _looks_like_credential(value, minimum, digits):
        return match[0]
    return match[0][: match.start("value") - match.start()] + REDACTED
