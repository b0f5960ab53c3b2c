"""Families of level 2: one loop with a state, or a table."""

from __future__ import annotations

from random import Random

from agentrl_workflows.coding.parts import (
    WORDS,
    Draft,
    Family,
    integer_lists,
    integers,
    letters,
    make_draft,
    number_change,
    number_summary,
    number_test,
    sentences,
)

# A family lists its choices with one choice a line.
# fmt: off


def pipelines(rng: Random) -> Draft:
    """Numbers chosen, changed, chosen again, summed up."""
    test, change, last, end = number_test(rng), number_change(rng), number_test(rng, "y"), number_summary(rng)
    return make_draft(
        "process(values)",
        f"`values` is a list of integers. Drop each number that {test.words}. Replace each of the others by {change.words}. Of the results, take those of which each {last.words}, in their order, and return {end.words}.",
        f"    chosen = []\n    for x in values:\n        if {test.code}:\n            continue\n        y = {change.code}\n        if {last.code}:\n            chosen.append(y)\n    return {end.code}",
        [(f"if {test.code}:\n            continue", f"if {test.wrong}:\n            continue"), (f"y = {change.code}", f"y = {change.wrong}"), (f"return {end.code}", f"return {end.wrong}"), (f"        if {last.code}:", "        if True:")],
        integer_lists(rng, (*test.edges, *change.edges), count=11),
    )


def longest_runs(rng: Random) -> Draft:
    """The longest run of neighbors."""
    test = number_test(rng)
    words, code, wrong = rng.choice(
        [
            ("its length", "best", "run"),
            ("the position, from 0, of its first item (the first run of several that are longest; -1 if there is none)", "start", "start + 1"),
            ("a list of its items (of the first one if several are longest)", "values[start:start + best] if best else []", "values[start:]"),
        ]
    )
    return make_draft(
        "longest_run(values)",
        f"Consider, in a list of integers, the longest run of neighboring items of which each {test.words}. Return {words}.",
        f"    best = run = 0\n    start = -1\n    for i, x in enumerate(values):\n        run = run + 1 if {test.code} else 0\n        if run > best:\n            best, start = run, i - run + 1\n    return {code}",
        [(test.code, test.wrong), ("else 0", "else run"), (f"return {code}", f"return {wrong}")],
        [(integers(rng, test.edges + test.edges[:2], length=n),) for n in (10, 0, 1, 12, 14, 9, 13, 11, 15, 12, 16)],
    )


def neighbors(rng: Random) -> Draft:
    """Pairs at a distance."""
    gap, k = rng.randint(1, 3), rng.randint(2, 6)
    low = rng.randint(2, 9)
    words, code, wrong = rng.choice(
        [
            (f"differ by at least {low}", f"abs(x - y) >= {low}", f"abs(x - y) > {low}"),
            (f"have a sum that is divisible by {k}", f"(x + y) % {k} == 0", f"(x + y) % {k + 1} == 0"),
            ("have the same parity", "(x - y) % 2 == 0", "x % 2 == 0"),
            ("are in rising order (the first is smaller)", "x < y", "x <= y"),
            (f"have a product above {low * k}", f"x * y > {low * k}", f"x + y > {low * k}"),
        ]
    )
    end, end_code, end_wrong = rng.choice(
        [
            ("how many pairs there are", "len(found)", "len(set(found))"),
            ("a list of the positions, from 0, of the first items of the pairs", "found", "[i + 1 for i in found]"),
            ("the sum of the first items of the pairs", "sum(values[i] for i in found)", "sum(found)"),
            ("the largest sum of such a pair (0 if there is none)", "max((values[i] + values[i + <G>] for i in found), default=0)", "max((values[i] for i in found), default=0)"),
        ]
    )
    place = "next to each other" if gap == 1 else f"{gap} places apart (at `i` and `i + {gap}`)"
    return make_draft(
        "pairs(values)",
        f"Consider the pairs of items of a list of integers that stand {place} and {words}. Return {end}.",
        f"    found = []\n    for i in range(len(values) - <G>):\n        x, y = values[i], values[i + <G>]\n        if {code}:\n            found.append(i)\n    return {end_code}",
        [(code, wrong), (f"return {end_code}", f"return {end_wrong}"), ("range(len(values) - <G>)", "range(len(values) - <G> - 1)")],
        [(integers(rng, length=n, low=-8, high=12),) for n in (8, 0, 1, 2, 10, 12, 9, 11, 14, 8, 10)],
        G=gap,
    )


