"""The page of `perdure analyse` in a real browser."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from playwright.sync_api import Browser

import perdure
from perdure import Model
from perdure.ext.inspection.analysis import analyse
from perdure.ext.inspection.page import page_of


def test_heads_can_be_searched_and_nothing_is_loaded(
    browser: Browser, zoo_path: Callable[[str], Path], tmp_path: Path
) -> None:
    model = Model(zoo_path("llama"))
    with perdure.open(model, n_ctx=512, slots=1, threads=1) as rt:
        found = analyse(rt, model, model.tokenize("hello there, a text"), title="a <b>title", max_tokens=2)
    file = tmp_path / "analysis.html"
    file.write_text(page_of(found), encoding="utf-8")
    page = browser.new_page()
    errors: list[str] = []
    requests: list[str] = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("request", lambda request: requests.append(request.url))
    try:
        page.goto(file.as_uri())
        heads = page.locator("#heads button")
        assert page.locator("h1").inner_text() == "a <b>title"
        assert heads.count() == 12
        page.fill("#search", "L1")
        assert heads.count() == 4
        page.fill("#search", "l2h3")
        assert heads.count() == 1
        heads.first.click()
        assert page.locator("#chosen").inner_text().startswith("L2H3: ")
        page.fill("#search", "nowhere in it")
        assert heads.count() == 0
        assert errors == []
        assert requests == [file.as_uri()]
    finally:
        page.close()
