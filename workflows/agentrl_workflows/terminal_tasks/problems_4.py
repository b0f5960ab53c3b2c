"""Level 4: programs with rules of their own, searches, and services with state."""

from __future__ import annotations

import hashlib
import random
from typing import Final

from agentrl_workflows.terminal_tasks.problem import Problem

_COUNTER: Final = """cat > counter.py <<'END'
import re, socketserver, sys, threading

held, lock = {}, threading.Lock()


class Handler(socketserver.StreamRequestHandler):
    def handle(self):
        for raw in self.rfile:
            line = raw.decode(errors="replace").strip()
            add, get = re.fullmatch(r"ADD (\\S+) (-?\\d+)", line), re.fullmatch(r"GET (\\S+)", line)
            if line == "QUIT":
                return
            with lock:
                if add:
                    held[add[1]] = held.get(add[1], 0) + int(add[2])
                    said = held[add[1]]
                else:
                    said = held.get(get[1], 0) if get else "ERR"
            self.wfile.write(f"{said}\\n".encode())


class Server(socketserver.ThreadingTCPServer):
    daemon_threads = allow_reuse_address = True


Server(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
END"""
_COUNTER_CHECK: Final = """
            import socket, threading, time
            begin()
            process = start("python3", "counter.py", "8766")

            def opened():
                for _ in range(100):
                    try:
                        return socket.create_connection(("127.0.0.1", 8766), timeout=10)
                    except OSError:
                        if process.poll():
                            break  # it ended with an error, and no server will come
                        time.sleep(0.1)
                pay(0)

            def say(wire, *told):
                file, found = wire.makefile("rw"), []
                for line in told:
                    file.write(line + "\\n")
                    file.flush()
                    found.append(file.readline().strip())
                return found

            try:
                idle = opened()
                first = say(opened(), "GET a", "ADD a 5", "ADD a -7", "HELLO", "ADD a", "ADD b 1")
                workers = [threading.Thread(target=lambda: say(opened(), *["ADD n 1"] * 50)) for _ in range(8)]
                [each.start() for each in workers]
                [each.join(30) for each in workers]
                last = say(idle, "GET n", "GET a", "QUIT")
            except OSError:
                pay(0)
            pay(first == ["0", "5", "-2", "ERR", "ERR", "1"] and last == ["400", "-2", ""])
        """


def expert_problems() -> list[Problem]:
    """Return the problems of level 4."""
    made = (
        _first_bad_commit,
        _reassemble,
        _small_store,
        _reconcile_ledgers,
        _counter_service,
        _order_of_builds,
        _reckon,
        _cache_hits,
    )
    return [make() for make in made]


def _first_bad_commit() -> Problem:
    return Problem(
        name="first-bad-commit",
        level=4,
        category="git",
        ask=(
            "The program /app/price.py of the repository /app prints 120 for the argument 100 in the first "
            "commits, and another number today. Write the full hash of the first commit that prints another "
            "number to /app/answer.txt."
        ),
        prepare="""
            git init -q .
            git config user.name Kim; git config user.email kim@example.org
            export GIT_AUTHOR_DATE=2026-01-01T00:00:00Z GIT_COMMITTER_DATE=2026-01-01T00:00:00Z
            echo answer.txt > .gitignore
            for n in $(seq 1 24); do
              rate=20; [ $n -ge 17 ] && rate=19
              printf 'import sys\\n\\n# revision %s\\nprice = int(sys.argv[1])\\nprint(price + price * %s // 100)\\n' $n $rate > price.py
              [ $n = 9 ] && sed -i 's/price \\* 20/20 * price/' price.py
              git add .; git commit -qm "Revision $n"
            done
        """,
        solve="""
            git bisect start HEAD "$(git rev-list --max-parents=0 HEAD)" >/dev/null
            git bisect run sh -c '[ "$(python3 price.py 100)" = 120 ]' >/dev/null
            git rev-parse refs/bisect/bad > answer.txt
            git bisect reset >/dev/null 2>&1
        """,
        check=(
            "begin()\nright = git('log', '--format=%H', '--grep=Revision 17$')\npay(len(right) == 40 and "
            "text('answer.txt') == right)"
        ),
        wrong=(
            "git log -1 --format=%H -S'20 * price' > answer.txt",
            "git log --format=%H --grep='Revision 16$' > answer.txt",
        ),
    )


