/* The part of remap.py that runs while every other thread of the process stands still: no library, no lock, no
 * allocation. Its machine code lies in remap.py. After a change here:
 *
 *   gcc -Os -fPIC -ffreestanding -mgeneral-regs-only -fno-stack-protector -fcf-protection=none
 *     -fno-asynchronous-unwind-tables -fno-toplevel-reorder -nostdlib -shared -Wl,-z,noseparate-code -o X remap.c
 *   objcopy -O binary -j .text X CODE
 */
typedef unsigned long word;
enum { FSTAT = 5, LSEEK = 8, MMAP, MPROTECT, BRK = 12, SIGACTION, SIGPROCMASK, PREAD = 17, MREMAP = 25, GETPID = 39,
       PRCTL = 157, GETTID = 186, FUTEX = 202, GETDENTS = 217, TGKILL = 234 };
enum { EIO = 5, EAGAIN = 11, ETIMEDOUT = 110 };
enum { PROT_READ = 1, PROT_WRITE, MAP_PRIVATE = 2, MAP_FIXED = 0x10, MAP_ANONYMOUS = 0x20 };
enum { MREMAP_MAYMOVE = 1, MREMAP_FIXED };
enum { FUTEX_WAIT = 128, FUTEX_WAKE = 129 }; /* private */
enum { SA_RESTORER = 1 << 26, SA_ONSTACK = 1 << 27, SA_RESTART = 1 << 28 };
enum { PAGE = 4096, PATIENCE = 500 }; /* waits of 2 ms */

struct area { long start, length, protection, flags, fd, offset; }; /* fd -1: it becomes anonymous */
struct plan {
  struct area *areas;
  long count;
  const char *expected; /* the lines of /proc/self/maps that have an inode */
  long expected_size;
  char *buffer;
  long size;
  int *signalled;
  long most_threads;
  long maps, pagemap, memory, tasks; /* files of /proc/self, open */
  long signal;
  long exe_fd;     /* -1: the exe link stays */
  long mm_map[13]; /* struct prctl_mm_map */
};
struct action { void *handler; word flags; void *restorer; word mask; };

/* Only the registers that a call reads. */
#define SYS static inline __attribute__((always_inline)) long
#define ENTER(...) asm volatile("syscall" : "+a"(nr) : __VA_ARGS__ : "rcx", "r11", "memory"); return nr
SYS call3(long nr, long a, long b, long c) { ENTER("D"(a), "S"(b), "d"(c)); }
SYS call4(long nr, long a, long b, long c, long d) {
  register long r10 asm("r10") = d;
  ENTER("D"(a), "S"(b), "d"(c), "r"(r10));
}
SYS call6(long nr, long a, long b, long c, long d, long e, long f) {
  register long r10 asm("r10") = d, r8 asm("r8") = e, r9 asm("r9") = f;
  ENTER("D"(a), "S"(b), "d"(c), "r"(r10), "r"(r8), "r"(r9));
}

static long threads(struct plan *), park(struct plan *), unchanged(struct plan *), move(struct plan *);
static void release(struct plan *, struct action *), handler(int);
void restorer(void) __attribute__((visibility("hidden")));
/* round: odd while threads are to stand still. parked: how many do. */
extern volatile struct { int round, parked; } gate __attribute__((visibility("hidden")));

/* 0, or -(where << 12 | errno). where: 0 before anything was moved, i + 1 at areas[i], count + 1 at the exe link. */
long remap(struct plan *p) {
  word all = ~0UL, before;
  struct action old, mine;
  call4(SIGPROCMASK, 2, (long)&all, (long)&before, 8); /* what a handler writes in between could get lost */
  int alone = threads(p) == 1;
  long result = 0;
  if (!alone) {
    mine.handler = handler; /* one by one: an initialiser would be data, outside of the code */
    mine.flags = SA_ONSTACK | SA_RESTART | SA_RESTORER;
    mine.restorer = restorer;
    mine.mask = all;
    gate.parked = 0;
    __atomic_add_fetch(&gate.round, 1, __ATOMIC_SEQ_CST);
    call4(SIGACTION, p->signal, (long)&mine, (long)&old, 8);
    result = park(p);
  }
  if (!result) result = unchanged(p);
  if (!result) result = move(p);
  if (!alone) release(p, &old);
  call4(SIGPROCMASK, 2, (long)&before, 0, 8);
  return result;
}

static int failed(long r) { return (word)r > -4096UL; }

/* The link count of the folder: exact, where a listing may miss one while another ends. */
static long threads(struct plan *p) {
  long st[18];
  call3(FSTAT, p->tasks, (long)st, 0);
  return st[2] - 2;
}

