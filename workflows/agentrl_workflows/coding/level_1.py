"""Families of level 1: one expression or one short rule."""

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


def chosen_numbers(rng: Random) -> Draft:
    """Numbers that meet a condition, summed up."""
    test, end = number_test(rng), number_summary(rng)
    return make_draft(
        "summarize(values)",
        f"`values` is a list of integers. Take those of which each {test.words}, in their order, and return {end.words}.",
        f"    chosen = [x for x in values if {test.code}]\n    return {end.code}",
        [(test.code, test.wrong), (end.code, end.wrong), (f" if {test.code}", "")],
        integer_lists(rng, test.edges),
    )


def changed_numbers(rng: Random) -> Draft:
    """Every number changed."""
    change, order = number_change(rng), rng.choice(["", "[::-1]"])
    words = ", the last number first" if order else ""
    return make_draft(
        "change_all(values)",
        f"Return a list that has, for each integer of the list `values`{words}: {change.words}.",
        f"    return [{change.code} for x in values{order}]",
        [(change.code, change.wrong), (f"values{order}", "sorted(values)"), (change.code, "x")],
        integer_lists(rng, change.edges),
    )


def characters(rng: Random) -> Draft:
    """Characters of a class, counted, kept or replaced."""
    group = "".join(sorted(rng.sample("abcdefghilmnoprstu", rng.randint(3, 5))))
    mark = rng.choice("*#-.")
    words, code, wrong = rng.choice(
        [
            ("the number of its characters that are", f"sum(c in {group!r} for c in text)", f"len(set(text) & set({group!r}))"),
            ("the text without the characters that are", f"''.join(c for c in text if c not in {group!r})", "text[1:]"),
            ("a text of only those of its characters that are", f"''.join(c for c in text if c in {group!r})", "text[:1]"),
            (f"the text with `{mark}` in the place of each character that is", f"''.join({mark!r} if c in {group!r} else c for c in text)", f"{mark!r} * len(text)"),
            ("the list of the positions, from 0, of its characters that are", f"[i for i, c in enumerate(text) if c in {group!r}]", "[*range(len(text))]"),
        ]
    )
    shown = ", ".join(f"`{c}`" for c in group)
    inputs = [(text,) for text in sentences(rng, count=11)]
    return make_draft(
        "scan(text)",
        f"Return, for a text of lower-case letters and spaces, {words} one of {shown}.",
        f"    return {code}",
        [(code, wrong), (repr(group), repr(group[1:])), (repr(group), repr(group[:-1]))],
        inputs,
    )


def picked_words(rng: Random) -> Draft:
    """Words that meet a condition, joined."""
    size, letter, sign = rng.randint(4, 6), rng.choice("aeglnort"), rng.choice([" ", "-", "+", ", "])
    words, code, wrong = rng.choice(
        [
            (f"have at least {size} letters", f"len(w) >= {size}", f"len(w) > {size}"),
            (f"have fewer than {size} letters", f"len(w) < {size}", f"len(w) <= {size}"),
            (f"contain the letter `{letter}`", f"{letter!r} in w", f"w.startswith({letter!r})"),
            (f"do not contain the letter `{letter}`", f"{letter!r} not in w", f"not w.startswith({letter!r})"),
            ("end in a vowel (a, e, i, o or u)", "w[-1] in 'aeiou'", "w[0] in 'aeiou'"),
            ("have an even number of letters", "len(w) % 2 == 0", "len(w) % 2 == 1"),
        ]
    )
    order, order_code, order_wrong = rng.choice(
        [
            ("in their order", "chosen", "sorted(chosen)"),
            ("in alphabetical order", "sorted(chosen)", "chosen"),
            ("the last one first", "chosen[::-1]", "chosen"),
        ]
    )
    return make_draft(
        "pick_words(text)",
        f"`text` holds words of lower-case letters with one space between two. Return those that {words}, {order}, joined by {sign!r}.",
        f"    chosen = [w for w in text.split() if {code}]\n    return {sign!r}.join({order_code})",
        [(code, wrong), (f"join({order_code})", f"join({order_wrong})"), (f" if {code}", "")],
        [(text,) for text in sentences(rng, count=11)],
    )


