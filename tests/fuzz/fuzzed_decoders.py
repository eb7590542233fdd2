"""Every decoder of what comes from outside, as a function of bytes, with examples of what it reads.

A decoder may raise what its callers expect: an error of ours, or that the peer said no more. Anything else is a fault.
"""

from __future__ import annotations

import asyncio
import io
from collections.abc import Callable, Coroutine, Generator
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import msgspec

from kv_transfer import hello
from kv_transfer.carried import wire as carried
from kv_transfer.cuda_ipc import wire as cuda_ipc
from kv_transfer.shm import wire as shm
from kv_transfer.span import Span
from kv_transfer.tcp import wire as tcp
from kv_transfer.transport import TransportConfig
from kv_transfer.ucx import wire as ucx
from kv_transfer.windows import Part
from protocol.codec import decode, encode
from protocol.error_info import ErrorInfo
from protocol.errors import KVFerryError
from protocol.forks import Fork
from protocol.grammar import Grammar
from protocol.ids import Peer, RequestKey
from protocol.layout import KVLayout
from protocol.messages import (
    Abort,
    Cancel,
    Failed,
    Grant,
    Handover,
    Message,
    Prefill,
    PrefillAddress,
    Refuse,
    Renew,
    Reserve,
    Settle,
    Tokens,
)
from protocol.prompt_logprobs import LogprobTable, PromptLogprobs
from protocol.sampling import SamplingParams, TokenLogprobs
from router.client.results import chunk_of, completion_of, health_of, models_of, tokenization_of
from router.front.parsing import chat_messages, parse_chat, parse_completion, parse_detokenize, parse_tokenize
from router.front.structure import wanted_form
from router.front.tool_calls import CallDelta, CallParser, gathered
from router.front.tools import Toolbox

EXPECTED = (KVFerryError, EOFError)
"""What a decoder may raise; asyncio.IncompleteReadError is an EOFError."""
TICKET = b"t" * 16
PART = Part(7, 0, 1, [(0, 4096), (8192, 4096)], [(1, 5), (3, 6)])
POOL = 1 << 20
SECRET = TransportConfig(secret="s" * 32)


@dataclass(frozen=True)
class Decoder:
    """One decoder.

    Attributes:
        read: what it makes of bytes.
        examples: of what it reads.
    """

    read: Callable[[bytes], object]
    examples: tuple[bytes, ...]


def refused(decoder: Decoder, data: bytes) -> bool:
    """Whether ``decoder`` turns ``data`` away; raises what nobody would expect of it."""
    try:
        decoder.read(data)
    except EXPECTED:
        return True
    return False


# What each connection says, as its reader reads it.


class Stream(io.BytesIO):
    def exactly(self, count: int) -> bytes:
        data = self.read(count)
        if len(data) < count:
            raise EOFError
        return data


class NoLoop(asyncio.AbstractEventLoop):
    """What a reader is told that never has to wait."""

    def get_debug(self) -> bool:
        return False


async def _fed(data: bytes) -> asyncio.StreamReader:
    reader = asyncio.StreamReader(loop=NoLoop())
    reader.feed_data(data)
    reader.feed_eof()
    return reader


def _run(work: Coroutine[Any, Any, object]) -> object:
    """Run what never waits, for all of its data is there."""
    try:
        work.send(None)
    except StopIteration as end:
        return end.value
    finally:
        work.close()
    raise AssertionError("it waits for more than there is")


def _talk(talk: Generator[bytes | int, bytes, object], data: bytes) -> object:
    stream = Stream(data)
    try:
        wanted = next(talk)
        while True:
            wanted = talk.send(stream.exactly(wanted)) if isinstance(wanted, int) else next(talk)
    except StopIteration as end:
        return end.value


def _greeting(scheme: str, wire: ModuleType, config: TransportConfig, side: str) -> Callable[[bytes], object]:
    party = hello.Party(scheme, (wire.LOWEST_VERSION, wire.HIGHEST_VERSION), config)
    return lambda data: _talk(getattr(hello, side)(party), data)


