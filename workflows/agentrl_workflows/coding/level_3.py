"""Families of level 3: an algorithm, such as a table of partial results, a search, or a recursion."""

from __future__ import annotations

from random import Random

from agentrl_workflows.coding.parts import Draft, Family, integers, letters, make_draft, number_test


def recurrences(rng: Random) -> Draft:
    """A sequence by its rule."""
    a, b, c = rng.randint(1, 4), rng.randint(1, 4), rng.randint(0, 5)
    first, second, modulus = rng.randint(0, 4), rng.randint(1, 6), rng.choice([97, 101, 1000, 1009, 9973])
    lag = rng.randint(2, 4)
    words, code, wrong = rng.choice(
        [
            ("item number `n`", "items[n]", "items[n - 1]"),
            ("the sum of the items number 0 to `n`", "sum(items[:n + 1])", "sum(items[:n])"),
            (
                "how many of the items number 0 to `n` are odd",
                "sum(x % 2 for x in items[:n + 1])",
                "sum(x % 2 for x in items[:n])",
            ),
            ("the largest of the items number 0 to `n`", "max(items[:n + 1])", "items[n]"),
        ]
    )
    return make_draft(
        "sequence(n)",
        f"In a sequence, the items number 0 to <L0> are <F>, and item <L0> is <S> instead if <L0> is odd. Each later item is <A> times the one before it plus <B> times the one <L> places before it plus <C>, and of this the remainder by <M>. Return {words}.",
        f"    items = [<F>] * <L>\n    if <L0> % 2 == 1:\n        items[<L0>] = <S>\n    while len(items) <= n:\n        items.append((<A> * items[-1] + <B> * items[-<L>] + <C>) % <M>)\n    return {code}",
        [("<B> * items[-<L>]", "<B> * items[-1]"), ("+ <C>)", "+ <C> + 1)"), (f"return {code}", f"return {wrong}")],
        [(n,) for n in (lag + 4, 0, 1, 2, lag, lag + 1, 12, 25, 40, 63, 100)],
        A=a, B=b, C=c, F=first, S=second, M=modulus, L=lag, L0=lag - 1,
    )  # fmt: skip


def coins(rng: Random) -> Draft:
    """Sums of given coins."""
    values = sorted(rng.sample([1, 2, 3, 4, 5, 6, 7, 8, 9, 11, 12, 15], rng.randint(3, 4)))
    words, start, step, end, wrongs = rng.choice(
        [
            (
                "in how many ways coins of these values add up to `amount`; the order of the coins does not count",
                "[1] + [0] * amount",
                "table[s] += table[s - v]",
                "table[amount]",
                [("[1] + [0]", "[0] + [1]"), ("range(v, amount + 1)", "range(amount, v - 1, -1)")],
            ),
            (
                "in how many ways coins of these values, each used at most twice, add up to `amount`; the order does not count",
                "[1] + [0] * amount",
                "table[s] += table[s - v] + (table[s - 2 * v] if s >= 2 * v else 0)",
                "table[amount]",
                [("if s >= 2 * v", "if s > 2 * v"), ("range(amount, v - 1, -1)", "range(v, amount + 1)")],
            ),
            (
                "the least number of coins of these values that add up to `amount`, -1 if none do",
                "[0] + [10 ** 9] * amount",
                "table[s] = min(table[s], table[s - v] + 1)",
                "table[amount] if table[amount] < 10 ** 9 else -1",
                [("table[s - v] + 1)", "table[s - v] + v)"), ("else -1", "else 0")],
            ),
            (
                "the least number of coins of these values, each used at most once, that add up to `amount`, -1 if none do",
                "[0] + [10 ** 9] * amount",
                "table[s] = min(table[s], table[s - v] + 1)",
                "table[amount] if table[amount] < 10 ** 9 else -1",
                [("table[s - v] + 1)", "table[s - v] + v)"), ("range(amount, v - 1, -1)", "range(v, amount + 1)")],
            ),
            (
                "the largest sum of at most `amount` that coins of these values, each used at most once, can make",
                "[1] + [0] * amount",
                "table[s] = table[s] or table[s - v]",
                "max(s for s in range(amount + 1) if table[s])",
                [("range(amount, v - 1, -1)", "range(v, amount + 1)"), ("max(s", "min(s")],
            ),
        ]
    )
    down = "at most" in words and "largest sum of at most" not in words or "largest sum" in words
    loop = "range(amount, v - 1, -1)" if down else "range(v, amount + 1)"
    total = sum(values)
    pool = [
        rng.randint(8, 22),
        0,
        1,
        values[0],
        values[1],
        values[-1],
        sum(values[:2]),
        total,
        total + 1,
        rng.randint(5, 15),
        rng.randint(15, 40),
        2 * values[1],
        values[0] + 2 * values[-1],
    ]
    return make_draft(
        "coins(amount)",
        f"There are coins of the values {', '.join(map(str, values))}. Return {words}.",
        f"    table = {start}\n    for v in {values}:\n        for s in {loop}:\n            {step}\n    return {end}",
        [*wrongs, (f"in {values}", f"in {values[:-1]}"), (f"in {values}", f"in {values[1:]}")],
        [(n,) for n in pool],
    )


