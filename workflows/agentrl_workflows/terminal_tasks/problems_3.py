"""Level 3: programs to mend or to write, and questions about the history of a repository."""

from __future__ import annotations

import base64
import binascii
import gzip
import random
from collections import Counter

from agentrl_workflows.terminal_tasks.problem import Problem

_GIT = """
git init -q .
git config user.name Sam
git config user.email sam@example.org
"""


def hard_problems() -> list[Problem]:
    """Return the problems of level 3."""
    made = (
        _mend_the_median,
        _rows_to_json,
        _health_server,
        _numbers_script,
        _keep_three_copies,
        _top_missing,
        _bring_back_a_file,
        _merge_a_branch,
        _unwrap,
        _free_space_report,
    )
    return [make() for make in made]


def _mend_the_median() -> Problem:
    return Problem(
        name="mend-the-median",
        level=3,
        category="python",
        ask=(
            "/app/stats.py prints the median of the numbers on its standard input, one a line. It is wrong "
            "for some inputs. Mend it. Of an even count the median is the mean of the two middle ones, "
            "printed as Python prints a float."
        ),
        files={
            "stats.py": "import sys\n\nnumbers = sorted(sys.stdin.read().split())\nmiddle = len(numbers) // 2\n"
            "print(float(numbers[middle]))\n"
        },
        solve="""cat > stats.py <<'END'
import sys

numbers = sorted(float(word) for word in sys.stdin.read().split())
middle = len(numbers) // 2
print(numbers[middle] if len(numbers) % 2 else (numbers[middle - 1] + numbers[middle]) / 2)
END""",
        check="""
            begin()
            cases = [("3\\n10\\n2\\n", "3.0"), ("1\\n2\\n", "1.5"), ("9\\n100\\n11\\n20\\n", "15.5"), ("-5\\n", "-5.0")]
            pay(all(run("python3", "stats.py", stdin=given) == (0, right) for given, right in cases))
        """,
        wrong=("sed -i 's/sorted(/sorted(map(float, /; s/split())/split()))/' stats.py", "echo 'print(3.0)' > stats.py"),
    )


def _rows_to_json() -> Problem:
    return Problem(
        name="rows-to-json",
        level=3,
        category="python",
        ask=(
            "Write /app/convert.py. It reads tab-separated rows from standard input, whose first row names "
            "the columns, and writes one JSON object a line. A value that is a whole number becomes a "
            "number, an empty value null, any other a string."
        ),
        solve="""cat > convert.py <<'END'
import json, re, sys

rows = [line.rstrip("\\n").split("\\t") for line in sys.stdin]
for row in rows[1:]:
    print(json.dumps({k: None if v == "" else int(v) if re.fullmatch(r"-?\\d+", v) else v for k, v in zip(rows[0], row)}))
END""",
        check="""
            import json
            begin()
            given = "id\\tname\\tage\\n1\\tAnn\\t-4\\n2\\t\\t3.5\\n03\\t7 up\\t\\n"
            right = [{"id": 1, "name": "Ann", "age": -4}, {"id": 2, "name": None, "age": "3.5"}, {"id": 3, "name": "7 up", "age": None}]
            status, said = run("python3", "convert.py", stdin=given)
            try:
                found = [json.loads(line) for line in said.splitlines()]
            except ValueError:
                found = []
            pay(status == 0 and found == right)
        """,
        wrong=(
            "cat > convert.py <<'END'\nimport csv, json, sys\nfor row in csv.DictReader(sys.stdin, delimiter='\\t'):\n"
            "    print(json.dumps(row))\nEND",
            "cat > convert.py <<'END'\nimport csv, json, sys\nfor row in csv.DictReader(sys.stdin, delimiter='\\t'):\n"
            "    print(json.dumps({k: int(v) if v.isdigit() else v for k, v in row.items()}))\nEND",
        ),
    )


