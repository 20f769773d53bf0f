/* Preloaded into criu, see lazy.py: its tasks get their userfaultfd from a device, where the system call is not for them.
 * They are in the sandbox's root by then; but the folder of criu's images is open, and the device lies beside it.
 *
 *   gcc -Os -fPIC -ffreestanding -fno-stack-protector -fcf-protection=none -fno-asynchronous-unwind-tables
 *     -nostdlib -shared -s -Wl,-z,noseparate-code,-z,norelro,--hash-style=sysv,--build-id=none -o X uffd.c
 */
enum { IOCTL = 16, CLOSE = 3, OPENAT = 257, USERFAULTFD = 323 };
enum { EPERM = 1, O_NONBLOCK = 04000, O_NOFOLLOW = 0400000, O_CLOEXEC = 02000000 };
enum { USERFAULTFD_IOC_NEW = 0xaa00, MOST_FDS = 1 << 20 };

int *__errno_location(void);

static long enter(long nr, long a, long b, long c, long d, long e, long f) {
  register long r10 asm("r10") = d, r8 asm("r8") = e, r9 asm("r9") = f;
  asm volatile("syscall" : "+a"(nr) : "D"(a), "S"(b), "d"(c), "r"(r10), "r"(r8), "r"(r9) : "rcx", "r11", "memory");
  return nr;
}

long syscall(long nr, long a, long b, long c, long d, long e, long f) {
  long result = enter(nr, a, b, c, d, e, f);
  for (int fd = 0; nr == USERFAULTFD && result == -EPERM && fd < MOST_FDS; fd++) {
    long device = enter(OPENAT, fd, (long)"../userfaultfd", O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK, 0, 0, 0);
    if (device < 0)
      continue;
    long made = enter(IOCTL, device, USERFAULTFD_IOC_NEW, a, 0, 0, 0);
    enter(CLOSE, device, 0, 0, 0, 0, 0);
    if (made >= 0)
      return made;
  }
  if (result >= 0 || result < -4095)
    return result;
  *__errno_location() = -result;
  return -1;
}