def rising_parts(rng: Random) -> Draft:
    """The best part of a list whose neighbors obey a rule."""
    k = rng.randint(1, 4)
    rule, code, wrong = rng.choice(
        [
            (f"is at least {k} larger than the one before it", f"y - x >= {k}", f"y - x > {k}"),
            (f"is larger than the one before it, by at most {k + 2}", f"0 < y - x <= {k + 2}", "0 < y - x"),
            (f"differs from the one before it by exactly {k}", f"abs(y - x) == {k}", f"y - x == {k}"),
            ("is a multiple of the one before it", "y % x == 0", "y >= x"),
            (
                f"is smaller than the one before it, or more than {k + 3} larger",
                f"y < x or y > x + {k + 3}",
                f"y < x or y >= x + {k + 3}",
            ),
        ]
    )
    what, gain, gain_wrong = rng.choice([("the largest number of items", "1", "2"), ("the largest sum of items", "y", "1")])
    near, window, window_wrong = rng.choice(
        [
            ("", "range(i)", "range(max(0, i - 1), i)"),
            (
                f" Between two neighbors of the selection at most {k} items of the list may be left out.",
                f"range(max(0, i - {k + 1}), i)",
                "range(i)",
            ),
        ]
    )
    return make_draft(
        "best_selection(values)",
        f"Select some items of a list of positive integers, in the order of the list, so that each selected item after the first {rule}.{near} Return {what} in such a selection, 0 for an empty list.",
        f"    best = []\n    for i, y in enumerate(values):\n        before = [best[j] for j in {window} for x in [values[j]] if {code}]\n        best.append({gain} + max(before, default=0))\n    return max(best, default=0)",
        [
            (f"if {code}", f"if {wrong}"),
            (window, window_wrong),
            (f"append({gain} +", f"append({gain_wrong} +"),
            ("max(best, default=0)", "(best or [0])[-1]"),
        ],
        [([rng.randint(1, 14) for _ in range(n)],) for n in (8, 0, 1, 9, 10, 12, 14, 11, 13, 15, 12)],
    )


def grid_paths(rng: Random) -> Draft:
    """Ways through a grid."""
    moves = rng.choice(
        [
            [(0, 1), (1, 0)],
            [(0, 1), (1, 0), (1, 1)],
            [(0, 1), (1, 1)],
            [(1, -1), (1, 0), (1, 1)],
            [(0, 2), (1, 0)],
            [(1, 2), (2, 1)],
            [(0, 1), (2, 0)],
            [(1, 0), (1, 1), (0, 3)],
        ]
    )
    shown = " or ".join(
        f"{a} down and {b} to the {'right' if b >= 0 else 'left'}".replace("-1 to", "1 to") for a, b in moves
    )
    many = rng.choice(["count", "best", "cheapest"])
    if many == "count":
        words, cell, join, none = (
            "the number of ways from the top left field to the bottom right one that enter no `#` field (0 if one of the two is `#`)",
            "0 if grid[i][j] == '#' else",
            "sum(came)",
            "0",
        )
        start, text = "1", True
    else:
        words = f"the {'largest' if many == 'best' else 'smallest'} sum of the fields of a way from the top left field to the bottom right one, both included; None if there is no way"
        cell, join, none, start, text = (
            "",
            ("max" if many == "best" else "min") + "(came, default=None)",
            "None",
            "grid[0][0]",
            False,
        )
    body = f"""
    height, width = len(grid), len(grid[0])
    table = {{}}
    for i in range(height):
        for j in range(width):
            came = [table[i - a, j - b] for a, b in {moves} if table.get((i - a, j - b)) is not None]
            found = {join}
"""
    if text:
        body += "            table[i, j] = 0 if grid[i][j] == '#' else (1 if i == j == 0 else found)\n"
        wrongs = [
            ("0 if grid[i][j] == '#' else ", ""),
            ("1 if i == j == 0 else found", "1 if i == 0 else found"),
            (str(moves), str(moves[:-1])),
            (str(moves), str([*moves, (2, 2)])),
        ]
    else:
        body += "            table[i, j] = grid[0][0] if i == j == 0 else None if found is None else found + grid[i][j]\n"
        wrongs = [
            ("found + grid[i][j]", "found + 1"),
            (join, ("min" if many == "best" else "max") + "(came, default=None)"),
            (str(moves), str(moves[:-1])),
            (str(moves), str([*moves, (2, 2)])),
        ]
    body += "    return table[height - 1, width - 1]"
    sizes = [
        (4, 4),
        (1, 1),
        (2, 2),
        (3, 3),
        (1, 3),
        (3, 1),
        (3, 5),
        (5, 3),
        (5, 5),
        (4, 6),
        (6, 4),
        (5, 4),
        (4, 5),
        (3, 4),
        (6, 6),
    ]

    def grid(n: int, m: int) -> list[object]:
        if text:
            return ["".join("#" if rng.random() < 0.15 and (i, j) != (0, 0) else "." for j in range(m)) for i in range(n)]
        return [[rng.randint(-3, 9) for _ in range(m)] for _ in range(n)]

    kind = "texts of `.` and `#`" if text else "lists of integers"
    return make_draft(
        "cross(grid)",
        f"`grid` is a list of rows, which are {kind} of one length. A way moves, in each step, {shown}. Return {words}.",
        body,
        wrongs,
        [(grid(*size),) for size in sizes],
    )


