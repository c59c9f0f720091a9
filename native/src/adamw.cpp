// Makes one AdamW step over the ranges of a task: checks, constants, distribution over threads; in place, or into
// another set of the state on the guess that it will not clip.
#include <cstring>

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

// Guesses and their confirmations leave the task's own set as it is, and write to the other one.
bool has_other_set(const hostward_adamw_task& task) { return task.role != HOSTWARD_ROLE_STEP; }

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
    if (has_other_set(task) && (range.count_out == nullptr || (range.length > 0 && range.weight_out == nullptr))) {
      return HOSTWARD_ERROR_NULL;
    }
    if (table_entry(task, range) < 0) return HOSTWARD_ERROR_TABLE;
    *elements += has_blocks(task) ? whole_blocks(range) : range.length;
  }
  return HOSTWARD_OK;
}

int check_other_set(const hostward_adamw_task& task) {
  if (!has_other_set(task)) return HOSTWARD_OK;
  if (task.guess == nullptr || task.exp_avg_out == nullptr || task.exp_avg_sq_out == nullptr) {
    return HOSTWARD_ERROR_NULL;
  }
  if (task.exp_avg_dtype == HOSTWARD_MOMENT_FP8 && task.exp_avg_scale_out == nullptr) return HOSTWARD_ERROR_NULL;
  if (task.exp_avg_sq_dtype == HOSTWARD_MOMENT_FP8 && task.exp_avg_sq_scale_out == nullptr) return HOSTWARD_ERROR_NULL;
  if (task.master_kind == HOSTWARD_MASTER_SPLIT && task.remainder_out == nullptr) return HOSTWARD_ERROR_NULL;
  if (task.master_kind == HOSTWARD_MASTER_PLAIN && task.master_out == nullptr) return HOSTWARD_ERROR_NULL;
  return HOSTWARD_OK;
}

