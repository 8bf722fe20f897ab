/* Counts what a process does to files below one folder, and kills it at a chosen point.
 *
 * Preloaded before the C library. shim_arm() starts the count; at the chosen call the process is killed
 * instead of making it, or, if the call is a write and `torn` is set, after half of it. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <signal.h>
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

void shim_arm(const char *below, long at, int half, int log) {
    snprintf(folder, sizeof folder, "%s/", below);
    folder_length = strlen(folder);
    target = at;
    torn = half;
    diary = log;
    __atomic_store_n(&count, 0, __ATOMIC_SEQ_CST);
}

long shim_count(void) { return __atomic_load_n(&count, __ATOMIC_SEQ_CST); }

void shim_note(const char *text) {
    if (diary >= 0) dprintf(diary, "ack %s\n", text);
}

static void die(void) {
    kill(getpid(), SIGKILL);
    for (;;) pause();
}

/* Whether the call must be cut short: it dies here, unless it is to be torn. */
static int point(const char *what, const char *path, int writes) {
    if (!folder_length || !path || strncmp(path, folder, folder_length)) {
        /* The folder itself counts too. */
        if (!folder_length || !path || strlen(path) != folder_length - 1 || strncmp(path, folder, folder_length - 1))
            return 0;
    }
    long number = __atomic_add_fetch(&count, 1, __ATOMIC_SEQ_CST);
    if (diary >= 0) dprintf(diary, "%s %s\n", what, path);
    if (number != target) return 0;
    if (torn && writes) return 1;
    die();
    return 0;
}

static int point_fd(const char *what, int fd, int writes) {
    char link[64], path[4096];
    if (!folder_length || fd == diary) return 0;
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, path, sizeof path - 1);
    if (length < 0) return 0;
    path[length] = 0;
    return point(what, path, writes);
}

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

ssize_t write(int fd, const void *data, size_t size) {
    if (point_fd("write", fd, 1)) { REAL(write)(fd, data, size / 2); die(); }
    return REAL(write)(fd, data, size);
}
ssize_t pwrite(int fd, const void *data, size_t size, off_t at) {
    if (point_fd("write", fd, 1)) { REAL(pwrite)(fd, data, size / 2, at); die(); }
    return REAL(pwrite)(fd, data, size, at);
}
ssize_t pwrite64(int fd, const void *data, size_t size, off64_t at) {
    if (point_fd("write", fd, 1)) { REAL(pwrite64)(fd, data, size / 2, at); die(); }
    return REAL(pwrite64)(fd, data, size, at);
}
ssize_t writev(int fd, const struct iovec *parts, int number) {
    if (point_fd("write", fd, 1)) { REAL(writev)(fd, parts, number / 2); die(); }
    return REAL(writev)(fd, parts, number);
}
int fsync(int fd) { point_fd("fsync", fd, 0); return REAL(fsync)(fd); }
int fdatasync(int fd) { point_fd("fsync", fd, 0); return REAL(fdatasync)(fd); }
int ftruncate(int fd, off_t size) { point_fd("truncate", fd, 0); return REAL(ftruncate)(fd, size); }
int ftruncate64(int fd, off64_t size) { point_fd("truncate", fd, 0); return REAL(ftruncate64)(fd, size); }
int rename(const char *from, const char *to) { point("rename", to, 0); return REAL(rename)(from, to); }
int renameat(int one, const char *from, int other, const char *to) {
    point("rename", to, 0);
    return REAL(renameat)(one, from, other, to);
}
int unlink(const char *path) { point("unlink", path, 0); return REAL(unlink)(path); }
int unlinkat(int fd, const char *path, int flags) { point("unlink", path, 0); return REAL(unlinkat)(fd, path, flags); }
int mkdir(const char *path, mode_t mode) { point("mkdir", path, 0); return REAL(mkdir)(path, mode); }
int mkdirat(int fd, const char *path, mode_t mode) { point("mkdir", path, 0); return REAL(mkdirat)(fd, path, mode); }
