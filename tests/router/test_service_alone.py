"""A service that no worker has come to."""

from __future__ import annotations

import pytest
from worker_facts import MODEL

from protocol.errors import StartFailed
from router.config import RouterConfig
from router.front.generation import GenerationService
from router.service import Service


async def test_a_hub_address_that_is_taken_is_named() -> None:
    service = Service(RouterConfig(model=MODEL, tokenizer="unused"))
    await service.start()
    try:
        second = Service(RouterConfig(model=MODEL, tokenizer="unused", hub=service.hub_endpoint))
        with pytest.raises(StartFailed, match=service.hub_endpoint):
            await second.start()
    finally:
        await service.close()


def test_the_service_is_what_the_front_asks_for() -> None:
    service: GenerationService = Service(RouterConfig(model=MODEL, tokenizer="unused"))
    assert service.model == MODEL
    assert service.max_model_len is None
