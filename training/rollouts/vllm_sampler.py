"""The sampler that asks vLLM servers, which the user or `python -m launch.rollouts` starts.

Rank 0 sends the weights to every server, in a file or by broadcast, and the ranks share the servers. Requests are
salted with the version of the proven weights, so that no prefix cached with others is used; answers carry the label of
what was sent. A server that fails is waited for, sent the same weights, proven, and asked again with the same seeds.
"""

import secrets
import socket
import time
from collections.abc import Callable, Mapping, Sequence, Sized
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

import httpx
import numpy as np
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from transformers import PreTrainedModel

from config.errors import UserError, one_line
from config.printable import tell
from config.schema import GrpoSection
from data.corpora.sampler import splitmix
from modeling.adapter import NAME, base_name, layers_with_factors
from modeling.expert_parallel import expert_count
from tracking.file_lock import exclusive_lock
from training.distributed import World
from training.rollouts.transformers_sampler import PERSON, Answer, Request, TransformersSampler, Weights, digest

T = TypeVar("T")
_FILE = "weights.safetensors"  # for grpo.transfer = file; the servers have to see it under the same path
_CLIENT = httpx.Client(limits=httpx.Limits(max_connections=None), trust_env=False)  # grpo.at_once limits; no proxies
_SAMPLING: dict[str, Any] = {"top_p": 1.0, "top_k": 0, "min_p": 0.0, "detokenize": False, "ignore_eos": True}


class ServerError(RuntimeError):
    """A server does not answer, or gives a wrong answer; it is asked again."""


