"""What exports mask, and that masking takes time in proportion to the text, whatever it says."""

import pytest

from agentrl_cli.types.masking import mask, mask_text
from tests.helpers.growth import exponent

SECRETS = {
    "aws_secret_access_key = wJalrXUtnFEMI/K7MDENG": "aws_secret_access_key = [masked:named]",
    "AGENTRL_TOKEN=abcdefghijk": "AGENTRL_TOKEN=[masked:named]",
    "HF_TOKEN='opensesame'": "HF_TOKEN='[masked:named]'",
    "token: abcdefgh1234": "token: [masked:named]",
    "Authorization: Basic dXNlcjpwYXNz": "Authorization: Basic [masked:named]",
    "DB_PASS=hunter22 next": "DB_PASS=[masked:named] next",
    "OPENAI_KEY=abc-def-ghi": "OPENAI_KEY=[masked:named]",
    "npm_abcdefghijklmnopqrstuvwxyz0123456789": "[masked:npm]",
    "pypi-AgEIcHlwaS5vcmcCJGQ": "[masked:pypi]",
    "PGPASSWORD=secret1": "PGPASSWORD=[masked:named]",
    "sk_live_abcdefghijklmnop": "[masked:api-key]",
    "http://127.0.0.1:9/e/ep-3kJd8_sQ0aLw-Zx91mNbVcXyTgRfEdWq/v1": "http://127.0.0.1:9/e/[masked:episode-key]/v1",
    "AccountName=a;AccountKey=abcdEFGH0123+/==;E=c": "AccountName=a;AccountKey=[masked:named];E=c",
    "SharedAccessKey=abcdEFGH0123=": "SharedAccessKey=[masked:named]",
    "https://a.example/b?sv=1&sig=aB3%2FdEfGhIjKlMnOp%3D&se=2": "https://a.example/b?sv=1&sig=[masked:signature]&se=2",
    "xoxc-1234567890-abcdef": "[masked:slack]",
    "glsa_abcdefghijklmnop_12345678": "[masked:grafana]",
    "dop_v1_0123456789abcdef0123": "[masked:digitalocean]",
    "GITHUB_PAT=abcdef123456": "GITHUB_PAT=[masked:named]",
    "Cookie: session=abc123def456; theme=dark": "Cookie: [masked:named]",
    '{"Set-Cookie": "sid=abc123def456; Path=/"}': '{"Set-Cookie": "[masked:named]"}',
    "Server=db;Uid=me;Pwd=hunt3;": "Server=db;Uid=me;Pwd=[masked:named];",
    "mysql --passwd=hunt3 shop": "mysql --passwd=[masked:named] shop",
    "post to https://hooks.slack.com/services/T000/B000/abcdEFGH": "post to https://hooks.slack.com/[masked:web-hook]",
    "https://discord.com/api/webhooks/1234567890/abcdEFGH-ijkl": "https://discord.com/api/webhooks/[masked:web-hook]",
    "sk-" + "a1B2" * 8: "[masked:api-key]",
    "sk-proj-" + "x" * 20: "[masked:api-key]",
    "hf_" + "Z" * 30: "[masked:huggingface]",
    "ghp_" + "0" * 36: "[masked:github]",
    "AKIA" + "A" * 16: "[masked:aws]",
    "Authorization: Bearer " + "q" * 20: "Authorization: Bearer [masked:bearer]",
    "https://joe:hunter2@host/x": "https://[masked:url-password]@host/x",
    "OPENAI_API_KEY=abcdef123456 next": "OPENAI_API_KEY=[masked:named] next",
    '"password": "correct horse"': '"password": "[masked:named] horse"',
    "-----BEGIN RSA PRIVATE KEY-----\nabc\n-----END RSA PRIVATE KEY-----x": "[masked:private-key]x",
    "eyJhbGciOiJI.eyJzdWIiOiIx.abc-_": "[masked:jwt]",
}
HARMLESS = (
    *(
        "token = next(tokens)",
        "token = tokens.pop(0)",
        "max_tokens: 4096",
        "primary_key: identifier",
    ),
    *(
        "PWD=/home/me",
        "OLDPWD=/srv/data",
        "pwd=os.getcwd()",
        "passwd=None",
        "open('/etc/passwd')",
        "cd $PWD; pwd",
    ),
    *(
        "token 31 of 87, tokens: 512",
        "task-0417 asks for sk-learn and https://host:80/a@b",
        "def api_key(): return passwords",
    ),
    *("pwd=$HOME", "pwd=~/project", "print(pwd=None)", "def f(pwd=False): ...", "pwd == other"),
    *(
        "Cookie: chocolate chip = my favourite",
        "cookie: a=b",
        "The cookie jar: three left",
        "SEARCH_PAT=[a-z]+foo",
    ),
    *(
        "ep-1",
        "step-by-step-through-the-whole-long-garden",
        "ep-isode-of-the-series-about-the-harbour-x",
    ),
    *(
        "design=modern-and-simple-lines",
        "?significance=0.0000000000000001",
        "sigma=0.12345678901234567890",
    ),
    *(
        "https://hooks.slack.com/",
        "the webhook at /api/webhooks/ID",
        "account_key: str",
        "key accounting = nothing",
    ),
    *(
        "glsa_short",
        "dop_v1_",
        "xoxc-abc",
        "adopt a dop_v1 format",
        "accountkeys and other keys",
        "git_pat = 'a*b'",
    ),
)
HOSTILE = (
    "a-", "-eyJ-", "-eyJaaaaaaaaa.", "-----BEGIN ", "-----BEGIN PRIVATE KEY-----", "sk-a-", "://a:", "password ",
    "password = ' ", "pwd=", "pwd=a", "pwd='", "ep-", "ep-A", "cookie: ", "cookie: a", "cookie: a=", "&sig=", "&sig=a",
    "hooks.slack.com/", "/api/webhooks/1", "GITHUB_PAT ", "GH_PAT=", "glsa_", "dop_v1_a",
    "token: aaaaaaa", "A_KEY ", "authorization : basic ", "secret_access_", "_", " ",
)  # fmt: skip


@pytest.mark.parametrize("text", SECRETS)
def test_what_looks_like_a_secret_is_masked(text: str) -> None:
    assert mask_text(text) == SECRETS[text]
    assert mask_text(SECRETS[text]) == SECRETS[text]


def test_two_secret_keys_keep_their_values() -> None:
    found = mask({"sk_live_abcdefghijklmnop": 1, "sk_live_ponmlkjihgfedcba": 2})
    assert found == {"[masked:api-key]": 1, "[masked:api-key]#1": 2}


def test_code_and_settings_stay_as_they_are() -> None:
    for text in HARMLESS:
        assert mask_text(text) == text
    given = {
        "token": "abcdefgh",
        "DB_PASS": "x",
        "tokens": "abc",
        "Cookie": "a=b",
        "GITHUB_PAT": "p",
        "pwd": "/srv",
    }
    masked = dict.fromkeys(("token", "DB_PASS", "Cookie", "GITHUB_PAT"), "[masked:named]")
    assert mask(given) == {**given, **masked}
    assert mask({"n": 1, "list": [*SECRETS]}) == {"n": 1, "list": [*SECRETS.values()]}
    assert mask({"env": {"sk-proj-" + "a1" * 10: "x"}}) == {"env": {"[masked:api-key]": "x"}}


@pytest.mark.parametrize("unit", HOSTILE)
def test_time_grows_with_the_text_and_not_with_its_square(unit: str) -> None:
    assert exponent(lambda size: mask_text(unit * (size // len(unit))), 1 << 12) < 1.5