def digits_in_base(rng: Random) -> Draft:
    """Digits of a number in a base."""
    base = rng.randint(2, 16)
    digit = rng.randrange(1, min(base, 10))
    words, code, wrong = rng.choice(
        [
            ("the sum of its digits", "sum(digits)", "max(digits)"),
            (f"how many of its digits are {digit}", f"digits.count({digit})", "len(digits)"),
            ("the largest of its digits", "max(digits)", "digits[-1]"),
            ("the number of its digits", "len(digits)", "len(set(digits))"),
            ("the list of its digits, the leading one first", "digits[::-1]", "digits"),
            ("the list of its digits, the last one first", "digits", "digits[::-1]"),
        ]
    )
    inputs = [(n,) for n in (rng.randint(500, 9999), 1, base, base * base - 1, digit * base + digit)]
    inputs += [(rng.randint(10, 99_999),) for _ in range(7)]
    return make_draft(
        "digits_of(n)",
        f"Write the positive integer `n` in base <B> and return {words}.",
        f"    digits = []\n    while n:\n        digits.append(n % <B>)\n        n //= <B>\n    return {code}",
        [("% <B>", "% <C>"), ("//= <B>", "//= <C>"), (f"return {code}", f"return {wrong}")],
        inputs,
        B=base,
        C=base + 1,
    )


def table_entries(rng: Random) -> Draft:
    """Entries of a dict by their values."""
    test = number_test(rng, "v")
    words, code, wrong = rng.choice(
        [
            ("their keys in alphabetical order", "sorted(kept)", "list(kept)[::-1]"),
            ("the sum of their values", "sum(kept.values())", "len(kept)"),
            ("a dict of them alone", "kept", "dict(table)"),
            ("a dict from each of their values to the number of them that have it", "{v: [*kept.values()].count(v) for v in kept.values()}", "{v: 1 for v in kept.values()}"),
            ("the length of the longest of their keys (0 if there is none)", "max(map(len, kept), default=0)", "max(map(len, table), default=0)"),
        ]
    )

    def table() -> dict[str, int]:
        return dict(zip(rng.sample(WORDS, 6), integers(rng, test.edges, length=6), strict=True))

    return make_draft(
        "select(table)",
        f"`table` is a dict from words to integers. Take the entries of which the value {test.words}, and return {words}.",
        f"    kept = {{k: v for k, v in table.items() if {test.code}}}\n    return {code}",
        [(test.code, test.wrong), (f"return {code}", f"return {wrong}"), (f" if {test.code}", "")],
        [(table(),), ({},), *((table(),) for _ in range(9))],
    )


def cut_lists(rng: Random) -> Draft:
    """A list cut, turned or dealt out."""
    k = rng.randint(2, 6)
    words, code, wrongs = rng.choice(
        [
            ("every <K>th item, the first one included", "values[::<K>]", ("values[<K> - 1::<K>]", "values[::<K> + 1]", "values[:<K>]")),
            ("the list turned to the left by <K> places (the first item goes to the end, <K> times)", "[values[(i + <K>) % len(values)] for i in range(len(values))]", ("values[<K>:] + values[:1]", "[values[i - <K>] for i in range(len(values))]", "values[<K>:]")),
            ("a list of lists of <K> neighbors each, from the left; the last one may be shorter", "[values[i:i + <K>] for i in range(0, len(values), <K>)]", ("[values[i:i + <K>] for i in range(0, len(values) - <K> + 1, <K>)]", "[values[i::<K>] for i in range(<K>)]", "[values[i:i + <K>] for i in range(len(values))]")),
            ("a list of <K> lists: the items are dealt out to them in turn, as cards are", "[values[i::<K>] for i in range(<K>)]", ("[values[i:i + <K>] for i in range(0, len(values), <K>)]", "[values[i::<K>] for i in range(<K> - 1)]", "[values[i::<K> + 1] for i in range(<K>)]")),
            ("the items, but each block of <K> neighbors from the left in reverse; a shorter last block, too", "[x for i in range(0, len(values), <K>) for x in values[i:i + <K>][::-1]]", ("values[::-1]", "[x for i in range(0, len(values), <K>) for x in values[i:i + <K>]]", "values[:<K>][::-1] + values[<K>:]")),
            ("the items without the first <K> and the last <K> (nothing is left of a list of at most <KK>)", "values[<K>:len(values) - <K>] if len(values) > <KK> else []", ("values[<K>:]", "values[1:len(values) - 1]", "values[<K>:len(values) - <K> + 1]")),
            ("the <K> largest, the largest first; all of a shorter list", "sorted(values)[::-1][:<K>]", ("values[:<K>]", "sorted(values)[:<K>]", "sorted(values)[-<K>:]")),
        ]
    )
    return make_draft(
        "rearrange(values)",
        f"Return, for a list of integers: {words}.",
        f"    return {code}",
        [(code, wrong) for wrong in wrongs],
        [(integers(rng, length=n),) for n in (9, 0, 1, k, k + 1, 2 * k, 2 * k + 1, 3 * k, 11, 7, 13)],
        K=k,
        KK=2 * k,
    )


