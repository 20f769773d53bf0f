"""Pipes, sockets, terminals, and descriptors that count, wait or signal."""

# ruff: noqa: E501  (programs for the guest are text)
from __future__ import annotations

from tests.kinds.kind import Kind

_PAIR = "a, b = socket.socketpair(); "
_DATAGRAMS = "a, b = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM); "
_UNIX = "s = socket.socket(socket.AF_UNIX); s.bind({0}); s.listen(); "
_KNOCK = "c = socket.socket(socket.AF_UNIX); c.connect({0}); d, _ = s.accept(); c.send(b'x') == 1 and d.recv(1) == b'x'"
_TCP = "s = socket.create_server(('127.0.0.1', 0)); "
_CONNECTED = _TCP + "c = socket.create_connection(s.getsockname()); d, _ = s.accept(); "
_CALL = "c = socket.create_connection(s.getsockname()[:2]); d, _ = s.accept(); c.send(b'x') == 1 and d.recv(1) == b'x'"
_UDP = (
    "a = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); a.bind(('127.0.0.1', 0)); a.settimeout(3)\n"
    "b = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); b.connect(a.getsockname()); "
)
_EPOLL = "r, w = os.pipe(); s = select.epoll(); "
_FILL = "c.setblocking(False); n = 0\ntry:\n    while True: n += c.send(b'y' * 65536)\nexcept BlockingIOError: pass"
_DRAIN = "d.settimeout(5); got = 0\nwhile got < n: got += len(d.recv(1 << 20))\ngot == n"
_NAMED = "process 1 (python): descriptor"

