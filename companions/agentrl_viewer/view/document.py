"""The page of the viewer: the files of `page/` joined into one document, which needs nothing else.

Invariant: the document runs the script of this package and no other. Its policy names that script and style by their
digests, so text of a run cannot become code, even where a mistake would make it markup.
"""

from __future__ import annotations

import base64
import hashlib
import re
from importlib.resources import files

import orjson

from agentrl.types import JsonValue

_FOLDER = files("agentrl_viewer.view") / "page"
STYLES = ("style.css", "episodes.css")
SCRIPTS = (
    *("base.js", "route.js", "store.js", "chart.js", "cards.js", "curves.js", "timeline.js", "filters.js", "table.js"),
    *(
        "episodes.js",
        "messages.js",
        "tokens.js",
        "tree.js",
        "episode.js",
        "compare.js",
        "runs.js",
        "staleness.js",
        "main.js",
    ),
)
"""The order matters to the last one only, which starts the page."""


def document(embedded: JsonValue = None) -> str:
    """Return the page as HTML.

    Args:
        embedded: what a file for one episode carries, `{"run": ..., "episode": ...}`; None: the page asks its server.
    """
    style, script = _page_files(STYLES), _page_files(SCRIPTS)
    connect = "'self'" if embedded is None else "'none'"
    parts = {
        "POLICY": content_policy(style, script, connect=connect),
        "STYLE": style,
        "EMBEDDED": "" if embedded is None else script_json(embedded),
        "SCRIPT": script,
    }
    # In one pass: the text of a run may hold the name of a place.
    return re.sub("@(POLICY|STYLE|EMBEDDED|SCRIPT)@", lambda place: parts[place[1]], _page_file("index.html"))


def content_policy(style: str, script: str, *, connect: str) -> str:
    """Return the policy that allows this style, this script and requests to `connect`, and nothing else."""
    allowed = f"script-src '{_source_digest(script)}'; style-src '{_source_digest(style)}'; connect-src {connect}"
    return f"default-src 'none'; {allowed}; img-src data:; base-uri 'none'; form-action 'none'"


def script_json(value: JsonValue) -> str:
    r"""Return JSON that can stand inside a script element: no text of it ends the element or opens a comment.

    Example:
        >>> script_json({"text": "</script><!--"})
        '{"text":"\\u003c/script\\u003e\\u003c!--"}'
    """
    text = orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS).decode()
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def _page_files(names: tuple[str, ...]) -> str:
    return "\n".join(_page_file(name) for name in names)


def _page_file(name: str) -> str:
    return (_FOLDER / name).read_text(encoding="utf-8")


def _source_digest(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
