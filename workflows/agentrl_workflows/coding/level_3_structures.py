"""Families of level 3: searches, nested values and texts."""

from __future__ import annotations

from random import Random

from agentrl_workflows.coding.parts import (
    Draft,
    Family,
    letters,
    make_draft,
    number_test,
)

# A family lists its choices with one choice a line.
# fmt: off


def grid_searches(rng: Random) -> Draft:
    """The shortest way by given moves."""
    a, b = rng.choice([(0, 1), (1, 1), (1, 2), (0, 2), (1, 3), (2, 2), (2, 3)])
    moves = sorted({(x, y) for p, q in ((a, b), (b, a)) for x in (p, -p) for y in (q, -q)})
    wrap = rng.choice([True, False])
    extra = rng.choice([(), ((1, 0),), ((0, -1),), ((-1, -1),)])
    moves = sorted({*moves, *extra})
    more = f" or ({extra[0][0]}, {extra[0][1]})" if extra and extra[0] in moves else ""
    words, end, wrong = rng.choice([("the least number of moves from `start` to `goal`, -1 if it cannot be reached", "seen.get(tuple(goal), -1)", "seen.get(tuple(goal), 0)"), ("how many fields can be reached from `start` in at most as many moves as the number `goal[0] + goal[1]`, `start` included", "sum(d <= goal[0] + goal[1] for d in seen.values())", "sum(d < goal[0] + goal[1] for d in seen.values())")])
    place = "((i + x) % size, (j + y) % size)" if wrap else "(i + x, j + y)"
    inside = "True" if wrap else "0 <= to[0] < size and 0 <= to[1] < size"
    edge = "The board has no edges: a move that leaves it comes in at the opposite side." if wrap else "A move may not leave the board."
    return make_draft(
        "moves(size, start, goal, blocked)",
        f"On a board of `size` times `size` fields, a move adds (x, y) to the row and column of a piece, where one of x and y is {a} or -{a} and the other {b} or -{b}{more}. {edge} `start` and `goal` are fields as lists of row and column, from 0; `blocked` is a list of such fields that no move may end on. Return {words}.".replace("-0", "0").replace("0 or 0", "0"),
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
        [(str(moves), str(moves[:-1])), (" and to not in walls", ""), (f"return {end}", f"return {wrong}"), ("seen[i, j] + 1", "seen[i, j] + 2")],
        [(n, [rng.randrange(n), rng.randrange(n)], [rng.randrange(n), rng.randrange(n)], [[rng.randrange(n), rng.randrange(n)] for _ in range(w)]) for n, w in ((5, 4), (1, 0), (3, 2), (4, 5), (6, 8), (5, 6), (7, 12), (4, 3), (6, 5), (8, 20), (5, 9), (6, 13))],
    )


