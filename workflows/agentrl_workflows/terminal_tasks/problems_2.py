"""Level 2: a few commands, or a short script."""

from __future__ import annotations

import json
import random
from collections import Counter

from agentrl_workflows.terminal_tasks.problem import Problem


def medium_problems() -> list[Problem]:
    """Return the problems of level 2."""
    made = (
        _sum_by_group,
        _busiest_hour,
        _active_mails,
        _join_tables,
        _first_commit,
        _repair_links,
        _remove_duplicates,
        _pack_without_cache,
        _set_a_port,
        _set_permissions,
        _unify_line_ends,
    )
    return [make() for make in made]


def _sum_by_group() -> Problem:
    rng = random.Random("sum-by-group")
    fruits = ("apple", "fig", "lime", "pear")
    rows = [(rng.choice(fruits), rng.randrange(1, 40)) for _ in range(60)]
    totals = Counter[str]()
    for fruit, amount in rows:
        totals[fruit] += amount
    right = ["fruit,total", *(f"{fruit},{totals[fruit]}" for fruit in sorted(totals))]
    return Problem(
        name="sum-by-group",
        level=2,
        category="data",
        ask=(
            "/app/sales.csv has the columns fruit and amount. Write /app/totals.csv with the header "
            "`fruit,total` and one line for each fruit, in alphabetical order, with the sum of its amounts."
        ),
        files={"sales.csv": "fruit,amount\n" + "".join(f"{fruit},{amount}\n" for fruit, amount in rows)},
        solve=(
            '(echo fruit,total; tail -n +2 sales.csv | awk -F, \'{t[$1]+=$2} END {for (f in t) print f "," '
            "t[f]}' | sort) > totals.csv"
        ),
        check=f"begin()\npay(lines('totals.csv') == {right!r})",
        wrong=(
            (
                '(echo fruit,total; tail -n +2 sales.csv | cut -d, -f1 | sort | uniq -c | awk \'{print $2 "," '
                "$1}') > totals.csv"
            ),
            "tail -n +2 sales.csv | awk -F, '{t[$1]+=$2} END {for (f in t) print f \",\" t[f]}' | sort > totals.csv",
        ),
    )


def _busiest_hour() -> Problem:
    rng = random.Random("busiest-hour")
    stamps = [(rng.randrange(24), rng.randrange(60), rng.choice(("INFO", "WARN", "ERROR"))) for _ in range(240)]
    hours = Counter(hour for hour, _, kind in stamps if kind == "ERROR")
    busiest = min(hours, key=lambda hour: (-hours[hour], hour))
    return Problem(
        name="busiest-hour",
        level=2,
        category="logs",
        ask=(
            "In which hour does /app/service.log have the most lines of level ERROR? Write the hour (two "
            "digits) and the count, with a blank between, to /app/answer.txt. The earliest hour wins a tie."
        ),
        files={
            "service.log": "".join(f"{hour:02}:{minute:02} {kind} ERROR-code=0\n" for hour, minute, kind in sorted(stamps))
        },
        solve="awk '$2==\"ERROR\" {print substr($1,1,2)}' service.log | sort | uniq -c | sort -k1,1nr -k2,2n | head -1 | "
        "awk '{print $2, $1}' > answer.txt",
        check=f"begin()\npay(text('answer.txt') == {f'{busiest:02} {hours[busiest]}'!r})",
        wrong=(
            "grep ERROR service.log | cut -c1-2 | sort | uniq -c | sort -nr | head -1 | awk '{print $2, $1}' > answer.txt",
            (
                "awk '$2==\"ERROR\" {print substr($1,1,2)}' service.log | sort | uniq -c | head -1 | awk '{print "
                "$2, $1}' > answer.txt"
            ),
        ),
    )


def _active_mails() -> Problem:
    rng = random.Random("active-mails")
    users = [
        {"name": f"user{number}", "email": f"u{rng.randrange(900)}@example.org", "active": number % 3 != 0, "tags": ["a"]}
        for number in range(30)
    ]
    mails = sorted(str(user["email"]) for user in users if user["active"])
    return Problem(
        name="active-mails",
        level=2,
        category="data",
        ask=(
            "/app/users.json is a list of users. Write the email of each user whose `active` is true, "
            "sorted, one a line, to /app/emails.txt."
        ),
        files={"users.json": json.dumps(users, indent=1)},
        solve="""python3 -c '
import json
print("\\n".join(sorted(user["email"] for user in json.load(open("users.json")) if user["active"])))' > emails.txt""",
        check=f"begin()\npay(lines('emails.txt') == {mails!r})",
        wrong=(
            "grep -o '[^\"]*@[^\"]*' users.json | sort > emails.txt",
            "grep -B1 'true' users.json | grep -o '[^\"]*@[^\"]*' > emails.txt",
        ),
    )


