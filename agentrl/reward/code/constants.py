"""Programs that answer with a constant: they show what a test set pays for nothing.

Invariant: the share of a constant is computed with the comparison of the grader, and nothing is run.
"""

from __future__ import annotations

from typing import Final

from agentrl.reward.code.cases import CallCase, FunctionTests, HiddenTests, ProgramTests
from agentrl.reward.code.compare import output_matches, value_matches
from agentrl.reward.code.loose import apply_views
from agentrl.reward.code.module_tests import ModuleTests
from agentrl.reward.code.values import encode_value, read_value_tree, tree_text

_CONSTANTS: Final[tuple[object, ...]] = (None, 0, 1, -1, True, False, "", [], {})


def best_constant(tests: HiddenTests) -> tuple[str, float] | None:
    r"""Return the program whose constant answer passes the most tests, and their share; None if no constant passes one.

    It is None for a test file too, since no constant can be tried without running it.

    Example:
        >>> from agentrl.reward.code import call_tests
        >>> best_constant(call_tests([("f(1)", "2"), ("f(2)", "2"), ("f(3)", "0")]))
        ('def f(*_, **__):\n    return 2\n', 0.6666666666666666)
    """
    if isinstance(tests, ModuleTests):
        return None
    if isinstance(tests, ProgramTests):
        texts = dict.fromkeys(["", *(case.expected for case in tests.cases)])
        scored = [(f"print({text!r}, end='')\n", _share_of_output(text, tests)) for text in texts]
    else:
        expected = {encode_value(case.expected): case.expected for case in tests.cases}
        constants = {encode_value(each): each for each in _CONSTANTS} | expected
        scored = [(_program(tests.entry, value), _share_of_value(text, tests)) for text, value in constants.items()]
    best = max(scored, key=lambda pair: pair[1])
    return best if best[1] > 0 else None


def _program(entry: str, value: object) -> str:
    *outer, name = entry.split(".")
    pad = "    " * len(outer)
    body = f"{pad}def {name}(*_, **__):\n{pad}    return {value!r}\n"
    return "".join(f"{'    ' * at}class {each}:\n" for at, each in enumerate(outer)) + body


def _share_of_output(text: str, tests: ProgramTests) -> float:
    output = text.encode(errors="surrogatepass")
    passed = [output_matches(case.expected, output, tests.tolerance, tests.comparison) for case in tests.cases]
    return sum(passed) / len(passed)


def _share_of_value(text: str, tests: FunctionTests) -> float:
    return sum(_passes(text, case, tests) for case in tests.cases) / len(tests.cases)


def _passes(text: str, case: CallCase, tests: FunctionTests) -> bool:
    seen = apply_views(case.views, read_value_tree(text))
    if seen is None:
        return False
    return value_matches(encode_value(case.expected), tree_text(seen[0]), tests.tolerance, tests.comparison)
