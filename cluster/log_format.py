"""How a cluster's processes write their logs: lines for people, or a JSON object a line for programs."""

from __future__ import annotations

import logging
from datetime import UTC, datetime
from typing import Any, Literal

import msgspec

from protocol.ids import RequestKey

LogFormat = Literal["text", "json"]
LogLevel = Literal["debug", "info", "warning", "error"]
TEXT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


class JsonFormatter(logging.Formatter):
    """A record as one JSON object on one line.

    Its fields are ``time`` (UTC, ISO 8601), ``level``, ``logger``, ``process`` and ``message``; ``request_id`` and
    ``attempt`` where the message is about an attempt of a request, and ``exception`` where there was one.

    Args:
        process: name of the process in its cluster.
    """

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        """The line."""
        told: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="microseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "process": self._process,
            "message": record.getMessage(),
        }
        arguments = record.args if isinstance(record.args, tuple) else ()
        for key in [argument for argument in arguments if isinstance(argument, RequestKey)][:1]:
            told |= {"request_id": key.request_id, "attempt": key.attempt}
        if record.exc_info:
            told["exception"] = self.formatException(record.exc_info)
        return msgspec.json.encode(told).decode()


def set_up_logging(process: str, form: LogFormat, level: LogLevel) -> None:
    """Write this process's log to its error output, in place of whatever wrote it before."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter(process) if form == "json" else logging.Formatter(TEXT))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
