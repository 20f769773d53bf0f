"""B 10. Closed unless opened: set-up reaches the hosts on its list, rollouts reach nothing, and fetch no answers."""

from __future__ import annotations

import http.server
import threading

from sandbox_gym import Allow, Sandbox


class Index(http.server.BaseHTTPRequestHandler):
    """Stands for a package index, on this machine's loopback."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"a package\n")

    def log_message(self, format: str, *args: object) -> None:
        pass


def main() -> None:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Index)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    index = Allow(services={"index:80": f"127.0.0.1:{server.server_port}"})
    with Sandbox.create(name="task-base", network=index) as base:
        print("set-up:", base.shell("curl -s http://index/ | tee package").stdout.strip())
        print("set-up, elsewhere:", base.shell("curl -sf http://answers.test/", timeout=20).ok)
        (rollout,) = base.fork(1, prefix="rollout-", network=None)
        with rollout:
            print("rollout has", rollout.read_text("package").strip())
            print("rollout fetches:", rollout.shell("curl -sf http://index/", timeout=20).ok)
            print("rollout, by address:", rollout.shell("curl -sf http://192.0.2.1/", timeout=20).ok)
        print([(record.host, record.verdict) for record in base.network_log()])
    server.shutdown()
    server.server_close()


if __name__ == "__main__":
    main()
