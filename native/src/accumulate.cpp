// Accumulates gradients of microbatches in fp32, and makes the norm partials of the totals while they are in the cache.
#include "chunks.h"
#include "hostward.h"
#include "kernels.h"
#include "task.h"

namespace hostward {
namespace {

int run_task(const hostward_accumulate_task& task) {
  if (task.threads < 1 || task.n_ranges < 0) return HOSTWARD_ERROR_ARGUMENT;
  if (task.grad_dtype < 0 || task.grad_dtype >= kDtypes) return HOSTWARD_ERROR_TYPE;
  if (task.n_ranges > 0 && task.ranges == nullptr) return HOSTWARD_ERROR_NULL;
  const Kernels* kernels = find_kernels(task.isa);
  if (kernels == nullptr) return HOSTWARD_ERROR_ISA;
  int64_t chunks = 0;
  if (const int code = check_chunks(task.ranges, task.n_ranges, &chunks)) return code;
  for (int64_t i = 0; i < task.n_ranges; ++i) {
    if (task.ranges[i].length > 0 && task.ranges[i].total == nullptr) return HOSTWARD_ERROR_NULL;
  }
  if (task.last != 0 && chunks > 0 && (task.sums == nullptr || task.exponents == nullptr)) return HOSTWARD_ERROR_NULL;

  const AccumulateFunction accumulate = kernels->accumulate[task.grad_dtype][task.first != 0 ? 1 : 0];
  const NormFunction norm_chunk = kernels->norm_chunk[HOSTWARD_FP32];
  const int64_t grad_bytes = task.grad_dtype == HOSTWARD_FP32 ? 4 : 2;
  for_chunks(task.ranges, task.n_ranges, chunks, task.threads,
             [&](const hostward_accumulate_range& range, int64_t chunk, int64_t start, int64_t length) {
               float* total = range.total + start;
               accumulate(static_cast<const char*>(range.grad) + start * grad_bytes, total, length);
               if (task.last != 0) norm_chunk(total, length, task.sums + chunk, task.exponents + chunk);
             });
  return HOSTWARD_OK;
}

}  // namespace
}  // namespace hostward

int hostward_accumulate(const hostward_accumulate_task* task) {
  if (task == nullptr) return HOSTWARD_ERROR_NULL;
  return hostward::report(hostward::run_task(*task), task->error);
}

void hostward_accumulate_host_function(void* task) {
  hostward_accumulate(static_cast<const hostward_accumulate_task*>(task));
}