def components(rng: Random) -> Draft:
    """Groups of numbers that a relation joins."""
    k = rng.randint(2, 6)
    rule, code, wrong = rng.choice(
        [
            (f"their distance is at most {k}", f"abs(x - y) <= {k}", f"abs(x - y) < {k}"),
            ("they share a decimal digit", "set(str(x)) & set(str(y))", "str(x)[0] == str(y)[0]"),
            (f"their sum is divisible by {k + 3}", f"(x + y) % {k + 3} == 0", f"(x + y) % {k + 2} == 0"),
            (f"they have a common divisor above {k - 1}", f"any(x % d == 0 and y % d == 0 for d in range({k}, min(x, y) + 1))", f"any(x % d == 0 and y % d == 0 for d in range({k + 1}, min(x, y) + 1))"),
            (f"one is {k} times the other", f"x == {k} * y or y == {k} * x", f"x == {k} * y"),
        ]
    )
    end, end_code, end_wrong = rng.choice(
        [
            ("the number of groups", "len(groups)", "len(numbers)"),
            ("the size of the largest group (0 if there is none)", "max(map(len, groups), default=0)", "min(map(len, groups), default=0)"),
            ("the groups as sorted lists, the one with the smallest number first", "sorted(sorted(g) for g in groups)", "[sorted(g) for g in groups][::-1]"),
            ("the largest sum of a group (0 if there is none)", "max(map(sum, groups), default=0)", "max(numbers, default=0)"),
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
        [(f"if {code})", f"if {wrong})"), ("            queue += near\n", "            queue = queue + near\n"), (f"return {end_code}", f"return {end_wrong}")],
        [(numbers(n),) for n in (6, 0, 1, 7, 8, 9, 10, 12, 6, 11, 9)],
    )


def brackets(rng: Random) -> Draft:
    """Nested brackets."""
    kinds = rng.sample(["()", "[]", "{}", "<>"], rng.randint(2, 3))
    pairs = {kind[1]: kind[0] for kind in kinds}
    most = rng.randint(2, 4)
    words, code, wrong = rng.choice(
        [
            (f"whether they are closed in the right order and never more than {most} deep", f"right and not stack and deepest <= {most}", f"right and not stack and deepest < {most}"),
            ("the depth of the deepest one if all are closed in the right order, else -1", "deepest if right and not stack else -1", "deepest if right else -1"),
            ("the position, from 0, of the first character that closes what is not open (-1 if there is none)", "wrong_at", "-1 if right else len(stack)"),
            ("the number of brackets that are still open at the end, or before the first character that closes what is not open", "len(stack)", "deepest"),
        ]
    )
    rank = "".join(kind[0] for kind in kinds)
    nested = rng.choice([True, False])
    rule = " A bracket may not stand directly inside one of its own kind; where it does, it counts as one that closes what is not open." if nested else ""
    extra = "            if stack and stack[-1] == c:\n                right, wrong_at = False, i\n                break\n" if nested else ""

    def text(n: int) -> str:
        unclosed: list[str] = []
        found = ""
        for _ in range(n):
            if unclosed and rng.random() < 0.45:
                found += unclosed.pop()[1]
            else:
                fitting = [kind for kind in kinds if not nested or not unclosed or unclosed[-1] != kind] or kinds
                unclosed.append(rng.choice(fitting))
                found += unclosed[-1][0]
            found += rng.choice(["", "", "a"])
        found += "".join(kind[1] for kind in unclosed[::-1])
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
        [(f"return {code}", f"return {wrong}"), ("if not stack or stack[-1] != pairs[c]", "if not stack"), ("            stack.pop()\n", "            stack.pop(0)\n")],
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
    rules = "".join(f"            {'if' if at == 0 else 'elif'} token == {name!r}:\n                stack.append({pool[name][1]})\n" for at, name in enumerate(names))

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
        [(take, "b, a = stack.pop(), stack.pop()" if prefix else "a, b = stack.pop(), stack.pop()"), ("if len(stack) == 1 else", "if stack else"), (pool[names[1]][1], pool[names[0]][1]), (pool[names[2]][1], "a")],
        [(text,) for text in [*texts, f"{texts[1]} 5", names[0], f"4 {names[1]}", ""]],
    )


