"""Secrets go, everything that only looks like one stays, and a redacted diff is still a diff."""

from __future__ import annotations

import json
from collections import OrderedDict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollbook.records import secret_values
from rollbook.records.line_secrets import LineSecrets, StreamSecrets
from rollbook.records.redact import REDACTED, redact_text, redact_tree
from rollbook.records.redact_configs import redact_yaml
from rollbook.records.secret_names import NameKind, name_kind

# Made up, and put together from pieces so that secret scanners leave this file alone.
BODY = "Zx9Kq2Lm7Wp4Rt8Yv3Bn6Hd1"
SHAPES = {
    "openai": "sk-" + BODY,
    "openai project": "sk-proj-" + BODY + "_-" + BODY,
    "anthropic": "sk-" + "ant-api03-" + BODY,
    "hugging face": "hf_" + BODY + "abcdefghij",
    "hugging face, letters only": "hf_" + "aBcDeFgHiJkLmNoPqRsTuVwXyZaBcDeFgH",
    "github classic": "ghp_" + BODY + BODY,
    "github oauth": "gho_" + BODY + BODY,
    "github fine": "github_pat_" + BODY + "_" + BODY,
    "gitlab": "glpat-" + BODY,
    "slack bot": "xoxb-" + "123456789012-" + BODY,
    "slack app": "xoxa-" + "2-" + BODY,
    "slack user": "xoxp-" + "123456789012-" + BODY,
    "aws": "AKIA" + "ABCDEFGH12345678",
    "google": "AIza" + BODY + "-_" + BODY,
    "stripe": "sk_live_" + BODY,
    "jwt": "eyJhbGciOiJIUzI1NiJ9." + "eyJzdWIiOiIxMjM0NTY3ODkwIn0." + BODY,
}
HEX = "0123456789abcdef" * 2 + "01234567"
PEM_BODY = "MIIEvQIBADANBgkqhkiG9w0BAQEFAASCBKcwggSjAgEAAoIBAQC7VJTUt9Us8cKj"
BEGIN, END = "-----BEGIN RSA PRIVATE KEY-----", "-----END RSA PRIVATE KEY-----"


@pytest.mark.parametrize("secret", SHAPES.values(), ids=SHAPES.keys())
@pytest.mark.parametrize(
    "around",
    [
        "{}",
        "x = '{}'",
        "-{}",
        "+{}",
        'a\\n{}\\n"',
        "curl -u {}:",
        "?q=%3D{}&b=1",
        "\x1b[32m{}\x1b[0m",
        "({}).",
    ],
)
def test_a_secret_is_known_by_its_shape_wherever_it_stands(secret: str, around: str) -> None:
    clean = redact_text(around.format(secret))
    assert secret not in clean
    assert BODY not in clean
    assert clean == around.format(REDACTED)


SECRET_NAMES = """
    api_key apikey apiKey OPENAI_API_KEY openai-api-key x-api-key wandb_api_key api_keys API_KEY_2 secret
    client_secret clientSecret SECRET_KEY aws_secret_access_key password passwd db_password userPassword
    access_token auth_token hf_token hfToken HF_TOKEN hub_token push_to_hub_token refresh_token accesstoken
    private_key authorization Authorization credentials --api-key DB_PASS
"""
PLAIN_NAMES = """
    max_tokens tokenizer tokenizer_path token_export num_tokens stop_token_ids prompt_token_ids token_count
    tokens api_key_env api_key_file secret_name password_env key keys monkey sort_key primary_key author
    pass_rate compass forward_pass bypass secretary tokenize eos_token pad_token image_token auth_method
"""


@pytest.mark.parametrize("name", SECRET_NAMES.split())
def test_secret_names(name: str) -> None:
    assert name_kind(name) is NameKind.SECRET
    assert redact_tree({"policy": {name: "x"}}) == {"policy": {name: REDACTED}}


@pytest.mark.parametrize("name", PLAIN_NAMES.split())
def test_names_that_only_sound_secret(name: str) -> None:
    assert name_kind(name) is NameKind.PLAIN
    tree = {"a": {name: "value-1234567890-abcdef"}}
    assert redact_tree(tree) == tree


