"""The quests about what is in files. Each function makes one from a generator."""

from __future__ import annotations

import base64
import codecs
import random

from sandbox_gym.envs.shell_quest_making import WORDS, Quest, gz, lines, says, tar_gz, text


def count_errors(rng: random.Random) -> Quest:
    def log(n: int) -> list[str]:
        return [f"{rng.choice(('INFO', 'ERROR', 'WARN', 'error'))} {rng.choice(WORDS)}" for _ in range(n)]

    old, new = log(rng.randrange(12, 30)), log(rng.randrange(12, 30))
    errors = sum(line.startswith("ERROR") for line in old + new)
    return Quest(
        "count_errors",
        "How many lines of new.log and of old.log, which is packed, begin with ERROR? Write the number to the file "
        "answer.",
        {"new.log": text(lines(["ERROR start", *new])), "old.log.gz": gz(lines(old).encode())},
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
        says("answer", str(errors + 1)),
    )


def merge_archives(rng: random.Random) -> Quest:
    words = rng.sample(WORDS, 14)
    a, b = rng.sample(words[:9], 9), rng.sample(words[5:], 9)
    return Quest(
        "merge_archives",
        "Unpack a.tar.gz and b.tar.gz. Write all the words of a.txt and b.txt, sorted, each once, to merged.txt.",
        {"a.tar.gz": tar_gz({"a.txt": lines(a)}), "b.tar.gz": tar_gz({"b.txt": lines(b)})},
        ("tar xzf a.tar.gz", "tar xzf b.tar.gz", "cat a.txt b.txt | sort -u > merged.txt"),
        (
            "cat a.txt b.txt > merged.txt",
            "sort -u a.txt > merged.txt",
            "rm -f *.tar.gz",
            "tar tzf a.tar.gz",
            "sort b.txt > merged.txt",
            "mv b.tar.gz a.tar.gz",
        ),
        says("merged.txt", lines(sorted(words))),
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
        lambda seen: (
            says("report.txt", str(sum(numbers)))(seen)
            and b"amounts.txt" in seen["report.sh"].data
            and b"echo $total\n" in seen["report.sh"].data
            if "report.sh" in seen
            else False
        ),
    )


def unique_names(rng: random.Random) -> Quest:
    words = rng.sample(WORDS, 12)
    parts = {f"lists/{name}.txt": rng.choices(words, k=10) for name in ("one", "two", "three")}
    everything = sorted({word for part in parts.values() for word in part})
    return Quest(
        "unique_names",
        "Write every word that is in the files of lists/, sorted, each once, to names.txt; all of them as they come to "
        "all.txt.",
        {path: text(lines(part)) for path, part in parts.items()},
        ("cat lists/*.txt > all.txt", "sort all.txt > sorted.txt", "uniq sorted.txt > names.txt"),
        (
            "uniq all.txt > names.txt",
            "sort -r all.txt > sorted.txt",
            "cat lists/one.txt > all.txt",
            "sort -u lists/two.txt > names.txt",
            "rm -r lists",
            "sort all.txt | uniq -c > names.txt",
            "ls lists > names.txt",
        ),
        lambda seen: says("names.txt", lines(everything))(seen) and "all.txt" in seen,
    )


def change_port(rng: random.Random) -> Quest:
    old, new = rng.sample(range(3000, 9000), 2)
    names = rng.sample(WORDS, 3)

    def config(name: str, port: int) -> str:
        return f"name={name}\nport={port}\n"

    files = {f"conf/{name}.conf": text(config(name, old)) for name in names}
    files |= {"conf/legacy.conf": text(config("legacy", old)), f"conf/{names[0]}.conf.bak": text("port=1\n")}
    those = " ".join(f"conf/{name}.conf" for name in names)
    return Quest(
        "change_port",
        f"Change port {old} to {new} in all files of conf/ that end in .conf, but not in legacy.conf. Delete the .bak "
        "files there. Write the new port to the file port.",
        files,
        (f"sed -i 's/port={old}/port={new}/' {those}", "rm conf/*.bak", f"echo {new} > port"),
        (
            f"sed -i 's/port={old}/port={new}/' conf/*",
            f"sed -i 's/{new}/{old}/' {those}",
            "rm conf/*.conf",
            f"echo {old} > port",
            "rm conf/legacy.conf",
            f"sed -i 's/port=.*/port=/' {those}",
        ),
        lambda seen: (
            all(says(f"conf/{name}.conf", config(name, new))(seen) for name in names)
            and says("conf/legacy.conf", config("legacy", old))(seen)
            and not any(path.endswith(".bak") for path in seen)
            and says("port", str(new))(seen)
        ),
    )


