"""A model with windows and capped scores, by the triton backend (run by test_attention_backends.py, interpreted)."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from checkpoints import VOCAB_SIZE, tiny_model
from test_model_equality import VARIANTS, Served, random_pieces, reference_logits, worst_relative

from engine.attention.triton import TritonAttention


def test_logits_equal_transformers_by_the_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # By its name the backend is to be had on a GPU only.
    monkeypatch.setattr("engine.runner.create_backend", lambda _name, *where: TritonAttention(*where))
    tiny_model(tmp_path, seed=3, **VARIANTS["gemma2"] | {"head_dim": 64})
    rng = random.Random(5)
    served = Served(tmp_path, rng, block_size=8, order="HND", num_blocks=16)
    sequences = [[rng.randrange(VOCAB_SIZE) for _ in range(length)] for length in (1, 9, 33)]
    expected = reference_logits(tmp_path, sequences)
    pending = {index: random_pieces(sequence, rng) for index, sequence in enumerate(sequences)}
    while pending:
        chosen = sorted(pending)
        chunks = [served.chunk(index, pending[index].pop(0)) for index in chosen]
        for index, row in zip(chosen, served.runner.logits(chunks), strict=True):
            assert worst_relative(row, expected[index][served.lengths[index] - 1]) < 1e-4
        pending = {index: pieces for index, pieces in pending.items() if pieces}
