// Runs the native library without Python, for sanitizers: every instruction set and thread count must agree, and
// scratch memory allocated to the exact size lets an address sanitizer see any access outside it.
// native/test/sanitize.sh builds it.
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include <chrono>
#include <vector>

#include "hostward.h"

namespace {

constexpr int64_t kElements = 3 * 65536 + 131;
constexpr int64_t kChunks = (kElements + 4095) / 4096;
constexpr int64_t kBlocks = (kElements + HOSTWARD_FP8_BLOCK - 1) / HOSTWARD_FP8_BLOCK;

int failures = 0;

void expect(bool condition, const char* what) {
  if (condition) return;
  ++failures;
  fprintf(stderr, "failed: %s\n", what);
}

struct State {
  std::vector<uint8_t> exp_avg, exp_avg_sq;
  std::vector<uint16_t> weight = std::vector<uint16_t>(kElements), grad = weight;
  std::vector<int16_t> remainder = std::vector<int16_t>(kElements);
  std::vector<int64_t> counts = std::vector<int64_t>(3);

  std::vector<uint8_t> exp_avg_scale = std::vector<uint8_t>(kBlocks), exp_avg_sq_scale = exp_avg_scale;

  explicit State(int32_t moment = HOSTWARD_MOMENT_FP32)
      : exp_avg(static_cast<size_t>(kElements * (4 >> moment))), exp_avg_sq(exp_avg) {
    uint32_t random = 1;
    for (int64_t i = 0; i < kElements; ++i) {
      random = random * 1664525u + 1013904223u;
      grad[i] = static_cast<uint16_t>(random >> 16);  // any bits: NaNs, infinities and denormals too
      weight[i] = static_cast<uint16_t>(0x3c00u + (random & 0x3ffu));
    }
  }

