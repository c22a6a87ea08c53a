"""Secrets are hidden wherever they stand; values that a program or a reader needs never are."""

from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest

from config import yaml_text
from config.cli import REPOSITORY
from config.load import all_keys
from config.redact import HIDDEN, Redactor, is_secret, known_secrets, looks_secret, redact, redact_arguments
from config.schema import Config
from tests.support.runs.hostile import SECRETS

ORDINARY = [
    *("gpt2", "bytes", "training", "true", "1234567890123", "3.14e-05", "0.0.0.0:8080", "2026-11-22T15:30:45"),
    *("/home/anna", "~/projects/Model2/aB3dE5fG7hI9", "./runs/aB3dE5fG7hI9jK1l", "/a/folder with spaces/Ab1Cd2Ef3"),
    *("meta-llama/Llama-3.1-8B-Instruct", "TinyLlama/TinyLlama-1.1B-intermediate-step-1431k-3T", "gpt2-medium"),
    *("bpe:4096", "ds_configs/zero2_bf16.json", "flash_attention_2", "Qwen2ForCausalLM", "LlamaForCausalLM"),
    *("<|endoftext|>", "<|reserved_special_token_0|>", "[PAD]", "<0x0A>", "http://localhost:4318/v1", "env:MY_KEY"),
    *("step-20251122T153045Z", "experiment20261122", "anna2@example.com", "gpu-a100-80gb-node17", "xterm-256color"),
    *("a sentence with 3 words in it", "internationalization", "", "x"),
]


@pytest.mark.parametrize("value", ORDINARY)
@pytest.mark.parametrize("name", ["MY_TOKEN", "TOKENIZER_TOKEN", "DB_PASSWORD", "SOME_SECRET", "PASSWORD", "A_API_KEY"])
def test_an_ordinary_value_stays_whatever_its_variable_is_called(name: str, value: str) -> None:
    assert known_secrets({name: value, "PWD": value, "SECRET_SANTA": value}) == []
    assert not looks_secret(value)
    text = f"say {value} here"
    assert Redactor({name: value}).text(text) == text


def test_a_path_is_no_secret_whatever_characters_it_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "aB3dE5fG7hI9jK1lM3nO5"
    folder.mkdir()
    monkeypatch.chdir(tmp_path)
    variables = {"PWD": str(folder), "OLDPWD": str(folder), "A_TOKEN": str(folder), "B_TOKEN": folder.name}
    assert known_secrets({**variables, "HF_TOKEN": str(folder)}) == []


def test_no_word_of_the_schema_or_of_a_recipe_is_taken_for_a_secret() -> None:
    words = {part for key in all_keys() for part in (key, *key.split("."))}

    def leaves(value: Any) -> None:
        for item in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
            leaves(item)
        if isinstance(value, str):
            words.add(value)

    for path in [*(REPOSITORY / "config/recipes").glob("*.yaml"), *(REPOSITORY / "ds_configs").glob("*.json")]:
        tree = yaml_text.parse(path.read_text())
        leaves(tree)
        assert redact(tree) == tree, path
    for section in get_type_hints(Config).values():
        for hint in get_type_hints(section).values() if isinstance(section, type) and section is not tuple else ():
            words.update(item for item in get_args(hint) if isinstance(item, str))
    assert len(words) > 150
    assert [word for word in words if looks_secret(word)] == []


@pytest.mark.parametrize("secret", [*SECRETS.values(), "7f" * 32, "hunter2hunter2", "Tr0ub4dor&3", 'tricky"value-1234'])
@pytest.mark.parametrize("name", ["MY_TOKEN", "db_password", "X_API_KEY", "WANDB_API_KEY", "MANTISSA_KEY"])
def test_a_real_key_in_a_variable_is_hidden_anywhere(name: str, secret: str) -> None:
    redactor = Redactor({name: secret, "PATH": "/usr/bin"})
    said = {"reason": f"401 for {secret} at /usr/bin", "list": [secret], "more": {"step": 3, "key": f"<{secret}>"}}
    assert secret not in repr(redactor.value("", said))
    assert redactor.value("", said)["reason"] == f"401 for {HIDDEN} at /usr/bin"


