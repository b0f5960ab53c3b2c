"""Families of level 4: a simulation, a small language, or several steps on records."""

from __future__ import annotations

from random import Random

from agentrl_workflows.coding.parts import WORDS, Draft, Family, letters, make_draft, sentence


def stack_machines(rng: Random) -> Draft:
    """A machine with a stack."""
    k, m = rng.randint(2, 5), rng.randint(7, 19)
    pool = {
        "add": ("replaces the two topmost numbers by their sum", 2, "stack.append(stack.pop() + stack.pop())"),
        "sub": (
            "takes the topmost number b and the one below it a, and puts a - b",
            2,
            "b, a = stack.pop(), stack.pop(); stack.append(a - b)",
        ),
        "mul": (
            f"replaces the two topmost numbers by the remainder of their product by {m}",
            2,
            f"stack.append(stack.pop() * stack.pop() % {m})",
        ),
        "dup": ("puts the topmost number once more", 1, "stack.append(stack[-1])"),
        "swap": ("swaps the two topmost numbers", 2, "stack[-1], stack[-2] = stack[-2], stack[-1]"),
        "neg": ("changes the sign of the topmost number", 1, "stack.append(-stack.pop())"),
        "roll": ("moves the lowest number to the top", 1, "stack.append(stack.pop(0))"),
        "drop": ("removes the topmost number", 1, "stack.pop()"),
        "size": ("puts the number of numbers on the stack", 0, "stack.append(len(stack))"),
        "max": ("replaces the two topmost numbers by the larger one", 2, "stack.append(max(stack.pop(), stack.pop()))"),
        "jump": (
            f"skips the next {k - 1} words if the topmost number is positive; the number is removed",
            1,
            f"at += {k - 1} if stack.pop() > 0 else 0",
        ),
    }
    names = ["sub", *rng.sample([name for name in pool if name != "sub"], 4)]
    bad, bad_code = rng.choice(
        [("is left out", "continue"), ("ends the program", "break"), ("empties the stack", "stack.clear(); continue")]
    )
    words, code, wrong = rng.choice(
        [
            ("the stack as a list, the lowest number first", "stack", "stack[::-1]"),
            (
                "the topmost number at the end (None if there is none)",
                "stack[-1] if stack else None",
                "stack[0] if stack else None",
            ),
            ("the sum of the numbers on the stack at the end", "sum(stack)", "len(stack)"),
        ]
    )
    shown = "; ".join(f"`{name}` {pool[name][0]}" for name in names)
    needs = {name: pool[name][1] for name in names}
    rules = "".join(
        f"        {'if' if at == 0 else 'elif'} word == {name!r}:\n            {pool[name][2]}\n"
        for at, name in enumerate(names)
    )
    second = names[1]

    def program(n: int) -> str:
        return " ".join(rng.choice(names) if rng.random() < 0.5 else str(rng.randint(0, 9)) for _ in range(n))

    return make_draft(
        "run(program)",
        f"`program` is a text of words with one space between two, for a machine with an empty stack. A number (digits only) is put on top of the stack; {shown}. A word for which the stack holds too few numbers {bad}. Return {words}.",
        f"""
    stack, at, needs = [], 0, {needs}
    code = program.split()
    while at < len(code):
        word, at = code[at], at + 1
        if word.isdigit():
            stack.append(int(word))
            continue
        if len(stack) < needs[word]:
            {bad_code}
{rules}    return {code}
""",
        [
            ("stack.append(a - b)", "stack.append(b - a)"),
            (f"            {bad_code}\n", f"            {'break' if bad_code == 'continue' else 'continue'}\n"),
            (f"return {code}", f"return {wrong}"),
            (f"            {pool[second][2]}\n", "            pass\n"),
        ],
        [(program(n),) for n in (7, 0, 1, 5, 9, 10, 12, 14, 11, 15, 13, 18)],
    )


def robots(rng: Random) -> Draft:
    """A robot on a board."""
    size = rng.randint(4, 8)
    edge, edge_code, edge_wrong = rng.choice(
        [
            (
                "stays where it is",
                "if not (0 <= r < <N> and 0 <= c < <N>):\n            r, c = row, col",
                "if not (0 <= r < <N> and 0 <= c < <N>):\n            break",
            ),
            (
                "comes in at the opposite side",
                "r, c = r % <N>, c % <N>",
                "r, c = min(max(r, 0), <N> - 1), min(max(c, 0), <N> - 1)",
            ),
            (
                "turns around and stays where it is",
                "if not (0 <= r < <N> and 0 <= c < <N>):\n            r, c, way = row, col, (way + 2) % 4",
                "if not (0 <= r < <N> and 0 <= c < <N>):\n            r, c = row, col",
            ),
        ]
    )
    start = rng.randint(0, size - 1)
    extra, extra_words, extra_code = rng.choice(
        [
            ("J", "moves two fields ahead at once, and passes over the one between", "step = 2"),
            ("B", "moves one field back and keeps its direction", "step = -1"),
            ("S", "moves one field ahead and then turns to the right", "turn = 1"),
            ("Z", "moves one field ahead and then turns around", "turn = 2"),
        ]
    )
    words, code, wrong = rng.choice(
        [
            (
                "its row, column and direction (one of `N`, `E`, `S`, `W`) at the end, as a list",
                "[row, col, 'NESW'[way]]",
                "[col, row, 'NESW'[way]]",
            ),
            ("the number of different fields on which it was, the first included", "len(seen)", "len(path)"),
            (
                "the number of moves after which it was on a field on which it had been before",
                "len(path) - len(seen)",
                "len(path)",
            ),
            (
                "the largest distance from its start (rows plus columns) that it had",
                "max(abs(r - <A>) + abs(c - <A>) for r, c in path)",
                "abs(row - <A>) + abs(col - <A>)",
            ),
        ]
    )
    return make_draft(
        "drive(commands)",
        f"A robot stands in row <A> and column <A> of a board of <N> times <N> fields (row 0 is in the north, column 0 in the west) and looks north. `L` turns it to the left, `R` to the right, `F` moves it one field ahead, and `{extra}` {extra_words}. Where a move would leave the board, it {edge}. Return {words}, after the commands in a text.",
        f"""
    row = col = <A>
    way, path = 0, [(row, col)]
    for command in commands:
        step, turn = 1, 0
        if command in 'LR':
            way = (way + (1 if command == 'R' else 3)) % 4
            continue
        if command == {extra!r}:
            {extra_code}
        r = row + step * (-1, 0, 1, 0)[way]
        c = col + step * (0, 1, 0, -1)[way]
        {edge_code}
        row, col, way = r, c, (way + turn) % 4
        path.append((row, col))
    seen = set(path)
    return {code}
""",
        [(edge_code, edge_wrong), (f"return {code}", f"return {wrong}"), ("(1 if command == 'R' else 3)", "(3 if command == 'R' else 1)"), (f"            {extra_code}\n", "            pass\n")],
        [(letters(rng, f"FFFLR{extra}F{extra}", n),) for n in (9, 0, 1, 6, 12, 15, 18, 20, 14, 22, 25)],
        N=size,
        A=start,
    )  # fmt: skip