def _join_tables() -> Problem:
    rng = random.Random("join-tables")
    names = {str(number): name for number, name in enumerate(("Ada", "Bo", "Cy", "Di", "Ed"), 1)}
    orders = [(rng.choice([*names, "9"]), rng.randrange(100)) for _ in range(25)]
    joined = [f"{names.get(person, 'unknown')},{price}" for person, price in orders]
    return Problem(
        name="join-tables",
        level=2,
        category="data",
        ask=(
            "/app/people.csv has id,name and /app/orders.csv has id,price. Write /app/joined.csv without a "
            "header: name,price for each order, in the order of orders.csv. A person who is not in "
            "people.csv is called unknown."
        ),
        files={
            "people.csv": "id,name\n" + "".join(f"{number},{name}\n" for number, name in names.items()),
            "orders.csv": "id,price\n" + "".join(f"{person},{price}\n" for person, price in orders),
        },
        solve=(
            'awk -F, \'NR==FNR {n[$1]=$2; next} FNR>1 {print (($1 in n) ? n[$1] : "unknown") "," $2}\' '
            "people.csv orders.csv > joined.csv"
        ),
        check=f"begin()\npay(lines('joined.csv') == {joined!r})",
        wrong=(
            "join -t, <(tail -n +2 people.csv | sort) <(tail -n +2 orders.csv | sort) | cut -d, -f2,3 > joined.csv",
            "awk -F, 'NR==FNR {n[$1]=$2; next} FNR>1 {print n[$1] \",\" $2}' people.csv orders.csv > joined.csv",
        ),
    )


def _first_commit() -> Problem:
    return Problem(
        name="first-commit",
        level=2,
        category="git",
        ask=(
            "Make /app/project a git repository with one commit that holds main.py and README.md but not "
            "secrets.env, which git shall ignore by a committed .gitignore. The author is `Robin Vale "
            "<robin@example.org>`, the message `Start`."
        ),
        files={"project/main.py": "print('hi')\n", "project/README.md": "# Project\n", "project/secrets.env": "KEY=1\n"},
        solve="""
            cd project
            git init -q .
            echo secrets.env > .gitignore
            git add .
            git -c user.name='Robin Vale' -c user.email=robin@example.org commit -q -m Start
        """,
        check="""
            begin()
            place = APP + "/project"
            told = git("log", "--format=%an <%ae>|%s", cwd=place)
            held = git("ls-tree", "-r", "--name-only", "HEAD", cwd=place).split()
            clean = git("check-ignore", "secrets.env", cwd=place) == "secrets.env"
            pay(told == "Robin Vale <robin@example.org>|Start" and held == [".gitignore", "README.md", "main.py"] and clean)
        """,
        wrong=(
            (
                "cd project; git init -q .; git add .; git -c user.name='Robin Vale' -c "
                "user.email=robin@example.org commit -qm Start"
            ),
            "cd project; git init -q .; echo secrets.env > .gitignore; git add .; "
            "git -c user.name=me -c user.email=me@localhost commit -qm Start",
        ),
    )


def _repair_links() -> Problem:
    return Problem(
        name="repair-links",
        level=2,
        category="files",
        ask=(
            "Some symbolic links in /app/links are broken, because their targets moved from /app/old to "
            "/app/new/data. Let each broken link point to the file of the same name there. Leave links that "
            "work as they are."
        ),
        prepare="""
            mkdir -p links old new/data
            for n in alpha beta gamma; do echo $n > new/data/$n.txt; ln -s /app/old/$n.txt links/$n; done
            echo here > old/delta.txt; echo there > new/data/delta.txt; ln -s /app/old/delta.txt links/delta
        """,
        solve='for l in links/*; do [ -e "$l" ] || ln -sfn "/app/new/data/$(basename "$(readlink "$l")")" "$l"; done',
        check="""
            begin()
            found = {name: os.readlink(APP + "/links/" + name) for name in tree("links") if os.path.islink(APP + "/links/" + name)}
            right = {name: "/app/new/data/" + name + ".txt" for name in ("alpha", "beta", "gamma")}
            right["delta"] = "/app/old/delta.txt"
            same = text("new/data/alpha.txt") == "alpha" and text("old/delta.txt") == "here" and not os.path.islink(APP + "/old")
            pay(found == right and same)
        """,
        wrong=(
            "for n in alpha beta gamma delta; do ln -sfn /app/new/data/$n.txt links/$n; done",
            "rm -rf old; ln -s /app/new/data old",
        ),
    )


def _remove_duplicates() -> Problem:
    files = {
        f"photos/{name}": data for name, data in (("a.raw", "one"), ("b.raw", "two"), ("c.raw", "one"), ("d/e.raw", "two"))
    }
    return Problem(
        name="remove-duplicates",
        level=2,
        category="files",
        ask=(
            "Below /app/photos some files have the same contents. Of each set of equal files keep the one "
            "whose path comes first in alphabetical order, and delete the others."
        ),
        files={**files, "photos/f.raw": "three", "photos/g.raw": "One"},
        solve="find photos -type f | LC_ALL=C sort | xargs sha256sum | awk 'seen[$1]++ {print $2}' | xargs rm",
        check="begin()\npay(tree('photos') == ['a.raw', 'b.raw', 'f.raw', 'g.raw'] and text('photos/a.raw') == 'one')",
        wrong=(
            "find photos -type f | LC_ALL=C sort -r | xargs sha256sum | awk 'seen[$1]++ {print $2}' | xargs rm",
            "cd photos; rm c.raw",
        ),
    )