SOCKETS: dict[str, Kind] = {
    # ---- pipes --------------------------------------------------------------------------------------------------
    "pipe": Kind(
        "r, w = os.pipe(); os.write(w, b'held')",
        "os.read(r, 9) == b'held' and os.write(w, b'x') == 1 and os.read(r, 1) == b'x'",
        fork="pipe:",
    ),
    "pipe, closed at one end": Kind(
        "r, w = os.pipe(); os.write(w, b'held'); os.close(w)",
        "os.read(r, 9) == b'held' and os.read(r, 9) == b''",
        fork="pipe:",
    ),
    "large pipe": Kind(
        "r, w = os.pipe2(os.O_NONBLOCK); fcntl.fcntl(w, 1031, 1 << 20); os.write(w, b'x' * 300000)",
        "len(os.read(r, 1 << 20)) == 300000 and not os.get_blocking(r)",
        fork="pipe:",
    ),
    "pipe of packets": Kind(
        "r, w = os.pipe2(os.O_DIRECT); os.write(w, b'held')",
        "os.read(r, 9) == b'held'",
        fork="pipe:",
        criu=f"{_NAMED}|packet mode",
    ),
    "pipe that signals": Kind(
        "r, w = os.pipe2(os.O_NONBLOCK); n = []; signal.signal(29, lambda *a: n.append(1))\n"
        "fcntl.fcntl(r, fcntl.F_SETOWN, 1); fcntl.fcntl(r, fcntl.F_SETFL, os.O_NONBLOCK | os.O_ASYNC)",
        "os.write(w, b'x'); n == [1]",
        fork="pipe:",
    ),
    "named pipe": Kind(
        "os.mkfifo('p'); s = os.open('p', os.O_RDWR); os.write(s, b'held')",
        "os.read(s, 9) == b'held'",
        fork="p",
    ),
    "named pipe below /dev": Kind(
        "os.mkfifo('/dev/p'); s = os.open('/dev/p', os.O_RDWR)", "os.write(s, b'x') == 1", fork="p"
    ),
    # ---- unix sockets -------------------------------------------------------------------------------------------
    "unix sockets": Kind(
        _PAIR + "a.send(b'held')",
        "b.recv(9) == b'held' and b.send(b'r') == 1 and a.recv(1) == b'r'",
        fork="socket:",
    ),
    "unix datagrams": Kind(_DATAGRAMS, "a.send(b'm') == 1 and b.recv(9) == b'm'", fork="socket:"),
    "unix datagrams that wait": Kind(
        _DATAGRAMS + "a.send(b'one'); a.send(b'two')",
        "(b.recv(9), b.recv(9)) == (b'one', b'two')",
        fork="socket:",
    ),
    "unix datagrams to a name": Kind(
        "a = socket.socket(1, 2); a.bind('n'); b = socket.socket(1, 2); b.connect('n'); b.send(b'm')",
        "a.recv(9) == b'm' and b.send(b'n') == 1 and a.recv(9) == b'n'",
        fork="socket:",
    ),
    "unix packets": Kind(
        "a, b = socket.socketpair(1, socket.SOCK_SEQPACKET); a.send(b'one'); a.send(b'two')",
        "(b.recv(9), b.recv(9)) == (b'one', b'two')",
        fork="socket:",
    ),
    "unix socket whose peer has gone": Kind(
        _PAIR + "a.send(b'x'); a.close()", "(b.recv(9), b.recv(9)) == (b'x', b'')", fork="socket:"
    ),
    "unix socket that was shut down": Kind(
        _PAIR + "a.shutdown(socket.SHUT_WR)",
        "b.recv(9) == b'' and b.send(b'q') == 1 and a.recv(1) == b'q'",
        fork="socket:",
    ),
    "unix socket that is full": Kind("c, d = socket.socketpair(); " + _FILL, _DRAIN, fork="socket:"),
    "unix server": Kind(_UNIX.format("'/tmp/u'"), _KNOCK.format("'/tmp/u'"), fork="socket:"),
    "unix server of a relative name": Kind(_UNIX.format("'u'"), _KNOCK.format("'u'"), fork="socket:"),
    "unix server of an abstract name": Kind(_UNIX.format("'\\0u'"), _KNOCK.format("'\\0u'"), fork="socket:"),
    "unix connection": Kind(
        _UNIX.format("'u'") + "c = socket.socket(1); c.connect('u'); d, _ = s.accept(); c.send(b'x')",
        "d.recv(1) == b'x' and d.send(b'y') == 1 and c.recv(1) == b'y'",
        fork="socket:",
    ),
    "unix connection whose name is deleted": Kind(
        _UNIX.format("'u'")
        + "c = socket.socket(1); c.connect('u'); d, _ = s.accept(); os.remove('u'); c.send(b'x')",
        "d.recv(1) == b'x' and not os.path.exists('u')",
        fork="socket:",
    ),
    "unix connection to be accepted": Kind(
        _UNIX.format("'u'") + "c = socket.socket(1); c.connect('u')",
        "d, _ = s.accept(); c.send(b'x'); d.recv(1) == b'x'",
        fork="socket:",
    ),
    "unix connection to be accepted, with data": Kind(
        _UNIX.format("'u'") + "c = socket.socket(1); c.connect('u'); c.send(b'x')",
        "d, _ = s.accept(); d.recv(1) == b'x'",
        fork="socket:",
        criu=_NAMED,  # criu's own words, with the holder added
    ),
    "descriptor under way": Kind(
        _PAIR + "r, w = os.pipe(); os.write(w, b'held'); socket.send_fds(a, [b'm'], [r]); os.close(r)",
        "m, f, _, _ = socket.recv_fds(b, 9, 1); os.read(f[0], 20) == b'held'",
        fork="socket:|pipe:",
    ),
    "credentials under way": Kind(
        _DATAGRAMS + "b.setsockopt(1, socket.SO_PASSCRED, 1); a.send(b'm')",
        "b.recv(9) == b'm'",
        fork="socket:",
        criu=f"{_NAMED}|credentials",
    ),
    "urgent data": Kind(
        _PAIR + "a.send(b'o', socket.MSG_OOB)",
        "b.recv(1, socket.MSG_OOB) == b'o'",
        fork="socket:",
        criu=f"{_NAMED}|urgent",
        optional=True,
    ),
    # ---- loopback -----------------------------------------------------------------------------------------------
    "tcp server": Kind(_TCP, _CALL, fork="socket:"),
    "tcp server on IPv6": Kind(
        "s = socket.create_server(('::1', 0), family=socket.AF_INET6)", _CALL, fork="socket:", optional=True
    ),
    "tcp socket": Kind(
        "s = socket.socket(); s.bind(('127.0.0.1', 0))", "s.listen(); " + _CALL, fork="socket:"
    ),
    "tcp connection": Kind(
        _CONNECTED + "c.send(b'held'); d.send(b'back')",
        "(d.recv(9), c.recv(9)) == (b'held', b'back') and c.send(b'x') == 1 and d.recv(1) == b'x'",
        fork="socket:",
    ),
    "tcp connection on IPv6": Kind(
        "s = socket.create_server(('::1', 0), family=socket.AF_INET6); c = socket.create_connection(s.getsockname()[:2])\n"
        "d, _ = s.accept(); c.send(b'held')",
        "d.recv(9) == b'held' and c.send(b'x') == 1 and d.recv(1) == b'x'",
        fork="socket:",
        optional=True,
    ),
    "tcp connection on both": Kind(
        "s = socket.create_server(('', 0), family=socket.AF_INET6, dualstack_ipv6=True)\n"
        "c = socket.create_connection(('127.0.0.1', s.getsockname()[1])); d, _ = s.accept(); c.send(b'held')",
        "d.recv(9) == b'held' and d.send(b'x') == 1 and c.recv(1) == b'x'",
        fork="socket:",
        optional=True,
    ),
    "tcp connection that is full": Kind(_CONNECTED + _FILL, _DRAIN, fork="socket:"),
    "tcp connection, half closed": Kind(
        _CONNECTED + "c.send(b'held'); c.shutdown(socket.SHUT_WR)",
        "(d.recv(9), d.recv(9)) == (b'held', b'') and d.send(b'x') == 1 and c.recv(9) == b'x'",
        fork="socket:",
    ),
    "tcp connection whose peer has gone": Kind(
        _CONNECTED + "c.send(b'held'); c.close()", "(d.recv(9), d.recv(9)) == (b'held', b'')", fork="socket:"
    ),
    "tcp connection, closed": Kind(_CONNECTED + "c.close(); d.close()", _CALL, fork="socket:"),
    "tcp options": Kind(
        _CONNECTED
        + "c.setsockopt(6, socket.TCP_NODELAY, 1); c.setsockopt(1, socket.SO_KEEPALIVE, 1); c.setsockopt(6, socket.TCP_KEEPIDLE, 33)",
        "(c.getsockopt(6, socket.TCP_NODELAY), c.getsockopt(1, socket.SO_KEEPALIVE), c.getsockopt(6, socket.TCP_KEEPIDLE)) == (1, 1, 33)",
        fork="socket:",
    ),
    "tcp connection to be accepted": Kind(
        _TCP + "c = socket.create_connection(s.getsockname())",
        "d, _ = s.accept(); c.send(b'x') == 1 and d.recv(1) == b'x'",
        fork="socket:",
        criu=f"{_NAMED}|accepted",
    ),
    "tcp connection whose peer has gone, full": Kind(
        _CONNECTED + _FILL + "\nc.close()", _DRAIN, fork="socket:", criu=f"{_NAMED}|other end"
    ),
    "udp": Kind(_UDP, "b.send(b'x') == 1 and a.recv(9) == b'x'", fork="socket:"),
    "udp datagrams that wait": Kind(
        _UDP + "b.send(b'held')", "a.recv(9) == b'held'", fork="socket:", criu=f"{_NAMED}|wait to be read"
    ),
    "multicast": Kind(
        "s = socket.socket(2, 2); s.setsockopt(0, 35, socket.inet_aton('224.1.1.1') + socket.inet_aton('127.0.0.1'))",
        "s.fileno() > 2",
        fork="socket:",
        criu=f"{_NAMED}|multicast",
    ),
    "raw socket": Kind("s = socket.socket(2, 3, 1)", "s.fileno() > 2", fork="socket:"),
    "packet socket": Kind("s = socket.socket(17, 3, 3)", "s.fileno() > 2", fork="socket:", optional=True),
    "netlink": Kind("s = socket.socket(16, 3, 0); s.bind((0, 0))", "s.getsockname()[0] != 0", fork="socket:"),
    "netlink answers that wait": Kind(
        "s = socket.socket(16, 3, 0); s.bind((0, 0)); s.send(struct.pack('IHHIIB3x', 20, 18, 0x301, 1, 0, 0)); until(lambda: select.select([s], [], [], 0)[0])",
        "len(s.recv(99999)) > 20",
        fork="socket:",
        criu=f"{_NAMED}|wait to be read",
    ),
    "mptcp": Kind(
        "s = socket.socket(2, 1, 262)", "s.fileno() > 2", fork="socket:", criu=f"{_NAMED}|262", optional=True
    ),
    "vsock": Kind(
        "s = socket.socket(40, 1)", "s.fileno() > 2", fork="socket:", criu=f"{_NAMED}|VSOCK", optional=True
    ),
    "sctp": Kind(
        "s = socket.socket(2, 1, 132)", "s.fileno() > 2", fork="socket:", criu=f"{_NAMED}|132", optional=True
    ),
    "ciphers": Kind(
        "s = socket.socket(38, 5); s.bind(('hash', 'sha256'))",
        "s.fileno() > 2",
        fork="socket:",
        criu=f"{_NAMED}|ALG",
        optional=True,
    ),
    # ---- terminals ----------------------------------------------------------------------------------------------
    "terminal": Kind(
        "m, s = os.openpty(); os.write(s, b'held')",
        "os.read(m, 9) == b'held' and os.write(m, b'x\\n') == 2 and os.read(s, 9) == b'x\\n'",
        fork="terminal",
    ),
    "terminal's settings": Kind(
        "import termios, tty; m, s = os.openpty(); tty.setraw(s); fcntl.ioctl(s, termios.TIOCSWINSZ, struct.pack('4H', 31, 77, 0, 0))",
        "fcntl.ioctl(m, termios.TIOCGWINSZ, bytes(8))[:4] == struct.pack('2H', 31, 77) and os.write(m, b'x') == 1 and os.read(s, 9) == b'x'",
        fork="terminal",
    ),
    "terminal's input that waits": Kind(
        "m, s = os.openpty(); os.write(m, b'held\\n')", "os.read(s, 9) == b'held\\n'", fork="terminal"
    ),
    "terminal by its general name": Kind(
        "import pty\np, m = pty.fork()\n"
        "if p == 0:\n"
        "    t = os.open('/dev/tty', os.O_RDWR); os.write(t, b'up'); b = os.read(t, 9); os.write(t, b'got-' + b); time.sleep(600)\n"
        "q = b''\nwhile b'up' not in q: q += os.read(m, 99)",
        "os.write(m, b'hey\\n'); q = b''\nwhile b'got-hey' not in q: q += os.read(m, 99)\nTrue",
        fork="python",
        mended=True,
    ),
    "terminal whose master has gone": Kind(
        "m, s = os.openpty(); os.close(m)", "os.read(s, 1) == b''", fork="terminal"
    ),
    # ---- descriptors that count, wait or signal ---------------------------------------------------------------------
    "epoll": Kind(
        _EPOLL + "s.register(r, 1); os.write(w, b'x')", "s.poll(1) == [(r, 1)]", fork="eventpoll|pipe:"
    ),
    "epoll, once": Kind(
        _EPOLL + "s.register(r, 1 | select.EPOLLONESHOT); os.write(w, b'x'); s.poll(1)",
        "ok = s.poll(0) == []; s.modify(r, 1); ok and s.poll(1) == [(r, 1)]",
        fork="eventpoll|pipe:",
    ),
    "epoll, nested": Kind(
        _EPOLL + "s.register(r, 1); o = select.epoll(); o.register(s.fileno(), 1); os.write(w, b'x')",
        "o.poll(1) == [(s.fileno(), 1)]",
        fork="eventpoll|pipe:",
    ),
    "epoll of a closed descriptor": Kind(
        _EPOLL + "s.register(r, 1); q = os.dup(r); os.close(r); os.write(w, b'x')",
        "len(s.poll(1)) == 1",
        fork="eventpoll|pipe:",
    ),
    "eventfd": Kind("s = C.eventfd(5, 0)", "os.read(s, 8)[0] == 5", fork="eventfd"),
    "eventfd that counts down": Kind(
        "s = C.eventfd(5, 1)", "os.read(s, 8)[0] == 1", fork="eventfd", criu=f"{_NAMED}|semaphore"
    ),
    "timerfd": Kind(
        "s = C.timerfd_create(1, 0); C.timerfd_settime(s, 0, struct.pack('4q', 0, 0, 0, 300000000), None)",
        "struct.unpack('Q', os.read(s, 8))[0] >= 1",
        fork="timerfd",
    ),
    "signalfd": Kind(
        "signal.pthread_sigmask(signal.SIG_BLOCK, [10]); s = C.signalfd(-1, (ctypes.c_uint64 * 16)(1 << 9), 0); os.kill(1, 10)",
        "os.read(s, 128)[0] == 10",
        fork="signalfd",
    ),
    "pidfd": Kind("s = os.pidfd_open(1)", "signal.pidfd_send_signal(s, 0) is None", fork="pidfd"),
    "pidfd of a child": Kind(
        "p = subprocess.Popen(['sleep', '60']); s = os.pidfd_open(p.pid)",
        "signal.pidfd_send_signal(s, 9); p.wait(5) == -9",
        fork="sleep",
    ),
    "pidfd of the dead": Kind(
        "p = subprocess.Popen(['true']); s = os.pidfd_open(p.pid); p.wait()",
        "select.select([s], [], [], 1)[0] == [s]",
        fork="pidfd",
    ),
}
