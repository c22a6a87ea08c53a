"""Hides secrets in text that leaves Mantissa: what is printed, recorded, uploaded or shown on a page.

Only actual secrets are hidden: keys of a known format, the login in a URL, and values that look secret of variables or
settings whose names say so. A path, a number, a word, or a name made of words such as gpt2-medium is never hidden, so
that readers and programs lose nothing they need.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

HIDDEN = "***"

_VARIABLES = frozenset(
    {
        *("WANDB_API_KEY", "COMET_API_KEY", "MLFLOW_TRACKING_TOKEN", "MLFLOW_TRACKING_PASSWORD"),
        *("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HUGGINGFACE_TOKEN", "HUGGINGFACEHUB_API_TOKEN", "KAGGLE_KEY"),
        *("AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "GOOGLE_API_KEY"),
        *("AZURE_STORAGE_CONNECTION_STRING", "AZURE_STORAGE_KEY", "AZURE_STORAGE_ACCOUNT_KEY", "AZURE_CLIENT_SECRET"),
        *("AZURE_STORAGE_SAS_TOKEN", "AZURE_STORAGE_SAS"),
        *("GITHUB_TOKEN", "GH_TOKEN", "GITLAB_TOKEN", "NPM_TOKEN", "NGC_API_KEY", "NVIDIA_API_KEY"),
        *("OPENAI_API_KEY", "ANTHROPIC_API_KEY", "SLURM_JWT"),
        *("OTEL_EXPORTER_OTLP_HEADERS", "OTEL_EXPORTER_OTLP_TRACES_HEADERS"),
    }
)
"""Variables that contain only secrets."""
_NAME = (
    r"(?:[\w.-]*[_.-])?(?:token|secret|password|passwd|passphrase|pwd|credentials?|jwt|sas|connection[_-]?string"
    r"|(?:api|access|private|account|shared|secret|encryption)[_-]?key)"
)
_SECRET_NAME = re.compile(rf"(?i)^{_NAME}$")
_SECRET_VARIABLE = re.compile(rf"(?i)^(?:{_NAME}|\w+_key)$")
_SECRET_FLAG = re.compile(rf"(?i)^-{{1,2}}{_NAME}$")
_OF_A_TOKENIZER = re.compile(r"(?i)token$")  # eos_token, pad_token: usually a word, not a secret

_START, _END = r"(?:(?<![A-Za-z0-9])|(?<=\\[nrt]))", r"(?![A-Za-z0-9])"
_FORMATS = re.compile(
    "|".join(
        [
            rf"{_START}(?:{pattern}){_END}"
            for pattern in (
                r"hf_[A-Za-z0-9]{20,}|api_org_[A-Za-z0-9]{20,}",  # Hugging Face
                r"wandb_v\d_\w{20,}|local-[0-9a-f]{40}",
                r"gh[pousr]_[A-Za-z0-9]{20,}|github_pat_\w{20,}|glpat-[\w-]{20,}",
                r"sk-(?:proj|ant|svcacct|admin|or)-[\w-]{16,}|sk-[A-Za-z0-9]{20,}",  # OpenAI, Anthropic, OpenRouter
                r"(?:gsk|xai|nvapi|r8|pplx|tgp_v1|dop_v1)[_-][\w-]{32,}",
                r"(?:AKIA|ASIA|ABIA|ACCA)[A-Z0-9]{16}",  # AWS
                r"AIza[\w-]{35}|ya29\.[\w-]{20,}|GOCSPX-[\w-]{20,}",  # Google
                r"xox[abeoprs]-[A-Za-z0-9-]{10,}|[srp]k_(?:live|test)_[A-Za-z0-9]{16,}",  # Slack, Stripe
                r"npm_[A-Za-z0-9]{30,}|pypi-[\w-]{50,}|lin_api_[A-Za-z0-9]{30,}",
                r"eyJ[\w-]{8,}\.eyJ[\w-]{8,}\.[\w-]{8,}",  # JSON web token
            )
        ]
        + [r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)"]
    ),
    re.DOTALL,
)
_HEAD_KEPT = re.compile(  # group 1 stays, what follows it is hidden
    r"(?i)((?:AccountKey|SharedAccessKey|SharedAccessSignature)=)[^;\s\"']{8,}"
    r"|([?&](?:sig|signature|x-amz-signature|x-amz-credential|x-amz-security-token|x-goog-signature)=)[^&\s\"'#]{8,}"
    r"|(hooks\.slack\.com/services/)[\w/]{8,}"
)
_URL_LOGIN = re.compile(r"(?<=://)(?:[^\s/\"'<>]*|[^\s/\"'<>:@]+:(?!\d{1,5}/)[^\s\"'<>@]*)@")
_URL_PASSWORD = re.compile(r"://[^\s/\"'<>:@]*:([^\s/\"'<>]+)@")
_BEARER = re.compile(r"(?i)\b((?:bearer|basic)(?:\s+|%20))([\w+/=.~-]{8,})")
_ASSIGNED = re.compile(rf"(?i)(?<![\w.-])(-{{0,2}}({_NAME})(?:=|:\s?|(?<=[\w])[\"']\s?:\s?)[\"']?)([^\s\"'&;,}}\]]+)")
_FLAGGED = re.compile(rf"(?i)(?<!\S)(-{{1,2}}({_NAME})\s+[\"']?)([^\s\"'-][^\s\"']*)")

_HINT = re.compile(
    r"(?i)_|-|/|=|key|token|secret|pass|pwd|credential|jwt|sas|connection|bearer|basic|A[KSBC][IC]A|AIza|eyJ|ya29"
)
"""Matches every text that one of the patterns above can match, except those for URLs."""

_SEPARATORS = re.compile(r"[-_./:+=,;<>|\[\]@\\]+")
_PASSWORD_SIGNS = re.compile(r"[!\"#$%&'()*?^`{}~@]")
_NUMBER = re.compile(r"[-+]?[\d.,:_eE+-]{1,24}")
_PATH = re.compile(r"[/~]|\.{1,2}/|[A-Za-z]:\\|file:|env:|\$")
_FILE = re.compile(r".+\.[a-z]{2,5}|.*/.*")
_EMAIL = re.compile(r"[\w.+-]+@[\w-]+(?:\.[\w-]+)*")
_UUID = re.compile(r"(?i)[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}")
_TIME = re.compile(r"\d{6,8}[tT]?\d{4,6}[zZ]?")
_HUMP = re.compile(r"[a-z][A-Z]")
_BASE64 = re.compile(r"[A-Za-z0-9/+]{40,}={0,2}")
_LONGEST_WORD, _SHORTEST_KEY, _SHORTEST_PASSWORD = 24, 12, 8


class Redactor:
    """Hides secrets in text and in plain values; also knows the values of some environment variables."""

    def __init__(self, variables: Mapping[str, str] = os.environ) -> None:
        known = known_secrets(variables)
        self._known = re.compile("|".join(map(re.escape, known))) if known else None

    def text(self, text: str) -> str:
        if self._known is not None:
            text = self._known.sub(HIDDEN, text)
        if "://" in text:
            text = _URL_LOGIN.sub(f"{HIDDEN}@", text)
        if not _HINT.search(text):
            return text
        text = _FORMATS.sub(HIDDEN, text)
        text = _HEAD_KEPT.sub(lambda found: "".join(filter(None, found.groups())) + HIDDEN, text)
        text = _BEARER.sub(lambda found: found[1] + (HIDDEN if looks_secret(found[2]) else found[2]), text)
        for pattern in (_ASSIGNED, _FLAGGED):
            text = pattern.sub(lambda found: found[1] + (HIDDEN if is_secret(found[2], found[3]) else found[3]), text)
        return text

    def value(self, key: str, value: Any) -> Any:
        """A plain value without secrets, at any depth. key: its name, which may mark it as a secret."""
        if isinstance(value, str):
            return HIDDEN if is_secret(key, value) else self.text(value)
        if isinstance(value, dict):
            return {name: self.value(str(name), item) for name, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.value(key, item) for item in value]
        return value


def redact(value: Any, key: str = "") -> Any:
    """A plain value without secrets, at any depth, including the secrets in this process's environment."""
    return Redactor().value(key, value)


