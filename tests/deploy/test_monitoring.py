"""deploy/monitoring: dashboards, rules and the table of incidents name what the router really exports."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import promql_parser
import pytest
import yaml

ROOT = Path(__file__).parents[2]
MONITORING = ROOT / "deploy" / "monitoring"
METRIC = re.compile(r"^\| `(\w+)` \| (\w+) \| (.*?) \| [\w/ ]+ \| .+ \|$", re.MULTILINE)
INCIDENT = re.compile(r'^\| <a id="([\w-]+)"></a>`(\w+)`: (.+?) \| (.+?) \| (.+?) \| (.+?) \|$', re.MULTILINE)
OF_PROMETHEUS = {"up": {"job", "instance"}}
"""What Prometheus adds itself."""
VARIABLES = {"$__rate_interval": "5m", "$router": ".*", "$worker": ".*"}
"""Grafana's, with what stands for them here."""

BOARDS = sorted((MONITORING / "grafana" / "dashboards").glob("*.json"))
ALERTS = [
    rule for group in yaml.safe_load((MONITORING / "alerts.yaml").read_text())["groups"] for rule in group["rules"]
]


def samples() -> dict[str, set[str]]:
    """Each name that a query may use, with its labels; test_metrics_page.py holds the page to the scrape."""
    found = {name: set(labels) for name, labels in OF_PROMETHEUS.items()}
    for name, kind, labels in METRIC.findall((ROOT / "docs" / "metrics.md").read_text()):
        of_all = {*re.findall(r"`(\w+)`", labels), "job", "instance"}
        if kind == "counter":
            found[f"{name}_total"] = of_all
        elif kind == "histogram":
            found |= {f"{name}_bucket": {*of_all, "le"}, f"{name}_sum": of_all, f"{name}_count": of_all}
        else:
            found[name] = of_all
    return found


SAMPLES = samples()


def panels(board: Path) -> Iterator[dict[str, Any]]:
    for panel in json.loads(board.read_text())["panels"]:
        if panel["type"] != "row":
            yield panel


def queries() -> Iterator[Any]:
    for board in BOARDS:
        for panel in panels(board):
            for target in panel["targets"]:
                yield pytest.param(target["expr"], id=f"{board.stem}-{panel['title']}-{target['refId']}")
    for rule in ALERTS:
        yield pytest.param(rule["expr"], id=rule["alert"])


def nodes(query: str) -> list[Any]:
    for name, value in VARIABLES.items():
        query = query.replace(name, value)
    found: list[Any] = []
    promql_parser.walk(promql_parser.parse(query), found.append)
    return found


def selectors(query: str) -> list[Any]:
    return [node for node in nodes(query) if isinstance(node, promql_parser.VectorSelector)]


@pytest.mark.parametrize("query", [*queries()])
def test_a_query_parses_and_names_what_is_exported(query: str) -> None:
    asked = selectors(query)
    assert asked
    for selector in asked:
        assert selector.name in SAMPLES
        assert {matcher.name for matcher in selector.matchers.matchers} <= SAMPLES[selector.name]
    grouped = [
        node.modifier.labels for node in nodes(query) if isinstance(node, promql_parser.AggregateExpr) and node.modifier
    ]
    for labels in grouped:
        assert set(labels) <= set.union(*(SAMPLES[selector.name] for selector in asked))


def test_the_look_for_unknown_names_finds_them() -> None:
    assert selectors("sum(rate(kvferry_nothing_total[$__rate_interval]))")[0].name not in SAMPLES
    with pytest.raises(ValueError, match=r"unexpected|unclosed|invalid"):
        nodes("sum(rate(kvferry_steps_total[5m])")


def test_each_metric_is_on_a_panel() -> None:
    shown = {
        selector.name
        for board in BOARDS
        for panel in panels(board)
        for target in panel["targets"]
        for selector in selectors(target["expr"])
    }
    families = {re.sub(r"_(total|bucket|sum|count)$", "", name) for name in SAMPLES} - set(OF_PROMETHEUS)
    assert families - {re.sub(r"_(total|bucket|sum|count)$", "", name) for name in shown} == set()


