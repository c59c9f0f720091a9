// Times a host function on the thread that runs it.
#include <chrono>

#include "hostward.h"

namespace {

int64_t now_ns() {
  const auto since = std::chrono::steady_clock::now().time_since_epoch();
  return std::chrono::duration_cast<std::chrono::nanoseconds>(since).count();
}

}  // namespace

void hostward_clocked_host_function(void* argument) {
  auto& call = *static_cast<hostward_clocked_call*>(argument);
  call.started_ns = now_ns();
  reinterpret_cast<void (*)(void*)>(call.function)(call.argument);
  call.ended_ns = now_ns();
}
