// Host memory copied by several threads, and fp32 masters put together from their halves on the way.
#include <string.h>

#include <algorithm>

#if defined(__x86_64__)
#include <emmintrin.h>
#endif

#include "hostward.h"
#include "kernels.h"
#include "parallel.h"

namespace hostward {
namespace {

constexpr int64_t kPieceBytes = 1024 * 1024;  // work worth a thread, and little enough to be shared out evenly
constexpr int64_t kLineBytes = 64;

// memcpy that leaves the caches alone: memory does not read a line that is written whole, which it does before a plain
// store. glibc stores so from a size on that is above a piece.
void copy_past_caches(char* into, const char* from, int64_t bytes) {
#if defined(__x86_64__)
  const int64_t misaligned = static_cast<int64_t>(reinterpret_cast<uintptr_t>(into) % kLineBytes);
  const int64_t head = std::min(bytes, (kLineBytes - misaligned) % kLineBytes);
  memcpy(into, from, static_cast<size_t>(head));
  int64_t done = head;
  for (; done + kLineBytes <= bytes; done += kLineBytes) {
    const __m128i* const line = reinterpret_cast<const __m128i*>(from + done);
    __m128i* const place = reinterpret_cast<__m128i*>(into + done);
    const __m128i a = _mm_loadu_si128(line), b = _mm_loadu_si128(line + 1);
    const __m128i c = _mm_loadu_si128(line + 2), d = _mm_loadu_si128(line + 3);
    _mm_stream_si128(place, a);
    _mm_stream_si128(place + 1, b);
    _mm_stream_si128(place + 2, c);
    _mm_stream_si128(place + 3, d);
  }
  memcpy(into + done, from + done, static_cast<size_t>(bytes - done));
#else
  memcpy(into, from, static_cast<size_t>(bytes));
#endif
}

void join_past_caches(const Kernels& kernels, const char* high, const int16_t* low, char* into, int64_t elements) {
#if defined(__x86_64__)
  constexpr int64_t kJoinedElements = 1024;  // they are still in the nearest cache when copied
  alignas(kLineBytes) float masters[kJoinedElements];
  for (int64_t i = 0; i < elements; i += kJoinedElements) {
    const int64_t count = std::min(kJoinedElements, elements - i);
    kernels.join(high + 2 * i, low + i, masters, count);
    copy_past_caches(into + 4 * i, reinterpret_cast<const char*>(masters), 4 * count);
  }
#else
  kernels.join(high, low, reinterpret_cast<float*>(into), elements);
#endif
}

// What was written past the caches is seen by other threads only in this order.
void finish_copies() {
#if defined(__x86_64__)
  _mm_sfence();
#endif
}

int64_t piece_count(const hostward_copy_range& range) { return (range.bytes + kPieceBytes - 1) / kPieceBytes; }

void copy_piece(const Kernels& kernels, const hostward_copy_range& range, int64_t start) {
  const int64_t bytes = std::min(kPieceBytes, range.bytes - start);
  char* const into = static_cast<char*>(range.into) + start;
  const char* const from = static_cast<const char*>(range.from);
  if (range.low == nullptr) {
    copy_past_caches(into, from + start, bytes);
  } else {
    join_past_caches(kernels, from + start / 2, range.low + start / 4, into, bytes / 4);
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
    finish_copies();
  });
  return HOSTWARD_OK;
}
