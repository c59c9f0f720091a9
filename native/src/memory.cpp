// Places fresh memory, and measures the memory bandwidth limit that the benchmark compares the AdamW kernel with.
#include <errno.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "hostward.h"
#include "kernels.h"
#include "parallel.h"

int32_t hostward_bind_memory(void* memory, int64_t bytes, int32_t node) {
  // From linux/mempolicy.h, which is not installed everywhere.
  constexpr int kPreferred = 1;
  constexpr int32_t kMaxNodes = 1024;
  constexpr int32_t kWordBits = 8 * sizeof(unsigned long);
  if (node < 0) return 0;
  if (node >= kMaxNodes) return EINVAL;
#if defined(SYS_mbind)
  unsigned long nodes[kMaxNodes / kWordBits] = {};
  nodes[node / kWordBits] = 1ul << (node % kWordBits);
  // The kernel reads one bit less than the count that it gets.
  if (syscall(SYS_mbind, memory, bytes, kPreferred, nodes, kMaxNodes + 1ul, 0) == 0) return 0;
  return errno;
#else
  static_cast<void>(memory);
  static_cast<void>(bytes);
  return ENOSYS;
#endif
}

int hostward_first_touch(void* memory, int64_t bytes, int32_t threads) {
  using namespace hostward;
  constexpr int64_t kPageBytes = 4096;
  if (bytes < 0 || threads < 1) return HOSTWARD_ERROR_ARGUMENT;
  if (memory == nullptr && bytes > 0) return HOSTWARD_ERROR_NULL;
  // Whole huge pages of 2 MiB per piece: two threads in one huge page would wait for each other's fault.
  constexpr int64_t kPieceBytes = 16 * 1024 * 1024;
  volatile char* const base = static_cast<volatile char*>(memory);
  for_pieces((bytes + kPieceBytes - 1) / kPieceBytes, threads, [&](PieceQueue& queue) {
    for (int64_t piece = 0; queue.take(&piece);) {
      const int64_t stop = std::min(bytes, (piece + 1) * kPieceBytes);
      for (int64_t offset = piece * kPieceBytes; offset < stop; offset += kPageBytes) base[offset] = 0;
    }
  });
  return HOSTWARD_OK;
}

int hostward_bench_rmw(void* const* streams, int64_t elements, int32_t threads, int32_t isa, int32_t prefetch) {
  using namespace hostward;
  if (elements < 0 || threads < 1 || prefetch < 0 || prefetch > 1) return HOSTWARD_ERROR_ARGUMENT;
  if (streams == nullptr) return HOSTWARD_ERROR_NULL;
  for (int i = 0; i < 5; ++i) {
    if (streams[i] == nullptr) return HOSTWARD_ERROR_NULL;
  }
  const Kernels* kernels = find_kernels(isa);
  if (kernels == nullptr) return HOSTWARD_ERROR_ISA;
  for_pieces((elements + kPieceElements - 1) / kPieceElements, threads, [&](PieceQueue& queue) {
    for (int64_t piece = 0; queue.take(&piece);) {
      const int64_t start = piece * kPieceElements;
      kernels->rmw[prefetch](streams, start, std::min(kPieceElements, elements - start));
    }
  });
  return HOSTWARD_OK;
}