def _reassemble() -> Problem:
    rng = random.Random("reassemble")
    whole = "".join(f"{number}:{rng.randrange(10**9)}\n" for number in range(300))
    cut = [whole[start : start + 700] for start in range(0, len(whole), 700)]
    order = list(range(len(cut)))
    rng.shuffle(order)
    manifest = "".join(f"{hashlib.sha256(part.encode()).hexdigest()}\n" for part in cut)
    return Problem(
        name="reassemble",
        level=4,
        category="files",
        ask=(
            "/app/parts holds the pieces of a file under meaningless names, and some that do not belong to "
            "it. /app/manifest.txt has the SHA-256 of each piece, in the order in which they belong "
            "together. Write the whole file to /app/whole.txt."
        ),
        files={
            "manifest.txt": manifest,
            **{f"parts/{rng.randrange(16**8):08x}": cut[number] for number in order},
            **{f"parts/{rng.randrange(16**8):08x}": cut[number][:-2] for number in order[:3]},
        },
        solve=(
            "(cd parts && sha256sum *) > /tmp/sums\nwhile read -r sum; do cat \"parts/$(awk -v s=$sum '$1==s "
            "{print $2; exit}' /tmp/sums)\"; done < manifest.txt > whole.txt"
        ),
        check="import hashlib\nbegin()\n"
        f"pay(hashlib.sha256(data('whole.txt') or b'').hexdigest() == {hashlib.sha256(whole.encode()).hexdigest()!r})",
        wrong=("cat parts/* > whole.txt", "cat parts/* | sort -n | uniq > whole.txt"),
    )


def _small_store() -> Problem:
    return Problem(
        name="small-store",
        level=4,
        category="python",
        ask=(
            "Write /app/store.py, a store of strings that keeps its contents in /app/store.db (in a format "
            "of your choice) from one call to the next. `store.py set KEY VALUE` prints nothing; `store.py "
            "get KEY` prints the value, or exits with status 1; `store.py delete KEY` exits with status 1 "
            "where there is no such key; `store.py list` prints the keys, sorted, one a line. Keys and "
            "values may hold blanks, and values line ends."
        ),
        solve="""cat > store.py <<'END'
import json, os, sys

PATH = "/app/store.db"
held = json.load(open(PATH)) if os.path.exists(PATH) else {}
do, *words = sys.argv[1:]
if do == "set":
    held[words[0]] = words[1]
elif do == "list":
    print("".join(key + "\\n" for key in sorted(held)), end="")
elif words[0] not in held:
    sys.exit(1)
elif do == "get":
    print(held[words[0]])
else:
    del held[words[0]]
json.dump(held, open(PATH, "w"))
END""",
        check="""
            begin()
            try:
                os.unlink(APP + "/store.db")
            except OSError:
                pass
            calls = [("get", "a"), ("set", "a", "1\\n2"), ("set", "b c", "x = y"), ("get", "a"), ("get", "b c"), ("list",)]
            calls += [("delete", "a"), ("delete", "a"), ("set", "b c", ""), ("get", "b c"), ("list",)]
            right = [(1, ""), (0, ""), (0, ""), (0, "1\\n2"), (0, "x = y"), (0, "a\\nb c"), (0, ""), (1, ""), (0, ""), (0, ""), (0, "b c")]
            pay([run("python3", "store.py", *call) for call in calls] == right)
        """,
        wrong=(
            "cat > store.py <<'END'\nimport sys\nheld = {}\ndo, *words = sys.argv[1:]\n"
            "if do == 'set': held[words[0]] = words[1]\nelif do == 'get': print(held.get(words[0], ''))\nEND",
            "cat > store.py <<'END'\nimport sys\ndo, *words = sys.argv[1:]\npath = '/app/store.db'\n"
            "try: rows = dict(line.rstrip('\\n').split('=', 1) for line in open(path))\nexcept OSError: rows = {}\n"
            "if do == 'set': rows[words[0]] = words[1]\nelif do == 'get':\n    if words[0] not in rows: sys.exit(1)\n"
            "    print(rows[words[0]])\nelif do == 'delete':\n    if rows.pop(words[0], None) is None: sys.exit(1)\n"
            "elif do == 'list': print('\\n'.join(sorted(rows)))\n"
            "open(path, 'w').writelines(f'{k}={v}\\n' for k, v in rows.items())\nEND",
        ),
    )