def test_what_must_stay() -> None:
    config = {
        "max_tokens": 512,
        "tokenizer": "Qwen/Qwen2.5-0.5B-Instruct",
        "token_export": {"enabled": True, "format": "jsonl"},
        "num_tokens": "4096",
        "pad_token": "<pad>",
        "eos_token": "</s>",
        "bos_token": "<|reserved_special_token_12|>",
        "stop_token_ids": [151645, 151643],
        "prompt_token_ids": [[1, 2], [3]],
        "token": 5,
        "api_key_env": "OPENAI_API_KEY",
        "api_key": "${OPENAI_API_KEY}",
        "api_keys": ["$HF_TOKEN", "${oc.env:HF_TOKEN}", "OPENAI_API_KEY"],
        "password": None,
        "secret": "",
        "use_auth_token": True,
        "access_token": False,
        "sha": "9fceb02d0ae598e95dc970b74767f19372d61af8",
        "run": "123e4567-e89b-12d3-a456-426614174000",
        "integrity": "sha512-Zx9Kq2Lm7Wp4Rt8Yv3Bn6Hd1Zx9Kq2Lm7Wp4Rt8Yv3Bn6Hd1+/AAAAAAAAAAAAAAAAAAAAAAAAAA==",
        "hash": "sha256:9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08",
        "url": "http://localhost:8000/v1",
        "repo": "git@github.com:me/project.git",
        "credentials": "~/.config/gcloud/service.json",
        "risk-assessment-of-a-long-name-2024": "task-force-alpha-bravo-2024-x",
    }
    assert redact_tree(config) == config
    assert redact_text(json.dumps(config)) == json.dumps(config)


def test_the_word_token_needs_a_value_that_looks_like_a_credential() -> None:
    assert redact_tree({"hub": {"token": BODY}}) == {"hub": {"token": REDACTED}}
    for harmless in (
        " the",
        "<|im_end|>",
        "hello",
        "</think>",
        "Qwen2TokenizerFast",
        5,
        None,
        "a b c 1 2 3 4 5 6 7 8",
    ):
        assert redact_tree({"token": harmless}) == {"token": harmless}


def test_the_headers_of_a_request_are_secrets_whatever_they_are_called() -> None:
    headers = {"X-Token": "hunter2", "X-Pin": 1234, "User-Name": "me", "X-Old": "${MY_TOKEN}", "None": None}
    shown = dict.fromkeys(headers, REDACTED) | {"X-Old": "${MY_TOKEN}", "None": None}
    for name in ("headers", "default_headers", "extraheaders"):
        assert redact_tree({"policy": {name: headers}}) == {"policy": {name: shown}}
    table = {"headers": ["name", "reward"], "column_headers": {"a": "name"}}
    assert redact_tree(table) == table


@pytest.mark.parametrize(
    ("word", "shown"),
    [
        ("agents.a.policy.headers.X-Token=hunter2", f"agents.a.policy.headers.X-Token={REDACTED}"),
        ("+agents.a.policy.headers.X-Token=two words", f"+agents.a.policy.headers.X-Token={REDACTED}"),
        ("agents.a.policy.headers={X-Token: hunter2}", f"agents.a.policy.headers={REDACTED}"),
        ('policy={"headers": {"X": "hunter2"}, "n": 1}', f'policy={{"headers": {REDACTED}'),
        ("--policy.extra_headers.X=hunter2", f"--policy.extra_headers.X={REDACTED}"),
        ("headers.X=${MY_TOKEN}", f"headers.X={REDACTED}"),
        ("output_jsonl_fpath=headers.jsonl", "output_jsonl_fpath=headers.jsonl"),
    ],
)
def test_headers_among_the_words_of_a_command(word: str, shown: str) -> None:
    assert redact_tree(["rollbook", "collect", word]) == ["rollbook", "collect", shown]


def test_code_that_sends_headers_stays() -> None:
    line = 'response = post(url, headers={"Accept": kind}, timeout=3)'
    assert redact_text(line) == line


def test_a_secret_container_covers_its_content_but_not_where_to_find_it() -> None:
    tree = {
        "credentials": {"__type__": "app.Login", "user": "u", "api_key_env": "X", "nested": ["a", {"b": "c"}]}
    }
    assert redact_tree(tree) == {
        "credentials": {
            "__type__": "app.Login",
            "user": REDACTED,
            "api_key_env": "X",
            "nested": [REDACTED, {"b": REDACTED}],
        }
    }