static long park(struct plan *p) {
  long self = call3(GETTID, 0, 0, 0), pid = call3(GETPID, 0, 0, 0), sent = 0, waits = 0, got;
  const long pause[2] = {0, 2000000};
  for (;;) {
    int parked = gate.parked; /* before the count, which has what any of these had made */
    if (threads(p) - 1 == parked) return 0;
    call3(LSEEK, p->tasks, 0, 0);
    while ((got = call3(GETDENTS, p->tasks, (long)p->buffer, p->size)) > 0)
      for (char *entry = p->buffer; entry < p->buffer + got; entry += *(unsigned short *)(entry + 16)) {
        long tid = 0, i = 0;
        for (char *c = entry + 19; *c > '.'; c++) tid = tid * 10 + *c - '0';
        while (i < sent && p->signalled[i] != tid) i++;
        if (i < sent || tid == 0 || tid == self) continue;
        if (sent == p->most_threads) return -EAGAIN;
        p->signalled[sent++] = tid;
        call3(TGKILL, pid, tid, p->signal); /* one that has ended is counted no more either */
      }
    got = call4(FUTEX, (long)&gate.parked, FUTEX_WAIT, parked, (long)pause);
    if (got == -ETIMEDOUT && ++waits == PATIENCE) return got;
  }
}

static void handler(int signal) {
  int round = gate.round;
  if (!(round & 1)) return; /* late: all is over */
  __atomic_add_fetch(&gate.parked, 1, __ATOMIC_SEQ_CST);
  call3(FUTEX, (long)&gate.parked, FUTEX_WAKE, 1);
  while (gate.round == round) call4(FUTEX, (long)&gate.round, FUTEX_WAIT, round, 0);
}

static void release(struct plan *p, struct action *old) {
  struct action ignore = {(void *)1, 0, 0, 0};
  __atomic_add_fetch(&gate.round, 1, __ATOMIC_SEQ_CST);
  call3(FUTEX, (long)&gate.round, FUTEX_WAKE, 0x7fffffff);
  call4(SIGACTION, p->signal, (long)&ignore, 0, 8); /* drops it where it is blocked: by default it would kill */
  call4(SIGACTION, p->signal, (long)old, 0, 8);
}

/* Meanwhile other threads, or finalizers in this one, may have mapped and unmapped. */
static long unchanged(struct plan *p) {
  const char *want = p->expected, *end = want + p->expected_size;
  long got = 0, r;
  while ((r = call4(PREAD, p->maps, (long)p->buffer + got, p->size - got, got)) > 0) got += r;
  if (r < 0) return r;
  if (got == p->size) return -EAGAIN;
  for (char *line = p->buffer; line < p->buffer + got;) {
    char *c = line;
    for (int spaces = 0; spaces < 4; c++) spaces += *c == ' ';
    int inode = *c != '0';
    do {
      if (inode && (want == end || *want++ != *line)) return -EAGAIN;
    } while (*line++ != '\n');
  }
  return want == end ? 0 : -EAGAIN;
}

/* What was laid out at `to` takes the area's place, in one step. */
static long swap(struct area *a, long to) {
  long r = call3(MPROTECT, to, a->length, a->protection);
  return failed(r) ? r : call6(MREMAP, to, a->length, a->length, MREMAP_MAYMOVE | MREMAP_FIXED, a->start, 0);
}

static long lay_out(struct area *a, long flags) {
  if (!(a->protection & PROT_READ)) call3(MPROTECT, a->start, a->length, PROT_READ); /* to be read from */
  return call6(MMAP, 0, a->length, PROT_READ | PROT_WRITE, flags, a->fd, a->offset);
}

static long to_anonymous(struct plan *p, struct area *a) {
  long to = lay_out(a, MAP_PRIVATE | MAP_ANONYMOUS), done = 0, r;
  if (failed(to)) return to;
  while ((r = call4(PREAD, p->memory, to + done, a->length - done, a->start + done)) > 0) done += r;
  return swap(a, to); /* what can't be read lies after the file's end */
}

static long map_again(struct plan *p, struct area *a) {
  long to = 0, n = 0;
  if (a->flags == MAP_PRIVATE)
    for (long done = 0; done < a->length; done += n * PAGE) {
      long size = (a->length - done) / PAGE * 8;
      n = call4(PREAD, p->pagemap, (long)p->buffer, size < p->size ? size : p->size, (a->start + done) / PAGE * 8);
      if (n < 8) return n < 0 ? n : -EIO;
      n /= 8;
      for (long i = 0; i < n; i++) {
        word bits = ((word *)p->buffer)[i] >> 61; /* present, swapped, the file's */
        if (bits & 1 || !bits) continue;
        if (!to) to = lay_out(a, MAP_PRIVATE);
        if (failed(to)) return to;
        long offset = done + i * PAGE, d = to + offset, s = a->start + offset, c = PAGE / 8;
        asm volatile("rep movsq" : "+D"(d), "+S"(s), "+c"(c) : : "memory");
      }
    }
  return to ? swap(a, to) : call6(MMAP, a->start, a->length, a->protection, a->flags | MAP_FIXED, a->fd, a->offset);
}

static long move(struct plan *p) {
  long i, r;
  for (i = 0; i < p->count; i++) {
    struct area *a = &p->areas[i];
    r = a->fd < 0 ? to_anonymous(p, a) : map_again(p, a);
    if (failed(r)) return r - ((i + 1) << 12);
  }
  if (p->exe_fd < 0) return 0;
  p->mm_map[5] = call3(BRK, 0, 0, 0);
  r = call6(PRCTL, 35, 14, (long)p->mm_map, sizeof p->mm_map, 0, 0); /* PR_SET_MM, PR_SET_MM_MAP */
  return failed(r) ? r - ((i + 1) << 12) : 0;
}

asm("restorer: mov $15, %eax; syscall\n.balign 8\ngate: .long 0, 0\n.globl restorer, gate");
