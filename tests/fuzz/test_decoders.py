"""No bytes make a decoder raise what its callers do not expect, nor take memory that they only announce."""

from __future__ import annotations

import tracemalloc

import pytest
from fuzzed_decoders import DECODERS, refused
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

EXTREMES = (b"\xff", b"\x7f\xff\xff\xff", b"\xff" * 4, b"\xff" * 8, b"\x00" * 8, b"[" * 8, b"\xed\xa0\x80")
"""What a field is overwritten with: the largest numbers, none, a bracket that nests, half of a character."""
MEMORY = 4 << 20
ANNOUNCING = [name for name in DECODERS if name != "tool_calls"]
"""Those of which a few bytes can say how many follow."""


@st.composite
def damaged(draw: st.DrawFn, examples: tuple[bytes, ...]) -> bytes:
    """An example with bytes changed, left out, put in, doubled, or cut off."""
    data = bytearray(draw(st.sampled_from(examples)))
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(data)))
        what = draw(st.sampled_from(EXTREMES) | st.binary(max_size=8))
        match draw(st.sampled_from(["overwrite", "insert", "delete", "double", "cut"])):
            case "overwrite":
                data[at : at + len(what)] = what
            case "insert":
                data[at:at] = what
            case "delete":
                del data[at : at + draw(st.integers(1, 8))]
            case "double":
                data[at:at] = data[at : at + draw(st.integers(1, 64))]
            case _:
                del data[at:]
    return bytes(data)


@pytest.mark.parametrize("name", DECODERS)
def test_every_example_is_read(name: str) -> None:
    # The two proofs are of nobody who knows the secret.
    expected = name in ("proof", "proof_answer")
    assert [refused(DECODERS[name], example) for example in DECODERS[name].examples] == [expected] * len(
        DECODERS[name].examples
    )


@pytest.mark.parametrize("name", DECODERS)
def test_damage_and_noise_are_refused_or_read(name: str) -> None:
    decoder = DECODERS[name]

    @settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
    @given(st.binary(max_size=300) | damaged(decoder.examples))
    def check(data: bytes) -> None:
        refused(decoder, data)

    check()


@pytest.mark.parametrize("name", ANNOUNCING)
def test_what_is_only_announced_takes_no_memory(name: str) -> None:
    decoder = DECODERS[name]
    tracemalloc.start()
    try:
        for example in decoder.examples:
            for at in range(min(len(example), 128)):
                for extreme in EXTREMES[:4]:
                    refused(decoder, example[:at] + extreme + example[at + len(extreme) :])
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < MEMORY


@pytest.mark.parametrize("name", DECODERS)
def test_deep_nesting_is_refused_or_read(name: str) -> None:
    for nest in (b"[", b'{"a":', b"\x91", b"\x81\xa1a", b'<tool_call>[{"name":'):
        refused(DECODERS[name], nest * 5_000)
