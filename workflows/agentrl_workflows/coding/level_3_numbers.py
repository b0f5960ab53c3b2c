"""Families of level 3: tables of partial results, and numbers."""

from __future__ import annotations

from random import Random

from agentrl_workflows.coding.parts import (
    Draft,
    Family,
    letters,
    make_draft,
)

# A family lists its choices with one choice a line.
# fmt: off


def recurrences(rng: Random) -> Draft:
    """A sequence by its rule."""
    a, b, c = rng.randint(1, 4), rng.randint(1, 4), rng.randint(0, 5)
    first, second, modulus = rng.randint(0, 4), rng.randint(1, 6), rng.choice([97, 101, 1000, 1009, 9973])
    lag = rng.randint(2, 4)
    words, code, wrong = rng.choice(
        [("item number `n`", "items[n]", "items[n - 1]"), ("the sum of the items number 0 to `n`", "sum(items[:n + 1])", "sum(items[:n])"), ("how many of the items number 0 to `n` are odd", "sum(x % 2 for x in items[:n + 1])", "sum(x % 2 for x in items[:n])"), ("the largest of the items number 0 to `n`", "max(items[:n + 1])", "items[n]")]
    )
    return make_draft(
        "sequence(n)",
        f"In a sequence, the items number 0 to <L0> are <F>, and item <L0> is <S> instead if <L0> is odd. Each later item is <A> times the one before it plus <B> times the one <L> places before it plus <C>, and of this the remainder by <M>. Return {words}.",
        f"    items = [<F>] * <L>\n    if <L0> % 2 == 1:\n        items[<L0>] = <S>\n    while len(items) <= n:\n        items.append((<A> * items[-1] + <B> * items[-<L>] + <C>) % <M>)\n    return {code}",
        [("<B> * items[-<L>]", "<B> * items[-1]"), ("+ <C>)", "+ <C> + 1)"), (f"return {code}", f"return {wrong}")],
        [(n,) for n in (lag + 4, 0, 1, 2, lag, lag + 1, 12, 25, 40, 63, 100)],
        A=a, B=b, C=c, F=first, S=second, M=modulus, L=lag, L0=lag - 1,
    )