def _tcp_frame(data: bytes) -> object:
    stream = Stream(data)
    head = tcp.parse_head(stream.exactly(tcp.FRAME.size))
    return tcp.parse_tables(head, bytearray(stream.exactly(head.table_bytes)))


def _tcp_answer(data: bytes) -> object:
    return tcp.parse_answer(Stream(data).exactly(tcp.ANSWER.size), PART)


def _shm_frame(data: bytes) -> object:
    stream = Stream(data)
    head = shm.parse_head(stream.exactly(shm.FRAME.size))
    return shm.parse_tables(head, bytearray(stream.exactly(head.table_bytes)), POOL)


def _ucx_part(data: bytes) -> object:
    async def read() -> object:
        reader = await _fed(data)
        head = await ucx.read_head(reader)
        return ucx.parse_tables(head, await reader.readexactly(head.table_bytes))

    return _run(read())


def _ucx_worker(data: bytes) -> object:
    async def read() -> object:
        return await ucx.read_worker(await _fed(data))

    return _run(read())


def _ucx_answer(data: bytes) -> object:
    async def read() -> object:
        return await ucx.read_answer(await _fed(data))

    return _run(read())


def _carried(data: bytes) -> object:
    """All messages that there are, whoever they are for."""

    async def read() -> object:
        reader = await _fed(data)
        said: list[object] = []
        while not reader.at_eof():
            kind, length = await carried.read_head(reader, frozenset(carried.Kind))
            if kind is carried.Kind.PART:
                head = await carried.read_part_head(reader, length)
                said.append(carried.parse_tables(head, await reader.readexactly(head.table_bytes)))
                continue
            body = await reader.readexactly(length)
            if kind is carried.Kind.CHUNK:
                said.append(carried.parse_chunk(body))
            elif kind is carried.Kind.TAKEN:
                said.append(carried.parse_taken(body))
            elif kind is carried.Kind.INTRODUCTION:
                said.append(carried.parse_introduction(body, "1.0"))
            elif kind in carried.VERDICTS:
                said.append(carried.parse_verdict(body))
        return said

    return _run(read())


def _tool_calls(data: bytes) -> None:
    """Text with calls: however it is cut, the same comes of it."""
    text = data.decode(errors="replace")

    def read(pieces: list[str]) -> tuple[str, list[tuple[str, str]]]:
        parser = CallParser(form, ("weather", "now"))
        said: list[str] = []
        deltas: list[CallDelta] = []
        for piece in pieces:
            more, found = parser.push(piece)
            said.append(more)
            deltas += found
        said.append(parser.flush())
        return "".join(said), [(call.name, call.arguments) for call in gathered(deltas)]

    for form in ("hermes", "llama3_json"):
        assert read([text]) == read(list(text)), form


def _chat(data: bytes) -> object:
    request = parse_chat(data)
    toolbox = Toolbox.of(request)
    forms = () if toolbox is None else (*toolbox.forms("hermes"), *toolbox.forms("llama3_json"))
    return chat_messages(request.messages), wanted_form(request), forms


def _completion(data: bytes) -> object:
    request = parse_completion(data)
    return request, wanted_form(request)


def _texts(read: Callable[[str], object]) -> Callable[[bytes], object]:
    return lambda data: read(data.decode(errors="replace"))


