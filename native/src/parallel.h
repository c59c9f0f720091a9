// Distributes work over short-lived threads. No thread outlives the call: a pool would have to survive fork and library
// unloading.
#pragma once

#include <stdint.h>

#include <algorithm>
#include <atomic>
#include <system_error>
#include <thread>

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace hostward {

// Sets default rounding and denormals for the life of the object: the caller may have set flush-to-zero.
class DefaultFloatEnvironment {
 public:
#if defined(__x86_64__)
  DefaultFloatEnvironment() : saved_(_mm_getcsr()) { _mm_setcsr(0x1f80); }
  ~DefaultFloatEnvironment() { _mm_setcsr(saved_); }

 private:
  unsigned int saved_;
#elif defined(__aarch64__)
  DefaultFloatEnvironment() {
    asm volatile("mrs %0, fpcr" : "=r"(saved_));
    asm volatile("msr fpcr, %0" : : "r"(static_cast<uint64_t>(0)));
  }
  ~DefaultFloatEnvironment() { asm volatile("msr fpcr, %0" : : "r"(saved_)); }

 private:
  uint64_t saved_;
#endif
 public:
  DefaultFloatEnvironment(const DefaultFloatEnvironment&) = delete;
  DefaultFloatEnvironment& operator=(const DefaultFloatEnvironment&) = delete;
};

// Other threads see stores that bypass the caches (Kernels::stream) only after this fence.
inline void finish_streams() {
#if defined(__x86_64__)
  _mm_sfence();
#endif
}

constexpr int kMaxThreads = 256;

// Hands out the numbers of pieces, each once, in rising order within a thread.
class PieceQueue {
 public:
  explicit PieceQueue(int64_t pieces) : pieces_(pieces) {}
  bool take(int64_t* piece) {
    *piece = next_.fetch_add(1, std::memory_order_relaxed);
    return *piece < pieces_;
  }

 private:
  const int64_t pieces_;
  std::atomic<int64_t> next_{0};
};

// Calls body(queue) on up to `threads` threads, the calling one included. `body` must take pieces until none is left,
// so that fewer threads than wanted (the system may refuse some) still do all the work.
template <class Body>
void for_pieces(int64_t pieces, int32_t threads, const Body& body) {
  PieceQueue queue(pieces);
  const int64_t useful = std::min<int64_t>(std::min<int64_t>(threads, kMaxThreads), pieces);
  std::thread workers[kMaxThreads];
  int64_t started = 0;
  try {
    for (; started < useful - 1; ++started) {
      workers[started] = std::thread([&queue, &body] {
        const DefaultFloatEnvironment environment;
        body(queue);
      });
    }
  } catch (const std::system_error&) {
    // The threads that did start, and this one, finish the queue.
  }
  {
    const DefaultFloatEnvironment environment;
    body(queue);
  }
  for (int64_t i = 0; i < started; ++i) workers[i].join();
}

// Walks through segments laid end to end, in rising order; length_of(segment) says how many items a segment holds.
template <class Segment>
class SegmentCursor {
 public:
  SegmentCursor(const Segment* segments, int64_t n_segments, int64_t (*length_of)(const Segment&))
      : segments_(segments), n_segments_(n_segments), length_of_(length_of) {}

  // Calls visit(segment, from, to) for each segment's part of [start, stop), which counts through all segments
  // together.
  template <class Visit>
  void visit(int64_t start, int64_t stop, const Visit& visit) {
    while (index_ < n_segments_) {
      const int64_t length = length_of_(segments_[index_]);
      const int64_t from = std::max<int64_t>(start - base_, 0);
      const int64_t to = std::min<int64_t>(stop - base_, length);
      if (from < to) visit(segments_[index_], from, to);
      if (stop < base_ + length) return;  // the next piece begins in this segment
      base_ += length;
      ++index_;
    }
  }

 private:
  const Segment* segments_;
  int64_t n_segments_;
  int64_t (*length_of_)(const Segment&);
  int64_t index_ = 0;
  int64_t base_ = 0;  // items before segment index_
};

}  // namespace hostward