def sum_column(rng: random.Random) -> Quest:
    rows = [
        (rng.choice(WORDS), rng.randrange(2, 9), rng.randrange(10, 500)) for _ in range(rng.randrange(6, 15))
    ]
    table = lines(["item,count,price", *(f"{item},{count},{price}" for item, count, price in rows)])
    return Quest(
        "sum_column",
        "Write the sum of the column price of sales.csv to the file answer, and that column, without its head, to "
        "the file prices.",
        {"sales.csv": text(table)},
        (
            "cut -d, -f3 sales.csv > prices",
            "sed -i 1d prices",
            "awk '{ s += $1 } END { print s }' prices > answer",
        ),
        (
            "cut -d, -f2 sales.csv > prices",
            "wc -l < prices > answer",
            "sed -i 1d sales.csv",
            "sort -n prices | tail -1 > answer",
            "awk -F, '{ s += $2 } END { print s }' sales.csv > answer",
            "rm sales.csv",
        ),
        lambda seen: (
            says("answer", str(sum(price for _, _, price in rows)))(seen)
            and says("prices", lines([str(price) for _, _, price in rows]))(seen)
        ),
    )


def read_message(rng: random.Random) -> Quest:
    message = " ".join(rng.sample(WORDS, 5))
    hidden = base64.b64encode(codecs.encode(message, "rot13").encode() + b"\n").decode()
    return Quest(
        "read_message",
        "message.b64 is base64 of a text whose letters were each moved on by 13. Write the text to message.txt.",
        {"message.b64": text(hidden + "\n")},
        ("base64 -d message.b64 > moved", "tr a-z n-za-m < moved > message.txt"),
        (
            "base64 -d message.b64 > message.txt",
            "tr a-z n-za-m < message.b64 > moved",
            "tr a-z b-za < moved > message.txt",
            "base64 message.b64 > moved",
            "cp message.b64 message.txt",
            "rm message.b64",
            "tr a-z A-Z < moved > message.txt",
        ),
        says("message.txt", message),
    )


def errors_in_order(rng: random.Random) -> Quest:
    minutes = rng.sample(range(100, 1000), 24)
    entries = [f"{minute} {rng.choice(('ERROR', 'ok'))} {rng.choice(WORDS)}" for minute in minutes]
    web, db = entries[:12], [f"{min(minutes) - 1} ERROR first", *entries[12:]]
    errors = sorted(entry for entry in web + db if "ERROR" in entry)
    return Quest(
        "errors_in_order",
        "Lines of web.log and db.log begin with a time. Write those of both that have ERROR, in the order of time, to "
        "errors.log.",
        {"web.log": text(lines(web)), "db.log": text(lines(db))},
        ("cat web.log db.log > all.log", "sort all.log > sorted.log", "grep ERROR sorted.log > errors.log"),
        (
            "grep ERROR all.log > errors.log",
            "sort -r all.log > sorted.log",
            "grep -v ERROR sorted.log > errors.log",
            "cat web.log > all.log",
            "grep ERROR web.log > errors.log",
            "sort db.log > sorted.log",
            "rm db.log",
        ),
        says("errors.log", lines(errors)),
    )


KINDS = (
    *(count_errors, merge_archives, fix_script, unique_names),
    *(change_port, sum_column, read_message, errors_in_order),
)