def _reconcile_ledgers() -> Problem:
    return Problem(
        name="reconcile-ledgers",
        level=4,
        category="data",
        ask=(
            "/app/bank.csv and /app/books.csv have the columns date,reference,amount. Two entries match if "
            "reference and amount are the same and the dates differ by at most two days; each entry matches "
            "one other at most, entries of bank.csv in their order taking the earliest entry of books.csv "
            "that is left. Write to /app/open.csv what matches nothing, as FILE,date,reference,amount, first "
            "that of bank, then that of books, in the order of the files."
        ),
        files={
            ("bank.csv"): (
                "date,reference,amount\n2026-02-27,R1,10.00\n2026-03-01,R2,5.50\n2026-03-01,R2,5.50\n2026-03-02,R3,7\n"
                "2026-03-09,R4,1.00\n"
            ),
            ("books.csv"): (
                "date,reference,amount\n2026-03-01,R1,10.00\n2026-03-04,R2,5.50\n2026-03-02,R2,5.5\n"
                "2026-03-01,R3,7.00\n2026-03-06,R4,1.00\n2026-03-05,R5,2\n"
            ),
        },
        solve="""python3 - <<'END'
import csv
from datetime import date
from decimal import Decimal

bank, books = (list(csv.DictReader(open(name))) for name in ("bank.csv", "books.csv"))
free, left = list(books), []
for entry in bank:
    fits = [
        other for other in free
        if other["reference"] == entry["reference"] and Decimal(other["amount"]) == Decimal(entry["amount"])
        and abs((date.fromisoformat(other["date"]) - date.fromisoformat(entry["date"])).days) <= 2
    ]
    if fits:
        chosen = min(fits, key=lambda other: other["date"])
        free = [other for other in free if other is not chosen]
    else:
        left.append(("bank", entry))
rows = left + [("books", entry) for entry in free]
open("open.csv", "w").writelines(f"{name},{e['date']},{e['reference']},{e['amount']}\\n" for name, e in rows)
END""",
        check="""
            begin()
            right = ["bank,2026-03-01,R2,5.50", "bank,2026-03-09,R4,1.00"]
            right += ["books,2026-03-04,R2,5.50", "books,2026-03-06,R4,1.00", "books,2026-03-05,R5,2"]
            pay(lines("open.csv") == right)
        """,
        wrong=(
            "(grep -vxFf books.csv bank.csv | sed s/^/bank,/; grep -vxFf bank.csv books.csv | sed s/^/books,/) > open.csv",
            "printf 'bank,2026-03-09,R4,1.00\\nbooks,2026-03-06,R4,1.00\\nbooks,2026-03-05,R5,2\\n' > open.csv",
        ),
    )


def _counter_service() -> Problem:
    return Problem(
        name="counter-service",
        level=4,
        category="services",
        ask=(
            "Write /app/counter.py, which takes a port and serves TCP on 127.0.0.1, many clients at a time. "
            "A client sends lines. `ADD NAME N` adds a whole number to a counter and answers its value; `GET "
            "NAME` answers the value, 0 for a new one; `QUIT` closes the connection; anything else answers "
            "`ERR`. Counters are shared by all clients; no addition may be lost."
        ),
        solve=_COUNTER,
        check=_COUNTER_CHECK,
        wrong=(
            "cat > counter.py <<'END'\nimport socketserver, sys\nheld = {}\nclass H(socketserver.StreamRequestHandler):\n"
            "    def handle(self):\n        for raw in self.rfile:\n            w = raw.decode().split()\n"
            "            held[w[1]] = held.get(w[1], 0) + (int(w[2]) if w[0] == 'ADD' else 0)\n"
            "            self.wfile.write(f'{held[w[1]]}\\n'.encode())\n"
            "socketserver.TCPServer(('127.0.0.1', int(sys.argv[1])), H).serve_forever()\nEND",
            (
                "cat > counter.py <<'END'\nimport socketserver, sys\nclass "
                "H(socketserver.StreamRequestHandler):\n    def handle(self):\n        held = {}\n        for raw "
                "in self.rfile:\n            w = raw.decode().split()\n            if w[0] == 'QUIT': "
                "return\n            try:\n                held[w[1]] = held.get(w[1], 0) + (int(w[2]) if w[0] == "
                "'ADD' else 0); s = held[w[1]]\n            except (IndexError, ValueError): s = "
                "'ERR'\n            self.wfile.write(f'{s}\\n'.encode())\n"
                "socketserver.ThreadingTCPServer(('127.0.0.1', int(sys.argv[1])), H).serve_forever()\nEND"
            ),
        ),
    )


