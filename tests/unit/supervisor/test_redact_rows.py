"""Test every row of the tables of secrets, and hold the rows that there have to be."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zlaunch.plan.plan import NOT_SHOWN, SECRET_WORDS, is_secret, without_secrets
from zlaunch.supervisor.redact import (
    FAMILIES,
    FAMILIES_OF_WORDS,
    redact,
    redact_arguments,
    redact_json,
    secret_values,
)

SOME = "0a1B2c3D4e5F6g7H8i9J0k1L2m3N4o5P6"
TOKENS = {
    "Hugging Face": [f"hf_{SOME}"],
    "GitHub": [f"gh{kind}_{SOME}" for kind in "opsur"],
    "GitHub, fine-grained": [f"github_pat_{SOME}_{SOME}"],
    "GitLab": [f"glpat-{SOME[:20]}", "glpat-ab_cd-ef0123456789"],
    "NVIDIA": [f"nvapi-{SOME}", f"nvapi-_{SOME}-x"],
    "PyPI": [f"pypi-AgEIcHlwaS5vcmc{SOME}"],
    "npm": [f"npm_{SOME}"],
    "Docker": [f"dckr_pat_{SOME}-x"],
    "Slack webhook": [f"hooks.slack.com/services/T0/B0/{SOME}", f"hooks.slack.com/workflows/{SOME}"],
    "Discord webhook": [f"discord.com/api/webhooks/1234/{SOME}", f"discordapp.com/api/webhooks/1/{SOME}"],
    "AWS": ["AKIA0123456789ABCDEF", "ASIA0123456789ABCDEF"],
    "Google": [f"AIza{SOME}12"],
    "OpenAI": [f"sk-{SOME}", f"sk-proj-{SOME}_x"],
    "Slack": [f"xox{kind}-0123456789-{SOME}" for kind in "abpre"],
    "Google, access": [f"ya29.{SOME}"],
    "SendGrid": [f"SG.{SOME}.{SOME}"],
    "JSON web token": ["eyJhbGciOi.eyJzdWIiOiIx.abc_-", "eyJhbGciOi.eyJzdWIiOiIx."],
    "header": ["Bearer 0123456789abcdef", "Basic dXNlcjpwYXNzd29yZA=="],
}
"""Tokens of each family, by the family's name."""
NAMES = {
    "TOKEN": ("HF_TOKEN", "token", "x.token-id"),
    "SECRET": ("AWS_SECRET_ACCESS_KEY", "client_secret", "secrets"),
    "PASSW": ("DB_PASSWORD", "passwd", "MYSQL_PASSWD"),
    "PASSPHRASE": ("SSH_PASSPHRASE", "passphrase"),
    "CREDENTIAL": ("GOOGLE_APPLICATION_CREDENTIALS", "credential"),
    "COOKIE": ("SESSION_COOKIE", "cookies"),
    "AUTH": ("NPM_AUTH", "authorization", "basic-auth"),
    "KEY": ("WANDB_API_KEY", "api-key", "key", "apikey", "AccountKey", "mon_key", "commonkey", "text_key"),
    "PAT": ("GITHUB_PAT", "pat", "MY_PAT_1"),
    "PASS": ("PASS", "SMTP_PASS", "PGPASS", "my_pgpass"),
    "PW": ("DB_PW", "pw", "admin-pw"),
    "WEBHOOK": ("SLACK_WEBHOOK", "webhook_url"),
}
"""Names of variables and options whose values are secret, by the word that says so."""
PLAIN = (
    *(
        "TOKENIZERS_PARALLELISM",
        "tokens_per_s",
        "AUTHOR",
        "authors",
        "keyboard",
        "MONKEYS",
        "PATH",
        "pattern",
    ),
    *("monkey", "my.turkey", "HOCKEY", "sort_key", "sort-key", "dataset_text_key", "data.label_key"),
    *("prompt_key", "chosen_key", "rejected_key"),
    *("PWD", "OLDPWD", "PYTHONPATH", "bypass", "PASSES", "compassion", "SPATIAL", "LD_LIBRARY_PATH"),
)
"""Names with letters of secret words in them."""


def word_rows() -> list[str]:
    """The alternatives of SECRET_WORDS, whose own bars stand inside of parentheses."""
    rows, depth = [""], 0
    for letter in SECRET_WORDS:
        depth += (letter == "(") - (letter == ")")
        if letter == "|" and not depth:
            rows.append("")
        else:
            rows[-1] += letter
    return rows