def running_balances(rng: Random) -> Draft:
    """A balance with bounds."""
    start, top, loss = rng.randint(0, 12), rng.randint(15, 40), rng.randint(1, 4)
    low_words, low_code, low_wrong = rng.choice(
        [
            ("It never falls below 0: what is missing is forgiven.", "level = max(level, 0)", "level = abs(level)"),
            ("When it would fall below 0, the change is left out as a whole.", "level = level if level >= 0 else before", "level = level if level > 0 else before"),
            ("When it falls below 0, it is set back to <S>.", "level = level if level >= 0 else <S>", "level = level if level > 0 else <S>"),
        ]
    )
    high_words, high_code = rng.choice(
        [("What exceeds <T> is lost.", "level = min(level, <T>)"), ("When it exceeds <T>, it loses <L> at once.", "level = level - <L> if level > <T> else level")]
    )
    words, code, wrong = rng.choice(
        [
            ("the last level", "level", "level + 1"),
            ("a list of the levels after each change", "levels", "levels[::-1]"),
            ("the highest level that it had after a change (<S> if there is none)", "max(levels, default=<S>)", "level"),
            ("how many changes left it lower than before", "drops", "len(levels)"),
        ]
    )
    return make_draft(
        "balance(changes)",
        f"A tank starts at a level of <S>. Each number of `changes` is added to it, one after the other. {low_words} {high_words} Return {words}.",
        f"""
    level, levels, drops = <S>, [], 0
    for change in changes:
        before = level
        level += change
        {low_code}
        {high_code}
        drops += level < before
        levels.append(level)
    return {code}
""",
        [(low_code, low_wrong), (f"        {high_code}\n", ""), (f"return {code}", f"return {wrong}"), ("= <S>, []", "= 0, []" if start else "= 1, []")],
        [([rng.choice([rng.randint(-15, 15), rng.randint(5, 25), -start]) for _ in range(n)],) for n in (7, 0, 1, 9, 11, 12, 8, 10, 13, 9, 15, 12)],
        S=start,
        T=top,
        L=loss,
    )


def windows(rng: Random) -> Draft:
    """Windows that move over a list."""
    k = rng.randint(2, 5)
    low = rng.randint(5, 25)
    inner, inner_code, inner_wrong = rng.choice(
        [("sum", "sum(w)", "max(w)"), ("difference between its largest and its smallest item", "max(w) - min(w)", "w[-1] - w[0]"), ("largest item", "max(w)", "w[-1]"), ("number of different items", "len(set(w))", "len(w)"), ("second smallest item (of two equal smallest ones the other)", "sorted(w)[1]", "sorted(set(w))[-1]")]
    )
    words, code, wrong = rng.choice(
        [
            ("a list of these", "found", "found[::<K>]"),
            ("the largest of these (0 if there is none)", "max(found, default=0)", "min(found, default=0)"),
            ("the position, from 0, of the window where this is smallest (the first of several; -1 if there is none)", "found.index(min(found)) if found else -1", "found.index(max(found)) if found else -1"),
            ("how many of these are at least <L>", "sum(x >= <L> for x in found)", "sum(x > <L> + 3 for x in found)"),
            ("how often this is larger than in the window before", "sum(a < b for a, b in zip(found, found[1:]))", "sum(a <= b for a, b in zip(found, found[1:]))"),
        ]
    )
    return make_draft(
        "slide(values)",
        f"Look at every window of <K> neighboring items in a list of integers, and take its {inner}. Return {words}.",
        f"    found = []\n    for i in range(len(values) - <K> + 1):\n        w = values[i:i + <K>]\n        found.append({inner_code})\n    return {code}",
        [(inner_code, inner_wrong), (f"return {code}", f"return {wrong}"), ("- <K> + 1)", "- <K>)")],
        [([rng.randint(0, 12) for _ in range(n)],) for n in (9, 0, k - 1, k, k + 1, 12, 10, 11, 13, 14, 12, 9)],
        K=k,
        L=low if "sum" in inner else low // 5 + 1,
    )


