"""Families of level 4: accounts, queues, records and texts, by several rules."""

from __future__ import annotations

from random import Random

from agentrl_workflows.coding.parts import (
    WORDS,
    Draft,
    Family,
    letters,
    make_draft,
)

# A family lists its choices with one choice a line.
# fmt: off


def ledgers(rng: Random) -> Draft:
    """Accounts with fees and limits."""
    fee, limit, bonus, large = rng.randint(1, 4), rng.choice([0, -10, -25]), rng.randint(2, 6), rng.randint(20, 50)
    fee_words, fee_code = rng.choice([(f"Every transfer costs the sender {fee} more", f"cost = amount + {fee}"), (f"A transfer of more than {large // 2} costs the sender {fee} more", f"cost = amount + ({fee} if amount > {large // 2} else 0)"), (f"Every third transfer that is carried out costs the sender {fee} more", f"cost = amount + ({fee} if count % 3 == 2 else 0)")])
    bonus_words, bonus_code = rng.choice([(f"A deposit of at least {large} adds {bonus} on top.", f"amount += {bonus} if amount >= {large} else 0"), ("A deposit adds nothing on top.", "amount += 0"), (f"The first deposit of an account adds {bonus} on top.", f"amount += {bonus} if name not in accounts else 0")])
    words, code, wrong = rng.choice([("a dict of the balances of all accounts", "accounts", "{k: abs(v) for k, v in accounts.items()}"), ("the number of entries that were refused", "refused", "count"), ("the names of the accounts, the highest balance first, of equal ones in alphabetical order", "sorted(accounts, key=lambda k: (-accounts[k], k))", "sorted(accounts, key=lambda k: (accounts[k], k))"), ("the lowest balance that any account had after an entry (0 if that is lower than all)", "lowest", "min(accounts.values(), default=0)")])

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
        [(f"- cost < {limit}", f"- cost <= {limit}"), (f"            {fee_code}\n", "            cost = amount\n"), (f"return {code}", f"return {wrong}"), ("accounts.get(rest[0], 0) + amount", "accounts.get(rest[0], 0) + cost + 1"), (f"- cost < {limit}", f"- cost < {limit - 12}")],
        [([f"deposit ann {large}", "deposit bob 9", *entries(n)],) for n in (4, 0, 1, 5, 6, 8, 10, 12, 9, 14, 11)] + [(entries(8),)],
    )


def queues(rng: Random) -> Draft:
    """Customers and counters."""
    counters = rng.randint(1, 3)
    rule, key = rng.choice([("the one who came first", "(w[0], w[2])"), ("the one with the shortest service, of equal ones the one who came first", "(w[1], w[0], w[2])"), ("the one with the longest service, of equal ones the one who came first", "(-w[1], w[0], w[2])"), ("the one who came last", "(-w[0], -w[2])")])
    patience = rng.choice([None, 4, 6])
    leave = f" Who has waited more than {patience} minutes when a counter becomes free leaves without service." if patience else ""
    kept = f"waiting = waiting if len(busy) >= {counters} else [w for w in waiting if time - w[0] <= {patience}]"
    drop = f"        {kept}\n" if patience else ""
    words, code, wrong = rng.choice([("a list of the minutes in which their service ends, in the order of the list (-1 for those who leave)", "[ends.get(i, -1) for i in range(len(customers))]", "sorted(ends.values())"), ("the longest time that one who is served had to wait (0 if there is none)", "max(waits, default=0)", "sum(waits)"), ("the sum of the waiting times of those who are served", "sum(waits)", "len(waits)"), ("the numbers of the customers (their places in the list, from 0) in the order in which their service begins", "served", "served[::-1]"), ("the minute in which the last service ends (0 if there is none)", "max(ends.values(), default=0)", "len(ends)")])

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
        [(f"key=lambda w: {key}", "key=lambda w: (-w[1], -w[0])" if key != "(-w[1], w[0], w[2])" else "key=lambda w: (w[0], w[2])"), (f"len(busy) < {counters}", f"len(busy) < {counters + 1}"), (f"return {code}", f"return {wrong}"), ("if end > time]", "if end >= time]")],
        [(people(n),) for n in (5, 0, 1, 4, 6, 7, 8, 9, 10, 7, 12, 11)],
    )