def combined_lists(rng: Random) -> Draft:
    """Two lists, item by item."""
    a, b = rng.sample(range(1, 8), 2)
    words, code, wrong = rng.choice(
        [
            (f"{a} times the item of `left` plus {b} times that of `right`", f"{a} * x + {b} * y", f"{b} * x + {a} * y"),
            (f"the larger of the item of `left` plus {a} and that of `right`", f"max(x + {a}, y)", f"max(x, y + {a})"),
            (f"the product of the two, minus {b}", f"x * y - {b}", f"x + y - {b}"),
            (f"the distance between the two, at most {a + b}", f"min(abs(x - y), {a + b})", "abs(x - y)"),
            (f"the item of `left` if it is larger than that of `right`, else {a}", f"x if x > y else {a}", f"x if x >= y else {a}"),
        ]
    )
    end, end_code, end_wrong = rng.choice(
        [("a list of the results", "found", "found[::-1]"), ("the sum of the results", "sum(found)", "max(found, default=0)"), ("the largest result, 0 if there is none", "max(found, default=0)", "sum(found)")]
    )

    def pair(n: int, m: int) -> tuple[list[int], list[int]]:
        left = integers(rng, length=n, low=-9, high=15)
        return left, [rng.choice([*left, rng.randint(-9, 15)]) if left else 1 for _ in range(m)]

    return make_draft(
        "combine(left, right)",
        f"`left` and `right` are lists of integers. For each position that both have, compute {words}. Return {end}.",
        f"    found = [{code} for x, y in zip(left, right)]\n    return {end_code}",
        [(code, wrong), (f"return {end_code}", f"return {end_wrong}"), ("zip(left, right)", "zip(left[1:], right)")],
        [pair(*sizes) for sizes in ((5, 5), (0, 3), (4, 6), (6, 4), (1, 1), (7, 7), (8, 5), (5, 5), (6, 6), (3, 3))],
    )


def sums_of_ranges(rng: Random) -> Draft:
    """Numbers of a range that meet a condition."""
    test, change = number_test(rng, "n"), number_change(rng, "n")
    return make_draft(
        "add_range(low, high)",
        f"Look at every integer from `low` to `high`, both included. For each that {test.words}, compute {change.words.replace('the number', 'it')}. Return the sum of the results, 0 if there is none.",
        f"    return sum({change.code} for n in range(low, high + 1) if {test.code})",
        [("high + 1", "high"), (test.code, test.wrong), (change.code, change.wrong)],
        [(a, a + b) for a, b in ((-3, 30), (5, -1), (0, 0), (1, 9), (-12, 12), (-30, 50), (7, 3), (2, 25), (-8, 1), (10, 45), (-2, 19))],
    )


