"""The page is one document that loads nothing, runs its own script only, and never writes markup from text."""

from __future__ import annotations

import base64
import hashlib
import re
from pathlib import Path

import orjson

import agentrl_viewer.view
from agentrl_viewer.view.document import SCRIPTS, STYLES, document, script_json
from tests.support.synthetic_run import HOSTILE

PAGE = Path(agentrl_viewer.view.__file__).parent / "page"
MARKUP_FROM_TEXT = ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "new Function", "DOMParser")


def digest(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def test_every_file_of_the_folder_is_in_the_page() -> None:
    assert {file.name for file in PAGE.iterdir()} == {"index.html", *STYLES, *SCRIPTS}


def test_the_files_are_short_and_write_no_markup_from_text() -> None:
    for file in PAGE.iterdir():
        text = file.read_text()
        assert len(text.splitlines()) <= 500, file
        assert [name for name in MARKUP_FROM_TEXT if name in text] == [], file


def test_the_page_names_no_other_address() -> None:
    addresses = set(re.findall(r"https?://[^\s\"']+", document()))
    assert addresses == {"http://www.w3.org/2000/svg"}  # a name of SVG, which nothing loads


def test_the_policy_allows_the_script_and_the_style_of_the_page_alone() -> None:
    page = document()
    [policy] = re.findall(r'http-equiv="Content-Security-Policy" content="([^"]*)"', page)
    [style] = re.findall(r"<style>(.*?)</style>", page, re.S)
    [script] = re.findall(r"<script>(.*?)</script>", page, re.S)
    assert policy.startswith("default-src 'none'; ")
    assert f"script-src '{digest(script)}'" in policy
    assert f"style-src '{digest(style)}'" in policy


def test_what_a_file_carries_cannot_end_its_element() -> None:
    carried = {"text": f"{HOSTILE}\u2028 & more", "numbers": [1, None]}
    text = script_json(carried)
    assert not set("<>&\u2028") & set(text)
    assert orjson.loads(text) == carried


def test_what_a_file_carries_may_name_a_place_of_the_page() -> None:
    page = document({"text": "@POLICY@ @STYLE@ @EMBEDDED@ @SCRIPT@"})
    assert '{"text":"@POLICY@ @STYLE@ @EMBEDDED@ @SCRIPT@"}' in page
    [script] = re.findall(r"<script>(.*?)</script>", page, re.S)
    assert f"script-src '{digest(script)}'" in page


def test_a_file_for_one_episode_may_ask_nothing() -> None:
    assert "connect-src 'none'" in document({"run": None, "episode": None})
