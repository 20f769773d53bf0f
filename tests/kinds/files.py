"""Files and memory, open, locked, watched, mapped, or gone from their folder."""

# ruff: noqa: E501  (programs for the guest are text)
from __future__ import annotations

from tests.kinds.kind import Kind

_TEXT = "s.seek(0); s.read() == 'held'"
_OPEN = "s = open('f', 'w+'); s.write('held'); s.flush(); "
_LOCKED_OUT = (
    'code = \'import fcntl; fcntl.lockf(open("f", "w"), fcntl.LOCK_EX | fcntl.LOCK_NB)\'\n'
    "b'BlockingIOError' in subprocess.run([sys.executable, '-c', code], capture_output=True).stderr"
)
_SEEN = "open('{0}/new', 'w').close(); os.read(s, 4096)[:4] == struct.pack('i', w)"
_WATCH = (
    "s = C.inotify_init1(os.O_NONBLOCK); w = C.inotify_add_watch(s, b'{0}', 0x100); assert w > 0"  # IN_CREATE
)

FILES: dict[str, Kind] = {
    # ---- open files ---------------------------------------------------------------------------------------------
    "file": Kind("s = open('f', 'w+'); s.write('held'); s.flush()", _TEXT),
    "appended file": Kind(
        "s = open('f', 'a'); s.write('a'); s.flush()", "s.write('b'); s.flush(); open('f').read() == 'ab'"
    ),
    "duplicated file": Kind(
        "s = os.open('f', os.O_RDWR | os.O_CREAT); d = os.dup(s); os.write(s, b'ab')",
        "os.write(d, b'cd'); os.write(s, b'ef'); open('f').read() == 'abcdef'",
    ),
    "file opened twice": Kind(
        "s = os.open('f', os.O_RDWR | os.O_CREAT); d = os.open('f', os.O_RDWR); os.write(s, b'ab')",
        "os.write(d, b'cd'); os.write(s, b'ef'); open('f').read() == 'cdef'",
    ),
    "renamed file": Kind(
        _OPEN + "os.rename('f', 'g')", _TEXT + " and os.fstat(s.fileno()).st_ino == os.stat('g').st_ino"
    ),
    "file of the base": Kind(
        "s = open('/etc/passwd'); n = s.read(5)", "s.read(3) == open('/etc/passwd').read()[5:8]"
    ),
    "file of the base that is written": Kind(
        "s = open('/etc/passwd'); s.read(5); open('/etc/passwd', 'a').write('x')", "len(s.read(3)) == 3"
    ),
    "folder": Kind("s = os.open('/etc', os.O_RDONLY)", "'passwd' in os.listdir(s)"),
    "mere path": Kind("s = os.open('/etc/passwd', os.O_PATH)", "os.fstat(s).st_size > 0"),
    "mere path of a folder": Kind(
        "s = os.open('/etc', os.O_PATH)",
        "os.stat('passwd', dir_fd=s).st_ino == os.stat('/etc/passwd').st_ino",
    ),
    "mere path of a link": Kind(
        "os.symlink('/etc', 'l'); s = os.open('l', os.O_PATH | os.O_NOFOLLOW)",
        "os.readlink('', dir_fd=s) == '/etc'",
        fork="no regular file",
    ),
    "devices": Kind(
        "s = [open(f'/dev/{n}', 'rb') for n in ('null', 'zero', 'full', 'random', 'urandom')]",
        "len(s[4].read(3)) == 3",
    ),
    "file of /proc": Kind("s = open('/proc/self/status'); s.read(5)", "len(s.read()) > 99"),
    "file of /proc of a dead process": Kind(
        "p = subprocess.Popen(['sleep', '60']); s = open(f'/proc/{p.pid}/status'); p.kill(); p.wait()",
        "not os.path.exists(f'/proc/{p.pid}') and s.fileno() > 2",
        fork="can't be opened again",
    ),
    "namespace": Kind(
        "s = os.open('/proc/self/ns/net', os.O_RDONLY)",
        "os.readlink(f'/proc/self/fd/{s}') == os.readlink('/proc/self/ns/net')",
        fork="net:[",
    ),
    "working folder": Kind(
        "os.makedirs('a/b'); os.chdir('a/b'); os.rename('../../a', '../../c')", "os.getcwd()[-4:] == '/c/b'"
    ),
    "deleted working folder": Kind(
        "os.mkdir('d'); os.chdir('d'); os.rmdir('../d')",
        "os.readlink('/proc/self/cwd').endswith('d (deleted)')",
        fork="working folder is deleted",
    ),
    # ---- deleted files --------------------------------------------------------------------------------------------
    "deleted file": Kind(_OPEN + "os.remove('f')", _TEXT + " and not os.path.exists('f')", fork="deleted"),
    "deleted file below /dev": Kind(
        "s = open('/dev/f', 'w+'); os.remove('/dev/f')", "s.write('x') == 1", fork="deleted"
    ),
    "deleted file opened twice": Kind(
        _OPEN + "r = open('f'); os.remove('f'); s.write('+')",
        "s.flush(); r.read() == 'held+'",
        fork="deleted",
    ),
    "deleted file that another has replaced": Kind(
        _OPEN + "open('n', 'w').write('new'); os.rename('n', 'f')",
        "s.seek(0); (s.read(), open('f').read()) == ('held', 'new')",
        fork="deleted",
    ),
    "deleted file with another name": Kind(
        _OPEN + "os.link('f', 'g'); os.remove('f')",
        "s.seek(0); s.read() == 'held' and os.listdir() == ['g']",
        fork="deleted",
    ),
    "deleted file of the base": Kind(
        "d = '/usr/share/doc/bash/'; s = open(d + 'copyright'); s.read(10); os.remove(d + 'copyright')",
        "len(s.read(10)) == 10 and 'copyright' not in os.listdir(d) and 'remap' not in str(os.listdir(d))",
        fork="deleted",
    ),
    "deleted folder": Kind(
        "os.mkdir('d'); s = os.open('d', os.O_RDONLY); os.rmdir('d')",
        "os.fstat(s).st_nlink < 2",
        fork="deleted",
    ),
    "deleted file in a deleted folder": Kind(
        "os.mkdir('d'); s = open('d/f', 'w+'); s.write('held'); s.flush(); os.remove('d/f'); os.rmdir('d')",
        _TEXT,
        fork="deleted",
    ),
    "temporary file": Kind(
        "import tempfile; s = tempfile.TemporaryFile('w+'); s.write('held'); s.flush()", _TEXT, fork="deleted"
    ),
    "deleted file with a hole": Kind(
        "s = open('f', 'w+b'); s.seek(1 << 28); s.write(b'end'); s.flush(); os.remove('f')",
        "s.seek(1 << 28); s.read() == b'end' and os.fstat(s.fileno()).st_blocks < 100",
        fork="deleted",
    ),
    "deleted program": Kind(
        "import shutil; shutil.copy('/usr/bin/sleep', 'nap'); p = subprocess.Popen(['./nap', '60']); os.remove('nap')",
        "p.poll() is None and os.readlink(f'/proc/{p.pid}/exe').endswith('nap (deleted)')",
        fork="nap",
    ),
    # ---- locks and watches ------------------------------------------------------------------------------------------
    "flock": Kind(
        "s = open('f', 'w'); fcntl.flock(s, fcntl.LOCK_EX)",
        "'FLOCK' in open(f'/proc/self/fdinfo/{s.fileno()}').read()",
        fork="lock",
    ),
    "posix lock": Kind("s = open('f', 'w'); fcntl.lockf(s, fcntl.LOCK_EX)", _LOCKED_OUT, fork="lock"),
    "posix lock on a mapped file": Kind(
        "s = open('f', 'w+b'); s.write(bytes(8192)); s.flush(); m = mmap.mmap(s.fileno(), 8192)\n"
        "fcntl.lockf(s, fcntl.LOCK_EX, 1, 128)",
        "'POSIX' in open(f'/proc/self/fdinfo/{s.fileno()}').read()",
        fork="lock|MAP_SHARED",
        mended=True,
    ),
    "lock of an open file": Kind(
        "s = open('f', 'w'); fcntl.fcntl(s, 37, struct.pack('hhlli4x', 1, 0, 0, 0, 0))",
        _LOCKED_OUT,
        fork="lock",
    ),
    "lease": Kind(
        "open('f', 'w').close(); s = os.open('f', os.O_RDONLY); fcntl.fcntl(s, 1024, fcntl.F_RDLCK)",
        "fcntl.fcntl(s, 1025) == fcntl.F_RDLCK",
        fork="lock",
    ),
    "folder that signals": Kind(
        "n = []; signal.signal(29, lambda *a: n.append(1)); s = os.open('.', os.O_RDONLY); fcntl.fcntl(s, 1026, 4 | 1 << 31)",
        "open('x', 'w').close(); n == [1]",
        fork="F_NOTIFY",
        criu="process 1 (python): descriptor|F_NOTIFY",
    ),
    "inotify": Kind("s = C.inotify_init()", "os.close(s) is None", fork="inotify"),
    "watched folder": Kind("os.mkdir('d'); " + _WATCH.format("d"), _SEEN.format("d"), fork="inotify"),
    "watched folder, renamed": Kind(
        "os.mkdir('d'); " + _WATCH.format("d") + "; os.rename('d', 'e')", _SEEN.format("e"), fork="inotify"
    ),
    "watched folder of the base": Kind(_WATCH.format("/usr/bin"), _SEEN.format("/usr/bin"), fork="inotify"),
    "watched root": Kind(_WATCH.format("/"), _SEEN.format(""), fork="inotify"),
    "watched file": Kind(
        "open('f', 'w').close(); " + _WATCH.format("f"),
        "s > 0",
        fork="inotify",
        criu="descriptor|watches /workspace/f",
    ),
    "watched folder, deleted": Kind(
        "os.mkdir('d'); " + _WATCH.format("d") + "; k = os.open('d', 0); os.rmdir('d')",
        "s > 0",
        fork="inotify",
        criu="inotify",
    ),
    "events that wait": Kind(
        "os.mkdir('d'); " + _WATCH.format("d") + "; open('d/new', 'w').close()",
        "len(os.read(s, 4096)) == 32",
        fork="inotify",
        criu="process 1 (python): descriptor|events that wait",
    ),
    # ---- memory -----------------------------------------------------------------------------------------------------
    "private memory": Kind(
        "m = mmap.mmap(-1, 8192, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS); m[:4] = b'held'",
        "m[:4] == b'held'",
    ),
    "file mapped privately": Kind(
        "open('f', 'wb').write(b'held' * 999); s = open('f', 'rb'); m = mmap.mmap(s.fileno(), 0, prot=mmap.PROT_READ)",
        "m[:4] == b'held'",
    ),
    "locked memory": Kind(
        "m = mmap.mmap(-1, 8192, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS); a = ctypes.addressof(ctypes.c_char.from_buffer(m))\n"
        "assert C.mlock(ctypes.c_void_p(a), ctypes.c_size_t(8192)) == 0",
        "'VmLck:\\t       8 kB' in open('/proc/self/status').read()",
        fork="mlock",
    ),
    "more address space than the machine has memory, shared with a child": Kind(
        "n = 2 * os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') >> 21 << 21\n"
        "C.mmap.restype = ctypes.c_void_p; C.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]\n"
        "a = C.mmap(None, n, 0, 0x22, -1, 0); assert a not in (None, 2**64 - 1)\n"  # PROT_NONE, private, anonymous
        "def use(): assert C.mprotect(ctypes.c_void_p(a + n // 2), 8192, 3) == 0; ctypes.memset(a + n // 2, 7, 8192)\n"
        "p = child(lambda: signal.signal(10, lambda *_: (use(), os._exit(7))))",
        "use(); os.kill(p, 10); ctypes.string_at(a + n // 2, 8192) == b'\x07' * 8192 and os.waitpid(p, 0)[1] == 7 << 8",
        fork="python",
    ),
    "shared memory": Kind("m = mmap.mmap(-1, 8192); m[:4] = b'held'", "m[:4] == b'held'", fork="MAP_SHARED"),
    "shared file": Kind(
        "s = open('f', 'w+b'); s.write(bytes(8192)); s.flush(); m = mmap.mmap(s.fileno(), 8192); s.close(); m[:4] = b'held'",
        "m[:4] == b'held' == open('f', 'rb').read(4)",
        fork="MAP_SHARED",
    ),
    "shared file, deleted": Kind(
        "s = open('f', 'w+b'); s.write(bytes(8192)); s.flush(); m = mmap.mmap(s.fileno(), 8192); s.close(); os.remove('f'); m[0] = 7",
        "m[0] == 7",
        fork="deleted|MAP_SHARED",
    ),
    "named shared memory": Kind(
        "from multiprocessing import shared_memory as h; m = h.SharedMemory('n', create=True, size=64); m.buf[0] = 7",
        "o = h.SharedMemory('n'); o.buf[0] == 7",
        fork="MAP_SHARED|process",
    ),
    "memfd": Kind(
        "s = os.memfd_create('m'); os.write(s, b'held')", "os.pread(s, 9, 0) == b'held'", fork="m (deleted)"
    ),
    "sealed memfd": Kind(
        "s = os.memfd_create('m', os.MFD_ALLOW_SEALING); os.write(s, b'held'); fcntl.fcntl(s, 1033, 15)",
        "os.pread(s, 9, 0) == b'held' and fcntl.fcntl(s, 1034) == 15",
        fork="m (deleted)",
    ),
    "mapped memfd": Kind(
        "s = os.memfd_create('m'); os.ftruncate(s, 8192); m = mmap.mmap(s, 8192); m[:4] = b'held'",
        "os.pread(s, 4, 0) == b'held'",
        fork="m (deleted)|MAP_SHARED",
    ),
    "secret memory": Kind(
        "s = C.syscall(447, 0); assert s > 0; os.ftruncate(s, 4096)",
        "s > 0",
        fork="secretmem",
        criu="secretmem",
        optional=True,
    ),
    "System V memory": Kind(
        "i = C.shmget(77, 8192, 0o1666); C.shmat.restype = ctypes.c_void_p; a = C.shmat(i, None, 0); ctypes.memmove(a, b'held', 4)",
        "ctypes.string_at(a, 4) == b'held' and C.shmget(77, 8192, 0o666) == i",
        fork="MAP_SHARED",
    ),
    "System V memory that nobody has": Kind(
        "i = C.shmget(77, 8192, 0o1666); C.shmat.restype = ctypes.c_void_p; a = C.shmat(i, None, 0); ctypes.memmove(a, b'held', 4)\n"
        "C.shmdt(ctypes.c_void_p(a))",
        "ctypes.string_at(C.shmat(i, None, 0), 4) == b'held'",
        fork="System V",
    ),
    "System V semaphores": Kind(
        "i = C.semget(78, 1, 0o1666); C.semctl(i, 0, 16, 5)", "C.semctl(i, 0, 12) == 5", fork="System V"
    ),
    "System V messages": Kind(
        "i = C.msgget(79, 0o1666); C.msgsnd(i, struct.pack('q4s', 1, b'held'), 4, 0)",
        "b = ctypes.create_string_buffer(12); C.msgrcv(i, b, 4, 0, 0o4000) == 4 and b.raw[8:12] == b'held'",
        fork="System V",
    ),
    "asynchronous input and output": Kind(
        "c = ctypes.c_ulong(); assert C.syscall(206, 8, ctypes.byref(c)) == 0",
        "C.syscall(207, c) == 0",
        fork="aio",
    ),
    # ---- mounts and roots -------------------------------------------------------------------------------------------
    "mount": Kind(
        "os.mkdir('/mnt/t'); assert C.mount(b't', b'/mnt/t', b'tmpfs', 14, None) == 0; open('/mnt/t/f', 'w').write('held')",
        "open('/mnt/t/f').read() == 'held'",
        fork="/mnt/t",
    ),
}