def grid_searches(rng: Random) -> Draft:
    """The shortest way by given moves."""
    a, b = rng.choice([(0, 1), (1, 1), (1, 2), (0, 2), (1, 3), (2, 2), (2, 3)])
    moves = sorted({(x, y) for p, q in ((a, b), (b, a)) for x in (p, -p) for y in (q, -q)})
    wrap = rng.choice([True, False])
    extra = rng.choice([(), ((1, 0),), ((0, -1),), ((-1, -1),)])
    moves = sorted({*moves, *extra})
    more = f" or ({extra[0][0]}, {extra[0][1]})" if extra and extra[0] in moves else ""
    words, end, wrong = rng.choice(
        [
            (
                "the least number of moves from `start` to `goal`, -1 if it cannot be reached",
                "seen.get(tuple(goal), -1)",
                "seen.get(tuple(goal), 0)",
            ),
            (
                "how many fields can be reached from `start` in at most as many moves as the number `goal[0] + goal[1]`, `start` included",
                "sum(d <= goal[0] + goal[1] for d in seen.values())",
                "sum(d < goal[0] + goal[1] for d in seen.values())",
            ),
        ]
    )
    place = "((i + x) % size, (j + y) % size)" if wrap else "(i + x, j + y)"
    inside = "True" if wrap else "0 <= to[0] < size and 0 <= to[1] < size"
    edge = (
        "The board has no edges: a move that leaves it comes in at the opposite side."
        if wrap
        else "A move may not leave the board."
    )
    return make_draft(
        "moves(size, start, goal, blocked)",
        f"On a board of `size` times `size` fields, a move adds (x, y) to the row and column of a piece, where one of x and y is {a} or -{a} and the other {b} or -{b}{more}. {edge} `start` and `goal` are fields as lists of row and column, from 0; `blocked` is a list of such fields that no move may end on. Return {words}.".replace(
            "-0", "0"
        ).replace("0 or 0", "0"),
        f"""
    seen, queue = {{tuple(start): 0}}, [tuple(start)]
    walls = set(map(tuple, blocked))
    for i, j in queue:
        for x, y in {moves}:
            to = {place}
            if {inside} and to not in walls and to not in seen:
                seen[to] = seen[i, j] + 1
                queue.append(to)
    return {end}
""",
        [
            (str(moves), str(moves[:-1])),
            (" and to not in walls", ""),
            (f"return {end}", f"return {wrong}"),
            ("seen[i, j] + 1", "seen[i, j] + 2"),
        ],
        [
            (
                n,
                [rng.randrange(n), rng.randrange(n)],
                [rng.randrange(n), rng.randrange(n)],
                [[rng.randrange(n), rng.randrange(n)] for _ in range(w)],
            )
            for n, w in ((5, 4), (1, 0), (3, 2), (4, 5), (6, 8), (5, 6), (7, 12), (4, 3), (6, 5), (8, 20), (5, 9), (6, 13))
        ],
    )