def redact_arguments(arguments: list[str]) -> list[str]:
    """Command-line arguments without secrets, including values of `--api-key X`, `hf_token=X` and the like."""
    redactor, hidden, flag = Redactor(), [], ""
    for argument in arguments:
        name, equals, value = argument.partition("=")
        if flag:
            hidden.append(redactor.value(flag, argument))
        elif equals and _SECRET_NAME.match(name.lstrip("-")):
            hidden.append(f"{name}={redactor.value(name.lstrip('-'), value)}")
        else:
            hidden.append(redactor.text(argument))
        flag = argument.lstrip("-") if _SECRET_FLAG.match(argument) else ""
    return hidden


def known_secrets(variables: Mapping[str, str]) -> list[str]:
    """The secrets in the variables, longest first."""
    found: set[str] = set()
    for name, value in variables.items():
        if name in _VARIABLES:
            found.update(part for part in (value, *_parts(value)) if _may_be_secret(part))
        elif _SECRET_VARIABLE.match(name) and looks_secret(value):
            found.add(value)
        if "://" in value:
            found.update(filter(looks_secret, map(unquote, _URL_PASSWORD.findall(value))))
    found |= {quote(value, safe="") for value in found}
    return sorted(found, key=len, reverse=True)


def is_secret(key: str, value: str) -> bool:
    """Whether the value of a setting is a secret, by its name and its shape."""
    if not _SECRET_NAME.match(key):
        return False
    if looks_secret(value):
        return True
    if _OF_A_TOKENIZER.search(key) or _is_path(value) or _FILE.fullmatch(value):
        return False
    return len(value) >= _SHORTEST_PASSWORD and not _NUMBER.fullmatch(value) and not _is_ordinary(value)


