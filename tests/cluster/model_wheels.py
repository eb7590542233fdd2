"""Makes wheels that carry a GGUF file, as the known models come in."""

from __future__ import annotations

import hashlib
import zipfile
from pathlib import Path

import gguf
import numpy as np

from cluster.model_source import KnownModel

HIDDEN, HEADS, KV_HEADS, FEED_FORWARD = 32, 2, 1, 64
TINY_TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}"


def write_tiny_gguf(path: Path) -> None:
    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *"abcdefgh", "ab"]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_context_length(64)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(FEED_FORWARD)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(HIDDEN // HEADS)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([gguf.TokenType.CONTROL] * 3 + [gguf.TokenType.NORMAL] * (len(tokens) - 3))
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(1)
    # not the end of a chat turn: the conversion has to add that itself
    writer.add_eos_token_id(0)
    writer.add_unk_token_id(0)
    writer.add_chat_template(TINY_TEMPLATE)
    rng = np.random.default_rng(0)
    kv_width = HIDDEN // HEADS * KV_HEADS
    shapes = {
        "token_embd": (len(tokens), HIDDEN),
        "output_norm": (HIDDEN,),
        "blk.0.attn_norm": (HIDDEN,),
        "blk.0.ffn_norm": (HIDDEN,),
        "blk.0.attn_q": (HIDDEN, HIDDEN),
        "blk.0.attn_k": (kv_width, HIDDEN),
        "blk.0.attn_v": (kv_width, HIDDEN),
        "blk.0.attn_output": (HIDDEN, HIDDEN),
        "blk.0.ffn_gate": (FEED_FORWARD, HIDDEN),
        "blk.0.ffn_up": (FEED_FORWARD, HIDDEN),
        "blk.0.ffn_down": (HIDDEN, FEED_FORWARD),
    }
    for name, shape in shapes.items():
        writer.add_tensor(f"{name}.weight", rng.standard_normal(shape).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_wheel(path: Path, member: str, content: bytes) -> None:
    name, version = path.name.split("-")[:2]
    info = f"{name}-{version}.dist-info"
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr(member, content)
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")


def known_model(folder: Path, name: str, content: bytes) -> KnownModel:
    model = KnownModel(
        name=name,
        title=name,
        licence="Apache-2.0",
        requirement=f"kvferry-test-{name}==1.0",
        wheel=f"kvferry_test_{name}-1.0-py3-none-any.whl",
        member=f"kvferry_test_{name}/{name}.gguf",
        sha256=hashlib.sha256(content).hexdigest(),
        size=len(content),
    )
    write_wheel(folder / model.wheel, model.member, content)
    return model