def word_of(row: str) -> str:
    """What is left of a row without its looks around, and without what may be missing."""
    inside = r"(?:[^()]|\((?:[^()]|\([^()]*\))*\))*"
    return re.sub(rf"\(\?<?[!=]{inside}\)|\(\?:{inside}\)\?", "", row)


ROWS = {**FAMILIES, **FAMILIES_OF_WORDS}


def test_the_tables_have_the_rows_that_are_tested_here() -> None:
    """Cases that are read from a table do not miss a row that is gone."""
    assert list(ROWS) == list(TOKENS)
    assert [word_of(row) for row in word_rows()] == list(NAMES)


@pytest.mark.parametrize("name", ROWS)
@settings(max_examples=10)
@given(data=st.data())
def test_each_family_of_the_table_is_taken_out(name: str, data: st.DataObject) -> None:
    token = data.draw(st.from_regex(re.compile(ROWS[name], re.ASCII), fullmatch=True))
    for before, after in (
        ("", ""),
        ("fetched with ", "\n"),
        ('"', '"'),
        ("\x1b[0m", "\x1b[0m"),
        ("a\\n", "'"),
    ):
        shown, count = redact(before + token + after)
        assert count == 1 and token not in shown and shown.startswith(before + NOT_SHOWN)


@pytest.mark.parametrize("token", [token for tokens in TOKENS.values() for token in tokens])
def test_each_family_is_taken_out(token: str) -> None:
    shown = f"using {NOT_SHOWN}, as told"
    assert redact(f"using {token}, as told") == (shown, 1)
    text, count = redact_json(f'["{token}", 1]')
    assert token not in text and count == 1


@pytest.mark.parametrize("token", [token for name in FAMILIES_OF_WORDS for token in TOKENS[name]])
def test_those_that_words_end_in_begin_a_word(token: str) -> None:
    text = f"x{token}"
    assert redact(text) == (text, 0)


@pytest.mark.parametrize("row", word_rows())
def test_each_word_of_the_table_makes_a_name_secret(row: str) -> None:
    check(f"MY_{word_of(row)}")


@pytest.mark.parametrize("name", [name for names in NAMES.values() for name in names])
def test_each_word_makes_a_name_secret(name: str) -> None:
    check(name)


def check(name: str) -> None:
    """Check that a name is secret wherever a name and its value may stand."""
    value = "letmein-now"
    assert is_secret(name)
    assert redact(f"{name}={value} x") == (f"{name}={NOT_SHOWN} x", 1)
    assert redact(f"{name}: {value}\nx") == (f"{name}: {NOT_SHOWN}\nx", 1)
    assert redact(f"--{name} {value} x") == (f"--{name} {NOT_SHOWN} x", 1)
    assert redact_json(f'{{"{name}":"{value}"}}') == (f'{{"{name}":"{NOT_SHOWN}"}}', 1)
    for hide in (without_secrets, redact_arguments):
        assert hide([f"--{name}", value, f"--{name}={value}", "x"]) == (
            f"--{name}",
            NOT_SHOWN,
            f"--{name}={NOT_SHOWN}",
            "x",
        )
    assert value in secret_values({name: value})


@pytest.mark.parametrize("name", PLAIN)
def test_letters_of_a_secret_word_make_no_secret(name: str) -> None:
    assert not is_secret(name)
    assert redact(f"{name}=value-1 x") == (f"{name}=value-1 x", 0)


@pytest.mark.parametrize("kind", ["", "RSA ", "EC ", "OPENSSH ", "ENCRYPTED "])
def test_each_kind_of_private_key_is_taken_out(kind: str) -> None:
    key = f"-----BEGIN {kind}PRIVATE KEY-----\nMIIEvQ\nabc=\n-----END {kind}PRIVATE KEY-----"
    assert redact(f"a\n{key}\nb") == (f"a\n{NOT_SHOWN}\nb", 1)
    public = key.replace("PRIVATE", "PUBLIC")
    assert redact(public) == (public, 0)


def test_a_key_of_pgp_is_a_block() -> None:
    key = "-----BEGIN PGP PRIVATE KEY BLOCK-----\n\nlQOY\n=ab1c\n-----END PGP PRIVATE KEY BLOCK-----"
    assert redact(f"a\n{key}\nb") == (f"a\n{NOT_SHOWN}\nb", 1)
