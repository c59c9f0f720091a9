// Enqueues lists of driver commands in one call: a step costs a few calls from Python, not one per wait, copy, kernel
// and record.
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
typedef int (*LaunchKernel)(void* function, unsigned int grid_x, unsigned int grid_y, unsigned int grid_z,
                            unsigned int block_x, unsigned int block_y, unsigned int block_z, unsigned int shared_bytes,
                            void* stream, void** parameters, void** extra);
typedef int (*ContextGetCurrent)(void** context);
typedef int (*ContextSetCurrent)(void* context);

constexpr int kInvalidValue = 1;  // CUDA_ERROR_INVALID_VALUE

static_assert(sizeof(hostward_command) == 32, "bindings patch commands by position");

void* pointer(uint64_t address) { return reinterpret_cast<void*>(static_cast<uintptr_t>(address)); }

int issue_one(const hostward_driver& driver, void* stream, const hostward_command& command) {
  switch (command.kind) {
    case HOSTWARD_COMMAND_WAIT:
      return reinterpret_cast<StreamWaitEvent>(driver.stream_wait_event)(stream, pointer(command.a), 0);
    case HOSTWARD_COMMAND_RECORD:
      if (command.a == 0) return 0;
      return reinterpret_cast<EventRecord>(driver.event_record)(pointer(command.a), stream);
    case HOSTWARD_COMMAND_COPY:
      if (command.bytes == 0) return 0;
      return reinterpret_cast<MemcpyAsync>(driver.memcpy_async)(command.a, command.b, command.bytes, stream);
    case HOSTWARD_COMMAND_HOST:
      return reinterpret_cast<LaunchHostFunction>(driver.launch_host_function)(
          stream, reinterpret_cast<HostFunction>(pointer(command.a)), pointer(command.b));
    case HOSTWARD_COMMAND_KERNEL: {
      const auto& launch = *static_cast<const hostward_launch*>(pointer(command.a));
      return reinterpret_cast<LaunchKernel>(driver.launch_kernel)(launch.function, launch.programs, 1, 1,
                                                                  launch.threads, 1, 1, launch.shared_bytes, stream,
                                                                  launch.parameters, nullptr);
    }
    default:
      return kInvalidValue;
  }
}

// Issues all commands; on a failure reports the command and the driver's result.
bool issue_all(hostward_issue_call& call) {
  for (int64_t k = 0; k < call.n_lists; ++k) {
    const hostward_command_list& list = call.lists[k];
    for (int64_t i = 0; i < list.n; ++i) {
      const hostward_command& command = list.commands[i];
      const int result = issue_one(*call.driver, call.streams[command.lane], command);
      if (result != 0) {
        call.failure = {k, i, result, 0};
        return false;
      }
    }
  }
  return true;
}

}  // namespace
}  // namespace hostward

int hostward_issue(hostward_issue_call* call) {
  const hostward_driver& driver = *call->driver;
  // This thread may have used another device last, or none.
  void* before = call->context;
  if (call->context != nullptr) {
    int result = reinterpret_cast<hostward::ContextGetCurrent>(driver.context_get_current)(&before);
    if (result == 0 && before != call->context)
      result = reinterpret_cast<hostward::ContextSetCurrent>(driver.context_set_current)(call->context);
    if (result != 0) {
      call->failure = {-1, 0, result, 0};
      return 1;
    }
  }
  const bool all = hostward::issue_all(*call);
  if (before != call->context) reinterpret_cast<hostward::ContextSetCurrent>(driver.context_set_current)(before);
  return all ? 0 : 1;
}