def groups(rng: Random) -> Draft:
    """Words or numbers grouped by a key."""
    k = rng.randint(2, 6)
    of_words = rng.random() < 0.5
    keys = (
        [("number of letters", "len(x)", "x[0]"), ("first letter", "x[0]", "x[-1]"), ("last letter", "x[-1]", "x[0]"), ("number of vowels (a, e, i, o, u)", "sum(c in 'aeiou' for c in x)", "len(x)")]
        if of_words
        else [(f"remainder by {k}", f"x % {k}", f"x // {k}"), (f"whole quotient by {k} (rounded down)", f"x // {k}", f"x % {k}"), ("last decimal digit", "x % 10", "x // 10"), ("number of decimal digits", "len(str(x))", "len(str(x)) + 1")]
    )
    key, key_code, key_wrong = rng.choice(keys)
    ends = [
        ("the number of its items", "len(v)", "len(set(v))"),
        ("a list of its items in their order", "v", "sorted(v)[::-1]"),
        ("its first item", "v[0]", "v[-1]"),
        ("its largest item" if not of_words else "its alphabetically last item", "max(v)", "min(v)"),
    ]
    ends += [("the total number of letters", "sum(map(len, v))", "len(v)")] if of_words else [("the sum of its items", "sum(v)", "sum(set(v))"), ("the difference between its largest and smallest item", "max(v) - min(v)", "v[-1] - v[0]")]
    end, end_code, end_wrong = rng.choice(ends)
    least = rng.choice([1, 2])
    rest = "" if least == 1 else " Leave out groups of a single item."

    def items(n: int) -> list[object]:
        return [rng.choice(WORDS) if of_words else rng.randint(1, 130) for _ in range(n)]

    inputs = [(found + found[:2],) for found in (items(n) for n in (7, 0, 1, 9, 10, 12, 8, 11, 6, 9))]
    return make_draft(
        "group(items)",
        f"Group a list of {'words of lower-case letters' if of_words else 'positive integers'} by {key}. Return a dict that has, for the key of each group, {end}.{rest}",
        f"    found = {{}}\n    for x in items:\n        found.setdefault({key_code}, []).append(x)\n    return {{k: {end_code} for k, v in found.items() if len(v) >= {least}}}",
        [(f"setdefault({key_code}", f"setdefault({key_wrong}"), (f"{{k: {end_code} for", f"{{k: {end_wrong} for"), (f">= {least}", f"> {least}")],
        inputs,
    )


def run_lengths(rng: Random) -> Draft:
    """Runs of equal characters written with their lengths."""
    alphabet, sign = rng.choice(["abc", "xyz", "01x", "mno"]), rng.choice(["", ":", "*", "x"])
    least = rng.randint(1, 3)
    first = rng.choice(["letter", "count"])
    join = rng.choice(["", "-", ",", ";"])
    shape = f"c + {sign!r} + str(n)" if first == "letter" else f"str(n) + {sign!r} + c"
    order = "the character, then its count" if first == "letter" else "the count, then the character"
    between = f", with {sign!r} between them" if sign else ""
    rest = f" Of a run of fewer than {least} write the characters themselves." if least > 1 else ""
    return make_draft(
        "shorten(text)",
        f"Write each run of equal neighboring characters of a text as {order}{between}{f', and join the runs by {join!r}' if join else ''}.{rest}",
        f"""
    runs = []
    for c in text:
        if runs and runs[-1][0] == c:
            runs[-1][1] += 1
        else:
            runs.append([c, 1])
    parts = [{shape} if n >= {least} else c * n for c, n in runs]
    return {join!r}.join(parts)
""",
        [(f"n >= {least}", f"n > {least}"), ("runs[-1][0] == c", "any(run[0] == c for run in runs)"), ("runs.append([c, 1])", "runs.append([c, 0])")],
        [(text,) for text in [*("".join(rng.choice(alphabet) * rng.randint(1, 4) for _ in range(n)) for n in (5, 0, 1, 3, 4, 6, 7, 2, 8, 6)), alphabet, alphabet[0] * 12]],
    )