def nested_lists(rng: Random) -> Draft:
    """A list of lists, as deep as one likes."""
    k, test = rng.randint(2, 4), number_test(rng)
    words, leaf, join, wrong_leaf, wrong_join = rng.choice(
        [
            ("the sum of its numbers, each times its depth (1 in the outermost list)", "item * depth", "sum(parts)", "item * (depth - 1)", "max(parts, default=0)"),
            (f"the number of its numbers that each {test.words}", f"int({test.code.replace('x', 'item')})", "sum(parts)", f"int({test.wrong.replace('x', 'item')})", "len(parts)"),
            (f"the largest depth (1 in the outermost list) of a number that {test.words}, 0 if there is none", f"depth if {test.code.replace('x', 'item')} else 0", "max(parts, default=0)", f"depth if {test.wrong.replace('x', 'item')} else 0", "sum(parts)"),
            (f"the sum of its numbers, where those deeper than {k} (1 in the outermost list) count twice", f"item * (2 if depth > {k} else 1)", "sum(parts)", f"item * (2 if depth >= {k} else 1)", "max(parts, default=0)"),
            ("its value: the value of a number is the number, that of a list is the sum of the values of its items in even places (0, 2, ...) minus that of the others", "item", "sum(parts[::2]) - sum(parts[1::2])", "-item", "sum(parts)"),
            (f"its value: the value of a number is the number, that of a list is the sum of the values of its items, but {k * 3} if it is larger", "item", f"min(sum(parts), {k * 3})", "item + 1", "sum(parts)"),
            ("its value: the value of a number is the number, that of a list is its number of items plus the largest value of an item (0 for an empty list)", "item", "len(parts) + max(parts, default=0)", "item + depth", "max(parts, default=0)"),
            (f"the sum of its numbers, each times {k} to the power of the number of lists around it, minus 1", f"item * {k} ** (depth - 1)", "sum(parts)", f"item * {k} ** depth", "max(parts, default=0)"),
        ]
    )

    def nested(n: int, depth: int) -> list[object]:
        return [nested(rng.randint(0, 4), depth - 1) if depth and rng.random() < 0.45 else rng.choice([*test.edges, rng.randint(-5, 15)]) for _ in range(n)]

    return make_draft(
        "measure(items)",
        f"`items` is a list of integers and of lists of the same kind, as deep as one likes. Return {words}.",
        f"    def value(item, depth):\n        if isinstance(item, int):\n            return {leaf}\n        parts = [value(each, depth + 1) for each in item]\n        return {join}\n    return value(items, 0)",
        [(f"return {leaf}\n", f"return {wrong_leaf}\n"), (f"return {join}", f"return {wrong_join}"), ("depth + 1)", "depth + 2)" if "depth" in leaf else "depth) * 2")],
        [(nested(n, d),) for n, d in ((4, 2), (0, 0), (1, 1), (3, 3), (5, 2), (4, 3), (6, 3), (5, 4), (3, 4), (6, 2), (4, 5))],
    )


