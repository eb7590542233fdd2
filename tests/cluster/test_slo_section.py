"""Classes of requests in a cluster's file: read, checked down to the router's own settings, and in the schema."""

from __future__ import annotations

import re
from pathlib import Path

import jsonschema
import pytest
import yaml

from cluster.config_file import parse_config
from cluster.plan import check_orders, planned_orders, router_config, router_order
from cluster.schema import config_schema
from protocol.errors import ConfigError
from router.config import RouterConfig
from router.slo.classes import SLOClass, SLOConfig

PAGE = Path(__file__).parents[2] / "docs" / "operations.md"
MODEL = Path("/models/tiny")


def routed(text: str) -> RouterConfig:
    return router_config(router_order(parse_config(f"model: m\n{text}"), 1, 2), MODEL, "127.0.0.1")


def check(text: str) -> None:
    check_orders(planned_orders(parse_config(text)), MODEL)


def test_what_the_page_shows_is_what_a_router_is_told() -> None:
    (block,) = re.findall(r"```yaml\n(router:.*?)```", PAGE.read_text(), re.DOTALL)
    assert routed(block).slo == SLOConfig(
        default="interactive",
        backlog=0.2,
        classes=(
            SLOClass(name="interactive", ttft=1.0, tpot=0.05, weight=4.0),
            SLOClass(name="batch", deadline=3600.0, priority=5, max_queue=10000),
        ),
    )
    jsonschema.validate(yaml.safe_load(f"model: m\n{block}"), config_schema())


def test_a_class_without_settings_is_enough_for_turns() -> None:
    assert routed("").slo == SLOConfig()
    assert not routed("").slo.active
    for text in ("router: {slo: {classes: {default: {}}}}", "router:\n  slo:\n    classes:\n      default:"):
        assert routed(text).slo == SLOConfig(classes=(SLOClass(),))
        jsonschema.validate(yaml.safe_load(f"model: m\n{text}"), config_schema())
    assert routed("router:\n  slo:\n    classes:").slo == SLOConfig()


@pytest.mark.parametrize(
    ("classes", "field", "said"),
    [
        ("classes: {fast: {ttfb: 1}}", "router.slo.classes.fast.ttfb", "did you mean 'ttft'?"),
        ("classes: {fast: {ttft: soon}}", "router.slo.classes.fast.ttft", "'soon'"),
        ("classes: {fast: {ttft: -1}}", "router.slo.classes.fast.ttft", "got -1"),
        ("classes: {fast: {weight: 0}}", "router.slo.classes.fast.weight", "got 0"),
        ("classes: {fast: 3}", "router.slo.classes.fast", "got 3"),
        ("classes: {1: {}}", "router.slo.classes", "got 1"),
        ("classes: {a b: {}}", "router.slo.classes.a b.name", "'a b'"),
        ("classes: [fast]", "router.slo.classes", "['fast']"),
        ("default: slow", "router.slo.default", "'slow'"),
        ("backlog: 0", "router.slo.backlog", "got 0"),
        ("backlogs: 1", "router.slo.backlogs", "did you mean 'backlog'?"),
    ],
)
def test_what_is_wrong_is_named_by_its_path(classes: str, field: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check(f"model: m\nrouter: {{slo: {{{classes}}}}}")
    assert caught.value.field == field
    assert said in caught.value.message


def test_the_schema_underlines_a_class_with_an_unknown_key() -> None:
    file = yaml.safe_load("model: m\nrouter: {slo: {classes: {fast: {ttfb: 1}}}}")
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(file, config_schema())
    definition = config_schema()["$defs"]["SLOClassSection"]
    assert definition["properties"]["ttft"]["description"].startswith("within which a first token comes")
