"""The quests about what is in files. Each function makes one from a generator."""

from __future__ import annotations

import base64
import codecs
import random

from sandbox_gym.envs.shell_quest_making import WORDS, Quest, gz, holds, lines, says, tar_gz, text


def count_errors(rng: random.Random) -> Quest:
    def log(n: int) -> list[str]:
        return [f"{rng.choice(('INFO', 'ERROR', 'WARN', 'error'))} {rng.choice(WORDS)}" for _ in range(n)]

    old, new = [*log(rng.randrange(12, 30)), "ERROR end"], ["ERROR start", *log(rng.randrange(12, 30))]
    errors = sum(line.startswith("ERROR") for line in old + new)
    return Quest(
        "count_errors",
        "Unpack old.log.gz. Write the lines of old.log, and after them those of new.log, to all.txt, and how many of "
        "these begin with ERROR to the file answer.",
        {"new.log": text(lines(new)), "old.log.gz": gz(lines(old).encode())},
        ("gunzip old.log.gz", "cat old.log new.log > all.txt", "grep -c ^ERROR all.txt > answer"),
        (
            "grep -c ^ERROR new.log > answer",
            "wc -l < new.log > answer",
            "grep -ci error all.txt > answer",
            "rm -f old.log.gz",
            "cat new.log > all.txt",
            "grep -c ^ERROR old.log > answer",
            "zcat old.log.gz",
        ),
        (says("old.log", lines(old)), says("all.txt", lines(old + new)), says("answer", str(errors))),
    )


def merge_archives(rng: random.Random) -> Quest:
    words = rng.sample(WORDS, rng.randrange(12, 18))
    a, b = rng.sample(words[:9], 9), rng.sample(words[5:], len(words) - 5)
    return Quest(
        "merge_archives",
        "Unpack a.tar.gz and b.tar.gz. Write all the words of a.txt and b.txt, sorted, each once, to merged.txt, and "
        "how many these are to the file count.",
        {"a.tar.gz": tar_gz({"a.txt": lines(a)}), "b.tar.gz": tar_gz({"b.txt": lines(b)})},
        (
            "tar xzf a.tar.gz",
            "tar xzf b.tar.gz",
            "cat a.txt b.txt | sort -u > merged.txt",
            "wc -l < merged.txt > count",
        ),
        (
            "cat a.txt b.txt > merged.txt",
            "sort -u a.txt > merged.txt",
            "rm -f *.tar.gz",
            "tar tzf a.tar.gz",
            "sort b.txt > merged.txt",
            "mv b.tar.gz a.tar.gz",
        ),
        (
            says("a.txt", lines(a)),
            says("b.txt", lines(b)),
            says("merged.txt", lines(sorted(words))),
            says("count", str(len(words))),
        ),
    )


def fix_script(rng: random.Random) -> Quest:
    numbers = [rng.randrange(100) for _ in range(rng.randrange(5, 12))]
    script = "#!/bin/sh\ntotal=0\nfor n in $(cat amonts.txt); do\n  total=$((total + n))\ndone\necho $totl\n"
    return Quest(
        "fix_script",
        "report.sh should print the sum of the numbers in amounts.txt, but has two typing errors. Correct both, then "
        "write what it prints to report.txt.",
        {"report.sh": text(script, 0o755), "amounts.txt": text(lines([str(n) for n in numbers]))},
        (
            "sed -i 's/amonts/amounts/' report.sh",
            "sed -i 's/\\$totl/$total/' report.sh",
            "sh report.sh > report.txt",
        ),
        (
            "sed -i 's/total/totl/g' report.sh",
            "sed -i 's/echo.*/echo $n/' report.sh",
            "mv amounts.txt amount.txt",
            "chmod +x report.sh",
            f"echo {numbers[0]} > report.txt",
            "wc -l < amounts.txt > report.txt",
            "rm report.sh",
        ),
        (
            lambda seen: "report.sh" in seen and b"$(cat amounts.txt)" in seen["report.sh"].data,
            lambda seen: "report.sh" in seen and seen["report.sh"].data.endswith(b"echo $total\n"),
            says("report.txt", str(sum(numbers))),
        ),
    )


def unique_names(rng: random.Random) -> Quest:
    words = rng.sample(WORDS, 12)
    parts = {f"lists/{name}.txt": rng.choices(words, k=10) for name in ("one", "two", "three")}
    everything = [word for path in sorted(parts) for word in parts[path]]
    names = sorted(set(everything))
    return Quest(
        "unique_names",
        "Write the words of all files in lists/, file by file in the order of their names, to all.txt; the same words "
        "sorted to sorted.txt; each of them once, sorted, to names.txt; and how many these are to the file count.",
        {path: text(lines(part)) for path, part in parts.items()},
        (
            "cat lists/*.txt > all.txt",
            "sort all.txt > sorted.txt",
            "uniq sorted.txt > names.txt",
            "wc -l < names.txt > count",
        ),
        (
            "uniq all.txt > names.txt",
            "sort -r all.txt > sorted.txt",
            "cat lists/one.txt > all.txt",
            "sort -u lists/two.txt > names.txt",
            "rm -r lists",
            "wc -l < all.txt > count",
        ),
        (
            says("all.txt", lines(everything)),
            says("sorted.txt", lines(sorted(everything))),
            says("names.txt", lines(names)),
            says("count", str(len(names))),
        ),
    )


