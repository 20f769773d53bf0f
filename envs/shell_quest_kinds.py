"""The quests about files and folders. Each function makes one from a generator; see also shell_quest_texts."""

from __future__ import annotations

import hashlib
import random

from sandbox_gym.envs.shell_quest_files import Entry, Files
from sandbox_gym.envs.shell_quest_making import WORDS, Quest, commits, lines, says, text


def find_file(rng: random.Random) -> Quest:
    names = rng.sample(WORDS, 9)
    token = f"{rng.choice(WORDS)}-{rng.randrange(1000, 10000)}"
    paths = [f"notes/{names[i % 3]}/{names[3 + i]}.md" for i in range(6)]
    right = rng.choice(paths)
    files = {path: text(f"{rng.choice(WORDS)} {rng.choice(WORDS)}\n") for path in paths}
    files[right] = text(f"the code is {token}\n")
    return Quest(
        "find_file",
        f"One file below notes/ holds {token}. Write its path, such as {paths[0]}, to the file answer, and copy it to "
        "found.md.",
        files,
        (f"grep -rl {token} notes > answer", 'cp "$(cat answer)" found.md'),
        (
            "ls notes > answer",
            f"grep -rc {token} notes > answer",
            "find notes -name '*.md' > answer",
            f"cp {paths[0]} found.md",
            f"echo {names[0]} > answer",
            f"rm -r {right.rpartition('/')[0]}",
            "touch found.md",
        ),
        lambda seen: says("answer", right)(seen) and says("found.md", f"the code is {token}")(seen),
    )


def fix_permissions(rng: random.Random) -> Quest:
    key, script, page = rng.sample(WORDS, 3)
    wanted = {f"keys/{key}": 0o600, f"bin/{script}.sh": 0o755, f"www/{page}.html": 0o644}
    files = {
        f"keys/{key}": text("secret\n", rng.choice((0o644, 0o666, 0o755))),
        f"bin/{script}.sh": text("#!/bin/sh\necho hello\n", rng.choice((0o644, 0o600, 0o444))),
        f"www/{page}.html": text("<p>hello\n", rng.choice((0o600, 0o400, 0o700))),
    }
    return Quest(
        "fix_permissions",
        f"Only the owner may read and write keys/{key}. Everybody may read and run bin/{script}.sh, and its owner may "
        f"write it. Everybody may read www/{page}.html, its owner may write it, nobody may run it.",
        files,
        (f"chmod 600 keys/{key}", f"chmod 755 bin/{script}.sh", f"chmod 644 www/{page}.html"),
        (
            "chmod -R 777 .",
            f"chmod 000 keys/{key}",
            f"chmod -x bin/{script}.sh",
            f"chmod go-r www/{page}.html",
            "chmod -R 644 bin keys",
            f"rm -f keys/{key}",
        ),
        lambda seen: all(path in seen and seen[path].mode == mode for path, mode in wanted.items()),
    )


def rename_files(rng: random.Random) -> Quest:
    names = rng.sample(WORDS, 7)
    files = {f"{name}.jpeg": text(f"picture {name}\n") for name in names[:4]}
    files |= {f"{name}.txt": text(f"note {name}\n") for name in names[4:]}
    return Quest(
        "rename_files",
        "Give all .jpeg files the ending .jpg, and move them into a new folder photos. Leave the rest where it is.",
        files,
        ('for f in *.jpeg; do mv "$f" "${f%.jpeg}.jpg"; done', "mkdir photos", "mv *.jpg photos/"),
        (
            "mv *.jpeg photos/",
            'for f in *.jpeg; do mv "$f" "$f.jpg"; done',
            "mv *.txt photos/",
            "rm -f *.jpeg",
            "mv *.jpg photos",
            "touch photos",
            "cp *.jpeg photos.jpg",
        ),
        lambda seen: (
            _is(seen, {f"photos/{name}.jpg": f"picture {name}\n" for name in names[:4]})
            and _is(seen, {f"{name}.txt": f"note {name}\n" for name in names[4:]})
            and not any(path.endswith(".jpeg") for path in seen)
        ),
    )


