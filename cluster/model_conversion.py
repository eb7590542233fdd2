"""Turn a GGUF file into a Hugging Face directory: ``python -m cluster.model_conversion FILE.gguf DIRECTORY``.

It runs in a process of its own, so that transformers' hundreds of megabytes, its progress bars and its warnings do
not stay behind in the caller. Needs neither a network nor a GPU. Each finished step is one line on standard output.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from cluster.model_source import Progress, run_lines
from protocol.errors import CheckpointUnavailable

CONVERSION = 1
"""Counts the ways of converting; a directory made by another one is made anew."""

END_OF_TURN = "<|im_end|>"
_STEPS = ("tokenizer read", "weights read", "tokenizer written", "weights written")
_GGUF_ONLY = (
    "quantization_config",
    "_name_or_path",
    "_model_name_or_path",
    "transformers_version",
    "dtype",
    "architectures",
)


def convert_gguf(source: Path, directory: Path, progress: Progress) -> None:
    """Convert ``source`` into ``directory`` (made if it is not there) in a child process.

    Raises:
        CheckpointUnavailable: the conversion failed; carries the child's last lines.
    """
    progress("convert", 0, len(_STEPS))
    # -P: a folder called `cluster` where the user happens to stand must not be taken for this package
    command = [sys.executable, "-P", "-m", __name__, str(source), str(directory)]
    quiet = {"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1", "TRANSFORMERS_VERBOSITY": "error"}

    def on_line(line: str) -> None:
        if line in _STEPS:
            progress("convert", _STEPS.index(line) + 1, len(_STEPS))

    run_lines(command, f"cannot convert {source.name}", on_line, CUDA_VISIBLE_DEVICES="", **quiet)


def _convert(source: Path, directory: Path) -> Iterator[str]:
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    yield "tokenizer read"
    model = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype=torch.float32)
    yield "weights read"

    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.model_max_length = model.config.max_position_embeddings
    tokenizer.save_pretrained(directory)
    yield "tokenizer written"

    _set_stop_token(model, tokenizer)
    fields = {key: value for key, value in model.config.to_dict().items() if key not in _GGUF_ONLY}
    config = type(model.config)(**fields, dtype="bfloat16", architectures=[type(model).__name__])
    config.save_pretrained(directory)
    model.generation_config.save_pretrained(directory)
    tied = set(model._tied_weights_keys or ()) if config.tie_word_embeddings else set()
    tensors = {
        name: tensor.to(torch.bfloat16).contiguous() for name, tensor in model.state_dict().items() if name not in tied
    }
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    yield "weights written"


def _set_stop_token(model: Any, tokenizer: Any) -> None:
    """Make the end of a chat turn end generation, whatever the file's own end-of-sequence token is."""
    stops = {tokenizer.eos_token_id, model.config.eos_token_id}
    if tokenizer.chat_template and END_OF_TURN in tokenizer.chat_template:
        end_of_turn = tokenizer.convert_tokens_to_ids(END_OF_TURN)
        if end_of_turn is None or end_of_turn == tokenizer.unk_token_id:
            raise CheckpointUnavailable(f"the chat template uses {END_OF_TURN}, which the vocabulary lacks")
        stops.add(end_of_turn)
    stop_ids = sorted(stop for stop in stops if stop is not None)
    eos = stop_ids[0] if len(stop_ids) == 1 else stop_ids
    model.config.eos_token_id = eos
    model.generation_config.eos_token_id = eos


def main() -> None:
    """Convert ``argv[1]`` into ``argv[2]``, one line per step."""
    for step in _convert(Path(sys.argv[1]), Path(sys.argv[2])):
        print(step, flush=True)


if __name__ == "__main__":
    main()
