"""The client of vLLM servers, against a server that only waits before it answers."""

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM, PreTrainedModel

from config.errors import UserError
from config.machine.processes import free_port
from config.schema import AdapterSection, GrpoSection
from modeling.adapter import add_adapter
from training.distributed import World
from training.rollouts import vllm_sampler
from training.rollouts.vllm_sampler import ServerError, VllmSampler

AT_ONCE = 128


class Server(ThreadingHTTPServer):
    """Answers a path `/N` after N seconds, `/all` once AT_ONCE requests are open, and others at once."""

    request_queue_size, daemon_threads = AT_ONCE, True
    all = threading.Barrier(AT_ONCE)


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        if self.path == "/all":
            self.server.all.wait(5.0)
        elif self.path[1:].isdigit():
            time.sleep(int(self.path[1:]))
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b'{"version": "1", "results": [{}, {}]}')

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.do_GET()

    def log_message(self, *given: object) -> None:
        pass


@pytest.fixture
def url() -> Iterator[str]:
    server = Server(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{free_port()}", rank=0, world_size=1)
    yield f"http://127.0.0.1:{server.server_port}"
    dist.destroy_process_group()
    server.shutdown()
    server.server_close()


SHAPE = {"vocab_size": 8, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}


def _sampler(url: str, seconds: float, model: PreTrainedModel | None = None) -> VllmSampler:
    model = model or LlamaForCausalLM(LlamaConfig(**SHAPE))
    section = replace(GrpoSection(), engine="vllm", urls=(url,), server_seconds=seconds, at_once=AT_ONCE)
    return VllmSampler(model, section, World(0, 1, 0, torch.device("cpu")), ends=[2])


def test_as_many_requests_are_open_as_are_asked_at_once(url: str) -> None:
    _sampler(url, 30.0)
    with ThreadPoolExecutor(AT_ONCE) as pool:
        assert len(list(pool.map(lambda _: vllm_sampler._call(url, "/all"), range(AT_ONCE)))) == AT_ONCE


def test_a_request_may_take_the_seconds_of_the_config(url: str) -> None:
    _sampler(url, 1.0)
    with pytest.raises(ServerError, match="timed out"):
        vllm_sampler._call(url, "/2")
    _sampler(url, 30.0)
    assert vllm_sampler._call(url, "/2")


def test_a_mixture_of_experts_is_refused_before_a_server_is_asked(url: str) -> None:
    model = MixtralForCausalLM(MixtralConfig(**SHAPE, num_key_value_heads=1, num_local_experts=2))
    with pytest.raises(UserError, match=r"^grpo\.engine = vllm: no mixture of experts"):
        _sampler("http://127.0.0.1:1", 1.0, model)


@pytest.mark.parametrize("given", [{"target_modules": ("lm_head",)}, {"modules_to_save": ("embed_tokens",)}])
def test_an_adapter_on_a_tied_weight_is_refused_before_a_server_is_asked(given: dict[str, Any]) -> None:
    model = LlamaForCausalLM(LlamaConfig(**SHAPE, tie_word_embeddings=True))
    with pytest.raises(UserError, match=r"^grpo\.engine = vllm: a tied embedding and head are one weight there"):
        _sampler("http://127.0.0.1:1", 1.0, add_adapter(model, AdapterSection(kind="lora", r=2, **given), seed=0))


def test_a_server_of_two_workers_is_refused_in_one_line(url: str) -> None:
    with pytest.raises(UserError, match=rf"^grpo\.urls: {url}: has 2 workers; start it without parallelism inside"):
        _sampler(url, 5.0).differing([], {})


def test_a_server_is_waited_for_from_its_last_answer_on(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that dies again after good answers has its time anew, one that gives none has not."""
    sampler, restored = _sampler(url, 0.5), list[str]()

    def answer(request: int, version: str) -> int:
        if request > len(restored):
            raise ServerError("it died")
        return request

    monkeypatch.setattr(sampler, "_answer", answer)
    monkeypatch.setattr(sampler, "_restore", restored.append)
    requests: Any = [0, 1, 2]
    assert sampler.sample(requests, version="") == [0, 1, 2] and restored == [url, url]
    requests = [9]
    with pytest.raises(UserError, match=r"it died; grpo\.server_seconds = 0\.5 are over$"):
        sampler.sample(requests, version="")