def components(rng: Random) -> Draft:
    """Groups of numbers that a relation joins."""
    k = rng.randint(2, 6)
    rule, code, wrong = rng.choice(
        [
            (f"their distance is at most {k}", f"abs(x - y) <= {k}", f"abs(x - y) < {k}"),
            ("they share a decimal digit", "set(str(x)) & set(str(y))", "str(x)[0] == str(y)[0]"),
            (f"their sum is divisible by {k + 3}", f"(x + y) % {k + 3} == 0", f"(x + y) % {k + 2} == 0"),
            (
                f"they have a common divisor above {k - 1}",
                f"any(x % d == 0 and y % d == 0 for d in range({k}, min(x, y) + 1))",
                f"any(x % d == 0 and y % d == 0 for d in range({k + 1}, min(x, y) + 1))",
            ),
            (f"one is {k} times the other", f"x == {k} * y or y == {k} * x", f"x == {k} * y"),
        ]
    )
    end, end_code, end_wrong = rng.choice(
        [
            ("the number of groups", "len(groups)", "len(numbers)"),
            (
                "the size of the largest group (0 if there is none)",
                "max(map(len, groups), default=0)",
                "min(map(len, groups), default=0)",
            ),
            (
                "the groups as sorted lists, the one with the smallest number first",
                "sorted(sorted(g) for g in groups)",
                "[sorted(g) for g in groups][::-1]",
            ),
            (
                "the largest sum of a group (0 if there is none)",
                "max(map(sum, groups), default=0)",
                "max(numbers, default=0)",
            ),
        ]
    )

    def numbers(n: int) -> list[int]:
        found = [rng.randint(1, 60) for _ in range(n)]
        return [*found, *(x * k for x in found[: n // 3])]

    return make_draft(
        "join(numbers)",
        f"Two different numbers of a list of positive integers are related if {rule}. Numbers that a chain of related ones connects belong to one group; equal numbers count once. Return {end}.",
        f"""
    left, groups = set(numbers), []
    while left:
        queue = [min(left)]
        left.discard(queue[0])
        for x in queue:
            near = sorted(y for y in left if {code})
            left.difference_update(near)
            queue += near
        groups.append(queue)
    return {end_code}
""",
        [
            (f"if {code})", f"if {wrong})"),
            ("            queue += near\n", "            queue = queue + near\n"),
            (f"return {end_code}", f"return {end_wrong}"),
        ],
        [(numbers(n),) for n in (6, 0, 1, 7, 8, 9, 10, 12, 6, 11, 9)],
    )


def brackets(rng: Random) -> Draft:
    """Nested brackets."""
    kinds = rng.sample(["()", "[]", "{}", "<>"], rng.randint(2, 3))
    pairs = {kind[1]: kind[0] for kind in kinds}
    most = rng.randint(2, 4)
    words, code, wrong = rng.choice(
        [
            (
                f"whether they are closed in the right order and never more than {most} deep",
                f"right and not stack and deepest <= {most}",
                f"right and not stack and deepest < {most}",
            ),
            (
                "the depth of the deepest one if all are closed in the right order, else -1",
                "deepest if right and not stack else -1",
                "deepest if right else -1",
            ),
            (
                "the position, from 0, of the first character that closes what is not open (-1 if there is none)",
                "wrong_at",
                "-1 if right else len(stack)",
            ),
            (
                "the number of brackets that are still open at the end, or before the first character that closes what is not open",
                "len(stack)",
                "deepest",
            ),
        ]
    )
    rank = "".join(kind[0] for kind in kinds)
    nested = rng.choice([True, False])
    rule = (
        f" A bracket may not stand directly inside one of its own kind; where it does, it counts as one that closes what is not open."
        if nested
        else ""
    )
    extra = (
        "            if stack and stack[-1] == c:\n                right, wrong_at = False, i\n                break\n"
        if nested
        else ""
    )

    def text(n: int) -> str:
        open_ones: list[str] = []
        found = ""
        for _ in range(n):
            if open_ones and rng.random() < 0.45:
                found += open_ones.pop()[1]
            else:
                fitting = [kind for kind in kinds if not nested or not open_ones or open_ones[-1] != kind] or kinds
                open_ones.append(rng.choice(fitting))
                found += open_ones[-1][0]
            found += rng.choice(["", "", "a"])
        found += "".join(kind[1] for kind in open_ones[::-1])
        return found if rng.random() < 0.6 else found.replace(rng.choice(kinds)[rng.randrange(2)], rng.choice(kinds)[1], 1)

    return make_draft(
        "check(text)",
        f"A text holds the brackets {', '.join(f'`{kind}`' for kind in kinds)} and letters, which do not count.{rule} Return, for its brackets, {words}.",
        f"""
    stack, deepest, right, wrong_at = [], 0, True, -1
    pairs = {pairs}
    for i, c in enumerate(text):
        if c in {rank!r}:
{extra}            stack.append(c)
            deepest = max(deepest, len(stack))
        elif c in pairs:
            if not stack or stack[-1] != pairs[c]:
                right, wrong_at = False, i
                break
            stack.pop()
    return {code}
""",
        [
            (f"return {code}", f"return {wrong}"),
            ("if not stack or stack[-1] != pairs[c]", "if not stack"),
            ("            stack.pop()\n", "            stack.pop(0)\n"),
        ],
        [(text(n),) for n in (6, 0, 1, 4, 5, 6, 7, 8, 9, 10, 12, 14, 11, 13)],
    )


def postfix(rng: Random) -> Draft:
    """Expressions with the operators after (or before) their operands."""
    k, m = rng.randint(2, 5), rng.randint(5, 9)
    pool = {
        "+": ("adds", "a + b"),
        "-": ("subtracts the second from the first", "a - b"),
        "*": ("multiplies", "a * b"),
        "^": ("takes the larger", "max(a, b)"),
        "v": ("takes the smaller", "min(a, b)"),
        "@": (f"adds {k} times the second to the first", f"a + {k} * b"),
        "~": ("takes the distance", "abs(a - b)"),
        "%": (f"takes the remainder of the sum by {m}", f"(a + b) % {m}"),
        "$": (f"subtracts {k} from the product", f"a * b - {k}"),
    }
    names = [rng.choice("-@$"), *rng.sample("+*^v~%", 2)]
    shown = "; ".join(f"`{name}` {pool[name][0]}" for name in names)
    prefix = rng.choice([True, False])
    before = "before" if prefix else "after"
    tokens = "text.split()[::-1]" if prefix else "text.split()"
    take = "a, b = stack.pop(), stack.pop()" if prefix else "b, a = stack.pop(), stack.pop()"
    bad = rng.choice([-1, 0, None])
    rules = "".join(
        f"            {'if' if at == 0 else 'elif'} token == {name!r}:\n                stack.append({pool[name][1]})\n"
        for at, name in enumerate(names)
    )

    def expression(n: int) -> list[str]:
        if n == 0:
            return [str(rng.randint(0, 9))]
        left = rng.randrange(n)
        parts = [expression(left), expression(n - 1 - left)]
        sign = [rng.choice(names)]
        return [*sign, *parts[0], *parts[1]] if prefix else [*parts[0], *parts[1], *sign]

    texts = [" ".join(expression(n)) for n in (3, 0, 1, 2, 2, 3, 4, 4, 5, 6)]
    return make_draft(
        "evaluate(text)",
        f"`text` holds numbers and operators with one space between two; an operator stands {before} its two operands, each of which is a number or such an expression. {shown[0].upper()}{shown[1:]}. Return its value, {bad} if the text is no single expression.",
        f"""
    stack = []
    for token in {tokens}:
        if token.isdigit():
            stack.append(int(token))
        else:
            if len(stack) < 2:
                return {bad}
            {take}
{rules}    return stack[0] if len(stack) == 1 else {bad}
""",
        [
            (take, "b, a = stack.pop(), stack.pop()" if prefix else "a, b = stack.pop(), stack.pop()"),
            ("if len(stack) == 1 else", "if stack else"),
            (pool[names[1]][1], pool[names[0]][1]),
            (pool[names[2]][1], "a"),
        ],
        [(text,) for text in [*texts, f"{texts[1]} 5", names[0], f"4 {names[1]}", ""]],
    )


def edit_costs(rng: Random) -> Draft:
    """The cheapest way to turn one text into another."""
    insert, delete, replace = rng.randint(1, 4), rng.randint(1, 4), rng.randint(1, 6)
    swap = rng.choice([None, 1, 2])
    vowels = rng.choice([True, False])
    price = f"(<R> + 1 if x in 'aeiou' else <R>)" if vowels else "<R>"
    words = "; replacing a vowel (a, e, i, o, u) costs 1 more" if vowels else ""
    swap_words = (
        f" Two neighboring letters may also be swapped for {swap}, if both stand as they are in the result." if swap else ""
    )
    swap_code = ""
    if swap:
        swap_code = f"            if i > 1 and j > 1 and x == b[j - 2] and y == a[i - 2]:\n                table[i, j] = min(table[i, j], table[i - 2, j - 2] + {swap})\n"
    base = rng.choice(["abc", "aeb", "stao", "mnei"])
    return make_draft(
        "cost(a, b)",
        f"Inserting a letter costs <I>, deleting one <D>, and replacing one by another <R>{words}.{swap_words} Return the least cost that turns the text `a` into the text `b`.",
        f"""
    table = {{}}
    for i in range(len(a) + 1):
        for j in range(len(b) + 1):
            if i == 0 or j == 0:
                table[i, j] = <D> * i + <I> * j
                continue
            x, y = a[i - 1], b[j - 1]
            change = 0 if x == y else {price}
            table[i, j] = min(table[i - 1, j] + <D>, table[i, j - 1] + <I>, table[i - 1, j - 1] + change)
{swap_code}    return table[len(a), len(b)]
""",
        [("table[i - 1, j] + <D>", "table[i - 1, j] + <D> + 1"), ("change = 0 if x == y else", "change = 1 if x == y else"), ("<D> * i + <I> * j", "<D> * i + <D> * j + (i == 0)"), ("table[i, j - 1] + <I>", "table[i, j - 1] + <I> + 1")],
        [(letters(rng, base, n), letters(rng, base, m)) for n, m in ((4, 5), (0, 3), (3, 0), (4, 4), (5, 3), (6, 6), (3, 6), (5, 5), (7, 6), (6, 4), (2, 2))],
        I=insert, D=delete, R=replace,
    )  # fmt: skip


def nested_lists(rng: Random) -> Draft:
    """A list of lists, as deep as one likes."""
    k, test = rng.randint(2, 4), number_test(rng)
    words, leaf, join, empty, wrong_leaf, wrong_join = rng.choice(
        [
            (
                "the sum of its numbers, each times its depth (1 in the outermost list)",
                "item * depth",
                "sum(parts)",
                "0",
                "item * (depth - 1)",
                "max(parts, default=0)",
            ),
            (
                f"the number of its numbers that each {test.words}",
                f"int({test.code.replace('x', 'item')})",
                "sum(parts)",
                "0",
                f"int({test.wrong.replace('x', 'item')})",
                "len(parts)",
            ),
            (
                f"the largest depth (1 in the outermost list) of a number that {test.words}, 0 if there is none",
                f"depth if {test.code.replace('x', 'item')} else 0",
                "max(parts, default=0)",
                "0",
                f"depth if {test.wrong.replace('x', 'item')} else 0",
                "sum(parts)",
            ),
            (
                f"the sum of its numbers, where those deeper than {k} (1 in the outermost list) count twice",
                f"item * (2 if depth > {k} else 1)",
                "sum(parts)",
                "0",
                f"item * (2 if depth >= {k} else 1)",
                "max(parts, default=0)",
            ),
            (
                "its value: the value of a number is the number, that of a list is the sum of the values of its items in even places (0, 2, ...) minus that of the others",
                "item",
                "sum(parts[::2]) - sum(parts[1::2])",
                "0",
                "-item",
                "sum(parts)",
            ),
            (
                f"its value: the value of a number is the number, that of a list is the sum of the values of its items, but {k * 3} if it is larger",
                "item",
                f"min(sum(parts), {k * 3})",
                "0",
                "item + 1",
                "sum(parts)",
            ),
            (
                "its value: the value of a number is the number, that of a list is its number of items plus the largest value of an item (0 for an empty list)",
                "item",
                "len(parts) + max(parts, default=0)",
                "0",
                "item + depth",
                "max(parts, default=0)",
            ),
            (
                f"the sum of its numbers, each times {k} to the power of the number of lists around it, minus 1",
                f"item * {k} ** (depth - 1)",
                "sum(parts)",
                "0",
                f"item * {k} ** depth",
                "max(parts, default=0)",
            ),
        ]
    )

    def nested(n: int, depth: int) -> list[object]:
        return [
            nested(rng.randint(0, 4), depth - 1)
            if depth and rng.random() < 0.45
            else rng.choice([*test.edges, rng.randint(-5, 15)])
            for _ in range(n)
        ]

    return make_draft(
        "measure(items)",
        f"`items` is a list of integers and of lists of the same kind, as deep as one likes. Return {words}.",
        f"    def value(item, depth):\n        if isinstance(item, int):\n            return {leaf}\n        parts = [value(each, depth + 1) for each in item]\n        return {join}\n    return value(items, 0)",
        [
            (f"return {leaf}\n", f"return {wrong_leaf}\n"),
            (f"return {join}", f"return {wrong_join}"),
            ("depth + 1)", "depth + 2)" if "depth" in leaf else "depth) * 2"),
        ],
        [
            (nested(n, d),)
            for n, d in ((4, 2), (0, 0), (1, 1), (3, 3), (5, 2), (4, 3), (6, 3), (5, 4), (3, 4), (6, 2), (4, 5))
        ],
    )


def circles(rng: Random) -> Draft:
    """Counting out in a circle."""
    k, m = rng.randint(2, 7), rng.randint(1, 3)
    rule, step = rng.choice(
        [
            (f"every {k}th one leaves", f"{k}"),
            (f"the step starts with {k} and grows by {m} after each one who leaves", f"({k} + {m} * len(out))"),
            (
                f"the step is {k}, and {k + m} after one with an even number has left",
                f"({k + m} if out and out[-1] % 2 == 0 else {k})",
            ),
            (f"the step is {k} plus the number of the one who left last, {k} at first", f"({k} + (out[-1] if out else 0))"),
        ]
    )
    words, code, wrong = rng.choice(
        [
            ("the number of the last one", "out[-1]", "out[0]"),
            ("a list of all numbers in the order in which they leave", "out", "out[::-1]"),
            (
                f"a list of the last {m + 1} who leave, or of all if there are fewer, in the order in which they leave",
                f"out[-{m + 1}:]",
                f"out[-{m}:]",
            ),
            ("the sum of the numbers of the first half who leave (rounded down)", "sum(out[:n // 2])", "sum(out[n // 2:])"),
        ]
    )
    return make_draft(
        "count_out(n)",
        f"`n` people with the numbers 1 to `n` stand in a circle. Counting begins with number 1 as 1; the one at whom the count reaches the step leaves, the count begins with 1 at the next one, and so on until nobody is left: {rule}. Return {words}.",
        f"    circle, out, at = list(range(1, n + 1)), [], 0\n    while circle:\n        at = (at + {step} - 1) % len(circle)\n        out.append(circle.pop(at))\n    return {code}",
        [
            (f"{step} - 1)", f"{step})"),
            (f"return {code}", f"return {wrong}"),
            ("list(range(1, n + 1))", "list(range(n, 0, -1))"),
        ],
        [(n,) for n in (7, 1, 2, 3, 4, 5, 6, 9, 12, 20, 33)],
    )


def spans(rng: Random) -> Draft:
    """Intervals joined and measured."""
    gap, least = rng.randint(0, 3), rng.randint(1, 4)
    touch = f"overlap, touch or have at most {gap} between them" if gap else "overlap or touch"
    words, code, wrong = rng.choice(
        [
            ("the joined spans as lists, the lowest first", "out", "out[::-1]"),
            ("the total length of the joined spans", "sum(b - a for a, b in out)", "sum(b - a for a, b in spans)"),
            (
                f"the number of joined spans that are at least {least * 3} long",
                f"sum(b - a >= {least * 3} for a, b in out)",
                f"sum(b - a > {least * 3} for a, b in out)",
            ),
            (
                "the length of the longest gap between two neighboring joined spans (0 if there is none)",
                "max((c - b for (_, b), (c, _) in zip(out, out[1:])), default=0)",
                "min((c - b for (_, b), (c, _) in zip(out, out[1:])), default=0)",
            ),
            (
                "the largest number of spans that were joined into one (0 if there is none)",
                "max(sizes, default=0)",
                "len(out)",
            ),
        ]
    )
    short = rng.choice([True, False])
    drop = f" Leave out spans that are shorter than {least} before you join." if short else ""
    given = f"sorted(s for s in spans if s[1] - s[0] >= {least})" if short else "sorted(spans)"
    given_wrong = f"sorted(s for s in spans if s[1] - s[0] > {least})" if short else "spans"

    def some(n: int) -> list[list[int]]:
        starts = [rng.randint(-10, 40) for _ in range(n)]
        return [[a, a + rng.choice([least, least - 1, rng.randint(0, 9)])] for a in starts]

    return make_draft(
        "join_spans(spans)",
        f"`spans` is a list of pairs (lists) of integers, the lower one first.{drop} Join those that {touch}, until there are no such ones. Return {words}.",
        f"""
    out, sizes = [], []
    for low, high in {given}:
        if out and low - out[-1][1] <= {gap}:
            out[-1][1] = max(out[-1][1], high)
            sizes[-1] += 1
        else:
            out.append([low, high])
            sizes.append(1)
    return {code}
""",
        [
            (f"out[-1][1] <= {gap}", f"out[-1][1] < {gap}"),
            ("max(out[-1][1], high)", "high"),
            (f"return {code}", f"return {wrong}"),
            (f"in {given}:", f"in {given_wrong}:"),
        ],
        [(some(n),) for n in (5, 0, 1, 4, 6, 7, 8, 9, 10, 12, 8, 11)],
    )


def subsets(rng: Random) -> Draft:
    """Selections of a list by their sum."""
    k, size = rng.randint(3, 9), rng.randint(2, 3)
    rest = rng.randrange(k)
    rule, code, wrong = rng.choice(
        [
            (f"have a sum that leaves {rest} when divided by {k}", f"s % {k} == {rest}", f"s % {k} == {(rest + 1) % k}"),
            (
                f"have at least {size} items and a sum below {4 * k}",
                f"n >= {size} and s < {4 * k}",
                f"n >= {size} and s <= {4 * k}",
            ),
            (f"have exactly {size} items and an even sum", f"n == {size} and s % 2 == 0", f"n == {size} and s % 2 == 1"),
            (f"have a sum from {2 * k} to {5 * k}, both included", f"{2 * k} <= s <= {5 * k}", f"{2 * k} < s < {5 * k}"),
            (
                f"have a sum that is at least {k} times the number of their items, and are not empty",
                f"n and s >= {k} * n",
                f"n and s > {k} * n",
            ),
        ]
    )
    apart = rng.choice([True, False])
    words = "no two of which stand next to each other in the list, " if apart else ""
    end, end_code, end_wrong = rng.choice(
        [
            ("how many selections there are", "len(found)", "len(set(found))"),
            (
                "the largest sum of one (-1 if there is none)",
                "max((s for n, s, _ in found), default=-1)",
                "min((s for n, s, _ in found), default=-1)",
            ),
            (
                "the smallest number of items of one (-1 if there is none)",
                "min((n for n, s, _ in found), default=-1)",
                "max((n for n, s, _ in found), default=-1)",
            ),
        ]
    )
    condition = " if not last" if apart else ""
    return make_draft(
        "selections(values)",
        f"Consider all selections of items of a list of positive integers (items in different places are different, an empty selection counts too), {words}that {rule}. Return {end}.",
        f"    states = [(0, 0, False)]\n    for x in values:\n        states = [(n, s, False) for n, s, last in states] + [(n + 1, s + x, True) for n, s, last in states{condition}]\n    found = [(n, s, last) for n, s, last in states if {code}]\n    return {end_code}",
        [
            (f"if {code}]", f"if {wrong}]"),
            (f"return {end_code}", f"return {end_wrong}"),
            ("for x in values:", "for x in values[1:]:"),
        ],
        [([rng.randint(1, 12) for _ in range(n)],) for n in (5, 0, 1, 2, 3, 4, 6, 7, 8, 9, 10)],
    )


def best_substrings(rng: Random) -> Draft:
    """The longest piece of a text that obeys a limit."""
    k = rng.randint(1, 3)
    rule, code, wrong = rng.choice(
        [
            (f"has at most {k + 1} different characters", f"len(set(part)) <= {k + 1}", f"len(set(part)) < {k + 1}"),
            (
                f"has no character more than {k} times",
                f"max(map(part.count, part)) <= {k}",
                f"max(map(part.count, part)) < {k + 2}",
            ),
            (
                f"has at most {k} vowels (a, e)",
                f"sum(c in 'ae' for c in part) <= {k}",
                f"sum(c in 'ae' for c in part) < {k}",
            ),
            ("reads the same backwards", "part == part[::-1]", "part[0] == part[-1]"),
            (
                f"begins and ends with the same character and has at least {k + 1} others than it inside",
                f"part[0] == part[-1] and sum(c != part[0] for c in part) >= {k + 1}",
                f"part[0] == part[-1] and sum(c != part[0] for c in part) > {k + 1}",
            ),
            ("has as many `a` as `b`", "part.count('a') == part.count('b')", "part.count('a') >= part.count('b')"),
            (
                f"has no two equal characters within {k} places of each other",
                f"all(part[i] not in part[i + 1:i + {k + 1}] for i in range(len(part)))",
                f"all(part[i] not in part[i + 1:i + {k + 2}] for i in range(len(part)))",
            ),
        ]
    )
    end, end_code, end_wrong = rng.choice(
        [
            (
                "the longest one (the first of several; an empty text if there is none)",
                "max(found, key=len, default='')",
                "max(found, key=len, default='')[::-1] + '.'",
            ),
            ("the length of the longest one (0 if there is none)", "max(map(len, found), default=0)", "len(set(found))"),
            ("how many there are, counted by their places", "len(found)", "len(set(found))"),
            ("how many different ones there are", "len(set(found))", "len(found)"),
        ]
    )
    return make_draft(
        "pieces(text)",
        f"Consider the pieces of a text (neighboring characters, at least one) of which each {rule}. Return {end}.",
        f"    found = []\n    for i in range(len(text)):\n        for j in range(i + 1, len(text) + 1):\n            part = text[i:j]\n            if {code}:\n                found.append(part)\n    return {end_code}",
        [
            (f"if {code}:", f"if {wrong}:"),
            (f"return {end_code}", f"return {end_wrong}"),
            ("range(i + 1, len(text) + 1)", "range(i + 1, len(text))"),
        ],
        [
            (letters(rng, alphabet, n),)
            for alphabet, n in (
                ("abcde", 8),
                ("a", 0),
                ("b", 1),
                ("ab", 7),
                ("abc", 9),
                ("abcd", 10),
                ("aabe", 12),
                ("abcde", 13),
                ("ab", 11),
                ("abe", 10),
                ("abcdef", 14),
            )
        ],
    )


def number_kinds(rng: Random) -> Draft:
    """Numbers by their factors."""
    primes = rng.sample([2, 3, 5, 7, 11], rng.randint(2, 3))
    k = rng.randint(2, 5)
    rule, code, wrong = rng.choice(
        [
            (
                f"that have no prime factors but {', '.join(map(str, sorted(primes)))} (1 has none at all)",
                f"all(p in {sorted(primes)} for p in factors(x))",
                f"any(p in {sorted(primes)} for p in factors(x))",
            ),
            (
                f"that have exactly {k} prime factors, where a repeated one counts as often as it divides",
                f"len(factors(x)) == {k}",
                f"len(set(factors(x))) == {k}",
            ),
            (
                f"that have exactly {min(k, 3)} different prime factors",
                f"len(set(factors(x))) == {min(k, 3)}",
                f"len(factors(x)) == {min(k, 3)}",
            ),
            (
                f"whose largest prime factor is at most {3 * k} (1 counts too)",
                f"max(factors(x), default=1) <= {3 * k}",
                f"min(factors(x), default=1) <= {3 * k}",
            ),
            (
                f"whose sum of prime factors, a repeated one as often as it divides, is divisible by {k}",
                f"sum(factors(x)) % {k} == 0",
                f"sum(set(factors(x))) % {k} == 0",
            ),
            ("that no square of a prime divides", "len(set(factors(x))) == len(factors(x))", "len(factors(x)) <= 2"),
        ]
    )
    end, end_code, end_wrong = rng.choice(
        [
            ("how many there are", "len(found)", "len(found) + 1"),
            ("the last three of them, or all if there are fewer, as a list", "found[-3:]", "found[:3]"),
            ("their sum", "sum(found)", "len(found)"),
            (
                "the largest distance between two neighboring ones (0 if there are fewer than two)",
                "max((b - a for a, b in zip(found, found[1:])), default=0)",
                "min((b - a for a, b in zip(found, found[1:])), default=0)",
            ),
        ]
    )
    low = rng.randint(1, 30)
    return make_draft(
        "numbers(limit)",
        f"Consider the integers from {low} to `limit`, both included, {rule}. Return {end}.",
        f"""
    def factors(x):
        found, p = [], 2
        while x > 1:
            if x % p == 0:
                found.append(p)
                x //= p
            else:
                p += 1
        return found

    found = [x for x in range({low}, limit + 1) if {code}]
    return {end_code}
""",
        [(f"if {code}]", f"if {wrong}]"), (f"return {end_code}", f"return {end_wrong}"), ("limit + 1)", "limit)")],
        [(n,) for n in (low + 40, low - 1, low, low + 1, low + 5, low + 12, low + 20, 64, 96, 125, 150, 180)],
    )


def schedules(rng: Random) -> Draft:
    """Steps that wait for others."""
    first = rng.choice(["smallest", "largest"])
    pick = "min" if first == "smallest" else "max"
    workers = rng.randint(1, 3)
    words, code, wrong = rng.choice(
        [
            (
                "the list of the steps in the order in which they are done, those of one round in rising order; None if some can never be done",
                "order if len(order) == n else None",
                "order",
            ),
            ("the number of rounds, -1 if some steps can never be done", "rounds if len(order) == n else -1", "rounds"),
            (
                "a list of the steps that can never be done, in rising order",
                "[s for s in range(n) if s not in order]",
                "[s for s in range(n) if s in order]",
            ),
            (
                "the round (from 1) in which the last step, `n - 1`, is done; 0 if it never is",
                "done.get(n - 1, 0)",
                "rounds",
            ),
        ]
    )

    def rules(n: int, m: int, *, loop: bool) -> list[list[int]]:
        found = (
            [sorted(rng.sample(range(n), 2))[:: rng.choice([1, 1, 1, -1 if loop else 1])] for _ in range(m)] if n > 1 else []
        )
        names = rng.sample(range(n), n)
        return [[names[a], names[b]] for a, b in found]

    return make_draft(
        "plan(n, rules)",
        f"The steps 0 to `n` - 1 are done in rounds. Each pair [a, b] of `rules` says that step a must be done in a round before that of step b. In each round up to {workers} of the steps that can be done then {'are' if workers > 1 else 'is'} done, the {first} first. Return {words}.",
        f"""
    done, order, rounds = {{}}, [], 0
    while True:
        ready = [s for s in range(n) if s not in done and all(a in done for a, b in rules if b == s)]
        if not ready:
            break
        rounds += 1
        chosen = sorted(ready{", reverse=True" if first == "largest" else ""})[:{workers}]
        for s in sorted(chosen):
            done[s] = rounds
            order.append(s)
    return {code}
""",
        [
            (f"[:{workers}]", f"[:{workers + 1}]"),
            (f"return {code}", f"return {wrong}"),
            ("for a, b in rules if b == s", "for b, a in rules if b == s"),
        ],
        [
            (n, rules(n, m, loop=loop))
            for n, m, loop in (
                (5, 5, False),
                (1, 0, False),
                (2, 1, False),
                (3, 2, False),
                (4, 4, True),
                (6, 6, False),
                (6, 7, True),
                (7, 8, False),
                (7, 9, True),
                (8, 9, False),
                (8, 8, True),
                (9, 12, False),
            )
        ],
    )


def games(rng: Random) -> Draft:
    """Who wins a game of taking away."""
    takes = sorted(rng.sample(range(1, 9), rng.randint(2, 4)))
    last_wins = rng.choice([True, False])
    half = rng.choice([True, False])
    more = " or half of the pieces, rounded up, if there are at least two" if half else ""
    extra = " + ([n - (n + 1) // 2] if n > 1 else [])" if half else ""
    words, code, wrong = rng.choice(
        [
            ("whether the player who begins with `n` pieces wins if both play well", "wins[n]", "not wins[n]"),
            (
                "how many of the numbers of pieces from 0 to `n` the player who begins loses, if both play well",
                "wins.count(False)",
                "wins.count(True)",
            ),
            (
                "the smallest number of pieces that the player who begins with `n` pieces can leave so that the other one loses (-1 if there is none), if both play well",
                "min([m for m in moves(n) if not wins[m]], default=-1)",
                "max([m for m in moves(n) if not wins[m]], default=-1)",
            ),
        ]
    )
    result = "any(not wins[m] for m in left)" if last_wins else "not left or any(not wins[m] for m in left)"
    result_wrong = "all(not wins[m] for m in left)"
    return make_draft(
        "play(n)",
        f"Two players take pieces from a pile in turn: {', '.join(map(str, takes[:-1]))} or {takes[-1]}{more}, never more than there are. A player who cannot take any {'loses' if last_wins else 'wins'}. Return {words}.",
        f"""
    def moves(n):
        return [n - t for t in {takes} if t <= n]{extra}

    wins = []
    for m in range(n + 1):
        left = moves(m)
        wins.append({result.replace("for m in left", "for k in left").replace("wins[m]", "wins[k]")})
    return {code}
""",
        [
            (f"in {takes}", f"in {takes[:-1]}"),
            (
                result.replace("for m in left", "for k in left").replace("wins[m]", "wins[k]"),
                result_wrong.replace("for m in left", "for k in left").replace("wins[m]", "wins[k]"),
            ),
            (f"return {code}", f"return {wrong}"),
        ],
        [(n,) for n in (9, 0, 1, 2, 3, 4, 5, 6, 7, 11, 14, 17, 23, 30)],
    )


FAMILIES: tuple[Family, ...] = (
    recurrences,
    coins,
    rising_parts,
    grid_paths,
    grid_searches,
    components,
    brackets,
    postfix,
    edit_costs,
    nested_lists,
    circles,
    spans,
    subsets,
    best_substrings,
    number_kinds,
    schedules,
    games,
)