def _health_server() -> Problem:
    return Problem(
        name="health-server",
        level=3,
        category="services",
        ask=(
            "Write /app/server.py, which takes a port as its argument and serves HTTP on 127.0.0.1: GET "
            "/health answers 200 with the body `ok`; GET /count answers how often /count has been asked for, "
            "from 1; everything else 404."
        ),
        solve="""cat > server.py <<'END'
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer

asked = 0


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        global asked
        if self.path == "/count":
            asked += 1
        body = {"/health": "ok", "/count": str(asked)}.get(self.path)
        self.send_response(404 if body is None else 200)
        self.end_headers()
        self.wfile.write((body or "").encode())


HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
END""",
        check="""
            import time
            import urllib.error, urllib.request
            begin()
            process = start("python3", "server.py", "8765")

            def ask(path):
                for _ in range(100):
                    try:
                        with urllib.request.urlopen("http://127.0.0.1:8765" + path, timeout=10) as reply:
                            return reply.status, reply.read().decode().strip()
                    except urllib.error.HTTPError as error:
                        return error.code, ""
                    except OSError:
                        if process.poll():
                            break  # it ended with an error, and no server will come
                        time.sleep(0.1)
                pay(0)

            found = [ask("/health"), ask("/count"), ask("/nothing"), ask("/count"), ask("/health")]
            pay(found == [(200, "ok"), (200, "1"), (404, ""), (200, "2"), (200, "ok")])
        """,
        wrong=(
            "cat > server.py <<'END'\nimport sys\nfrom http.server import test, SimpleHTTPRequestHandler\n"
            "test(SimpleHTTPRequestHandler, port=int(sys.argv[1]))\nEND\necho ok > health; echo 1 > count",
            "echo ok > health",
        ),
    )


def _numbers_script() -> Problem:
    return Problem(
        name="numbers-script",
        level=3,
        category="shell",
        ask=(
            "Write an executable script /app/stats.sh. Given a file of whole numbers, one a line, it prints "
            "`min=A max=B sum=C`. Blank lines are skipped. Without an argument, or where there is no such "
            "file, it prints nothing on standard output and exits with status 2."
        ),
        solve="""cat > stats.sh <<'END'
#!/bin/bash
[ -f "$1" ] || exit 2
awk 'NF {if (n++ == 0 || $1 < a) a = $1; if (n == 1 || $1 > b) b = $1; s += $1} END {print "min=" a+0 " max=" b+0 " sum=" s+0}' "$1"
END
chmod +x stats.sh""",
        check="""
            begin()
            with open("/tmp/some numbers", "w") as file:
                file.write("7\\n\\n-12\\n30\\n100\\n9\\n")
            found = [run(APP + "/stats.sh", "/tmp/some numbers"), run(APP + "/stats.sh"), run(APP + "/stats.sh", "/tmp/none")]
            pay(found == [(0, "min=-12 max=100 sum=134"), (2, ""), (2, "")])
        """,
        wrong=(
            "printf '#!/bin/bash\\nsort $1 | head -1\\n' > stats.sh; chmod +x stats.sh",
            "cat > stats.sh <<'END'\n#!/bin/bash\n[ -f \"$1\" ] || exit 1\n"
            'echo min=$(sort -n "$1" | grep . | head -1) max=$(sort -n "$1" | tail -1) sum=$(paste -sd+ "$1" | bc)\nEND\n'
            "chmod +x stats.sh",
        ),
    )


