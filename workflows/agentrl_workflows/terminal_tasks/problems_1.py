"""Level 1: one or two commands."""

from __future__ import annotations

import random

from agentrl_workflows.terminal_tasks.problem import Problem

_WORDS = "amber birch cedar delta ember flint grove heron iris jasper kelp lotus maple nectar olive pine quartz reed".split()  # noqa: SIM905 - reads better


def easy_problems() -> list[Problem]:
    """Return the problems of level 1."""
    made = (
        _count_lines,
        _line_of_a_file,
        _find_word,
        _sort_numbers,
        _make_folders,
        _rename_drafts,
        _delete_temporary,
        _make_runnable,
        _replace_word,
        _add_to_a_file,
        _first_and_last,
    )
    return [make() for make in made]


def _sentence(rng: random.Random) -> str:
    return " ".join(rng.choice(_WORDS) for _ in range(6))


def _count_lines() -> Problem:
    rng = random.Random("count-lines")
    rows = [_sentence(rng) for _ in range(317)]
    return Problem(
        name="count-lines",
        level=1,
        category="text",
        ask="Write the number of lines of /app/data.txt to /app/count.txt, as a bare number.",
        files={"data.txt": "".join(f"{row}\n" for row in rows)},
        solve="wc -l < data.txt > count.txt",
        check="begin()\npay(text('count.txt') == '317')",
        wrong=("wc -w < data.txt > count.txt", "wc -l data.txt > count.txt"),
    )


def _line_of_a_file() -> Problem:
    rng = random.Random("line-of-a-file")
    rows = [_sentence(rng) for _ in range(317)]
    return Problem(
        name="line-of-a-file",
        level=1,
        category="text",
        ask="Write line 142 of /app/data.txt, and nothing else, to /app/line.txt.",
        files={"data.txt": "".join(f"{row}\n" for row in rows)},
        solve="sed -n 142p data.txt > line.txt",
        check=f"begin()\npay(text('line.txt') == {rows[141]!r})",
        wrong=("sed -n 143p data.txt > line.txt", "head -142 data.txt > line.txt"),
    )


def _find_word() -> Problem:
    rng = random.Random("find-word")
    found = {
        f"notes/{word}.txt": _sentence(rng) + (" falcon\n" if number % 4 == 1 else "\n")
        for number, word in enumerate(_WORDS)
    }
    names = sorted(path.removeprefix("notes/") for path, text in found.items() if "falcon" in text)
    return Problem(
        name="find-word",
        level=1,
        category="files",
        ask="Which files in /app/notes contain the word falcon? Write their names (without the directory), sorted, one a "
        "line, to /app/found.txt.",
        files=found,
        solve="(cd notes && grep -l falcon *.txt | sort) > found.txt",
        check=f"begin()\npay(lines('found.txt') == {names!r})",
        wrong=("ls notes > found.txt", "grep -l falcon notes/* > found.txt"),
    )


def _sort_numbers() -> Problem:
    rng = random.Random("sort-numbers")
    numbers = [rng.randrange(5000) for _ in range(80)] * 2
    return Problem(
        name="sort-numbers",
        level=1,
        category="text",
        ask="Sort the numbers of /app/numbers.txt from small to large, each number once, and write them to /app/sorted.txt.",
        files={"numbers.txt": "".join(f"{number}\n" for number in numbers)},
        solve="sort -nu numbers.txt > sorted.txt",
        check=f"begin()\npay(lines('sorted.txt') == {[str(number) for number in sorted(set(numbers))]!r})",
        wrong=("sort -u numbers.txt > sorted.txt", "sort -n numbers.txt > sorted.txt"),
    )


def _make_folders() -> Problem:
    return Problem(
        name="make-folders",
        level=1,
        category="files",
        ask="Make the directories /app/site/css and /app/site/img/icons, and an empty file /app/site/index.html.",
        solve="mkdir -p site/css site/img/icons && touch site/index.html",
        check="""
            begin()
            places = [APP + "/site/css", APP + "/site/img/icons"]
            pay(all(os.path.isdir(place) and not os.path.islink(place) for place in places) and data("site/index.html") == b"")
        """,
        wrong=("mkdir -p site/css site/img; touch site/index.html", "mkdir -p site/css site/img/icons site/index.html"),
    )