def test_numbers_bytes_and_flags() -> None:
    assert redact_tree({"password": 1234, "api_keys": 3, "num_secrets": 4}) == {
        "password": REDACTED,
        "api_keys": 3,
        "num_secrets": 4,
    }
    assert redact_tree({"password": b"abc", "raw": b"\xff\x00"}) == {
        "password": b"[redacted]",
        "raw": b"\xff\x00",
    }
    argv = ["serve", "--api-key", "hunter", "--port", "8000", "--password=letmein", "--token", "--verbose"]
    clean = [
        "serve",
        "--api-key",
        REDACTED,
        "--port",
        "8000",
        f"--password={REDACTED}",
        "--token",
        "--verbose",
    ]
    assert redact_tree(argv) == clean
    assert redact_tree(tuple(argv)) == tuple(clean)


def test_the_input_of_a_tree_is_left_alone_and_order_is_kept() -> None:
    tree = OrderedDict([("z", {"password": "p"}), ("a", [1, {"b": 2.5}]), (3, None)])
    clean = redact_tree(tree)
    assert tree["z"] == {"password": "p"}
    assert list(clean) == ["z", "a", 3]
    assert clean == {"z": {"password": REDACTED}, "a": [1, {"b": 2.5}], 3: None}


def test_a_key_that_is_a_secret() -> None:
    clean = redact_tree({SHAPES["openai"]: 1, SHAPES["gitlab"]: 2, "a": 3})
    assert BODY not in json.dumps(clean)
    assert list(clean.values()) == [1, 2, 3]


def test_cycles_and_depth() -> None:
    cycle: dict[str, object] = {"password": "p"}
    cycle["self"] = cycle
    assert redact_tree(cycle) == {"password": REDACTED, "self": "[circular]"}
    deep: list[object] = []
    for _ in range(5000):
        deep = [deep]
    assert "[too deep]" in str(redact_tree(deep))
    shared = {"a": 1}
    assert redact_tree([shared, shared]) == [{"a": 1}, {"a": 1}]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ('+    api_key = "let-me-in-2"', '+    api_key = "[redacted]"'),
        ("+    api_key: str = 'let-me-in-2'", "+    api_key: str = '[redacted]'"),
        ("def f(password: str | None = 'p4ssw0rd'):", "def f(password: str | None = '[redacted]'):"),
        ('"source": ["api_key = \\"let-me-in-2\\"\\n"]', '"source": ["api_key = \\"[redacted]\\"\\n"]'),
        ("os.environ['HF_TOKEN'] = 'let-me-in-2'", "os.environ['HF_TOKEN'] = '[redacted]'"),
        (f'wandb.login(api_key="{HEX}")', 'wandb.login(api_key="[redacted]")'),
        (f"-OPENAI_API_KEY={BODY} python train.py", "-OPENAI_API_KEY=[redacted] python train.py"),
        (f"+  password: {BODY}  # mine", "+  password: [redacted]  # mine"),
        (f"GET /v1?api_key={BODY}&x=1", "GET /v1?api_key=[redacted]&x=1"),
        (f'curl -H "x-api-key: {BODY}"', 'curl -H "x-api-key: [redacted]"'),
        (f"vllm serve --api-key={HEX} --port 8000", "vllm serve --api-key=[redacted] --port 8000"),
        ('curl -H "Authorization: Bearer abcdefg"', 'curl -H "Authorization: Bearer [redacted]"'),
        ("Authorization: Basic dXNlcjpwYXNz", "Authorization: Basic [redacted]"),
        ('{"Authorization": "Bearer abcdefg"}', '{"Authorization": "Bearer [redacted]"}'),
        ("postgres://me:hunter2@db:5432/x", "postgres://me:[redacted]@db:5432/x"),
        ("redis://:hunter2@db", "redis://:[redacted]@db"),
        (f"https://{BODY}@sentry.example/1", "https://[redacted]@sentry.example/1"),
        (f'token = "{BODY}"', 'token = "[redacted]"'),
        (f"secret = {BODY}", "secret = [redacted]"),
    ],
)
def test_secrets_in_text_by_name(before: str, after: str) -> None:
    clean = redact_text(before)
    assert clean == after
    assert redact_text(clean) == clean


