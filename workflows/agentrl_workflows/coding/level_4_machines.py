"""Families of level 4: machines and small languages."""

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


def stack_machines(rng: Random) -> Draft:
    """A machine with a stack."""
    k, m = rng.randint(2, 5), rng.randint(7, 19)
    pool = {
        "add": ("replaces the two topmost numbers by their sum", 2, "stack.append(stack.pop() + stack.pop())"),
        "sub": ("takes the topmost number b and the one below it a, and puts a - b", 2, "b, a = stack.pop(), stack.pop(); stack.append(a - b)"),
        "mul": (f"replaces the two topmost numbers by the remainder of their product by {m}", 2, f"stack.append(stack.pop() * stack.pop() % {m})"),
        "dup": ("puts the topmost number once more", 1, "stack.append(stack[-1])"),
        "swap": ("swaps the two topmost numbers", 2, "stack[-1], stack[-2] = stack[-2], stack[-1]"),
        "neg": ("changes the sign of the topmost number", 1, "stack.append(-stack.pop())"),
        "roll": ("moves the lowest number to the top", 1, "stack.append(stack.pop(0))"),
        "drop": ("removes the topmost number", 1, "stack.pop()"),
        "size": ("puts the number of numbers on the stack", 0, "stack.append(len(stack))"),
        "max": ("replaces the two topmost numbers by the larger one", 2, "stack.append(max(stack.pop(), stack.pop()))"),
        "jump": (f"skips the next {k - 1} words if the topmost number is positive; the number is removed", 1, f"at += {k - 1} if stack.pop() > 0 else 0"),
    }
    names = ["sub", *rng.sample([name for name in pool if name != "sub"], 4)]
    bad, bad_code = rng.choice([("is left out", "continue"), ("ends the program", "break"), ("empties the stack", "stack.clear(); continue")])
    words, code, wrong = rng.choice([("the stack as a list, the lowest number first", "stack", "stack[::-1]"), ("the topmost number at the end (None if there is none)", "stack[-1] if stack else None", "stack[0] if stack else None"), ("the sum of the numbers on the stack at the end", "sum(stack)", "len(stack)")])
    shown = "; ".join(f"`{name}` {pool[name][0]}" for name in names)
    needs = {name: pool[name][1] for name in names}
    rules = "".join(f"        {'if' if at == 0 else 'elif'} word == {name!r}:\n            {pool[name][2]}\n" for at, name in enumerate(names))
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
        [("stack.append(a - b)", "stack.append(b - a)"), (f"            {bad_code}\n", f"            {'break' if bad_code == 'continue' else 'continue'}\n"), (f"return {code}", f"return {wrong}"), (f"            {pool[second][2]}\n", "            pass\n")],
        [(program(n),) for n in (7, 0, 1, 5, 9, 10, 12, 14, 11, 15, 13, 18)],
    )


def robots(rng: Random) -> Draft:
    """A robot on a board."""
    size = rng.randint(4, 8)
    edge, edge_code, edge_wrong = rng.choice(
        [("stays where it is", "if not (0 <= r < <N> and 0 <= c < <N>):\n            r, c = row, col", "if not (0 <= r < <N> and 0 <= c < <N>):\n            break"), ("comes in at the opposite side", "r, c = r % <N>, c % <N>", "r, c = min(max(r, 0), <N> - 1), min(max(c, 0), <N> - 1)"), ("turns around and stays where it is", "if not (0 <= r < <N> and 0 <= c < <N>):\n            r, c, way = row, col, (way + 2) % 4", "if not (0 <= r < <N> and 0 <= c < <N>):\n            r, c = row, col")]
    )
    start = rng.randint(0, size - 1)
    extra, extra_words, extra_code = rng.choice(
        [("J", "moves two fields ahead at once, and passes over the one between", "step = 2"), ("B", "moves one field back and keeps its direction", "step = -1"), ("S", "moves one field ahead and then turns to the right", "turn = 1"), ("Z", "moves one field ahead and then turns around", "turn = 2")]
    )
    words, code, wrong = rng.choice(
        [("its row, column and direction (one of `N`, `E`, `S`, `W`) at the end, as a list", "[row, col, 'NESW'[way]]", "[col, row, 'NESW'[way]]"), ("the number of different fields on which it was, the first included", "len(seen)", "len(path)"), ("the number of moves after which it was on a field on which it had been before", "len(path) - len(seen)", "len(path)"), ("the largest distance from its start (rows plus columns) that it had", "max(abs(r - <A>) + abs(c - <A>) for r, c in path)", "abs(row - <A>) + abs(col - <A>)")]
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
    )