int check_task(const hostward_adamw_task& task, Layout* layout, int64_t* elements) {
  if (task.role < HOSTWARD_ROLE_STEP || task.role > HOSTWARD_ROLE_CONFIRM) return HOSTWARD_ERROR_ARGUMENT;
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
  return check_other_set(task);
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
constexpr int64_t kMasterBytes[] = {0, 2, 4};  // by hostward_master_kind

const char* at(const void* base, int64_t element, int64_t element_bytes) {
  return static_cast<const char*>(base) + element * element_bytes;
}

char* at(void* base, int64_t element, int64_t element_bytes) {
  return static_cast<char*>(base) + element * element_bytes;
}

uint8_t* scale_at(uint8_t* scales, int64_t element) { return scales == nullptr ? nullptr : scales + element / kScaled; }

void* master_of(const hostward_adamw_task& task) {
  return task.master_kind == HOSTWARD_MASTER_SPLIT ? static_cast<void*>(task.remainder) : task.master;
}

struct Sizes {
  int64_t grad, weight, exp_avg, exp_avg_sq, master;  // bytes of an element; master: 0 where there is none
};

Sizes sizes_of(const hostward_adamw_task& task) {
  return {task.grad_dtype == HOSTWARD_FP32 ? 4 : 2, task.weight_dtype == HOSTWARD_FP32 ? 4 : 2,
          kMomentBytes[task.exp_avg_dtype], kMomentBytes[task.exp_avg_sq_dtype], kMasterBytes[task.master_kind]};
}

// Elements from `from` on of a range, in the task's own set.
Piece own_piece(const hostward_adamw_task& task, const Sizes& sizes, const hostward_range& range, int64_t from) {
  const int64_t state = range.offset + from;
  return {at(range.grad, from, sizes.grad),
          at(range.weight, from, sizes.weight),
          at(task.exp_avg, state, sizes.exp_avg),
          at(task.exp_avg_sq, state, sizes.exp_avg_sq),
          sizes.master == 0 ? nullptr : at(master_of(task), state, sizes.master),
          scale_at(task.exp_avg_scale, state),
          scale_at(task.exp_avg_sq_scale, state)};
}

Piece other_piece(const hostward_adamw_task& task, const Sizes& sizes, const hostward_range& range, int64_t from) {
  const int64_t state = range.offset + from;
  void* const master =
      task.master_kind == HOSTWARD_MASTER_SPLIT ? static_cast<void*>(task.remainder_out) : task.master_out;
  return {at(range.grad, from, sizes.grad),
          at(range.weight_out, from, sizes.weight),
          at(task.exp_avg_out, state, sizes.exp_avg),
          at(task.exp_avg_sq_out, state, sizes.exp_avg_sq),
          sizes.master == 0 ? nullptr : at(master, state, sizes.master),
          scale_at(task.exp_avg_scale_out, state),
          scale_at(task.exp_avg_sq_scale_out, state)};
}

// An array of the state in both sets.
struct Array {
  const char* from;
  char* into;
  int64_t size;  // bytes of `kScaled` elements
};

constexpr int kArrays = 6;

// Lists what is stored of the state, in the order of `Staged`; absent arrays have size 0.
void list_arrays(const Piece& own, const Piece& other, const Sizes& sizes, Array* arrays) {
  const auto array = [](const void* from, void* into, int64_t size) {
    return Array{static_cast<const char*>(from), static_cast<char*>(into), into == nullptr ? 0 : size};
  };
  arrays[0] = array(own.weight, other.weight, kScaled * sizes.weight);
  arrays[1] = array(own.exp_avg, other.exp_avg, kScaled * sizes.exp_avg);
  arrays[2] = array(own.exp_avg_sq, other.exp_avg_sq, kScaled * sizes.exp_avg_sq);
  arrays[3] = array(own.master, other.master, kScaled * sizes.master);
  arrays[4] = array(own.exp_avg_scale, other.exp_avg_scale, 1);
  arrays[5] = array(own.exp_avg_sq_scale, other.exp_avg_sq_scale, 1);
}

// Bytes of the first `elements` elements. Only the bytes of blocks are rounded up: others are whole elements.
int64_t bytes_of(const Array& array, int64_t elements) { return (array.size * elements + kScaled - 1) / kScaled; }

constexpr int64_t kStaged = 256;       // elements; a multiple of kScaled
constexpr int64_t kStagedAhead = 768;  // elements from those that are staged to those that are prefetched

// One step from one set to the other: over a copy in the caches, which then bypasses them. So each byte is read or
// written once, and the arithmetic is that of the step in place.
void step_between(const Kernels& kernels, AdamwFunction function, const Constants& constants, const Sizes& sizes,
                  const Piece& own, const Array* arrays, int64_t length) {
  alignas(64) char staged[kArrays][4 * kStaged];
  for (int64_t i = 0; i < length; i += kStaged) {
    const int64_t count = std::min(kStaged, length - i);
    for (int k = 0; k < kArrays; ++k) {
      if (arrays[k].size == 0) continue;
      const char* const from = arrays[k].from + bytes_of(arrays[k], i);
      std::memcpy(staged[k], from, static_cast<size_t>(bytes_of(arrays[k], count)));
      const char* const ahead = from + bytes_of(arrays[k], kStagedAhead);
      for (int64_t line = 0; line < bytes_of(arrays[k], kStaged); line += 64) __builtin_prefetch(ahead + line);
    }
    const auto scale = [&](int k) { return arrays[k].size == 0 ? nullptr : reinterpret_cast<uint8_t*>(staged[k]); };
    function(constants,
             {at(own.grad, i, sizes.grad), staged[0], staged[1], staged[2], arrays[3].size == 0 ? nullptr : staged[3],
              scale(4), scale(5)},
             count);
    for (int k = 0; k < kArrays; ++k) {
      if (arrays[k].size != 0)
        kernels.stream(arrays[k].into + bytes_of(arrays[k], i), staged[k], bytes_of(arrays[k], count));
    }
  }
}

// Whether a guess of this step is right, or would have been.
bool is_right(const hostward_adamw_task& task, float scale, bool skips) {
  const hostward_guess& guess = *task.guess;
  return !skips && std::memcmp(&guess.scale, &scale, sizeof scale) == 0 &&
         std::memcmp(&guess.hyper, task.hyper, sizeof guess.hyper) == 0;
}

// Calls visit(range, from, length) for all elements of the task, on its threads.
template <class Visit>
void for_elements(const hostward_adamw_task& task, int64_t elements, const Visit& visit) {
  const int64_t pieces = (elements + kPieceElements - 1) / kPieceElements;
  for_pieces(pieces, task.threads, [&](PieceQueue& queue) {
    SegmentCursor<hostward_range> cursor(task.ranges, task.n_ranges, has_blocks(task) ? whole_blocks : range_length);
    for (int64_t piece = 0; queue.take(&piece);) {
      const int64_t stop = std::min(elements, (piece + 1) * kPieceElements);
      cursor.visit(piece * kPieceElements, stop, [&](const hostward_range& range, int64_t from, int64_t to) {
        visit(range, from, std::min(to, range.length) - from);
      });
    }
    finish_streams();
  });
}

// Makes the other set of what the task's own set becomes: by a step or, if that is skipped, by a copy.
void fill_other_set(const hostward_adamw_task& task, const Kernels& kernels, AdamwFunction function, int64_t elements,
                    float scale, bool skips) {
  const Sizes sizes = sizes_of(task);
  for_elements(task, elements, [&](const hostward_range& range, int64_t from, int64_t length) {
    Array arrays[kArrays];
    const Piece own = own_piece(task, sizes, range, from);
    list_arrays(own, other_piece(task, sizes, range, from), sizes, arrays);
    if (skips) {
      for (const Array& array : arrays) {
        if (array.size != 0) kernels.stream(array.into, array.from, bytes_of(array, length));
      }
    } else {
      step_between(kernels, function, make_constants(task, range, scale), sizes, own, arrays, length);
    }
  });
  for (int64_t i = 0; i < task.n_ranges; ++i) *task.ranges[i].count_out = *task.ranges[i].count + (skips ? 0 : 1);
}

int run_task(const hostward_adamw_task& task) {
  const bool skips = task.skip != nullptr && *task.skip != 0;
  if (!has_other_set(task) && skips) return HOSTWARD_OK;
  const Kernels* kernels = find_kernels(task.isa);
  if (kernels == nullptr) return HOSTWARD_ERROR_ISA;
  Layout layout = kFp32Weight;
  int64_t elements = 0;
  if (const int code = check_task(task, &layout, &elements)) return code;

  const AdamwFunction function = kernels->adamw[task.grad_dtype][layout][task.exp_avg_dtype][task.exp_avg_sq_dtype];
  const float scale = task.scale != nullptr ? *task.scale : 1.0f;
  if (task.role == HOSTWARD_ROLE_GUESS) {
    const int32_t likely = task.guess->likely;
    if (likely != 0) fill_other_set(task, *kernels, function, elements, 1.0f, false);
    *task.guess = {likely, likely, 1.0f, 0, *task.hyper};
    return HOSTWARD_OK;
  }
  if (task.role == HOSTWARD_ROLE_CONFIRM) {
    const bool right = is_right(task, scale, skips);
    if (!right || task.guess->made == 0) fill_other_set(task, *kernels, function, elements, scale, skips);
    task.guess->likely = right ? 1 : 0;
    return HOSTWARD_OK;
  }
  const Sizes sizes = sizes_of(task);
  for_elements(task, elements, [&](const hostward_range& range, int64_t from, int64_t length) {
    function(make_constants(task, range, scale), own_piece(task, sizes, range, from), length);
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
    if (task->role == HOSTWARD_ROLE_GUESS && task->guess != nullptr) task->guess->made = 0;
    code = hostward::run_task(*task);
    if (task->role == HOSTWARD_ROLE_CONFIRM && task->guess != nullptr) task->guess->made = 0;
  }
  return hostward::report(code, task->error);
}

void hostward_adamw_host_function(void* task) { hostward_adamw_step(static_cast<const hostward_adamw_task*>(task)); }