def _pack_without_cache() -> Problem:
    return Problem(
        name="pack-without-cache",
        level=2,
        category="files",
        ask=(
            "Pack the directory /app/project into /app/project.tar.gz, so that the paths inside begin with "
            "project/, and leave out every directory called __pycache__ and every file that ends in .log."
        ),
        files={
            "project/main.py": "1",
            "project/lib/util.py": "2",
            "project/lib/__pycache__/util.pyc": "3",
            "project/run.log": "4",
            "project/lib/deep/x.log": "5",
            "project/logbook.txt": "6",
        },
        solve="tar czf project.tar.gz --exclude=__pycache__ --exclude='*.log' project",
        check="""
            import io, tarfile
            begin()
            try:
                with tarfile.open(fileobj=io.BytesIO(data("project.tar.gz") or b""), mode="r:gz") as packed:
                    names = sorted(each.name for each in packed if each.isfile())
            except (tarfile.TarError, OSError, EOFError):
                names = []
            pay(names == ["project/lib/util.py", "project/logbook.txt", "project/main.py"])
        """,
        wrong=(
            "tar czf project.tar.gz --exclude=__pycache__ project",
            "cd project && tar czf ../project.tar.gz --exclude=__pycache__ --exclude='*.log' .",
        ),
    )


def _set_a_port() -> Problem:
    return Problem(
        name="set-a-port",
        level=2,
        category="settings",
        ask="In /app/server.ini, set `port` of the section [web] to 8443. Change no other line.",
        files={
            "server.ini": "[db]\nport = 5432\n\n[web]\nhost = 0.0.0.0\n# port = 1\nport = 8080\n\n[cache]\nport = 6379\n"
        },
        solve="sed -i '/^\\[web\\]/,/^\\[cache\\]/ s/^port = .*/port = 8443/' server.ini",
        check="""
            begin()
            right = "[db]|port = 5432||[web]|host = 0.0.0.0|# port = 1|port = 8443||[cache]|port = 6379"
            pay("|".join(lines("server.ini")) == right)
        """,
        wrong=("sed -i 's/^port = .*/port = 8443/' server.ini", "sed -i 's/port = 8080/port = 8443/; /^#/d' server.ini"),
    )


def _set_permissions() -> Problem:
    return Problem(
        name="set-permissions",
        level=2,
        category="permissions",
        ask="Below /app/site: directories get the permissions 750, files 640, and files that end in .sh get 750.",
        files={"site/index.html": "a", "site/bin/run.sh": "b", "site/bin/data.txt": "c", "site/sh": "d"},
        solve="find site -type d -exec chmod 750 {} +; find site -type f -exec chmod 640 {} +; chmod 750 site/bin/run.sh",
        check="""
            begin()
            names = ("site", "site/bin", "site/index.html", "site/bin/run.sh", "site/bin/data.txt", "site/sh")
            pay([mode(name) for name in names] == [0o750, 0o750, 0o640, 0o750, 0o640, 0o640])
        """,
        wrong=("chmod -R 750 site", "chmod -R 640 site; chmod 750 site site/bin site/bin/run.sh site/sh"),
    )


def _unify_line_ends() -> Problem:
    return Problem(
        name="unify-line-ends",
        level=2,
        category="text",
        ask=(
            "The files below /app/docs that end in .txt have lines that end in CR LF, and may be encoded as "
            "Latin-1. Make all of them UTF-8 with lines that end in LF. Some are UTF-8 already. Other files "
            "stay as they are."
        ),
        files={
            "docs/a.txt": "caf\xe9\r\nna\xefve\r\n".encode("latin-1"),
            "docs/b.txt": "caf\xe9\r\n".encode(),
            "docs/c.bin": b"\xff\r\n",
            "docs/deep/d.txt": b"plain\r\n",
        },
        solve="""
            find docs -name '*.txt' | while read -r f; do
              iconv -f utf-8 -t utf-8 "$f" >/dev/null 2>&1 || { iconv -f latin1 -t utf-8 "$f" > /tmp/x; cat /tmp/x > "$f"; }
              sed -i 's/\\r$//' "$f"
            done
        """,
        check="""
            begin()
            right = {"a.txt": "caf\\xe9\\nna\\xefve\\n".encode(), "b.txt": "caf\\xe9\\n".encode(), "c.bin": b"\\xff\\r\\n"}
            right["deep/d.txt"] = b"plain\\n"
            pay({name: data("docs/" + name) for name in tree("docs")} == right)
        """,
        wrong=(
            "find docs -type f -exec sed -i 's/\\r$//' {} +",
            "find docs -name '*.txt' | while read -r f; do iconv -f latin1 -t utf-8 \"$f\" | tr -d '\\r' > /tmp/x; "
            'cat /tmp/x > "$f"; done',
        ),
    )