def automata(rng: Random) -> Draft:
    """Cells that live by their neighbors."""
    birth, stay = sorted(rng.sample(range(1, 5), rng.randint(1, 2))), sorted(rng.sample(range(0, 5), rng.randint(1, 3)))
    wrap = rng.choice([True, False])
    reach = 2
    near = "(i + d) % n" if wrap else "i + d"
    inside = "True" if wrap else "0 <= i + d < n"
    edge = "The row is a ring: the first and the last cell are neighbors." if wrap else "Beyond the ends of the row all is dead."
    words, code, wrong = rng.choice([("the row at the end", "row", "row[::-1]"), ("the number of living cells at the end", "row.count('#')", "row.count('.')"), ("a list of the numbers of living cells before the first and after each generation", "counts", "counts[1:]"), ("the number of the first generation (from 1) after which the row is as it was before, 0 if there is none", "still", "len(counts)")])
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
        [("(-2, -1, 1, 2)", "(-2, -1, 0, 1, 2)"), (f"({stay} if row[i] == '#' else {birth})", f"({birth} if row[i] == '#' else {stay})"), (f"return {code}", f"return {wrong}"), ("(-2, -1, 1, 2)", "(-1, 1)")],
        [("".join(rng.choice("#..#.") for _ in range(n)), g) for n, g in ((9, 3), (5, 0), (6, 1), (8, 2), (10, 4), (12, 3), (11, 5), (14, 2), (13, 6), (15, 1), (9, 4))],
    )


def caches(rng: Random) -> Draft:
    """A store that forgets."""
    size = rng.randint(2, 4)
    rule, victim = rng.choice(
        [
            ("the one that was used (asked for or stored) longest ago", "min(store, key=lambda k: used[k])"),
            ("the one that was stored first, however often it was asked for", "min(store, key=lambda k: stored[k])"),
            ("the one that was asked for least often since it was stored, of equal ones the one that was stored first", "min(store, key=lambda k: (asked[k], stored[k]))"),
            ("the one that was used (asked for or stored) last", "max(store, key=lambda k: used[k])"),
            ("the one with the longest name, of equal ones the alphabetically last", "max(store, key=lambda k: (len(k), k))"),
        ]
    )
    other = "min(store, key=lambda k: k)"
    life = rng.choice([None, 5, 7])
    age = f" An item that was stored more than {life} requests ago is forgotten before a request is looked at." if life else ""
    expire = f"        for k in [k for k in store if time - stored[k] > {life}]:\n            store.remove(k)\n" if life else ""
    words, code, wrong = rng.choice([("the number of requests for which the item was there", "hits", "len(requests) - hits"), ("the names in the store at the end, in alphabetical order", "sorted(store)", "store"), ("a list of the names that had to make room, in this order", "gone", "gone[::-1]"), ("a text with `+` for each request for which the item was there and `-` for the others", "''.join(marks)", "''.join(marks)[::-1]")])
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
    )


