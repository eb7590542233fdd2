"""Lines of a stream end where the format says, however its bytes come."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol.errors import MalformedFrame
from router.client import lines as lines_module
from router.client.lines import Lines

ODD = "a\u2028b\u2029c\x85d\x0be\x0cf\x1cg\x1dh\x1ei\rj"


@settings(deadline=None)
@given(st.lists(st.text(st.sampled_from([*ODD, "\n", "é", "渡"])).map(str.encode)), st.integers(1, 7))
def test_whatever_the_pieces(texts: list[bytes], size: int) -> None:
    data = b"".join(texts)
    lines = Lines()
    found = [line for at in range(0, len(data), size) for line in lines.push(data[at : at + size])]
    whole = data.split(b"\n")[:-1]
    assert found == [line.removesuffix(b"\r").decode() for line in whole]


def test_a_line_is_bounded_before_its_end_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines_module, "MAX_LINE", 10)
    lines = Lines()
    assert lines.push(b"1234567890") == []
    assert lines.push(b"\n1234567890\n") == ["1234567890"] * 2
    assert lines.push(b"12345") == []
    with pytest.raises(MalformedFrame, match="11 bytes or more"):
        lines.push(b"678901")
    with pytest.raises(MalformedFrame):
        Lines().push(b"\n12345678901\n")