def spans(rng: Random) -> Draft:
    """Intervals joined and measured."""
    gap, least = rng.randint(0, 3), rng.randint(1, 4)
    touch = f"overlap, touch or have at most {gap} between them" if gap else "overlap or touch"
    words, code, wrong = rng.choice(
        [
            ("the joined spans as lists, the lowest first", "out", "out[::-1]"),
            ("the total length of the joined spans", "sum(b - a for a, b in out)", "sum(b - a for a, b in spans)"),
            (f"the number of joined spans that are at least {least * 3} long", f"sum(b - a >= {least * 3} for a, b in out)", f"sum(b - a > {least * 3} for a, b in out)"),
            ("the length of the longest gap between two neighboring joined spans (0 if there is none)", "max((c - b for (_, b), (c, _) in zip(out, out[1:])), default=0)", "min((c - b for (_, b), (c, _) in zip(out, out[1:])), default=0)"),
            ("the largest number of spans that were joined into one (0 if there is none)", "max(sizes, default=0)", "len(out)"),
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
        [(f"out[-1][1] <= {gap}", f"out[-1][1] < {gap}"), ("max(out[-1][1], high)", "high"), (f"return {code}", f"return {wrong}"), (f"in {given}:", f"in {given_wrong}:")],
        [(some(n),) for n in (5, 0, 1, 4, 6, 7, 8, 9, 10, 12, 8, 11)],
    )


def best_substrings(rng: Random) -> Draft:
    """The longest piece of a text that obeys a limit."""
    k = rng.randint(1, 3)
    rule, code, wrong = rng.choice(
        [
            (f"has at most {k + 1} different characters", f"len(set(part)) <= {k + 1}", f"len(set(part)) < {k + 1}"),
            (f"has no character more than {k} times", f"max(map(part.count, part)) <= {k}", f"max(map(part.count, part)) < {k + 2}"),
            (f"has at most {k} vowels (a, e)", f"sum(c in 'ae' for c in part) <= {k}", f"sum(c in 'ae' for c in part) < {k}"),
            ("reads the same backwards", "part == part[::-1]", "part[0] == part[-1]"),
            (f"begins and ends with the same character and has at least {k + 1} others than it inside", f"part[0] == part[-1] and sum(c != part[0] for c in part) >= {k + 1}", f"part[0] == part[-1] and sum(c != part[0] for c in part) > {k + 1}"),
            ("has as many `a` as `b`", "part.count('a') == part.count('b')", "part.count('a') >= part.count('b')"),
            (f"has no two equal characters within {k} places of each other", f"all(part[i] not in part[i + 1:i + {k + 1}] for i in range(len(part)))", f"all(part[i] not in part[i + 1:i + {k + 2}] for i in range(len(part)))"),
        ]
    )
    end, end_code, end_wrong = rng.choice([("the longest one (the first of several; an empty text if there is none)", "max(found, key=len, default='')", "max(found, key=len, default='')[::-1] + '.'"), ("the length of the longest one (0 if there is none)", "max(map(len, found), default=0)", "len(set(found))"), ("how many there are, counted by their places", "len(found)", "len(set(found))"), ("how many different ones there are", "len(set(found))", "len(found)")])
    return make_draft(
        "pieces(text)",
        f"Consider the pieces of a text (neighboring characters, at least one) of which each {rule}. Return {end}.",
        f"    found = []\n    for i in range(len(text)):\n        for j in range(i + 1, len(text) + 1):\n            part = text[i:j]\n            if {code}:\n                found.append(part)\n    return {end_code}",
        [(f"if {code}:", f"if {wrong}:"), (f"return {end_code}", f"return {end_wrong}"), ("range(i + 1, len(text) + 1)", "range(i + 1, len(text))")],
        [(letters(rng, alphabet, n),) for alphabet, n in (("abcde", 8), ("a", 0), ("b", 1), ("ab", 7), ("abc", 9), ("abcd", 10), ("aabe", 12), ("abcde", 13), ("ab", 11), ("abe", 10), ("abcdef", 14))],
    )


def schedules(rng: Random) -> Draft:
    """Steps that wait for others."""
    first = rng.choice(["smallest", "largest"])
    workers = rng.randint(1, 3)
    words, code, wrong = rng.choice(
        [
            ("the list of the steps in the order in which they are done, those of one round in rising order; None if some can never be done", "order if len(order) == n else None", "order"),
            ("the number of rounds, -1 if some steps can never be done", "rounds if len(order) == n else -1", "rounds"),
            ("a list of the steps that can never be done, in rising order", "[s for s in range(n) if s not in order]", "[s for s in range(n) if s in order]"),
            ("the round (from 1) in which the last step, `n - 1`, is done; 0 if it never is", "done.get(n - 1, 0)", "rounds"),
        ]
    )

    def rules(n: int, m: int, *, loop: bool) -> list[list[int]]:
        found = [sorted(rng.sample(range(n), 2))[:: rng.choice([1, 1, 1, -1 if loop else 1])] for _ in range(m)] if n > 1 else []
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
        chosen = sorted(ready{', reverse=True' if first == 'largest' else ''})[:{workers}]
        for s in sorted(chosen):
            done[s] = rounds
            order.append(s)
    return {code}
""",
        [(f"[:{workers}]", f"[:{workers + 1}]"), (f"return {code}", f"return {wrong}"), ("for a, b in rules if b == s", "for b, a in rules if b == s")],
        [(n, rules(n, m, loop=loop)) for n, m, loop in ((5, 5, False), (1, 0, False), (2, 1, False), (3, 2, False), (4, 4, True), (6, 6, False), (6, 7, True), (7, 8, False), (7, 9, True), (8, 9, False), (8, 8, True), (9, 12, False))],
    )


LEVEL_3_STRUCTURES_FAMILIES: tuple[Family, ...] = (
    grid_searches,
    components,
    brackets,
    postfix,
    nested_lists,
    spans,
    best_substrings,
    schedules,
)
