/* A file system that fails, through LD_PRELOAD: whatever the processes of a run write below STORAGE_ROOT counts,
 * and from byte STORAGE_AFTER on every write, and every fsync, fails with the error number STORAGE_ERROR. The
 * write in which the byte lies is cut short before it, as a disk that fills up cuts it. With STORAGE_ERROR 0 nothing
 * fails: whoever writes then waits for ever, as on a server that has gone.
 *
 * STORAGE_COUNTER is a file of eight bytes that the processes share: how much has been written. STORAGE_AFTER
 * below zero only counts.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/uio.h>
#include <unistd.h>

static const char *root;
static long long after = -1;
static int error = EIO;
static long long *written;

__attribute__((constructor)) static void begin(void) {
  const char *counter = getenv("STORAGE_COUNTER");
  int file = counter ? open(counter, O_RDWR | O_CLOEXEC) : -1;
  if (file < 0) return;
  void *shared = mmap(NULL, sizeof *written, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  close(file);
  if (shared == MAP_FAILED) return;
  written = shared;
  root = getenv("STORAGE_ROOT");
  after = atoll(getenv("STORAGE_AFTER"));
  error = atoi(getenv("STORAGE_ERROR"));
}

static int is_ours(int file) {
  char link[32], path[4096];
  if (!written || !root) return 0;
  snprintf(link, sizeof link, "/proc/self/fd/%d", file);
  ssize_t length = readlink(link, path, sizeof path - 1);
  if (length < 0) return 0;
  path[length] = 0;
  size_t prefix = strlen(root);
  return !strncmp(path, root, prefix) && path[prefix] == '/';
}

static int fail(void) {
  while (!error) pause();
  errno = error;
  return -1;
}

/* How many of `count` bytes get through; -1 with errno set if none does. */
static ssize_t admit(int file, size_t count) {
  int before = errno;
  int ours = is_ours(file);
  errno = before;
  if (!ours || count == 0) return count;
  long long start = __sync_fetch_and_add(written, (long long)count);
  if (after < 0 || start + (long long)count <= after) return count;
  if (start < after) return after - start;
  return fail();
}

ssize_t write(int file, const void *bytes, size_t count) {
  static ssize_t (*real)(int, const void *, size_t);
  if (!real) real = dlsym(RTLD_NEXT, "write");
  ssize_t admitted = admit(file, count);
  return admitted < 0 ? -1 : real(file, bytes, admitted);
}

ssize_t pwrite64(int file, const void *bytes, size_t count, off64_t offset) {
  static ssize_t (*real)(int, const void *, size_t, off64_t);
  if (!real) real = dlsym(RTLD_NEXT, "pwrite64");
  ssize_t admitted = admit(file, count);
  return admitted < 0 ? -1 : real(file, bytes, admitted, offset);
}

ssize_t pwrite(int file, const void *bytes, size_t count, off_t offset) {
  return pwrite64(file, bytes, count, offset);
}

ssize_t writev(int file, const struct iovec *parts, int count) {
  static ssize_t (*real)(int, const struct iovec *, int);
  if (!real) real = dlsym(RTLD_NEXT, "writev");
  if (count < 1 || !is_ours(file)) return real(file, parts, count);
  return write(file, parts[0].iov_base, parts[0].iov_len); /* a short write, which writev may answer */
}

static int may_sync(int file) {
  if (after < 0 || !is_ours(file) || *written <= after) return 1;
  fail();
  return 0;
}

int fsync(int file) {
  static int (*real)(int);
  if (!real) real = dlsym(RTLD_NEXT, "fsync");
  return may_sync(file) ? real(file) : -1;
}

int fdatasync(int file) {
  static int (*real)(int);
  if (!real) real = dlsym(RTLD_NEXT, "fdatasync");
  return may_sync(file) ? real(file) : -1;
}