def ciphers(rng: Random) -> Draft:
    """Letters moved in the alphabet."""
    k, m = rng.randint(2, 11), rng.randint(2, 4)
    words, step = rng.choice(
        [
            (f"by {k} places", f"{k}"),
            (f"by {k} places where its position in the text (from 0) is even, and by {m} where it is odd", f"({k} if i % 2 == 0 else {m})"),
            (f"by its position in the text (from 0) plus {k}", f"(i + {k})"),
            (f"by {k} places if it is a vowel (a, e, i, o, u), else by {m}", f"({k} if c in 'aeiou' else {m})"),
            (f"by {k} times the number of letters before it in the text", f"({k} * done)"),
        ]
    )
    back = rng.choice([True, False])
    sign = "-" if back else "+"
    keep = rng.choice(["stay as they are", "are left out"])
    other = "found.append(c)" if keep == "stay as they are" else "pass"
    return make_draft(
        "encode(text)",
        f"Move each lower-case letter of a text {'back' if back else 'forward'} in the alphabet {words}; {'before `a` comes `z`' if back else 'after `z` comes `a`'}. All other characters {keep}.",
        f"""
    found, done = [], 0
    for i, c in enumerate(text):
        if 'a' <= c <= 'z':
            found.append(chr((ord(c) - 97 {sign} {step}) % 26 + 97))
            done += 1
        else:
            {other}
    return ''.join(found)
""",
        [(f"97 {sign} {step}", f"97 {'+' if back else '-'} {step}"), (") % 26 + 97", ") % 25 + 97"), (f"            {other}", f"            {'pass' if other != 'pass' else 'found.append(c)'}")],
        [(text,) for text in [*sentences(rng, count=6), "xyz abc!", "a", "Zoo, 12 zebras", letters(rng, "aeiouxyz -", 12), letters(rng, "vwxyz", 9)]],
    )


def parsed_entries(rng: Random) -> Draft:
    """Entries such as `a=3` in a text."""
    outer, inner = rng.choice([(";", "="), (",", ":"), ("|", "->"), (" ", "="), ("&", "=")])
    twice, twice_code, twice_wrong = rng.choice(
        [
            ("are added up", "table[key] = table.get(key, 0) + value", "table[key] = value"),
            ("count with the last of them", "table[key] = value", "table.setdefault(key, value)"),
            ("count with the first of them", "table.setdefault(key, value)", "table[key] = value"),
            ("count with the largest of them", "table[key] = max(value, table.get(key, value))", "table[key] = value"),
        ]
    )
    words, code, wrong = rng.choice(
        [
            ("a dict from names to values", "table", "dict(sorted(table.items())[1:])"),
            ("the sum of all values", "sum(table.values())", "len(table)"),
            ("the name with the largest value (the alphabetically first of several; an empty text if there is none)", "min(table, key=lambda key: (-table[key], key), default='')", "max(table, key=lambda key: (table[key], key), default='')"),
            ("a list of the names in alphabetical order, without those of which the value is below <L>", "sorted(key for key in table if table[key] >= <L>)", "sorted(key for key in table if table[key] > <L>)"),
        ]
    )
    low = rng.randint(3, 12)

    def text(n: int) -> str:
        names = rng.sample("abcdefg", 4)
        return outer.join(f"{rng.choice(names)}{inner}{rng.choice([low, rng.randint(-5, 20)])}" for _ in range(n))

    bad = rng.choice(["", "x", "no"])
    inputs = [text(5), "", text(1), f"a{inner}", *(text(n) for n in (4, 6, 7, 8)), outer.join([text(3), bad, text(3)]), outer.join([bad, text(4)]), text(9)]
    return make_draft(
        "read(text)",
        f"`text` holds entries of the form `name{inner}number`, with {outer!r} between two. Leave out what has no {inner!r} or nothing after it; numbers are whole and may be negative. Values of a name that comes more than once {twice}. Return {words}.",
        f"""
    table = {{}}
    for entry in text.split({outer!r}):
        key, sign, number = entry.partition({inner!r})
        if not sign or not number:
            continue
        value = int(number)
        {twice_code}
    return {code}
""",
        [(twice_code, twice_wrong), (f"return {code}", f"return {wrong}"), ("value = int(number)", "value = abs(int(number))")],
        [(each,) for each in inputs],
        L=low,
    )


