"""Threads, children, signals, timers and namespaces."""

# ruff: noqa: E501  (programs for the guest are text)
from __future__ import annotations

from tests.kinds.kind import Kind

_SLEEP = "p = subprocess.Popen(['sleep', '60']); "
_RUNS = "p.poll() is None and open(f'/proc/{p.pid}/comm').read() == 'sleep\\n'"
_OWN = "os.readlink(f'/proc/{p}/ns/{0}') != os.readlink('/proc/1/ns/{0}')"
_PROCESS_2 = "process 2 (python)"

PROCESSES: dict[str, Kind] = {
    "nothing": Kind("x = 1", "x == 1"),
    "clocks": Kind("x = time.monotonic()", "0 < time.monotonic() - x < 60"),
    # ---- threads and children -----------------------------------------------------------------------------------
    "thread": Kind("q = []; thread(q.append)", "finish() and q == [False, True]", fork="2 threads"),
    "child": Kind(_SLEEP, _RUNS, fork="sleep"),
    "child of another user": Kind(
        "p = subprocess.Popen(['sleep', '60'], user=65534, group=65534, extra_groups=[])",
        "'Uid:\\t65534' in open(f'/proc/{p.pid}/status').read() and " + _RUNS,
        fork="sleep",
    ),
    "child, stopped": Kind(
        _SLEEP + "os.kill(p.pid, 19); os.waitpid(p.pid, os.WUNTRACED)",
        "ok = open(f'/proc/{p.pid}/stat').read().split()[2] == 'T'; os.kill(p.pid, 18); os.waitpid(p.pid, os.WCONTINUED); ok",
        fork="sleep",
    ),
    "child that reads": Kind(
        "p = subprocess.Popen(['sh', '-c', 'read x; echo got $x'], stdin=subprocess.PIPE, stdout=subprocess.PIPE)",
        "p.stdin.write(b'hi\\n'); p.stdin.flush(); p.stdout.readline() == b'got hi\\n'",
        fork="sh",
    ),
    "zombie": Kind(
        "p = os.fork()\nif p == 0: os._exit(7)\nos.waitid(os.P_PID, p, os.WEXITED | os.WNOWAIT)",
        "os.waitstatus_to_exitcode(os.waitpid(p, 0)[1]) == 7",
        fork="process",
    ),
    "forked child": Kind("p = child(lambda: None)", "os.kill(p, 0) is None", fork="python"),
    "children without their session's leader": Kind(
        "subprocess.run(['setsid', 'sh', '-c', 'sleep 60 & sleep 61 & exit 0'])",
        "'sleep' in ''.join(open(f'/proc/{n}/comm').read() for n in os.listdir('/proc') if n.isdigit())",
        fork="sleep",
    ),
    "memory shared with a child": Kind(
        "m = mmap.mmap(-1, 8192)\n"
        "def work():\n"
        "    if os.fork() == 0:\n"
        "        while not m[0]: time.sleep(0.002)\n"
        "        m[1] = 2; time.sleep(600)\n"
        "p = child(work)",
        "m[0] = 1; until(lambda: m[1] == 2)",
        fork="python",
    ),
    "multiprocessing": Kind(
        "import multiprocessing as n; q = n.Queue(); q.put('held'); until(lambda: not q.empty())",
        "q.get(timeout=3) == 'held'",
        fork="pipe|memory|threads",
    ),
    "child with another root": Kind(
        "def work():\n    os.makedirs('/tmp/r/x'); os.chroot('/tmp/r'); os.chdir('/')\np = child(work)",
        "os.readlink(f'/proc/{p}/root') == '/tmp/r'",
        fork="python",
    ),
    "child with mounts of its own": Kind(
        "p = child(C.unshare, 0x20000)", _OWN.replace("{0}", "mnt"), fork="python"
    ),
    # ---- what criu takes of no process ----------------------------------------------------------------------------
    "child with a network of its own": Kind(
        "p = child(C.unshare, 0x40000000)",
        _OWN.replace("{0}", "net"),
        fork="python",
        criu=f"{_PROCESS_2}|net",
    ),
    "child with a name of its own": Kind(
        "p = child(C.unshare, 0x4000000)", _OWN.replace("{0}", "uts"), fork="python", criu=f"{_PROCESS_2}|uts"
    ),
    "child with queues of its own": Kind(
        "p = child(C.unshare, 0x8000000)", _OWN.replace("{0}", "ipc"), fork="python", criu=f"{_PROCESS_2}|ipc"
    ),
    "child with pids of its own": Kind(
        "def work():\n    C.unshare(0x20000000)\n    if os.fork() == 0: time.sleep(600)\np = child(work)",
        "os.kill(p, 0) is None",
        fork="python",
        criu="process|pid",
    ),
    "children to have pids of their own": Kind(
        "C.unshare(0x20000000)", "True", fork="pid namespace", criu="process 1 (python)|pid namespace"
    ),
    "thread with descriptors of its own": Kind(
        "q = []\ndef work(again):\n    C.unshare(0x400); q.append(os.open('own', os.O_RDWR | os.O_CREAT))\nthread(work)",
        "finish()",
        fork="2 threads",
        criu="process 1 (python)|descriptors of its own",
    ),
    "thread with a folder of its own": Kind(
        "def work(again):\n    C.unshare(0x200); os.chdir('/etc')\nthread(work)",
        "finish()",
        fork="2 threads",
        criu="process 1 (python)|folder of its own",
    ),
    "traced child": Kind(
        "p = os.fork()\nif p == 0: C.ptrace(0, 0, 0, 0); os.kill(os.getpid(), 19); os._exit(0)\nos.waitpid(p, 0)",
        "os.kill(p, 9) is None and os.waitpid(p, 0)[0] == p",
        fork="python",
        criu=f"{_PROCESS_2}|traced",
    ),
    "child that is being started": Kind(
        "p = os.fork()\n"
        "if p == 0:\n"
        "    C.prctl(1, 9)\n"
        "    n = C.vfork()\n"
        "    C.sleep(600) if n == 0 else None\n"
        "    os._exit(0)\n"
        "until(lambda: open(f'/proc/{p}/stat').read().split()[2] == 'D')",
        "os.kill(p, 9) is None and os.waitpid(p, 0)[0] == p",
        fork="python",
        criu="process|vfork",
    ),
    # ---- signals and timers -----------------------------------------------------------------------------------------
    "pending signal": Kind(
        "q = []; signal.signal(10, lambda *a: q.append(1)); signal.pthread_sigmask(signal.SIG_BLOCK, [10]); os.kill(1, 10)",
        "signal.pthread_sigmask(signal.SIG_UNBLOCK, [10]); q == [1]",
        fork="signal is pending",
    ),
    "alarm": Kind(
        "q = []; signal.signal(14, lambda *a: q.append(1)); signal.setitimer(signal.ITIMER_REAL, 0.6)",
        "until(lambda: q == [1])",
        fork="timer",
    ),
    "timer of its own time": Kind(
        "signal.setitimer(signal.ITIMER_PROF, 100)",
        "90 < signal.getitimer(signal.ITIMER_PROF)[0] < 101",
        fork="timer",
    ),
    "POSIX timer": Kind(
        "q = []; signal.signal(14, lambda *a: q.append(1)); t = ctypes.c_void_p(); v = (ctypes.c_int * 16)(0, 0, 14, 0)\n"
        "assert C.timer_create(1, v, ctypes.byref(t)) == 0 == C.timer_settime(t, 0, struct.pack('4q', 0, 0, 1, 0), None)",
        "until(lambda: q == [1])",
        fork="POSIX timer",
    ),
}