@pytest.mark.parametrize(
    "line",
    [
        'api_key = "letmein"',  # an ordinary word: only where it is known to be a secret
        "export DB_PASSWORD=hunter",
        'api_key = os.environ["OPENAI_API_KEY"]',
        'api_key=os.getenv("OPENAI_API_KEY", "")',
        "client = OpenAI(api_key=api_key, base_url=url)",
        "client = OpenAI(api_key=self.config.api_key)",
        "    api_key: str | None = None",
        "    api_key: SecretStr",
        "    password: Optional[str]",
        "    api_key: The key of the endpoint, by default taken from the environment.",
        "apiKey: string;",
        'headers = {"Authorization": f"Bearer {api_key}"}',
        'SECRETS = ("api_key", "password", "secret")',
        '@click.option("--api-key", "api_key", help="the key")',
        "Use --api-key to set it, or --password or nothing.",
        "rollbook sft --api-key $OPENAI_API_KEY",
        "usage: x [--api-key KEY] [--password PASSWORD]",
        "password = getpass.getpass()",
        "token = tokenizer.decode(ids[0])",
        "token = tokens[i]",
        "if token == eos_token and key in keys:",
        "max_tokens=4096, stop_token_ids=[151643]",
        "for token, logprob in zip(tokens, logprobs):",
        "token: 151643",
        'tokenizer.pad_token = "<|endoftext|>"',
        "postgres://{user}:{password}@{host}",
        "http://localhost:8000/v1/models@latest",
        "index 9fceb02d0ae598e95dc970b74767f19372d61af8..123e4567e89b12d3a456426614174000aabbccdd 100644",
        'hash = "sha256:9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08"',
        "bearer authentication is required here",
        'answer = input("Password: ")',
        'headers["Authorization"] = "Basic " + encoded',
        "see https://user:pass@host/path and scheme://[user:passwd@]proxy",
        "task-1234567890-abcdefghijklmnop disk-1234567890-abcdefghijkl",
        "from x import hf_dataset_loader_with_a_long_name, hf_transformers_model",
        'PEM = "-----BEGIN PRIVATE KEY-----"\nreturn\nvalue',
    ],
)
def test_code_and_prose_stay(line: str) -> None:
    assert redact_text(line) == line


def test_a_pem_key_goes_line_by_line() -> None:
    key = [BEGIN, PEM_BODY, PEM_BODY[::-1], "abcd==", END]
    assert redact_text("\n".join(["a", *key, "b"])) == "\n".join(
        ["a", BEGIN, REDACTED, REDACTED, REDACTED, END, "b"]
    )
    added = redact_text("\n".join("+" + line for line in ["a", *key, "b"]))
    assert added == "\n".join("+" + line for line in ["a", BEGIN, REDACTED, REDACTED, REDACTED, END, "b"])
    encrypted = [BEGIN, "Proc-Type: 4,ENCRYPTED", "DEK-Info: AES-128-CBC,00", "", PEM_BODY, END]
    assert PEM_BODY not in redact_text("\n".join(encrypted))
    one_line = json.dumps({"k": "\n".join(key)})
    assert PEM_BODY not in redact_text(one_line)
    assert len(json.loads(redact_text(one_line))) == 1


def test_a_hunk_that_shows_only_the_end_of_a_key() -> None:
    hunk = "\n".join([" " + PEM_BODY, " shortrest=", " " + END, "-x = 1", "+x = 2"])
    assert redact_text(hunk) == "\n".join([" " + REDACTED, " " + REDACTED, " " + END, "-x = 1", "+x = 2"])


def test_values_of_secret_environment_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_API_KEY", "plain-words-only")
    monkeypatch.setenv("MY_OTHER_PASSWORD", "plain-words-only-and-more")
    monkeypatch.setenv("SHORT_SECRET", "seven77")
    monkeypatch.setenv("EDITOR_OF_MINE", "some-editor")
    monkeypatch.setenv("EOS_TOKEN", "<|endoftext|>")
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", "/home/me/service.json")
    monkeypatch.setenv("SIGNING_SECRET", f"first line of some length\n{PEM_BODY}\n")
    kept = "seven77 some-editor <|endoftext|> /home/me/service.json"
    text = f"a plain-words-only-and-more b plain-words-only c {kept}"
    assert redact_text(text) == f"a [redacted] b [redacted] c {kept}"
    assert redact_tree({"note": ["say plain-words-only"]}) == {"note": ["say [redacted]"]}
    assert redact_text(f"+first line of some length\n+{PEM_BODY}") == "+[redacted]\n+[redacted]"