class VllmSampler(TransformersSampler):
    """Servers, of which this rank asks one. What they are sent are the weights of the copy in this process."""

    def __init__(self, model: PreTrainedModel, section: GrpoSection, world: World, *, ends: Sequence[int]) -> None:
        """Raises UserError where a server cannot be reached or cannot take weights."""
        if expert_count(model.config):  # vLLM keeps them in tensors of its own, which have no names of the trainer's
            raise UserError("grpo.engine = vllm: no mixture of experts can be proven there; set it to transformers")
        tied = model.get_input_embeddings(), model.get_output_embeddings()
        if model.config.get_text_config().tie_word_embeddings and any("peft" in type(end).__module__ for end in tied):
            raise UserError("grpo.engine = vllm: a tied embedding and head are one weight there; adapt neither of them")
        super().__init__(model, section, world, ends=ends)
        self._urls = [url.rstrip("/") for url in section.urls]
        self._own = self._urls[world.rank % len(self._urls)]
        self._label, self._proven = "", dict[str, str]()
        _CLIENT.timeout = httpx.Timeout(section.server_seconds)  # a longer request counts as hung
        self._groups: dict[str, Any] = {}  # process groups of this rank and one server, for broadcasts
        found = world.on_main(lambda: {self._patiently(url, self._initialise) for url in self._urls})
        self.identity = ", ".join(sorted(found))

    def receive(self, weights: Weights) -> None:
        """Send every server the weights. A collective."""
        super().receive(weights)
        self._label = self._world.from_main(secrets.token_hex(16))
        joined = self._world.gather_objects(list(self._groups))
        for url in set[str]().union(*joined[1:]):  # these servers have joined the rank that restored them (`_restore`)
            self._groups.pop(url, None)

        def send() -> None:
            self.folder.mkdir(exist_ok=True)
            if self._section.transfer == "file":
                save_file({name: value.cpu() for name, value in self._whole(tied=False).items()}, self.folder / _FILE)
            for url in self._urls:
                self._patiently(url, self._send, self._initialise)

        self._world.on_main(send)

    def _send(self, url: str) -> None:
        """Send one server the weights, between two requests."""
        _call(url, "/collective_rpc", {"method": "end_update"})
        _call(url, "/pause?mode=wait", {})
        _call(url, "/start_weight_update", {})
        if self._section.transfer == "file":
            _call(url, "/update_weights", {"update_info": {"path": str(Path(self.folder, _FILE).resolve())}})
        else:
            self._broadcast(url)
        _call(url, "/finish_weight_update", {"weight_version": self._label})
        _call(url, "/collective_rpc", {"method": "repack_tied_head"})
        _call(url, "/reset_prefix_cache", {})
        _call(url, "/resume", {})

    def _broadcast(self, url: str) -> None:
        if url not in self._groups:
            self._initialise(url)
        own = self._whole(tied=False)
        tensors = [(name, str(value.dtype).removeprefix("torch."), value.shape) for name, value in own.items()]
        with ThreadPoolExecutor(1) as pool:
            asked = pool.submit(_call, url, "/update_weights", {"update_info": {"tensors": tensors}})
            try:
                for value in own.values():
                    self._groups[url].broadcast(value, 0).wait()
            except RuntimeError as error:
                del self._groups[url]
                raise ServerError(f"the broadcast of weights broke off ({one_line(error)})") from None
            asked.result()

    def differing(self, weights: Weights, expected: Mapping[str, str]) -> list[str]:
        """Tensors in which any server computes with other weights, by their digests. A collective."""
        wrong: list[str] = []
        if any(".lora_" in name for name in expected):  # the copy has the trainer's factors, the server merged weights
            wrong = super().differing(weights, expected)
            expected = {name: digest(value) for name, value in self._whole().items()}
        self._proven = dict(expected)
        found = self._world.on_main(lambda: [self._patiently(url, _hashes, self._send_again) for url in self._urls])
        return wrong + [name for name, known in expected.items() if any(own.get(name) != known for own in found)]

    @torch.no_grad()
    def _whole(self, *, tied: bool = True) -> dict[str, torch.Tensor]:
        """The copy's weights by the base model's names, an adapter merged. tied: a tied weight under all its names."""
        found: dict[str, torch.Tensor] = {}
        adapted = layers_with_factors(self.model)
        for name, value in self.model.named_parameters(remove_duplicate=not tied):
            own = base_name(name)
            if own in adapted:
                value = (value.float() + adapted[own].get_delta_weight(NAME).float()).to(value.dtype)
            if ".lora_" not in name:
                found[own] = value.detach().contiguous()
        return found

    def sample(self, requests: Sequence[Request], *, version: str) -> list[Answer]:
        """Answers in the order of the requests. Raises UserError where the server stays away."""
        answers: list[Answer] = []

        def ask(url: str) -> list[Answer]:
            with ThreadPoolExecutor(self._section.at_once) as pool:
                answers.extend(pool.map(lambda request: self._answer(request, version), requests[len(answers) :]))
            return answers

        return self._patiently(self._own, ask, self._restore, answers)

    def _patiently(
        self, url: str, act: Callable[[str], T], recover: Callable[[str], object] | None = None, done: Sized = ()
    ) -> T:
        """The result of `act`, repeated after `recover` until the server answers. Raises UserError when time is up; it
        begins again where `done` has grown since the last failure."""
        until, seconds, before = 0.0, self._section.server_seconds, 0
        while True:
            try:
                if until and recover is not None:
                    recover(url)
                return act(url)
            except ServerError as error:
                if not until or len(done) > before:
                    until, before = time.monotonic() + seconds, len(done)
                    tell(f"waiting for {url}: {error}", f"rank {self._world.rank}")
                elif time.monotonic() > until:
                    raise UserError(f"grpo.urls: {url}: {error}; grpo.server_seconds = {seconds:g} are over") from None
                time.sleep(1.0)

    def _initialise(self, url: str) -> str:
        """Prepare a server that has just started to receive weights; returns its version."""
        version = f"vllm {_call(url, '/version')['version']}"
        if self._section.transfer == "file":
            _call(url, "/init_weight_transfer_engine", {"init_info": {}})
            return version
        at, limit = urlsplit(url), timedelta(seconds=self._section.server_seconds)
        try:
            with socket.create_connection((at.hostname, at.port or (443 if at.scheme == "https" else 80))) as route:
                host = route.getsockname()[0]  # of the interface that the server can reach
            store = dist.TCPStore(host, 0, 2, is_master=True, timeout=limit, wait_for_workers=False)
            info = {"host": host, "port": store.port, "seconds": self._section.server_seconds}
            with ThreadPoolExecutor(1) as pool:
                joined = pool.submit(_call, url, "/init_weight_transfer_engine", {"init_info": info})
                kind = "ProcessGroupNCCL" if self._world.device.type == "cuda" else "ProcessGroupGloo"
                self._groups[url] = getattr(dist, kind)(store, 0, 2, limit)
                joined.result()
                return version
        except (OSError, RuntimeError) as error:
            raise ServerError(f"it did not join the broadcast of weights ({one_line(error)})") from None

    def _send_again(self, url: str) -> None:
        self._initialise(url)
        self._send(url)

    def _restore(self, url: str) -> None:
        """Send a server the proven weights, one rank at a time, and prove them again."""
        with exclusive_lock(self.folder / "weights.lock", wait_s=self._section.server_seconds):
            self._send_again(url)
            if self._proven.items() - _hashes(url).items():
                raise ServerError("it computes with other weights than those that were proven")

    def _answer(self, request: Request, version: str) -> Answer:
        section, seed = self._section, int(splitmix(request.key, 1, person=PERSON)[0] >> np.uint64(1))
        sampling = {**_SAMPLING, "max_tokens": section.max_new_tokens, "temperature": section.temperature, "seed": seed}
        sampling |= {"stop_token_ids": self._ends, "logprobs": 0}  # 0: of the sampled token alone
        asked = {"token_ids": request.prompt.tolist(), "sampling_params": sampling, "cache_salt": version}
        (choice,) = _call(self._own, "/inference/v1/generate", asked)["choices"]
        labels = {span["version"] for span in choice.get("weight_versions") or [{"version": None}]}
        scores = [token["logprob"] for token in (choice["logprobs"] or {}).get("content", [])]
        if labels != {self._label}:
            raise ServerError(f"it answered with weights labelled {labels}, not those that were proven")
        if not 0 < len(choice["token_ids"]) == len(scores) <= section.max_new_tokens:
            raise ServerError(f"it answered {len(choice['token_ids'])} tokens and {len(scores)} log-probabilities")
        log_probs = np.array([score if score > -9999.0 else np.nan for score in scores], np.float32)  # vLLM's -inf, nan
        return Answer(np.array(choice["token_ids"], np.int64), log_probs, choice["finish_reason"] == "stop")

    def close(self) -> None:
        """Remove the file of weights. The servers belong to the user."""
        if self._world.is_main and self._label:
            Path(self.folder, _FILE).unlink(missing_ok=True)


def _hashes(url: str) -> dict[str, str]:
    """Digests of the weights that the server's only worker computes with."""
    results = _call(url, "/collective_rpc", {"method": "effective_hashes"})["results"]
    if len(results) != 1:
        raise UserError(f"grpo.urls: {url}: has {len(results)} workers; start it without parallelism inside")
    found: dict[str, str] = results[0]
    return found


def _call(url: str, path: str, body: dict[str, Any] | None = None) -> Any:
    """The answer to a GET, or with a body to a POST. Raises ServerError; UserError for a request that is refused."""
    try:
        answer = _CLIENT.request("GET" if body is None else "POST", url + path, json=body)
        if answer.is_success:
            return answer.json() if answer.content else None
    except (httpx.HTTPError, ValueError) as error:
        raise ServerError(f"{path}: {error or type(error).__name__}") from None
    said = f"{answer.status_code} {' '.join(answer.text.split())[:300]}"
    if answer.is_client_error:
        raise UserError(f"grpo.urls: {url}{path}: {said}; start it by launch.rollouts")
    raise ServerError(f"{path}: {said}")