def _order_of_builds() -> Problem:
    rules = "app: lib net\nlib: base\nnet: base tls\ntls: base\nbase:\ndocs: app\nextra: docs tls\n"
    return Problem(
        name="order-of-builds",
        level=4,
        category="planning",
        ask=(
            "Each line of /app/rules.txt names a package and what it needs: `NAME: NEEDED...`. Write "
            "/app/order.txt with every package once, one a line, so that each comes after what it needs. "
            "Where several may come next, take the first in alphabetical order."
        ),
        files={"rules.txt": rules},
        solve="""python3 - <<'END' > order.txt
needs = {name: set(rest.split()) for name, _, rest in (line.partition(":") for line in open("rules.txt"))}
while needs:
    name = min(name for name in needs if not needs[name] & needs.keys())
    print(name)
    del needs[name]
END""",
        check="begin()\npay(lines('order.txt') == ['base', 'lib', 'tls', 'net', 'app', 'docs', 'extra'])",
        wrong=(
            "awk -F: '{for (i=1; i<=split($2, n, \" \"); i++) print n[i], $1}' rules.txt | tsort > order.txt",
            "cut -d: -f1 rules.txt | sort > order.txt",
        ),
    )


def _reckon() -> Problem:
    return Problem(
        name="reckon",
        level=4,
        category="python",
        ask=(
            "Write /app/reckon.py, which prints the value of the expression that is its argument: whole "
            "numbers, + - * /, unary minus and parentheses with the usual precedence; / rounds toward "
            "negative infinity. A wrong expression and a division by zero print `error` and nothing else. "
            "Names, powers and everything else of Python are wrong expressions."
        ),
        solve="""cat > reckon.py <<'END'
import ast, operator, re, sys

DO = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.floordiv}


def value(node):
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -value(node.operand)
    return DO[type(node.op)](value(node.left), value(node.right))


try:
    text = sys.argv[1]
    if re.search(r"[^-+*/()\\d\\s]|\\*\\*|//", text):
        raise ValueError
    print(value(ast.parse(text.strip(), mode="eval").body))
except Exception:
    print("error")
END""",
        check="""
            begin()
            cases = {"1+2*3": "7", "(1+2)*3": "9", "-7/2": "-4", "2*-3": "-6", "--4": "4", "10-4-3": "3", "1/0": "error", "2**3": "error"}
            cases |= {"1+": "error", "abs(1)": "error", "7//2": "error", "(2": "error", "100/7/2": "7", " 8 / (3 - 1) ": "4", "": "error"}
            pay(all(run("python3", "reckon.py", given)[1] == right for given, right in cases.items()))
        """,
        wrong=(
            "cat > reckon.py <<'END'\nimport sys\ntry: print(eval(sys.argv[1].replace('/', '//')))\n"
            "except Exception: print('error')\nEND",
            'printf \'import sys, subprocess\\nprint(subprocess.run(["expr", *sys.argv[1].split()], text=True, '
            'capture_output=True).stdout.strip() or "error")\\n\' > reckon.py',
        ),
    )


def _cache_hits() -> Problem:
    rng = random.Random("cache-hits")
    trace = [rng.randrange(9) for _ in range(200)]
    held: list[int] = []
    hits = 0
    for key in trace:
        if key in held:
            held.remove(key)
            hits += 1
        held = [*held, key][-4:]
    return Problem(
        name="cache-hits",
        level=4,
        category="planning",
        ask=(
            "/app/trace.txt lists the keys that a program asks a cache for, one a line. The cache holds four "
            "keys, is empty at first, and drops the one that was asked for longest ago. Write to "
            "/app/answer.txt how often the key was there, and on a second line the four keys at the end, "
            "separated by blanks, the one asked for longest ago first."
        ),
        files={"trace.txt": "".join(f"{key}\n" for key in trace)},
        solve="""python3 - <<'END' > answer.txt
held, hits = [], 0
for key in open("trace.txt").read().split():
    if key in held:
        held.remove(key)
        hits += 1
    held = (held + [key])[-4:]
print(hits)
print(*held)
END""",
        check=f"begin()\npay(lines('answer.txt') == [{str(hits)!r}, {' '.join(map(str, held))!r}])",
        wrong=(
            'python3 -c \'k = open("trace.txt").read().split(); '
            "print(sum(a in k[max(0, i-4):i] for i, a in enumerate(k))); print(*k[-4:])' > answer.txt",
            "python3 - <<'END' > answer.txt\nheld, hits = [], 0\nfor key in open('trace.txt').read().split():\n"
            "    if key in held: hits += 1\n    else: held = (held + [key])[-4:]\nprint(hits)\nprint(*held)\nEND",
        ),
    )
