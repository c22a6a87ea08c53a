"""Uploads the exported folder to the Hugging Face hub. Whatever can be checked is checked before the export starts."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import HfApi, constants, get_token
from huggingface_hub.errors import HFValidationError, RepositoryNotFoundError
from huggingface_hub.utils import disable_progress_bars, validate_repo_id

from config.errors import UserError
from config.redact import HIDDEN, redact

OPTION = "--push-to-hub"
_STALE = [
    "model*.safetensors",
    "model.safetensors.index.json",
    "pytorch_model*",
    "adapter_model*",
    "adapter_config.json",
]
"""Weights that an earlier push may have left under other names: `from_pretrained` could prefer or add them."""


@dataclass(frozen=True)
class HubRepo:
    """A model repository that this user may write to, as far as the hub tells in advance."""

    name: str
    """namespace/name."""
    private: bool
    """Whether it must be private."""
    api: HfApi


def find_repo(name: str, *, private: bool) -> HubRepo:
    """The repository to push to; it need not exist yet.

    Raises UserError for a name that the hub does not allow, without a network or a valid token, and if `private` is
    requested for a public repository.
    """
    try:
        validate_repo_id(name)
    except HFValidationError as error:
        raise UserError(f"{OPTION} {name}: not a repository's name ({error}); give NAMESPACE/NAME") from None
    if constants.HF_HUB_OFFLINE:
        raise UserError(f"{OPTION} {name}: HF_HUB_OFFLINE or TRANSFORMERS_OFFLINE is set; unset it, or leave this out")
    with _one_line(name, "check the network and the token, or export without it"):
        token = get_token()
        if token is None:
            raise UserError(f"{OPTION} {name}: there is no token; set HF_TOKEN, or log in with `hf auth login`")
        api = HfApi(token=token)
        user = api.whoami()["name"]
        whole = name if "/" in name else f"{user}/{name}"
        try:
            exists_public = not api.model_info(whole).private
        except RepositoryNotFoundError:
            exists_public = False
    if private and exists_public:
        raise UserError(f"{OPTION} {whole}: is public already; make it private on the hub, or leave --private out")
    return HubRepo(whole, private, api)


def upload(repo: HubRepo, folder: Path, *, message: str) -> str:
    """Create the repository if need be and commit `folder` to it; returns the commit's URL.

    Raises UserError naming the folder, which stays, if the hub rejects it.
    """
    disable_progress_bars()
    again = f"the export is whole in {folder}; upload it with `hf upload {repo.name} {folder}`"
    with _one_line(repo.name, again):
        # None leaves the choice for a new repository to the settings of its namespace.
        repo.api.create_repo(repo.name, private=repo.private or None, exist_ok=True)
        done = repo.api.upload_folder(
            repo_id=repo.name, folder_path=folder, commit_message=message, delete_patterns=_STALE
        )
    return str(done.commit_url)


@contextmanager
def _one_line(name: str, advice: str) -> Iterator[None]:
    """Context manager: whatever the hub's client raises becomes a one-line UserError without the token."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # from its HTTP client, the hub or its Rust part: they share no base
        said = " ".join(str(error).split()) or type(error).__name__
        token = get_token() if "OIDC" not in type(error).__name__ else None
        said = redact(said.replace(token, HIDDEN) if token else said)
        raise UserError(f"{OPTION} {name}: {constants.ENDPOINT}: {said}; {advice}") from None