def formatted_texts(rng: Random) -> Draft:
    """Words set in lines."""
    width = rng.randint(12, 20)
    mark = rng.choice([".", "_", "*", "~"])
    how, code, wrong = rng.choice(
        [
            ("has its words on the left", "' '.join(line)", "' '.join(line[::-1])"),
            (f"has its words on the right and `{mark}` on their left until it is {width} wide", f"' '.join(line).rjust({width}, {mark!r})", f"' '.join(line).ljust({width}, {mark!r})"),
            (f"has its words in the middle and `{mark}` on both sides until it is {width} wide; where they cannot be equal, there is one more on the right", f"{mark!r} * (({width} - len(' '.join(line))) // 2) + ' '.join(line) + {mark!r} * (({width} - len(' '.join(line)) + 1) // 2)", f"' '.join(line).ljust({width}, {mark!r})"),
            ("has its words joined by two spaces instead of one, also where it becomes wider by that", "'  '.join(line)", "' '.join(line)"),
            ("begins with its number, from 1, and `) `, which do not count for its width", "f'{len(out) + 1}) ' + ' '.join(line)", "f'{len(out)}) ' + ' '.join(line)"),
            ("has its first word in upper case", "' '.join([line[0].upper(), *line[1:]])", "' '.join(line).upper()"),
        ]
    )
    end, end_code, end_wrong = rng.choice([("a list of the lines", "out", "out[::-1]"), ("one text, the lines joined by `|`", "'|'.join(out)", "' '.join(out)"), ("a list of the lines, the last one first", "out[::-1]", "out")])
    cut = rng.choice([True, False])
    long_words = f"A word of more than {width - 4} letters is cut to {width - 4} letters before." if cut else "No word is wider than a line."
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
        [(f"out.append({code})", f"out.append({wrong})"), (f"return {end_code}", f"return {end_wrong}"), (f"> {width}{test}", f"> {width + 1}{test}"), (f"> {width}{test}", f"> {width - 2}{test}")],
        [(text(n),) for n in (7, 0, 1, 4, 6, 9, 11, 8, 12, 10, 14)],
    )


def records(rng: Random) -> Draft:
    """Records chosen, grouped, computed and sorted."""
    low, k = rng.randint(2, 6), rng.randint(2, 5)
    kinds, towns = ["tea", "oil", "rice", "salt"], ["Rome", "Oslo", "Lima"]
    keep, keep_code, keep_wrong = rng.choice([(f"a count of at least {low}", f"r['count'] >= {low}", f"r['count'] > {low}"), (f"a price below {low * 3}", f"r['price'] < {low * 3}", f"r['price'] <= {low * 3}"), (f"a town other than `{towns[k % 3]}`", f"r['town'] != {towns[k % 3]!r}", f"r['town'] == {towns[k % 3]!r}"), (f"a value (count times price) from {low} to {low * 15}, both included", f"{low} <= r['count'] * r['price'] <= {low * 15}", f"{low} < r['count'] * r['price'] <= {low * 15 - 6}")])
    key = rng.choice(["kind", "town"])
    value, value_code, value_wrong = rng.choice([("sum of the counts", "sum(r['count'] for r in some)", "sum(r['price'] for r in some)"), ("sum of the values (count times price)", "sum(r['count'] * r['price'] for r in some)", "sum(r['count'] for r in some)"), ("highest price", "max(r['price'] for r in some)", "min(r['price'] for r in some)"), ("number of records", "len(some)", "len(some) + 1"), (f"value (count times price) of its most valuable record minus {k} for each of its records", f"max(r['count'] * r['price'] for r in some) - {k} * len(some)", f"max(r['count'] * r['price'] for r in some) - {k}")])
    falling = rng.choice([True, False])
    sign = "-" if falling else ""
    shape, shape_code = rng.choice([("a list of pairs (lists) of the group's name and this number", "[[name, number] for name, number in ranked]"), ("a list of texts such as `name: 12`", "[f'{name}: {number}' for name, number in ranked]"), ("one text such as `name=12;other=7`", "';'.join(f'{name}={number}' for name, number in ranked)"), ("a list of the groups' names", "[name for name, _ in ranked]")])
    most = rng.choice([None, 2])
    cut = f"[:{most}]" if most else ""

    def table(n: int) -> list[dict[str, object]]:
        return [{"kind": rng.choice(kinds), "town": rng.choice(towns), "count": rng.choice([low, low + 1, rng.randint(1, 9)]), "price": rng.choice([low * 3, rng.randint(1, 20)])} for _ in range(n)]

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
        [(f"if {keep_code}:", f"if {keep_wrong}:"), (f"name: {value_code} for", f"name: {value_wrong} for"), (f"({sign}pair[1], pair[0])", f"({'' if falling else '-'}pair[1], pair[0])"), (f"if {keep_code}:", "if True:")],
        [(table(n),) for n in (5, 0, 1, 4, 6, 7, 8, 9, 10, 8, 12)],
    )


