"""What exports mask, and that masking takes time in proportion to the text, whatever it says."""

from __future__ import annotations

import pytest

from agentrl_cli.store.mask_secrets import mask, mask_text
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
}
HARMLESS = ("token = next(tokens)", "token = tokens.pop(0)", "max_tokens: 4096", "primary_key: identifier")
HOSTILE = (
    "a-", "-eyJ-", "-eyJaaaaaaaaa.", "-----BEGIN ", "-----BEGIN PRIVATE KEY-----", "sk-a-", "://a:", "password ",
    "password = ' ", "token: aaaaaaa", "A_KEY ", "authorization : basic ", "secret_access_", "_", " ",
)  # fmt: skip


@pytest.mark.parametrize("text", SECRETS)
def test_what_looks_like_a_secret_is_masked(text: str) -> None:
    assert mask_text(text) == SECRETS[text]
    assert mask_text(SECRETS[text]) == SECRETS[text]


def test_code_and_settings_stay_as_they_are() -> None:
    for text in HARMLESS:
        assert mask_text(text) == text
    assert mask({"token": "abcdefgh", "DB_PASS": "x", "tokens": "abc"}) == {
        "token": "[masked:named]", "DB_PASS": "[masked:named]", "tokens": "abc",
    }  # fmt: skip


@pytest.mark.parametrize("unit", HOSTILE)
def test_time_grows_with_the_text_and_not_with_its_square(unit: str) -> None:
    assert exponent(lambda size: mask_text(unit * (size // len(unit))), 1 << 15) < 1.5