def change_port(rng: random.Random) -> Quest:
    old, new = rng.sample(range(3000, 9000), 2)
    names = rng.sample(WORDS, 3)

    def config(name: str, port: int) -> str:
        return f"name={name}\nport={port}\n"

    legacy = {"conf/legacy.conf": config("legacy", old)}
    before = {f"conf/{name}.conf": config(name, old) for name in names}
    files = {path: text(content) for path, content in (before | legacy).items()}
    files[f"conf/{names[0]}.conf.bak"] = text("port=1\n")
    those = " ".join(before)
    return Quest(
        "change_port",
        f"Change port {old} to {new} in all files of conf/ that end in .conf, but not in legacy.conf. Delete the .bak "
        f"files there. Write the names of the changed files, as in {next(iter(before))}, sorted, to the file changed.",
        files,
        (
            f"sed -i 's/port={old}/port={new}/' {those}",
            "rm conf/*.bak",
            f"grep -l port={new} conf/*.conf > changed",
        ),
        (
            f"sed -i 's/port={old}/port={new}/' conf/*",
            f"sed -i 's/{new}/{old}/' {those}",
            "rm conf/*.conf",
            f"grep -l port={old} conf/* > changed",
            "rm conf/legacy.conf",
            f"sed -i 's/port=.*/port=/' {those}",
            "ls conf > changed",
        ),
        (
            holds({f"conf/{name}.conf": config(name, new) for name in names} | legacy),
            lambda seen: holds(legacy)(seen) and not any(path.endswith(".bak") for path in seen),
            says("changed", lines(sorted(before))),
        ),
    )


def sum_column(rng: random.Random) -> Quest:
    rows = [
        (rng.choice(WORDS), rng.randrange(2, 9), rng.randrange(10, 500)) for _ in range(rng.randrange(6, 15))
    ]
    prices = [price for _, _, price in rows]
    table = lines(["item,count,price", *(f"{item},{count},{price}" for item, count, price in rows)])
    return Quest(
        "sum_column",
        "Write the column price of sales.csv, without its head, to the file prices, its sum to the file answer, and "
        "the highest price to the file highest.",
        {"sales.csv": text(table)},
        (
            "cut -d, -f3 sales.csv > prices",
            "sed -i 1d prices",
            "awk '{ s += $1 } END { print s }' prices > answer",
            "sort -n prices | tail -1 > highest",
        ),
        (
            "cut -d, -f2 sales.csv > prices",
            "wc -l < prices > answer",
            "sort -n prices | head -1 > highest",
            "awk -F, '{ s += $2 } END { print s }' sales.csv > answer",
            "rm sales.csv",
            "sed -i '$d' prices",
        ),
        (
            says("prices", lines([str(price) for price in prices])),
            says("answer", str(sum(prices))),
            says("highest", str(max(prices))),
        ),
    )


def read_message(rng: random.Random) -> Quest:
    message = " ".join(rng.sample(WORDS, rng.randrange(3, 9)))
    moved = codecs.encode(message, "rot13")
    hidden = base64.b64encode(moved.encode() + b"\n").decode()
    return Quest(
        "read_message",
        "message.b64 is base64 of a text whose letters were each moved on by 13. Write what it decodes to to the file "
        "moved, the text to message.txt, and how many words it has to the file words.",
        {"message.b64": text(hidden + "\n")},
        (
            "base64 -d message.b64 > moved",
            "tr a-z n-za-m < moved > message.txt",
            "wc -w < message.txt > words",
        ),
        (
            "base64 -d message.b64 > message.txt",
            "tr a-z n-za-m < message.b64 > moved",
            "tr a-z b-za < moved > message.txt",
            "base64 message.b64 > moved",
            "cp message.b64 message.txt",
            "rm message.b64",
            "wc -c < message.b64 > words",
        ),
        (says("moved", moved), says("message.txt", message), says("words", str(len(message.split())))),
    )


def errors_in_order(rng: random.Random) -> Quest:
    minutes = rng.sample(range(100, 1000), 24)
    entries = [f"{minute} {rng.choice(('ERROR', 'ok'))} {rng.choice(WORDS)}" for minute in minutes]
    web, db = entries[:12], [*entries[12:], f"{min(minutes) - 1} ERROR first"]
    errors = sorted(entry for entry in web + db if "ERROR" in entry)
    return Quest(
        "errors_in_order",
        "Lines of web.log and db.log begin with a time. Write those of both, in the order of time, to sorted.log, the "
        "ones of these that have ERROR to errors.log, and how many they are to the file count.",
        {"web.log": text(lines(web)), "db.log": text(lines(db))},
        (
            "cat web.log db.log > all.log",
            "sort all.log > sorted.log",
            "grep ERROR sorted.log > errors.log",
            "wc -l < errors.log > count",
        ),
        (
            "grep ERROR web.log > errors.log",
            "sort -r all.log > sorted.log",
            "grep -v ERROR sorted.log > errors.log",
            "cat web.log > all.log",
            "sort db.log > sorted.log",
            "rm db.log",
        ),
        (
            says("sorted.log", lines(sorted(web + db))),
            says("errors.log", lines(errors)),
            says("count", str(len(errors))),
        ),
    )


KINDS = (
    *(count_errors, merge_archives, fix_script, unique_names),
    *(change_port, sum_column, read_message, errors_in_order),
)
