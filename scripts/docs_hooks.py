"""What `mkdocs build` does to a page before it becomes HTML.

Links from the documentation to other files of the repository work on a code host and in an editor. The site holds the
documentation only, so there such a link becomes its text and the path of the file.
"""

from __future__ import annotations

import posixpath
import re

_LINK = re.compile(r"(?<!!)\[([^\]]+)\]\((?!https?://|#)([^)#]+)(#[^)]*)?\)")


def without_outer_links(markdown: str, page: str) -> str:
    """Return the text of `page`, a path in the documentation, with links out of the documentation as text."""
    folder = posixpath.dirname(page)

    def plain(link: re.Match[str]) -> str:
        text, target = link[1], posixpath.normpath(posixpath.join(folder, link[2]))
        if not target.startswith("../"):
            return link[0]
        path = target.removeprefix("../")
        return text if path.endswith(text.strip("`").rstrip("/")) else f"{text} (`{path}`)"

    return _LINK.sub(plain, markdown)


def on_page_markdown(markdown: str, *, page: object, **_: object) -> str:
    """Return the Markdown of a page as the site needs it; mkdocs calls this for every page."""
    return without_outer_links(markdown, page.file.src_uri)  # pyright: ignore[reportAttributeAccessIssue] - a mkdocs page
