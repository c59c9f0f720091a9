// Runs the native library without Python, for sanitizers: every instruction set and thread count must agree, and
// scratch memory allocated to the exact size lets an address sanitizer see any access outside it.
// native/test/sanitize.sh builds it.
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include <vector>

#include "hostward.h"

namespace {

constexpr int64_t kElements = 3 * 65536 + 131;
constexpr int64_t kChunks = (kElements + 4095) / 4096;

int failures = 0;

void expect(bool condition, const char* what) {
  if (condition) return;
  ++failures;
  fprintf(stderr, "failed: %s\n", what);
}

struct State {
  std::vector<float> exp_avg = std::vector<float>(kElements), exp_avg_sq = exp_avg;
  std::vector<uint16_t> weight = std::vector<uint16_t>(kElements), grad = weight;
  std::vector<int16_t> remainder = std::vector<int16_t>(kElements);
  std::vector<int64_t> counts = std::vector<int64_t>(3);

  State() {
    uint32_t random = 1;
    for (int64_t i = 0; i < kElements; ++i) {
      random = random * 1664525u + 1013904223u;
      grad[i] = static_cast<uint16_t>(random >> 16);  // any bits: NaNs, infinities and denormals too
      weight[i] = static_cast<uint16_t>(0x3c00u + (random & 0x3ffu));
    }
  }

  bool operator==(const State& other) const {
    return memcmp(exp_avg.data(), other.exp_avg.data(), kElements * sizeof(float)) == 0 &&
           memcmp(exp_avg_sq.data(), other.exp_avg_sq.data(), kElements * sizeof(float)) == 0 &&
           weight == other.weight && remainder == other.remainder && counts == other.counts;
  }
};

State step(int32_t isa, int32_t threads) {
  State state;
  const int64_t edges[4] = {0, 7, 70001, kElements};
  hostward_range ranges[3];
  for (int i = 0; i < 3; ++i) {
    ranges[i] = {edges[i], edges[i + 1] - edges[i], state.grad.data() + edges[i], state.weight.data() + edges[i],
                 &state.counts[static_cast<size_t>(i)]};
  }
  const hostward_hyper hyper = {1e-3, 0.1, 0.9, 0.95, 1e-8};
  const double bc1[4] = {1.0, 1.0 - 0.9, 1.0 - 0.81, 1.0 - 0.729};
  const double inv_sqrt_bc2[4] = {1.0, 4.47, 3.2, 2.6};
  const float scale = 0.5f;
  const int32_t skip = 0;
  int32_t error = 0;
  hostward_adamw_task task = {};
  task.grad_dtype = task.weight_dtype = HOSTWARD_BF16;
  task.master_kind = HOSTWARD_MASTER_SPLIT;
  task.threads = threads;
  task.isa = isa;
  task.exp_avg = state.exp_avg.data();
  task.exp_avg_sq = state.exp_avg_sq.data();
  task.remainder = state.remainder.data();
  task.ranges = ranges;
  task.n_ranges = 3;
  task.hyper = &hyper;
  task.bc1 = bc1;
  task.inv_sqrt_bc2 = inv_sqrt_bc2;
  task.table_length = 4;
  task.scale = &scale;
  task.skip = &skip;
  task.error = &error;
  for (int i = 0; i < 3; ++i) expect(hostward_adamw_step(&task) == HOSTWARD_OK, "step");
  hostward_adamw_host_function(&task);
  expect(error == HOSTWARD_ERROR_TABLE, "a step past the tables is an error");
  return state;
}

std::vector<int64_t> norm(int32_t isa, int32_t threads) {
  State state;
  for (auto& bits : state.grad) bits &= 0xbfffu;  // finite
  const hostward_norm_item item = {state.grad.data(), kElements, 0};
  std::vector<int64_t> sums(kChunks);
  std::vector<int32_t> exponents(kChunks);
  expect(hostward_norm_partials(&item, 1, HOSTWARD_BF16, sums.data(), exponents.data(), threads, isa) == HOSTWARD_OK,
         "norm");
  for (int32_t exponent : exponents) sums.push_back(exponent);
  return sums;
}

}  // namespace

int main() {
  const State expected = step(HOSTWARD_ISA_SCALAR, 1);
  const std::vector<int64_t> expected_norm = norm(HOSTWARD_ISA_SCALAR, 1);
  expect(expected.counts == std::vector<int64_t>(3, 3), "counts");
  for (int32_t isa = HOSTWARD_ISA_BEST; isa <= HOSTWARD_ISA_NEON; ++isa) {
    if (!hostward_isa_supported(isa)) continue;
    for (int32_t threads = 1; threads <= 8; ++threads) {
      expect(step(isa, threads) == expected, "every instruction set and thread count agree");
      expect(norm(isa, threads) == expected_norm, "norms agree");
    }
  }
  return failures == 0 ? 0 : 1;
}