  bool operator==(const State& other) const {
    return exp_avg == other.exp_avg && exp_avg_sq == other.exp_avg_sq && weight == other.weight &&
           exp_avg_scale == other.exp_avg_scale && exp_avg_sq_scale == other.exp_avg_sq_scale &&
           remainder == other.remainder && counts == other.counts;
  }
};

// The arrays of `task` that are in one of its sets.
void use(State* own, hostward_adamw_task* task) {
  task->exp_avg = own->exp_avg.data();
  task->exp_avg_sq = own->exp_avg_sq.data();
  task->exp_avg_scale = own->exp_avg_scale.data();
  task->exp_avg_sq_scale = own->exp_avg_sq_scale.data();
  task->remainder = own->remainder.data();
}

void write_to(State* other, hostward_guess* guess, hostward_adamw_task* task) {
  task->exp_avg_out = other->exp_avg.data();
  task->exp_avg_sq_out = other->exp_avg_sq.data();
  task->exp_avg_scale_out = other->exp_avg_scale.data();
  task->exp_avg_sq_scale_out = other->exp_avg_sq_scale.data();
  task->remainder_out = other->remainder.data();
  task->guess = guess;
}

// `moment`: hostward_moment of both moments. `guessed`: each step goes from one set of the state to another, after a
// guess that was wrong.
State step(int32_t isa, int32_t threads, int32_t moment, bool guessed = false) {
  State state(moment), other(moment);
  const bool blocks = moment == HOSTWARD_MOMENT_FP8;  // ranges begin where blocks do
  const int64_t edges[4] = {0, blocks ? 128 : 7, blocks ? 70016 : 70001, kElements};
  hostward_range ranges[3];
  const hostward_hyper hyper = {1e-3, 0.1, 0.9, 0.95, 1e-8};
  const double bc1[4] = {1.0, 1.0 - 0.9, 1.0 - 0.81, 1.0 - 0.729};
  const double inv_sqrt_bc2[4] = {1.0, 4.47, 3.2, 2.6};
  const float scale = 0.5f, one = 1.0f;
  const int32_t skip = 0;
  int32_t error = 0;
  hostward_guess guess = {};
  hostward_adamw_task task = {};
  task.grad_dtype = task.weight_dtype = HOSTWARD_BF16;
  task.master_kind = HOSTWARD_MASTER_SPLIT;
  task.threads = threads;
  task.isa = isa;
  task.exp_avg_dtype = task.exp_avg_sq_dtype = moment;
  task.ranges = ranges;
  task.n_ranges = 3;
  task.hyper = &hyper;
  task.bc1 = bc1;
  task.inv_sqrt_bc2 = inv_sqrt_bc2;
  task.table_length = 4;
  task.scale = &scale;
  task.skip = &skip;
  task.error = &error;
  for (int turn = 0; turn < 3; ++turn) {
    State& own = guessed && turn % 2 == 1 ? other : state;
    State& out = &own == &state ? other : state;
    use(&own, &task);
    for (int i = 0; i < 3; ++i) {
      const int64_t first = edges[i];
      const size_t at = static_cast<size_t>(i);
      ranges[i] = {first,           edges[i + 1] - first,      own.grad.data() + first, own.weight.data() + first,
                   &own.counts[at], out.weight.data() + first, &out.counts[at]};
    }
    if (guessed) {
      write_to(&out, &guess, &task);
      task.role = HOSTWARD_ROLE_GUESS;
      task.scale = &one;
      expect(hostward_adamw_step(&task) == HOSTWARD_OK && guess.made == 1, "guess");
      task.role = HOSTWARD_ROLE_CONFIRM;
      task.scale = &scale;
    }
    expect(hostward_adamw_step(&task) == HOSTWARD_OK, "step");
  }
  if (guessed) return other;
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

// Totals and partials after two microbatches; the first reads nothing of what lies in the totals.
std::vector<int64_t> accumulated(int32_t isa, int32_t threads) {
  State state;
  std::vector<float> total(kElements, 7.0f);
  std::vector<int64_t> sums(kChunks + 1);
  std::vector<int32_t> exponents(kChunks + 1);
  int32_t error = 0;
  const int64_t middle = 17 * 4096;
  const hostward_accumulate_range ranges[2] = {
      {total.data(), state.grad.data(), middle, 0},
      {total.data() + middle, state.grad.data() + middle, kElements - middle, 17}};
  hostward_accumulate_task task = {};
  task.grad_dtype = HOSTWARD_BF16;
  task.threads = threads;
  task.isa = isa;
  task.first = 1;
  task.ranges = ranges;
  task.n_ranges = 2;
  task.error = &error;
  expect(hostward_accumulate(&task) == HOSTWARD_OK, "accumulate");
  task.first = 0;
  task.last = 1;
  hostward_accumulate_host_function(&task);
  expect(error == HOSTWARD_ERROR_NULL, "partials need memory");
  error = 0;
  task.sums = sums.data();
  task.exponents = exponents.data();
  hostward_accumulate_host_function(&task);
  expect(error == HOSTWARD_OK, "accumulate in a host function");

  const hostward_norm_item item = {total.data(), kElements, 0};
  std::vector<int64_t> again(kChunks);
  std::vector<int32_t> exponents_again(kChunks);
  const hostward_norm_task norm = {HOSTWARD_FP32,          threads, isa, 0, &item, 1, again.data(),
                                   exponents_again.data(), &error};
  hostward_norm_host_function(const_cast<hostward_norm_task*>(&norm));
  expect(error == HOSTWARD_OK && memcmp(again.data(), sums.data(), kChunks * sizeof(int64_t)) == 0 &&
             memcmp(exponents_again.data(), exponents.data(), kChunks * sizeof(int32_t)) == 0,
         "the partials are those of the totals");
  for (float value : total) {
    int32_t bits;
    memcpy(&bits, &value, sizeof bits);
    sums.push_back(bits);
  }
  sums.insert(sums.end(), exponents.begin(), exponents.end());
  return sums;
}

// A driver that counts. Its events and streams are addresses of counters; the copy is refused.
int fake_wait(void* stream, void* event, unsigned int) {
  *static_cast<int64_t*>(stream) += *static_cast<int64_t*>(event);
  return 0;
}

int fake_record(void* event, void* stream) {
  *static_cast<uint64_t*>(stream) *= 10;  // may wrap, in the many rounds below
  *static_cast<int64_t*>(event) += 1;
  return 0;
}

int fake_copy(uint64_t, uint64_t, uint64_t, void*) { return 700; }

int fake_launch(void*, void (*function)(void*), void* argument) {
  function(argument);
  return 0;
}

// A kernel without programs is refused, as the driver does; the others add their parameters to their stream.
int fake_kernel(void* function, unsigned x, unsigned y, unsigned z, unsigned threads, unsigned, unsigned,
                unsigned shared, void* stream, void** parameters, void** extra) {
  if (x == 0 || y != 1 || z != 1 || extra != nullptr) return 1;
  *static_cast<int64_t*>(stream) += *static_cast<int64_t*>(parameters[0]) + *static_cast<int32_t*>(parameters[1]);
  *static_cast<int64_t*>(function) += x * threads + shared;
  return 0;
}

void* current_context = nullptr;

int fake_get_context(void** context) {
  *context = current_context;
  return 0;
}

int fake_set_context(void* context) {
  if (context == &current_context) return 201;
  current_context = context;
  return 0;
}

void add_one(void* argument) { ++*static_cast<int64_t*>(argument); }

template <class T>
uint64_t address(T* pointer) {
  return static_cast<uint64_t>(reinterpret_cast<uintptr_t>(pointer));
}

void launches(const hostward_driver& driver) {
  int64_t lane = 0, function = 0, wide = 1LL << 40;
  int32_t narrow = 2;
  void* parameters[2] = {&wide, &narrow};
  void* const streams[1] = {&lane};
  hostward_launch launch = {&function, parameters, 3, 128, 5, 0};
  const hostward_command command = {HOSTWARD_COMMAND_KERNEL, 0, address(&launch), 0, 0};
  const hostward_command_list list = {&command, 1};
  hostward_issue_call call = {&driver, nullptr, streams, &list, 1, {}};
  expect(hostward_issue(&call) == 0, "a kernel is launched");
  expect(lane == (1LL << 40) + 2 && function == 3 * 128 + 5, "with its parameters, blocks, threads and shared bytes");
  narrow = 3;
  launch.programs = 0;
  expect(hostward_issue(&call) == 1 && call.failure.code == 1, "launches are read late");
}

template <class Enqueue>
void contexts(Enqueue enqueue) {
  int own = 0, other = 0;
  current_context = &other;
  expect(enqueue(&own) == 0 && current_context == &other, "the context of before is current again");
  current_context = &own;
  expect(enqueue(&own) == 0 && current_context == &own, "the right context stays");
  expect(enqueue(&current_context) == 1 && current_context == &own, "a context that cannot be current is refused");
}

void issue() {
  const hostward_driver driver = {reinterpret_cast<void*>(fake_wait),       reinterpret_cast<void*>(fake_record),
                                  reinterpret_cast<void*>(fake_copy),       reinterpret_cast<void*>(fake_launch),
                                  reinterpret_cast<void*>(fake_kernel),     reinterpret_cast<void*>(fake_get_context),
                                  reinterpret_cast<void*>(fake_set_context)};
  int64_t lanes[2] = {0, 0}, events[2] = {3, 4}, called = 0;
  void* const streams[2] = {&lanes[0], &lanes[1]};
  hostward_command commands[6] = {
      {HOSTWARD_COMMAND_WAIT, 1, address(&events[0]), 0, 0},
      {HOSTWARD_COMMAND_WAIT, 0, address(&events[1]), 0, 0},
      {HOSTWARD_COMMAND_COPY, 1, 1, 2, 0},
      {HOSTWARD_COMMAND_HOST, 0, address(add_one), address(&called), 0},
      {HOSTWARD_COMMAND_HOST, 1, address(add_one), address(&called), 0},
      {HOSTWARD_COMMAND_RECORD, 1, address(&events[1]), 0, 0},
  };
  const hostward_command_list lists[2] = {{commands, 4}, {commands + 4, 2}};
  hostward_issue_call call = {&driver, nullptr, streams, lists, 2, {}};
  const hostward_issue_failure& failure = call.failure;
  const auto enqueue = [&](void* context) {
    call.context = context;
    return hostward_issue(&call);
  };
  expect(enqueue(nullptr) == 0, "all commands are issued");
  expect(lanes[0] == 4 && lanes[1] == 30 && events[0] == 3 && events[1] == 5 && called == 2,
         "each on its stream, in order");
  constexpr int kRounds = 100000;
  const auto started = std::chrono::steady_clock::now();
  for (int i = 0; i < kRounds; ++i) enqueue(nullptr);
  const std::chrono::duration<double, std::nano> elapsed = std::chrono::steady_clock::now() - started;
  printf("two lists of 6 commands: %.1f ns\n", elapsed.count() / kRounds);
  commands[2].bytes = 8;
  called = 0;
  expect(enqueue(nullptr) == 1 && failure.list == 0 && failure.command == 2 && failure.code == 700 && called == 0,
         "a refused command ends the lists");
  commands[2].bytes = 0;
  commands[5].kind = 9;
  expect(enqueue(nullptr) == 1 && failure.list == 1 && failure.command == 1 && failure.code == 1,
         "an unknown kind is refused");
  commands[5] = {HOSTWARD_COMMAND_RECORD, 0, 0, 0, 0};
  lanes[0] = 7;
  expect(enqueue(nullptr) == 0 && lanes[0] == 7 + events[1], "event 0 is not recorded");
  launches(driver);
  contexts(enqueue);
}

// Masters put together, and an odd number of bytes copied, over more than one piece of 1 MiB each.
void copied(int32_t isa, int32_t threads) {
  constexpr int64_t kMasters = (1 << 18) + 77;
  constexpr int64_t kBytes = (1 << 20) + 13;
  std::vector<uint16_t> high(kMasters);
  std::vector<int16_t> low(kMasters);
  std::vector<uint8_t> plain(kBytes);
  uint32_t random = 1;
  for (int64_t i = 0; i < kBytes; ++i) {
    random = random * 1664525u + 1013904223u;
    plain[i] = static_cast<uint8_t>(random >> 24);
    if (i >= kMasters) continue;
    high[i] = static_cast<uint16_t>(random >> 16);
    low[i] = static_cast<int16_t>(random >> 8);
  }
  std::vector<uint32_t> masters(kMasters);
  std::vector<uint8_t> bytes(kBytes);
  const hostward_copy_range ranges[3] = {{bytes.data(), plain.data(), nullptr, kBytes},
                                         {masters.data(), high.data(), nullptr, 0},
                                         {masters.data(), high.data(), low.data(), 4 * kMasters}};
  expect(hostward_copy(ranges, 3, threads, isa) == HOSTWARD_OK, "copy");
  const hostward_copy_range odd = {masters.data(), high.data(), low.data(), 6};
  expect(hostward_copy(&odd, 1, threads, isa) == HOSTWARD_ERROR_ARGUMENT, "a master has four bytes");
  expect(bytes == plain, "bytes are copied");
  for (int64_t i = 0; i < kMasters; ++i) {
    const uint32_t whole = (static_cast<uint32_t>(high[i]) << 16) + static_cast<uint32_t>(low[i]);
    expect(masters[i] == whole, "masters are put together");
  }
}

}  // namespace

int main() {
  const State expected[3] = {step(HOSTWARD_ISA_SCALAR, 1, HOSTWARD_MOMENT_FP32),
                             step(HOSTWARD_ISA_SCALAR, 1, HOSTWARD_MOMENT_BF16),
                             step(HOSTWARD_ISA_SCALAR, 1, HOSTWARD_MOMENT_FP8)};
  const std::vector<int64_t> expected_norm = norm(HOSTWARD_ISA_SCALAR, 1);
  const std::vector<int64_t> expected_sums = accumulated(HOSTWARD_ISA_SCALAR, 1);
  issue();
  expect(expected[0].counts == std::vector<int64_t>(3, 3), "counts");
  for (int32_t isa = HOSTWARD_ISA_BEST; isa <= HOSTWARD_ISA_NEON; ++isa) {
    if (!hostward_isa_supported(isa)) continue;
    for (int32_t threads = 1; threads <= 8; ++threads) {
      for (const int32_t moment : {HOSTWARD_MOMENT_FP32, HOSTWARD_MOMENT_BF16, HOSTWARD_MOMENT_FP8}) {
        expect(step(isa, threads, moment) == expected[moment], "every instruction set and thread count agree");
        expect(step(isa, threads, moment, true) == expected[moment], "so do steps between two sets");
      }
      expect(norm(isa, threads) == expected_norm, "norms agree");
      expect(accumulated(isa, threads) == expected_sums, "sums agree");
      copied(isa, threads);
    }
  }
  return failures == 0 ? 0 : 1;
}
