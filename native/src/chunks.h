// Distributes the norm's chunks of flat arrays over threads.
#pragma once

#include <stdint.h>

#include <algorithm>

#include "hostward.h"
#include "kernels.h"
#include "parallel.h"

namespace hostward {

template <class Item>
int64_t chunk_count(const Item& item) {
  return (item.length + kNormChunk - 1) / kNormChunk;
}

// Adds up the chunks of all items. Items have `length`, `grad` and `first_chunk`.
template <class Item>
int check_chunks(const Item* items, int64_t n_items, int64_t* chunks) {
  *chunks = 0;
  for (int64_t i = 0; i < n_items; ++i) {
    if (items[i].length < 0 || items[i].first_chunk < 0) return HOSTWARD_ERROR_ARGUMENT;
    if (items[i].length > 0 && items[i].grad == nullptr) return HOSTWARD_ERROR_NULL;
    *chunks += chunk_count(items[i]);
  }
  return HOSTWARD_OK;
}

// Calls visit(item, chunk, start, length) once for every chunk: its index in the outputs, and its first element and
// number of elements in the item.
template <class Item, class Visit>
void for_chunks(const Item* items, int64_t n_items, int64_t chunks, int32_t threads, const Visit& visit) {
  constexpr int64_t kChunksPerPiece = kPieceElements / kNormChunk;
  for_pieces((chunks + kChunksPerPiece - 1) / kChunksPerPiece, threads, [&](PieceQueue& queue) {
    SegmentCursor<Item> cursor(items, n_items, chunk_count<Item>);
    for (int64_t piece = 0; queue.take(&piece);) {
      const int64_t stop = std::min(chunks, (piece + 1) * kChunksPerPiece);
      cursor.visit(piece * kChunksPerPiece, stop, [&](const Item& item, int64_t from, int64_t to) {
        for (int64_t chunk = from; chunk < to; ++chunk) {
          const int64_t start = chunk * kNormChunk;
          visit(item, item.first_chunk + chunk, start, std::min(kNormChunk, item.length - start));
        }
      });
    }
  });
}

}  // namespace hostward