def coins(rng: Random) -> Draft:
    """Sums of given coins."""
    values = sorted(rng.sample([1, 2, 3, 4, 5, 6, 7, 8, 9, 11, 12, 15], rng.randint(3, 4)))
    words, start, step, end, wrongs = rng.choice(
        [
            ("in how many ways coins of these values add up to `amount`; the order of the coins does not count", "[1] + [0] * amount", "table[s] += table[s - v]", "table[amount]", [("[1] + [0]", "[0] + [1]"), ("range(v, amount + 1)", "range(amount, v - 1, -1)")]),
            ("in how many ways coins of these values, each used at most twice, add up to `amount`; the order does not count", "[1] + [0] * amount", "table[s] += table[s - v] + (table[s - 2 * v] if s >= 2 * v else 0)", "table[amount]", [("if s >= 2 * v", "if s > 2 * v"), ("range(amount, v - 1, -1)", "range(v, amount + 1)")]),
            ("the least number of coins of these values that add up to `amount`, -1 if none do", "[0] + [10 ** 9] * amount", "table[s] = min(table[s], table[s - v] + 1)", "table[amount] if table[amount] < 10 ** 9 else -1", [("table[s - v] + 1)", "table[s - v] + v)"), ("else -1", "else 0")]),
            ("the least number of coins of these values, each used at most once, that add up to `amount`, -1 if none do", "[0] + [10 ** 9] * amount", "table[s] = min(table[s], table[s - v] + 1)", "table[amount] if table[amount] < 10 ** 9 else -1", [("table[s - v] + 1)", "table[s - v] + v)"), ("range(amount, v - 1, -1)", "range(v, amount + 1)")]),
            ("the largest sum of at most `amount` that coins of these values, each used at most once, can make", "[1] + [0] * amount", "table[s] = table[s] or table[s - v]", "max(s for s in range(amount + 1) if table[s])", [("range(amount, v - 1, -1)", "range(v, amount + 1)"), ("max(s", "min(s")]),
        ]
    )
    down = ("at most" in words and "largest sum of at most" not in words) or "largest sum" in words
    loop = "range(amount, v - 1, -1)" if down else "range(v, amount + 1)"
    total = sum(values)
    pool = [rng.randint(8, 22), 0, 1, values[0], values[1], values[-1], sum(values[:2]), total, total + 1, rng.randint(5, 15), rng.randint(15, 40), 2 * values[1], values[0] + 2 * values[-1]]
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
            (f"is smaller than the one before it, or more than {k + 3} larger", f"y < x or y > x + {k + 3}", f"y < x or y >= x + {k + 3}"),
        ]
    )
    what, gain, gain_wrong = rng.choice([("the largest number of items", "1", "2"), ("the largest sum of items", "y", "1")])
    near, window, window_wrong = rng.choice([("", "range(i)", "range(max(0, i - 1), i)"), (f" Between two neighbors of the selection at most {k} items of the list may be left out.", f"range(max(0, i - {k + 1}), i)", "range(i)")])
    return make_draft(
        "best_selection(values)",
        f"Select some items of a list of positive integers, in the order of the list, so that each selected item after the first {rule}.{near} Return {what} in such a selection, 0 for an empty list.",
        f"    best = []\n    for i, y in enumerate(values):\n        before = [best[j] for j in {window} for x in [values[j]] if {code}]\n        best.append({gain} + max(before, default=0))\n    return max(best, default=0)",
        [(f"if {code}", f"if {wrong}"), (window, window_wrong), (f"append({gain} +", f"append({gain_wrong} +"), ("max(best, default=0)", "(best or [0])[-1]")],
        [([rng.randint(1, 14) for _ in range(n)],) for n in (8, 0, 1, 9, 10, 12, 14, 11, 13, 15, 12)],
    )


def grid_paths(rng: Random) -> Draft:
    """Ways through a grid."""
    moves = rng.choice([[(0, 1), (1, 0)], [(0, 1), (1, 0), (1, 1)], [(0, 1), (1, 1)], [(1, -1), (1, 0), (1, 1)], [(0, 2), (1, 0)], [(1, 2), (2, 1)], [(0, 1), (2, 0)], [(1, 0), (1, 1), (0, 3)]])
    shown = " or ".join(f"{a} down and {b} to the {'right' if b >= 0 else 'left'}".replace("-1 to", "1 to") for a, b in moves)
    many = rng.choice(["count", "best", "cheapest"])
    if many == "count":
        words, join = "the number of ways from the top left field to the bottom right one that enter no `#` field (0 if one of the two is `#`)", "sum(came)"
        text = True
    else:
        words = f"the {'largest' if many == 'best' else 'smallest'} sum of the fields of a way from the top left field to the bottom right one, both included; None if there is no way"
        join, text = ("max" if many == "best" else "min") + "(came, default=None)", False
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
        wrongs = [("0 if grid[i][j] == '#' else ", ""), ("1 if i == j == 0 else found", "1 if i == 0 else found"), (str(moves), str(moves[:-1])), (str(moves), str([*moves, (2, 2)]))]
    else:
        body += "            table[i, j] = grid[0][0] if i == j == 0 else None if found is None else found + grid[i][j]\n"
        wrongs = [("found + grid[i][j]", "found + 1"), (join, ("min" if many == "best" else "max") + "(came, default=None)"), (str(moves), str(moves[:-1])), (str(moves), str([*moves, (2, 2)]))]
    body += "    return table[height - 1, width - 1]"
    sizes = [(4, 4), (1, 1), (2, 2), (3, 3), (1, 3), (3, 1), (3, 5), (5, 3), (5, 5), (4, 6), (6, 4), (5, 4), (4, 5), (3, 4), (6, 6)]

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