def tiers(rng: Random) -> Draft:
    """A price with tiers."""
    first, second = rng.randint(3, 9), rng.randint(12, 25)
    prices = sorted(rng.sample(range(2, 20), 3), reverse=True)
    base = rng.randint(0, 15)
    return make_draft(
        "price(count)",
        "The first <A> pieces of an order cost <P> each, those after them up to the <B>th <Q> each, and all further ones <R> each. An order of at least one piece also costs <F> once. Return the price of `count` pieces.",
        """
    if count == 0:
        return 0
    total = <F> + <P> * min(count, <A>)
    total += <Q> * max(0, min(count, <B>) - <A>)
    return total + <R> * max(0, count - <B>)
""",
        [("<Q> * max(0, min(count, <B>) - <A>)", "<Q> * max(0, count - <A>)"), ("max(0, count - <B>)", "max(0, count - <B> - 1)"), ("total = <F> + <P>", "total = <P>" if base else "total = 1 + <P>")],
        [(n,) for n in (first + 4, 0, 1, first, first + 1, second - 1, second, second + 1, second + 2, 2 * second, 100)],
        A=first,
        B=second,
        P=prices[0],
        Q=prices[1],
        R=prices[2],
        F=base,
    )


def units(rng: Random) -> Draft:
    """An amount split into units."""
    small, large = rng.sample(range(3, 30), 2)
    names = rng.sample(["box", "crate", "pack", "roll", "tray", "bundle"], 2)
    sign, style = rng.choice([":", "/", " ", "-"]), rng.choice(["all", "short"])
    rest = "Leave out units of which there is none; of 0 pieces return `0`." if style == "short" else "Write all three, also a 0."
    body = """
    big, rest = divmod(pieces, <S> * <L>)
    middle, few = divmod(rest, <S>)
    parts = [f'{big}<X>', f'{middle}<Y>', f'{few}p']
"""
    body += f"    return {sign!r}.join(parts)" if style == "all" else f"    return {sign!r}.join(each for each in parts if each[:-1] != '0') or '0'"
    return make_draft(
        "in_units(pieces)",
        f"<S> pieces make a {names[0]}, <L> of those a {names[1]}. Write a number of pieces with as many of the larger units as possible: the {names[1]} unit as a number and `<X>`, the {names[0]} unit as a number and `<Y>`, single pieces as a number and `p`, joined by {sign!r} in this order. {rest}",
        body,
        [("<S> * <L>", "<S> + <L>"), ("divmod(rest, <S>)", "divmod(rest, <L>)"), ("{few}p", "{rest}p")],
        [(n,) for n in (small * large * 2 + small + 1, 0, 1, small, small * large, small * large - 1, small + 1, 5 * small * large + 2, 999, 1234, 77)],
        S=small,
        L=large,
        X=names[1][0].upper(),
        Y=names[0][0],
    )


def sorted_words(rng: Random) -> Draft:
    """Words sorted by a key."""
    letter = rng.choice("aeorln")
    words, code = rng.choice(
        [
            ("number of letters", "len(w)"),
            ("last letter", "w[-1]"),
            ("number of vowels (a, e, i, o, u)", "sum(c in 'aeiou' for c in w)"),
            (f"number of letters `{letter}`", f"w.count({letter!r})"),
            ("number of different letters", "len(set(w))"),
            ("second letter", "w[1]"),
            ("word read backwards", "w[::-1]"),
        ]
    )
    falling = rng.choice([True, False])
    most = rng.choice([None, 3, 4])
    end = f"[:{most}]" if most else ""
    tie, tie_code = rng.choice([("in alphabetical order", "w"), ("the shorter one first, then in alphabetical order", "(len(w), w)"), ("in the order of their last letters, then in alphabetical order", "(w[-1], w)")])
    base = f"sorted(words, key=lambda w: {tie_code})"
    return make_draft(
        "arrange(words)",
        f"Sort a list of different words of at least two lower-case letters by their {words}, {'the largest' if falling else 'the smallest'} first (letters compare by the alphabet). Words of which this is the same stand {tie}. Return {'the first ' + str(most) + ' of them, or all if there are fewer' if most else 'the sorted list'}.",
        f"    words = {base}\n    return sorted(words, key=lambda w: {code}, reverse={falling}){end}",
        [(f"reverse={falling}", f"reverse={not falling}"), (f"words = {base}", "words = words[::-1]"), (f"key=lambda w: {code},", "key=lambda w: w[0],")],
        [(rng.sample(WORDS, n),) for n in (6, 0, 1, 8, 9, 10, 7, 12, 9, 15, 11)],
    )