def organise(rng: random.Random) -> Quest:
    names = rng.sample(WORDS, 8)
    texts = {f"{name}.txt": f"{name}\n" for name in names[:4]}
    tables = {f"{name}.csv": f"{name},1\n" for name in names[4:]}
    return Quest(
        "organise",
        "Move all .txt files into a folder texts, and all .csv files into a folder tables.",
        {path: text(content) for path, content in (texts | tables).items()},
        ("mkdir -p texts tables", "mv *.txt texts/", "mv *.csv tables/"),
        (
            "mv *.csv texts/",
            "mv *.txt tables/",
            "cp *.txt texts/",
            "rm -f *.csv",
            "mkdir -p text table",
            "cat *.txt > texts.txt",
        ),
        lambda seen: (
            _is(seen, {f"texts/{path}": content for path, content in texts.items()})
            and _is(seen, {f"tables/{path}": content for path, content in tables.items()})
            and not any("/" not in path and entry.kind == "file" for path, entry in seen.items())
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
        "a link previous to the one before it, both as releases/vN.",
        files,
        ("rm current", f"ln -s {newest} current", f"ln -s {before} previous"),
        (
            f"ln -s {newest} previous",
            f"cp -r {newest} current",
            "mkdir current",
            f"ln -s releases/v{versions[0]} current",
            f"rm -r {newest}",
            "rm -f previous",
            "touch current",
        ),
        lambda seen: (
            seen.get("current") == Entry("link", 0o777, target=newest)
            and seen.get("previous") == Entry("link", 0o777, target=before)
            and _is(seen, {f"{newest}/version": f"{versions[-1]}\n"})
        ),
    )


def repair_copy(rng: random.Random) -> Quest:
    names = rng.sample(WORDS, 5)
    whole = {f"{name}.dat": f"{name} {rng.randrange(10**6)}\n" for name in names}
    bad = f"{rng.choice(names)}.dat"
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
            f"echo {names[0]} > bad",
            "sha256sum -c SHA256SUMS | grep OK | cut -d: -f1 > bad",
            "mv backup old",
        ),
        lambda seen: (
            _is(seen, whole)
            and says("bad", bad)(seen)
            and not any(path.startswith("backup") for path in seen)
        ),
    )


def find_commit(rng: random.Random) -> Quest:
    number, wrong = 8, rng.randrange(3, 8)
    limits = [rng.randrange(10, 90) for _ in range(number)]
    limits[wrong:] = [0] * (number - wrong)
    steps = [f"printf 'limit=%d\\nturn=%d\\n' {limit} {i} > app.conf" for i, limit in enumerate(limits)]
    return Quest(
        "find_commit",
        "In this git repository a commit set limit=0 in app.conf. Write its abbreviated hash to the file commit, and "
        'its subject, such as "change 2", to the file answer.',
        {},
        (
            "git log --format=%h -S'limit=0' -- app.conf > commit",
            'git log -1 --format=%s "$(cat commit)" > answer',
        ),
        (
            "git log -1 --format=%s > answer",
            "git log --format=%h -1 > commit",
            "git log --format=%s | tail -1 > answer",
            "git log --oneline",
            "git checkout -q HEAD~3",
            "git log --format=%h -S'limit' -- app.conf > commit",
            "git diff HEAD~1 > answer",
        ),
        lambda seen: says("answer", f"change {wrong + 1}")(seen) and "commit" in seen,
        setup=commits(steps),
    )


def restore_deleted(rng: random.Random) -> Quest:
    name, gone, other = rng.sample(WORDS, 3)
    plan = f"meet at the {rng.choice(WORDS)} at {rng.randrange(1, 24)}"
    at = rng.randrange(2, 5)
    steps = [f"echo '{plan}' > {name}.txt; echo {gone} > {other}.txt"]
    steps += [f"echo {i} >> {other}.txt" for i in range(5)]
    steps.insert(at, f"rm {name}.txt")
    return Quest(
        "restore_deleted",
        f"{name}.txt was deleted in some commit of this git repository. Bring it back as it was then, and write the "
        "abbreviated hash of the commit that deleted it to the file gone.",
        {},
        (
            f"git log --diff-filter=D --format=%h -- {name}.txt > gone",
            f'git checkout -q "$(cat gone)~1" -- {name}.txt',
        ),
        (
            f"git checkout -q HEAD -- {name}.txt",
            "git reset --hard -q",
            f"touch {name}.txt",
            "git log -1 --format=%h > gone",
            f"git show HEAD:{name}.txt > {name}.txt",
            f"echo {gone} > {name}.txt",
            "git log --oneline",
        ),
        lambda seen: says(f"{name}.txt", plan)(seen) and "gone" in seen and bool(seen["gone"].data.strip()),
        setup=commits(steps),
    )


def _is(seen: Files, wanted: dict[str, str]) -> bool:
    return all(path in seen and seen[path].data == content.encode() for path, content in wanted.items())


KINDS = (
    *(
        find_file,
        fix_permissions,
        rename_files,
        organise,
        link_release,
        repair_copy,
        find_commit,
        restore_deleted,
    ),
)
