/* The calls of NVIDIA's driver that kvferry and UCX's CUDA module make, with host memory in place of a GPU's, for
 * machines that have none.
 *
 * A device address is an address of this process. A handle names a process and an address there; opened, it is an
 * address with a high bit set, which copies read through the kernel. As in the driver, no process opens its own, a
 * copy is done only when its stream has been waited for, and a thread without a context can do nothing. A stream that
 * is destroyed does what it has queued all the same, some time. Which memory is a GPU's matters to UCX alone, and is told
 * by stand_in_device.
 */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
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
typedef struct stream { copy_t copies[MAX_COPIES]; size_t count, done; struct stream *next; } stream_t;
typedef struct { stream_t *stream; size_t count; } event_t;

static named_t opened[1024];
static int open_count, contexts, streams;
static _Thread_local int depth;
static stream_t *all_streams;
static pthread_mutex_t turn = PTHREAD_MUTEX_INITIALIZER;
static uint64_t device_begin, device_end;
/* What the tests look at and change. */
int stand_in_devices = 1, stand_in_peers = 1, stand_in_fail_copies = 0, stand_in_fail_handles = 0;
int stand_in_rdma = 1, stand_in_dmabuf = 0, stand_in_flush_options = 1, stand_in_ordering = 0, stand_in_fail_flushes = 0;
int stand_in_flushes = 0, stand_in_drains = 0, stand_in_copies = 0;
void stand_in_device(uint64_t address, size_t bytes) { device_begin = address, device_end = address + bytes; }

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
  case 75: *value = 9; return 0; /* compute capability */
  case 16: case 33: case 34: case 50: case 76: *value = 0; return 0;
  default: *value = 0; return 0;
  }
}
int cuFlushGPUDirectRDMAWrites(int target, int scope) {
  if (depth <= 0 || target != 0 || scope != 100) return 201;
  __atomic_fetch_add(&stand_in_flushes, 1, __ATOMIC_SEQ_CST);
  return stand_in_fail_flushes ? 700 : 0;
}
int cuDevicePrimaryCtxRetain(void **context, int device) { *context = (void *)(intptr_t)(device + 1); contexts++; return 0; }
int cuDevicePrimaryCtxRelease_v2(int device) { (void)device; contexts--; return 0; }
int cuCtxPushCurrent_v2(void *context) { (void)context; depth++; return 0; }
int cuCtxPopCurrent_v2(void **context) { if (context) *context = NULL; return depth-- > 0 ? 0 : 201; }

int cuMemGetAddressRange_v2(uint64_t *base, size_t *bytes, uint64_t address) {
  if (address >= device_begin && address < device_end) {
    if (base) *base = device_begin;
    if (bytes) *bytes = device_end - device_begin;
    return 0;
  }
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
  stream_t *made = calloc(1, sizeof(stream_t));
  pthread_mutex_lock(&turn);
  made->next = all_streams, all_streams = made, streams++;
  pthread_mutex_unlock(&turn);
  *stream = made;
  return depth > 0 && flags == 1 ? 0 : 201;
}
int cuStreamDestroy_v2(void *stream) {
  (void)stream;
  __atomic_fetch_sub(&streams, 1, __ATOMIC_SEQ_CST);
  return 0;
}
int cuMemcpyAsync(uint64_t target, uint64_t source, size_t bytes, void *stream) {
  stream_t *queue = stream;
  if (depth <= 0 || queue->count - queue->done == MAX_COPIES) return 201;
  pthread_mutex_lock(&turn);
  queue->copies[queue->count++ % MAX_COPIES] = (copy_t){target, source, bytes};
  stand_in_copies++;
  pthread_mutex_unlock(&turn);
  return stand_in_fail_copies ? 700 : 0;
}
static int carry_out(stream_t *queue, size_t count) {
  int failed = 0;
  pthread_mutex_lock(&turn);
  for (; queue->done < count; queue->done++) {
    copy_t *copy = queue->copies + queue->done % MAX_COPIES;
    if (!(copy->source & FOREIGN)) {
      memcpy((void *)copy->target, (void *)copy->source, copy->bytes);
      continue;
    }
    named_t *named = opened + ((copy->source & ~FOREIGN) >> 48);
    struct iovec here = {(void *)copy->target, copy->bytes};
    struct iovec there = {(void *)(copy->source & ((1ULL << 48) - 1)), copy->bytes};
    failed |= process_vm_readv(named->process, &here, 1, &there, 1, 0) != (ssize_t)copy->bytes;
  }
  pthread_mutex_unlock(&turn);
  return failed ? 700 : 0;
}
int cuStreamSynchronize(void *stream) { return carry_out(stream, ((stream_t *)stream)->count); }
int cuCtxSynchronize(void) {
  __atomic_fetch_add(&stand_in_drains, 1, __ATOMIC_SEQ_CST);
  for (stream_t *each = all_streams; each; each = each->next) carry_out(each, each->count);
  return depth > 0 ? 0 : 201;
}

