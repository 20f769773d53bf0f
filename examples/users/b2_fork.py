"""B 2. Eight running copies, ep-1 ... ep-8; the base runs on; each has its own disk, memory and network rules."""

from __future__ import annotations

from sandbox_gym import Allow, Sandbox


def main() -> None:
    with Sandbox.create(name="task-base", memory="512Mi") as base:
        base.write_file("/workspace/notes", "of the base\n")
        base.run_code("answers = []")
        episodes = base.fork(8, prefix="ep-")
        print(*(episode.name for episode in episodes))
        for number, episode in enumerate(episodes):
            episode.shell(f"echo of {episode.name} >> notes")
            episode.run_code(f"answers.append({number})")
        print(episodes[7].read_text("notes").splitlines(), episodes[7].run_code("answers").value)
        print(base.read_text("notes").splitlines(), base.run_code("answers").value)
        (opened,) = base.fork(1, prefix="open-", network=Allow(["example.org"]))
        for box in (episodes[0], opened):  # 000: nobody there; 403: the rules know no such host
            asked = box.shell("curl -s -o /dev/null -w '%{http_code}' http://elsewhere.test/", timeout=20)
            print(box.name, asked.stdout)
        for box in (opened, *episodes):
            box.terminate()


if __name__ == "__main__":
    main()
