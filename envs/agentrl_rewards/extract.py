r"""Find the final answer in a model's output.

Invariant: every function reads only the last `MAX_SEARCHED_CHARS` characters, in linear time.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import NamedTuple, TypeAlias

Extractor: TypeAlias = Callable[[str], str | None]
"""Returns the final answer in a response, or None."""
MAX_SEARCHED_CHARS = 50_000
"""Characters at the end of a response that are searched."""

_BOXED = re.compile(r"\\(?:boxed|fbox)\s{0,8}\{")
_BARE_BOX = re.compile(r"\\(?:boxed|fbox)(?![a-zA-Z{])\s{0,8}(?=[^\s{])")
_BARE_END = re.compile(r"\$|\\[)\]]|\n|[.,;](?=\s|$)|\\(?:boxed|fbox)|$")
_BARE_NUMBER = re.compile(r"([-+−]?\d[\d,]*(?:\.\d+)?)\s{1,8}[^\W\d_]{2}")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
_BETWEEN_CHARS = 70
_MAX_BARE_CHARS = 400
_SEPARATOR = re.compile(r"[,;&]|\b(?:and|or)\b")
_UNRELATED = re.compile(
    r"[.?!:=]|\n\s{0,8}\n\s{0,8}\S|(?i:\b(?:no|not|wait|but|instead|rather|actually|correct\w{0,5}|sorry|oops|hmm|so|then|hence|thus)\b)"
)
_LATEX_SPACE = re.compile(r"\\(?:quad|qquad|text|textbf|mbox|[,;:! ()\[\]])|[\s${}*]")
_STATED = re.compile(
    r"(?i:\banswer(?:\s{1,4}\w{1,12}){0,6}?\s{1,4}is\b\s{0,4}:?|\banswer\s{0,4}:|\banswer(?=\s{1,4}(?:\$|\\[(\[])))"
)
_DELIMITER = re.compile(r"\\.|\$\$|\$", re.DOTALL)
_CLOSING = {r"\[": r"\]", r"\(": r"\)", "$$": "$$", "$": "$"}
_ASIDE = re.compile(r",?\s(?:where|because|since|when|if|for)\s")
_NAMED = re.compile(r"[a-zA-Z]\w{0,8}(?:_\{?\w{1,8}\}?)?\s{0,4}=\s{0,4}$")
_SENTENCE_END = re.compile(r"[.!?](?=\s|$)|\n\s{0,8}\n|<\|")
_PROSE = re.compile(r"[^\W\d_]{2,}\s{1,8}[^\W\d_]{2,}|(?i:\b(?:and|or|is|the)\b)")
_COMMAND = re.compile(r"\\[a-zA-Z]{1,30}(?:\{[^{}]{0,200}\})?")
_LINKED = re.compile(r"\s{0,8}(?:,?\s{0,8}(?:and|or)|,)\s{0,8}")
_DENIED = re.compile(r"(?i:\b(?:not|isn't|never|neither|nor)\b)")
_NUMBER = re.compile(
    r"(?<![0-9A-Za-z_\u00c0-\u024f.,/])[-+−]?\$?(?:(?:\d{1,3}(?:,\d{3})+|\d+,\d{1,2}(?![\d,])|\d+)(?:\.\d+)?(?:[eE][-+]?\d{1,4}(?!\w)|/\d+(?![\d/]))?|\.\d+)%?(?![\d])"
)


class _Box(NamedTuple):
    start: int
    content_at: int
    end: int
    content: str


def boxed(response: str) -> str | None:
    r"""Return the content of the last complete `\boxed{...}`; of nested ones, of the inner one.

    Example:
        >>> boxed(r"So \boxed{1}, no: \boxed{\frac{1}{2}}.")
        '\\frac{1}{2}'
    """
    text = response[-MAX_SEARCHED_CHARS:]
    found = _complete_boxes(text)
    return found[-1].content or None if found else None


def boxes(response: str) -> str | None:
    r"""Return the boxes of the last answer, as a list: those that only a separator and a few words part.

    Example:
        >>> boxes(r"So \boxed{1} and \boxed{2}."), boxes(r"So \boxed{1}, no: \boxed{\frac{1}{2}}.")
        ('1, 2', '\\frac{1}{2}')
    """
    text = response[-MAX_SEARCHED_CHARS:]
    found = _complete_boxes(text)
    if not found:
        return None
    chosen = [found[-1]]
    for earlier in reversed(found[:-1]):
        if not _belongs(text[earlier.end : chosen[0].start]):
            break
        chosen.insert(0, earlier)
    contents = dict.fromkeys(box.content for box in chosen)
    return ", ".join(filter(None, contents)) or None


def _complete_boxes(text: str) -> list[_Box]:
    """Return the innermost complete boxes; one without braces holds the text to the end of its formula or sentence."""
    opened = {match.end(): match.start() for match in _BOXED.finditer(text)}
    found: list[_Box] = []
    stack: list[int] = []
    for match in _BRACE.finditer(text, min(opened) - 1) if opened else ():
        if match[0] == "{":
            stack.append(match.end())
        elif match[0] == "}" and stack and (start := stack.pop()) in opened and (not found or start > found[-1].content_at):
            found.append(_Box(opened[start], start, match.end(), text[start : match.end() - 1].strip()))
    for match in _BARE_BOX.finditer(text):
        end = _BARE_END.search(text, match.end(), match.end() + _MAX_BARE_CHARS)
        content = text[match.end() : end.start()].strip() if end is not None else ""
        number = _BARE_NUMBER.match(content)
        content = number[1] if number is not None else content
        if content:
            found.append(_Box(match.start(), match.end(), match.end() + len(content), content))
    return sorted(found)


def _belongs(between: str) -> bool:
    """Return whether the text between two boxes joins them to one answer."""
    if len(between) > _BETWEEN_CHARS:
        return False
    between = _NAMED.sub("", between)
    if _UNRELATED.search(between) is not None:
        return False
    return _SEPARATOR.search(between) is not None or not _LATEX_SPACE.sub("", between)


def stated(response: str) -> str | None:
    r"""Return the LaTeX after the last `answer is` or `answer:`, or the text to the end of the sentence.

    Example:
        >>> stated(r"The answer is $x \ge 5$ metres."), stated("The final answer is 3/4. I hope so.")
        ('x \\ge 5', '3/4')
    """
    text = response[-MAX_SEARCHED_CHARS:]
    marks = list(_STATED.finditer(text))
    if not marks:
        return None
    rest = text[marks[-1].end() :].lstrip(" *\n\t:")
    formulas = _formulas_at_start(rest)
    if formulas is not None:
        return formulas
    end = _SENTENCE_END.search(rest)
    sentence = (rest[: end.start()] if end is not None else rest).strip(" *")
    if _DENIED.search(sentence) is None and _PROSE.search(_COMMAND.sub(" ", sentence)) is not None:
        return _of_prose(sentence)
    return sentence or None


def _of_prose(sentence: str) -> str:
    """Return the one formula or number in a sentence that has no other, else the sentence."""
    told = _ASIDE.split(sentence, maxsplit=1)[0]
    formulas = _formulas(told)
    if len(formulas) == 1:
        start, end, content = formulas[0]
        outside = told[:start] + " " + told[end:]
        if _NUMBER.search(outside) is None:
            return content
        return told if _NUMBER.search(content) is not None else (last_number(outside) or told)
    return told if formulas or len(_NUMBER.findall(told)) != 1 else (last_number(told) or told)


def _formulas_at_start(text: str) -> str | None:
    """Return the formulas that text starts with, joined as it joins them; None if an alternative in words follows."""
    parts: list[str] = []
    position = 0
    for start, end, content in _formulas(text):
        if start != position:
            break
        parts.append(content)
        linked = _LINKED.match(text, end)
        if linked is None:
            return ", ".join(parts)
        position = linked.end()
    return None


def last_formula(response: str) -> str | None:
    r"""Return the LaTeX that a response ends with, if no number follows it; a sum of money such as `$5 and $` is none.

    Example:
        >>> last_formula(r"Hence \(x \ge 5\)."), last_formula("It costs $5 and $3.")
        ('x \\ge 5', None)
    """
    text = response[-MAX_SEARCHED_CHARS:]
    formulas = _formulas(text)
    if not formulas or re.search(r"\d", text[formulas[-1][1] :]) is not None:
        return None
    return formulas[-1][2]


def _formulas(text: str) -> list[tuple[int, int, str]]:
    """Return where each formula starts and ends, and its content; dollars around prose are no formula."""
    found: list[tuple[int, int, str]] = []
    opened: re.Match[str] | None = None
    for mark in _DELIMITER.finditer(text):
        if opened is None:
            opened = mark if mark[0] in _CLOSING else None
        elif mark[0] == _CLOSING[opened[0]]:
            content = text[opened.end() : mark.start()].strip()
            is_prose = opened[0] == "$" and _PROSE.search(_COMMAND.sub(" ", content)) is not None
            if content and not is_prose:
                found.append((opened.start(), mark.end(), content))
            opened = mark if is_prose else None
    return found


def last_number(response: str) -> str | None:
    """Return the last number, without thousands separators and currency sign: an integer, decimal, fraction or percentage.

    Example:
        >>> last_number("It costs 2 * $1,234.50 in total.")
        '1234.50'
    """
    found = None
    for found in _NUMBER.finditer(response[-MAX_SEARCHED_CHARS:]):  # noqa: B007 - the last one is used
        pass
    return None if found is None else re.sub(r"[$+]|,(?=\d{3})", "", found[0]).replace("−", "-")


def after(marker: str) -> Extractor:
    r"""Return an extractor of what follows the last `marker` on its line, as `after("####")` finds 10 in `#### 10`."""

    def extract(response: str) -> str | None:
        _, found, rest = response[-MAX_SEARCHED_CHARS:].rpartition(marker)
        return rest.partition("\n")[0].strip() or None if found else None

    return extract


def first_of(*extractors: Extractor) -> Extractor:
    r"""Return an extractor that tries others in order and takes the first answer."""

    def extract(response: str) -> str | None:
        return next((answer for extractor in extractors if (answer := extractor(response)) is not None), None)

    return extract


final_answer: Extractor = first_of(boxes, stated, last_formula, last_number)
"""All boxes of the last answer; or else what follows `answer is`, the LaTeX that ends the response, or its last number."""
