/* Counts what a process does to files below one folder, and kills it at a chosen point, or has its calls fail.
 *
 * Preloaded before the C library. shim_arm() starts the count; at the chosen call the process is killed
 * instead of making it, or, if the call is a write and `torn` is set, after half of it. After shim_refuse(),
 * calls of the chosen kinds fail with an error instead, from the chosen one on. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

static char folder[4096];
static size_t folder_length;
static long target, count;
static int torn, diary = -1;
static int refusal, refused_kinds;

enum { WRITES = 1, SYNCS = 2, REMOVES = 4, OPENS_TO_WRITE = 8, OPENS_TO_READ = 16 };

void shim_arm(const char *below, long at, int half, int log) {
    snprintf(folder, sizeof folder, "%s/", below);
    folder_length = strlen(folder);
    target = at;
    torn = half;
    diary = log;
    refusal = 0;
    __atomic_store_n(&count, 0, __ATOMIC_SEQ_CST);
}

/* From the `at`-th call of these kinds on, all of them fail with `error`; 0: none does, they are counted. */
void shim_refuse(const char *below, long at, int kinds, int error) {
    shim_arm(below, at, 0, -1);
    refused_kinds = kinds;
    refusal = error;
}

void shim_disarm(void) { folder_length = 0; }

long shim_count(void) { return __atomic_load_n(&count, __ATOMIC_SEQ_CST); }

void shim_note(const char *text) {
    if (diary >= 0) dprintf(diary, "ack %s\n", text);
}

static void die(void) {
    kill(getpid(), SIGKILL);
    for (;;) pause();
}

/* What becomes of a call: 0 it is made, 1 it is torn, -1 it is refused. Where it is to die it dies here. */
static int point(const char *what, const char *path, int kind) {
    if (!folder_length || !path || strncmp(path, folder, folder_length)) {
        /* The folder itself counts too. */
        if (!folder_length || !path || strlen(path) != folder_length - 1 || strncmp(path, folder, folder_length - 1))
            return 0;
    }
    if (refusal) {
        if (!(kind & refused_kinds)) return 0;
        long reached = __atomic_add_fetch(&count, 1, __ATOMIC_SEQ_CST);
        if (!target || reached < target) return 0;
        errno = refusal;
        return -1;
    }
    if (kind & (OPENS_TO_WRITE | OPENS_TO_READ)) return 0;
    long number = __atomic_add_fetch(&count, 1, __ATOMIC_SEQ_CST);
    if (diary >= 0) dprintf(diary, "%s %s\n", what, path);
    if (number != target) return 0;
    if (torn && !strcmp(what, "write")) return 1;
    die();
    return 0;
}

static int point_fd(const char *what, int fd, int kind) {
    char link[64], path[4096];
    if (!folder_length || fd == diary) return 0;
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, path, sizeof path - 1);
    if (length < 0) return 0;
    path[length] = 0;
    return point(what, path, kind);
}

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))
#define WRITE(fd, whole, half)                      \
    switch (point_fd("write", fd, WRITES)) {        \
    case -1: return -1;                             \
    case 1: half; die();                            \
    }                                               \
    return whole

ssize_t write(int fd, const void *data, size_t size) {
    WRITE(fd, REAL(write)(fd, data, size), REAL(write)(fd, data, size / 2));
}
ssize_t pwrite(int fd, const void *data, size_t size, off_t at) {
    WRITE(fd, REAL(pwrite)(fd, data, size, at), REAL(pwrite)(fd, data, size / 2, at));
}
ssize_t pwrite64(int fd, const void *data, size_t size, off64_t at) {
    WRITE(fd, REAL(pwrite64)(fd, data, size, at), REAL(pwrite64)(fd, data, size / 2, at));
}
ssize_t writev(int fd, const struct iovec *parts, int number) {
    WRITE(fd, REAL(writev)(fd, parts, number), REAL(writev)(fd, parts, number / 2));
}
int fsync(int fd) { return point_fd("fsync", fd, SYNCS) ? -1 : REAL(fsync)(fd); }
int fdatasync(int fd) { return point_fd("fsync", fd, SYNCS) ? -1 : REAL(fdatasync)(fd); }
int ftruncate(int fd, off_t size) { return point_fd("truncate", fd, WRITES) ? -1 : REAL(ftruncate)(fd, size); }
int ftruncate64(int fd, off64_t size) { return point_fd("truncate", fd, WRITES) ? -1 : REAL(ftruncate64)(fd, size); }
int rename(const char *from, const char *to) { return point("rename", to, REMOVES) ? -1 : REAL(rename)(from, to); }
int renameat(int one, const char *from, int other, const char *to) {
    return point("rename", to, REMOVES) ? -1 : REAL(renameat)(one, from, other, to);
}
int unlink(const char *path) { return point("unlink", path, REMOVES) ? -1 : REAL(unlink)(path); }
int unlinkat(int fd, const char *path, int flags) {
    return point("unlink", path, REMOVES) ? -1 : REAL(unlinkat)(fd, path, flags);
}
int mkdir(const char *path, mode_t mode) { return point("mkdir", path, WRITES) ? -1 : REAL(mkdir)(path, mode); }
int mkdirat(int fd, const char *path, mode_t mode) {
    return point("mkdir", path, WRITES) ? -1 : REAL(mkdirat)(fd, path, mode);
}

static int opens(const char *path, int flags) {
    int writes = flags & (O_WRONLY | O_RDWR | O_CREAT | O_TRUNC);
    return point("open", path, writes ? OPENS_TO_WRITE : OPENS_TO_READ);
}

#define OPEN(path, flags, call)                     \
    va_list more;                                   \
    va_start(more, flags);                          \
    int mode = va_arg(more, int);                   \
    va_end(more);                                   \
    return opens(path, flags) ? -1 : call

int open(const char *path, int flags, ...) { OPEN(path, flags, REAL(open)(path, flags, mode)); }
int open64(const char *path, int flags, ...) { OPEN(path, flags, REAL(open64)(path, flags, mode)); }
int openat(int fd, const char *path, int flags, ...) { OPEN(path, flags, REAL(openat)(fd, path, flags, mode)); }
int openat64(int fd, const char *path, int flags, ...) { OPEN(path, flags, REAL(openat64)(fd, path, flags, mode)); }
