"""Shapes in which people write secrets, and what only looks like one. `@` stands for the secret."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

# Each is a part of a config file, whose top keys are numbered: `p17: ...`.
YAML = [
    "{api_key: @}",
    '{api_key: "@"}',
    "{api_key: '@'}",
    '{"api_key":"@"}',
    "{apiKey: @}",
    "{API_KEY: @}",
    "{openai_api_key: @}",
    "{api_keys: [@, other-@]}",
    "{api_keys: {first: @}}",
    "{password: @}",
    "{password: @ with spaces in it}",
    '{password: "@ with: colons # and more"}',
    "{password: '@ it''s quoted'}",
    "{db_password: @}",
    "{passwd: @}",
    "{pwd: @}",
    "{pass: @}",
    "{db_pass: @}",
    "{smtp_pass: @}",
    "{passphrase: @}",
    "{secret: @}",
    "{client_secret: @}",
    "{clientSecret: @}",
    "{secrets: [@]}",
    "{access_token: @}",
    "{hf_token: @}",
    "{hfToken: @}",
    "{auth_token: @}",
    "{token: @0123456789abcdef}",
    "{bearer: @0123456789abcdef}",
    "{auth: [me, @]}",
    "{auth: 'me:@'}",
    "{basic_auth: 'me:@'}",
    "{proxy_auth: 'me:@'}",
    "{private_key: @}",
    "{signing_key: @}",
    "{encryption_key: @}",
    "{subscription_key: @}",
    "{account_key: @}",
    "{license_key: @}",
    "{aws_secret_access_key: @}",
    "{credentials: {user: me, value: @}}",
    "{credentials: [me, @]}",
    "{authorization: Basic @}",
    "{headers: {X-Anything: @}}",
    "{headers: {Authorization: Bearer @}}",
    "{headers: [[X-Anything, @]]}",
    "{headers: [{name: X-Anything, value: @}]}",
    "{headers: ['X-Anything: @']}",
    "{headers: 'X-Anything: @'}",
    "{custom_headers: {X-Team: @}}",
    "{extra_headers: {X-Team: @}}",
    "{default_headers: {X-Team: @}}",
    "{http_headers: {X-Team: @}}",
    "{request_headers: {X-Team: @}}",
    "{cookies: {session: @}}",
    "{cookies: 'session=@; theme=dark'}",
    "{url: 'https://me:@@host.example/v1'}",
    "{url: 'https://host.example/v1?key=@'}",
    "{url: 'https://host.example/v1?a=1&sig=@&b=2'}",
    "{url: 'https://host.example/v1?api_key=@'}",
    "{url: 'https://host.example/v1?access_token=@'}",
    "{url: 'https://host.example/x?X-Amz-Signature=@'}",
    "{dsn: 'postgres://me:@@db:5432/x'}",
    "{command: 'curl -u me:@ https://host.example'}",
    "{command: [curl, -u, 'me:@', 'https://host.example']}",
    "{command: [curl, -H, 'X-Anything: @', 'https://host.example']}",
    "{command: [serve, --api-key, @, --port, '8000']}",
    "{command: [serve, --api-key=@]}",
    "{command: [train, agents.a.policy.headers.X-Team=@]}",
    "{note: 'the key is sk-@0123456789abcdef'}",
    "{note: 'ghp_@0123456789abcdefghijklmn'}",
    "\n  api_key: @",
    "\n  api_key:\n    @",
    '\n  api_key:\n    "@"',
    "\n  password: first words\n    @ folded on the next line",
    '\n  password: "first words\n    @ folded in quotes"',
    "\n  password: |\n    first line of two here\n    @ second line",
    "\n  password: >-\n    first line of two here\n    @ second line",
    "\n  api_keys:\n    - @\n    - other-@",
    "\n  api_keys:\n  - @",
    "\n  headers:\n    X-Anything: @",
    "\n  headers:\n    X-Anything:\n      @",
    "\n  headers: {X-Anything: @,\n    X-Other: other-@}",
    "\n  headers:\n    - [X-Anything, @]",
    "\n  headers:\n    - - X-Anything\n      - @",
    "\n  headers:\n    - name: X-Anything\n      value: @",
    "\n  headers:\n    - 'X-Anything: @'",
    "\n  headers: |\n    X-Anything: @",
    "\n  custom_headers:\n    X-Team: @",
    "\n  cookies:\n    session: @",
    "\n  ? api_key\n  : @",
    "\n  api_key: &one @\n  other: *one",
    "\n  api_key: !!str @",
    "\n  deep: {a: [{b: {client_secret: @}}]}",
    "\n  url: https://host.example/v1?key=@",
    "\n  url: >-\n    https://me:@@host.example/v1",
]
# Words of a command.
ARGUMENTS = [
    ["--api-key", "@"],
    ["--api-key=@"],
    ["--api_key=@"],
    ["--password", "@"],
    ["--password=@ with spaces"],
    ["--hf-token", "@"],
    ["--token=@0123456789abcdef"],
    ["--secret=@"],
    ["-u", "me:@"],
    ["--user", "me:@"],
    ["-H", "X-Anything: @"],
    ["-H", "Authorization: Bearer @"],
    ["--header", "Cookie: session=@"],
    ["--proxy-user", "me:@"],
    ["api_key=@"],
    ["+policy.api_key=@"],
    ["policy.headers.X-Team=@"],
    ["policy={headers: {X-Team: @}}"],
    ["https://me:@@host.example"],
    ["https://host.example/v1?key=@"],
    ["--url=https://host.example/v1?sig=@"],
    ["sk-@0123456789abcdef"],
]
VARIABLES = [
    ("MY_API_KEY", "@"),
    ("SOME_PASSWORD", "@"),
    ("DB_PASS", "@ with spaces"),
    ("SOME_SECRET", '@"quoted\\and&more'),
    ("MY_HF_TOKEN", "@"),
    ("CLIENT_SECRET", "@é"),
    ("AZURE_OPENAI_KEY", "@0123456789abcdef"),
    ("TOGETHER_KEY", "@0123456789abcdef"),
    ("WANDB_KEY", "@0123456789abcdef"),
    ("GITHUB_TOKEN", "ghp_@0123456789abcdefghijkl"),
]
# Whole files that git does not know.
FILES = {
    "token": "@",
    "token.json": '{"value": "@"}',
    "wandb_key.txt": "@",
    "notes.txt": "@",
    ".authinfo": "machine host login me password @",
    ".netrc": "machine host login me password @",
    ".env": "ANYTHING=@",
    "prod.pem": "@",
    "id_rsa": "@",
    "service_account.json": '{"private": "@"}',
    "rows.jsonl": '{"secret": "@"}',
    "saved.bin": "@",
    "conf/prod.toml": 'name = "x"\npassword = "@"\n',
    "conf/headers.toml": '[policy.headers]\nX-Team = "@"\n',
    "conf/inline.toml": 'headers = {X-Team = "@"}\n',
    "conf/prod.ini": "[default]\naws_secret_access_key = @\n",
    "conf/pass.cfg": "[db]\npass: @\n",
    "conf/.env.example": "export DB_PASSWORD=@\n",
    "conf/template.yaml": "{% if x %}\npassword: @\nheaders:\n  X-Team: @\n{% endif %}\n",
    "conf/two.yaml": "a: 1\n---\nheaders:\n  X-Team: @\n",
    "conf/marked.yml": "\ufeffpassword: @\n",
    "conf/returns.yaml": "a: 1\r\nheaders:\r\n  X-Team: @\r\n",
    "code.py": 'api_key = "@-0123"\nheaders = {"Authorization": "Bearer @-0123456789"}\n',
    "script.sh": "curl -u me:@ -H 'Authorization: Bearer @-0123' 'https://host.example/?sig=@'\n",
    "key.md": "```\n-----BEGIN PRIVATE KEY-----\nMIIEvQIBADANBgkqhkiG9w0BAQEFAASCBKcwggSjAgEAAoIBAQC7VJTU@\n"
    "-----END PRIVATE KEY-----\n```\n",
}

HARMLESS = """
    max_tokens: 4096
    max_new_tokens: 512
    num_tokens: 123456
    token_count: 98765432
    token_ids: [151645, 151643, 12345678]
    prompt_token_ids: [1, 2, 3]
    stop_token_ids: [151645]
    tokenizer: Qwen/Qwen2.5-0.5B-Instruct
    tokenizer_name: gpt2
    tokenizer_path: /models/tokenizer.json
    pad_token: <|endoftext|>
    eos_token: </s>
    bos_token: <|reserved_special_token_12|>
    unk_token: <unk>
    image_token: <image_0001>
    mask_token: '[MASK]'
    token: the
    tokens_per_second: 12345.678
    api_key_env: NAMED_NOWHERE_API_KEY
    api_key_file: ~/.config/key
    password_env: NAMED_NOWHERE_PASSWORD
    secret_name: prod-secret-0123456789
    api_key: ${NAMED_NOWHERE_API_KEY}
    password: null
    use_auth_token: true
    sha: 9fceb02d0ae598e95dc970b74767f19372d61af8
    run: 123e4567-e89b-12d3-a456-426614174000
    digest: sha256:9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08
    integrity: sha512-Zx9Kq2Lm7Wp4Rt8Yv3Bn6Hd1Zx9Kq2Lm7Wp4Rt8Yv3Bn6Hd1
    xxh: 0123456789abcdef
    sort_key: value-1234567890-abcdef
    primary_key: id_0123456789
    keyboard: qwerty-0123456789
    monkey: bananas-0123456789
    author: me-0123456789
    authors: [a-0123456789, b-0123456789]
    auth_method: oauth2-0123456789
    pass_rate: 0.875
    pass@1: 0.4375
    forward_pass: fused-0123456789
    compass: north-0123456789
    bypass: kernel-0123456789
    passage: chapter-0123456789
    secretary: desk-0123456789
    pwd: /home/me/project-0123
    credentials: ~/.config/gcloud/service.json
    column_headers: [name-0123456789, reward-0123456789]
    headers: [name, reward]
    url: http://localhost:8000/v1
    url_with_a_page: https://host.example/list?page=2&sort=name&limit=100
    repo: git@github.com:me/project-0123456789.git
    image: registry.example/me/train:2024-01-02
    task: risk-assessment-of-a-long-name-2024
    model: meta-llama/Llama-3.1-8B-Instruct
    dataset: openai/gsm8k@main
    learning_rate: 1.0e-05
    seed: 1234567890
    group: docker run -u 1000:1000 python -u train.py
    prose: Enter your password, then the secret word, and the token that you got.
    question: What is the password of the locked door in the story?
    answer: The API key is the string that your provider gave you.
    basic: Basic arithmetic and bearer bonds are harmless words here.
    cookie_recipe: 200 g of sugar, 2 eggs
    base64_of_nothing: aGVsbG8gd29ybGQsIGhlbGxvIHdvcmxk
"""


def harmless() -> list[str]:
    return [line.strip() for line in HARMLESS.strip().splitlines()]


class Secrets:
    """Gives out secrets, each found again by a part of its own that no encoding changes."""

    def __init__(self) -> None:
        self.cores: dict[str, str] = {}

    def fill(self, shape: str, where: str) -> str:
        core = f"zQ{len(self.cores):04}Xw7"
        self.cores[core] = f"{where}: {shape}"
        # In a URL the second of `@@` is the end of the login.
        return shape.replace("@@", "@\0").replace("@", f"{core}pq").replace("\0", "@")

    def found_in(self, texts: Iterable[tuple[str, str]]) -> list[str]:
        return sorted(self._found(texts))

    def _found(self, texts: Iterable[tuple[str, str]]) -> Iterator[str]:
        for name, text in texts:
            for core, shape in self.cores.items():
                if core in text:
                    line = next(line for line in text.splitlines() if core in line)
                    at = line.index(core)
                    yield f"{name}: {shape!r} in {line[max(0, at - 80) : at + 60]!r}"
