"""A headless Chromium that looks at the router's status page."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from playwright.async_api import Page, async_playwright

NAMES = ("chromium", "chromium-browser", "chromium-headless-shell", "google-chrome", "google-chrome-stable")
DESKTOP, PHONE = {"width": 1360, "height": 900}, {"width": 390, "height": 844}
PATIENCE = 10.0
READ = """() => {
  const text = (element) => element.textContent.trim();
  const all = (selector, of = document) => [...of.querySelectorAll(selector)];
  const map = (selector, of, key, value) =>
    Object.fromEntries(all(selector, of).map((each) => [key(each), value(each)]));
  const pairs = (selector, name, of) => map(selector, of, (each) => each.dataset[name], text);
  const rows = (id) => map(`#${id} tbody tr`, document, (row) => text(row.querySelector("th")),
    (row) => pairs("td", "column", row));
  const count = (element) => Number(text(element.querySelector("b")).replace(",", ""));
  return {
    about: text(document.getElementById("about")),
    link: document.getElementById("link").dataset.state,
    title: document.title,
    asks: !document.getElementById("ask").hidden,
    shows: !document.getElementById("told").hidden,
    alerts: all("#alerts li[data-kind]").map(text),
    fields: pairs("[data-field]", "field"),
    rates: map("[data-rate]", document, (tile) => tile.dataset.rate, (tile) => text(tile.querySelector("b"))),
    workers: map("[data-worker]", document, (card) => card.dataset.worker, (card) => ({
      role: card.closest(".cards").id,
      state: text(card.querySelector(".state")),
      facts: pairs("[data-fact]", "fact", card),
      blocks: map(".blocks li", card, (item) => item.dataset.block, count),
      bar: map(".pool i:not([hidden])", card, (part) => part.dataset.block, (part) => part.offsetWidth),
    })),
    latency: map("[data-latency]", document, (chart) => chart.dataset.latency, (chart) => ({
      count: text(chart.querySelector("small")),
      quantiles: pairs("[data-share]", "share", chart),
      bars: all(".bars i", chart).map((bar) => bar.offsetHeight),
    })),
    handoffs: rows("handoffs"),
    queue: document.getElementById("queue").hidden ? null : rows("classes"),
    ended: rows("ended"),
    width: document.documentElement.scrollWidth,
  };
}"""
"""What can be read on the page, by where it stands."""


class Look:
    """One tab.

    Attributes:
        page: playwright's.
        complaints: errors in the console, and of the page's script.
        asked: URLs of all requests.
    """

    def __init__(self, page: Page, screenshots: str) -> None:
        self.page = page
        self.complaints: list[str] = []
        self.asked: list[str] = []
        self._screenshots = screenshots
        page.set_default_timeout(1000 * PATIENCE)
        page.on("console", lambda message: self.complaints.append(message.text) if message.type == "error" else None)
        page.on("pageerror", lambda error: self.complaints.append(str(error)))
        page.on("request", lambda request: self.asked.append(request.url))

    async def read(self) -> dict[str, Any]:
        """What is on the page."""
        told: dict[str, Any] = await self.page.evaluate(READ)
        return told

    async def keep(self, name: str) -> None:
        """Keep a picture, where a folder for them was named."""
        if self._screenshots:
            # It makes the folder, too.
            await self.page.screenshot(path=f"{self._screenshots}/{name}.png", full_page=True)


def chromium(own: str) -> str:
    """Where there is one: on PATH, or playwright's own."""
    found = [place for place in map(shutil.which, (*NAMES, own)) if place]
    if not found:
        pytest.skip(f"no Chromium: none of {', '.join(NAMES)} is on PATH, and playwright has installed none")
    return found[0]


@asynccontextmanager
async def looking(screenshots: str) -> AsyncIterator[Look]:
    """A tab of a browser of its own; the test is skipped where there is none."""
    async with async_playwright() as driver:
        browser = await driver.chromium.launch(executable_path=chromium(driver.chromium.executable_path))
        try:
            context = await browser.new_context(viewport=DESKTOP)
            yield Look(await context.new_page(), screenshots)
        finally:
            await browser.close()