ME, KEY = Peer("decode-0", 7), RequestKey("r1", 2)
SAMPLING = SamplingParams(
    temperature=0.5, logit_bias=((4, 1.5),), stop_token_ids=(2,), grammar=Grammar("regex", "a+"), logprobs=2
)
LAYOUT = KVLayout(num_layers=2, kv_heads=2, head_dim=4, block_size=4)
LEG: dict[str, Any] = {"key": KEY, "token_ids": (1, 2, 3), "sampling": SAMPLING}
MESSAGES: tuple[Message, ...] = (
    Cancel(key=KEY, reason="gone"),
    Settle(key=KEY),
    Renew(key=KEY, ttl=1.0),
    Abort(key=KEY, error=ErrorInfo(code="channel_lost", message="x")),
    Failed(key=KEY, error=ErrorInfo(code="no_such_code", message="x", field="y")),
    Refuse(key=KEY, error=ErrorInfo(code="layout_mismatch", message="x")),
    Tokens(key=KEY, start=0, token_ids=(1, 2), logprobs=(TokenLogprobs(-1.0, ((5, -1.0),)),) * 2),
    Prefill(handoff=ME, forks=(Fork(RequestKey("r2", 0), 9),), prompt_logprobs=1, **LEG),
    Reserve(prefill=PrefillAddress(peer=ME, endpoint="tcp://127.0.0.1:1"), prefill_rate=1.0, **LEG),
    Grant(
        key=KEY,
        first_block=0,
        blocks=(4, 5),
        generations=(1, 1),
        layout=LAYOUT,
        addresses=("tcp://127.0.0.1:2",),
        ticket=TICKET,
        ttl=1.0,
    ),
    Handover(key=KEY, num_tokens=3, next_token=4, blocks=1, nbytes=64, ticket=TICKET, tail=0.1),
    PromptLogprobs(key=KEY, start=1, table=LogprobTable(0, bytes(8), bytes(8), b"", b"")),
)
TOOL = {"type": "function", "function": {"name": "weather", "strict": True, "parameters": {"type": "object"}}}
CALL = {"id": "c", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
CHAT = {
    "model": "m",
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "渡船"}]},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "c", "content": "sunny"},
    ],
    "tools": [TOOL],
    "tool_choice": {"type": "function", "function": {"name": "weather"}},
    "logit_bias": {"5": 1.5},
    "stop": ["a", "b"],
    "stream": True,
    "stream_options": {"include_usage": True},
}
TEXT = {
    "model": "m",
    "prompt": [[1, 2], [3]],
    "seed": -1,
    "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}},
}
ANSWER = {
    "choices": [
        {
            "index": 0,
            "delta": {"content": "a", "tool_calls": [{"index": 0, **CALL}]},
            "logprobs": {"content": [{"token": "a", "logprob": -1.0, "bytes": [97], "top_logprobs": []}]},
        }
    ],
    "usage": {"prompt_tokens": 1, "completion_tokens": 2, "total_tokens": 3},
}
_json = msgspec.json.encode


def _proof_examples(side: str) -> tuple[bytes, ...]:
    party = hello.Party("tcp", (tcp.LOWEST_VERSION, tcp.HIGHEST_VERSION), SECRET)
    if side == "admit":
        return (
            party.hello() + hello.PROOF.pack(hello.PROOF_MAGIC, bytes(hello.NONCE_BYTES), bytes(hello.PROOF_BYTES)),
        )
    challenge = hello.CHALLENGE.pack(hello.CHALLENGE_MAGIC, bytes(hello.NONCE_BYTES))
    return (party.hello() + challenge + hello.WELCOME.pack(hello.WELCOME_MAGIC, True, bytes(hello.PROOF_BYTES)),)


def _plain_hello(scheme: str, wire: ModuleType) -> bytes:
    return hello.Party(scheme, (wire.LOWEST_VERSION, wire.HIGHEST_VERSION), TransportConfig()).hello()