/* What UCX asks as well. */
int cuEventCreate(void **event, unsigned flags) { (void)flags; *event = calloc(1, sizeof(event_t)); return 0; }
int cuEventDestroy_v2(void *event) { free(event); return 0; }
int cuEventRecord(void *event, void *stream) { *(event_t *)event = (event_t){stream, ((stream_t *)stream)->count}; return 0; }
int cuEventQuery(void *event) {
  return carry_out(((event_t *)event)->stream, ((event_t *)event)->count);
}
int cuCtxGetCurrent(void **context) { *context = depth > 0 ? (void *)1 : NULL; return 0; }
int cuCtxGetDevice(int *device) { *device = 0; return depth > 0 ? 0 : 201; }
int cuCtxGetId(void *context, unsigned long long *id) { (void)context; *id = 1; return 0; }
int cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *active) { (void)device; *flags = 0, *active = 1; return 0; }
int cuDeviceGetName(char *name, int room, int device) { (void)device; snprintf(name, room, "stand-in"); return 0; }
int cuDeviceTotalMem_v2(size_t *bytes, int device) { (void)device; *bytes = (size_t)1 << 34; return 0; }
int cuMemHostRegister_v2(void *memory, size_t bytes, unsigned flags) { (void)memory, (void)bytes, (void)flags; return 0; }
int cuMemHostUnregister(void *memory) { (void)memory; return 0; }
int cuPointerSetAttribute(const void *value, int attribute, uint64_t address) {
  (void)value, (void)attribute, (void)address;
  return 0;
}
int cuPointerGetAttributes(unsigned count, int *attributes, void **values, uint64_t address) {
  int inside = address >= device_begin && address < device_end;
  for (unsigned i = 0; i < count; i++) switch (attributes[i]) {
    case 1: *(void **)values[i] = inside ? (void *)1 : NULL; break;      /* the context */
    case 2: *(unsigned *)values[i] = inside ? 2 : 0; break;              /* the kind of memory: a device's */
    case 8: *(unsigned *)values[i] = 0; break;                           /* not managed */
    case 7: *(unsigned long long *)values[i] = 1; break;                 /* the allocation's number */
    case 9: *(int *)values[i] = 0; break;                                /* the device */
    case 11: *(uint64_t *)values[i] = device_begin; break;
    case 12: *(size_t *)values[i] = device_end - device_begin; break;
    }
  return 0;
}
int cuPointerGetAttribute(void *value, int attribute, uint64_t address) {
  return cuPointerGetAttributes(1, &attribute, &value, address);
}
/* What it has to find, and does without. */
#define NOT_SUPPORTED(name) int name(void) { return 801; }
NOT_SUPPORTED(cuGetProcAddress_v2) NOT_SUPPORTED(cuMemAddressFree) NOT_SUPPORTED(cuMemAddressReserve)
NOT_SUPPORTED(cuMemAllocManaged) NOT_SUPPORTED(cuMemAlloc_v2) NOT_SUPPORTED(cuMemCreate) NOT_SUPPORTED(cuMemMap)
NOT_SUPPORTED(cuMemExportToShareableHandle) NOT_SUPPORTED(cuMemFree_v2) NOT_SUPPORTED(cuMemGetAllocationGranularity)
NOT_SUPPORTED(cuMemGetAllocationPropertiesFromHandle) NOT_SUPPORTED(cuMemImportFromShareableHandle)
NOT_SUPPORTED(cuMemPoolDestroy) NOT_SUPPORTED(cuMemPoolExportPointer) NOT_SUPPORTED(cuMemPoolExportToShareableHandle)
NOT_SUPPORTED(cuMemPoolImportFromShareableHandle) NOT_SUPPORTED(cuMemPoolImportPointer) NOT_SUPPORTED(cuMemPoolSetAccess)
NOT_SUPPORTED(cuMemRangeGetAttribute) NOT_SUPPORTED(cuMemRelease) NOT_SUPPORTED(cuMemRetainAllocationHandle)
NOT_SUPPORTED(cuMemSetAccess) NOT_SUPPORTED(cuMemUnmap) NOT_SUPPORTED(cuMemcpyDtoDAsync_v2)
NOT_SUPPORTED(cuMemcpyHtoD_v2) NOT_SUPPORTED(cuStreamAddCallback)
const char *nvmlErrorString(int code) { (void)code; return "not here"; }

int stand_in_held(void) { return contexts * 1000 + streams; }
