"""Logs for programs: one JSON object a line, with the attempt that a line is about."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from cluster.config_file import parse_config
from protocol.errors import ConfigError

PROGRAM = """
import logging
from cluster.log_format import set_up_logging
from protocol.ids import RequestKey

set_up_logging("decode-1", {form!r}, {level!r})
log = logging.getLogger("router.dispatcher")
log.debug("nobody wants this")
log.info("a worker\\njoined")
log.warning("request %s failed: %s", RequestKey("abc", 2), "pool_full")
try:
    raise ValueError("a cause")
except ValueError:
    log.exception("ship %d of %s failed", 7, RequestKey("def", 0))
"""


def written(form: str, level: str) -> list[str]:
    program = PROGRAM.format(form=form, level=level)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == ""
    return done.stderr.splitlines()


def test_a_line_is_an_object_with_the_attempt_that_it_is_about() -> None:
    told: list[dict[str, Any]] = [json.loads(line) for line in written("json", "info")]
    assert [each["level"] for each in told] == ["info", "warning", "error"]
    assert {(each["process"], each["logger"]) for each in told} == {("decode-1", "router.dispatcher")}
    assert [each["message"] for each in told] == [
        "a worker\njoined",
        "request abc/2 failed: pool_full",
        "ship 7 of def/0 failed",
    ]
    assert [(each.get("request_id"), each.get("attempt")) for each in told] == [(None, None), ("abc", 2), ("def", 0)]
    assert told[2]["exception"].splitlines()[-1] == "ValueError: a cause"
    assert all(each["time"].endswith("+00:00") for each in told)


def test_lines_for_people_are_as_ever_and_the_level_is_heeded() -> None:
    lines = written("text", "error")
    assert lines[0].endswith("ERROR router.dispatcher: ship 7 of def/0 failed")
    assert lines[1].startswith("Traceback")


@pytest.mark.parametrize("wrong", ["format: xml", "level: loud"])
def test_what_is_no_format_or_level_is_refused_by_its_path(wrong: str) -> None:
    with pytest.raises(ConfigError, match=f"logging.{wrong.split(':')[0]}"):
        parse_config(f"model: smollm2-135m\nlogging: {{{wrong}}}\n")