def _rename_drafts() -> Problem:
    return Problem(
        name="rename-drafts",
        level=1,
        category="files",
        ask="In /app/posts, rename every file draft-NAME.md to NAME.md. Leave the other files and all contents as they are.",
        files={
            f"posts/{name}.md": f"# {name}\n" for name in ("draft-oak", "draft-elm", "about", "draft-ash", "my-draft-yew")
        },
        solve='cd posts && for f in draft-*; do mv "$f" "${f#draft-}"; done',
        check="""
            begin()
            names = ["about.md", "ash.md", "elm.md", "my-draft-yew.md", "oak.md"]
            pay(tree("posts") == names and text("posts/oak.md") == "# draft-oak")
        """,
        wrong=(
            'cd posts && for f in *draft-*; do mv "$f" "${f//draft-/}"; done',
            'cd posts && for f in draft-*; do cp "$f" "${f#draft-}"; done',
        ),
    )


def _delete_temporary() -> Problem:
    kept = {"tree/a/keep.txt": "1", "tree/b/notes.tmp.txt": "2", "tree/tmp/data.csv": "3"}
    gone = {"tree/x.tmp": "", "tree/a/y.tmp": "", "tree/b/c/z z.tmp": ""}
    return Problem(
        name="delete-temporary",
        level=1,
        category="files",
        ask="Delete every file below /app/tree whose name ends in .tmp, and no other file.",
        files={**kept, **gone},
        solve="find tree -name '*.tmp' -type f -delete",
        check=f"begin()\npay(tree('tree') == {sorted(path.removeprefix('tree/') for path in kept)!r})",
        wrong=("rm -f tree/*.tmp", "find tree -name '*tmp*' -delete 2>/dev/null; rm -rf tree/tmp"),
    )


def _make_runnable() -> Problem:
    return Problem(
        name="make-runnable",
        level=1,
        category="permissions",
        ask=(
            "/app/tool.sh cannot be run as a program. Let its owner run it, so that `/app/tool.sh` works; do "
            "not change its text."
        ),
        files={"tool.sh": "#!/bin/sh\necho ready\n"},
        solve="chmod u+x tool.sh",
        check="""
            begin()
            same = data("tool.sh") == b"#!/bin/sh\\necho ready\\n"
            pay(same and mode("tool.sh") & 0o100 != 0 and run(APP + "/tool.sh") == (0, "ready"))
        """,
        wrong=("sh tool.sh", "printf '#!/bin/sh\\necho ready now\\n' > tool.sh; chmod +x tool.sh"),
    )


def _replace_word() -> Problem:
    rows = ["color = red", "Color names are British here: colour", "colorful", "the color, the color"]
    right = [row.replace("color", "colour") if row != rows[2] else row for row in rows[:1]] + [
        rows[1],
        rows[2],
        "the colour, the colour",
    ]
    return Problem(
        name="replace-word",
        level=1,
        category="text",
        ask=(
            "In /app/text.txt, replace each whole word color (in lower case) by colour. Words such as "
            "colorful and Color stay."
        ),
        files={"text.txt": "\n".join([*rows, ""])},
        solve=r"sed -i 's/\bcolor\b/colour/g' text.txt",
        check=f"begin()\npay(lines('text.txt') == {right!r})",
        wrong=("sed -i s/color/colour/g text.txt", r"sed -i 's/\bcolor\b/colour/' text.txt"),
    )


def _add_to_a_file() -> Problem:
    return Problem(
        name="add-to-a-file",
        level=1,
        category="text",
        ask="Add the line `192.168.4.20 printer` at the end of /app/hosts, unless a line for printer is there already; "
        "change nothing else. Do the same with `192.168.4.9 scanner`.",
        files={"hosts": "127.0.0.1 localhost\n192.168.4.9 scanner\n192.168.4.1 router\n"},
        solve="grep -q ' printer$' hosts || echo '192.168.4.20 printer' >> hosts\n"
        "grep -q ' scanner$' hosts || echo '192.168.4.9 scanner' >> hosts",
        check="""
            begin()
            pay(data("hosts") == b"127.0.0.1 localhost\\n192.168.4.9 scanner\\n192.168.4.1 router\\n192.168.4.20 printer\\n")
        """,
        wrong=(
            "echo '192.168.4.20 printer' >> hosts; echo '192.168.4.9 scanner' >> hosts",
            "echo '192.168.4.20 printer' > hosts",
        ),
    )


def _first_and_last() -> Problem:
    return Problem(
        name="first-and-last",
        level=1,
        category="text",
        ask="Write the first two and the last two lines of /app/log.txt, in this order, to /app/ends.txt.",
        files={"log.txt": "".join(f"event {number}\n" for number in range(1, 61))},
        solve="(head -2 log.txt; tail -2 log.txt) > ends.txt",
        check="begin()\npay(lines('ends.txt') == ['event 1', 'event 2', 'event 59', 'event 60'])",
        wrong=("head -4 log.txt > ends.txt", "(tail -2 log.txt; head -2 log.txt) > ends.txt"),
    )
