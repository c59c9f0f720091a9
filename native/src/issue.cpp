// Enqueues a list of driver commands in one call: what a bound operation costs is one call from Python, not one per
// wait, copy and record.
#include <stdint.h>

#include "hostward.h"

namespace hostward {
namespace {

// The driver's functions by their signatures, so that no CUDA header is needed. A result of 0 is success.
typedef int (*StreamWaitEvent)(void* stream, void* event, unsigned int flags);
typedef int (*EventRecord)(void* event, void* stream);
typedef int (*MemcpyAsync)(uint64_t destination, uint64_t source, uint64_t bytes, void* stream);
typedef void (*HostFunction)(void* argument);
typedef int (*LaunchHostFunction)(void* stream, HostFunction function, void* argument);

constexpr int kInvalidValue = 1;  // CUDA_ERROR_INVALID_VALUE

static_assert(sizeof(hostward_command) == 32, "bindings patch commands by position");

void* pointer(uint64_t address) { return reinterpret_cast<void*>(static_cast<uintptr_t>(address)); }

int issue_one(const hostward_driver& driver, void* stream, const hostward_command& command) {
  switch (command.kind) {
    case HOSTWARD_COMMAND_WAIT:
      return reinterpret_cast<StreamWaitEvent>(driver.stream_wait_event)(stream, pointer(command.a), 0);
    case HOSTWARD_COMMAND_RECORD:
      return reinterpret_cast<EventRecord>(driver.event_record)(pointer(command.a), stream);
    case HOSTWARD_COMMAND_COPY:
      if (command.bytes == 0) return 0;
      return reinterpret_cast<MemcpyAsync>(driver.memcpy_async)(command.a, command.b, command.bytes, stream);
    case HOSTWARD_COMMAND_HOST:
      return reinterpret_cast<LaunchHostFunction>(driver.launch_host_function)(
          stream, reinterpret_cast<HostFunction>(pointer(command.a)), pointer(command.b));
    default:
      return kInvalidValue;
  }
}

}  // namespace
}  // namespace hostward

int64_t hostward_issue(const hostward_driver* driver, void* const* streams, const hostward_command* commands, int64_t n,
                       int32_t* code) {
  for (int64_t i = 0; i < n; ++i) {
    const int result = hostward::issue_one(*driver, streams[commands[i].lane], commands[i]);
    if (result != 0) {
      *code = result;
      return i;
    }
  }
  return n;
}