def test_a_config_file_loses_its_secrets_and_keeps_its_comments() -> None:
    text = """# the judge
policy: {api_key: letmein, base_url: "http://host/v1"}  # api_key: of mine
headers:
  X-Pin: 1234
  X-Old: ${MY_TOKEN}
password: |
  two
  lines
max_tokens: 5
credentials: &login {user: me, file: ~/.me.json}
again: *login
"""
    assert (
        redact_yaml(text)
        == """# the judge
policy: {api_key: "[redacted]", base_url: "http://host/v1"}  # api_key: of mine
headers:
  X-Pin: "[redacted]"
  X-Old: ${MY_TOKEN}
password: |
  [redacted]
  [redacted]
max_tokens: 5
credentials: &login {user: "[redacted]", file: ~/.me.json}
again: *login
"""
    )
    assert redact_yaml(f"not: [yaml\napi_key: {BODY}") == 'not: [yaml\napi_key: "[redacted]"'


def test_values_of_a_config_are_known_from_then_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(secret_values, "_remembered", set())
    monkeypatch.setenv("MY_SERVER", "value-of-my-server-12")
    config = {"policy": {"api_key": "key-of-policy-12", "api_key_env": "MY_SERVER"}, "password": "password"}
    text = "key-of-policy-12 value-of-my-server-12 password"
    redact_tree(config)
    early = LineSecrets()
    assert redact_text(text) == text
    redact_tree(config, remember=True)
    assert redact_text(text) == f"{REDACTED} {REDACTED} password"
    assert early.cleaned(text.encode()) == f"{REDACTED} {REDACTED} password".encode()


@given(
    st.lists(st.binary(max_size=6) | st.sampled_from([b"key-1", b"key-12", b"234567890", b"key-1234567890"]))
)
def test_a_stream_in_parts_is_redacted_as_a_whole(parts: list[bytes]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(secret_values, "_remembered", {"key-1234567890"})
        stream = StreamSecrets()
        passed_on = b"".join(map(stream.feed, parts))
        whole = b"".join(parts)
        assert passed_on + stream.finish() == whole.replace(b"key-1234567890", REDACTED.encode())


@given(st.text(alphabet=st.sampled_from("apikey_=:\"'\\ \n-+sk0aPASSWORDtoken{}$#[]()%@/.,;")))
def test_any_text_keeps_its_lines_and_is_stable(text: str) -> None:
    clean = redact_text(text)
    assert clean.count("\n") == text.count("\n")
    assert redact_text(clean) == clean


_PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=10,
)


@given(st.sampled_from(["api_key", "password", "hf_token"]), st.text(min_size=9), _PLAIN)
def test_no_value_under_a_secret_name_survives(name: str, secret: str, other: object) -> None:
    value = f"<!{secret}!>"
    assert redact_tree({"a": [other, {name: [{"b": value}]}]})["a"][1] == {name: [{"b": REDACTED}]}


@pytest.mark.parametrize(
    "piece",
    [
        "eyJ-",
        "-eyJaaaaaaaaaaaa.",
        "sk-",
        "-sk-a",
        "token='",
        'token:\\"',
        "api_key: ",
        "password=",
        "://a",
        "://a:",
        "----",
        "-----BEGIN PRIVATE KEY-----",
        "-----END PRIVATE KEY-----\n",
        "A",
        "Authorization: Bearer ",
        "bearer",
        "key:a ",
        "key: str ",
        "\\",
        "SG.aaaaaaaaaaaaaaaaaaaa.",
        "--token ",
        "\n\n+",
    ],
)
def test_hostile_repetition_ends(piece: str) -> None:
    """A quadratic scan of this much text would not end within the life of a test run."""
    text = piece * (300_000 // len(piece))
    assert redact_text(text).count("\n") == text.count("\n")
