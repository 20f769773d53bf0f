"""The quests about files and folders. Each function makes one from a generator; see also shell_quest_texts."""

from __future__ import annotations

import hashlib
import random

from sandbox_gym.envs.shell_quest_files import Entry
from sandbox_gym.envs.shell_quest_making import WORDS, Check, Quest, commits, holds, lines, says, text


def find_file(rng: random.Random) -> Quest:
    names = rng.sample(WORDS, 9)
    token = f"{rng.choice(WORDS)}-{rng.randrange(1000, 10000)}"
    paths = [f"notes/{names[i % 3]}/{names[3 + i]}.md" for i in range(6)]
    right = rng.choice(paths)
    content = f"the code is {token}\n"
    files = {path: text(f"{rng.choice(WORDS)} {rng.choice(WORDS)}\n") for path in paths}
    files[right] = text(content)
    return Quest(
        "find_file",
        f"One file below notes/ holds {token}. Write its path, such as {paths[0]}, to the file answer, copy it to "
        "found.md, and write how many bytes it has to the file size.",
        files,
        (f"grep -rl {token} notes > answer", 'cp "$(cat answer)" found.md', "wc -c < found.md > size"),
        (
            "ls notes > answer",
            f"grep -c {token} notes/*/*.md > answer",
            "ls notes/*/*.md > answer",
            "touch found.md",
            f"echo {names[0]} > answer",
            f"rm -r {right.rpartition('/')[0]}",
            "wc -l < answer > size",
        ),
        (says("answer", right), says("found.md", content), says("size", str(len(content)))),
    )


def fix_permissions(rng: random.Random) -> Quest:
    key, script, page = rng.sample(WORDS, 3)
    wanted = {"keys": 0o700, f"keys/{key}": 0o600, f"bin/{script}.sh": 0o755, f"www/{page}.html": 0o644}
    files = {
        "keys": Entry("dir", rng.choice((0o755, 0o777))),
        f"keys/{key}": text("secret\n", rng.choice((0o644, 0o666, 0o755))),
        f"bin/{script}.sh": text("#!/bin/sh\necho hello\n", rng.choice((0o644, 0o600, 0o444))),
        f"www/{page}.html": text("<p>hello\n", rng.choice((0o600, 0o400, 0o700))),
    }
    return Quest(
        "fix_permissions",
        f"Only the owner may enter the folder keys, and read and write keys/{key}. Everybody may read and run "
        f"bin/{script}.sh, and its owner may write it. Everybody may read www/{page}.html, its owner may write it, "
        "nobody may run it.",
        files,
        (
            "chmod 700 keys",
            f"chmod 600 keys/{key}",
            f"chmod 755 bin/{script}.sh",
            f"chmod 644 www/{page}.html",
        ),
        (
            "chmod -R 777 .",
            f"chmod 000 keys/{key}",
            f"chmod -x bin/{script}.sh",
            f"chmod go-r www/{page}.html",
            "chmod -R 666 www bin",
            f"rm -f keys/{key}",
        ),
        tuple(_has_mode(path, mode) for path, mode in wanted.items()),
    )


def rename_files(rng: random.Random) -> Quest:
    names = rng.sample(WORDS, 7)
    pictures, notes = names[:4], names[4:]
    files = {f"{name}.jpeg": text(f"picture {name}\n") for name in pictures}
    files |= {f"{name}.txt": text(f"note {name}\n") for name in notes}
    there = holds({f"photos/{name}.jpg": f"picture {name}\n" for name in pictures})
    here = holds({f"{name}.jpg": f"picture {name}\n" for name in pictures})
    untouched = holds({f"{name}.txt": f"note {name}\n" for name in notes})
    return Quest(
        "rename_files",
        "Give all .jpeg files the ending .jpg, move them into a new folder photos, and write their names, a line each "
        "and sorted, to index.txt. Leave the rest where it is.",
        files,
        (
            'for f in *.jpeg; do mv "$f" "${f%.jpeg}.jpg"; done',
            "mkdir photos",
            "mv *.jpg photos/",
            "ls photos > index.txt",
        ),
        (
            "mv *.jpeg photos/",
            'for f in *.jpeg; do mv "$f" "$f.jpg"; done',
            "mv *.txt photos/",
            "rm -f *.jpeg",
            "ls > index.txt",
            "touch photos",
        ),
        (
            lambda seen: here(seen) or there(seen),
            lambda seen: there(seen) and untouched(seen),
            says("index.txt", lines(sorted(f"{name}.jpg" for name in pictures))),
        ),
    )


def organise(rng: random.Random) -> Quest:
    names = rng.sample(WORDS, 10)
    number = rng.randrange(3, 7)
    texts = {f"{name}.txt": f"{name}\n" for name in names[:number]}
    tables = {f"{name}.csv": f"{name},1\n" for name in names[number:]}
    return Quest(
        "organise",
        "Move all .txt files into a folder texts, and all .csv files into a folder tables. Write how many there are in "
        "texts to the file count.",
        {path: text(content) for path, content in (texts | tables).items()},
        ("mkdir -p texts tables", "mv *.txt texts/", "mv *.csv tables/", "ls texts | wc -l > count"),
        (
            "mv *.csv texts/",
            "mv *.txt tables/",
            "cp *.txt texts/",
            "rm -f *.csv",
            "mkdir -p text table",
            "ls | wc -l > count",
        ),
        (
            _moved("texts", texts),
            _moved("tables", tables),
            lambda seen: _moved("texts", texts)(seen) and says("count", str(number))(seen),
        ),
    )