def _keep_three_copies() -> Problem:
    return Problem(
        name="keep-three-copies",
        level=3,
        category="shell",
        ask=(
            "Write an executable script /app/rotate.sh. Given a file F, it renames F.2 to F.3, F.1 to F.2 "
            "and F to F.1, as far as they exist, and makes a new empty F. An older F.3 is lost."
        ),
        solve="""cat > rotate.sh <<'END'
#!/bin/bash
f=$1
for n in 2 1; do [ -e "$f.$n" ] && mv "$f.$n" "$f.$((n + 1))"; done
[ -e "$f" ] && mv "$f" "$f.1"
: > "$f"
END
chmod +x rotate.sh""",
        check="""
            begin()
            os.makedirs("/tmp/logs")
            place = "/tmp/logs/a b.log"
            seen = []
            for number in range(5):
                with open(place, "a") as file:
                    file.write("day %d" % number)
                run(APP + "/rotate.sh", place)
                found = sorted(os.listdir("/tmp/logs"))
                seen.append([(name[3:], open("/tmp/logs/" + name).read()) for name in found])
            right = [(".log", ""), (".log.1", "day 4"), (".log.2", "day 3"), (".log.3", "day 2")]
            pay(seen[0] == right[:1] + [(".log.1", "day 0")] and seen[4] == right)
        """,
        wrong=(
            (
                "cat > rotate.sh <<'END'\n#!/bin/bash\nmv $1 $1.1; mv $1.1 $1.2; mv $1.2 $1.3; touch $1\nEND\nchmod "
                "+x rotate.sh"
            ),
            'cat > rotate.sh <<\'END\'\n#!/bin/bash\ncp "$1" "$1.1"; : > "$1"\nEND\nchmod +x rotate.sh',
        ),
    )


def _top_missing() -> Problem:
    rng = random.Random("top-missing")
    addresses = [f"10.0.{rng.randrange(3)}.{rng.randrange(6)}" for _ in range(400)]
    hits = [(address, rng.choice((200, 200, 404, 500)), rng.randrange(100, 5000)) for address in addresses]
    failed = Counter(address for address, status, _ in hits if status == 404)
    top = sorted(failed, key=lambda address: (-failed[address], address))[:3]
    return Problem(
        name="top-missing",
        level=3,
        category="logs",
        ask=(
            "/app/access.log is a web server's log. Write to /app/top.txt the three addresses with the most "
            "requests that were answered 404, one a line as `ADDRESS COUNT`, the most first; of equal "
            "counts, in the order of `sort` on the text."
        ),
        files={
            "access.log": "".join(
                f'{address} - - [04/Mar/2026:10:{number % 60:02}:00 +0000] "GET /page/404 HTTP/1.1" {status} {size}\n'
                for number, (address, status, size) in enumerate(hits)
            )
        },
        solve=(
            "awk '$(NF-1)==404 {c[$1]++} END {for (a in c) print a, c[a]}' access.log | LC_ALL=C sort "
            "-k2,2nr -k1,1 | head -3 > top.txt"
        ),
        check=f"begin()\npay(lines('top.txt') == {[f'{address} {failed[address]}' for address in top]!r})",
        wrong=(
            "grep 404 access.log | cut -d' ' -f1 | sort | uniq -c | sort -nr | head -3 | awk '{print $2, $1}' > top.txt",
            "awk '$(NF-1)==404 {c[$1]++} END {for (a in c) print c[a], a}' access.log | sort -nr | head -3 > top.txt",
        ),
    )


def _bring_back_a_file() -> Problem:
    return Problem(
        name="bring-back-a-file",
        level=3,
        category="git",
        ask=(
            "In the repository /app, the file notes/plan.txt was deleted in some commit. Bring back its last "
            "contents and commit them, so that the repository is clean and its history has one commit more."
        ),
        prepare=_GIT
        + """
            mkdir notes
            for n in 1 2 3; do echo "plan $n" >> notes/plan.txt; git add .; git commit -qm "plan $n"; done
            git rm -q notes/plan.txt; git commit -qm "tidy up"
            echo more > other.txt; git add .; git commit -qm other
        """,
        solve=(
            'git checkout -q "$(git rev-list -1 HEAD -- notes/plan.txt)^" -- notes/plan.txt\ngit commit -qm '
            '"Bring back the plan"'
        ),
        check="""
            begin()
            same = git("show", "HEAD:notes/plan.txt") == "plan 1\\nplan 2\\nplan 3"
            kept = git("show", "HEAD:other.txt") == "more" and git("rev-list", "--count", "HEAD") == "6"
            pay(same and kept and text("notes/plan.txt") == "plan 1\\nplan 2\\nplan 3" and git("status", "--porcelain") == "")
        """,
        wrong=(
            "git checkout -q HEAD~4 -- notes/plan.txt; git commit -qm back",
            "git reset -q --hard HEAD~2",
        ),
    )


