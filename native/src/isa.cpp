// Selects the kernels that this processor can run, and reports the version of this library.
#include "hostward.h"
#include "kernels.h"

namespace hostward {
namespace {

#if defined(__x86_64__)
bool has_avx2() {
  __builtin_cpu_init();
  return __builtin_cpu_supports("avx2");
}

bool has_avx512() {
  __builtin_cpu_init();
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}
#endif

int32_t best_isa() {
#if defined(__x86_64__)
  if (has_avx512()) return HOSTWARD_ISA_AVX512;
  if (has_avx2()) return HOSTWARD_ISA_AVX2;
#elif defined(__aarch64__)
  return HOSTWARD_ISA_NEON;
#endif
  return HOSTWARD_ISA_SCALAR;
}

}  // namespace

const Kernels* find_kernels(int32_t isa) {
  switch (isa == HOSTWARD_ISA_BEST ? best_isa() : isa) {
    case HOSTWARD_ISA_SCALAR:
      return &kScalarKernels;
#if defined(__x86_64__)
    case HOSTWARD_ISA_AVX2:
      return has_avx2() ? &kAvx2Kernels : nullptr;
    case HOSTWARD_ISA_AVX512:
      return has_avx512() ? &kAvx512Kernels : nullptr;
#elif defined(__aarch64__)
    case HOSTWARD_ISA_NEON:
      return &kNeonKernels;
#endif
    default:
      return nullptr;
  }
}

}  // namespace hostward

int32_t hostward_isa_best(void) { return hostward::best_isa(); }

int32_t hostward_isa_supported(int32_t isa) { return hostward::find_kernels(isa) != nullptr ? 1 : 0; }

int32_t hostward_abi_version(void) { return HOSTWARD_ABI_VERSION; }

int64_t hostward_task_bytes(void) { return static_cast<int64_t>(sizeof(hostward_adamw_task)); }
