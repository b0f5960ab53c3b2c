r"""What stands around an answer and says nothing: marks of formulas, fonts, colours, Markdown and the stop of a sentence.

Invariant: every function is pure and takes time linear in a text that `MathGrader` bounds, but for nested wrappers.
"""

from __future__ import annotations

import re
from typing import Final

from agentrl_rewards.words import names_only_functions

_OUTER: Final = re.compile(r"\\[\[(](.*)\\[\])]|\$\$(.*)\$\$|\$(.*)\$", re.DOTALL)
_DOLLAR: Final = re.compile(r"(?<!\\)\$")
_FONTS: Final = (
    "mathbf|mathit|mathsf|mathtt|mathnormal|bm|bold|boldsymbol|underline|uline|emph|fbox|boxed|hbox|ensuremath|pmb"
)
_TEXTS: Final = "text|textbf|textit|textrm|textsf|texttt|textnormal|textup|mbox|mathrm|operatorname"
_OPENED: Final = re.compile(
    rf"\\(?:({_FONTS})|({_TEXTS})|(?:textcolor|colorbox|color)\s?(?:\[[^\[\]]*\])?\{{[^{{}}]*\}})\s?\{{"
)
_DECLARED: Final = re.compile(
    r"\\(?:bf|it|rm|sf|tt|sl|bfseries|itshape|boldmath|tiny|small|normalsize|large|Large|LARGE|huge|Huge|displaystyle|"
    r"textstyle|scriptstyle|color\s?\{[^{}]*\}(?!\s?\{))(?![a-zA-Z])\s?"
)
_BRACE: Final = re.compile(r"\\.|[{}]", re.DOTALL)
_MARKDOWN: Final = re.compile(r"(\*\*|__|`)(.+)\1", re.DOTALL)
_STOP: Final = re.compile(r"(?:(?<!\.)\.|[,;:])(?:\s|\\[,;: !]|~)*$")
_ENDING: Final = re.compile(r"(?:\s|(?<!\\)\\[,;:! ]|~|(?<!\\)\\)+$")
_MAX_WRAPPERS: Final = 20


def unwrapped(text: str) -> str:
    r"""Return an answer without what is around it, and without fonts inside it; `\text` of words stays.

    Example:
        >>> unwrapped(r"$\mathbf{12}.$"), unwrapped(r"**\text{12}**"), unwrapped(r"3\text{ cm}")
        ('12', '12', '3\\text{ cm}')
    """
    for _ in range(_MAX_WRAPPERS):
        before = text
        text = _without_fonts(_without_marks(text))
        if text == before:
            break
    return text


def _without_marks(text: str) -> str:
    text = _ENDING.sub("", text.strip()).strip().removeprefix("=").lstrip()
    outer = _OUTER.fullmatch(text)
    if outer is not None and "$" not in (inner := next(part for part in outer.groups() if part is not None)):
        text = inner.strip()
    if (marks := len(_DOLLAR.findall(text))) and marks % 2 == 0:
        text = _DOLLAR.sub("", text)
    markdown = _MARKDOWN.fullmatch(text)
    if markdown is not None and markdown[1] not in markdown[2]:
        text = markdown[2].strip()
    if not text.endswith(("a.m.", "p.m.")) and len(without := _STOP.sub("", text)) > 0:
        text = without.strip()
    text = _DECLARED.sub("", text)
    inside = text[1:-1]
    return inside.strip() if text[:1] == "{" and _brace_end(text, 1) == len(text) and "," not in inside else text


def _without_fonts(text: str) -> str:
    """Return the text without the commands of fonts, and of text around numbers."""
    position = 0
    while (found := _OPENED.search(text, position)) is not None:
        end = _brace_end(text, found.end())
        if end is None:
            return text
        content, is_whole = text[found.end() : end - 1], found.start() == 0 and end == len(text)
        if found[2] is not None and not _is_formula(content, is_whole=is_whole):
            position = found.end()
            continue
        before, after = text[: found.start()], text[end:]
        if before.rstrip()[-1:] in ("^", "_"):
            content = f"{{{content}}}"
        elif (before[-1:] + content[:1]).isalpha() or (content[-1:] + after[:1]).isalpha():
            content = f" {content} "
        text = before + content + after
        position = len(before)
    return text


def _is_formula(content: str, *, is_whole: bool) -> bool:
    r"""Return whether the content of `\text` is mathematics: digits, and no word beside them unless it is the answer."""
    if not any(character.isdigit() for character in content):
        return is_whole and names_only_functions(content) and re.search(r"[a-zA-Z]{2}|[\\^_]", content) is not None
    return is_whole or re.search(r"(?<![\\a-zA-Z])[a-zA-Z]{2}", content) is None


def _brace_end(text: str, start: int) -> int | None:
    """Return where the brace that opens before `start` is closed."""
    depth = 1
    for mark in _BRACE.finditer(text, start):
        depth += {"{": 1, "}": -1}.get(mark[0], 0)
        if depth == 0:
            return mark.end()
    return None