@pytest.mark.parametrize("board", BOARDS, ids=lambda board: board.stem)
def test_a_dashboard_is_one_that_grafana_lays_out(board: Path) -> None:
    content = json.loads(board.read_text())
    assert content["uid"] == f"kvferry-{board.stem}"
    numbers = [panel["id"] for panel in content["panels"]]
    assert len(numbers) == len(set(numbers))
    taken: set[tuple[int, int]] = set()
    for panel in content["panels"]:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert place["x"] + place["w"] <= 24
        assert not cells & taken, panel["title"]
        taken |= cells
    (source,) = yaml.safe_load(
        (MONITORING / "grafana" / "provisioning" / "datasources" / "prometheus.yaml").read_text()
    )["datasources"]
    sources = [panel["datasource"] for panel in panels(board)] + [
        variable["datasource"] for variable in content["templating"]["list"]
    ]
    assert all(asked == {"type": source["type"], "uid": source["uid"]} for asked in sources)
    for variable in content["templating"]["list"]:
        name = re.fullmatch(r"label_values\((\w+), (\w+)\)", variable["query"]["query"])
        assert name is not None
        assert name[2] in SAMPLES[name[1]]


@pytest.mark.parametrize("rule", ALERTS, ids=lambda rule: rule["alert"])
def test_each_alert_says_what_it_means_and_has_its_row_among_the_incidents(rule: dict[str, Any]) -> None:
    assert rule["labels"]["severity"] in ("info", "warning", "critical")
    assert len(rule["annotations"]["summary"]) > 20
    page, _, anchor = rule["annotations"]["runbook_url"].partition("#")
    rows = {row[0]: row for row in INCIDENT.findall((ROOT / page).read_text())}
    _, alert, *cells = rows[anchor]
    assert alert == rule["alert"]
    asked = {selector.name.removesuffix("_bucket") for selector in selectors(rule["expr"])} - {"up"}
    assert asked == {*re.findall(r"`(kvferry_\w+)`", cells[1])}
    assert all(len(cell) > 10 for cell in (cells[0], *cells[2:]))


def test_each_incident_of_an_alert_has_one() -> None:
    rows = INCIDENT.findall((ROOT / "docs" / "operations.md").read_text())
    assert [row[1] for row in rows] == [rule["alert"] for rule in ALERTS]


def test_the_compose_file_mounts_what_is_there_and_pins_what_it_runs() -> None:
    compose = yaml.safe_load((MONITORING / "compose.yaml").read_text())
    for service in compose["services"].values():
        assert re.fullmatch(r"[\w./-]+:v?\d+\.\d+\.\d+", service["image"])
        assert service["healthcheck"]["test"][0] == "CMD"
        for volume in service.get("volumes", ()):
            source = volume.split(":")[0]
            assert (MONITORING / source).exists() if source.startswith(".") else source in compose["volumes"]
    volumes = [volume for service in compose["services"].values() for volume in service.get("volumes", ())]
    mounted = [volume.split(":")[1] for volume in volumes]
    (provider,) = yaml.safe_load((MONITORING / "grafana" / "provisioning" / "dashboards" / "kvferry.yaml").read_text())[
        "providers"
    ]
    assert provider["options"]["path"] in mounted
    home = Path(compose["services"]["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"])
    assert str(home.parent) in mounted
    assert home.name in {board.name for board in BOARDS}
    scraped = yaml.safe_load((MONITORING / "prometheus.yml").read_text())
    assert all((MONITORING / file).exists() for file in scraped["rule_files"])
    assert [config["job_name"] for config in scraped["scrape_configs"]] == ["kvferry"]


def test_grafana_finds_the_traces_where_only_this_machine_gets_to() -> None:
    folder = MONITORING / "grafana" / "provisioning" / "datasources"
    (source,) = yaml.safe_load((folder / "jaeger.yaml").read_text())["datasources"]
    jaeger = yaml.safe_load((MONITORING / "compose.yaml").read_text())["services"]["jaeger"]
    assert source["url"] == f"http://{jaeger['environment']['JAEGER_LISTEN_HOST']}:16686"
    assert source["url"] in (ROOT / "docs" / "tracing.md").read_text()


def test_each_alert_is_tried_where_it_fires_and_where_not() -> None:
    content = yaml.safe_load((MONITORING / "alerts.test.yaml").read_text())
    cases = [case for test in content["tests"] for case in test["alert_rule_test"]]
    named = {rule["alert"] for rule in ALERTS}
    assert {case["alertname"] for case in cases if case.get("exp_alerts")} == named
    assert {case["alertname"] for case in cases if not case.get("exp_alerts")} == named


@pytest.mark.skipif(shutil.which("promtool") is None, reason="needs promtool, which comes with Prometheus")
def test_the_rules_fire_when_their_tests_say_so() -> None:
    for command in (("check", "config", "prometheus.yml"), ("test", "rules", "alerts.test.yaml")):
        done = subprocess.run(
            ["promtool", *command], cwd=MONITORING, capture_output=True, text=True, timeout=60, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