def counts(rng: Random) -> Draft:
    """The most or least frequent words or letters."""
    of_words = rng.choice([True, False])
    unit, split = ("words", "text.split()") if of_words else ("letters", "text.replace(' ', '')")
    rare = rng.choice([True, False])
    least, most = rng.randint(1, 2), rng.randint(1, 3)
    tie, tie_code = rng.choice([("alphabetically first", "w"), ("earliest in the text", "text.index(w)" if not of_words else "words.index(w)")])
    sign = "" if rare else "-"
    shape, code = rng.choice([("as a list", "found"), ("as a list of pairs (lists) of each with its count", "[[w, table[w]] for w in found]"), ("as one text, joined by `/`", "'/'.join(found)")])
    return make_draft(
        "frequent(text)",
        f"Count the {unit} of a text of lower-case words with one space between two. Return {shape} the {most} {'least' if rare else 'most'} frequent of those that occur at least {least} time{'s' if least > 1 else ''} (all if there are fewer), the {'rarest' if rare else 'most frequent'} first; of equally frequent ones the {tie} comes first.",
        f"""
    words = list({split})
    table = {{}}
    for w in words:
        table[w] = table.get(w, 0) + 1
    kept = [w for w in table if table[w] >= {least}]
    found = sorted(kept, key=lambda w: ({sign}table[w], {tie_code}))[:{most}]
    return {code}
""",
        [(f"({sign}table[w]", f"({'-' if rare else ''}table[w]"), (f">= {least}]", f">= {least + 1}]"), (f"[:{most}]", f"[:{most + 1}]")],
        [(" ".join(rng.choice(["ant", "bee", "cat", "dog", "elk", "fox"][: rng.randint(2, 6)]) for _ in range(n)),) for n in (9, 0, 1, 6, 8, 10, 12, 14, 7, 11, 13)],
    )


def merged_lists(rng: Random) -> Draft:
    """Two lists compared item by item."""
    k = rng.randint(2, 5)
    words, code, wrongs = rng.choice(
        [
            ("the items of `left` that are not in `right`, in their order, each as often as it stands there", "[x for x in left if x not in right]", ("[x for x in right if x not in left]", "sorted(set(left) - set(right))", "[x for x in left if x in right]")),
            ("the different numbers that are in exactly one of the lists, in rising order", "sorted(set(left) ^ set(right))", ("sorted(set(left) - set(right))", "sorted(set(left) | set(right))", "sorted(set(left) ^ set(right))[::-1]")),
            ("each number that both have, in rising order, as often as in the list where it is rarer", "[x for x in sorted(set(left)) for _ in range(min(left.count(x), right.count(x)))]", ("sorted(set(left) & set(right))", "[x for x in sorted(left) if x in right]", "[x for x in sorted(set(left)) for _ in range(max(left.count(x), right.count(x)))]")),
            (f"all items of both in rising order, without those that occur {k} times or more in the two together", f"[x for x in sorted(left + right) if (left + right).count(x) < {k}]", (f"[x for x in sorted(left + right) if (left + right).count(x) <= {k}]", "sorted(left + right)", f"[x for x in sorted(left + right) if left.count(x) < {k}]")),
            (f"the items of both in turn, {k} of `left`, then one of `right`, and so on; when one is used up, the rest of the other", "mix(left, right)", ("mix(right, left)", "left + right", "mix(left, right)[::-1]")),
            (f"the number of pairs of an item of `left` and an item of `right` of which the distance is at most {k}", f"sum(abs(x - y) <= {k} for x in left for y in right)", (f"sum(abs(x - y) < {k} for x in left for y in right)", f"sum(abs(x - y) <= {k} for x, y in zip(left, right))", f"sum(abs(x - y) <= {k} for x in set(left) for y in set(right))")),
            (f"for each item of `left` the number of items of `right` that are at least {k} larger, as a list", f"[sum(y >= x + {k} for y in right) for x in left]", (f"[sum(y > x + {k} for y in right) for x in left]", "[sum(y >= x for y in right) for x in left]", f"[sum(y >= x + {k} for y in left) for x in right]")),
        ]
    )
    body = f"    return {code}"
    if "mix(" in code:
        body = f"    def mix(a, b):\n        a, b, found = list(a), list(b), []\n        while a and b:\n            found += a[:{k}] + b[:1]\n            del a[:{k}], b[:1]\n        return found + a + b\n    return {code}"
    return make_draft(
        "compare(left, right)",
        f"`left` and `right` are lists of integers. Return {words}.",
        body,
        [(f"return {code}", f"return {wrong}") for wrong in wrongs],
        [([rng.randint(0, 9) for _ in range(n)], [rng.randint(0, 12) for _ in range(m)]) for n, m in ((6, 5), (0, 3), (4, 0), (5, 5), (8, 7), (7, 9), (6, 6), (9, 4), (10, 8), (3, 7))],
    )


