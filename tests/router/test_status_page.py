"""The status page as it is sent: whole, the same for everybody, and with nothing that could act for somebody else."""

from __future__ import annotations

import base64
import hashlib
import re
import tomllib
from html.parser import HTMLParser
from pathlib import Path

import httpx
from front_stage import MODEL, ScriptedService, saying, serving, serving_front

from router.front import status_page as module
from router.front.app import Front
from router.front.keys import Gatekeeper, Key, hash_of, new_key
from router.tokenizer import Tokenizer

ROOT = Path(__file__).parents[2]


class Parts(HTMLParser):
    """What of a document a browser would run, or fetch."""

    def __init__(self, document: str) -> None:
        super().__init__()
        self.within: dict[str, list[str]] = {"style": [], "script": []}
        self.fetched: list[str] = []
        self.handlers: list[str] = []
        self._inside = ""
        self.feed(document)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._inside = tag
        for name, value in attrs:
            if name in ("src", "href", "srcset", "data", "action", "poster"):
                self.fetched.append(str(value))
            if name.startswith("on") or name == "style":
                self.handlers.append(name)

    def handle_endtag(self, tag: str) -> None:
        self._inside = ""

    def handle_data(self, data: str) -> None:
        if self._inside in self.within:
            self.within[self._inside].append(data)


def policy_of(response: httpx.Response) -> dict[str, str]:
    rules = response.headers["content-security-policy"].split("; ")
    return {name: value for name, _, value in (rule.partition(" ") for rule in rules)}


def test_a_browser_may_run_what_is_in_it_and_ask_this_router_alone(bpe_tokenizer: Tokenizer) -> None:
    with serving_front(ScriptedService(saying((5,))), bpe_tokenizer) as url:
        response = httpx.get(url, trust_env=False)
    assert response.headers["content-type"] == "text/html; charset=utf-8"
    parts = Parts(response.text)
    assert parts.fetched == ["data:,"], "the icon is nothing at all; all else is in the document"
    assert parts.handlers == []
    policy = policy_of(response)
    assert policy.pop("default-src") == "'none'"
    assert policy.pop("connect-src") == "'self'"
    assert policy.pop("img-src") == "data:"
    for tag in ("style", "script"):
        (text,) = parts.within[tag]
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert policy.pop(f"{tag}-src") == f"'sha256-{digest}'"
    assert policy == {"base-uri": "'none'", "form-action": "'none'", "frame-ancestors": "'none'"}
    assert response.headers["x-content-type-options"] == "nosniff"
    assert response.headers["referrer-policy"] == "no-referrer"


def test_its_script_sets_what_it_is_told_as_text_only() -> None:
    script = Path(module.__file__).with_name("status.js").read_text()
    assert not re.search(
        r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|new Function|localStorage", script
    )
    assert re.findall(r"https?://[^\"]*", script) == ["http://www.w3.org/2000/svg"], "a name, which nobody fetches"


def test_it_is_the_same_for_everybody_and_says_nothing_of_the_cluster(bpe_tokenizer: Tokenizer) -> None:
    key = new_key()
    keeper = Gatekeeper([Key(name="ann", sha256=hash_of(key))])
    guarded = Front(ScriptedService(saying((5,))), bpe_tokenizer, gatekeeper=keeper)
    with serving(guarded) as url, httpx.Client(base_url=url, trust_env=False) as http:
        stranger = http.get("/")
        known = http.get("/", headers={"authorization": f"Bearer {key}"})
        assert http.get("/cluster/events").status_code == 401
    with serving_front(ScriptedService(saying((5,))), bpe_tokenizer) as url:
        open_to_all = httpx.get(url, trust_env=False)
    assert stranger.status_code == 200
    assert stranger.content == known.content == open_to_all.content
    assert MODEL not in stranger.text
    assert "prefill-0" not in stranger.text


def test_its_files_are_shipped() -> None:
    shipped = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["*"]
    assert {f"*{path.suffix}" for path in Path(module.__file__).parent.glob("status.*")} <= {*shipped}
