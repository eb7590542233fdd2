"""A stand-in for vLLM: the part of its engine that the benchmark drives; it notes what it was asked to compute."""

from __future__ import annotations

from pathlib import Path

TORCH = """
__version__ = "0"


def set_num_threads(threads):
    pass
"""
ENGINE = """
import json, os, time
from types import SimpleNamespace as Some

from vllm.distributed.kv_transfer.kv_connector.v1.decode_bench_connector import DecodeBenchConnectorScheduler

NOTES = os.path.join(os.path.dirname(__file__), "notes.jsonl")


class SamplingParams:
    def __init__(self, temperature, max_tokens, ignore_eos, detokenize):
        assert temperature == 0.0 and ignore_eos and not detokenize
        self.max_tokens = max_tokens


class Engine:
    def __init__(self, settings):
        assert not settings["enable_prefix_caching"]
        self.connector = DecodeBenchConnectorScheduler()
        self.requests = []
        self.steps = 0
        self.vllm_config = Some(
            scheduler_config=Some(max_num_batched_tokens=64),
            cache_config=Some(block_size=32),
            compilation_config=Some(mode=Some(name="NONE")),
        )

    def add_request(self, request_id, prompt, sampling):
        tokens = len(prompt["prompt_token_ids"])
        request = Some(num_tokens=tokens, left=sampling.max_tokens)
        filled, _ = self.connector.get_num_new_matched_tokens(request, 0)
        request.computed = filled
        self.requests.append(request)

    def has_unfinished_requests(self):
        return bool(self.requests)

    def step(self):
        self.steps += 1
        {fault}
        time.sleep(0.0001)
        seen = []
        for request in self.requests:
            request.computed = max(request.computed + 1, request.num_tokens)
            seen.append(request.computed)
            request.left -= 1
        with open(NOTES, "a") as notes:
            notes.write(json.dumps(seen) + "\\\\n")
        self.requests = [request for request in self.requests if request.left]


class LLM:
    def __init__(self, **settings):
        self.llm_engine = Engine(settings)
"""
CONNECTOR = """
class DecodeBenchConnectorScheduler:
    def get_num_new_matched_tokens(self, request, num_computed_tokens):
        return request.num_tokens - num_computed_tokens - 1, False
"""
VERSION = "Metadata-Version: 2.1\nName: vllm\nVersion: 9.8.7\n"


def install(folder: Path, *, fault: str = "pass") -> Path:
    """Put the packages into ``folder``; ``fault`` is a statement that a step begins with. Returns the notes' file."""
    for name, text in (
        ("torch/__init__.py", TORCH),
        ("vllm/__init__.py", ENGINE.replace("{fault}", fault).replace("\\\\n", "\\n")),
        ("vllm/distributed/kv_transfer/kv_connector/v1/decode_bench_connector.py", CONNECTOR),
        ("vllm-9.8.7.dist-info/METADATA", VERSION),
    ):
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return folder / "vllm" / "notes.jsonl"
