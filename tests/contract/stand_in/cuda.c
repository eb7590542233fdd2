/* The calls of NVIDIA's driver that kvferry makes, with host memory in place of a GPU's, for machines that have none.
 *
 * A device address is an address of this process. A handle names a process and an address there; opened, it is an
 * address with a high bit set, which copies read through the kernel. As in the driver, no process opens its own, a
 * copy is done only when its stream has been waited for, and a thread without a context can do nothing.
 */
#define _GNU_SOURCE
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/uio.h>
#include <unistd.h>

#define FOREIGN (1ULL << 62)
#define MAX_COPIES 65536

typedef struct { char bytes[64]; } handle_t;
typedef struct { char bytes[16]; } uuid_t;
typedef struct { pid_t process; uint64_t address; } named_t;
typedef struct { uint64_t target, source; size_t bytes; } copy_t;
typedef struct { copy_t copies[MAX_COPIES]; size_t count; } stream_t;

static named_t opened[1024];
static int open_count, contexts, streams;
static _Thread_local int depth;
/* What the tests look at and change. */
int stand_in_devices = 1, stand_in_peers = 1, stand_in_fail_copies = 0, stand_in_fail_handles = 0;
int stand_in_rdma = 1, stand_in_dmabuf = 0, stand_in_flush_options = 1, stand_in_ordering = 0, stand_in_fail_flushes = 0;
int stand_in_flushes = 0, stand_in_drains = 0;

int cuInit(unsigned flags) { (void)flags; return stand_in_devices ? 0 : 100; }
int cuGetErrorString(int code, const char **text) {
  *text = code == 100 ? "no CUDA-capable device is detected" : code == 700 ? "an illegal memory access was encountered"
                                                                            : "invalid argument";
  return 0;
}
int cuDeviceGetCount(int *count) { *count = stand_in_devices; return 0; }
int cuDeviceGet(int *device, int index) { *device = index; return index < stand_in_devices ? 0 : 101; }
int cuDeviceGetUuid(uuid_t *uuid, int device) { memset(uuid, 'a' + device, sizeof *uuid); return 0; }
int cuDeviceCanAccessPeer(int *able, int device, int peer) { (void)device, (void)peer; *able = stand_in_peers; return 0; }
int cuDeviceGetAttribute(int *value, int attribute, int device) {
  (void)device;
  switch (attribute) {
  case 116: *value = stand_in_rdma; return 0;
  case 117: *value = stand_in_flush_options; return 0;
  case 118: *value = stand_in_ordering; return 0;
  case 124: *value = stand_in_dmabuf; return 0;
  default: return 1;
  }
}
int cuFlushGPUDirectRDMAWrites(int target, int scope) {
  if (depth <= 0 || target != 0 || scope != 100) return 201;
  __atomic_fetch_add(&stand_in_flushes, 1, __ATOMIC_SEQ_CST);
  return stand_in_fail_flushes ? 700 : 0;
}
int cuCtxSynchronize(void) {
  __atomic_fetch_add(&stand_in_drains, 1, __ATOMIC_SEQ_CST);
  return depth > 0 ? 0 : 201;
}
int cuDevicePrimaryCtxRetain(void **context, int device) { *context = (void *)(intptr_t)(device + 1); contexts++; return 0; }
int cuDevicePrimaryCtxRelease_v2(int device) { (void)device; contexts--; return 0; }
int cuCtxPushCurrent_v2(void *context) { (void)context; depth++; return 0; }
int cuCtxPopCurrent_v2(void **context) { *context = NULL; return depth-- > 0 ? 0 : 201; }

int cuMemGetAddressRange_v2(uint64_t *base, size_t *bytes, uint64_t address) {
  /* As if the pool lay 512 bytes behind the beginning of a larger allocation. */
  *base = address - 512, *bytes = (size_t)1 << 40;
  return depth > 0 ? 0 : 201;
}
int cuIpcGetMemHandle(handle_t *handle, uint64_t address) {
  named_t named = {getpid(), address};
  memset(handle, 0, sizeof *handle);
  memcpy(handle, &named, sizeof named);
  return depth > 0 ? (stand_in_fail_handles ? 1 : 0) : 201;
}
int cuIpcOpenMemHandle_v2(uint64_t *address, handle_t handle, unsigned flags) {
  named_t named;
  memcpy(&named, &handle, sizeof named);
  if (depth <= 0 || flags != 1 || named.process == getpid() || open_count == 1024) return 201;
  int slot = __atomic_fetch_add(&open_count, 1, __ATOMIC_SEQ_CST);
  opened[slot] = named;
  /* 47 bits of address; the slot above them. */
  *address = FOREIGN | ((uint64_t)slot << 48) | (named.address & ((1ULL << 48) - 1));
  return 0;
}
int cuIpcCloseMemHandle(uint64_t address) { return address & FOREIGN ? 0 : 1; }
int cuStreamCreate(void **stream, unsigned flags) {
  *stream = calloc(1, sizeof(stream_t));
  __atomic_fetch_add(&streams, 1, __ATOMIC_SEQ_CST);
  return depth > 0 && flags == 1 ? 0 : 201;
}
int cuStreamDestroy_v2(void *stream) { free(stream); __atomic_fetch_sub(&streams, 1, __ATOMIC_SEQ_CST); return 0; }
int cuMemcpyAsync(uint64_t target, uint64_t source, size_t bytes, void *stream) {
  stream_t *queue = stream;
  if (depth <= 0 || queue->count == MAX_COPIES) return 201;
  queue->copies[queue->count++] = (copy_t){target, source, bytes};
  return stand_in_fail_copies ? 700 : 0;
}
int cuStreamSynchronize(void *stream) {
  stream_t *queue = stream;
  int failed = 0;
  for (size_t i = 0; i < queue->count; i++) {
    copy_t *copy = queue->copies + i;
    if (!(copy->source & FOREIGN)) {
      memcpy((void *)copy->target, (void *)copy->source, copy->bytes);
      continue;
    }
    named_t *named = opened + ((copy->source & ~FOREIGN) >> 48);
    struct iovec here = {(void *)copy->target, copy->bytes};
    struct iovec there = {(void *)(copy->source & ((1ULL << 48) - 1)), copy->bytes};
    failed |= process_vm_readv(named->process, &here, 1, &there, 1, 0) != (ssize_t)copy->bytes;
  }
  queue->count = 0;
  return failed ? 700 : 0;
}
int stand_in_held(void) { return contexts * 1000 + streams; }
