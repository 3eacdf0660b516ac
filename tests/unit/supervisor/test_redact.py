"""Test what is taken for a secret, and what is not."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zlaunch.plan.plan import NOT_SHOWN
from zlaunch.supervisor.redact import redact, redact_arguments, redact_json, secret_values

WORDS = st.text(st.characters(codec="utf-8", exclude_characters="()"), max_size=60)
SECRETS = st.text(
    "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_/+=\"'\\é\n", min_size=8
).map(lambda text: f"s{text}s")
HF = "hf_" + "aB3" * 11


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("HF_TOKEN=abc x", "HF_TOKEN=* x"),
        ("export WANDB_API_KEY='a b' && x", "export WANDB_API_KEY='*' && x"),
        ("--env=MY_SECRET=abc worker.py", "--env=MY_SECRET=* worker.py"),
        ('{"api_key": "a\\"b", "lr": 1}', '{"api_key": "*", "lr": 1}'),
        ("{'password': 'abc', 'lr': 1}", "{'password': '*', 'lr': 1}"),
        (r"{\"api_key\": \"abc\", \"lr\": 1}", r"{\"api_key\": \"*\", \"lr\": 1}"),
        ('"password": 123456, "lr"', '"password": *, "lr"'),
        ("--api_key VALUE --lr 1", "--api_key * --lr 1"),
        ("--api-key 'a b' --lr 1", "--api-key '*' --lr 1"),
        ("['--api_key', 'VALUE', '--lr']", "['--api_key', '*', '--lr']"),
        ("--password \\\n  abc \\\n  --lr 1", "--password \\\n  * \\\n  --lr 1"),
        ("comet:\n  api_key: abc # mine\n  x: 1", "comet:\n  api_key: * # mine\n  x: 1"),
        ("Authorization: Bearer abc\nHost: h", "Authorization: *\nHost: h"),
        ('curl -H "X: Bearer 0123456789abcdef" h', 'curl -H "X: *" h'),
        ("Set-Cookie: session=abc; Path=/\nHost: h", "Set-Cookie: *\nHost: h"),
        ("using the key: abcdefghijk123 now", "using the key: * now"),
        ("clone https://bob:pw@host/x", "clone https://*@host/x"),
        (f"login with {HF}.", "login with *."),
        ("AKIA0123456789ABCDEF, ghp_0123456789abcdefghij", "*, *"),
        ("github_pat_0123456789abcdefghij_x sk-proj-0123456789abcdef", "* *"),
        ("xoxb-0123456789-abc eyJhbGciOi.eyJzdWIiOiIx.abc_-", "* *"),
        ("-----BEGIN RSA PRIVATE KEY-----\nMII\nabc=\n-----END RSA PRIVATE KEY-----\nrest", "*\nrest"),
        ("-----BEGIN PRIVATE KEY-----\nMII\nabc", "*"),
        ("\x1b[32m'api_key'\x1b[0m: \x1b[32m'abc'\x1b[0m", "\x1b[32m'api_key'\x1b[0m: \x1b[32m'*'\x1b[0m"),
        ("\x1b[36mHF_TOKEN\x1b[0m=\x1b[33mabc\x1b[0m x", "\x1b[36mHF_TOKEN\x1b[0m=\x1b[33m*\x1b[0m x"),
        (
            "DB_PW=abc SLACK_WEBHOOK=https://x/y SLACK_WEBHOOK_URL: 'https://z'",
            "DB_PW=* SLACK_WEBHOOK=* SLACK_WEBHOOK_URL: '*'",
        ),
        (
            "post to https://hooks.slack.com/services/T00000000/B00000000/abcdefgh now",
            "post to https://* now",
        ),
        ("https://discord.com/api/webhooks/123456/abcdefghijklmnopqr", "https://*"),
        (
            "https://a.blob.core.windows.net/c?se=1&sig=abc%2Fdefghijklmnop%3D&sp=r",
            "https://a.blob.core.windows.net/c?se=1&sig=*&sp=r",
        ),
        ("npm_0123456789abcdefghij dckr_pat_0123456789abcdefghij", "* *"),
        ("ya29.0123456789abcdefghij SG.0123456789abcdefg.0123456789abcdefg", "* *"),
        ("sshpass -p abc ssh host; sshpass -pabc ssh host", "sshpass -p * ssh host; sshpass -p* ssh host"),
        ("mysql -u bob -pabc db | cat -p", "mysql -u bob -p* db | cat -p"),
        ("curl -s -u bob:abc https://x; curl --user=bob:abc y", "curl -s -u * https://x; curl --user=* y"),
        ("machine h login bob password abc\nmachine", "machine h login bob password *\nmachine"),
        ("\x1b[0msk-0123456789abcdef 'a\\nsk-0123456789abcdef'", "\x1b[0m* 'a\\n*'"),
    ],
)
def test_secrets_that_can_be_told(before: str, after: str) -> None:
    shown = after.replace("*", NOT_SHOWN)
    assert redact(before) == (shown, after.count("*"))
    assert redact(shown) == (shown, 0)


@pytest.mark.parametrize(
    "text",
    [
        "tokens_per_s=1234567 tokens: 5 tokenizer=gpt2 TOKENIZERS_PARALLELISM=verytrue",
        "pad_token_id=50256, num_key_value_heads=8, token_accuracy: 0.25, use_auth_token=False",
        '"eos_token_id": [1, 2], "api_key": null',
        "    token = os.environ['HF_TOKEN']",
        "huggingface_hub.errors.AuthenticationError: no access",
        "KeyError: 'abc'",
        'Missing key(s) in state_dict: "layers.0.weight"',
        "if key == 'abcdefgh'",
        "disk-usage-of-everything-here hf_config hf_transformers",
        "see https://host:80/x and user@host:/path",
        "3f786850e387550fdab836ed7e6dc881de23001b",
    ],
)
def test_what_only_looks_alike_stays(text: str) -> None:
    assert redact(text) == (text, 0)


def test_values_of_variables_with_secret_names() -> None:
    environ = {"HF_TOKEN": "abcdefgh\n", "MY_SECRET": "short", "HOME": "/home/somebody", "A_KEY": 'é"12345/'}
    values = secret_values(environ)
    text, count = redact(
        'xabcdefghx short /home/somebody é"12345/ \\u00e9\\"12345/ %C3%A9%2212345%2F', values
    )
    assert text == "x(not shown)x short /home/somebody (not shown) (not shown) (not shown)" and count == 4


def test_each_long_line_of_a_value_is_one() -> None:
    values = secret_values({"SSH_KEY": "first line of the key\nb\nthird line of the key"})
    assert redact("| third line of the key\n| b", values) == ("| (not shown)\n| b", 1)


@given(before=WORDS, after=WORDS, secret=SECRETS)
def test_a_known_value_is_gone_wherever_it_is(before: str, after: str, secret: str) -> None:
    values = secret_values({"MY_SECRET": secret})
    assert secret not in redact(before + secret + after, values)[0]
    document = json.dumps({"type": "x", before: [secret, {after: secret + after}], secret: 1})
    shown = redact_json(document, values)[0]
    assert secret not in shown and secret not in str(json.loads(shown))


@given(before=WORDS, after=WORDS, secret=SECRETS, data=st.data())
def test_half_a_value_is_not_left_at_a_cut(before: str, after: str, secret: str, data: Any) -> None:
    text = before + secret + after
    cut = data.draw(st.integers(len(before) + 1, len(before) + len(secret) - 1))
    values = secret_values({"MY_SECRET": secret})
    first, last = redact(text, values, 0, cut)[0], redact(text, values, cut)[0]
    assert first.endswith(NOT_SHOWN) and last.startswith(NOT_SHOWN)


@given(st.text("abc xyz,.\n\t01 _-:=[]{}", max_size=200))
def test_a_text_without_secrets_stays(text: str) -> None:
    assert redact(text) == (text, 0)


@given(
    st.lists(
        st.sampled_from(["API_KEY", "--token", "=", ":", '"', "'", "\\", " ", "\n", "abc", "1", HF, "://u@h"])
    )
)
def test_a_second_time_breaks_nothing(parts: list[str]) -> None:
    shown, _ = redact("".join(parts))
    again, _ = redact(shown)
    assert HF not in shown and "shown" not in again.replace(NOT_SHOWN, "")


def test_json_stays_json() -> None:
    data = {
        "argv": ["python", "--api_key", "VALUE", "cfg.password=a b"],
        "env": {"HF_TOKEN": "abc", "TOKENIZERS_PARALLELISM": "false"},
        "credentials": {"user": "bob", "numbers": [1234567, 0.5, True, None]},
        "metrics": {"tokens_per_s": 12345678, "token_accuracy": 0.25, "pad_token_id": 0},
        "empty_key": "",
    }
    text, count = redact_json(json.dumps(data))
    assert json.loads(text) == {
        "argv": ["python", "--api_key", NOT_SHOWN, f"cfg.password={NOT_SHOWN}"],
        "env": {"HF_TOKEN": NOT_SHOWN, "TOKENIZERS_PARALLELISM": "false"},
        "credentials": {"user": NOT_SHOWN, "numbers": [NOT_SHOWN, 0.5, True, None]},
        "metrics": {"tokens_per_s": 12345678, "token_accuracy": 0.25, "pad_token_id": 0},
        "empty_key": "",
    }
    assert count == 5
    assert redact_json(text) == (text, 0)


@pytest.mark.parametrize(
    "text", ['{"api_key": "abc"', "[" * 100_000 + 'api_key="abc"', '"api_key=abc"', "api_key=abc"]
)
def test_what_is_no_json_is_taken_as_text(text: str) -> None:
    shown, count = redact_json(text)
    assert "abc" not in shown and count == 1


@pytest.mark.parametrize(
    "text",
    ["a" * 10**6, "KEY-" * 10**5, "KEY " * 10**4, "api_key=\\" * 10**5, "eyJaaaaaaa." * 10**5, "://" * 10**5],
)
def test_long_words_take_no_square_of_their_length(text: str) -> None:
    """The test would not end otherwise."""
    redact(text)
    redact(text + "\n")


def test_a_command_line_keeps_its_plain_numbers_and_loses_its_secrets() -> None:
    plain = ("train.py", "--num_key_value_heads=8", "--pad_token_id", "0", "--lr=3e-4", "--auth", "--verbose")
    assert redact_arguments(plain) == plain
    secret = ("--api_key", "abc", "--env=HF_TOKEN=a b", f"--note={HF}", "s3://me:pw@host/x", "known-value")
    assert redact_arguments(secret, ["known-value"]) == (
        "--api_key",
        NOT_SHOWN,
        f"--env=HF_TOKEN={NOT_SHOWN}",
        f"--note={NOT_SHOWN}",
        f"s3://{NOT_SHOWN}@host/x",
        NOT_SHOWN,
    )
