// Partial squared norms of fixed chunks, shared out over threads.
#include "hostward.h"
#include "kernels.h"
#include "parallel.h"

namespace hostward {
namespace {

constexpr int64_t kChunksPerPiece = kPieceElements / kNormChunk;

int64_t chunk_count(const hostward_norm_item& item) { return (item.length + kNormChunk - 1) / kNormChunk; }

int check_items(const hostward_norm_item* items, int64_t n_items, int64_t* chunks) {
  *chunks = 0;
  for (int64_t i = 0; i < n_items; ++i) {
    if (items[i].length < 0 || items[i].first_chunk < 0) return HOSTWARD_ERROR_ARGUMENT;
    if (items[i].length > 0 && items[i].grad == nullptr) return HOSTWARD_ERROR_NULL;
    *chunks += chunk_count(items[i]);
  }
  return HOSTWARD_OK;
}

}  // namespace
}  // namespace hostward

int hostward_norm_partials(const hostward_norm_item* items, int64_t n_items, int32_t grad_dtype, int64_t* sums,
                           int32_t* exponents, int32_t threads, int32_t isa) {
  using namespace hostward;
  if (threads < 1 || n_items < 0) return HOSTWARD_ERROR_ARGUMENT;
  if (grad_dtype < 0 || grad_dtype >= kDtypes) return HOSTWARD_ERROR_TYPE;
  if (n_items > 0 && (items == nullptr || sums == nullptr || exponents == nullptr)) return HOSTWARD_ERROR_NULL;
  const Kernels* kernels = find_kernels(isa);
  if (kernels == nullptr) return HOSTWARD_ERROR_ISA;
  int64_t chunks = 0;
  if (const int code = check_items(items, n_items, &chunks)) return code;

  const NormFunction function = kernels->norm_chunk[grad_dtype];
  const int64_t grad_bytes = grad_dtype == HOSTWARD_FP32 ? 4 : 2;
  for_pieces((chunks + kChunksPerPiece - 1) / kChunksPerPiece, threads, [&](PieceQueue& queue) {
    SegmentCursor<hostward_norm_item> cursor(items, n_items, chunk_count);
    for (int64_t piece = 0; queue.take(&piece);) {
      const int64_t stop = std::min(chunks, (piece + 1) * kChunksPerPiece);
      cursor.visit(piece * kChunksPerPiece, stop, [&](const hostward_norm_item& item, int64_t from, int64_t to) {
        for (int64_t chunk = from; chunk < to; ++chunk) {
          const int64_t start = chunk * kNormChunk;
          const char* grad = static_cast<const char*>(item.grad) + start * grad_bytes;
          const int64_t length = std::min(kNormChunk, item.length - start);
          function(grad, length, sums + item.first_chunk + chunk, exponents + item.first_chunk + chunk);
        }
      });
    }
  });
  return HOSTWARD_OK;
}
