// Functions that exist once per instruction set, and the tables through which the drivers call them.
#pragma once

#include <stdint.h>

namespace hostward {

// Constants of one range at one step, each rounded to fp32 once.
struct Constants {
  float beta1, one_minus_beta1, beta2, one_minus_beta2, eps, decay, step_size, inv_sqrt_bc2, scale;
  uint32_t step_key;  // mixed from the step, for what is rounded at random
};

// Every bit of the result depends on every bit of `x`; one to one. The constants are those of "lowbias32".
inline __attribute__((always_inline)) uint32_t mix(uint32_t x) {
  x = (x ^ (x >> 16)) * 0x7feb352du;
  x = (x ^ (x >> 15)) * 0x846ca68bu;
  return x ^ (x >> 16);
}

// First elements of one contiguous piece. `master` is the low 16 bits (remainder), the fp32 main weight, or null for
// weights that are their own main weight.
struct Piece {
  const void* grad;
  void* weight;
  void* exp_avg;
  void* exp_avg_sq;
  void* master;
  uint8_t* exp_avg_scale;  // bytes of the blocks of an FP8 moment, else null
  uint8_t* exp_avg_sq_scale;
};

constexpr int kDtypes = 3;
constexpr int kMomentDtypes = 3;  // fp32, bf16, fp8
constexpr int kLayouts = 5;       // how weight and main weight are stored
enum Layout { kFp32Weight = 0, kSplitBf16 = 1, kPlainBf16 = 2, kPlainFp16 = 3, kRoundedBf16 = 4 };

constexpr int64_t kScaled = 128;  // elements of a block of an FP8 moment
constexpr int64_t kNormChunk = 4096;
constexpr int64_t kPieceElements = 64 * 1024;  // the least work worth a thread; a multiple of kNormChunk and kScaled

typedef void (*AdamwFunction)(const Constants& constants, const Piece& piece, int64_t length);
typedef void (*NormFunction)(const void* grad, int64_t length, int64_t* sum, int32_t* exponent);
typedef void (*AccumulateFunction)(const void* grad, float* total, int64_t length);
typedef void (*JoinFunction)(const void* high, const int16_t* low, void* whole, int64_t length);
typedef void (*StreamFunction)(char* into, const char* from, int64_t bytes);
typedef void (*RmwFunction)(void* const* streams, int64_t start, int64_t length);

struct Kernels {
  AdamwFunction adamw[kDtypes][kLayouts][kMomentDtypes][kMomentDtypes];  // ..., exp_avg, exp_avg_sq
  NormFunction norm_chunk[kDtypes];
  AccumulateFunction accumulate[kDtypes][2];  // total = total + grad, total = grad
  JoinFunction join;                          // fp32 main weights of bf16 weights and low 16 bits
  StreamFunction stream;                      // memcpy that bypasses the caches; other threads see it after a fence
  RmwFunction rmw[2];                         // without and with prefetch
};

extern const Kernels kScalarKernels;
extern const Kernels kAvx2Kernels;
extern const Kernels kAvx512Kernels;
extern const Kernels kNeonKernels;

// The table for a hostward_isa value, or null where this processor or build lacks it.
const Kernels* find_kernels(int32_t isa);

}  // namespace hostward
