from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from front_stage import CHAT_TEMPLATE, END_OF_TEXT, IM_END, LINES, write_checkpoint

from protocol.errors import CheckpointUnavailable, InvalidRequest, ModelError
from protocol.sampling import MAX_STOP_TOKEN_IDS
from router.tokenizer import Tokenizer

CHATS = [
    [{"role": "user", "content": "Where is the ferry?"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "渡船 😀 <b>&amp;</b>\n\n  x "}],
    [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b <|im_end|> c"},
        {"role": "user", "content": "über", "name": "Zoë"},
    ],
]
TEMPLATES = {
    "smollm2": CHAT_TEMPLATE,
    "blocks": """
{%- set ns = namespace(count=0) %}
{% for message in messages %}
    {% if message.role == 'system' %}
        {% continue %}
    {% endif %}
    {%- set ns.count = ns.count + 1 %}
    <|im_start|>{{ message.role | upper }} {{ ns.count }} {{ message.get('name', '-') }}
{{ message.content | trim }}{{ eos_token }}
{% endfor %}
{% if add_generation_prompt %}
<|im_start|>assistant
{% endif %}
""",
    "tojson": "{{ bos_token }}{% for m in messages %}{{ m | tojson }}{{ m | tojson(indent=2) }}{% endfor %}",
    "generation": "{% for m in messages %}{% generation %}{{ m.content }}!{% endgeneration %}{% endfor %}",
    "clock": "{{ strftime_now('%Y') }}{% for m in messages %}{{ m.content }}{% break %}{% endfor %}",
    "absent": "{{ pad_token }}{{ unk_token is defined }}{{ tools is none }}{% if documents %}x{% endif %}",
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_chats_give_the_token_ids_of_transformers(name: str, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    path = write_checkpoint(tmp_path / name, chat_template=TEMPLATES[name])
    reference = AutoTokenizer.from_pretrained(path)
    tokenizer = Tokenizer(path)
    for chat in CHATS:
        expected = reference.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
        assert tokenizer.encode_chat(chat) == tuple(expected)


def test_saved_checkpoint_of_transformers_gives_the_same_ids(tiny_llama_dir: Path) -> None:
    from transformers import AutoTokenizer

    reference = AutoTokenizer.from_pretrained(tiny_llama_dir)
    tokenizer = Tokenizer(tiny_llama_dir)
    assert tokenizer.eos_token_ids == (reference.eos_token_id,)
    for line in LINES:
        assert tokenizer.encode(line) == tuple(reference(line)["input_ids"])
        assert tokenizer.decode(tokenizer.encode(line)) == line
    for chat in CHATS[:1]:
        expected = reference.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
        assert tokenizer.encode_chat(chat) == tuple(expected)


def test_facts_of_the_checkpoint(bpe_tokenizer: Tokenizer) -> None:
    # The generation config goes before the model config, whose 7 is left out; the tokenizer's own is always in.
    assert bpe_tokenizer.eos_token_ids == (IM_END, END_OF_TEXT)
    assert bpe_tokenizer.max_model_len == 256
    assert bpe_tokenizer.context_free
    assert bpe_tokenizer.is_silent(IM_END)
    assert bpe_tokenizer.is_silent(10**6)
    assert not bpe_tokenizer.is_silent(5)


def test_eos_of_the_model_config_where_there_is_no_generation_config(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path, vocab_size=512)
    (path / "generation_config.json").unlink()
    assert Tokenizer(path).eos_token_ids == (IM_END, 7)
    assert Tokenizer(path).vocab_size == 512


def test_eos_ids_are_valid_and_bounded(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path)
    listed = [10**9, -1, "x", None, *range(3, 300)]
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": listed}))
    assert Tokenizer(path).eos_token_ids == (IM_END, *range(3, 2 + MAX_STOP_TOKEN_IDS))


def test_special_tokens_as_objects_and_named_templates(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path, chat_template=None)
    templates = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "{{ eos_token }}!"}]
    settings = {"eos_token": {"content": "<|im_end|>", "special": True}, "chat_template": templates}
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    tokenizer = Tokenizer(path)
    assert tokenizer.encode_chat(CHATS[0]) == (IM_END, *tokenizer.encode("!"))


def test_truncation_and_padding_in_the_file_are_not_obeyed(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path)
    content = json.loads((path / "tokenizer.json").read_text())
    content["truncation"] = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    (path / "tokenizer.json").write_text(json.dumps(content))
    tokenizer = Tokenizer(path)
    assert tokenizer.decode(tokenizer.encode(LINES[0])) == LINES[0]


def test_chat_without_a_template_is_refused(tmp_path: Path) -> None:
    tokenizer = Tokenizer(write_checkpoint(tmp_path, chat_template=None))
    with pytest.raises(InvalidRequest, match="no chat template") as caught:
        tokenizer.encode_chat(CHATS[0])
    assert caught.value.field == "messages"


@pytest.mark.parametrize(
    "template",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{{ messages[7].content }}",
        "{{ 1 // 0 }}",
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ cycler.__init__.__globals__ }}",
    ],
)
def test_a_template_that_fails_refuses_the_messages(template: str, tmp_path: Path) -> None:
    tokenizer = Tokenizer(write_checkpoint(tmp_path, chat_template=template))
    with pytest.raises(InvalidRequest, match="the chat template refuses"):
        tokenizer.encode_chat(CHATS[0])


def test_broken_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointUnavailable, match="no tokenizer at"):
        Tokenizer(tmp_path)
    path = write_checkpoint(tmp_path / "template", chat_template="{% for %}")
    with pytest.raises(ModelError, match="does not compile"):
        Tokenizer(path)
    path = write_checkpoint(tmp_path / "config")
    (path / "config.json").write_text("[]")
    with pytest.raises(CheckpointUnavailable, match=r"config\.json must hold a JSON object"):
        Tokenizer(path)
    (path / "config.json").write_text("{")
    with pytest.raises(CheckpointUnavailable, match=r"config\.json cannot be read"):
        Tokenizer(path)
    (path / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointUnavailable, match=r"tokenizer\.json cannot be read"):
        Tokenizer(path)


def test_the_front_loads_no_heavy_library() -> None:
    program = (
        "import sys, router.front.app, router.client; "
        "print([name for name in ('torch', 'triton', 'ray', 'transformers', 'numpy') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("piece", ["the ferry ", "a", "1", "渡船", "😀", " ", "Größe, "])
def test_of_a_long_text_it_is_known_how_many_tokens_it_has_at_least(bpe_tokenizer: Tokenizer, piece: str) -> None:
    text = piece * 60_000
    for most in (1, 100, 2000):
        assert bpe_tokenizer.least_tokens(text[:1000], most) == 0
        assert most < bpe_tokenizer.least_tokens(text, most) <= len(bpe_tokenizer.encode(text))
    assert bpe_tokenizer.least_tokens(text, 1_000_000) == 0