def looks_secret(value: str) -> bool:
    """Whether a value looks like a key or a password, not like a path, a number, an address or words."""
    if _FORMATS.search(value) or _UUID.fullmatch(value):
        return True
    if any(map(str.isspace, value)) or _is_path(value) or "://" in value:
        return False
    if _NUMBER.fullmatch(value) or _EMAIL.fullmatch(value):
        return False
    if len(value) >= _SHORTEST_PASSWORD and _PASSWORD_SIGNS.search(value):
        kinds = (r"[a-z]", r"[A-Z]", r"\d")
        if sum(re.search(kind, value) is not None for kind in kinds) >= 2:
            return True
    return len(value) >= _SHORTEST_KEY and not all(map(_is_ordinary, filter(None, _SEPARATORS.split(value))))


def _may_be_secret(value: str) -> bool:
    """Whether a value is a secret, given that its variable is for secrets only."""
    if looks_secret(value):
        return True
    if _is_path(value):  # base64 may begin with a slash
        return _BASE64.fullmatch(value) is not None and not Path(value).exists()
    return len(value) >= 16 and not _NUMBER.fullmatch(value) and not _is_ordinary(value)


def _parts(value: str) -> Iterator[str]:
    """The secrets inside `AccountName=x;AccountKey=y` and `authorization=Bearer x,api-key=y`."""
    for part in re.split(r"[;,]", value):
        name, equals, inner = part.partition("=")
        if equals and re.fullmatch(r"[\w.-]+", name) and not re.search(r"(?i)name|suffix|protocol|endpoint", name):
            yield re.sub(r"(?i)^(?:bearer|basic)(?:\s+|%20)", "", inner.strip())


def _is_path(value: str) -> bool:
    return _PATH.match(value) is not None or (len(value) < 1024 and "\0" not in value and Path(value).exists())


def _is_ordinary(piece: str) -> bool:
    """Whether letters and digits without a separator form a word, a number, or a name such as llama3 or 1431k."""
    if len(piece) > _LONGEST_WORD:
        return False
    if piece.isdecimal() or _TIME.fullmatch(piece):
        return True
    runs = re.findall(r"\d+|\D+", piece)
    if len(runs) > (3 if len(piece) >= _SHORTEST_KEY else 4):
        return False
    # capitals as in Llama, GPT or LlamaForCausalLM, rather than random
    natural = all(len(run) < _SHORTEST_PASSWORD or len(_HUMP.findall(run)) <= len(run) / 5 for run in runs)
    return natural and all(run.isdecimal() or run.isalpha() for run in runs)
