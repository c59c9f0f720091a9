// Copies host memory by several threads, and joins fp32 main weights from their halves. Copies are not read again soon,
// so stores bypass the caches, and a cache line that is written in full is not read from memory first.
#include <algorithm>

#include "hostward.h"
#include "kernels.h"
#include "parallel.h"

namespace hostward {
namespace {

constexpr int64_t kPieceBytes = 1024 * 1024;  // enough work for a thread, and small enough to balance threads

void join(const Kernels& kernels, const char* high, const int16_t* low, char* into, int64_t elements) {
  constexpr int64_t kJoinedElements = 1024;  // still in the L1 cache when copied
  alignas(64) float masters[kJoinedElements];
  for (int64_t i = 0; i < elements; i += kJoinedElements) {
    const int64_t count = std::min(kJoinedElements, elements - i);
    kernels.join(high + 2 * i, low + i, masters, count);
    kernels.stream(into + 4 * i, reinterpret_cast<const char*>(masters), 4 * count);
  }
}

int64_t piece_count(const hostward_copy_range& range) { return (range.bytes + kPieceBytes - 1) / kPieceBytes; }

void copy_piece(const Kernels& kernels, const hostward_copy_range& range, int64_t start) {
  const int64_t bytes = std::min(kPieceBytes, range.bytes - start);
  char* const into = static_cast<char*>(range.into) + start;
  const char* const from = static_cast<const char*>(range.from);
  if (range.low == nullptr) {
    kernels.stream(into, from + start, bytes);
  } else {
    join(kernels, from + start / 2, range.low + start / 4, into, bytes / 4);
  }
}

}  // namespace
}  // namespace hostward

int hostward_copy(const hostward_copy_range* ranges, int64_t n_ranges, int32_t threads, int32_t isa) {
  using namespace hostward;
  if (threads < 1 || n_ranges < 0) return HOSTWARD_ERROR_ARGUMENT;
  if (n_ranges > 0 && ranges == nullptr) return HOSTWARD_ERROR_NULL;
  const Kernels* kernels = find_kernels(isa);
  if (kernels == nullptr) return HOSTWARD_ERROR_ISA;
  int64_t pieces = 0;
  for (int64_t i = 0; i < n_ranges; ++i) {
    if (ranges[i].bytes < 0 || (ranges[i].low != nullptr && ranges[i].bytes % 4 != 0)) return HOSTWARD_ERROR_ARGUMENT;
    if (ranges[i].bytes > 0 && (ranges[i].into == nullptr || ranges[i].from == nullptr)) return HOSTWARD_ERROR_NULL;
    pieces += piece_count(ranges[i]);
  }
  for_pieces(pieces, threads, [&](PieceQueue& queue) {
    SegmentCursor<hostward_copy_range> cursor(ranges, n_ranges, piece_count);
    for (int64_t piece = 0; queue.take(&piece);) {
      cursor.visit(piece, piece + 1, [&](const hostward_copy_range& range, int64_t from, int64_t) {
        copy_piece(*kernels, range, from * kPieceBytes);
      });
    }
    finish_streams();
  });
  return HOSTWARD_OK;
}