def built_texts(rng: Random) -> Draft:
    """A text built from a word."""
    mark, k = rng.choice("*#=~+"), rng.randint(2, 5)
    width = rng.randint(7, 12)
    words, code, wrongs = rng.choice(
        [
            ("`word` with `<M>` between every two neighboring letters", "'<M>'.join(word)", ("'<M>' + '<M>'.join(word)", "word + '<M>'", "'<M>'.join(word[::-1])")),
            ("`word` with all but its last <K> letters replaced by `<M>`", "'<M>' * max(0, len(word) - <K>) + word[-<K>:]", ("'<M>' * len(word)", "word[:-<K>] + '<M>' * <K>", "'<M>' + word[-<K>:]")),
            ("`word` with `<M>` added on its right until it has <W> characters; a longer word cut to <W>", "word[:<W>].ljust(<W>, '<M>')", ("word.ljust(<W>, '<M>')", "word[:<W>].rjust(<W>, '<M>')", "word[:<W>]")),
            ("`word` with `<M>` added on its left until it has <W> characters; a longer word as it is", "word.rjust(<W>, '<M>')", ("word.ljust(<W>, '<M>')", "word[:<W>].rjust(<W>, '<M>')", "'<M>' * <W> + word")),
            ("`word` with its every <K>th letter (the <K>th, the <KK>th and so on) in upper case", "''.join(c.upper() if i % <K> == 0 else c for i, c in enumerate(word, 1))", ("''.join(c.upper() if i % <K> == 0 else c for i, c in enumerate(word))", "word.upper()", "word[:<K>].upper() + word[<K>:]")),
            ("the first <K> letters of `word`, `<M>`, and the same letters in reverse", "word[:<K>] + '<M>' + word[:<K>][::-1]", ("word[:<K>] + '<M>' + word[:<K>]", "word + '<M>' + word[::-1]", "word[:<K>] + word[:<K>][::-1]")),
        ]
    )
    pool = [rng.choice(WORDS), "", "a", *rng.sample(WORDS, 5), letters(rng, "abcde", width), letters(rng, "xyz", width + 3), letters(rng, "mno", k)]
    return make_draft(
        "decorate(word)",
        f"Return {words}.",
        f"    return {code}",
        [(code, wrong) for wrong in wrongs],
        [(word,) for word in dict.fromkeys(pool)],
        M=mark,
        K=k,
        KK=2 * k,
        W=width,
    )


def scores(rng: Random) -> Draft:
    """A number that cases make."""
    low = rng.randint(-4, 6)
    high = low + rng.randint(5, 14)
    a, b, c = rng.sample(range(2, 9), 3)
    middle, final = number_change(rng), number_change(rng)
    return make_draft(
        "score(x)",
        f"Return, for an integer `x`: below <L>, <A> times `x`; from <L> to <H>, both included, {middle.words}; above <H>, {final.words}, plus <B>.",
        f"    if x < <L>:\n        return <A> * x\n    if x <= <H>:\n        return {middle.code}\n    return {final.code} + <B>",
        [("x < <L>", "x <= <L>"), ("x <= <H>", "x < <H>"), (f"return {final.code} + <B>", f"return {final.code}"), (f"return {middle.code}\n", "return x + <C>\n")],
        [(x,) for x in (low + 2, low - 1, low, low + 1, high - 1, high, high + 1, high + 9, -20, 50, low - 7)],
        L=low,
        H=high,
        A=a,
        B=b,
        C=c,
    )


LEVEL_1_FAMILIES: tuple[Family, ...] = (
    chosen_numbers,
    changed_numbers,
    characters,
    picked_words,
    digits_in_base,
    table_entries,
    cut_lists,
    combined_lists,
    sums_of_ranges,
    tiers,
    units,
    sorted_words,
    built_texts,
    scores,
)