def _merge_a_branch() -> Problem:
    return Problem(
        name="merge-a-branch",
        level=3,
        category="git",
        ask=(
            "In the repository /app, merge the branch `feature` into `main`. Both changed settings.txt: keep "
            "main's value of `speed`, and feature's value of `color`; `mode` is new in feature. The result "
            "is a merge commit, and the repository is clean."
        ),
        prepare=_GIT
        + """
            git checkout -q -b main
            printf 'speed=1\\ncolor=red\\n' > settings.txt; git add .; git commit -qm base
            git checkout -q -b feature; printf 'speed=5\\ncolor=blue\\nmode=new\\n' > settings.txt; git commit -qam feature
            git checkout -q main; printf 'speed=9\\ncolor=green\\n' > settings.txt; git commit -qam main
        """,
        solve=(
            "git merge -q feature || true\nprintf 'speed=9\\ncolor=blue\\nmode=new\\n' > settings.txt\ngit commit -qam Merge"
        ),
        check="""
            begin()
            parents = git("log", "-1", "--format=%P", "main").split()
            right = git("show", "main:settings.txt").split() == ["speed=9", "color=blue", "mode=new"]
            joined = len(parents) == 2 and parents[1] == git("rev-parse", "feature")
            pay(right and joined and git("status", "--porcelain") == "")
        """,
        wrong=(
            "git merge -q -X theirs feature",
            "printf 'speed=9\\ncolor=blue\\nmode=new\\n' > settings.txt; git commit -qam done",
        ),
    )


def _unwrap() -> Problem:
    inner = gzip.compress(b"the heron waits by the river\n", mtime=0)
    wrapped = base64.encodebytes(binascii.hexlify(inner)[::-1])
    return Problem(
        name="unwrap",
        level=3,
        category="data",
        ask=(
            "/app/wrapped.txt was made so: a text was compressed with gzip, written as hexadecimal digits, "
            "those were reversed, and the result was encoded as base64. Write the text to /app/plain.txt."
        ),
        files={"wrapped.txt": wrapped},
        solve="base64 -d wrapped.txt | rev | python3 -c 'import sys, gzip; "
        "sys.stdout.buffer.write(gzip.decompress(bytes.fromhex(sys.stdin.read())))' > plain.txt",
        check="begin()\npay(text('plain.txt') == 'the heron waits by the river')",
        wrong=("base64 -d wrapped.txt > plain.txt", "base64 -d wrapped.txt | rev > plain.txt"),
    )


def _free_space_report() -> Problem:
    return Problem(
        name="free-space-report",
        level=3,
        category="files",
        ask=(
            "Write to /app/report.txt one line for each directory directly below /app/home, as `NAME BYTES`: "
            "the sum of the sizes of all regular files below it, hidden ones included. The largest is first; "
            "equal ones are in alphabetical order."
        ),
        files={
            "home/ann/a": "x" * 700,
            "home/ann/.cache/b": "x" * 1300,
            "home/bob/c d": "x" * 1999,
            "home/cy/e": "x" * 2000,
            "home/dee/deep/er/f": "x" * 5,
        },
        prepare="ln -s /usr home/dee/usr; mkdir home/eve; echo stray > home/stray",
        solve="""
            cd home
            for d in */; do d=${d%/}
              echo "$d $(find "$d" -type f -printf '%s\\n' | awk '{s+=$1} END {print s+0}')"
            done | LC_ALL=C sort -k2,2nr -k1,1 > ../report.txt
        """,
        check="begin()\npay(lines('report.txt') == ['ann 2000', 'cy 2000', 'bob 1999', 'dee 5', 'eve 0'])",
        wrong=(
            "du -sb home/* | sort -nr | awk '{print $2, $1}' > report.txt",
            "cd home; for d in *; do echo $d $(cat $d/* 2>/dev/null | wc -c); done | sort -k2,2nr > ../report.txt",
        ),
    )