def grids(rng: Random) -> Draft:
    """Rows and columns of a grid."""
    k = rng.randint(2, 4)
    words, code, wrongs = rng.choice(
        [
            ("a list of the sums of its columns", "[sum(c) for c in zip(*grid)]", ("[sum(r) for r in grid]", "[max(c) for c in zip(*grid)]", "[sum(c) for c in zip(*grid)][::-1]")),
            ("the grid turned by a quarter to the right (clockwise)", "[list(r) for r in zip(*grid[::-1])]", ("[list(r) for r in zip(*grid)]", "[list(r) for r in zip(*grid)][::-1]", "[r[::-1] for r in grid]")),
            ("the grid turned by a quarter to the left", "[list(r) for r in zip(*grid)][::-1]", ("[list(r) for r in zip(*grid[::-1])]", "[list(r) for r in zip(*grid)]", "grid[::-1]")),
            ("a list of the largest items of its rows, the last row first", "[max(r) for r in grid][::-1]", ("[max(r) for r in grid]", "[min(r) for r in grid][::-1]", "[max(c) for c in zip(*grid)][::-1]")),
            ("the sum of the items on its edge (first and last row and column, each item once)", "sum(x for i, r in enumerate(grid) for j, x in enumerate(r) if i in (0, len(grid) - 1) or j in (0, len(r) - 1))", ("sum(map(sum, grid))", "sum(grid[0]) + sum(grid[-1])", "sum(x for i, r in enumerate(grid) for j, x in enumerate(r) if i in (0, len(grid) - 1))")),
            ("the number of items that are larger than all others in their row", "sum(r.count(max(r)) == 1 for r in grid)", ("len(grid)", "sum(c.count(max(c)) == 1 for c in zip(*grid))", "sum(len(set(r)) == len(r) for r in grid)")),
            (f"a list of its items in the rows of even number (0, 2, ...) from the left, in the others from the right, without those divisible by {k}", f"[x for i, r in enumerate(grid) for x in (r if i % 2 == 0 else r[::-1]) if x % {k}]", (f"[x for r in grid for x in r if x % {k}]", "[x for i, r in enumerate(grid) for x in (r if i % 2 == 0 else r[::-1])]", f"[x for i, r in enumerate(grid) for x in (r if i % 2 else r[::-1]) if x % {k}]")),
            (f"the grid with every row moved to the right by its number times {k} places (what falls off on the right comes in on the left)", f"[[r[(j - i * {k}) % len(r)] for j in range(len(r))] for i, r in enumerate(grid)]", (f"[[r[(j + i * {k}) % len(r)] for j in range(len(r))] for i, r in enumerate(grid)]", f"[[r[(j - {k}) % len(r)] for j in range(len(r))] for i, r in enumerate(grid)]", "grid")),
            (f"the largest sum of {k} neighbors in a row (0 if no row is so long)", f"max((sum(r[j:j + {k}]) for r in grid for j in range(len(r) - {k - 1})), default=0)", ("max(map(sum, grid))", f"max((sum(r[j:j + {k}]) for r in zip(*grid) for j in range(len(r) - {k - 1})), default=0)", f"sum(grid[0][:{k}])")),
            (f"the number of items that are at least {k} larger than the item on their left", f"sum(b - a >= {k} for r in grid for a, b in zip(r, r[1:]))", (f"sum(b - a > {k} for r in grid for a, b in zip(r, r[1:]))", f"sum(a - b >= {k} for r in grid for a, b in zip(r, r[1:]))", f"sum(b - a >= {k} for c in zip(*grid) for a, b in zip(c, c[1:]))")),
        ]
    )
    return make_draft(
        "scan_grid(grid)",
        f"`grid` is a list of rows, which are lists of integers of one length, at least one of each. Return {words}.",
        f"    return {code}",
        [(f"return {code}", f"return {wrong}") for wrong in wrongs],
        [([[rng.randint(0, 9) for _ in range(m)] for _ in range(n)],) for n, m in ((3, 3), (1, 1), (1, 4), (4, 1), (2, 5), (5, 4), (3, 6), (4, 4), (6, 5), (5, 7))],
    )