_SPANS = [Span(0, 4096, 4096), Span(8192, 0, 64)]
DECODERS: dict[str, Decoder] = {
    "messages": Decoder(decode, tuple(encode(ME, message) for message in MESSAGES)),
    "hello": Decoder(_greeting("tcp", tcp, TransportConfig(), "admit"), (_plain_hello("tcp", tcp),)),
    "hello_answer": Decoder(_greeting("ucx", ucx, TransportConfig(), "greet"), (_plain_hello("ucx", ucx),)),
    "proof": Decoder(_greeting("tcp", tcp, SECRET, "admit"), _proof_examples("admit")),
    "proof_answer": Decoder(_greeting("tcp", tcp, SECRET, "greet"), _proof_examples("greet")),
    "tcp_frame": Decoder(_tcp_frame, (tcp.pack_frame(TICKET, PART), tcp.pack_frame(TICKET, PART, summed=True))),
    "tcp_answer": Decoder(
        _tcp_answer, (tcp.pack_answer(tcp.parse_head(tcp.pack_frame(TICKET, PART)[: tcp.FRAME.size]), tcp.Verdict(1)),)
    ),
    "shm_offer": Decoder(lambda data: shm.parse_offer(Stream(data).exactly(shm.OFFER.size)), (shm.pack_offer(POOL),)),
    "shm_welcome": Decoder(
        lambda data: shm.parse_welcome(Stream(data).exactly(shm.WELCOME.size)),
        (shm.pack_welcome(None), shm.pack_welcome("full")),
    ),
    "shm_frame": Decoder(_shm_frame, (shm.pack_frame(TICKET, 7, 1, _SPANS, PART.generations),)),
    "shm_answer": Decoder(
        lambda data: shm.parse_answer(Stream(data).exactly(shm.ANSWER.size)), (shm.pack_answer(7, shm.Verdict(1), "x"),)
    ),
    "cuda_ipc_offer": Decoder(
        lambda data: cuda_ipc.parse_offer(Stream(data).exactly(cuda_ipc.OFFER.size)),
        (cuda_ipc.Offer(POOL, 2 * POOL, 0, 1 << 40, bytes(16), bytes(64)).pack(),),
    ),
    "ucx_worker": Decoder(_ucx_worker, (ucx.pack_worker(ucx.Worker((1, 20), b"address")),)),
    "ucx_part": Decoder(_ucx_part, (ucx.pack_part(TICKET, PART), ucx.pack_part(TICKET, PART, summed=True))),
    "ucx_answer": Decoder(_ucx_answer, (ucx.pack_answer(PART, ucx.Verdict(1), "reason"),)),
    "carried": Decoder(
        _carried,
        (
            carried.pack(carried.Kind.PART, carried.pack_part(TICKET, PART)),
            carried.pack_introduction("1.0", b"blob") + carried.pack(carried.Kind.READY) + carried.pack_taken(1),
            carried.pack_chunk(carried.Chunk(1, 64, bytes(8))) + carried.pack(carried.Kind.WITHDRAW),
            carried.pack_verdict(carried.Kind.BROKEN, 7, 0, "reason"),
        ),
    ),
    "chat": Decoder(_chat, (_json(CHAT),)),
    "completion": Decoder(_completion, (_json(TEXT),)),
    "tokenize": Decoder(parse_tokenize, (_json({"prompt": "a"}), _json({"messages": CHAT["messages"]}))),
    "detokenize": Decoder(parse_detokenize, (_json({"tokens": [1, 2], "model": "m"}),)),
    "client_chunk": Decoder(_texts(chunk_of), (_json(ANSWER),)),
    "client_answer": Decoder(lambda data: completion_of(data, "r"), (_json(ANSWER),)),
    "client_models": Decoder(models_of, (_json({"data": [{"id": "m"}]}),)),
    "client_tokens": Decoder(tokenization_of, (_json({"count": 1, "tokens": [1], "max_model_len": 9}),)),
    "client_health": Decoder(health_of, (_json({"ready": True, "prefill_workers": 1, "decode_workers": 1}),)),
    "tool_calls": Decoder(
        _tool_calls,
        (
            b'so <tool_call>[{"name": "now"}, {"name": "weather", "arguments": {"a": [1, "}"]}}]</tool_call> \xe2\x82',
            b'<|python_tag|>{"name": "now", "parameters": {}}; {"name": "weather", "parameters": {"a": "\\""}}',
        ),
    ),
}