def edit_costs(rng: Random) -> Draft:
    """The cheapest way to turn one text into another."""
    insert, delete, replace = rng.randint(1, 4), rng.randint(1, 4), rng.randint(1, 6)
    swap = rng.choice([None, 1, 2])
    vowels = rng.choice([True, False])
    price = "(<R> + 1 if x in 'aeiou' else <R>)" if vowels else "<R>"
    words = "; replacing a vowel (a, e, i, o, u) costs 1 more" if vowels else ""
    swap_words = f" Two neighboring letters may also be swapped for {swap}, if both stand as they are in the result." if swap else ""
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
    )


def circles(rng: Random) -> Draft:
    """Counting out in a circle."""
    k, m = rng.randint(2, 7), rng.randint(1, 3)
    rule, step = rng.choice([(f"every {k}th one leaves", f"{k}"), (f"the step starts with {k} and grows by {m} after each one who leaves", f"({k} + {m} * len(out))"), (f"the step is {k}, and {k + m} after one with an even number has left", f"({k + m} if out and out[-1] % 2 == 0 else {k})"), (f"the step is {k} plus the number of the one who left last, {k} at first", f"({k} + (out[-1] if out else 0))")])
    words, code, wrong = rng.choice([("the number of the last one", "out[-1]", "out[0]"), ("a list of all numbers in the order in which they leave", "out", "out[::-1]"), (f"a list of the last {m + 1} who leave, or of all if there are fewer, in the order in which they leave", f"out[-{m + 1}:]", f"out[-{m}:]"), ("the sum of the numbers of the first half who leave (rounded down)", "sum(out[:n // 2])", "sum(out[n // 2:])")])
    return make_draft(
        "count_out(n)",
        f"`n` people with the numbers 1 to `n` stand in a circle. Counting begins with number 1 as 1; the one at whom the count reaches the step leaves, the count begins with 1 at the next one, and so on until nobody is left: {rule}. Return {words}.",
        f"    circle, out, at = list(range(1, n + 1)), [], 0\n    while circle:\n        at = (at + {step} - 1) % len(circle)\n        out.append(circle.pop(at))\n    return {code}",
        [(f"{step} - 1)", f"{step})"), (f"return {code}", f"return {wrong}"), ("list(range(1, n + 1))", "list(range(n, 0, -1))")],
        [(n,) for n in (7, 1, 2, 3, 4, 5, 6, 9, 12, 20, 33)],
    )


def subsets(rng: Random) -> Draft:
    """Selections of a list by their sum."""
    k, size = rng.randint(3, 9), rng.randint(2, 3)
    rest = rng.randrange(k)
    rule, code, wrong = rng.choice(
        [
            (f"have a sum that leaves {rest} when divided by {k}", f"s % {k} == {rest}", f"s % {k} == {(rest + 1) % k}"),
            (f"have at least {size} items and a sum below {4 * k}", f"n >= {size} and s < {4 * k}", f"n >= {size} and s <= {4 * k}"),
            (f"have exactly {size} items and an even sum", f"n == {size} and s % 2 == 0", f"n == {size} and s % 2 == 1"),
            (f"have a sum from {2 * k} to {5 * k}, both included", f"{2 * k} <= s <= {5 * k}", f"{2 * k} < s < {5 * k}"),
            (f"have a sum that is at least {k} times the number of their items, and are not empty", f"n and s >= {k} * n", f"n and s > {k} * n"),
        ]
    )
    apart = rng.choice([True, False])
    words = "no two of which stand next to each other in the list, " if apart else ""
    end, end_code, end_wrong = rng.choice([("how many selections there are", "len(found)", "len(set(found))"), ("the largest sum of one (-1 if there is none)", "max((s for n, s, _ in found), default=-1)", "min((s for n, s, _ in found), default=-1)"), ("the smallest number of items of one (-1 if there is none)", "min((n for n, s, _ in found), default=-1)", "max((n for n, s, _ in found), default=-1)")])
    condition = " if not last" if apart else ""
    return make_draft(
        "selections(values)",
        f"Consider all selections of items of a list of positive integers (items in different places are different, an empty selection counts too), {words}that {rule}. Return {end}.",
        f"    states = [(0, 0, False)]\n    for x in values:\n        states = [(n, s, False) for n, s, last in states] + [(n + 1, s + x, True) for n, s, last in states{condition}]\n    found = [(n, s, last) for n, s, last in states if {code}]\n    return {end_code}",
        [(f"if {code}]", f"if {wrong}]"), (f"return {end_code}", f"return {end_wrong}"), ("for x in values:", "for x in values[1:]:")],
        [([rng.randint(1, 12) for _ in range(n)],) for n in (5, 0, 1, 2, 3, 4, 6, 7, 8, 9, 10)],
    )


