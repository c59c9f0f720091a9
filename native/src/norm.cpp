// Computes partial squared norms of fixed chunks on several threads.
#include "chunks.h"
#include "hostward.h"
#include "kernels.h"
#include "task.h"

int hostward_norm_partials(const hostward_norm_item* items, int64_t n_items, int32_t grad_dtype, int64_t* sums,
                           int32_t* exponents, int32_t threads, int32_t isa) {
  using namespace hostward;
  if (threads < 1 || n_items < 0) return HOSTWARD_ERROR_ARGUMENT;
  if (grad_dtype < 0 || grad_dtype >= kDtypes) return HOSTWARD_ERROR_TYPE;
  if (n_items > 0 && (items == nullptr || sums == nullptr || exponents == nullptr)) return HOSTWARD_ERROR_NULL;
  const Kernels* kernels = find_kernels(isa);
  if (kernels == nullptr) return HOSTWARD_ERROR_ISA;
  int64_t chunks = 0;
  if (const int code = check_chunks(items, n_items, &chunks)) return code;

  const NormFunction function = kernels->norm_chunk[grad_dtype];
  const int64_t grad_bytes = grad_dtype == HOSTWARD_FP32 ? 4 : 2;
  for_chunks(items, n_items, chunks, threads,
             [&](const hostward_norm_item& item, int64_t chunk, int64_t start, int64_t length) {
               const char* grad = static_cast<const char*>(item.grad) + start * grad_bytes;
               function(grad, length, sums + chunk, exponents + chunk);
             });
  return HOSTWARD_OK;
}

int hostward_norm(const hostward_norm_task* task) {
  if (task == nullptr) return HOSTWARD_ERROR_NULL;
  const int code = hostward_norm_partials(task->items, task->n_items, task->grad_dtype, task->sums, task->exponents,
                                          task->threads, task->isa);
  return hostward::report(code, task->error);
}

void hostward_norm_host_function(void* task) { hostward_norm(static_cast<const hostward_norm_task*>(task)); }
