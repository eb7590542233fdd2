"""A front on a real port, before a service that plays a script."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import tokenizers
import uvicorn
from tokenizers import decoders, models, pre_tokenizers, trainers

from protocol.sampling import SamplingParams
from router.front.app import Front
from router.front.config import FrontConfig
from router.front.generation import Generation, GenerationReport, Output, Outputs, ServiceHealth
from router.tokenizer import Tokenizer

MODEL = "acme/tiny"
PATIENCE = 10.0
CONTEXT = 128
TEXT = {"model": MODEL, "prompt": "the ferry"}
CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "the ferry"}]}
REPLY = "the blocks arrive 渡船 😀"
TIMED = {"x-kvferry-timings": "1"}
SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
END_OF_TEXT, IM_START, IM_END = 0, 1, 2
CHAT_TEMPLATE = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful assistant<|im_end|>\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LINES = [
    "The ferry carries the blocks across the water, and the blocks arrive in order.",
    "Größe, naïve, Ångström: übermäßig schöne Wörter über die Fähre.",
    "渡船把缓存块送到对岸。渡船又回来了。",
    "😀😃😄 👩‍👩‍👧 emoji travel too 😀😀",
]
REPORT = GenerationReport(
    request_id="r1",
    attempts=1,
    cached_tokens=3,
    queue_s=0.001,
    prefill_s=0.002,
    handoff_s=0.003,
    ttft_s=0.004,
    decode_s=0.005,
    kv_blocks=6,
    kv_bytes=7,
    ship_s=0.008,
    transport="tcp",
    prefill_worker="prefill-0",
    decode_worker="decode-0",
)


def write_checkpoint(
    path: Path, *, chat_template: str | None = CHAT_TEMPLATE, vocab_size: int | None = None, **config: Any
) -> Path:
    """A byte-level BPE tokenizer and the small files beside it."""
    path.mkdir(parents=True, exist_ok=True)
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        LINES,
        trainers.BpeTrainer(
            vocab_size=400,
            special_tokens=SPECIAL_TOKENS,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    tokenizer.save(str(path / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": [END_OF_TEXT]}))
    size = vocab_size or tokenizer.get_vocab_size()
    (path / "config.json").write_text(
        json.dumps({"vocab_size": size, "max_position_embeddings": 256, "eos_token_id": 7, **config})
    )
    if chat_template is not None:
        (path / "chat_template.jinja").write_text(chat_template)
    return path


Script = Callable[[Generation], AsyncIterator[Output]]


class ScriptedService:
    """A generation service that plays ``script`` and remembers what became of each generation."""

    def __init__(self, script: Script, *, max_model_len: int | None = CONTEXT, ready: bool = True) -> None:
        self.model = MODEL
        self.max_model_len = max_model_len
        self.generations: list[Generation] = []
        self.groups: list[list[Generation]] = []
        self._script = script
        self._ready = ready
        self._changed = threading.Condition()
        self._counts = {"opened": 0, "finished": 0, "cancelled": 0}

    async def generate(self, generation: Generation) -> Outputs:
        self.generations.append(generation)
        self._count("opened")
        outcome = "cancelled"
        try:
            async for output in self._script(generation):
                if (yield output) is not None:
                    break
            outcome = "finished"
        finally:
            self._count(outcome)

    @contextmanager
    def together(self, generations: Sequence[Generation]) -> Iterator[tuple[Outputs, ...]]:
        self.groups.append([*generations])
        yield tuple(self.generate(generation) for generation in generations)

    def _count(self, name: str) -> None:
        with self._changed:
            self._counts[name] += 1
            self._changed.notify_all()

    def wait(self, name: str, count: int = 1) -> None:
        """Block until ``count`` generations were opened, finished or cancelled."""
        with self._changed:
            assert self._changed.wait_for(lambda: self._counts[name] >= count, PATIENCE), self._counts

    def counts(self) -> dict[str, int]:
        with self._changed:
            return dict(self._counts)

    def health(self) -> ServiceHealth:
        return ServiceHealth(self._ready, int(self._ready), int(self._ready), "scripted")

    def cluster(self) -> dict[str, Any]:
        return {"workers": [{"name": "prefill-0", "role": "prefill"}]}

    def explain(self, name: str) -> list[dict[str, Any]]:
        known = [generation for generation in self.generations if generation.name == name]
        return [{"request": "r1", "prefill": "prefill-0", "prefill_candidates": []} for _ in known]

    def metrics(self) -> bytes:
        return b"# HELP kvferry_worker_up Whether a worker is live\nkvferry_worker_up 1\n"


def saying(*groups: tuple[int, ...], reason: str = "length", report: GenerationReport | None = REPORT) -> Script:
    """A script that sends these groups of token ids, the last with a finish reason."""

    async def script(_: Generation) -> AsyncIterator[Output]:
        for group in groups[:-1]:
            yield Output(group)
        yield Output(groups[-1], reason, report)  # type: ignore[arg-type]

    return script


def one_by_one(token_ids: tuple[int, ...], reason: str = "length") -> Script:
    """A script that sends one token at a time."""
    return saying(*((token_id,) for token_id in token_ids), reason=reason)


def hanging(*groups: tuple[int, ...]) -> Script:
    """A script that sends these groups and then waits until it is closed."""

    async def script(_: Generation) -> AsyncIterator[Output]:
        for group in groups:
            yield Output(group)
        await asyncio.Event().wait()

    return script


def failing(error: Exception, *groups: tuple[int, ...]) -> Script:
    """A script that sends these groups and then raises."""

    async def script(_: Generation) -> AsyncIterator[Output]:
        for group in groups:
            yield Output(group)
        raise error

    return script


class ClosingServer(uvicorn.Server):
    """Closes what it serves, as the router does."""

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await super().shutdown(sockets)
        if isinstance(self.config.app, Front):
            await self.config.app.close()


@contextmanager
def serving(app: Any) -> Iterator[str]:
    """Serve an ASGI application on a free port, in a thread; gives its URL."""
    listener = socket.create_server(("127.0.0.1", 0))
    server = ClosingServer(
        uvicorn.Config(
            app,
            loop="uvloop",
            http="httptools",
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
        )
    )
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, name="front")
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(PATIENCE)
        listener.close()
        assert not thread.is_alive()


@contextmanager
def serving_front(service: ScriptedService, tokenizer: Tokenizer, config: FrontConfig | None = None) -> Iterator[str]:
    with serving(Front(service, tokenizer, config)) as url:
        yield url


def ask(
    tokenizer: Tokenizer, service: ScriptedService, path: str, body: dict[str, Any], **headers: str
) -> httpx.Response:
    with serving_front(service, tokenizer) as url, httpx.Client(base_url=url, trust_env=False) as http:
        return http.post(path, json=body, headers=headers)


def events_of(response: httpx.Response) -> list[Any]:
    """The JSON of each event, the end mark as it is."""
    assert response.headers["content-type"].startswith("text/event-stream")
    blocks = response.text.split("\n\n")
    assert blocks.pop() == ""
    assert all(block.startswith("data: ") for block in blocks)
    return [block[6:] if block == "data: [DONE]" else json.loads(block[6:]) for block in blocks]


def refused(response: httpx.Response, status: int, code: str, param: str | None) -> str:
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    assert (error["code"], error["param"]) == (code, param)
    assert len(response.headers["x-request-id"]) == 32
    return str(error["message"])


def taken(http: httpx.Client, service: ScriptedService, path: str, body: dict[str, Any]) -> SamplingParams:
    response = http.post(path, json=body)
    assert response.status_code == 200, response.text
    return service.generations[-1].sampling
