"""What the name of a value says about it, and whether a value looks like a credential.

A name is a key, a flag, a header or a variable: `api_key`, `--api-key`, `hfToken`, `WANDB_API_KEY`. What only
sounds like a secret is none: `max_tokens`, `pad_token: <pad>`, `api_key_env: OPENAI_API_KEY`, a commit hash.
"""

from __future__ import annotations

import re
from enum import Enum
from functools import lru_cache

_MIN_CREDENTIAL = 16


class NameKind(Enum):
    """What a value is, by the name above it."""

    PLAIN = 0
    DOUBTFUL = 1  # `token`, `auth`: a secret only when the value looks like one
    SECRET = 2
    HEADER = 3  # the value of a request's header or cookie: a secret whatever it is called
    HEADERS = 4  # all headers of a request: a mapping, a list, or lines of text
    HEADER_ENTRY = 5  # one of a list of headers: `Name: value`, or a pair, or a mapping
    LOGIN = 6  # `user:password`
    SETTING = 7  # `name=value`, a word of a command


_SECRET_NAME = re.compile(  # of a name's words joined together
    r".*(?:secret|password|passwd|passphrase|passcode|authorization|credential|basicauth|httpauth|proxyauth"
    r"|(?:api|secret|private|access|signing|encryption|subscription|account|license|master)key"
    r"|(?:admin|db|ftp|http|mail|mysql|pg|postgres|proxy|redis|root|smtp|ssh|user)pass)|pass"
)
_NUMERIC_SECRET_NAME = re.compile(r"(?i).*(?:secret|password|passwd|passphrase|passcode|pwd)|pass")
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
_NAMES_A_VARIABLE = re.compile(r"(?i)(.+?)[_-]?(?:env|var|variable)(?:[_-]?(?:var|variable|name))?")
_HEADERS = re.compile(
    r"(?:(?:additional|api|auth|base|client|custom|default|extra|global|https?|model|my|proxy|request|server"
    r"|session|upstream)[_-]?)*(?:headers|cookies)",
    re.IGNORECASE,
)

_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[0-9]+")
_REFERENCE = re.compile(r"\$\{(?:oc\.env:|env:)?([A-Za-z_]\w*)\}|\$?([A-Z][A-Z0-9]*(?:_[A-Z0-9]+)+)")
_FILE_PATH = re.compile(r"(?:~|\.{1,2}|[A-Za-z]:)?[/\\].*\.\w{2,5}")
_DIRECTORY = re.compile(r"(?:~|\.{1,2}|[A-Za-z]:)?[/\\].*|[~.]")
_CREDENTIAL = re.compile(r"[A-Za-z0-9_\-.+/=~:%!@#^*]+")
_CODE_NAME = re.compile(r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)+|(?:[A-Z][a-z]+){2,}|[A-Z_]+|[A-Za-z_]\w*[(\[].*")
ORDINARY_WORD = re.compile(
    r"(?i)none|null|nil|true|false|yes|no|on|off|str|string|text|int|bool|bytes|float|any|object|optional|"
    r"required|secretstr|undefined|self|default|empty|missing|hidden|password|passwd|pass|pwd|secret|token|api_?key|"
    r"a|an|the|to|or|and|is|are|was|if|for|in|with|as|when|from|must|can|may|will|not|by|flags?|options?|values?|arguments?"
)


@lru_cache(maxsize=4096)
def name_kind(name: str) -> NameKind:
    """Judge one name."""
    if _HEADERS.fullmatch(name):
        return NameKind.HEADERS
    words = [word.lower() for word in _WORD.findall(name)]
    while words and words[-1].isdigit():
        words.pop()
    if not words:
        return NameKind.PLAIN
    last, before = words[-1], words[-2] if len(words) > 1 else ""
    singular = last[:-1] if last.endswith("s") and not last.endswith("ss") else last
    service = before if singular == "token" else singular.removesuffix("token")
    of_a_service = singular.endswith("token") and _TOKEN_OF_A_SERVICE.fullmatch(service)
    joined = "".join((*words[:-1], singular))
    if of_a_service or last == "pwd" or _SECRET_NAME.fullmatch(joined):
        return NameKind.SECRET
    doubtful = last in _DOUBTFUL_WORDS and not _TOKEN_OF_A_VOCABULARY.fullmatch(before)
    return NameKind.DOUBTFUL if doubtful else NameKind.PLAIN


def kind_below(outer: NameKind, name: str) -> NameKind:
    """What an entry of a mapping is. A secret's name covers all it contains, but for where the secret is."""
    if outer in (NameKind.HEADER, NameKind.HEADERS, NameKind.HEADER_ENTRY):
        return NameKind.HEADER
    if outer is not NameKind.SECRET:
        return name_kind(name)
    words = _WORD.findall(name)
    return NameKind.PLAIN if words and words[-1].lower() in _REFERENCE_WORDS else NameKind.SECRET


def names_a_variable(name: str) -> bool:
    """Whether the value of `name` is the name of a variable that holds a secret: `api_key_env`."""
    match = _NAMES_A_VARIABLE.fullmatch(name)
    if match is None:
        return False
    words = _WORD.findall(match[1])
    return name_kind(match[1]) is not NameKind.PLAIN or bool(words and words[-1].lower() == "key")


def variable_in(value: str) -> str | None:
    """The variable that `${NAME}` or `NAME_OF_A_VARIABLE` refers to."""
    match = _REFERENCE.fullmatch(value)
    return match and (match[1] or match[2])


def is_reference(value: str) -> bool:
    """`${HF_TOKEN}` or `OPENAI_API_KEY`: the name of a variable that holds a secret, not the secret."""
    return _REFERENCE.fullmatch(value) is not None and (
        value.startswith("$") or name_kind(value) is not NameKind.PLAIN or value.endswith("_KEY")
    )


def is_secret(name: str, kind: NameKind, value: str) -> bool:
    if kind is NameKind.DOUBTFUL:
        return looks_like_credential(value) or (name.lower().endswith("auth") and is_login(value))
    if kind is NameKind.PLAIN or not value.strip() or is_reference(value):
        return False
    if name.lower().endswith("pwd") and _DIRECTORY.fullmatch(value):
        return False
    # `credentials: ~/.config/service.json` names a file.
    return not ("credential" in name.lower() and _FILE_PATH.fullmatch(value))


def is_numeric_secret(name: str, kind: NameKind) -> bool:
    """Whether a number is a secret under this name: `password: 1234`, not `api_keys: 3`."""
    named = kind is NameKind.SECRET and name != "pass" and _NUMERIC_SECRET_NAME.fullmatch(name)
    return kind is NameKind.HEADER or bool(named)


def is_login(value: str) -> bool:
    """`user:password`; not `1000:1000`, a user and a group."""
    user, colon, password = value.partition(":")
    is_plain = " " not in user and "/" not in user and not user.startswith("$")
    ids = user.isdigit() and password.isdigit()
    return bool(colon and is_plain and password and not ids) and not password.startswith(
        ("//", "$", "{", "[")
    )


def looks_like_credential(value: str, minimum: int = _MIN_CREDENTIAL, digits: int = 2) -> bool:
    return (
        len(value) >= minimum
        and _CREDENTIAL.fullmatch(value) is not None
        and sum(character.isdigit() for character in value) >= digits
        and any(character.isalpha() for character in value)
        and "://" not in value
        and not _FILE_PATH.fullmatch(value)
        and not _CODE_NAME.fullmatch(value)
    )


def is_path(value: str) -> bool:
    return _DIRECTORY.fullmatch(value) is not None
