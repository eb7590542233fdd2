"""Which transport a pair of workers takes, and that the text is the same by each."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from oracle import Oracle
from rack import rack

from kv_transfer.choice import Chooser
from kv_transfer.shm.target import HostTarget
from protocol.errors import AttemptsExhausted, UnknownTransport

PROMPT = [5, 9, 11, 200, 3, 17, 40, 41, 42, 99, 7]


@pytest.mark.parametrize(
    ("ship_by", "listen_by", "used", "offered"),
    [
        ("auto", "auto", "shm", ["shm", "tcp"]),
        ("tcp", "auto", "tcp", ["shm", "tcp"]),
        ("auto", "tcp", "tcp", ["tcp"]),
        ("shm", "shm", "shm", ["shm"]),
        ("inproc", "inproc", "inproc", ["inproc"]),
    ],
)
async def test_the_best_that_both_have(
    tiny_llama_dir: Path, tiny_oracle: Oracle, ship_by: str, listen_by: str, used: str, offered: list[str]
) -> None:
    async with rack(tiny_llama_dir, ship_by=ship_by, listen_by=listen_by) as running:
        profile = running.decode[0].profile
        assert profile is not None
        assert [address.partition("://")[0] for address in profile.kv_addresses] == offered
        answer = await running.ask(PROMPT)
        assert answer.token_ids == tiny_oracle.greedy(PROMPT, 12)
        assert answer.report is not None
        assert answer.report.transport == used
        assert running.prefill[0].load().transport_fallbacks == 0
        metrics = running.service.metrics().decode()
        assert f'kvferry_handoff_transports_total{{transport="{used}"}} 1.0' in metrics


async def test_out_of_reach_the_next_best_is_taken_and_told_once(
    tiny_llama_dir: Path, tiny_oracle: Oracle, caplog: pytest.LogCaptureFixture
) -> None:
    def reach(address: str) -> str | None:
        return "another host" if address.startswith("shm") else None

    async with rack(tiny_llama_dir, engine={"prefix_cache": False}) as running:
        running.prefill[0]._exports.chooser = Chooser("auto", reach=reach)
        with caplog.at_level(logging.WARNING, "kv_transfer.choice"):
            for _ in range(3):
                answer = await running.ask(PROMPT)
                assert answer.token_ids == tiny_oracle.greedy(PROMPT, 12)
                assert answer.report is not None
                assert answer.report.transport == "tcp"
        assert running.prefill[0].load().transport_fallbacks == 1
        assert [record.message.count("another host") for record in caplog.records] == [1]


@pytest.mark.parametrize("mode", ["auto", "shm"])
async def test_releases_that_share_no_version_of_a_transport(
    tiny_llama_dir: Path, tiny_oracle: Oracle, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    monkeypatch.setattr(HostTarget, "versions", (9, 12))
    words = "no common version of the shm transport: peer speaks 9 to 12, this process 2 to 2"
    async with rack(tiny_llama_dir, ship_by=mode, listen_by=mode) as running:
        if mode == "shm":
            with pytest.raises(AttemptsExhausted, match=f"no transport reaches the decode worker: shm: .*{words}"):
                await running.ask(PROMPT)
            # Once workers of the newer release can be shipped to by somebody, requests are served; see auto.
        else:
            for attempts in (2, 1):
                answer = await running.ask(PROMPT)
                assert answer.token_ids == tiny_oracle.greedy(PROMPT, 12)
                assert answer.report is not None
                assert (answer.report.transport, answer.report.attempts) == ("tcp", attempts)
        await running.settle()
        assert not sum(worker.load().pool.leaked for worker in (*running.prefill, *running.decode))


async def test_a_forced_transport_that_is_not_offered_is_one_clear_error(tiny_llama_dir: Path) -> None:
    async with rack(tiny_llama_dir, ship_by="shm", listen_by="tcp") as running:
        with pytest.raises(UnknownTransport, match="transport 'shm' is wanted here, the decode worker offers tcp://"):
            await running.ask(PROMPT)
        await running.settle()