def link_release(rng: random.Random) -> Quest:
    versions = sorted(rng.sample(range(1, 10), 4))
    before, newest = f"releases/v{versions[-2]}", f"releases/v{versions[-1]}"
    files = {f"releases/v{v}/version": text(f"{v}\n") for v in versions}
    files["current"] = Entry("link", 0o777, target="releases/v0")
    return Quest(
        "link_release",
        "The link current points to a release that is gone. Make it point to the newest folder in releases/, and make "
        "a link previous to the one before it, both as releases/vN. Copy the file version of the newest to here.",
        files,
        (
            "rm current",
            f"ln -s {newest} current",
            f"ln -s {before} previous",
            "cp current/version version",
        ),
        (
            f"ln -s {newest} previous",
            f"cp -r {newest} current",
            "mkdir current",
            f"ln -s releases/v{versions[0]} current",
            f"rm -r {newest}",
            "cp previous/version version",
        ),
        (
            lambda seen: seen.get("current") == _link(newest) and f"{newest}/version" in seen,
            lambda seen: seen.get("previous") == _link(before),
            says("version", str(versions[-1])),
        ),
    )


def repair_copy(rng: random.Random) -> Quest:
    names = rng.sample(WORDS, 5)
    whole = {f"{name}.dat": f"{name} {rng.randrange(10**6)}\n" for name in names}
    bad = f"{rng.choice(names[1:])}.dat"
    files = {path: text(content) for path, content in whole.items()}
    files |= {f"backup/{path}": text(content) for path, content in whole.items()}
    files[bad] = text(whole[bad].swapcase())
    sums = [f"{hashlib.sha256(content.encode()).hexdigest()}  {path}" for path, content in whole.items()]
    files["SHA256SUMS"] = text(lines(sums))
    return Quest(
        "repair_copy",
        "One .dat file is not what SHA256SUMS says. Write its name to the file bad, put the one from backup/ in its "
        "place, then delete backup/.",
        files,
        (
            "sha256sum -c SHA256SUMS 2>/dev/null | grep FAILED | cut -d: -f1 > bad",
            'cp "backup/$(cat bad)" .',
            "rm -r backup",
        ),
        (
            "sha256sum *.dat > SHA256SUMS",
            "rm *.dat",
            "ls *.dat > bad",
            f"echo {names[0]}.dat > bad",
            "sha256sum -c SHA256SUMS | grep OK | cut -d: -f1 > bad",
            "mv backup old",
        ),
        (
            says("bad", bad),
            holds(whole),
            lambda seen: holds(whole)(seen) and not any(path.startswith("backup") for path in seen),
        ),
    )


def find_commit(rng: random.Random) -> Quest:
    number, wrong = 8, rng.randrange(3, 7)
    limits = [0 if i >= wrong else rng.randrange(10, 90) for i in range(number)]
    states = [(f"limit={limit}", f"turn={i}") for i, limit in enumerate(limits)]
    steps = [f"printf '%s\\n' {' '.join(state)} > app.conf" for state in states]
    return Quest(
        "find_commit",
        'In this git repository a commit set limit=0 in app.conf. Write its subject, such as "change 2", to the file '
        "answer, and app.conf as it was before that commit to old.conf.",
        {},
        (
            "git log --format=%h -S'limit=0' -- app.conf > commit",
            'git log -1 --format=%s "$(cat commit)" > answer',
            'git show "$(cat commit)~1:app.conf" > old.conf',
        ),
        (
            "git log -1 --format=%s > answer",
            "git log --format=%h -1 > commit",
            "git log --format=%s | tail -1 > answer",
            "git log --oneline",
            "git checkout -q HEAD~1",
            "git log --format=%h -S'limit' -- app.conf > commit",
            "git show HEAD~1:app.conf > old.conf",
        ),
        (says("answer", f"change {wrong + 1}"), says("old.conf", lines([*states[wrong - 1]]))),
        setup=commits(steps),
    )


def restore_deleted(rng: random.Random) -> Quest:
    name, other = rng.sample(WORDS, 2)
    plan = f"meet at the {rng.choice(WORDS)} at {rng.randrange(1, 24)}"
    at = rng.randrange(2, 5)
    steps = [f"echo '{plan}' > {name}.txt; echo 0 > {other}.txt"]
    steps += [f"echo {i} >> {other}.txt" for i in range(5)]
    steps.insert(at, f"rm {name}.txt")
    return Quest(
        "restore_deleted",
        f"{name}.txt was deleted in some commit of this git repository. Bring it back as it was, and write the subject "
        'of the commit that deleted it, such as "change 2", to the file when.',
        {},
        (
            f"git log --diff-filter=D --format=%h -- {name}.txt > gone",
            f'git checkout -q "$(cat gone)~1" -- {name}.txt',
            'git log -1 --format=%s "$(cat gone)" > when',
        ),
        (
            f"git checkout -q HEAD -- {name}.txt",
            "git reset --hard -q",
            f"touch {name}.txt",
            "git log -1 --format=%h > gone",
            f"git show HEAD:{name}.txt > {name}.txt",
            "git log -1 --format=%s > when",
            "git log --oneline",
        ),
        (says(f"{name}.txt", plan), says("when", f"change {at + 1}")),
        setup=commits(steps),
    )


def _has_mode(path: str, mode: int) -> Check:
    return lambda seen: path in seen and seen[path].mode == mode


def _link(target: str) -> Entry:
    return Entry("link", 0o777, target=target)


def _moved(folder: str, files: dict[str, str]) -> Check:
    """All are in the folder, and no longer beside it."""
    there = holds({f"{folder}/{path}": content for path, content in files.items()})
    return lambda seen: there(seen) and not any(path in seen for path in files)


KINDS = (
    *(find_file, fix_permissions, rename_files, organise),
    *(link_release, repair_copy, find_commit, restore_deleted),
)
