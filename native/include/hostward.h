/* C interface of hostward's host kernels.
 *
 * Every function is safe to call from any thread, keeps no state between calls, prints nothing and lets no exception
 * out. Functions that return int return HOSTWARD_OK (0) or one of the error codes below. docs/exactness.md states the
 * arithmetic.
 */
#ifndef HOSTWARD_H
#define HOSTWARD_H

#include <stdint.h>

#define HOSTWARD_ABI_VERSION 11

#if defined(__GNUC__)
#define HOSTWARD_API __attribute__((visibility("default")))
#else
#define HOSTWARD_API
#endif

#ifdef __cplusplus
extern "C" {
#endif

enum hostward_error {
  HOSTWARD_OK = 0,
  HOSTWARD_ERROR_NULL = 1,     /* a pointer that the task needs is null */
  HOSTWARD_ERROR_ARGUMENT = 2, /* a negative length, offset, count or chunk, masters cut off, or less than one thread */
  HOSTWARD_ERROR_TYPE = 3,  /* an unknown dtype or master kind, or a weight dtype that the master kind does not allow */
  HOSTWARD_ERROR_ISA = 4,   /* an instruction set that this processor or this build lacks */
  HOSTWARD_ERROR_TABLE = 5, /* a step count past the end of tables that have not reached 1 */
  HOSTWARD_ERROR_ORDER = 6  /* a piece of work waits for one that cannot start before it */
};

enum hostward_dtype { HOSTWARD_FP32 = 0, HOSTWARD_BF16 = 1, HOSTWARD_FP16 = 2 };

/* FP8: a byte per element, and one per block of HOSTWARD_FP8_BLOCK elements of the range (docs/exactness.md). */
enum hostward_moment { HOSTWARD_MOMENT_FP32 = 0, HOSTWARD_MOMENT_BF16 = 1, HOSTWARD_MOMENT_FP8 = 2 };

#define HOSTWARD_FP8_BLOCK 128

enum hostward_master_kind {
  HOSTWARD_MASTER_WEIGHT = 0, /* the weight itself: fp32, or bf16 that is rounded at random */
  HOSTWARD_MASTER_SPLIT = 1,  /* bf16 weight and int16 remainder (low 16 bits) together are the fp32 main weight */
  HOSTWARD_MASTER_PLAIN = 2   /* fp32 main weight besides a 16-bit weight */
};

enum hostward_isa {
  HOSTWARD_ISA_BEST = 0,
  HOSTWARD_ISA_SCALAR = 1,
  HOSTWARD_ISA_AVX2 = 2,
  HOSTWARD_ISA_AVX512 = 3,
  HOSTWARD_ISA_NEON = 4
};

typedef struct {
  int64_t offset;   /* first element in exp_avg, exp_avg_sq, remainder and master; with an FP8 moment whole blocks */
  int64_t length;   /* elements */
  const void* grad; /* first element of this range */
  void* weight;     /* first element of this range */
  int64_t* count;   /* finished steps of this range; no two ranges of a task share one */
  void* weight_out; /* as `weight`, in the other set; null where the task has no other set */
  int64_t* count_out;
} hostward_range;

typedef struct {
  double lr, weight_decay, beta1, beta2, eps;
} hostward_hyper;

/* What a guess is made with, and whether the next one is worth making. All zero before the first step. */
typedef struct {
  int32_t made;   /* 1: the other set holds the step that `scale` and `hyper` make of the gradients */
  int32_t likely; /* 1: the last step that was confirmed had the scale and hyper of its guess, made or not */
  float scale;
  int32_t reserved;
  hostward_hyper hyper;
} hostward_guess;

enum hostward_role {
  HOSTWARD_ROLE_STEP = 0,   /* one step; if there is an other set, it is written there, and the task's own stays */
  HOSTWARD_ROLE_GUESS = 1,  /* before `scale` and `skip` of the step are known, which are not read: the step is made in
                             * the other set as if it did not clip, if that is likely. `guess` records with what */
  HOSTWARD_ROLE_CONFIRM = 2 /* the step of a guess: nothing is done if `guess` was made with its scale and hyper. Either
                             * way the other set holds the step afterwards; with `skip` a copy of the task's own.
                             * `guess` then says whether the next guess is likely to be right */
};

/* One AdamW step over disjoint ranges. The memory at every pointer is read when the task runs. */
typedef struct {
  int32_t grad_dtype, weight_dtype;        /* hostward_dtype */
  int32_t master_kind;                     /* hostward_master_kind */
  int32_t threads, isa;                    /* at most this many threads, the calling one included; hostward_isa */
  int32_t exp_avg_dtype, exp_avg_sq_dtype; /* hostward_moment */
  int32_t role;                            /* hostward_role */
  void* exp_avg;
  void* exp_avg_sq;
  uint8_t* exp_avg_scale;    /* HOSTWARD_MOMENT_FP8 only: a byte per block, that of element i at i / 128 */
  uint8_t* exp_avg_sq_scale; /* the same */
  int16_t* remainder;        /* HOSTWARD_MASTER_SPLIT only */
  float* master;             /* HOSTWARD_MASTER_PLAIN only */
  const hostward_range* ranges;
  int64_t n_ranges;
  const hostward_hyper* hyper;
  const double* bc1;          /* bc1[t] = 1 - beta1**t */
  const double* inv_sqrt_bc2; /* inv_sqrt_bc2[t] = 1 / sqrt(1 - beta2**t) */
  int64_t table_length;       /* entries of each table, entry 0 unused */
  const float* scale;         /* factor of every gradient; null means 1 */
  const int32_t* skip;        /* non-zero: write nothing, advance no count; null means 0 */
  int32_t* error;             /* first non-zero code stays; may be null */
  void* exp_avg_out;          /* the other set, which overlaps nothing else: all null, or all that the task's own has */
  void* exp_avg_sq_out;
  uint8_t* exp_avg_scale_out;
  uint8_t* exp_avg_sq_scale_out;
  int16_t* remainder_out;
  float* master_out;
  hostward_guess* guess; /* HOSTWARD_ROLE_GUESS and HOSTWARD_ROLE_CONFIRM only, which need an other set */
} hostward_adamw_task;

/* Runs the task. On an error nothing has been written except task->error and task->guess->made. */
HOSTWARD_API int hostward_adamw_step(const hostward_adamw_task* task);

/* The same with the signature of a CUDA host function; `task` is a hostward_adamw_task. */
HOSTWARD_API void hostward_adamw_host_function(void* task);

typedef struct {
  const void* grad;    /* flat gradient of one parameter */
  int64_t length;      /* elements */
  int64_t first_chunk; /* index of its first chunk in the outputs */
} hostward_norm_item;

/* Partial squared norms of chunks of 4,096 elements: exponents[k] is the smallest E with |g| < 2**E in chunk k
 * (INT32_MIN: all zero, INT32_MAX: a NaN or an infinity), sums[k] the sum of floor((g * 2**-E)**2 * 2**50). */
HOSTWARD_API int hostward_norm_partials(const hostward_norm_item* items, int64_t n_items, int32_t grad_dtype,
                                        int64_t* sums, int32_t* exponents, int32_t threads, int32_t isa);

/* The arguments of hostward_norm_partials. The memory at every pointer is read when the task runs. */
typedef struct {
  int32_t grad_dtype, threads, isa, reserved;
  const hostward_norm_item* items;
  int64_t n_items;
  int64_t* sums;
  int32_t* exponents;
  int32_t* error; /* first non-zero code stays; may be null */
} hostward_norm_task;

/* Runs the task. On an error nothing has been written except task->error. */
HOSTWARD_API int hostward_norm(const hostward_norm_task* task);

/* The same with the signature of a CUDA host function; `task` is a hostward_norm_task. */
HOSTWARD_API void hostward_norm_host_function(void* task);

typedef struct {
  float* total;        /* first element of this range; overlaps no gradient and no other range */
  const void* grad;    /* first element of this range */
  int64_t length;      /* elements */
  int64_t first_chunk; /* index of its first chunk in the outputs */
} hostward_accumulate_range;

/* total = grad (first) or total + grad, each element one fp32 addition, any NaN stored as 0x7fc00000. With `last` also
 * the partials of the new totals, as hostward_norm_partials gives them. */
typedef struct {
  int32_t grad_dtype, threads, isa;
  int32_t first, last; /* 0 or not */
  int32_t reserved;
  const hostward_accumulate_range* ranges;
  int64_t n_ranges;
  int64_t* sums;      /* `last` only */
  int32_t* exponents; /* `last` only */
  int32_t* error;     /* first non-zero code stays; may be null */
} hostward_accumulate_task;

/* Runs the task. On an error nothing has been written except task->error. */
HOSTWARD_API int hostward_accumulate(const hostward_accumulate_task* task);

/* The same with the signature of a CUDA host function; `task` is a hostward_accumulate_task. */
HOSTWARD_API void hostward_accumulate_host_function(void* task);

typedef struct {
  void* into;         /* first byte written; the ranges of a call overlap nowhere in what they write and read */
  const void* from;   /* first byte read */
  const int16_t* low; /* null: bytes are copied. Else the low 16 bits of fp32 main weights whose upper halves are in
                       * `from`; the fp32 main weights are written (HOSTWARD_MASTER_SPLIT) */
  int64_t bytes;      /* written; with `low` a multiple of 4 */
} hostward_copy_range;

/* Copies host memory on up to `threads` threads, the calling one included. On an error nothing has been written. */
HOSTWARD_API int hostward_copy(const hostward_copy_range* ranges, int64_t n_ranges, int32_t threads, int32_t isa);

/* A host function whose start and end are timed. CUDA's timed events around a host function block the caller of
 * cuLaunchHostFunc until the stream has reached it. */
typedef struct {
  void* function; /* a C function like hostward_adamw_host_function */
  void* argument;
  int64_t started_ns, ended_ns; /* written by the call: CLOCK_MONOTONIC */
} hostward_clocked_call;

/* Calls call->function(call->argument); `call` is a hostward_clocked_call. */
HOSTWARD_API void hostward_clocked_host_function(void* call);

#define HOSTWARD_LANES 4

/* Pieces of work on lanes that run concurrently, in one or more rounds. Each lane does its work in order; a piece
 * starts when its predecessor has ended, and so have all that it waits for. */
typedef struct {
  int64_t works, rounds;             /* pieces of a round */
  const double* seconds;             /* [works]: of each piece when no other lane is busy */
  const int32_t* orders;             /* [works]: numbers of pieces by lane, those of each in order */
  int64_t lane_ends[HOSTWARD_LANES]; /* ends of the lanes' parts of `orders` */
  const int64_t* wait_ends;          /* [works]: ends of the pieces' parts of `waits` */
  const int32_t* waits;              /* numbers of pieces; negative ones count from the end of the round before, and
                                      * in the first round there is nothing to wait for */
  const double* speeds;              /* [8][HOSTWARD_LANES]: of each lane, 1 alone, by which of the last three are
                                      * busy, the first of these with bit 0 */
} hostward_lanes;

/* Simulates all rounds from an idle machine. `starts` and `ends` are [rounds * works], in seconds. Speeds change only
 * when a piece starts or ends, so the time from one such moment to the next is exact. After HOSTWARD_ERROR_ORDER what
 * never ends has an infinite end; other errors write nothing. */
HOSTWARD_API int hostward_simulate_lanes(const hostward_lanes* lanes, double* starts, double* ends);

enum hostward_command_kind {
  HOSTWARD_COMMAND_WAIT = 0,   /* the stream waits for event a */
  HOSTWARD_COMMAND_RECORD = 1, /* event a is recorded on the stream; nothing is called for event 0 */
  HOSTWARD_COMMAND_COPY = 2,   /* `bytes` bytes to address a from address b; nothing is called for 0 bytes */
  HOSTWARD_COMMAND_HOST = 3,   /* the stream calls the C function a with argument b */
  HOSTWARD_COMMAND_KERNEL = 4  /* the kernel launch at address a, a hostward_launch, which is read when it is issued */
};

typedef struct {
  int32_t kind; /* hostward_command_kind */
  int32_t lane; /* index into `streams` */
  uint64_t a, b, bytes;
} hostward_command;

typedef struct {
  void* function;    /* CUfunction of the context that is current */
  void** parameters; /* address of each parameter's value, in the kernel's order */
  uint32_t programs; /* blocks, along x */
  uint32_t threads;  /* of a block, along x */
  uint32_t shared_bytes;
  uint32_t reserved;
} hostward_launch;

typedef struct {
  const hostward_command* commands;
  int64_t n;
} hostward_command_list;

/* Addresses of the driver's functions cuStreamWaitEvent, cuEventRecord, cuMemcpyAsync, cuLaunchHostFunc,
 * cuLaunchKernel, cuCtxGetCurrent and cuCtxSetCurrent, or of functions like them. */
typedef struct {
  void* stream_wait_event;
  void* event_record;
  void* memcpy_async;
  void* launch_host_function;
  void* launch_kernel;
  void* context_get_current;
  void* context_set_current;
} hostward_driver;

typedef struct {
  int64_t list;    /* which list; -1: the context could not be made current, and nothing has been enqueued */
  int64_t command; /* which of its commands */
  int32_t code;    /* the driver's result */
  int32_t reserved;
} hostward_issue_failure;

/* The argument of hostward_issue, made once for lists that are enqueued again and again. */
typedef struct {
  const hostward_driver* driver;
  void* context; /* current on this thread while commands are enqueued; 0: whatever is */
  void* const* streams;
  const hostward_command_list* lists;
  int64_t n_lists;
  hostward_issue_failure failure; /* written if the call fails */
} hostward_issue_call;

/* Enqueues the commands of all lists in order, each on streams[lane]. Returns 0, or 1 with the first failed command in
 * call->failure; commands after it are not enqueued. No pointer but `context` may be null. An unknown kind fails with
 * CUDA_ERROR_INVALID_VALUE (1). Parameters of kernels are copied before this returns; the caller must keep the memory
 * that they and the other commands point to until the streams have run the commands. */
HOSTWARD_API int hostward_issue(hostward_issue_call* call);

/* Asks for the pages of [memory, memory + bytes), which is page-aligned and not touched yet, to come from NUMA node
 * `node` while that has free pages; -1 means any. Returns 0 or the errno of a failure, which changes nothing.
 */
HOSTWARD_API int32_t hostward_bind_memory(void* memory, int64_t bytes, int32_t node);

/* Writes a zero byte into every 4,096-byte page, so that each thread's share is placed near it. */
HOSTWARD_API int hostward_first_touch(void* memory, int64_t bytes, int32_t threads);

/* Memory bandwidth limit for benchmarks: reads and writes the arrays of a split bf16 AdamW step (26 bytes per element)
 * with trivial integer arithmetic. streams: exp_avg, exp_avg_sq (4 bytes), weight, remainder, grad (2 bytes); grad is
 * only read.
 * prefetch: 0 none, 1 as the AdamW kernel does. */
HOSTWARD_API int hostward_bench_rmw(void* const* streams, int64_t elements, int32_t threads, int32_t isa,
                                    int32_t prefetch);

HOSTWARD_API int32_t hostward_isa_best(void);
HOSTWARD_API int32_t hostward_isa_supported(int32_t isa); /* 1 or 0 */
HOSTWARD_API int32_t hostward_abi_version(void);
HOSTWARD_API int64_t hostward_task_bytes(void); /* sizeof(hostward_adamw_task), checked by bindings */

#ifdef __cplusplus
}
#endif
#endif