def tournaments(rng: Random) -> Draft:
    """A table of results."""
    win, draw, away = rng.randint(2, 4), 1, rng.randint(0, 2)
    large = rng.randint(2, 4)
    bonus = rng.choice([f"a win by at least {large} brings 1 more", "a loss by exactly 1 brings 1", "no other result brings points"])
    extra = {"a win": f"1 if gap >= {large} else 0", "a los": "0", "no oth": "0"}[bonus[:5] if bonus[:5] != "no ot" else "no oth"]
    loser = "1 if gap == 1 else 0" if bonus.startswith("a loss") else "0"
    ties = rng.sample([("the larger difference of goals", "-(goals[t] - against[t])"), ("more goals", "-goals[t]"), ("fewer goals against it", "against[t]"), ("more wins", "-wins[t]")], 2)
    words, code, wrong = rng.choice([("a list of the teams in this order", "table", "table[::-1]"), ("a list of texts such as `red 7` (team and points) in this order", "[f'{t} {points[t]}' for t in table]", "[f'{t} {goals[t]}' for t in table]"), ("the first team and its points as a list ([] if there is none)", "[table[0], points[table[0]]] if table else []", "[table[-1], points[table[-1]]] if table else []")])

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
        [(f"points[team] += {win} +", f"points[team] += {win + 1} +"), (f"points[team] += {draw}\n", f"points[team] += {draw + 1}\n"), (f"return {code}", f"return {wrong}"), ("(-points[t],", "(-wins[t],")],
        [(results(n),) for n in (5, 0, 1, 4, 6, 7, 8, 9, 10, 12, 11)],
    )


def stores(rng: Random) -> Draft:
    """Lots of goods, bought and sold."""
    rule, pick = rng.choice([("the oldest lot", "0"), ("the newest lot", "len(lots) - 1"), ("the cheapest lot (the oldest of equal ones)", "min(range(len(lots)), key=lambda i: (lots[i][1], i))"), ("the dearest lot (the oldest of equal ones)", "max(range(len(lots)), key=lambda i: (lots[i][1], -i))")])
    part = rng.choice([True, False])
    short = "sells what there is" if part else "is left out"
    decay = rng.choice([0, rng.randint(3, 5)])
    life = f" A lot that is {decay} or more entries older than an entry is thrown away before the entry." if decay else ""
    age = f"        lots = [lot for lot in lots if time - lot[2] < {decay}]\n" if decay else ""
    words, code, wrong = rng.choice([("the profit: the income of all sales minus the prices of the pieces that were sold", "profit", "income"), ("the income of all sales", "income", "profit"), ("the lots at the end, the oldest first, as pairs (lists) of count and price", "[lot[:2] for lot in lots]", "[lot[:2] for lot in lots][::-1]"), ("the value of what is there at the end, at its prices", "sum(lot[0] * lot[1] for lot in lots)", "sum(lot[0] for lot in lots)"), ("the number of pieces that were sold", "sold", "len(entries)")])
    tax = rng.randint(0, 3)
    tax_words = f" Each sale that sells something costs {tax} once." if tax else ""

    def entries(n: int) -> list[list[object]]:
        return [[rng.choice(["buy", "buy", "sell"]) if i else "buy", rng.randint(1, 9), rng.randint(1, 12)] for i in range(n)]

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
            count = {'there' if part else '0'}
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
        [(f"i = {pick}", "i = len(lots) // 2"), (f"count = {'there' if part else '0'}", f"count = {'0' if part else 'there'}"), (f"return {code}", f"return {wrong}"), ("taken * (price - lots[i][1])", "taken * (price + lots[i][1])"), ("taken * price\n", "taken * price + 1\n"), ("sold += taken", "sold += taken + 1"), (f"i = {pick}", f"i = {'len(lots) - 1' if pick == '0' else '0'}")][: 3],
        [(entries(n),) for n in (6, 0, 1, 3, 5, 7, 8, 9, 10, 12, 11, 14)],
    )


def filled_templates(rng: Random) -> Draft:
    """A text with places to fill in."""
    left, right = rng.choice([("{", "}"), ("<", ">"), ("[", "]"), ("$(", ")")])
    change_names = rng.sample([("up", "in upper case", "value.upper()"), ("rev", "backwards", "value[::-1]"), ("len", "its number of characters", "str(len(value))"), ("two", "twice", "value * 2"), ("first", "its first character (nothing of an empty value)", "value[:1]"), ("cut", "without its last character", "value[:-1]")], 3)
    shown = ", ".join(f"`{name}`: {words}" for name, words, _ in change_names)
    missing, missing_code = rng.choice([("`?` stands for a name that is not in the dict", "'?'"), ("the name itself stands for one that is not in the dict", "name"), ("nothing stands for a name that is not in the dict", "''")])
    sign = rng.choice(["|", ":", "!"])
    rules = "".join(f"            {'if' if at == 0 else 'elif'} change == {name!r}:\n                value = {code}\n" for at, (name, _, code) in enumerate(change_names))
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
        [(change_names[0][2], "value"), (change_names[1][2], "value + '.'"), (f"values.get(name, {missing_code})", "values.get(name, '-')"), ("for change in changes:", "for change in changes[::-1]:"), ("return out + text", "return out")][:4],
        [(text(n), values()) for n in (5, 0, 1, 3, 4, 6, 7, 8, 9, 6, 10, 8)],
    )


LEVEL_4_RECORDS_FAMILIES: tuple[Family, ...] = (
    ledgers,
    queues,
    formatted_texts,
    records,
    tournaments,
    stores,
    filled_templates,
)