def number_kinds(rng: Random) -> Draft:
    """Numbers by their factors."""
    primes = rng.sample([2, 3, 5, 7, 11], rng.randint(2, 3))
    k = rng.randint(2, 5)
    rule, code, wrong = rng.choice(
        [
            (f"that have no prime factors but {', '.join(map(str, sorted(primes)))} (1 has none at all)", f"all(p in {sorted(primes)} for p in factors(x))", f"any(p in {sorted(primes)} for p in factors(x))"),
            (f"that have exactly {k} prime factors, where a repeated one counts as often as it divides", f"len(factors(x)) == {k}", f"len(set(factors(x))) == {k}"),
            (f"that have exactly {min(k, 3)} different prime factors", f"len(set(factors(x))) == {min(k, 3)}", f"len(factors(x)) == {min(k, 3)}"),
            (f"whose largest prime factor is at most {3 * k} (1 counts too)", f"max(factors(x), default=1) <= {3 * k}", f"min(factors(x), default=1) <= {3 * k}"),
            (f"whose sum of prime factors, a repeated one as often as it divides, is divisible by {k}", f"sum(factors(x)) % {k} == 0", f"sum(set(factors(x))) % {k} == 0"),
            ("that no square of a prime divides", "len(set(factors(x))) == len(factors(x))", "len(factors(x)) <= 2"),
        ]
    )
    end, end_code, end_wrong = rng.choice([("how many there are", "len(found)", "len(found) + 1"), ("the last three of them, or all if there are fewer, as a list", "found[-3:]", "found[:3]"), ("their sum", "sum(found)", "len(found)"), ("the largest distance between two neighboring ones (0 if there are fewer than two)", "max((b - a for a, b in zip(found, found[1:])), default=0)", "min((b - a for a, b in zip(found, found[1:])), default=0)")])
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
            ("how many of the numbers of pieces from 0 to `n` the player who begins loses, if both play well", "wins.count(False)", "wins.count(True)"),
            ("the smallest number of pieces that the player who begins with `n` pieces can leave so that the other one loses (-1 if there is none), if both play well", "min([m for m in moves(n) if not wins[m]], default=-1)", "max([m for m in moves(n) if not wins[m]], default=-1)"),
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
        wins.append({result.replace('for m in left', 'for k in left').replace('wins[m]', 'wins[k]')})
    return {code}
""",
        [(f"in {takes}", f"in {takes[:-1]}"), (result.replace("for m in left", "for k in left").replace("wins[m]", "wins[k]"), result_wrong.replace("for m in left", "for k in left").replace("wins[m]", "wins[k]")), (f"return {code}", f"return {wrong}")],
        [(n,) for n in (9, 0, 1, 2, 3, 4, 5, 6, 7, 11, 14, 17, 23, 30)],
    )


LEVEL_3_NUMBERS_FAMILIES: tuple[Family, ...] = (
    recurrences,
    coins,
    rising_parts,
    grid_paths,
    edit_costs,
    circles,
    subsets,
    number_kinds,
    games,
)