def ledgers(rng: Random) -> Draft:
    """Accounts with fees and limits."""
    fee, limit, bonus, large = rng.randint(1, 4), rng.choice([0, -10, -25]), rng.randint(2, 6), rng.randint(20, 50)
    fee_words, fee_code = rng.choice(
        [
            (f"Every transfer costs the sender {fee} more", f"cost = amount + {fee}"),
            (
                f"A transfer of more than {large // 2} costs the sender {fee} more",
                f"cost = amount + ({fee} if amount > {large // 2} else 0)",
            ),
            (
                f"Every third transfer that is carried out costs the sender {fee} more",
                f"cost = amount + ({fee} if count % 3 == 2 else 0)",
            ),
        ]
    )
    bonus_words, bonus_code = rng.choice(
        [
            (f"A deposit of at least {large} adds {bonus} on top.", f"amount += {bonus} if amount >= {large} else 0"),
            ("A deposit adds nothing on top.", "amount += 0"),
            (f"The first deposit of an account adds {bonus} on top.", f"amount += {bonus} if name not in accounts else 0"),
        ]
    )
    words, code, wrong = rng.choice(
        [
            ("a dict of the balances of all accounts", "accounts", "{k: abs(v) for k, v in accounts.items()}"),
            ("the number of entries that were refused", "refused", "count"),
            (
                "the names of the accounts, the highest balance first, of equal ones in alphabetical order",
                "sorted(accounts, key=lambda k: (-accounts[k], k))",
                "sorted(accounts, key=lambda k: (accounts[k], k))",
            ),
            (
                "the lowest balance that any account had after an entry (0 if that is lower than all)",
                "lowest",
                "min(accounts.values(), default=0)",
            ),
        ]
    )

    def entries(n: int) -> list[str]:
        found: list[str] = []
        for _ in range(n):
            a, b = rng.sample(["ann", "bob", "cat", "dan"][: rng.randint(2, 4)], 2)
            amount = rng.choice([large, large // 2, rng.randint(1, 60), rng.randint(1, 30)])
            found.append(rng.choice([f"deposit {a} {amount}", f"transfer {a} {b} {amount}", f"withdraw {a} {amount}"]))
        return found

    return make_draft(
        "book(entries)",
        f"`entries` is a list of texts: `deposit NAME AMOUNT`, `withdraw NAME AMOUNT`, `transfer FROM TO AMOUNT`. An account has 0 before its first entry and comes into being with a deposit or when it receives a transfer. {bonus_words} {fee_words}; the receiver gets the amount. A withdrawal or transfer is refused if the account does not exist, or if its balance would fall below {limit}. Return {words}.",
        f"""
    accounts, refused, count, lowest = {{}}, 0, 0, 0
    for entry in entries:
        kind, name, *rest = entry.split()
        amount = int(rest[-1])
        if kind == 'deposit':
            {bonus_code}
            accounts[name] = accounts.get(name, 0) + amount
            continue
        cost = amount
        if kind == 'transfer':
            {fee_code}
        if name not in accounts or accounts[name] - cost < {limit}:
            refused += 1
            continue
        accounts[name] -= cost
        lowest = min(lowest, accounts[name])
        if kind == 'transfer':
            accounts[rest[0]] = accounts.get(rest[0], 0) + amount
            count += 1
    return {code}
""",
        [
            (f"- cost < {limit}", f"- cost <= {limit}"),
            (f"            {fee_code}\n", "            cost = amount\n"),
            (f"return {code}", f"return {wrong}"),
            ("accounts.get(rest[0], 0) + amount", "accounts.get(rest[0], 0) + cost + 1"),
            (f"- cost < {limit}", f"- cost < {limit - 12}"),
        ],
        [([f"deposit ann {large}", "deposit bob 9", *entries(n)],) for n in (4, 0, 1, 5, 6, 8, 10, 12, 9, 14, 11)]
        + [(entries(8),)],
    )


def automata(rng: Random) -> Draft:
    """Cells that live by their neighbors."""
    birth, stay = sorted(rng.sample(range(1, 5), rng.randint(1, 2))), sorted(rng.sample(range(0, 5), rng.randint(1, 3)))
    wrap = rng.choice([True, False])
    reach = 2
    near = "(i + d) % n" if wrap else "i + d"
    inside = "True" if wrap else "0 <= i + d < n"
    edge = (
        "The row is a ring: the first and the last cell are neighbors."
        if wrap
        else "Beyond the ends of the row all is dead."
    )
    words, code, wrong = rng.choice(
        [
            ("the row at the end", "row", "row[::-1]"),
            ("the number of living cells at the end", "row.count('#')", "row.count('.')"),
            ("a list of the numbers of living cells before the first and after each generation", "counts", "counts[1:]"),
            (
                "the number of the first generation (from 1) after which the row is as it was before, 0 if there is none",
                "still",
                "len(counts)",
            ),
        ]
    )
    steps = rng.choice(["generations", "generations", "2 * generations"])

    return make_draft(
        "evolve(row, generations)",
        f"`row` is a text of `#` (a living cell) and `.` (a dead one). The neighbors of a cell are the {reach} cells on its left and the {reach} on its right. {edge} In one generation all cells change at once: a dead cell with {' or '.join(map(str, birth))} living neighbors comes to life, a living one with {' or '.join(map(str, stay))} stays alive, and all others are dead. Compute {'twice as many generations as `generations` says' if '2' in steps else '`generations` generations'}; a row has at least 5 cells. Return {words}.",
        f"""
    n, counts, still = len(row), [row.count('#')], 0
    for number in range(1, {steps} + 1):
        found = ''
        for i in range(n):
            living = sum(row[{near}] == '#' for d in (-2, -1, 1, 2) if {inside})
            found += '#' if living in ({stay} if row[i] == '#' else {birth}) else '.'
        if found == row and not still:
            still = number
        row = found
        counts.append(row.count('#'))
    return {code}
""",
        [
            ("(-2, -1, 1, 2)", "(-2, -1, 0, 1, 2)"),
            (f"({stay} if row[i] == '#' else {birth})", f"({birth} if row[i] == '#' else {stay})"),
            (f"return {code}", f"return {wrong}"),
            ("(-2, -1, 1, 2)", "(-1, 1)"),
        ],
        [
            ("".join(rng.choice("#..#.") for _ in range(n)), g)
            for n, g in ((9, 3), (5, 0), (6, 1), (8, 2), (10, 4), (12, 3), (11, 5), (14, 2), (13, 6), (15, 1), (9, 4))
        ],
    )


def caches(rng: Random) -> Draft:
    """A store that forgets."""
    size = rng.randint(2, 4)
    rule, victim = rng.choice(
        [
            ("the one that was used (asked for or stored) longest ago", "min(store, key=lambda k: used[k])"),
            ("the one that was stored first, however often it was asked for", "min(store, key=lambda k: stored[k])"),
            (
                "the one that was asked for least often since it was stored, of equal ones the one that was stored first",
                "min(store, key=lambda k: (asked[k], stored[k]))",
            ),
            ("the one that was used (asked for or stored) last", "max(store, key=lambda k: used[k])"),
            (
                "the one with the longest name, of equal ones the alphabetically last",
                "max(store, key=lambda k: (len(k), k))",
            ),
        ]
    )
    other = "min(store, key=lambda k: k)"
    life = rng.choice([None, 5, 7])
    age = (
        f" An item that was stored more than {life} requests ago is forgotten before a request is looked at." if life else ""
    )
    expire = (
        f"        for k in [k for k in store if time - stored[k] > {life}]:\n            store.remove(k)\n" if life else ""
    )
    words, code, wrong = rng.choice(
        [
            ("the number of requests for which the item was there", "hits", "len(requests) - hits"),
            ("the names in the store at the end, in alphabetical order", "sorted(store)", "store"),
            ("a list of the names that had to make room, in this order", "gone", "gone[::-1]"),
            (
                "a text with `+` for each request for which the item was there and `-` for the others",
                "''.join(marks)",
                "''.join(marks)[::-1]",
            ),
        ]
    )
    return make_draft(
        "serve(requests)",
        f"A store has room for {size} items. `requests` is a list of names. If the requested item is in the store, that is a request for which it was there; else it is stored, and if the store is full, one item has to make room before: {rule}.{age} Return {words}.",
        f"""
    store, stored, used, asked = [], {{}}, {{}}, {{}}
    hits, gone, marks = 0, [], []
    for time, name in enumerate(requests):
{expire}        if name in store:
            hits += 1
            asked[name] += 1
            marks.append('+')
        else:
            if len(store) == {size}:
                old = {victim}
                store.remove(old)
                gone.append(old)
            store.append(name)
            stored[name], asked[name] = time, 0
            marks.append('-')
        used[name] = time
    return {code}
""",
        [(f"old = {victim}", f"old = {other}"), (f"len(store) == {size}", f"len(store) == {size + 1}"), (f"return {code}", f"return {wrong}"), (f"old = {victim}", "old = store[-1]")],
        [([rng.choice(["a", "b", "cc", "d", "eee", "f"][: rng.randint(3, 6)]) for _ in range(n)],) for n in (9, 0, 1, 8, 10, 12, 14, 16, 13, 18, 15, 20)],
    )  # fmt: skip


def queues(rng: Random) -> Draft:
    """Customers and counters."""
    counters = rng.randint(1, 3)
    rule, key = rng.choice(
        [
            ("the one who came first", "(w[0], w[2])"),
            ("the one with the shortest service, of equal ones the one who came first", "(w[1], w[0], w[2])"),
            ("the one with the longest service, of equal ones the one who came first", "(-w[1], w[0], w[2])"),
            ("the one who came last", "(-w[0], -w[2])"),
        ]
    )
    patience = rng.choice([None, 4, 6])
    leave = (
        f" Who has waited more than {patience} minutes when a counter becomes free leaves without service."
        if patience
        else ""
    )
    kept = f"waiting = waiting if len(busy) >= {counters} else [w for w in waiting if time - w[0] <= {patience}]"
    drop = f"        {kept}\n" if patience else ""
    words, code, wrong = rng.choice(
        [
            (
                "a list of the minutes in which their service ends, in the order of the list (-1 for those who leave)",
                "[ends.get(i, -1) for i in range(len(customers))]",
                "sorted(ends.values())",
            ),
            (
                "the longest time that one who is served had to wait (0 if there is none)",
                "max(waits, default=0)",
                "sum(waits)",
            ),
            ("the sum of the waiting times of those who are served", "sum(waits)", "len(waits)"),
            (
                "the numbers of the customers (their places in the list, from 0) in the order in which their service begins",
                "served",
                "served[::-1]",
            ),
            ("the minute in which the last service ends (0 if there is none)", "max(ends.values(), default=0)", "len(ends)"),
        ]
    )

    def people(n: int) -> list[list[int]]:
        time, found = 0, []
        for _ in range(n):
            time += rng.choice([0, 1, 1, 2, 4])
            found.append([time, rng.randint(1, 7)])
        return found

    return make_draft(
        "serve_all(customers)",
        f"`customers` is a list of pairs (lists) of the minute in which a customer comes, in rising order, and the minutes that the service takes. There {'is one counter' if counters == 1 else f'are {counters} counters'}; a free one takes, at once, of those who wait {rule} (of those who came in the same minute the one who is earlier in the list counts as the first).{leave} In one minute, services end first, then customers come, then counters take customers. Return {words}.",
        f"""
    waiting, busy, ends, waits, served = [], [], {{}}, [], []
    left = [(come, length, i) for i, (come, length) in enumerate(customers)]
    time = 0
    while left or waiting:
        busy = [end for end in busy if end > time]
        waiting += [w for w in left if w[0] == time]
        left = [w for w in left if w[0] > time]
{drop}        while waiting and len(busy) < {counters}:
            w = min(waiting, key=lambda w: {key})
            waiting.remove(w)
            busy.append(time + w[1])
            ends[w[2]] = time + w[1]
            waits.append(time - w[0])
            served.append(w[2])
        time += 1
    return {code}
""",
        [
            (
                f"key=lambda w: {key}",
                "key=lambda w: (-w[1], -w[0])" if key != "(-w[1], w[0], w[2])" else "key=lambda w: (w[0], w[2])",
            ),
            (f"len(busy) < {counters}", f"len(busy) < {counters + 1}"),
            (f"return {code}", f"return {wrong}"),
            ("if end > time]", "if end >= time]"),
        ],
        [(people(n),) for n in (5, 0, 1, 4, 6, 7, 8, 9, 10, 7, 12, 11)],
    )


def formatted_texts(rng: Random) -> Draft:
    """Words set in lines."""
    width = rng.randint(12, 20)
    mark = rng.choice([".", "_", "*", "~"])
    how, code, wrong = rng.choice(
        [
            ("has its words on the left", "' '.join(line)", "' '.join(line[::-1])"),
            (
                f"has its words on the right and `{mark}` on their left until it is {width} wide",
                f"' '.join(line).rjust({width}, {mark!r})",
                f"' '.join(line).ljust({width}, {mark!r})",
            ),
            (
                f"has its words in the middle and `{mark}` on both sides until it is {width} wide; where they cannot be equal, there is one more on the right",
                f"{mark!r} * (({width} - len(' '.join(line))) // 2) + ' '.join(line) + {mark!r} * (({width} - len(' '.join(line)) + 1) // 2)",
                f"' '.join(line).ljust({width}, {mark!r})",
            ),
            (
                "has its words joined by two spaces instead of one, also where it becomes wider by that",
                "'  '.join(line)",
                "' '.join(line)",
            ),
            (
                "begins with its number, from 1, and `) `, which do not count for its width",
                "f'{len(out) + 1}) ' + ' '.join(line)",
                "f'{len(out)}) ' + ' '.join(line)",
            ),
            ("has its first word in upper case", "' '.join([line[0].upper(), *line[1:]])", "' '.join(line).upper()"),
        ]
    )
    end, end_code, end_wrong = rng.choice(
        [
            ("a list of the lines", "out", "out[::-1]"),
            ("one text, the lines joined by `|`", "'|'.join(out)", "' '.join(out)"),
            ("a list of the lines, the last one first", "out[::-1]", "out"),
        ]
    )
    cut = rng.choice([True, False])
    long_words = (
        f"A word of more than {width - 4} letters is cut to {width - 4} letters before."
        if cut
        else "No word is wider than a line."
    )
    prepare = f"word = word[:{width - 4}]" if cut else "word = word[:]"
    hyphen = rng.choice([None, rng.choice("aeo")])
    rule = f" A word that begins with `{hyphen}` always begins a new line." if hyphen else ""
    test = f" or word[0] == {hyphen!r}" if hyphen else ""

    def text(n: int) -> str:
        words = [rng.choice(WORDS) for _ in range(n)]
        if cut and n > 2:
            words[1] = letters(rng, "abcdeo", width)
        return " ".join(words)

    return make_draft(
        "set_lines(text)",
        f"Set the words of a text in lines: each line takes as many of the next words as fit, with one space between two, into {width} characters.{rule} {long_words} Each line {how}. Return {end}.",
        f"""
    lines = []
    for word in text.split():
        {prepare}
        if not lines or len(' '.join([*lines[-1], word])) > {width}{test}:
            lines.append([])
        lines[-1].append(word)
    out = []
    for line in lines:
        out.append({code})
    return {end_code}
""",
        [
            (f"out.append({code})", f"out.append({wrong})"),
            (f"return {end_code}", f"return {end_wrong}"),
            (f"> {width}{test}", f"> {width + 1}{test}"),
            (f"> {width}{test}", f"> {width - 2}{test}"),
        ],
        [(text(n),) for n in (7, 0, 1, 4, 6, 9, 11, 8, 12, 10, 14)],
    )


def formulas(rng: Random) -> Draft:
    """Expressions with an order of operators of their own."""
    k, m = rng.randint(2, 4), rng.randint(5, 9)
    pool = {
        "+": ("the sum", "a + b"),
        "-": ("the difference", "a - b"),
        "*": ("the product", "a * b"),
        "&": ("the smaller one", "min(a, b)"),
        "|": ("the larger one", "max(a, b)"),
        "@": (f"the first plus {k} times the second", f"a + {k} * b"),
        "%": (f"the remainder of the sum by {m}", f"(a + b) % {m}"),
        "~": ("the distance", "abs(a - b)"),
    }
    weak, strong = rng.sample(["-", "@", "+", "*"], 2)
    third = rng.choice([name for name in "&|%~" if name not in (weak, strong)])
    right = rng.choice([True, False])
    equal = rng.choice([True, False])
    ranks = {weak: 1, strong: 2, third: 1 if equal else 3}
    names = [weak, strong, third]
    shown = ", ".join(f"`{name}` is {pool[name][0]} of its operands" for name in names)
    order = f"`{strong}` binds more tightly than `{weak}`, and `{third}` {f'as tightly as `{weak}`' if equal else f'most tightly'}"
    side = "from the right: in `a o b o c`, `b o c` is computed first" if right else "from the left"
    rules = "".join(
        f"        {'if' if at == 0 else 'elif'} sign == {name!r}:\n            values.append({pool[name][1]})\n"
        for at, name in enumerate(names)
    )
    compare = ">" if right else ">="

    def expression(n: int, depth: int) -> str:
        parts = [
            str(rng.randint(0, 9)) if not depth or rng.random() < 0.7 else f"({expression(rng.randint(1, 2), depth - 1)})"
            for _ in range(n + 1)
        ]
        return "".join(part + (rng.choice(names) if at < n else "") for at, part in enumerate(parts))

    return make_draft(
        "calculate(text)",
        f"`text` is an expression of numbers of one digit, round brackets and the operators {', '.join(f'`{name}`' for name in names)}, without spaces. For whole numbers, {shown}. {order}. Operators that bind equally are computed {side}. Return the value.",
        f"""
    ranks, values, signs = {ranks}, [], []

    def apply():
        b, a, sign = values.pop(), values.pop(), signs.pop()
{rules}
    for c in text:
        if c.isdigit():
            values.append(int(c))
        elif c == '(':
            signs.append(c)
        elif c == ')':
            while signs[-1] != '(':
                apply()
            signs.pop()
        else:
            while signs and signs[-1] != '(' and ranks[signs[-1]] {compare} ranks[c]:
                apply()
            signs.append(c)
    while signs:
        apply()
    return values[0]
""",
        [
            (f"ranks[signs[-1]] {compare} ranks[c]", f"ranks[signs[-1]] {'>=' if right else '>'} ranks[c]"),
            (f"ranks, values, signs = {ranks}", f"ranks, values, signs = {dict.fromkeys(ranks, 1)}"),
            (f"values.append({pool[third][1]})", "values.append(a)"),
            (f"{weak!r}: 1, {strong!r}: 2", f"{weak!r}: 2, {strong!r}: 1"),
        ],
        [
            (expression(n, d),)
            for n, d in (
                (4, 1),
                (0, 0),
                (1, 0),
                (2, 0),
                (3, 0),
                (3, 1),
                (4, 2),
                (5, 0),
                (5, 2),
                (6, 1),
                (6, 0),
                (7, 2),
                (8, 1),
            )
        ],
    )


def records(rng: Random) -> Draft:
    """Records chosen, grouped, computed and sorted."""
    low, k = rng.randint(2, 6), rng.randint(2, 5)
    kinds, towns = ["tea", "oil", "rice", "salt"], ["Rome", "Oslo", "Lima"]
    keep, keep_code, keep_wrong = rng.choice(
        [
            (f"a count of at least {low}", f"r['count'] >= {low}", f"r['count'] > {low}"),
            (f"a price below {low * 3}", f"r['price'] < {low * 3}", f"r['price'] <= {low * 3}"),
            (f"a town other than `{towns[k % 3]}`", f"r['town'] != {towns[k % 3]!r}", f"r['town'] == {towns[k % 3]!r}"),
            (
                f"a value (count times price) from {low} to {low * 15}, both included",
                f"{low} <= r['count'] * r['price'] <= {low * 15}",
                f"{low} < r['count'] * r['price'] <= {low * 15 - 6}",
            ),
        ]
    )
    key = rng.choice(["kind", "town"])
    value, value_code, value_wrong = rng.choice(
        [
            ("sum of the counts", "sum(r['count'] for r in some)", "sum(r['price'] for r in some)"),
            (
                "sum of the values (count times price)",
                "sum(r['count'] * r['price'] for r in some)",
                "sum(r['count'] for r in some)",
            ),
            ("highest price", "max(r['price'] for r in some)", "min(r['price'] for r in some)"),
            ("number of records", "len(some)", "len(some) + 1"),
            (
                f"value (count times price) of its most valuable record minus {k} for each of its records",
                f"max(r['count'] * r['price'] for r in some) - {k} * len(some)",
                f"max(r['count'] * r['price'] for r in some) - {k}",
            ),
        ]
    )
    falling = rng.choice([True, False])
    sign = "-" if falling else ""
    shape, shape_code = rng.choice(
        [
            ("a list of pairs (lists) of the group's name and this number", "[[name, number] for name, number in ranked]"),
            ("a list of texts such as `name: 12`", "[f'{name}: {number}' for name, number in ranked]"),
            ("one text such as `name=12;other=7`", "';'.join(f'{name}={number}' for name, number in ranked)"),
            ("a list of the groups' names", "[name for name, _ in ranked]"),
        ]
    )
    most = rng.choice([None, 2])
    cut = f"[:{most}]" if most else ""

    def table(n: int) -> list[dict[str, object]]:
        return [
            {
                "kind": rng.choice(kinds),
                "town": rng.choice(towns),
                "count": rng.choice([low, low + 1, rng.randint(1, 9)]),
                "price": rng.choice([low * 3, rng.randint(1, 20)]),
            }
            for _ in range(n)
        ]

    return make_draft(
        "report(records)",
        f"`records` is a list of dicts with the keys `kind`, `town` (texts), `count` and `price` (integers). Take those with {keep}. Group them by their {key}, and compute for each group the {value}. Sort the groups by this number, the {'largest' if falling else 'smallest'} first, and equal ones by name{f'; keep the first {most}' if most else ''}. Return {shape}.",
        f"""
    groups = {{}}
    for r in records:
        if {keep_code}:
            groups.setdefault(r[{key!r}], []).append(r)
    numbers = {{name: {value_code} for name, some in groups.items()}}
    ranked = sorted(numbers.items(), key=lambda pair: ({sign}pair[1], pair[0])){cut}
    return {shape_code}
""",
        [
            (f"if {keep_code}:", f"if {keep_wrong}:"),
            (f"name: {value_code} for", f"name: {value_wrong} for"),
            (f"({sign}pair[1], pair[0])", f"({'' if falling else '-'}pair[1], pair[0])"),
            (f"if {keep_code}:", "if True:"),
        ],
        [(table(n),) for n in (5, 0, 1, 4, 6, 7, 8, 9, 10, 8, 12)],
    )


def tournaments(rng: Random) -> Draft:
    """A table of results."""
    win, draw, away = rng.randint(2, 4), 1, rng.randint(0, 2)
    large = rng.randint(2, 4)
    bonus = rng.choice(
        [f"a win by at least {large} brings 1 more", f"a loss by exactly 1 brings 1", "no other result brings points"]
    )
    extra = {"a win": f"1 if gap >= {large} else 0", "a los": "0", "no oth": "0"}[
        bonus[:5] if bonus[:5] != "no ot" else "no oth"
    ]
    loser = "1 if gap == 1 else 0" if bonus.startswith("a loss") else "0"
    ties = rng.sample(
        [
            ("the larger difference of goals", "-(goals[t] - against[t])"),
            ("more goals", "-goals[t]"),
            ("fewer goals against it", "against[t]"),
            ("more wins", "-wins[t]"),
        ],
        2,
    )
    words, code, wrong = rng.choice(
        [
            ("a list of the teams in this order", "table", "table[::-1]"),
            (
                "a list of texts such as `red 7` (team and points) in this order",
                "[f'{t} {points[t]}' for t in table]",
                "[f'{t} {goals[t]}' for t in table]",
            ),
            (
                "the first team and its points as a list ([] if there is none)",
                "[table[0], points[table[0]]] if table else []",
                "[table[-1], points[table[-1]]] if table else []",
            ),
        ]
    )

    def results(n: int) -> list[str]:
        found: list[str] = []
        for _ in range(n):
            a, b = rng.sample(["red", "blue", "gold", "gray"][: rng.randint(2, 4)], 2)
            found.append(f"{a} {rng.randint(0, 4)}:{rng.randint(0, 4)} {b}")
        return found

    return make_draft(
        "standings(results)",
        f"`results` is a list of texts such as `red 2:1 blue`: the home team, its goals, the goals of the other team, and that team. A win brings {win} points, a draw {draw} to each team{f', a win of the team that is not at home {away} more' if away else ''}; {bonus}. Order the teams by points, the most first; teams with equal points by {ties[0][0]}, then by {ties[1][0]}, then by name. Return {words}.",
        f"""
    points, goals, against, wins = {{}}, {{}}, {{}}, {{}}
    for line in results:
        home, score, guest = line.split()
        x, y = map(int, score.split(':'))
        gap = abs(x - y)
        for team, own, other in ((home, x, y), (guest, y, x)):
            for table in (points, goals, against, wins):
                table.setdefault(team, 0)
            goals[team] += own
            against[team] += other
            if own > other:
                wins[team] += 1
                points[team] += {win} + ({extra}) + ({away} if team == guest else 0)
            elif own == other:
                points[team] += {draw}
            else:
                points[team] += {loser}
    table = sorted(points, key=lambda t: (-points[t], {ties[0][1]}, {ties[1][1]}, t))
    return {code}
""",
        [
            (f"points[team] += {win} +", f"points[team] += {win + 1} +"),
            (f"points[team] += {draw}\n", f"points[team] += {draw + 1}\n"),
            (f"return {code}", f"return {wrong}"),
            ("(-points[t],", "(-wins[t],"),
        ],
        [(results(n),) for n in (5, 0, 1, 4, 6, 7, 8, 9, 10, 12, 11)],
    )


def stores(rng: Random) -> Draft:
    """Lots of goods, bought and sold."""
    rule, pick = rng.choice(
        [
            ("the oldest lot", "0"),
            ("the newest lot", "len(lots) - 1"),
            ("the cheapest lot (the oldest of equal ones)", "min(range(len(lots)), key=lambda i: (lots[i][1], i))"),
            ("the dearest lot (the oldest of equal ones)", "max(range(len(lots)), key=lambda i: (lots[i][1], -i))"),
        ]
    )
    part = rng.choice([True, False])
    short = "sells what there is" if part else "is left out"
    decay, decay_words = rng.choice([(0, ""), (rng.randint(3, 5), "rot")])
    life = f" A lot that is {decay} or more entries older than an entry is thrown away before the entry." if decay else ""
    age = f"        lots = [lot for lot in lots if time - lot[2] < {decay}]\n" if decay else ""
    del decay_words
    words, code, wrong = rng.choice(
        [
            ("the profit: the income of all sales minus the prices of the pieces that were sold", "profit", "income"),
            ("the income of all sales", "income", "profit"),
            (
                "the lots at the end, the oldest first, as pairs (lists) of count and price",
                "[lot[:2] for lot in lots]",
                "[lot[:2] for lot in lots][::-1]",
            ),
            (
                "the value of what is there at the end, at its prices",
                "sum(lot[0] * lot[1] for lot in lots)",
                "sum(lot[0] for lot in lots)",
            ),
            ("the number of pieces that were sold", "sold", "len(entries)"),
        ]
    )
    tax = rng.randint(0, 3)
    tax_words = f" Each sale that sells something costs {tax} once." if tax else ""

    def entries(n: int) -> list[list[object]]:
        return [
            [rng.choice(["buy", "buy", "sell"]) if i else "buy", rng.randint(1, 9), rng.randint(1, 12)] for i in range(n)
        ]

    return make_draft(
        "trade(entries)",
        f"`entries` is a list of lists: [`buy`, count, price] buys a lot of pieces at a price for each, [`sell`, count, price] sells pieces at a price for each. The pieces of a sale come from {rule}, and when it is used up from the next by the same rule. A sale of more pieces than there are {short}.{life}{tax_words} Return {words}.",
        f"""
    lots, income, profit, sold = [], 0, 0, 0
    for time, (kind, count, price) in enumerate(entries):
{age}        if kind == 'buy':
            lots.append([count, price, time])
            continue
        there = sum(lot[0] for lot in lots)
        if count > there:
            count = {"there" if part else "0"}
        if count and {tax}:
            income -= {tax}
            profit -= {tax}
        while count:
            i = {pick}
            taken = min(count, lots[i][0])
            lots[i][0] -= taken
            count -= taken
            sold += taken
            income += taken * price
            profit += taken * (price - lots[i][1])
            if lots[i][0] == 0:
                lots.pop(i)
    return {code}
""",
        [
            (f"i = {pick}", "i = len(lots) // 2"),
            (f"count = {'there' if part else '0'}", f"count = {'0' if part else 'there'}"),
            (f"return {code}", f"return {wrong}"),
            ("taken * (price - lots[i][1])", "taken * (price + lots[i][1])"),
            ("taken * price\n", "taken * price + 1\n"),
            ("sold += taken", "sold += taken + 1"),
            (f"i = {pick}", f"i = {'len(lots) - 1' if pick == '0' else '0'}"),
        ][:3],
        [(entries(n),) for n in (6, 0, 1, 3, 5, 7, 8, 9, 10, 12, 11, 14)],
    )


def templates(rng: Random) -> Draft:
    """A text with places to fill in."""
    left, right = rng.choice([("{", "}"), ("<", ">"), ("[", "]"), ("$(", ")")])
    change_names = rng.sample(
        [
            ("up", "in upper case", "value.upper()"),
            ("rev", "backwards", "value[::-1]"),
            ("len", "its number of characters", "str(len(value))"),
            ("two", "twice", "value * 2"),
            ("first", "its first character (nothing of an empty value)", "value[:1]"),
            ("cut", "without its last character", "value[:-1]"),
        ],
        3,
    )
    shown = ", ".join(f"`{name}`: {words}" for name, words, _ in change_names)
    missing, missing_code = rng.choice(
        [
            ("`?` stands for a name that is not in the dict", "'?'"),
            ("the name itself stands for one that is not in the dict", "name"),
            ("nothing stands for a name that is not in the dict", "''"),
        ]
    )
    sign = rng.choice(["|", ":", "!"])
    rules = "".join(
        f"            {'if' if at == 0 else 'elif'} change == {name!r}:\n                value = {code}\n"
        for at, (name, _, code) in enumerate(change_names)
    )
    names = ["a", "bo", "cat"]

    def text(n: int) -> str:
        parts: list[str] = []
        for _ in range(n):
            part = "".join(sign + rng.choice(change_names)[0] for _ in range(rng.choice([0, 1, 1, 2, 3])))
            parts.append(rng.choice([f"{left}{rng.choice([*names, 'zz'])}{part}{right}", rng.choice(["x ", "-", "yes "])]))
        return "".join(parts)

    def values() -> dict[str, str]:
        return {name: rng.choice(["kiwi", "Oslo", "ab", "", "x", "tea time"]) for name in names}

    return make_draft(
        "fill(text, values)",
        f"Replace each place `{left}NAME{right}` in a text by the value that the dict `values` (of texts) has for that name; {missing}. After the name, changes may stand, each with `{sign}` before it, which are made from the left to the right: {shown}. They are made to what stands for a missing name, too. Every `{left}` in the text begins a place.",
        f"""
    out = ''
    while {left!r} in text:
        before, _, text = text.partition({left!r})
        place, _, text = text.partition({right!r})
        name, *changes = place.split({sign!r})
        value = values.get(name, {missing_code})
        for change in changes:
{rules}        out += before + value
    return out + text
""",
        [
            (change_names[0][2], "value"),
            (change_names[1][2], "value + '.'"),
            (f"values.get(name, {missing_code})", "values.get(name, '-')"),
            ("for change in changes:", "for change in changes[::-1]:"),
            ("return out + text", "return out"),
        ][:4],
        [(text(n), values()) for n in (5, 0, 1, 3, 4, 6, 7, 8, 9, 6, 10, 8)],
    )


def falling_grids(rng: Random) -> Draft:
    """A grid of tiles that vanish and fall."""
    least = rng.randint(2, 3)
    across = rng.choice([True, False])
    lines = "rows" if across else "columns"
    alphabet = rng.choice(["ab", "abc", "xy"])
    words, code, wrong = rng.choice(
        [
            (
                "the grid at the end, as a list of texts",
                "[''.join(r) for r in zip(*columns)]",
                "[''.join(c) for c in columns]",
            ),
            ("the number of tiles that have vanished", "gone", "rounds"),
            ("the number of rounds in which tiles vanish", "rounds", "gone"),
            (
                "the numbers of tiles that are left in the columns, from the left, as a list",
                "[len(c) - c.count('.') for c in columns]",
                "[c.count('.') for c in columns]",
            ),
        ]
    )
    once = rng.choice([True, False])
    stop = "Only one such round is made." if once else "This is repeated until no tile vanishes."
    step = "(0, 1)" if across else "(1, 0)"
    tail = "        break\n" if once else ""

    def grid(n: int, m: int) -> list[str]:
        return ["".join(rng.choice(alphabet) for _ in range(m)) for _ in range(n)]

    return make_draft(
        "settle(grid)",
        f"`grid` is a list of texts of one length, the rows of a board from the top; each letter is a tile. In a round, all tiles that belong to {least} or more equal neighboring tiles in their {lines[:-1]} vanish at once; then the tiles above the gaps fall down, and `.` stands where none is left. {stop} Return {words}.",
        f"""
    height, width = len(grid), len(grid[0])
    columns = [[grid[i][j] for i in range(height)] for j in range(width)]
    gone = rounds = 0
    while True:
        down, side = {step}
        marked = set()
        for j in range(width):
            for i in range(height):
                run = []
                while i + down * len(run) < height and j + side * len(run) < width:
                    at = (j + side * len(run), i + down * len(run))
                    if columns[at[0]][at[1]] != columns[j][i] or columns[j][i] == '.':
                        break
                    run.append(at)
                if len(run) >= {least}:
                    marked.update(run)
        if not marked:
            break
        rounds += 1
        gone += len(marked)
        for j in range(width):
            kept = [c for i, c in enumerate(columns[j]) if (j, i) not in marked]
            columns[j] = ['.'] * (height - len(kept)) + kept
{tail}    return {code}
""",
        [
            (f">= {least}", f">= {least + 1}"),
            (f"down, side = {step}", f"down, side = {'(1, 0)' if across else '(0, 1)'}"),
            (f"return {code}", f"return {wrong}"),
            ("['.'] * (height - len(kept)) + kept", "kept + ['.'] * (height - len(kept))"),
        ][:3],
        [(grid(n, m),) for n, m in ((3, 4), (1, 1), (2, 2), (3, 3), (4, 3), (4, 4), (5, 4), (4, 6), (5, 5), (6, 5), (3, 7))],
    )


def state_machines(rng: Random) -> Draft:
    """A machine whose states a table gives."""
    states = rng.sample(["idle", "open", "busy", "done", "lost"], 3)
    signs = rng.sample("abcxyz", 3)
    table = {(state, sign): (rng.choice(states), rng.randint(-2, 5)) for state in states for sign in signs}
    lines = "; ".join(
        f"in `{state}` "
        + ", ".join(f"`{sign}` leads to `{table[state, sign][0]}` and counts {table[state, sign][1]}" for sign in signs)
        for state in states
    )
    other, other_code = rng.choice(
        [
            ("is left out", "continue"),
            ("ends the run", "break"),
            (f"leads to `{states[0]}` and counts nothing", f"state = {states[0]!r}; path.append(state); continue"),
        ]
    )
    words, code, wrong = rng.choice(
        [
            ("the state at the end and the sum of the counts, as a list", "[state, total]", "[state, -total]"),
            ("the sum of the counts; a character that does not change the state counts nothing", "moved", "total"),
            (
                "the state in which it was most often (after a character, the first state not counted; of several the alphabetically first; `-` if there is none)",
                "min(path, key=lambda s: (-path.count(s), s), default='-')",
                "max(path, key=lambda s: (path.count(s), s), default='-')",
            ),
            ("the highest sum of the counts that it had on the way, at least 0", "highest", "total"),
        ]
    )
    rules = {f"{state} {sign}": list(table[state, sign]) for state in states for sign in signs}
    return make_draft(
        "walk(text)",
        f"A machine begins in the state `{states[0]}` and reads a text character by character: {lines}. Any other character {other}. Return {words}.",
        f"""
    rules = {rules}
    state, total, moved, highest, path = {states[0]!r}, 0, 0, 0, []
    for c in text:
        if state + ' ' + c not in rules:
            {other_code}
        new, points = rules[state + ' ' + c]
        total += points
        moved += points if new != state else 0
        highest = max(highest, total)
        state = new
        path.append(state)
    return {code}
""",
        [
            (f"return {code}", f"return {wrong}"),
            (f"            {other_code}\n", f"            {'break' if other_code == 'continue' else 'continue'}\n"),
            (f"path = {states[0]!r}", f"path = {states[1]!r}"),
            ("total += points", "total += abs(points)"),
        ],
        [(letters(rng, "".join(signs) * 3 + "?", n),) for n in (8, 0, 1, 5, 7, 9, 11, 12, 14, 10, 16)],
    )


FAMILIES: tuple[Family, ...] = (
    stack_machines,
    robots,
    ledgers,
    automata,
    caches,
    queues,
    formatted_texts,
    formulas,
    records,
    tournaments,
    stores,
    templates,
    falling_grids,
    state_machines,
)