def formulas(rng: Random) -> Draft:
    """Expressions with an order of operators of their own."""
    k, m = rng.randint(2, 4), rng.randint(5, 9)
    pool = {"+": ("the sum", "a + b"), "-": ("the difference", "a - b"), "*": ("the product", "a * b"), "&": ("the smaller one", "min(a, b)"), "|": ("the larger one", "max(a, b)"), "@": (f"the first plus {k} times the second", f"a + {k} * b"), "%": (f"the remainder of the sum by {m}", f"(a + b) % {m}"), "~": ("the distance", "abs(a - b)")}
    weak, strong = rng.sample(["-", "@", "+", "*"], 2)
    third = rng.choice([name for name in "&|%~" if name not in (weak, strong)])
    right = rng.choice([True, False])
    equal = rng.choice([True, False])
    ranks = {weak: 1, strong: 2, third: 1 if equal else 3}
    names = [weak, strong, third]
    shown = ", ".join(f"`{name}` is {pool[name][0]} of its operands" for name in names)
    order = f"`{strong}` binds more tightly than `{weak}`, and `{third}` {f'as tightly as `{weak}`' if equal else 'most tightly'}"
    side = "from the right: in `a o b o c`, `b o c` is computed first" if right else "from the left"
    rules = "".join(f"        {'if' if at == 0 else 'elif'} sign == {name!r}:\n            values.append({pool[name][1]})\n" for at, name in enumerate(names))
    compare = ">" if right else ">="

    def expression(n: int, depth: int) -> str:
        parts = [str(rng.randint(0, 9)) if not depth or rng.random() < 0.7 else f"({expression(rng.randint(1, 2), depth - 1)})" for _ in range(n + 1)]
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
        [(f"ranks[signs[-1]] {compare} ranks[c]", f"ranks[signs[-1]] {'>=' if right else '>'} ranks[c]"), (f"ranks, values, signs = {ranks}", f"ranks, values, signs = {dict.fromkeys(ranks, 1)}"), (f"values.append({pool[third][1]})", "values.append(a)"), (f"{weak!r}: 1, {strong!r}: 2", f"{weak!r}: 2, {strong!r}: 1")],
        [(expression(n, d),) for n, d in ((4, 1), (0, 0), (1, 0), (2, 0), (3, 0), (3, 1), (4, 2), (5, 0), (5, 2), (6, 1), (6, 0), (7, 2), (8, 1))],
    )


def falling_grids(rng: Random) -> Draft:
    """A grid of tiles that vanish and fall."""
    least = rng.randint(2, 3)
    across = rng.choice([True, False])
    lines = "rows" if across else "columns"
    alphabet = rng.choice(["ab", "abc", "xy"])
    words, code, wrong = rng.choice([("the grid at the end, as a list of texts", "[''.join(r) for r in zip(*columns)]", "[''.join(c) for c in columns]"), ("the number of tiles that have vanished", "gone", "rounds"), ("the number of rounds in which tiles vanish", "rounds", "gone"), ("the numbers of tiles that are left in the columns, from the left, as a list", "[len(c) - c.count('.') for c in columns]", "[c.count('.') for c in columns]")])
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
        [(f">= {least}", f">= {least + 1}"), (f"down, side = {step}", f"down, side = {'(1, 0)' if across else '(0, 1)'}"), (f"return {code}", f"return {wrong}"), ("['.'] * (height - len(kept)) + kept", "kept + ['.'] * (height - len(kept))")][:3],
        [(grid(n, m),) for n, m in ((3, 4), (1, 1), (2, 2), (3, 3), (4, 3), (4, 4), (5, 4), (4, 6), (5, 5), (6, 5), (3, 7))],
    )


def state_machines(rng: Random) -> Draft:
    """A machine whose states a table gives."""
    states = rng.sample(["idle", "open", "busy", "done", "lost"], 3)
    signs = rng.sample("abcxyz", 3)
    table = {(state, sign): (rng.choice(states), rng.randint(-2, 5)) for state in states for sign in signs}
    lines = "; ".join(f"in `{state}` " + ", ".join(f"`{sign}` leads to `{table[state, sign][0]}` and counts {table[state, sign][1]}" for sign in signs) for state in states)
    other, other_code = rng.choice([("is left out", "continue"), ("ends the run", "break"), (f"leads to `{states[0]}` and counts nothing", f"state = {states[0]!r}; path.append(state); continue")])
    words, code, wrong = rng.choice([("the state at the end and the sum of the counts, as a list", "[state, total]", "[state, -total]"), ("the sum of the counts; a character that does not change the state counts nothing", "moved", "total"), ("the state in which it was most often (after a character, the first state not counted; of several the alphabetically first; `-` if there is none)", "min(path, key=lambda s: (-path.count(s), s), default='-')", "max(path, key=lambda s: (path.count(s), s), default='-')"), ("the highest sum of the counts that it had on the way, at least 0", "highest", "total")])
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
        [(f"return {code}", f"return {wrong}"), (f"            {other_code}\n", f"            {'break' if other_code == 'continue' else 'continue'}\n"), (f"path = {states[0]!r}", f"path = {states[1]!r}"), ("total += points", "total += abs(points)")],
        [(letters(rng, "".join(signs) * 3 + "?", n),) for n in (8, 0, 1, 5, 7, 9, 11, 12, 14, 10, 16)],
    )


LEVEL_4_MACHINES_FAMILIES: tuple[Family, ...] = (
    stack_machines,
    robots,
    automata,
    caches,
    formulas,
    falling_grids,
    state_machines,
)
