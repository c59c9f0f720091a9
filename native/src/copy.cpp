// Host memory copied by several threads, and fp32 masters put together from their halves on the way.
#include <string.h>

#include <algorithm>

#include "hostward.h"
#include "kernels.h"
#include "parallel.h"

namespace hostward {
namespace {

constexpr int64_t kPieceBytes = 1024 * 1024;  // work worth a thread, and little enough to be shared out evenly

int64_t piece_count(const hostward_copy_range& range) { return (range.bytes + kPieceBytes - 1) / kPieceBytes; }

void copy_piece(const Kernels& kernels, const hostward_copy_range& range, int64_t start) {
  const int64_t bytes = std::min(kPieceBytes, range.bytes - start);
  char* const into = static_cast<char*>(range.into) + start;
  const char* const from = static_cast<const char*>(range.from);
  if (range.low == nullptr) {
    memcpy(into, from + start, static_cast<size_t>(bytes));
  } else {
    kernels.join(from + start / 2, range.low + start / 4, into, bytes / 4);
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
  });
  return HOSTWARD_OK;
}