@pytest.mark.parametrize(
    ("variables", "secret"),
    [
        (
            {"AWS_SECRET_ACCESS_KEY": "/bcdefghijK7MDENG/bPxRfiCYEXAMPLEKEY1234"},
            "/bcdefghijK7MDENG/bPxRfiCYEXAMPLEKEY1234",
        ),
        (
            {"AZURE_STORAGE_CONNECTION_STRING": "AccountName=me;AccountKey=Eby8vdM02x+OcqFlq/w==;X=y"},
            "Eby8vdM02x+OcqFlq/w==",
        ),
        ({"OTEL_EXPORTER_OTLP_HEADERS": "x-team=blue,authorization=Bearer abcd1234efgh5678"}, "abcd1234efgh5678"),
        ({"HTTPS_PROXY": "http://me:pr0xyPass4word@proxy:3128"}, "pr0xyPass4word"),
        ({"HF_TOKEN": "a-token-of-another-kind"}, "a-token-of-another-kind"),
        ({"AWS_SECRET_ACCESS_KEY": SECRETS["aws"]}, "wJalrXUtnFEMI%2FK7MDENG%2FbPxRfiCYEXAMPLEKEY"),
    ],
)
def test_the_secret_inside_a_variable_is_known_alone(variables: dict[str, str], secret: str) -> None:
    assert Redactor(variables).text(f"failed with {secret} for blue at me") == f"failed with {HIDDEN} for blue at me"


@pytest.mark.parametrize(
    ("text", "hidden"),
    [
        (f"tried {SECRETS['hugging face']}.", "tried ***."),
        (f"b'\\n{SECRETS['github']}'", "b'\\n***'"),
        ("https://me:p@ss@host/x", "https://***@host/x"),
        ("https://token@host/x", "https://***@host/x"),
        ("postgres://u:p/w@db/x", "postgres://***@db/x"),
        ("https://h/b?sv=1&sig=abcdefghijk%3D&x=1", "https://h/b?sv=1&sig=***&x=1"),
        ("AccountKey=Eby8vdM02xNOcqFl==;x", "AccountKey=***;x"),
        ("Authorization: Bearer abc123def456ghi789", "Authorization: Bearer ***"),
        ("train.py --api-key hunter2hunter2 run.steps=3", "train.py --api-key *** run.steps=3"),
        ('{"password": "hunter2hunter2"}', '{"password": "***"}'),
        ("-----BEGIN RSA PRIVATE KEY-----\nabc\n-----END RSA PRIVATE KEY----- after", "*** after"),
        ("eyJhbGciOiJI.eyJzdWIiOiIx.SflKxwRJSMeKKF2Q", "***"),
    ],
)
def test_secrets_of_known_formats_are_hidden_in_text(text: str, hidden: str) -> None:
    redactor = Redactor({})
    assert redactor.text(text) == hidden
    assert redactor.text(hidden) == hidden, "hiding twice changes nothing"


@pytest.mark.parametrize(
    "text",
    [
        "http://localhost:4318/v1@x",
        "basic understanding of tokens",
        "data.tokenizer=bytes model.config.eos_token=<|endoftext|>",
        "passwords: none; token: 5",
        "mail anna@example.com",
        "sk-learn-baseline and hf_internal_testing",
        "sha256 " + "0123456789abcdef" * 4,
        "/runs/x/checkpoints/step-20 of commit 0123456789abcdef0123456789abcdef01234567",
    ],
)
def test_text_without_a_secret_stays(text: str) -> None:
    assert Redactor({}).text(text) == text


@pytest.mark.parametrize(
    ("key", "value", "secret"),
    [
        ("hub_token", "hunter2hunter2", True),
        ("eos_token", "<|im_end|>", False),
        ("tokens", "hunter2hunter2", False),
        ("secret", "under-a-secret-name", True),
        ("credentials", "google_default.json", False),
        ("password", "12345678", False),
    ],
)
def test_the_name_of_a_setting_tells_only_with_the_shape_of_its_value(key: str, value: str, secret: bool) -> None:
    assert is_secret(key, value) is secret
    assert redact({key: value}) == {key: HIDDEN if secret else value}


_PASSWORD = "hunter2hunter2"


@pytest.mark.parametrize(
    "arguments",
    [
        ["--api-key", _PASSWORD],
        [f"--hf_token={_PASSWORD}"],
        [f"data.hub_token={_PASSWORD}"],
        [f"password={_PASSWORD}"],
        [f"data.path=https://user:{_PASSWORD}@host/x"],
        ["hf_" + _PASSWORD + "abcdefgh"],
        [f"run.hypothesis=the key is sk-{_PASSWORD}abcdefgh"],
    ],
)
def test_secrets_on_the_command_line_are_hidden(arguments: list[str]) -> None:
    assert _PASSWORD not in " ".join(redact_arguments(arguments))


def test_arguments_that_only_resemble_a_secret_stay() -> None:
    arguments = ["generate.tokens=100", "data.tokenizer=bytes", "--config", "x.yaml", "optimizer.betas=[0.9,0.95]"]
    arguments += ["model.config.eos_token=<|im_end|>", "--token", "gpt2"]
    assert redact_arguments(arguments) == arguments
