// Makes one AdamW step over the ranges of a task: checks, constants, distribution over threads.
#include "hostward.h"
#include "kernels.h"
#include "parallel.h"
#include "task.h"

namespace hostward {
namespace {

int find_layout(const hostward_adamw_task& task, Layout* layout) {
  const int32_t weight = task.weight_dtype;
  if (task.master_kind == HOSTWARD_MASTER_WEIGHT && weight == HOSTWARD_FP32) {
    *layout = kFp32Weight;
  } else if (task.master_kind == HOSTWARD_MASTER_WEIGHT && weight == HOSTWARD_BF16) {
    *layout = kRoundedBf16;
  } else if (task.master_kind == HOSTWARD_MASTER_SPLIT && weight == HOSTWARD_BF16) {
    *layout = kSplitBf16;
  } else if (task.master_kind == HOSTWARD_MASTER_PLAIN && weight == HOSTWARD_BF16) {
    *layout = kPlainBf16;
  } else if (task.master_kind == HOSTWARD_MASTER_PLAIN && weight == HOSTWARD_FP16) {
    *layout = kPlainFp16;
  } else {
    return HOSTWARD_ERROR_TYPE;
  }
  return HOSTWARD_OK;
}

// Returns the table entry for the next step of a range, or -1 where the tables are too short for it.
int64_t table_entry(const hostward_adamw_task& task, const hostward_range& range) {
  const int64_t last = task.table_length - 1;
  const int64_t step = *range.count + 1;
  if (step <= last) return step;
  return last >= 1 && task.bc1[last] == 1.0 && task.inv_sqrt_bc2[last] == 1.0 ? last : -1;
}

bool has_blocks(const hostward_adamw_task& task) {
  return task.exp_avg_dtype == HOSTWARD_MOMENT_FP8 || task.exp_avg_sq_dtype == HOSTWARD_MOMENT_FP8;
}

int64_t range_length(const hostward_range& range) { return range.length; }

// Elements up to the end of the last block. Work that is distributed by them cuts no block in two.
int64_t whole_blocks(const hostward_range& range) { return (range.length + kScaled - 1) / kScaled * kScaled; }

int check_ranges(const hostward_adamw_task& task, int64_t* elements) {
  *elements = 0;
  for (int64_t i = 0; i < task.n_ranges; ++i) {
    const hostward_range& range = task.ranges[i];
    if (range.count == nullptr) return HOSTWARD_ERROR_NULL;
    if (range.length < 0 || range.offset < 0 || *range.count < 0) return HOSTWARD_ERROR_ARGUMENT;
    if (has_blocks(task) && range.offset % kScaled != 0) return HOSTWARD_ERROR_ARGUMENT;
    if (range.length > 0 && (range.grad == nullptr || range.weight == nullptr)) return HOSTWARD_ERROR_NULL;
    if (table_entry(task, range) < 0) return HOSTWARD_ERROR_TABLE;
    *elements += has_blocks(task) ? whole_blocks(range) : range.length;
  }
  return HOSTWARD_OK;
}

int check_task(const hostward_adamw_task& task, Layout* layout, int64_t* elements) {
  if (task.threads < 1 || task.n_ranges < 0 || task.table_length < 1) return HOSTWARD_ERROR_ARGUMENT;
  if (task.grad_dtype < 0 || task.grad_dtype >= kDtypes) return HOSTWARD_ERROR_TYPE;
  for (const int32_t moment : {task.exp_avg_dtype, task.exp_avg_sq_dtype}) {
    if (moment < 0 || moment >= kMomentDtypes) return HOSTWARD_ERROR_TYPE;
  }
  if (task.exp_avg_dtype == HOSTWARD_MOMENT_FP8 && task.exp_avg_scale == nullptr) return HOSTWARD_ERROR_NULL;
  if (task.exp_avg_sq_dtype == HOSTWARD_MOMENT_FP8 && task.exp_avg_sq_scale == nullptr) return HOSTWARD_ERROR_NULL;
  if (const int code = find_layout(task, layout)) return code;
  if (task.n_ranges > 0 && task.ranges == nullptr) return HOSTWARD_ERROR_NULL;
  if (task.hyper == nullptr || task.bc1 == nullptr || task.inv_sqrt_bc2 == nullptr) return HOSTWARD_ERROR_NULL;
  if (const int code = check_ranges(task, elements)) return code;
  if (*elements > 0) {
    if (task.exp_avg == nullptr || task.exp_avg_sq == nullptr) return HOSTWARD_ERROR_NULL;
    if (task.master_kind == HOSTWARD_MASTER_SPLIT && task.remainder == nullptr) return HOSTWARD_ERROR_NULL;
    if (task.master_kind == HOSTWARD_MASTER_PLAIN && task.master == nullptr) return HOSTWARD_ERROR_NULL;
  }
  return HOSTWARD_OK;
}

Constants make_constants(const hostward_adamw_task& task, const hostward_range& range, float scale) {
  const hostward_hyper& hyper = *task.hyper;
  const int64_t entry = table_entry(task, range);
  Constants c;
  c.beta1 = static_cast<float>(hyper.beta1);
  c.one_minus_beta1 = static_cast<float>(1.0 - hyper.beta1);
  c.beta2 = static_cast<float>(hyper.beta2);
  c.one_minus_beta2 = static_cast<float>(1.0 - hyper.beta2);
  c.eps = static_cast<float>(hyper.eps);
  c.decay = static_cast<float>(1.0 - hyper.lr * hyper.weight_decay);
  c.step_size = static_cast<float>(hyper.lr / task.bc1[entry]);
  c.inv_sqrt_bc2 = static_cast<float>(task.inv_sqrt_bc2[entry]);
  c.scale = scale;
  c.step_key = mix(static_cast<uint32_t>(*range.count + 1));
  return c;
}

constexpr int64_t kMomentBytes[kMomentDtypes] = {4, 2, 1};

const char* at(const void* base, int64_t element, int64_t element_bytes) {
  return static_cast<const char*>(base) + element * element_bytes;
}

char* at(void* base, int64_t element, int64_t element_bytes) {
  return static_cast<char*>(base) + element * element_bytes;
}

uint8_t* scale_at(uint8_t* scales, int64_t element) { return scales == nullptr ? nullptr : scales + element / kScaled; }

int run_task(const hostward_adamw_task& task) {
  if (task.skip != nullptr && *task.skip != 0) return HOSTWARD_OK;
  const Kernels* kernels = find_kernels(task.isa);
  if (kernels == nullptr) return HOSTWARD_ERROR_ISA;
  Layout layout = kFp32Weight;
  int64_t elements = 0;
  if (const int code = check_task(task, &layout, &elements)) return code;

  const AdamwFunction function = kernels->adamw[task.grad_dtype][layout][task.exp_avg_dtype][task.exp_avg_sq_dtype];
  const int64_t grad_bytes = task.grad_dtype == HOSTWARD_FP32 ? 4 : 2;
  const int64_t weight_bytes = layout == kFp32Weight ? 4 : 2;
  const int64_t first_bytes = kMomentBytes[task.exp_avg_dtype];
  const int64_t second_bytes = kMomentBytes[task.exp_avg_sq_dtype];
  const float scale = task.scale != nullptr ? *task.scale : 1.0f;
  const int64_t pieces = (elements + kPieceElements - 1) / kPieceElements;
  for_pieces(pieces, task.threads, [&](PieceQueue& queue) {
    SegmentCursor<hostward_range> cursor(task.ranges, task.n_ranges, has_blocks(task) ? whole_blocks : range_length);
    for (int64_t piece = 0; queue.take(&piece);) {
      const int64_t stop = std::min(elements, (piece + 1) * kPieceElements);
      cursor.visit(piece * kPieceElements, stop, [&](const hostward_range& range, int64_t from, int64_t to) {
        const int64_t state = range.offset + from;
        void* master = nullptr;
        if (task.master_kind == HOSTWARD_MASTER_SPLIT) master = task.remainder + state;
        if (task.master_kind == HOSTWARD_MASTER_PLAIN) master = task.master + state;
        const Piece part = {at(range.grad, from, grad_bytes),
                            at(range.weight, from, weight_bytes),
                            at(task.exp_avg, state, first_bytes),
                            at(task.exp_avg_sq, state, second_bytes),
                            master,
                            scale_at(task.exp_avg_scale, state),
                            scale_at(task.exp_avg_sq_scale, state)};
        function(make_constants(task, range, scale), part, std::min(to, range.length) - from);
      });
    }
  });
  for (int64_t i = 0; i < task.n_ranges; ++i) ++*task.ranges[i].count;
  return HOSTWARD_OK;
}

}  // namespace
}  // namespace hostward

int hostward_adamw_step(const hostward_adamw_task* task) {
  if (task == nullptr) return HOSTWARD_ERROR_NULL;
  int code = HOSTWARD_OK;
  {
    // The constants are formed on this thread too, before the work is distributed.
    const hostward::DefaultFloatEnvironment environment;
    code = hostward::run_task(*task);
  }
  return hostward::report(code, task->error);
}

void hostward_adamw_host_function(void* task) { hostward_adamw_step(static_cast<const hostward_adamw_task*>(task)); }