def digit_loops(rng: Random) -> Draft:
    """A step on a number, again and again."""
    k, power, add = rng.randint(2, 9), rng.randint(1, 3), rng.randint(1, 9)
    step, step_code, step_wrong = rng.choice(
        [
            (f"the sum of its decimal digits, each to the power of {power}, plus {add}", f"sum(int(d) ** {power} for d in str(n)) + {add}", f"sum(int(d) ** {power + 1} for d in str(n)) + {add}"),
            (f"its half if it is even, else {2 * k + 1} times it plus {2 * add - 1}, of which only the last three decimal digits are kept", f"n // 2 if n % 2 == 0 else ({2 * k + 1} * n + {2 * add - 1}) % 1000", f"n // 2 if n % 2 == 0 else ({2 * k + 1} * n + {2 * add + 1}) % 1000"),
            (f"{k} times it plus {add}, of which the remainder by {97 + k} is taken", f"({k} * n + {add}) % {97 + k}", f"({k} * n + {add + 1}) % {97 + k}"),
            (f"it plus its last decimal digit plus {add}, of which the remainder by {200 + k} is taken", f"(n + n % 10 + {add}) % {200 + k}", f"(n + {add}) % {200 + k}"),
        ]
    )
    words, code, wrong = rng.choice(
        [
            ("the number of different numbers that come up, the first one included", "len(seen)", "len(seen) + 1"),
            ("the largest number that comes up, the first one included", "max(seen)", "n"),
            ("the first number that comes up a second time", "n", "seen[0]"),
            ("the length of the cycle in which it ends", "len(seen) - seen.index(n)", "len(seen)"),
            ("the smallest number of the cycle in which it ends", "min(seen[seen.index(n):])", "min(seen)"),
        ]
    )
    return make_draft(
        "iterate(n)",
        f"Start with the integer `n` (at least 0) and replace it again and again by {step}, until a number comes up a second time. Return {words}.",
        f"    seen = []\n    while n not in seen:\n        seen.append(n)\n        n = {step_code}\n    return {code}",
        [(f"n = {step_code}", f"n = {step_wrong}"), (f"return {code}", f"return {wrong}"), ("seen = []\n    while", "seen = [n]\n    n += 1\n    while")],
        [(n,) for n in (rng.randint(20, 99), 0, 1, 2, 7, 10, 33, 58, 100, 123, 345)],
    )


def without_repeats(rng: Random) -> Draft:
    """A list without some of its repeats."""
    k = rng.randint(1, 4)
    keep, code, wrong = rng.choice(
        [
            (f"drop each item that equals one of the {k} items before it in the list", f"x in values[max(0, i - {k}):i]", "x in values[:i]"),
            (f"drop each item that comes more than {k} places after the last item before it of the same value that was kept, and keep the others", f"x in last and i - last[x] > {k}", f"x in last and i - last[x] >= {k}"),
            (f"drop each item of a value that was kept {k} times before", f"kept.count(x) >= {k}", f"kept.count(x) > {k}"),
            (f"drop each item that is less than {k} away from the last one that was kept", f"kept and abs(x - kept[-1]) < {k}", f"kept and abs(x - kept[-1]) <= {k}"),
            (f"drop each item that is at most {k} larger than the smallest one that was kept", f"kept and x - min(kept) <= {k} and x >= min(kept)", f"kept and x - min(kept) < {k} and x >= min(kept)"),
        ]
    )
    end, end_code, end_wrong = rng.choice([("the items that are kept", "kept", "values[:len(kept)]"), ("the positions, from 0, of the items that are kept", "places", "kept"), ("the sum of the items that are dropped", "sum(values) - sum(kept)", "sum(kept)")])
    return make_draft(
        "thin_out(values)",
        f"Go through a list of integers from the left: {keep}. Return {end}.",
        f"    kept, places, last = [], [], {{}}\n    for i, x in enumerate(values):\n        if {code}:\n            continue\n        kept.append(x)\n        places.append(i)\n        last[x] = i\n    return {end_code}",
        [(f"if {code}:", f"if {wrong}:"), (f"return {end_code}", f"return {end_wrong}"), (f"if {code}:", "if x in kept:")],
        [([rng.randint(0, 7) for _ in range(n)],) for n in (9, 0, 1, 8, 10, 12, 14, 11, 13, 16, 15)],
    )


LEVEL_2_FAMILIES: tuple[Family, ...] = (
    pipelines,
    longest_runs,
    neighbors,
    running_balances,
    windows,
    groups,
    run_lengths,
    ciphers,
    parsed_entries,
    counts,
    merged_lists,
    grids,
    digit_loops,
    without_repeats,
)
